"""What the configuration says about who is notified."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from policies.fields import KEPT_IN_FILE, Cron, Duration, LocalPath, Section, Words, has_password, optional, written

_LONGEST_ADDRESS = 320
"""Characters: 64, the @, and 255."""


def _smtp(text: str) -> str:
    if has_password(text):
        raise ValueError(KEPT_IN_FILE.format("password_file"))
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in {"smtp", "smtps"} or not parts.hostname or port == 0:
        raise ValueError("must be smtp://HOST:PORT or smtps://HOST:PORT")
    return text


_WORD = r"""[^\s"(),:;<>@\[\\\]]+"""
_ADDRESS = re.compile(rf"(?!.*=\?){_WORD}@(?:{_WORD}|\[(?:IPv6:)?[0-9A-Fa-f:.]+\])")


def _address(text: str) -> str:
    """Only what a mail's header can hold as it is, without quotes: nothing else is used, and much is mistyped."""
    points = text.startswith(".") or text.endswith(".") or any(bad in text for bad in ("..", ".@", "@."))
    if points or len(text) > _LONGEST_ADDRESS or not text.isprintable() or not _ADDRESS.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is not a mail address: write name@example.com")
    return text


SmtpUrl = Annotated[str, AfterValidator(_smtp), WithJsonSchema({"type": "string", "format": "URL"})]
MailAddress = Annotated[str, AfterValidator(_address), WithJsonSchema({"type": "string", "format": "mail address"})]


class Email(Section):
    """Where mail about failures and silence goes."""

    refused: ClassVar = {"password": KEPT_IN_FILE.format("password_file")}

    smtp: SmtpUrl = Field(description="The mail server.", examples=["smtp://localhost:25"])
    sender: MailAddress = Field(alias="from", description="Sender address.", examples=["backupd@example.com"])
    to: tuple[MailAddress, ...] = Field(
        min_length=1, description="Recipient addresses.", examples=[["dba@example.com"]]
    )
    user: Words | None = optional(description="The account at the mail server.", examples=["backupd"])
    password_file: LocalPath | None = optional(
        description="A file whose first line is its password.", examples=["/etc/backupd/smtp-password"]
    )
    starttls: Literal["auto", "required", "never"] = Field(
        "auto",
        description="Use of STARTTLS on smtp:// connections. `auto`: if the mail server offers it. With `user`, "
        "STARTTLS is always required.",
        examples=["required"],
    )
    ca_file: LocalPath | None = optional(
        description="PEM file with the CA certificates to trust instead of the system's.",
        examples=["/etc/backupd/mail-ca.pem"],
    )
    timeout: Duration = written("30s", description="How long the mail server may take for one answer.")

    @model_validator(mode="after")
    def _whole(self) -> Email:
        if (self.user is None) is not (self.password_file is None):
            raise ValueError("user and password_file belong together: give both or none")
        if self.user is not None and self.starttls == "never" and self.smtp.startswith("smtp:"):
            raise ValueError("a password is not sent in the clear: starttls may not be never where there is a user")
        return self


class Heartbeat(Section):
    """A URL of a watcher elsewhere that is asked for regularly, and that notifies somebody when that stops: a service
    that is dead, or a machine without power, sends no mail."""

    refused: ClassVar = {
        "url": "such addresses are secrets: put it into a file that only the service can read (mode "
        "0600) and name that as url_file"
    }

    url_file: LocalPath = Field(
        description="A file whose first line is the URL.", examples=["/etc/backupd/heartbeat-url"]
    )
    every: Duration = written("60s", description="How often.")


class Report(Section):
    """A regular mail of what is recoverable, and when that was last proved."""

    schedule: Cron = written(
        "0 7 * * *",
        examples=["0 7 * * mon"],
        description="When, as cron has it, in the time zone of the configuration.",
    )


class Alerts(Section):
    """Who is notified when something fails, or silently does not happen, and when it is well again."""

    email: Email | None = optional(description="By mail.")
    channels_file: LocalPath | None = optional(
        examples=["/etc/backupd/channels"],
        description="A file of other channels (chats, webhooks), one URL of the library Apprise a line. They hold "
        "secrets: only the service may read it. Needs `pip install 'backupd[channels]'`.",
    )
    heartbeat: Heartbeat | None = optional(
        description="URL that backupd pings regularly, so that an external monitor detects a dead service."
    )
    reminders: tuple[Duration, ...] = written(
        ("4h", "1d", "3d"),
        examples=[["4h", "1d", "3d"]],
        description=(
            "Intervals between reminders of an open incident; the last one repeats. An empty list disables reminders."
        ),
    )
    report: Report | None = optional(description="A regular report.")

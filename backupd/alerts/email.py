"""Mail: a letter as the message of RFC 5322 that it becomes, and handing it to a mail server."""

from __future__ import annotations

import base64
import smtplib
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from urllib.parse import urlsplit

from backupd.alerts.channels import Deadline, Delivered, DeliveryError
from backupd.alerts.message import Letter, one_line
from backupd.process.output import redact
from policies.alerts import Email

_PORTS = {"smtp": 25, "smtps": 465}
_ANSWERS = 10
"""A mail server may take so many times the time for one answer for all of them."""
_NOT_ITS_FAULT = frozenset({530, 534, 535, 538})
"""Answers that begin with 5 and are about us, not the message: somebody will mend the account."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """``thread``: ids of the incidents that it is about; ``begins``: it is the first one about the first of them; else
    ``answers``: the incident that the mail is named by which was, where that is another one."""

    message_id: str
    sent_at: datetime
    thread: tuple[str, ...] = ()
    begins: bool = False
    answers: str = ""


def as_mail(letter: Letter, email: Email, envelope: Envelope, host: str) -> str:
    """The whole message, text and HTML. The first letter about an incident carries its id, so later ones answer it.

    Never raises: news that nobody can write down would be lost, and all that come after them with them."""
    try:
        return _whole(letter, email, envelope, host)
    except Exception as error:  # noqa: BLE001  the library fails on odd headers in ways of its own; it is reported in the mail
        return _bare(letter, email, envelope, f"{type(error).__name__}: {error}")


def _bare(letter: Letter, email: Email, envelope: Envelope, trouble: str) -> str:
    """The message by hand, of nothing that could go wrong."""
    sender = email.sender if email.sender.isascii() and email.sender.isprintable() else "backupd@localhost"
    why = (
        f"This message has substitute headers, because a header could not be encoded ({one_line(trouble, 300)}): "
        "check the addresses in alerts.email."
    )
    text = f"{letter.as_text()}\n{why}\n".encode("utf-8", "replace")
    subject = base64.b64encode(one_line(letter.subject, 40).encode("utf-8", "replace")).decode()
    return "\r\n".join(
        [
            f"From: <{sender}>",
            "To: undisclosed-recipients:;",
            f"Subject: =?utf-8?b?{subject}?=",
            f"Date: {format_datetime(envelope.sent_at)}",
            f"Message-ID: <{envelope.message_id}@{sender.rpartition('@')[2]}>",
            "Auto-Submitted: auto-generated",
            "MIME-Version: 1.0",
            "Content-Type: text/plain; charset=utf-8",
            "Content-Transfer-Encoding: base64",
            "",
            *base64.encodebytes(text).decode().splitlines(),
            "",
        ]
    )


def _whole(letter: Letter, email: Email, envelope: Envelope, host: str) -> str:
    addresses = (email.sender, *email.to)
    policy = SMTP.clone(utf8=not all(address.isascii() for address in addresses))
    domain = email.sender.rpartition("@")[2]
    mail = EmailMessage(policy)
    mail["From"] = _address(email.sender, _literal(f"backupd on {one_line(host, 60)}"))
    mail["To"] = [_address(address) for address in email.to]
    mail["Subject"] = _literal(letter.subject_line)
    mail["Date"] = format_datetime(envelope.sent_at)
    roots = [f"<{one}@{domain}>" for one in envelope.thread]
    own = roots[0] if envelope.begins and roots else f"<{envelope.message_id}@{domain}>"
    mail["Message-ID"] = own
    before = [root for root in roots if root != own]
    parent = f"<{envelope.answers}@{domain}>" if envelope.answers else next(iter(before), "")
    if parent:
        mail["In-Reply-To"] = parent
        mail["References"] = " ".join(dict.fromkeys([*before[:50], parent]))
    mail["Auto-Submitted"] = "auto-generated"
    mail["X-Auto-Response-Suppress"] = "All"
    html, note = _html(letter)
    mail.set_content(letter.as_text() + note, cte="quoted-printable")
    if html:
        mail.add_alternative(html, subtype="html", cte="quoted-printable")
    return mail.as_bytes().decode("utf-8")


def _html(letter: Letter) -> tuple[str, str]:
    """The HTML part, or "" with what to say of that in the text: the news goes out in any case."""
    try:
        return letter.as_html(), ""
    except Exception as error:  # noqa: BLE001  a template that is missing or changed fails in ways of its own
        why = one_line(f"{type(error).__name__}: {error}", 300)
        return "", f"\nThis message has no HTML part: letter.html cannot be rendered ({why}). Reinstall backupd.\n"


def _literal(text: str) -> str:
    """Without what the library would take for an encoded word (RFC 2047) and decode: some versions of it write a line
    break that was hidden in one into the header."""
    return text.replace("=?", "= ?")


def _address(text: str, name: str = "") -> Address:
    user, _, domain = text.rpartition("@")
    return Address(name, user, domain)


def send(email: Email, content: str, recipients: Sequence[str]) -> Delivered:
    """Hand ``content`` to the mail server for ``recipients``. Raises DeliveryError when it takes it for none of
    them."""
    options = [] if all(address.isascii() for address in (email.sender, *recipients)) else ["SMTPUTF8"]
    try:
        with _connected(email) as server:
            refused = server.sendmail(email.sender, list(recipients), content.encode("utf-8"), mail_options=options)
    except smtplib.SMTPRecipientsRefused as error:
        answers = _answers(error.recipients)
        raise DeliveryError(
            f"the mail server rejected all {len(answers)} recipients",
            detail=_lines(answers),
            hint="check alerts.email.to and the mail server's log",
            permanent=all(answer.permanent for answer in answers.values()),
        ) from None
    except smtplib.SMTPAuthenticationError as error:
        raise DeliveryError(
            "the mail server rejected user and password",
            detail=_said(error),
            hint="check alerts.email.user and alerts.email.password_file",
        ) from None
    except smtplib.SMTPNotSupportedError as error:
        raise DeliveryError(
            f"the mail server {_endpoint(email)} does not support an extension that is required",
            detail=str(error),
            hint="enable it there (STARTTLS, AUTH or SMTPUTF8), or change starttls, user or addresses in alerts.email",
        ) from None
    except (smtplib.SMTPConnectError, smtplib.SMTPHeloError) as error:
        raise DeliveryError(
            f"the mail server {_endpoint(email)} refused the connection",
            detail=_said(error),
            hint="check that it accepts mail from this host; its log shows the reason",
        ) from None
    except smtplib.SMTPResponseException as error:
        raise DeliveryError(
            "the mail server rejected the message",
            detail=_said(error),
            hint="check the mail server's log",
            permanent=isinstance(error, smtplib.SMTPDataError | smtplib.SMTPSenderRefused)
            and _is_permanent(error.smtp_code),
        ) from None
    except ssl.SSLError as error:
        raise DeliveryError(
            f"TLS handshake with the mail server {_endpoint(email)} failed",
            detail=str(error),
            hint="check the host name in its certificate and the CA in alerts.email.ca_file",
        ) from None
    except ValueError as error:  # what a command of the protocol cannot hold
        raise DeliveryError(
            "user, password or an address contains characters that SMTP cannot send",
            detail=type(error).__name__,
            hint="use ASCII characters only, without line breaks, in alerts.email and in its password file",
        ) from None
    except (smtplib.SMTPException, OSError) as error:
        raise DeliveryError(
            f"the mail server {_endpoint(email)} does not answer",
            detail=_reason(error),
            hint="check that it runs and listens at the address in alerts.email.smtp",
        ) from None
    return _delivered(_answers(refused))


@dataclass(frozen=True, slots=True)
class _Answer:
    code: int
    text: str

    @property
    def permanent(self) -> bool:
        return _is_permanent(self.code)


def _delivered(refused: Mapping[str, _Answer]) -> Delivered:
    return Delivered(
        again=tuple(address for address, answer in refused.items() if not answer.permanent),
        refused=tuple(
            (address, f"{answer.code} {answer.text}") for address, answer in refused.items() if answer.permanent
        ),
        problem=_lines(refused),
    )


def _answers(refused: Mapping[str, tuple[int, bytes]]) -> dict[str, _Answer]:
    return {
        address: _Answer(code, redact(one_line(text.decode("utf-8", "replace"), 300)))
        for address, (code, text) in refused.items()
    }


def _lines(answers: Mapping[str, _Answer]) -> str:
    return "\n".join(f"{address}: {answer.code} {answer.text}" for address, answer in answers.items())


def _is_permanent(code: int) -> bool:
    return 500 <= code < 600 and code not in _NOT_ITS_FAULT


def _said(error: smtplib.SMTPResponseException) -> str:
    text = error.smtp_error
    shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    return f"{error.smtp_code} {redact(one_line(shown, 300))}"


def _reason(error: Exception) -> str:
    return one_line(str(error) or type(error).__name__, 300)


def _endpoint(email: Email) -> str:
    parts = urlsplit(email.smtp)
    return f"{parts.hostname}:{parts.port or _PORTS[parts.scheme]}"


@contextmanager
def _connected(email: Email) -> Iterator[smtplib.SMTP]:
    """Connected, encrypted and logged in as the settings say. Raises what smtplib raises, DeliveryError."""
    parts = urlsplit(email.smtp)
    host, port = str(parts.hostname), parts.port or _PORTS[parts.scheme]
    timeout = email.timeout.total_seconds()
    password = read_password(email) if email.user is not None else ""
    with Deadline(timeout * _ANSWERS) as deadline:
        here = socket.gethostname() or "localhost"
        server: smtplib.SMTP
        if parts.scheme == "smtps":
            server = smtplib.SMTP_SSL(local_hostname=here, timeout=timeout, context=trust(email, verified=True))
        else:
            server = smtplib.SMTP(local_hostname=here, timeout=timeout)
        # What the constructor sets when it connects. It must not: the deadline has to know the connection before.
        setattr(server, "_host", host)  # noqa: B010  no public name for what the certificate is compared with
        try:
            deadline.watch(lambda: server.sock)
            code, greeting = server.connect(host, port)
            if code != 220:
                raise smtplib.SMTPConnectError(code, greeting)
            _encrypt(server, email)
            if email.user is not None:
                server.ehlo_or_helo_if_needed()
                server.login(email.user, password)
            yield server
        finally:
            with suppress(smtplib.SMTPException, OSError):
                server.quit()
            server.close()


def _encrypt(server: smtplib.SMTP, email: Email) -> None:
    if isinstance(server, smtplib.SMTP_SSL) or email.starttls == "never":
        return
    needed = email.starttls == "required" or email.user is not None
    server.ehlo_or_helo_if_needed()
    if not server.has_extn("starttls"):
        if needed:
            raise DeliveryError(
                "the mail server offers no STARTTLS",
                hint="alerts.email.starttls or alerts.email.user requires TLS: use smtps://, or, for a mail server on "
                "this host without user, set alerts.email.starttls: never",
            )
        return
    # Where encryption is only taken when it is offered, whoever stands in between could take the offer away as well:
    # a certificate that nobody vouches for is better than none then.
    server.starttls(context=trust(email, verified=needed or email.ca_file is not None))
    server.ehlo()


def trust(email: Email, *, verified: bool) -> ssl.SSLContext:
    """Whose certificates are believed. Raises DeliveryError when the file of them cannot be read."""
    try:
        context = ssl.create_default_context(cafile=str(email.ca_file) if email.ca_file is not None else None)
    except OSError as error:
        raise DeliveryError(
            f"{email.ca_file} cannot be read: {error.strerror or error}",
            hint="alerts.email.ca_file must name a PEM file with the CA certificates to trust",
        ) from None
    if not verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def read_password(email: Email) -> str:
    """The account's. Raises DeliveryError."""
    file = email.password_file
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None else []
    except (OSError, UnicodeDecodeError) as error:
        raise DeliveryError(
            f"the password of the mail server cannot be read: {error}",
            hint="alerts.email.password_file names the file; the service must be able to read it",
        ) from None
    if not lines or not lines[0]:
        raise DeliveryError(f"{file} holds no password", hint="write the password into its first line")
    return lines[0]

"""The ways to people that the settings name: what a letter becomes on each, and handing it over."""

from __future__ import annotations

import logging
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from backupd.alerts.channels import Delivered, DeliveryError, courier, notify, read_channels
from backupd.alerts.email import Envelope, as_mail, read_password, send, trust
from backupd.alerts.heartbeat import read_url
from backupd.alerts.message import Letter
from backupd.alerts.rules import UNDELIVERABLE
from backupd.alerts.wording import Site
from backupd.app.context.api_address import address
from backupd.app.context.incidents import Incidents, Pair
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import Settings
from backupd.app.context.wiring import Wiring
from backupd.backup.checks.finding import Finding, error, fine, from_error, warning
from backupd.model.event import Event, Message, MessageKind, MessageState, Severity
from backupd.model.text import new_id

DELIVERY = Pair(UNDELIVERABLE, "alerts-delivered")
"""A channel, or one recipient of mail, to which messages cannot be delivered."""
EMAIL = "email"
CHANNELS = "channels"
"""How the file of other channels is called where it cannot be read."""


def site_of(settings: Settings) -> Site:
    """Who writes, and where the page is."""
    return Site(socket.gethostname(), address(settings.api) if settings.api.enabled else "")


def names(settings: Settings) -> tuple[str, ...]:
    """Of all channels. Raises DeliveryError when the file of the others than mail cannot be read."""
    file = settings.alerts.channels_file
    return (*mail_name(settings), *(read_channels(file) if file is not None else ()))


def working(settings: Settings) -> tuple[tuple[str, ...], DeliveryError | None]:
    """The names of all channels that are known, and why it is only some."""
    try:
        return names(settings), None
    except DeliveryError as error:
        return mail_name(settings), error


def usable_channels(wiring: Wiring, now: datetime) -> tuple[str, ...]:
    """Names of all channels that are known; an incident while the file of the others than mail cannot be read, and its
    end. Raises CatalogError."""
    incidents = Incidents(wiring.catalog)
    found, problem = working(wiring.settings)
    if problem is None:
        if wiring.settings.alerts.channels_file is not None:
            message = "the file of channels can be read again"
            incidents.mended(DELIVERY, DELIVERY.over(now, message, subject=CHANNELS))
        return found
    event = Event(
        now,
        DELIVERY.broken,
        Severity.ERROR,
        problem.message,
        subject=CHANNELS,
        detail=problem.detail,
        hint=problem.hint,
    )
    if incidents.broken(DELIVERY, event):
        say(DELIVERY.broken, str(problem), level=logging.ERROR)
    return found


def recipient(address: str) -> str:
    """What is said to be in trouble where mail works, and one recipient's does not."""
    return f"{EMAIL} to {address}"


def mail_name(settings: Settings) -> tuple[str, ...]:
    """The name of the mail channel, or nothing where alerts.email is not set."""
    return (EMAIL,) if settings.alerts.email is not None else ()


def written(
    settings: Settings,
    channels: Sequence[str],
    letter: Letter,
    kind: MessageKind,
    now: datetime,
    *,
    thread: Sequence[str] = (),
    begins: bool = False,
    answers: str = "",
) -> list[Message]:
    """The messages that ``letter`` becomes, one for each channel, due at once. ``thread``: ids of the incidents that it
    is about; ``begins``: it is the first one about the first of them; else ``answers``: the incident that the mail is
    named by which was."""
    email, found = settings.alerts.email, []
    for channel in channels:
        message = Message(
            new_id(now),
            channel,
            kind,
            MessageState.QUEUED,
            letter.subject_line,
            (channel,),
            "",
            now,
            incident_id=thread[0] if thread else "",
            next_try=now,
        )
        if channel == EMAIL and email is not None:
            envelope = Envelope(message.id, now, tuple(thread), begins, answers)
            content = as_mail(letter, email, envelope, socket.gethostname())
            message = replace(message, recipients=email.to, content=content)
        else:
            message = replace(message, content=letter.as_text())
        found.append(message)
    return found


def deliver(settings: Settings, message: Message) -> Delivered:
    """Hand it over. Raises DeliveryError."""
    email, file = settings.alerts.email, settings.alerts.channels_file
    if message.channel == EMAIL:
        if email is None:
            raise DeliveryError("alerts.email is not set any more", permanent=True)
        return send(email, message.content, message.recipients)
    known = read_channels(file) if file is not None else {}
    if message.channel not in known:
        raise DeliveryError(f"channel {message.channel} is not in alerts.channels_file any more", permanent=True)
    return notify(message.channel, known[message.channel], message.subject, message.content)


def findings(wiring: Wiring) -> list[Finding]:
    """What `backupd check` says about telling people: is anybody told, and can be read what is needed for it? Raises
    CatalogError."""
    alerts = wiring.settings.alerts
    email, file, heartbeat = alerts.email, alerts.channels_file, alerts.heartbeat
    found: list[Finding] = []
    if email is None and file is None:
        found.append(
            warning(
                "alerts",
                "no alert channel is configured: set alerts.email or alerts.channels_file, then run backupd "
                "alerts test",
                "set alerts.email in the configuration; `backupd alerts test` tries it",
            )
        )
    if email is not None:
        found += _tried(lambda: (read_password(email) if email.user else "", trust(email, verified=True)))
        found += _private(email.password_file)
    if file is not None:
        found += _tried(lambda: [courier(name, url) for name, url in _some(read_channels(file), file).items()])
    if heartbeat is not None:
        found += _tried(lambda: read_url(heartbeat.url_file))
        found += _private(heartbeat.url_file)
    found += [
        error("alerts", incident.message, incident.hint)
        for incident in wiring.catalog.incidents.open()
        if incident.kind == UNDELIVERABLE
    ]
    return found or [
        fine(
            "alerts",
            f"people are told by {', '.join(names(wiring.settings))} (not probed: `backupd "
            "alerts test` sends something to each)",
        )
    ]


def _tried(work: Callable[[], object]) -> Iterator[Finding]:
    try:
        work()
    except DeliveryError as problem:
        yield from_error("alerts", problem)


def _some(channels: Mapping[str, str], file: Path) -> Mapping[str, str]:
    if not channels:
        raise DeliveryError(f"{file} names no channel", hint="one URL a line; see https://appriseit.com")
    return channels


def _private(file: Path | None) -> Iterator[Finding]:
    """Nothing about a file that cannot be read: that is told already."""
    with suppress(OSError):
        if file is not None and (mode := stat.S_IMODE(file.stat().st_mode)) & 0o077:
            yield warning(
                "alerts", f"{file} holds a secret and is open to others (mode {mode:04o})", f"chmod 600 {file}"
            )

"""The ways to people that the settings name: what a letter becomes on each, and handing it over.

Sending what is queued: one thread for each channel, so that nothing waits for a mail server.

Pings a watcher elsewhere while the service does its rounds: a service that is dead, stuck or without its catalog
sends no mail, and this way somebody hears of it.
"""

from __future__ import annotations

import logging
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from backupd.alerts.channels import (
    LONGEST_PAUSE,
    Delivered,
    DeliveryError,
    courier,
    is_over,
    notify,
    pause_after,
    ping,
    read_channels,
    read_url,
)
from backupd.alerts.conditions import Condition, Key
from backupd.alerts.email import Envelope, as_mail, read_password, send, trust
from backupd.alerts.message import Letter, Site
from backupd.alerts.rules import DELIVERY, HEARTBEAT
from backupd.app.context.api_address import address
from backupd.app.context.logging_setup import redacted, say
from backupd.app.context.settings import Settings
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.periodic import GuardedLoop
from backupd.backup.finding import Finding, error, fine, from_error, warning
from backupd.model.event import Message, MessageKind, MessageState, Severity
from backupd.model.text import new_id

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


def usable_channels(wiring: Wiring) -> tuple[str, ...]:
    """Names of all channels that are known; an incident while the file of the others than mail cannot be read, and its
    end. Raises CatalogError."""
    found, problem = working(wiring.settings)
    key = Key(DELIVERY, subject=CHANNELS)
    if problem is None:
        if wiring.settings.alerts.channels_file is not None:
            wiring.settle(looked={key: "the file of channels can be read again"})
        return found
    if wiring.settle(Condition(key, Severity.ERROR, problem.message, problem.detail, problem.hint)).opened:
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
            raise DeliveryError("alerts.email is no longer set", permanent=True)
        return send(email, message.content, message.recipients)
    known = read_channels(file) if file is not None else {}
    if message.channel not in known:
        raise DeliveryError(f"channel {message.channel} is no longer in alerts.channels_file", permanent=True)
    return notify(message.channel, known[message.channel], message.subject, message.content)


def findings(wiring: Wiring) -> list[Finding]:
    """What `backupd check` says about notifying people: is there a channel, and are its files readable? Raises
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
        error("alerts", ": ".join(filter(None, (incident.message, incident.detail))), incident.hint)
        for incident in wiring.catalog.incidents.open()
        if incident.kind == DELIVERY.broken
    ]
    return found or [
        fine(
            "alerts",
            f"alert channels: {', '.join(names(wiring.settings))} (not probed: `backupd alerts test` sends a message "
            f"to each)",
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
    """Nothing about a file that cannot be read: that is reported already."""
    with suppress(OSError):
        if file is not None and (mode := stat.S_IMODE(file.stat().st_mode)) & 0o077:
            yield warning(
                "alerts", f"{file} holds a secret and is open to others (mode {mode:04o})", f"chmod 600 {file}"
            )


LEASE = timedelta(minutes=30)
"""How long a command has that sends a message itself. Should it die, the service sends it then."""
TICK = 5.0
"""Seconds between two looks when nobody calls: another process may have queued something."""
REST = 5.0
"""Seconds that a channel is left alone after it failed."""
_BATCH = 20
_TRIED = 2
"""Failed attempts after which the channel is reported."""


class Sender:
    """``wake`` from any thread; the rest from one."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._ending = threading.Event()
        self._rounds: dict[str, _Round] = {}

    def reload(self, wiring: Wiring) -> None:
        """Go by these settings from the next message on."""
        self._wiring = wiring

    def attend(self) -> None:
        """See that somebody is there for each channel by which something waits to be sent. Raises CatalogError."""
        for channel in self._wiring.catalog.messages.waiting():
            if channel not in self._rounds and not self._ending.is_set():
                self._rounds[channel] = _Round(channel, lambda: self._wiring, self._ending)
                self._rounds[channel].thread.start()

    def wake(self) -> None:
        """Something is to be sent. Raises CatalogError."""
        self.attend()
        for one in tuple(self._rounds.values()):
            one.awake.set()

    def stop(self, seconds: float) -> None:
        """Ends after what is being sent, or after ``seconds``; what is not sent stays queued."""
        self._ending.set()
        deadline = time.monotonic() + seconds
        for one in self._rounds.values():
            one.awake.set()
        for one in self._rounds.values():
            one.thread.join(max(0.0, deadline - time.monotonic()))


class _Round:
    """One channel's."""

    def __init__(self, channel: str, wiring: Callable[[], Wiring], ending: threading.Event) -> None:
        self.awake = threading.Event()
        self.thread = threading.Thread(target=self._loop, name=f"post {channel}", daemon=True)
        self._channel, self._wiring, self._ending = channel, wiring, ending
        self._guarded = GuardedLoop("post-trouble")

    def _loop(self) -> None:
        while not self._ending.is_set():
            well: list[bool] = []
            self._guarded(partial(self._step, well))
            if not any(well):
                self._ending.wait(REST if well else 0.0)
            self.awake.wait(0.0 if any(well) else TICK)
            self.awake.clear()

    def _step(self, well: list[bool]) -> None:
        wiring = self._wiring()
        for message in due(wiring, self._channel):
            if self._ending.is_set():
                return
            well.append(send_one(wiring, message))
            if not well[-1]:
                return


def due(wiring: Wiring, channel: str) -> tuple[Message, ...]:
    """The messages of a channel that are to be sent now, the oldest first. One that is due later than any pause can
    last was queued by a clock that was ahead, and counts as due. Raises CatalogError."""
    now = wiring.clock()
    return wiring.catalog.messages.due(channel, now, now + 2 * LONGEST_PAUSE, _BATCH)


def send_one(wiring: Wiring, message: Message) -> bool:
    """Try once, and write down how it went; False when its channel is in trouble. Raises CatalogError."""
    catalog, settings = wiring.catalog, wiring.settings
    attempts = message.attempts + 1
    try:
        done = deliver(settings, message)
    except DeliveryError as error:
        now = wiring.clock()
        given_up = error.permanent or is_over(attempts, now - message.created_at)
        catalog.messages.update(
            replace(
                message,
                attempts=attempts,
                error=redacted(str(error)),
                next_try=None if given_up else now + pause_after(attempts),
                state=MessageState.FAILED if given_up else MessageState.QUEUED,
            )
        )
        say("message-not-sent", f"{message.channel}: {message.subject}: {error}", level=logging.WARNING)
        if (given_up or attempts >= _TRIED) and message.channel in working(settings)[0]:
            hint = error.hint or "to list undelivered messages: backupd alerts messages"
            lost = "; backupd stopped retrying" if given_up else "; backupd retries with increasing intervals"
            wiring.alert(
                Key(DELIVERY, subject=message.channel),
                Severity.ERROR,
                f"a message by {message.channel} cannot be delivered: {redacted(error.message)}{lost}",
                hint=hint,
                detail=redacted(error.detail),
            )
        return error.permanent
    now = wiring.clock()
    again = bool(done.again) and not is_over(attempts, now - message.created_at)
    catalog.messages.update(
        replace(
            message,
            attempts=attempts,
            sent_at=now,
            error=redacted(done.problem),
            recipients=done.again if again else message.recipients,
            state=MessageState.QUEUED if again else MessageState.SENT,
            next_try=now + pause_after(attempts) if again else None,
        )
    )
    if done.problem:
        say("message-refused", f"{message.subject}: not for everybody\n{done.problem}", level=logging.WARNING)
    if _mended(wiring, message.channel):
        catalog.messages.hurry(now, message.channel)
    _report_recipients(wiring, message, done, gone=() if again else done.again)
    return True


def _report_recipients(wiring: Wiring, message: Message, done: Delivered, gone: Sequence[str]) -> None:
    """Of those that mail servers do not take a message for, for good or (``gone``) for days, and of those that they
    take one for again."""
    refused = dict.fromkeys(gone, done.problem) | dict(done.refused)
    for mailbox, answer in refused.items():
        wiring.alert(
            Key(DELIVERY, subject=recipient(mailbox)),
            Severity.ERROR,
            f"the mail server rejects recipient {mailbox}, who gets no messages",
            detail=redacted(answer),
            hint="check alerts.email.to and the mail server's log",
        )
    if message.channel == EMAIL:
        for mailbox in message.recipients:
            if mailbox not in refused and mailbox not in done.again:
                _mended(wiring, recipient(mailbox))


def _mended(wiring: Wiring, subject: str) -> bool:
    found = wiring.settle(looked={Key(DELIVERY, subject=subject): f"messages by {subject} are delivered again"})
    return bool(found.closed)


_PULSE = Key(HEARTBEAT, subject="heartbeat")
STALE = 120.0
"""Seconds after which a service that has ended no round counts as stuck."""
FAILURES = 3
"""Failed pings in a row after which the heartbeat is reported."""
_IDLE = 5.0


class Heartbeat:
    """``alive`` gives the monotonic time of the service's last good round."""

    def __init__(self, wiring: Wiring, alive: Callable[[], float]) -> None:
        self._wiring, self._alive = wiring, alive
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="heartbeat", daemon=True)
        self._guarded = GuardedLoop("heartbeat-trouble")
        self._failures = 0
        self._trouble = ""

    def start(self) -> None:
        """Begin to ping."""
        self._thread.start()

    def reload(self, wiring: Wiring) -> None:
        """Go by these settings from the next ping on."""
        self._wiring = wiring

    def stop(self, seconds: float) -> None:
        """End; a ping that is under way gets at most ``seconds``."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _loop(self) -> None:
        while not self._ending.is_set():
            settings = self._wiring.settings.alerts.heartbeat
            self._guarded(self.step)
            self._ending.wait(settings.every.total_seconds() if settings is not None else _IDLE)

    def step(self) -> None:
        """One ping, if there is one to send. Raises CatalogError."""
        settings = self._wiring.settings.alerts.heartbeat
        if settings is None or time.monotonic() - self._alive() > STALE:
            return
        try:
            ping(read_url(settings.url_file))
        except DeliveryError as error:
            self._failed(error)
            return
        self._failures, self._trouble = 0, ""
        self._wiring.settle(looked={_PULSE: "the heartbeat URL answers again"})

    def _failed(self, error: DeliveryError) -> None:
        self._failures += 1
        if self._trouble != error.message:
            say(HEARTBEAT.broken, str(error), level=logging.WARNING)
        self._trouble = error.message
        if self._failures >= FAILURES:
            self._wiring.alert(
                _PULSE,
                Severity.WARNING,
                f"{error.message}, {self._failures} times in a row",
                detail=error.detail,
                hint=error.hint,
            )

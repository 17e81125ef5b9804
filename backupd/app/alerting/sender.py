"""Sending what is queued: each channel in a thread of its own, so that nothing waits for a mail server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from backupd.alerts.channels import LONGEST_PAUSE, Delivered, DeliveryError, is_over, pause_after
from backupd.app.alerting.channels import DELIVERY, EMAIL, deliver, recipient, working
from backupd.app.context.incidents import Incidents
from backupd.app.context.logging_setup import redacted, say
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.periodic import GuardedLoop
from backupd.model.event import Event, Message, MessageState, Severity

LEASE = timedelta(minutes=30)
"""So long has a command that sends a message itself. Should it die, the service sends it then."""
TICK = 5.0
"""Seconds between two looks when nobody calls: another process may have queued something."""
REST = 5.0
"""Seconds that a channel is left alone after it failed."""
_BATCH = 20
_TRIED = 2
"""So many tries in vain are told."""


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
            hint = error.hint or "`backupd alerts messages` lists what waits"
            lost = "; it is given up" if given_up else "; it is tried again with growing pauses"
            Incidents(catalog).broken(
                DELIVERY,
                Event(
                    now,
                    DELIVERY.broken,
                    Severity.ERROR,
                    subject=message.channel,
                    hint=hint,
                    message=f"a message by {message.channel} cannot be delivered: {redacted(error.message)}{lost}",
                    detail=redacted(error.detail),
                ),
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
    if _mended(wiring, message.channel, now):
        catalog.messages.hurry(now, message.channel)
    _tell_recipients(wiring, message, done, gone=() if again else done.again, now=now)
    return True


def _tell_recipients(wiring: Wiring, message: Message, done: Delivered, gone: Sequence[str], now: datetime) -> None:
    """Of those that mail servers do not take a message for, for good or (``gone``) for days, and of those that they
    take one for again."""
    refused = dict.fromkeys(gone, done.problem) | dict(done.refused)
    for address, answer in refused.items():
        Incidents(wiring.catalog).broken(
            DELIVERY,
            Event(
                now,
                DELIVERY.broken,
                Severity.ERROR,
                subject=recipient(address),
                message=f"{address} gets no messages: the mail server refuses them",
                detail=redacted(answer),
                hint="look at alerts.email.to, and at what the mail server's log says",
            ),
        )
    if message.channel == EMAIL:
        for address in message.recipients:
            if address not in refused and address not in done.again:
                _mended(wiring, recipient(address), now)


def _mended(wiring: Wiring, subject: str, now: datetime) -> bool:
    return Incidents(wiring.catalog).mended(
        DELIVERY,
        DELIVERY.over(now, f"messages by {subject} are delivered again", subject=subject),
    )

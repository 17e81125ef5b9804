"""The regular report: when it is due, and what it says.

The alert threads of the service (``AlertWatch``): they read events, send messages and ping a watchdog. Nothing waits
for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Self

from backupd.alerts.message import DestinationLine, Letter, ServerLine, letter_of_test, report
from backupd.app.alerting.notifier import AlertNotifier, Pace
from backupd.app.alerting.sender import (
    CHANNELS,
    LEASE,
    Heartbeat,
    Sender,
    send_one,
    site_of,
    usable_channels,
    working,
    written,
)
from backupd.app.context.logging_setup import redacted
from backupd.app.context.trust import recovery_page, signed_servers
from backupd.app.context.wiring import Wiring, user
from backupd.app.metacopies.signed_heads import noted
from backupd.app.runtime.periodic import GuardedLoop
from backupd.app.schedule.calendar import next_runs
from backupd.app.views.destinations import DestinationView, ReachWatch, destination_views
from backupd.app.views.overview import overview
from backupd.app.views.server_status import ServerOverview
from backupd.model.errors import BackupdError, RefusedError
from backupd.model.event import Message, MessageKind, MessageState
from backupd.model.text import format_time, new_id

REPORTED = "report"
"""A cursor: the moment, in seconds, up to which every report that was due was made."""


def report_if_due(wiring: Wiring, now: datetime) -> bool:
    """Queue one where one is due; True when it did. One report covers all that were missed. Raises
    CatalogError."""
    settings = wiring.settings
    wanted = settings.alerts.report
    if wanted is None:
        return False
    handled = wiring.catalog.cursors.all().get(REPORTED)
    if handled is None or handled > now.timestamp() + 1:  # new, or the clock was ahead then
        wiring.catalog.cursors.move({REPORTED: int(now.timestamp())})
        return False
    due = next(
        iter(
            next_runs(wanted.schedule, settings.configuration.timezone, datetime.fromtimestamp(handled, UTC), count=1)
        ),
        None,
    )
    if due is None or due > now:
        return False
    channels, _trouble = working(settings)  # whoever watches the channels reports the trouble
    messages = written(settings, channels, report_now(wiring, now), MessageKind.REPORT, now)
    wiring.catalog.incidents.record((), messages, {REPORTED: int(now.timestamp())})
    return True


def report_now(wiring: Wiring, now: datetime) -> Letter:
    """Raises CatalogError."""
    return report(
        [_server(one) for one in overview(wiring, now)],
        [_destination_line(one) for one in destination_views(wiring, now)],
        wiring.catalog.incidents.open(),
        site_of(wiring.settings),
        now,
        tuple(_noted(wiring)),
    )


def _noted(wiring: Wiring) -> Iterator[tuple[str, str]]:
    """What would show that somebody has turned back or replaced what is stored."""
    for newest in wiring.catalog.audit.list(limit=1):
        yield "audit", f"{newest.number} entries, the newest with digest {newest.digest}"
    for server, head in sorted(noted(wiring).items()):
        yield f"head of {server}", f"counter {head.counter}, of {format_time(head.at)}"
        if head.runbook:
            yield f"runbook of {server}", head.runbook
    if signed_servers(wiring.settings):
        try:
            page = recovery_page(wiring.settings)
        except BackupdError as error:
            yield "signing key", f"not known: {error.message}"
        else:
            yield "signing key", page.signing_key
            yield "before you read RECOVER.md", page.command


def _server(one: ServerOverview) -> ServerLine:
    why = next(iter(one.reasons), None)
    proof = one.last_proof
    return ServerLine(
        one.name,
        str(one.status),
        why.text if why else "",
        why.hint if why else "",
        one.first,
        one.latest,
        proof.outcome if proof else "",
        proof.finished_at if proof else None,
        one.tables_only,
    )


def _destination_line(one: DestinationView) -> DestinationLine:
    why = next(iter(one.reasons), None)
    return DestinationLine(one.name, str(one.status), why.text if why else "", one.forecast)


TICK = 1.0
"""Seconds between two looks for news."""
SELDOM = 30.0
"""Seconds between two looks at what changes slowly: reports that are due, destinations."""
LAST_WORDS = 3.0
"""Seconds that what is being sent may take when the service ends; the rest waits for the next one."""
INCIDENTS_KEPT = timedelta(days=400)
MESSAGES_KEPT = timedelta(days=30)
"""How long incidents stay in the catalog once they are over, and messages."""


class AlertWatch:
    """At work from entering the block until leaving it, or ``stop``. ``alive``: the monotonic time of the service's
    last good round."""

    def __init__(self, wiring: Wiring, alive: Callable[[], float] = time.monotonic, pace: Pace | None = None) -> None:
        self._wiring = wiring
        self._notifier = AlertNotifier(wiring, pace or Pace())
        self._sender = Sender(wiring)
        self._heartbeat = Heartbeat(wiring, alive)
        self._reach = ReachWatch()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="alerts", daemon=True)
        self._guarded, self._seldom = GuardedLoop("alerts-trouble"), GuardedLoop("alerts-trouble")

    def __enter__(self) -> Self:
        self._guarded(self._notifier.begin)
        self._thread.start()
        self._heartbeat.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @property
    def well_at(self) -> float:
        """The monotonic time of its last look for news that went well."""
        return self._guarded.well_at

    def reload(self, wiring: Wiring) -> None:
        """Go by these settings."""
        self._wiring = wiring
        self._notifier.reload(wiring)
        self._sender.reload(wiring)
        self._heartbeat.reload(wiring)

    def stop(self) -> None:
        """What is not reported or sent yet waits in the catalog."""
        self._ending.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(LAST_WORDS)
        self._sender.stop(LAST_WORDS)
        self._heartbeat.stop(LAST_WORDS)

    def _loop(self) -> None:
        seldom = float("-inf")
        self._guarded(self._sender.wake)  # what the service before left
        while not self._ending.is_set():
            self._guarded(self._notify)
            if time.monotonic() - seldom >= SELDOM:
                seldom = time.monotonic()
                self._seldom(self._look)
            self._ending.wait(TICK)

    def _notify(self) -> None:
        if self._notifier.step():
            self._sender.wake()
        else:
            self._sender.attend()

    def _look(self) -> None:
        now = self._wiring.clock()
        usable_channels(self._wiring)
        self._reach.step(self._wiring, now)
        if report_if_due(self._wiring, now):
            self._sender.wake()


def forget_old_alerts(wiring: Wiring) -> None:
    """Incidents and messages that are over for long. Raises CatalogError."""
    now = wiring.clock()
    wiring.catalog.incidents.forget(now - INCIDENTS_KEPT)
    wiring.catalog.messages.forget(now - MESSAGES_KEPT)


def send_test(wiring: Wiring, by: str = "", *, wait: bool = True) -> tuple[Message, ...]:
    """A test by every channel, sent before this returns (how each fared is in the messages that it gives), or without
    ``wait`` left to the service. A file of channels that cannot be read is a message that was not sent. Raises
    RefusedError without any channel, CatalogError.
    """
    channels, trouble = working(wiring.settings)
    if not channels and trouble is None:
        raise RefusedError("no alert channel is configured", hint="set alerts.email in the configuration")
    now = wiring.clock()
    letter = letter_of_test(site_of(wiring.settings), now, by or user())
    found = []
    for message in written(wiring.settings, channels, letter, MessageKind.TEST, now):
        wiring.catalog.messages.add(replace(message, next_try=now + LEASE) if wait else message)  # not the service too
        if wait:
            send_one(wiring, message)
        found.append(wiring.catalog.messages.get(message.id))
    if trouble is not None:
        found.append(
            Message(
                new_id(now),
                CHANNELS,
                MessageKind.TEST,
                MessageState.FAILED,
                letter.subject_line,
                (CHANNELS,),
                "",
                now,
                attempts=1,
                error=redacted(str(trouble)),
            )
        )
        wiring.catalog.messages.add(found[-1])
    return tuple(found)

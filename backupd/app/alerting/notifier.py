"""From events in the catalog to messages: reads them, keeps the incidents, writes what is to be sent, and closes
incidents about what is no longer configured.

The messages and how far was read are written in one transaction: a process that is killed in between neither loses nor
repeats anything. Events wait a moment for others that belong to them; many at once become few messages; too many within
an hour become one that says so, and one afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from backupd.alerts.channels import DeliveryError
from backupd.alerts.conditions import Key, Need
from backupd.alerts.ledger import MANY, Ledger, Turn, grouped
from backupd.alerts.message import Letter, letter_about, letter_after_silence, letter_of_silence
from backupd.alerts.rules import (
    API,
    DELIVERY,
    HEARTBEAT,
    HOOK,
    JOB,
    PLACE_RPO,
    RPO,
    RTO,
    TLS,
    kinds_of,
    rule_of_incident,
    topic_of,
)
from backupd.app.alerting.sender import CHANNELS, EMAIL, names, recipient, site_of, usable_channels, written
from backupd.app.context.incidents import Incidents
from backupd.app.context.settings import Settings
from backupd.app.context.wiring import Wiring
from backupd.app.copies.missing_copies import LEG
from backupd.app.jobs.jobs import SWEEP_LEG, sweep_leg
from backupd.app.runtime.clock_check import ClockWatch, boottime
from backupd.model.errors import BackupdError
from backupd.model.event import Event, Incident, Message, MessageKind
from backupd.model.job import JobKind, JobState
from policies.lint import streams

READ = "alerts"
MUTED = "alerts-muted"
"""Cursors: the number of the last event that was dealt with; since when (in seconds) no letters are sent, or 0."""
REMEMBERED = 2000
"""Events that are looked through, without a letter, when there was no such service before."""
BATCH = 1000
IN_FLIGHT = timedelta(seconds=30)
"""A number that is missing may belong to a transaction that has not ended; it is waited for until then."""
MINUTE = 60.0
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
COVERED = 20.0
"""Seconds between two looks for backups that end incidents."""
_NOTICES = (MessageKind.ALERT, MessageKind.REMINDER, MessageKind.RECOVERY)
_ENDS = (JobKind.FULL, JobKind.LOGICAL)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast people are notified. ``settle``: seconds that news wait for more; ``bursts`` of letters within a minute,
    then they wait for the minute to end, and so they do after one about many things; ``limit``: letters within an hour.
    """

    settle: float = 3.0
    bursts: int = 5
    limit: int = 30


class AlertNotifier:
    """From one thread. ``passing``: a clock that only goes on."""

    def __init__(self, wiring: Wiring, pace: Pace, passing: Callable[[], float] = boottime) -> None:
        self._wiring, self._pace, self._passing = wiring, pace, passing
        self._clockwatch = ClockWatch(wiring.clock, passing, passing)
        self._cursors: dict[str, int] | None = None
        self._ledger: Ledger | None = None
        self._turns: list[Turn] = []
        self._seen = 0
        self._since: float | None = None
        self._flushes: deque[float] = deque(maxlen=pace.bursts)
        self._calm_at = float("-inf")
        self._due: datetime | None = None
        self._covered: float | None = None
        self._anew()

    def reload(self, wiring: Wiring) -> None:
        """Go by these settings; incidents about what is no longer configured are closed at the next step."""
        self._wiring = wiring
        self._due = None
        self._covered = None

    def begin(self) -> None:
        """Before the first event is written: what happened before there was such a service is reported to nobody.
        Raises CatalogError."""
        catalog = self._wiring.catalog
        self._cursors = dict(catalog.cursors.all())
        if READ not in self._cursors:
            newest = catalog.events.newest()
            ledger = Ledger((), self._wiring.settings.alerts.reminders)
            for event in catalog.events.since(max(newest - REMEMBERED, 0), limit=REMEMBERED):
                ledger.take(event)
            quietly = [one if one.is_open else replace(one, next_reminder=None) for one in ledger.changed]
            catalog.incidents.record(quietly, (), {READ: newest})
            self._cursors[READ] = newest
        self._seen = self._cursors[READ]

    def step(self) -> bool:
        """One look; True when something is to be sent. Raises CatalogError; then the next look begins anew."""
        try:
            return self._step()
        except BackupdError:
            self._anew()
            raise

    def _anew(self) -> None:
        self._cursors, self._ledger, self._since, self._due, self._covered = None, None, None, None, None
        self._turns = []

    def _step(self) -> bool:
        if self._cursors is None:
            self.begin()
        now = self._wiring.clock()
        self._clockwatch.look()
        events = self._news(now)
        if events or self._due is None or now >= self._due or self._covers():
            ledger = self._opened()
            for event in events:
                self._turns += ledger.take(event)
                self._seen = event.number
            if self._clockwatch.settled:
                ledger.set_right(now)
            if not self._clockwatch.doubtful:
                self._turns += ledger.pass_time(now, muted=self._muted() is not None)
            self._turns += self._ended(ledger, now)
            self._due = ledger.due() or now + HOUR
            if not self._turns and not ledger.changed:
                self._ledger = None  # the next look sees what others have written by then
        if self._turns and self._since is None:
            self._since = self._passing()
        return self._flush(now) if self._is_time(now) else False

    def _opened(self) -> Ledger:
        if self._ledger is None:
            recent = self._wiring.catalog.incidents.recent(self._wiring.clock() - DAY)
            self._ledger = Ledger(recent, self._wiring.settings.alerts.reminders)
        return self._ledger

    def _news(self, now: datetime) -> list[Event]:
        """The next events, up to the first number that may still come."""
        found: list[Event] = []
        expected = self._seen + 1
        for event in self._wiring.catalog.events.since(self._seen, limit=BATCH):
            if event.number != expected and timedelta(0) <= now - event.at < IN_FLIGHT:
                break
            found.append(event)
            expected = event.number + 1
        return found

    # -- incidents that no event ends

    def _covers(self) -> bool:
        return self._covered is None or self._passing() - self._covered >= COVERED

    def _ended(self, ledger: Ledger, now: datetime) -> list[Turn]:
        """Incidents that a backup has ended since, and those that nobody looks after any more. The latter are settled
        by an event, too: should one be looked after again, and be broken still, it is reported again."""
        if not self._covers():
            return []
        self._covered = self._passing()
        turns: list[Turn] = []
        for incident in ledger.open:
            if not ledger.keeps_coming(incident, now) and (why := why_unwatched(self._wiring, incident)):
                keys = [Key(kind, incident.server, incident.subject) for kind in kinds_of(incident)]
                Incidents(self._wiring.catalog).settle(now, gone=dict.fromkeys(keys, why))
                turns += ledger.cover(incident, now, why, well=False)
            elif rule_of_incident(incident).covered and (job := self._backup_after(incident)):
                turns += ledger.cover(incident, now, f"a backup was taken since: {job}")
        return turns

    def _backup_after(self, incident: Incident) -> str:
        for kind in _ENDS:
            for job in self._wiring.catalog.jobs.list(incident.server, kind=kind, state=JobState.SUCCEEDED, limit=1):
                if job.started_at is not None and job.started_at > incident.last_at:
                    return job.result or job.id
        return ""

    # -- letters

    def _is_time(self, now: datetime) -> bool:
        """Is there something to write, and may it be written yet?"""
        muted = self._muted()
        if muted is not None and not now < muted + HOUR:
            return True
        if self._ledger is None:
            return False
        if self._since is None:
            return bool(self._ledger.changed) or self._seen != (self._cursors or {}).get(READ)
        if muted is not None:
            return True
        passing = self._passing()
        crowded = len(self._flushes) == self._flushes.maxlen and passing - self._flushes[0] < MINUTE
        return passing - self._since >= self._pace.settle and not crowded and passing >= self._calm_at

    def _muted(self) -> datetime | None:
        """Since when no letters are sent."""
        seconds = (self._cursors or {}).get(MUTED, 0)
        return datetime.fromtimestamp(seconds, UTC) if seconds else None

    def _flush(self, now: datetime) -> bool:
        ledger = self._opened()
        muted = self._muted()
        letters, until = self._letters(ledger, now, muted)
        messages = self._messages(letters, now)
        cursors = {READ: self._seen, MUTED: int(until.timestamp()) if until is not None else 0}
        self._wiring.catalog.incidents.record(ledger.changed, messages, cursors)
        self._cursors = {**(self._cursors or {}), **cursors}
        self._ledger, self._turns, self._since = None, [], None
        if letters:
            self._flushes.append(self._passing())
        if any(len(turns) >= MANY for _letter, _kind, turns in letters):
            self._calm_at = self._passing() + MINUTE
        return bool(messages)

    def _letters(
        self, ledger: Ledger, now: datetime, muted: datetime | None
    ) -> tuple[list[tuple[Letter, MessageKind, Sequence[Turn]]], datetime | None]:
        """What is to be sent, and since when nothing is."""
        site = site_of(self._wiring.settings)
        if muted is not None and now < muted:
            muted = now  # the clock was ahead then
        if muted is not None and now < muted + HOUR:
            return [], muted
        if muted is not None:
            meanwhile = {one.id: one for one in self._wiring.catalog.incidents.changed_since(muted)}
            meanwhile |= {one.id: one for one in ledger.changed}
            if not meanwhile:
                return [], None
            bad = any(one.is_open or one.settles for one in meanwhile.values())
            kind = MessageKind.ALERT if bad else MessageKind.RECOVERY
            gone = {
                one.id: why
                for one in meanwhile.values()
                if not one.is_open and (why := why_unwatched(self._wiring, one))
            }
            letter = letter_after_silence(tuple(meanwhile.values()), site, now, muted, gone)
            return [(letter, kind, ())], None
        groups = grouped(self._latest(ledger), self._wiring.settings.destinations)
        if not groups:
            return [], None
        limit = self._pace.limit
        if self._wiring.catalog.messages.made_since(now - HOUR, _NOTICES) + len(groups) >= limit:
            turns = [turn for group in groups for turn in group]
            letter = letter_of_silence(turns, site, now, limit=limit, until=now + HOUR)
            return [(letter, MessageKind.ALERT, turns)], now
        return [(letter_about(group, site, now), _kind(group), group) for group in groups], None

    def _latest(self, ledger: Ledger) -> list[Turn]:
        """Each turn once, with its incident as it is by now."""
        latest = {incident.id: incident for incident in ledger.changed}
        turns: dict[tuple[str, MessageKind], Turn] = {}
        for turn in self._turns:
            key = (turn.incident.id, turn.kind)
            begins = turn.begins or (key in turns and turns[key].begins)
            turns[key] = replace(turn, incident=latest.get(turn.incident.id, turn.incident), begins=begins)
        return list(turns.values())

    def _messages(self, letters: Sequence[tuple[Letter, MessageKind, Sequence[Turn]]], now: datetime) -> list[Message]:
        if not letters:
            return []
        channels = usable_channels(self._wiring)
        found: list[Message] = []
        for number, (letter, kind, turns) in enumerate(letters):
            begun = [turn.incident.id for turn in turns if turn.begins]
            thread = dict.fromkeys([*begun, *(turn.incident.id for turn in turns)])
            moment = now + timedelta(microseconds=number)
            found += written(
                self._wiring.settings,
                _hearing(channels, turns),
                letter,
                kind,
                moment,
                thread=tuple(thread),
                begins=bool(begun),
                answers=self._answered(thread, bool(begun)),
            )
        return found

    def _answered(self, thread: Iterable[str], begins: bool) -> str:
        """The incident that the mail is named by to which one about ``thread`` is an answer."""
        first = next(iter(thread), "")
        return self._wiring.catalog.messages.first_about(first) if first and not begins else ""


def _hearing(channels: Sequence[str], turns: Sequence[Turn]) -> list[str]:
    """Those of ``channels`` that a letter goes to: not one that it says of, and of nothing else, that it does not
    work."""
    about = {turn.incident.subject if topic_of(turn.incident.kind) == DELIVERY.broken else "" for turn in turns}
    return [channel for channel in channels if about != {channel}]


def _kind(turns: Sequence[Turn]) -> MessageKind:
    """Of a letter about several: the most urgent."""
    kinds = {turn.kind for turn in turns}
    return next(kind for kind in _NOTICES if kind in kinds)


def why_unwatched(wiring: Wiring, incident: Incident) -> str:
    """Why nobody looks any more whether it is over; empty where somebody does. Raises CatalogError."""
    settings, server = wiring.settings, incident.server
    topic, subject, needs = topic_of(incident.kind), incident.subject, rule_of_incident(incident).needs
    if topic == HOOK.broken and wiring.catalog.absences.of(server) is not None:
        return ""  # whatever the configuration says, the service brings it back
    if settings.is_unread(server):
        return ""
    if server and server not in settings.servers:
        return f"{server} is no longer configured"
    if needs in (Need.DESTINATION, Need.COPIES) and subject and subject not in settings.destinations:
        return f"destination {subject} is no longer configured"
    return _of_policy(settings, incident, topic) if server else _of_service(settings, topic, subject)


def _of_service(settings: Settings, topic: str, subject: str) -> str:
    if topic == HEARTBEAT.broken and settings.alerts.heartbeat is None:
        return "alerts.heartbeat is no longer set"
    if topic == API.broken and not settings.api.enabled:
        return "the web page and the REST interface are switched off"
    if topic == JOB and subject.startswith(SWEEP_LEG) and subject not in map(sweep_leg, settings.destinations):
        return f"the destination of {subject} is no longer configured"
    return _of_channel(settings, subject) if topic == DELIVERY.broken else ""


def _of_policy(settings: Settings, incident: Incident, topic: str) -> str:
    server, destination, needs = settings.server(incident.server), incident.subject, rule_of_incident(incident).needs
    if not server.usable:
        return ""
    if topic == JOB and destination.startswith(LEG):
        destination, needs = destination.removeprefix(LEG), Need.COPIES
    name, promised, named = server.name, server.policy.objectives, destination in server.preferred
    gone = {
        f"objectives.rpo of {name} is no longer set": topic in (RPO.broken, PLACE_RPO.broken) and promised.rpo is None,
        f"objectives.rto of {name} is no longer set": topic == RTO.broken and promised.rto is None,
        f"{destination} is no longer one of several destinations of {name}": topic == PLACE_RPO.broken
        and not (named and len(server.preferred) > 1),
        f"{destination} is no longer a destination of {name}": needs is Need.COPIES and not named,
        f"{name} is no longer reached through {destination}": topic == TLS.broken
        and destination not in (server.ways or {name}),
        f"the binary log of {name} is no longer streamed": needs is Need.STREAM and not streams(server.policy),
    }
    return next((why for why, holds in gone.items() if holds), "")


def _of_channel(settings: Settings, channel: str) -> str:
    if channel == EMAIL:
        return "" if settings.alerts.email is not None else "alerts.email is no longer set"
    if channel.startswith(recipient("")):
        reads = channel in _readers(settings)
        return "" if reads else f"{channel.removeprefix(recipient(''))} is no longer a mail recipient"
    if settings.alerts.channels_file is None:
        return "alerts.channels_file is no longer set"
    if channel != CHANNELS:
        with suppress(DeliveryError):  # whoever sends reports it
            return "" if channel in names(settings) else f"channel {channel} is no longer in alerts.channels_file"
    return ""


def _readers(settings: Settings) -> frozenset[str]:
    email = settings.alerts.email
    return frozenset(map(recipient, email.to)) if email is not None else frozenset()

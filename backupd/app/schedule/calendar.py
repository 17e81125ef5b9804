"""The calendar: when the legs of the policies are due. And the alarm clock, which rings when the next one is.

The calendar is pure. A cadence is wall-clock time in a zone: crontab(5)'s five fields, or ``every 6h`` counted from
1970-01-01T00:00Z, so that a restart shifts nothing. Each time on the wall comes once a day: one that the clocks skip in
spring comes in the moment after the gap, one that they repeat in autumn comes the first time only.

The only importer of APScheduler, and only where a time is computed. Its CronTrigger is asked about a calendar without
time zones (in UTC), where it is right; alone it would fire twice in a repeated hour or an hour late after a skipped
one, counts weekdays from Monday, and demands day of the month *and* weekday where crontab wants either.
"""

from __future__ import annotations

import hashlib
import heapq
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from backupd.app.context.settings import Settings
from backupd.model.job import JobKind
from policies.fields import WindowTimes, every, parse_cron, parse_window
from policies.policy import Policy, Verify

if TYPE_CHECKING:
    from apscheduler.triggers.cron import CronTrigger
    from apscheduler.triggers.interval import IntervalTrigger

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
HORIZON = timedelta(days=366 * 41)
"""How far the calendar looks for a day that comes seldom: 29 February on a Sunday comes every 28 or 40 years."""

HOUSEKEEPING = "15 3 * * *"
"""When retention runs on its own (it also follows each backup)."""
CHALLENGES = "45 3 * * *"
"""When it is looked at whose key has to be proved again."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One schedule of a server; of the whole installation where ``server`` is empty.

    ``besides``: a cadence whose due times are not due times of this leg (that of the full backups, for increments).
    ``arguments``: of the job that it starts.
    """

    server: str
    leg: str
    cadence: str
    kind: JobKind
    zone: str
    jitter: timedelta = timedelta(0)
    blackout: tuple[str, ...] = ()
    catch_up: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    besides: str | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Server and name of the schedule: what the catalog knows it by."""
        return self.server, self.leg

    @property
    def rhythm(self) -> str:
        """What must change for the leg to begin anew."""
        return f"{self.cadence} {self.zone}"

    def at_rhythm(self, rhythm: str, other: str | None) -> Leg:
        """This leg as it was with ``rhythm``; ``other``: that of the full backups then, for increments."""
        cadence, _space, zone = rhythm.rpartition(" ")
        besides = None if self.besides is None or not other else other.rpartition(" ")[0]
        return replace(self, cadence=cadence, zone=zone, besides=besides)


KINDS = {
    "physical.full": JobKind.FULL,
    "physical.incremental": JobKind.INCREMENTAL,
    "test_restore": JobKind.TEST_RESTORE,
    "verify": JobKind.VERIFY,
    "retention": JobKind.RETENTION,
    "challenge": JobKind.CHALLENGE,
    "witness": JobKind.WITNESS,
    "consistency": JobKind.CONSISTENCY,
}
LOGICAL = "logical"


def logical_leg(table_set: str) -> str:
    """The leg of a set of the policy; "" is what ``logical.schedule`` dumps."""
    return f"{LOGICAL}/{table_set}" if table_set else LOGICAL


def former_leg(server: str, leg: str, rhythm: str, other: str | None) -> Leg:
    """A leg that is in no policy any more, as far as it is remembered. Raises KeyError for one of no known name."""
    kind = JobKind.LOGICAL if leg.partition("/")[0] == LOGICAL else KINDS[leg]
    return Leg(server, leg, "", kind, "", besides="" if kind is JobKind.INCREMENTAL else None).at_rhythm(rhythm, other)


def legs(settings: Settings, server: str) -> tuple[Leg, ...]:
    """What is scheduled for ``server``; "" gives what concerns the whole installation. Raises NotFoundError."""
    if not server:
        return (Leg("", "challenge", CHALLENGES, JobKind.CHALLENGE, settings.configuration.timezone),)
    policy = settings.server(server).policy
    return legs_of(policy, server, policy.timing.timezone or settings.configuration.timezone)


def legs_of(policy: Policy, server: str, zone: str) -> tuple[Leg, ...]:
    """What ``policy`` schedules for ``server``, with its times in ``zone``."""
    timing = policy.timing

    def leg(name: str, cadence: str, kind: JobKind, **more: Any) -> Leg:
        return Leg(
            server, name, cadence, kind, zone, timing.jitter or timedelta(0), timing.blackout, timing.catch_up, **more
        )

    found = []
    if policy.physical is not None:
        found.append(leg("physical.full", policy.physical.full, JobKind.FULL))
        if incremental := policy.physical.incremental:
            found.append(leg("physical.incremental", incremental, JobKind.INCREMENTAL, besides=policy.physical.full))
    if policy.logical is not None:
        found += [
            leg(logical_leg(name), cadence, JobKind.LOGICAL, arguments={"set": name})
            for name, (cadence, _tables) in policy.logical.selections.items()
        ]
    tests = policy.test_restore
    if tests is not None and tests.schedule and policy.physical is not None:
        found.append(leg("test_restore", tests.schedule, JobKind.TEST_RESTORE, arguments={"target": tests.target}))
    if policy.verify is not None:
        found.append(leg("verify", policy.verify.schedule, JobKind.VERIFY, arguments=_verification(policy.verify)))
    if policy.witness.schedule:
        found.append(leg("witness", policy.witness.schedule, JobKind.WITNESS))
    if comparisons := policy.consistency.checksum.schedule:
        found.append(leg("consistency", comparisons, JobKind.CONSISTENCY))
    if policy.retention:
        found.append(leg("retention", HOUSEKEEPING, JobKind.RETENTION))
    return tuple(found)


def _verification(verify: Verify) -> dict[str, Any]:
    period = {"period": verify.period.total_seconds()} if verify.period is not None else {}
    return {"subset": verify.subset, **period}


def all_legs(settings: Settings) -> tuple[Leg, ...]:
    """Every leg of every server whose policy can be used, and those of the installation."""
    names = [name for name in settings.servers if settings.server(name).usable]
    return tuple(leg for server in ("", *names) for leg in legs(settings, server))


def next_runs(
    cadence: str, zone: str, after: datetime, *, count: int | None = None, until: datetime | None = None
) -> Iterator[datetime]:
    """The due times after ``after``, in UTC, in order, none twice: ``count`` of them, or those up to ``until``.

    Without either it goes on for as long as there are any. Raises ValueError for what is not a cadence.
    """
    return islice(_until(_runs(cadence, zone, after.astimezone(UTC)), until), count)


def due_times(
    leg: Leg, after: datetime, *, count: int | None = None, until: datetime | None = None
) -> Iterator[datetime]:
    """The due times of ``leg`` after ``after``, as ``next_runs`` gives them."""
    runs = next_runs(leg.cadence, leg.zone, after, until=until)
    other = leg.besides
    if other is not None:
        runs = (due for due in runs if not _is_due(other, leg.zone, due))
    return islice(runs, count)


def start_of(leg: Leg, due: datetime) -> datetime:
    """When the run that is due at ``due`` starts: later by the leg's own share of the jitter, not in a blackout.

    Later due times never start earlier.
    """
    return _after_blackout(leg, _after_blackout(leg, due) + _share(leg.server, leg.leg, leg.jitter))


def last_due(leg: Leg, after: datetime, now: datetime) -> datetime | None:
    """The newest due time after ``after`` whose run should have started by ``now``."""
    span = timedelta(hours=1)
    while True:
        begin = max(after, now - span)
        found = None
        for due in due_times(leg, begin, until=now):
            if start_of(leg, due) > now:
                break
            found = due
        if found is not None or begin == after:
            return found
        span *= 8


# -- the calendar


def _until(runs: Iterator[datetime], until: datetime | None) -> Iterator[datetime]:
    for due in runs:
        if until is not None and due > until:
            return
        yield due


def _is_due(cadence: str, zone: str, moment: datetime) -> bool:
    return next(_runs(cadence, zone, moment - SECOND), None) == moment


def _runs(cadence: str, zone: str, after: datetime) -> Iterator[datetime]:
    interval = every(cadence)
    if interval is not None:
        return _fires(_interval(interval), after.replace(microsecond=0) + SECOND)
    return _on_the_clock(cadence, ZoneInfo(zone), after)


def _on_the_clock(cadence: str, zone: ZoneInfo, after: datetime) -> Iterator[datetime]:
    """Times on the wall are computed without a zone, then each is given its moment."""
    wall = after.astimezone(zone).replace(tzinfo=UTC, microsecond=0) + SECOND
    last = after
    for time in heapq.merge(*(_fires(trigger, wall) for trigger in _triggers(cadence))):
        moment = _moment(time.replace(tzinfo=None), zone)
        if moment > last:
            yield moment
            last = moment


def _fires(trigger: CronTrigger | IntervalTrigger, start: datetime) -> Iterator[datetime]:
    """When ``trigger``, in UTC, fires from ``start`` (whole seconds) on."""
    end = start + HORIZON
    while (fire := _fire(trigger, start)) is not None and fire <= end:
        yield fire
        start = fire + SECOND
        end = start + HORIZON


@lru_cache(maxsize=8192)
def _fire(trigger: CronTrigger | IntervalTrigger, start: datetime) -> datetime | None:
    """A fleet whose servers share a cadence asks the same a thousand times in one second."""
    fire: datetime | None = trigger.get_next_fire_time(None, start)
    return fire


@lru_cache(maxsize=4096)
def _interval(interval: timedelta) -> IntervalTrigger:
    from apscheduler.triggers.interval import IntervalTrigger

    return IntervalTrigger(seconds=int(interval.total_seconds()), start_date=EPOCH, timezone=UTC)


@lru_cache(maxsize=4096)
def _triggers(cadence: str) -> tuple[CronTrigger, ...]:
    """One trigger; two where day of the month and weekday are both restricted: either suffices.

    As in every crontab since the eighties, a field that begins with ``*`` restricts, but is not "restricted":
    ``*/2`` and a weekday must both fit.
    """
    from apscheduler.triggers.cron import CronTrigger

    minutes, hours, days, months, weekdays = parse_cron(cadence)
    _minute, _hour, day, _month, weekday = cadence.split()
    either = not day.startswith("*") and not weekday.startswith("*")
    whole = {"minute": minutes, "hour": hours, "month": months}
    by_day = {**whole, "day": days}
    by_weekday = {**whole, "day_of_week": frozenset((value - 1) % 7 for value in weekdays)}  # theirs: Monday is 0
    wanted = (by_day, by_weekday) if either else ({**by_day, **by_weekday},)
    return tuple(
        CronTrigger(
            **{name: ",".join(map(str, sorted(values))) for name, values in fields.items()}, second=0, timezone=UTC
        )
        for fields in wanted
    )


def _moment(wall: datetime, zone: ZoneInfo) -> datetime:
    """The moment at which clocks in ``zone`` first show ``wall``; when they skip it, the first one after the gap."""
    early = wall.replace(tzinfo=zone).astimezone(UTC)
    if early.astimezone(zone).replace(tzinfo=None) == wall:
        return early
    before = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)  # in a gap, fold 1 is before it and fold 0 behind
    offset = early.astimezone(zone).utcoffset()
    low, high = 0, int((early - before).total_seconds())
    while low < high:
        middle = (low + high) // 2
        if (before + middle * SECOND).astimezone(zone).utcoffset() == offset:
            high = middle
        else:
            low = middle + 1
    return before + low * SECOND


# -- what shifts a start


def _share(server: str, leg: str, jitter: timedelta) -> timedelta:
    """This leg's offset within ``jitter``, in whole seconds: always the same, spread evenly over all legs."""
    digest = hashlib.sha256(f"{server}/{leg}".encode()).digest()
    return int.from_bytes(digest[:8]) % (int(jitter.total_seconds()) + 1) * SECOND


@lru_cache(maxsize=1024)
def _windows(blackout: tuple[str, ...]) -> tuple[WindowTimes, ...]:
    return tuple(map(parse_window, blackout))


def _after_blackout(leg: Leg, moment: datetime) -> datetime:
    if not leg.blackout:
        return moment
    zone = ZoneInfo(leg.zone)
    latest = moment + timedelta(days=8)  # windows that fill the week: not to search for ever
    while moment < latest:
        ends = [end for window in _windows(leg.blackout) if (end := _end(window, moment, zone)) is not None]
        if not ends:
            break
        moment = max(ends)
    return moment


def _end(window: WindowTimes, moment: datetime, zone: ZoneInfo) -> datetime | None:
    """When ``window`` ends, if ``moment`` is inside it."""
    wall = moment.astimezone(zone).replace(tzinfo=None)
    midnight = wall.replace(hour=0, minute=0, second=0, microsecond=0)
    for day in (midnight - timedelta(days=1), midnight):
        end = day + timedelta(minutes=window.start + window.minutes)
        if day.isoweekday() % 7 in window.days and day + timedelta(minutes=window.start) <= wall < end:
            first = _moment(end, zone)
            return first if first > moment else end.replace(tzinfo=zone, fold=1).astimezone(UTC)
    return None


class AlarmClock:
    """Calls ``ring`` from its thread when one of the moments set has come. It decides nothing.

    A ring may come late or not at all when the machine sleeps or its clock is moved: whoever is woken looks at the
    clock and the calendar, and looks at them now and then without being woken.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        from apscheduler.executors.debug import DebugExecutor
        from apscheduler.schedulers.background import BackgroundScheduler

        self._ring = ring
        self._scheduler = BackgroundScheduler(
            timezone=UTC,
            executors={"default": DebugExecutor()},
            job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1000},
        )
        self._set: frozenset[datetime] = frozenset()
        self._lock = threading.Lock()

    def __enter__(self) -> AlarmClock:
        self._scheduler.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._scheduler.shutdown()

    def set(self, moments: frozenset[datetime]) -> None:
        """Ring at these moments, and at none of those that were set before."""
        from apscheduler.triggers.date import DateTrigger

        with self._lock:
            for gone in self._set - moments:
                if self._scheduler.get_job(gone.isoformat()) is not None:
                    self._scheduler.remove_job(gone.isoformat())
            for new in moments - self._set:
                self._scheduler.add_job(self._ring, DateTrigger(new, UTC), id=new.isoformat(), replace_existing=True)
            self._set = moments

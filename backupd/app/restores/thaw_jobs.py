"""Thaws: jobs that wait until an archive has made stored objects readable.

None has its own process or thread: whoever looks moves it on, and its rows in the catalog say where it is, so
that a look may be killed at any moment and the next one goes on. The service looks now and then (``ThawWatch``), in a
thread that ends with the look. Where a row may lag behind the destination, the destination is asked first; what is
being thawed already is not asked for again.

A restore with ``--thaw`` waits before each part until the archive has it (``JobThawWait``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

from backupd.app.context.logging_setup import say
from backupd.app.context.wiring import Wiring, gathered, user
from backupd.app.jobs.jobs import close, event_of, queued, say_of
from backupd.app.restores.thaw_wait import cold_of_part, parts_of
from backupd.model.errors import BackupdError, CancelledError, DestinationError, RefusedError
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord, JobState, Progress, Report
from backupd.model.text import format_size, format_time
from backupd.model.thaw import LOGS, ThawItem, ThawPlan, ThawState, faster, in_order, next_look
from backupd.process.throttle import TokenBucket
from backupd.transfer.thaw import Asked, ask, look, suffices
from restore.fetch.sources import ThawWait
from restore.planning.plan import Plan
from storage.destination import ArchiveDestination, Coldness, ColdState, Tier, thawable

LEAST = timedelta(minutes=1)
MOST = timedelta(minutes=30)
"""Between two looks at one thaw."""
TROUBLE = timedelta(minutes=10)
"""After a look that a destination did not answer."""
OURS = timedelta(minutes=5)
"""For so long the service leaves a thaw to whoever has just begun it."""
_SAMPLE = 32
"""So many of those that are thawing are asked about while none is expected; they come back together."""
_EXTEND = timedelta(hours=6)
"""A thawed copy that goes away sooner, while others are still thawing, is kept longer."""
_BATCH = 1000
_UNKNOWN_HOURS = 48.0
_LATE = timedelta(hours=1)
"""What is not there this long after it was expected is reported as late."""
_TO_ASK = (ThawState.WANTED, ThawState.RAISED)
READY = "thaw-ready"
LATE = "thaw-late"
NOT_RAISED = "thaw-not-raised"


def begin(
    wiring: Wiring, server: str, target: str, thaw: ThawPlan, parts: Sequence[str], *, of: str = "", by: str = ""
) -> JobRecord:
    """The job that thaws what ``thaw`` names, in the order of ``parts``: one that is under way for all of it, raised to
    a faster tier and for more days where that is wanted, or a new one. Nothing is asked for yet: ``advance`` does that.

    ``of``: which tables it is for, in words; ``by`` whom it is asked for. Raises RefusedError for a
    tier that there is not.
    """
    offer = thaw.offer
    wanted = {(one.destination, one.key) for one in thaw.objects}
    for job in wiring.catalog.jobs.list(server, kind=JobKind.THAW, state=JobState.WAITING):
        known = wiring.catalog.thaws.of(job.id)
        if wanted <= {(item.destination, item.key) for item in known}:
            # What came and went away again has to be asked for once more, and so has what could not be asked for.
            wiring.catalog.thaws.record(
                [
                    replace(item, state=ThawState.WANTED, message="")
                    for item in known
                    if item.state in (ThawState.READY, ThawState.FAILED) and (item.destination, item.key) in wanted
                ]
            )
            joined = _lengthened(wiring, job, thaw.days)
            return raise_tier(wiring, job.id, thaw.tier) if faster(thaw.tier, job.arguments["tier"]) else joined
    now = wiring.clock()
    arguments = {
        "target": target,
        "tier": thaw.tier,
        "days": thaw.days,
        "parts": list(parts),
        "tables": of,
        "cost": None if offer.cost is None else round(offer.cost, 4),
        "currency": thaw.prices.currency,
    }
    job = replace(
        queued(wiring, JobKind.THAW, server, by=by or user(), arguments=arguments),
        state=JobState.WAITING,
        started_at=now,
        not_before=now + OURS,
        message="starts to request the archived objects",
    )
    wiring.catalog.thaws.begin(
        job,
        (
            ThawItem(job.id, one.destination, one.key, one.part, one.size, one.storage_class, thaw.tier)
            for one in in_order(thaw.objects, parts)
        ),
    )
    say_of(job, "thaw-begun", f"{len(thaw.objects)} objects, {format_size(thaw.bytes)}, {thaw.tier}")
    return job


def _lengthened(wiring: Wiring, job: JobRecord, days: int) -> JobRecord:
    """What is thawed stays for ``days`` from now on, at least. A destination takes a longer time only for what is there
    already, so whatever comes is asked for again then."""
    if days <= int(job.arguments["days"]):
        return job
    until = wiring.clock() + timedelta(days=days)
    catalog = wiring.catalog
    catalog.thaws.record(
        [
            replace(item, state=ThawState.WANTED)
            for item in catalog.thaws.of(job.id, state=ThawState.READY)
            if item.ready_until is not None and item.ready_until < until
        ]
    )
    catalog.jobs.go_on_waiting(
        job.id,
        wiring.clock(),
        f"thawed copies stay readable for {days} days",
        arguments={**job.arguments, "days": days, "longer": True},
    )
    return catalog.jobs.get(job.id)


def raise_tier(wiring: Wiring, job_id: str, tier: str) -> JobRecord:
    """From the next look on, what is not there yet is asked for at ``tier``. Raises RefusedError where the thaw is
    over, ``tier`` is not faster, or a storage class does not have it; NotFoundError."""
    job = wiring.catalog.jobs.get(job_id)
    if job.kind != JobKind.THAW or job.state is not JobState.WAITING:
        raise RefusedError(
            f"job {job_id} is not a waiting thaw: it is a {job.kind}, {job.state}", hint="`backupd thaw` lists them"
        )
    if not faster(tier, job.arguments["tier"]):
        raise RefusedError(
            f"{tier} is not faster than {job.arguments['tier']}, which was requested",
            hint="a thaw can only be raised to a faster tier; the requested tier is charged in any case",
        )
    retrieval = wiring.settings.configuration.archive.prices.as_prices.retrieval
    open_items = wiring.catalog.thaws.of(job_id, state=(*_TO_ASK, ThawState.THAWING))
    without = sorted({item.storage_class for item in open_items if tier not in retrieval.get(item.storage_class, {})})
    if without:
        raise RefusedError(
            f"{' and '.join(without)} cannot be thawed at the tier {tier}",
            hint="see archive.prices in the configuration for the tiers that there are",
        )
    count = wiring.catalog.thaws.raise_tier(job_id, tier, {**job.arguments, "tier": tier})
    wiring.catalog.jobs.go_on_waiting(job_id, wiring.clock(), f"{count} objects are requested again, {tier}")
    say_of(job, "thaw-raised", f"{count} objects, {tier}")
    return wiring.catalog.jobs.get(job_id)


def advance(wiring: Wiring, job_id: str) -> JobRecord:
    """Look at one thaw, ask for what has not been asked for, and record how far it is; the job afterwards.

    Of a thaw that is over nothing happens. A destination that does not answer is written into the row, and asked again
    later. Raises CatalogError, NotFoundError.
    """
    job = wiring.catalog.jobs.get(job_id)
    if job.state is not JobState.WAITING:
        return job
    try:
        for name, items in gathered(
            (item.destination, item) for item in _ordered(job, _to_look_at(wiring, job))
        ).items():
            _Look(wiring, job, name).go(items)
    except (DestinationError, RefusedError) as error:
        wiring.catalog.jobs.go_on_waiting(
            job.id,
            wiring.clock() + TROUBLE,
            f"waits: {error.message}",
            hint=error.hint or "backupd repeats the request in a few minutes",
        )
        say_of(job, "thaw-trouble", str(error))
        return wiring.catalog.jobs.get(job.id)
    return _settled(wiring, job)


class _Look:
    """One look at what one destination is to give."""

    def __init__(self, wiring: Wiring, job: JobRecord, name: str) -> None:
        self._wiring, self._job = wiring, job
        self._archive = _archive(wiring, name)
        self._days = int(job.arguments["days"])
        self._longer = bool(job.arguments.get("longer"))
        self._slow = 0
        settings = wiring.settings.configuration.archive
        self._pace = TokenBucket(settings.requests_per_second)
        self._retrieval = settings.prices.as_prices.retrieval

    def go(self, items: Sequence[ThawItem]) -> None:
        now = self._wiring.clock()
        thawing = [item for item in items if item.state is ThawState.THAWING]
        first = _sample(thawing, now)
        changed, lost = self._come(first)
        if changed and len(first) < len(thawing):
            asked = {item.key for item in first}
            lost += self._come([item for item in thawing if item.key not in asked])[1]
        self._ask([item for item in items if item.state in (ThawState.WANTED, ThawState.READY)] + lost)
        try:
            self._ask(
                [item for item in items if item.state is ThawState.RAISED], raised=str(self._job.arguments["tier"])
            )
        finally:
            self._report_not_raised()

    def _come(self, items: Sequence[ThawItem]) -> tuple[bool, list[ThawItem]]:
        """Record what has come of those that were asked for: has anything? And what nobody knows of any more."""
        any_changed, lost = False, list[ThawItem]()
        for start in range(0, len(items), _BATCH):
            batch = items[start : start + _BATCH]
            states = look(self._archive, [item.key for item in batch])
            changed = []
            for item in batch:
                one = states.get(item.key)
                if one is None:
                    changed.append(replace(item, state=ThawState.FAILED, message="it is not there"))
                elif one.state is ColdState.ARCHIVED or self._goes_too_soon(one):
                    lost.append(item)
                elif one.state is not ColdState.THAWING:
                    changed.append(_ready(item, one))
            self._wiring.catalog.thaws.record(changed)
            any_changed = any_changed or bool(changed)
        return any_changed or bool(lost), lost

    def _goes_too_soon(self, found: Coldness) -> bool:
        """Has it come for the days that were asked for first, which were fewer than what is wanted now?"""
        return (
            self._longer and found.state is ColdState.THAWED and not suffices(found, self._days, self._wiring.clock())
        )

    def _ask(self, items: Sequence[ThawItem], *, raised: str = "") -> None:
        """``raised``: the tier at which what is under way is asked for again."""

        def wanted(item: ThawItem) -> str:
            return raised or item.tier

        for tier, of_tier in groupby(sorted(items, key=wanted), key=wanted):
            by_key = {item.key: item for item in of_tier}
            keys = [item.key for item in items if item.key in by_key]
            for answers in ask(
                self._archive,
                keys,
                Tier(tier),
                self._days,
                now=self._wiring.clock(),
                pace=self._pace,
                again=bool(raised),
            ):
                self._wiring.catalog.thaws.record([self._asked(by_key[one.key], tier, one) for one in answers])

    def _asked(self, item: ThawItem, tier: str, answer: Asked) -> ThawItem:
        now = self._wiring.clock()
        if answer.coldness is None:
            return replace(item, state=ThawState.FAILED, message=answer.problem)
        if answer.coldness.state in (ColdState.WARM, ColdState.THAWED):
            return _ready(item, answer.coldness)
        if answer.coldness.refused and item.state is ThawState.RAISED:
            self._slow += 1
            return replace(item, state=ThawState.THAWING, message=f"it could not be made faster than {item.tier}")
        price = self._retrieval.get(item.storage_class, {}).get(tier)
        hours = timedelta(hours=price.hours if price else _UNKNOWN_HOURS)
        return replace(
            item,
            state=ThawState.THAWING,
            tier=tier,
            requested_at=now,
            expected_at=now + hours,
            ready_until=None,
            message="",
        )

    def _report_not_raised(self) -> None:
        if not self._slow:
            return
        refused = DestinationError(
            f"destination {self._archive.name} refused tier {self._job.arguments['tier']} for {self._slow} objects, "
            "because their thaw is already in progress",
            hint="the previous estimate still applies: backupd thaw",
        )
        _warn(self._wiring, self._job, NOT_RAISED, refused)


def _ready(item: ThawItem, found: Coldness) -> ThawItem:
    return replace(item, state=ThawState.READY, ready_until=found.until, message="")


def _expected(items: Sequence[ThawItem]) -> datetime:
    """When the first of these is expected."""
    return min(item.expected_at for item in items if item.expected_at is not None)


def _sample(items: list[ThawItem], now: datetime) -> list[ThawItem]:
    """Those to look at, a few evenly spread ones first while none is expected."""
    if len(items) <= 2 * _SAMPLE or now >= _expected(items):
        return items
    step = len(items) // _SAMPLE
    return items[int(now.timestamp()) % step :: step]


def _to_look_at(wiring: Wiring, job: JobRecord) -> list[ThawItem]:
    """What is not there yet, and what would go away again before the rest is there."""
    catalog, soon = wiring.catalog.thaws, wiring.clock() + min(_EXTEND, timedelta(days=int(job.arguments["days"])) / 4)
    items = list(catalog.of(job.id, state=(*_TO_ASK, ThawState.THAWING)))
    until = catalog.count(job.id).ready_until
    if items and until is not None and until < soon:
        items += [
            item
            for item in catalog.of(job.id, state=ThawState.READY)
            if item.ready_until is not None and item.ready_until < soon
        ]
    return items


def _archive(wiring: Wiring, name: str) -> ArchiveDestination:
    if name not in wiring.settings.destinations:
        raise RefusedError(
            f"destination {name} is no longer configured",
            hint="configure it again, or cancel the thaw: backupd jobs cancel ID",
        )
    found = thawable(wiring.destination(name))
    if found is None:
        raise RefusedError(
            f"destination {name} no longer has archive classes",
            hint="cancel the thaw (backupd jobs cancel ID); its objects can be read without a thaw",
        )
    return found


def _ordered(job: JobRecord, items: Iterable[ThawItem]) -> list[ThawItem]:
    """What is read first comes first."""
    rank = {part: number for number, part in enumerate(job.arguments["parts"])}
    return sorted(items, key=lambda item: rank.get(item.part, len(rank)))


def _settled(wiring: Wiring, job: JobRecord) -> JobRecord:
    """Write into the row how far it is, or that it is over."""
    now, thawing = wiring.clock(), wiring.catalog.thaws.count(job.id)
    objects, size = thawing.total()
    ready, ready_bytes = thawing.total(ThawState.READY)
    until = thawing.ready_until
    if thawing.open:
        expected = thawing.expected_at
        left = None if expected is None else max(0.0, (expected - now).total_seconds())
        progress: dict[str, Any] = {
            "phase": "thaw",
            "bytes": ready_bytes,
            "bytes_total": size,
            "files": ready,
            "files_total": objects,
            "note": "",
            "seconds_left": left,
        }
        late = "" if expected is None or expected >= now else "; this is later than expected"
        by = f", the rest by {format_time(expected)}" if expected is not None else ""
        if expected is not None and expected + _LATE <= now:
            _report_late(wiring, job, expected, f"{ready} of {objects} objects can be read")
        wiring.catalog.jobs.go_on_waiting(
            job.id,
            next_look(now, expected, least=LEAST, most=MOST),
            f"waits for the archive: {ready} of {objects} objects can be read{by}{late}",
            hint=f"to speed it up at a higher price: backupd thaw --raise {job.id} --tier TIER",
            progress=progress,
        )
        return wiring.catalog.jobs.get(job.id)
    try:
        if failed := thawing.total(ThawState.FAILED)[0]:
            lines = [
                f"{item.destination}: {item.key}: {item.message}"
                for item in wiring.catalog.thaws.of(job.id, state=ThawState.FAILED, limit=20)
            ]
            return close(
                wiring,
                job,
                JobState.FAILED,
                error=BackupdError(
                    f"{failed} of {objects} archived objects cannot be thawed",
                    detail="\n".join(lines),
                    hint=("the other objects can be read; to find missing objects: backupd verify, backupd fsck"),
                ),
            )
        message = f"{objects} archived objects ({format_size(size)}) can be read" + (
            f" until {format_time(until)}" if until is not None else ""
        )
        hint = f"restore now: backupd restore {job.server} --to {job.arguments['target']} --datadir DIR"
        ready_now = _event(wiring, job, READY, BackupdError(message, hint=hint), Severity.INFO)
        ended = wiring.catalog.jobs.finish(
            job.id, JobState.SUCCEEDED, now, token=job.token, bytes=size, events=[ready_now]
        )
    except RefusedError:
        return wiring.catalog.jobs.get(job.id)  # somebody else was faster, or it was cancelled
    say_of(job, READY, message)
    return ended


def _report_late(wiring: Wiring, job: JobRecord, expected: datetime, progress: str) -> None:
    """Tell that what was expected by then has not come; once for each moment that was promised."""
    if any(event.at >= expected for event in wiring.catalog.events.page(kind=LATE, job_id=job.id, limit=1).items):
        return
    late = DestinationError(
        f"the thaw is late: {progress}, and the rest was expected by {format_time(expected)}",
        hint="backupd keeps waiting. Ask the operator of the destination, or have it done faster at a "
        f"higher price: backupd thaw --raise {job.id} --tier TIER",
    )
    _warn(wiring, job, LATE, late)


def _warn(wiring: Wiring, job: JobRecord, kind: str, what: BackupdError) -> None:
    say_of(job, kind, what.message, level=logging.WARNING)
    wiring.catalog.events.add(_event(wiring, job, kind, what, Severity.WARNING))


def _event(wiring: Wiring, job: JobRecord, kind: str, what: BackupdError, severity: Severity) -> Event:
    return replace(event_of(job, wiring.clock(), kind, what, severity), subject=str(job.arguments["target"]))


def refuse_stopped(job: JobRecord) -> None:
    """Raises CancelledError or DestinationError when nothing more comes of a thaw."""
    if job.state is JobState.CANCELLED:
        raise CancelledError(f"the thaw {job.id} was cancelled", hint="repeat the command to request the rest")
    if job.state is JobState.FAILED:
        raise DestinationError(job.message, detail=job.detail, hint=job.hint)


_AHEAD = MOST + timedelta(hours=1)
"""A next look that is later than this was computed by a clock that was ahead."""


class ThawWatch:
    """Moves on what waits for an archive. Between the looks there is nothing but rows in the catalog."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def look(self, wiring: Wiring, now: datetime) -> None:
        """Begin to look at those whose time it is, unless the look before is still at it. Raises CatalogError."""
        if self._thread is not None and self._thread.is_alive():
            return
        due = [job.id for job in wiring.catalog.jobs.waiting(now, _AHEAD)]
        if due:
            # A daemon thread: the service may end in the middle; the next look asks before it asks for anything again.
            self._thread = threading.Thread(target=_look_at, args=(wiring, due), name="thaws", daemon=True)
            self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for the look that is going on, if there is one."""
        if self._thread is not None:
            self._thread.join(seconds)


def _look_at(wiring: Wiring, job_ids: list[str]) -> None:
    for job_id in job_ids:
        try:
            advance(wiring, job_id)
        except BackupdError as error:
            say("thaw-trouble", str(error), level=logging.WARNING, job=job_id)


STEP = 1.0
"""Seconds between looks at whether somebody wants to stop."""


class JobThawWait(ThawWait):
    """The thaw is a separate job: it goes on when the restore ends, and the restore joins it when it is repeated.
    There are several where something had to be thawed again."""

    def __init__(self, wiring: Wiring, chosen: Plan, tier: str, days: int = 0) -> None:
        self._wiring, self._chosen, self._tier = wiring, chosen, tier
        self._days = days or wiring.settings.configuration.archive.days
        self._lock = threading.Lock()
        self._job_ids: list[str] = []
        if chosen.thaw is not None:
            self._begin(chosen.thaw)

    def is_open(self, part: str) -> bool:
        """Can this part (a backup id, or LOGS) be read now? Moves the thaws on where it is time. Raises
        CatalogError."""
        for job_id in self._job_ids:
            self._moved_on(job_id)
        return not any(self._wiring.catalog.thaws.count(job_id).waits_for(part) for job_id in self._job_ids)

    def wait(self, part: str, report: Report, cancelled: Callable[[], bool]) -> None:
        """Return when this part can be read. Raises CancelledError (the thaw goes on), and RefusedError or another
        error of the thaw when it failed or was stopped."""
        for job_id in tuple(self._job_ids):
            self._wait(job_id, part, report, cancelled)

    def _wait(self, job_id: str, part: str, report: Report, cancelled: Callable[[], bool]) -> None:
        while True:
            job = self._moved_on(job_id)
            thawing = self._wiring.catalog.thaws.count(job_id)
            if not thawing.waits_for(part):
                if thawing.total(ThawState.FAILED, part=part)[0]:
                    refuse_stopped(job)
                return
            refuse_stopped(job)
            ready, ready_bytes = thawing.total(ThawState.READY, part=part)
            objects, size = thawing.total(part=part)
            by = thawing.expected_at
            what = "binary logs" if part == LOGS else f"backup {part}"
            report(
                Progress(
                    "thaw",
                    ready_bytes,
                    size,
                    ready,
                    objects,
                    note=f"{what}, expected by {format_time(by)}" if by else what,
                    waits=True,
                )
            )
            if cancelled():
                raise CancelledError(
                    "the restore was cancelled while it waited for an archive",
                    hint=f"the thaw continues (job {job_id}); repeat the command to wait for it",
                )
            time.sleep(STEP)

    def reopen(self, part: str) -> bool:
        """A thawed copy went away while it was read, or a rule of the destination has archived what was not."""
        found = cold_of_part(self._wiring, self._chosen, part)
        if found:
            prices = self._wiring.settings.configuration.archive.prices.as_prices
            self._begin(ThawPlan(found, self._days, self._tier, prices))
        return bool(found)

    def _begin(self, thaw: ThawPlan) -> None:
        job = begin(self._wiring, self._chosen.server, self._chosen.target, thaw, parts_of(self._chosen))
        advance(self._wiring, job.id)
        if job.id not in self._job_ids:
            self._job_ids.append(job.id)

    def _moved_on(self, job_id: str) -> JobRecord:
        """The job, looked at again where it is time for that."""
        with self._lock:
            job = self._wiring.catalog.jobs.get(job_id)
            due = job.not_before is None or job.not_before <= self._wiring.clock()
            return advance(self._wiring, job.id) if job.state is JobState.WAITING and due else job

"""The policies' legs against the catalog's schedules: what is due becomes rows of jobs."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from backupd.app.missed import AHEAD, Action, absorb, account, records
from backupd.app.schedule import Leg, all_legs, due_times, start_of
from backupd.app.settings import Settings
from backupd.catalog.schedules import Key, Schedule
from backupd.catalog.session import Catalog
from backupd.model.clock import format_time
from backupd.model.event import Event, Severity
from backupd.model.hold import EVERY_SERVER, HoldKind
from backupd.model.job import JobRecord, JobState


class Timetable:
    """One daemon uses one. It keeps in mind what the catalog says, and what comes next for each leg."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._legs: dict[Key, Leg] = {}
        self._rows: dict[Key, Schedule] = {}
        self._next: dict[Key, datetime | None] = {}

    def follow(self, settings: Settings, now: datetime) -> None:
        """Follow these settings from now on. A leg that is new, or has another cadence than before, begins now; one
        that is in no policy any more is remembered as ended. Raises CatalogError."""
        legs = {leg.key: leg for leg in all_legs(settings)}
        rows = self._catalog.schedules.all()
        changes = []
        for key, leg in legs.items():
            row = rows.get(key)
            if row is None or row.cadence != leg.rhythm:
                changes.append(Schedule(*key, cadence=leg.rhythm, since=now, handled=now))
        changes += [replace(row, cadence="") for key, row in rows.items() if key not in legs and row.cadence]
        self._catalog.schedules.settle(rows, changes)
        self._legs, self._rows = legs, rows | {row.key: row for row in changes}
        self._next = {}
        for key in legs:
            self._look_ahead(key)

    def refresh(self) -> None:
        """Read the schedules anew, in case somebody changed them. Raises CatalogError."""
        rows = self._catalog.schedules.all()
        changed = [key for key in self._legs if rows.get(key) != self._rows.get(key)]
        self._rows = rows
        for key in changed:
            self._look_ahead(key)

    def coming(self) -> frozenset[datetime]:
        """When runs start next."""
        return frozenset(moment for moment in self._next.values() if moment is not None)

    def handle(self, now: datetime, why: str, *, settled: bool = True) -> tuple[JobRecord, ...]:
        """Deal with every due time whose start has come: gives the rows of jobs that this made, of whatever state.

        ``why`` those before the last were not dealt with at their time. ``settled``: the clock can be trusted more
        than a schedule that was dealt with far ahead of it. Raises CatalogError, and RefusedError when
        somebody else has dealt with the same due times; either way nothing was written, and trying again is right.
        """
        events = []
        changes: dict[Key, Schedule] = {}
        wrong = [row for key in self._legs if (row := self._rows[key]).handled > now + AHEAD]
        if wrong and settled:
            changes |= {row.key: replace(row, since=min(row.since, now), handled=now) for row in wrong}
            events.append(_corrected(wrong, now))
        due = [key for key, moment in self._next.items() if moment is not None and moment <= now and key not in changes]
        if not due and not changes:
            return ()
        actions = absorb(self._actions(due, now, why)) if due else ()
        for action in actions:
            changes[action.leg.key] = replace(self._rows[action.leg.key], handled=action.due)
        made = records(actions, now)
        self._catalog.schedules.settle(self._rows, tuple(changes.values()), jobs=made.jobs,
                                       events=(*events, *made.events))
        self._rows |= changes
        for key in changes:
            self._look_ahead(key)
        return made.jobs

    def _actions(self, due: list[Key], now: datetime, why: str) -> list[Action]:
        going = [job for job in self._catalog.jobs.list(state=(JobState.QUEUED, JobState.RUNNING)) if job.leg]
        going.sort(key=lambda job: job.state is JobState.RUNNING)  # a running one counts before one that waits
        open_jobs = {(job.server, job.leg): job for job in going}
        paused = {hold.server: hold.text for hold in self._catalog.holds.all() if hold.kind is HoldKind.PAUSE}
        found: list[Action] = []
        for key in due:
            leg = self._legs[key]
            reason = paused.get(leg.server, paused.get(EVERY_SERVER)) if leg.server else None
            found += account(leg, self._rows[key].handled, now, why=why, open_job=open_jobs.get(key), paused=reason)
        return found

    def _look_ahead(self, key: Key) -> None:
        leg = self._legs[key]
        due = next(due_times(leg, self._rows[key].handled, count=1), None)
        self._next[key] = None if due is None else start_of(leg, due)


def _corrected(rows: list[Schedule], now: datetime) -> Event:
    furthest = max(row.handled for row in rows)
    return Event(
        at=now, kind="clock-jump", severity=Severity.WARNING, subject="schedules",
        message=f"{len(rows)} schedules had been dealt with up to {format_time(furthest)}, which is still to come: the "
                f"clock was wrong then. They go on from now",
        hint="look at this host's time service, and at the jobs of that time, which went by the wrong clock")

"""What has changed in the catalog since the last look: events that were recorded, jobs that moved on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from backupd.app.context.wiring import Wiring
from backupd.catalog.jobs import OPEN
from backupd.model.errors import NotFoundError
from backupd.model.event import Event
from backupd.model.job import JobRecord

_PATIENCE = timedelta(seconds=30)
"""How long an event may take from its number to its commit; other numbers may be seen before."""
_FRESH = timedelta(minutes=1)
"""A job that was queued, and over, between two looks is found for so long."""


@dataclass(frozen=True, slots=True)
class Change:
    """``events`` in the order of their numbers; ``jobs`` as they are now."""

    events: tuple[Event, ...]
    jobs: tuple[JobRecord, ...]


class News:
    """What is there when it is made is no news. Used by one thread at a time; raises CatalogError."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._newest = wiring.catalog.events.newest()
        self._missing: dict[int, datetime] = {}
        self._known = {job.id: _shown(job) for job in self._jobs()}

    def look(self) -> Change:
        return Change(self._events(), self._changed())

    def _events(self) -> tuple[Event, ...]:
        """Numbers are given before the commit, so one may come after a higher one: it is waited for."""
        now = self._wiring.clock()
        self._missing = {number: since for number, since in self._missing.items() if now - since < _PATIENCE}
        before = min(self._missing, default=self._newest + 1) - 1
        found = [
            event
            for event in self._wiring.catalog.events.since(before)
            if event.number > self._newest or event.number in self._missing
        ]
        for event in found:
            if event.number > self._newest:
                self._missing |= dict.fromkeys(range(self._newest + 1, event.number), now)
                self._newest = event.number
            else:
                del self._missing[event.number]
        return tuple(found)

    def _changed(self) -> tuple[JobRecord, ...]:
        before = self._known
        now = {job.id: _shown(job) for job in self._jobs()}
        gone = [_shown(job) for job in self._still(before.keys() - now.keys())]
        self._known = now
        return tuple(job for job in (*gone, *now.values()) if before.get(job.id) != job)

    def _jobs(self) -> Iterable[JobRecord]:
        """Those that are not over, and the newest."""
        jobs = self._wiring.catalog.jobs
        found = {job.id: job for job in jobs.list(since=self._wiring.clock() - _FRESH)}
        return (found | {job.id: job for job in jobs.list(state=OPEN)}).values()

    def _still(self, ids: Iterable[str]) -> Iterable[JobRecord]:
        for job_id in sorted(ids):
            try:
                yield self._wiring.catalog.jobs.get(job_id)
            except NotFoundError:
                continue


def _shown(job: JobRecord) -> JobRecord:
    """Without what changes all the time and nobody is shown."""
    return replace(job, heartbeat_at=None, token=0, owner="")

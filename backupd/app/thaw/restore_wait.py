"""What a restore with ``--thaw`` waits at: each part until the archive gives it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from backupd.app.context.wiring import Wiring
from backupd.app.thaw.requests import advance, begin, refuse_stopped
from backupd.app.thaw.storage_tiers import cold_of_part
from backupd.model.errors import CancelledError
from backupd.model.job import JobRecord, JobState, Progress, Report
from backupd.model.text import format_time
from backupd.model.thaw import LOGS, ThawPlan, ThawState
from restore.planning.plan import Plan

STEP = 1.0
"""Seconds between looks at whether somebody wants to stop."""


def parts_of(chosen: Plan) -> tuple[str, ...]:
    """In the order in which a restore reads them."""
    return (*chosen.chain, LOGS)


class ThawGate:
    """See ``restore.fetch.thaw_wait.Gate``. The thaw is a job of its own: it goes on when the restore ends, and the
    restore joins it when it is repeated. There are several where something had to be thawed again."""

    def __init__(self, wiring: Wiring, chosen: Plan, tier: str, days: int = 0) -> None:
        self._wiring, self._chosen, self._tier = wiring, chosen, tier
        self._days = days or wiring.settings.configuration.archive.days
        self._lock = threading.Lock()
        self._job_ids: list[str] = []
        if chosen.thaw is not None:
            self._begin(chosen.thaw)

    def is_open(self, part: str) -> bool:
        for job_id in self._job_ids:
            self._moved_on(job_id)
        return not any(self._wiring.catalog.thaws.count(job_id).waits_for(part) for job_id in self._job_ids)

    def wait(self, part: str, report: Report, cancelled: Callable[[], bool]) -> None:
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
                    hint=f"the thaw goes on (job {job_id}); the same command joins it",
                )
            time.sleep(STEP)

    def reopen(self, part: str) -> bool:
        """A thawed copy went away while it was read, or a rule of the place has archived what was not."""
        found = cold_of_part(self._wiring, self._chosen, part)
        if found:
            prices = self._wiring.settings.configuration.archive.prices.as_prices()
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

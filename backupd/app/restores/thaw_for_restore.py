"""`backupd thaw`: ask for what a restore will need, look how far that is, make it faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from backupd.app.context.wiring import Wiring
from backupd.app.restores.request import RestoreOptions, TableOptions
from backupd.app.restores.table_restore import plan_tables
from backupd.app.restores.thaw_jobs import advance, begin, raise_tier
from backupd.app.restores.thaw_wait import parts_of
from backupd.app.restores.whole_server import plan
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.thaw import Thawing
from restore.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Thawed:
    """What was asked for. ``job`` None: everything can be read as it is."""

    plan: Plan
    job: JobRecord | None = None
    thawing: Thawing | None = None

    def as_json(self) -> dict[str, Any]:
        """As `thaw --json` gives it."""
        return {
            "server": self.plan.server,
            "target": self.plan.target,
            "chain": list(self.plan.chain),
            "needed": self.plan.thaw.as_json() if self.plan.thaw else None,
            "job": self.job.as_json() if self.job else None,
            "thaw": self.thawing.as_json() if self.thawing else None,
        }


def thaw_for(
    wiring: Wiring, server: str, target: str, options: RestoreOptions, tables: Sequence[str], by: str = ""
) -> Thawed:
    """Ask for what a restore to ``target`` needs, and is not being thawed yet. Raises what ``plan`` raises."""
    options = replace(options, everywhere=True, accept_older=True, accept_inexact=True)
    base = (
        plan_tables(wiring, server, target, TableOptions.of(tables, None, options)).base
        if tables
        else plan(wiring, server, target, None, options=options)
    )
    if base.thaw is None:
        return Thawed(base)
    begun = begin(wiring, server, target, base.thaw, parts_of(base), of=" ".join(tables), by=by)
    job = advance(wiring, begun.id)
    return Thawed(base, job, wiring.catalog.thaws.count(job.id))


def thaws(wiring: Wiring, server: str | None) -> list[tuple[JobRecord, Thawing]]:
    """Every thaw that the catalog remembers, newest first. Those that wait are looked at where it is time, so that
    they go on on a machine without the service, too."""
    found = []
    for job in wiring.catalog.jobs.list(server, kind=JobKind.THAW):
        due = job.state is JobState.WAITING and (job.not_before is None or job.not_before <= wiring.clock())
        found.append(advance(wiring, job.id) if due else job)
    return [(job, wiring.catalog.thaws.count(job.id)) for job in found]


def raised(wiring: Wiring, job_id: str, tier: str) -> tuple[JobRecord, Thawing]:
    """Raises what ``raise_tier`` does."""
    raise_tier(wiring, job_id, tier)
    return advance(wiring, job_id), wiring.catalog.thaws.count(job_id)

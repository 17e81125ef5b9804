"""Restores as jobs: planned under an id, started by that id, done by a process of the service, continued when they
are requested again.

The row of a restore stays the same however often it is taken up; each attempt is a job. What a restore will need out of
archives can be asked for before it (`backupd thaw`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from backupd.app.context.keys import require_keys
from backupd.app.context.wiring import JobRun, Result, Wiring
from backupd.app.jobs.jobs import queued
from backupd.app.restores.allowed_folders import (
    refuse_changed,
    refuse_folder,
    refuse_shared,
    refuse_unseen,
    with_real_paths,
)
from backupd.app.restores.execution import Outcome, base_of, earlier_attempt, promise, restore, row_of
from backupd.app.restores.new_replica import planned_whole, refuse_unnamed
from backupd.app.restores.plan import plan
from backupd.app.restores.progress import view
from backupd.app.restores.request import RestoreOptions, RestoreRequest, TableOptions
from backupd.app.restores.table_sources import chosen_way
from backupd.app.restores.thaw_jobs import advance, begin, raise_tier
from backupd.app.restores.thaw_wait import parts_of, refuse_cold
from backupd.catalog.restores import StoredPlan
from backupd.model.access import Actor
from backupd.model.errors import BackupdError, BusyError, NotFoundError, RefusedError
from backupd.model.job import JobKind, JobRecord, JobState, RestoreRecord
from backupd.model.text import new_id
from backupd.model.thaw import Thawing
from restore.planning.plan import Plan
from restore.planning.table_plan import TablePlan
from restore.planning.target import Latest, parse_target
from restore.whole_server import RestoreOutcome

VALID = timedelta(hours=1)
"""How long a plan can be started."""


class PlanChangedError(RefusedError):
    """Started now, it would come to something else than what was shown. ``plan``: what, to be started instead."""

    problem_type = "plan-changed"

    def __init__(self, message: str, plan: StoredPlan, *, detail: str = "") -> None:
        super().__init__(message, detail=detail, hint=f"review the new plan {plan.id}, then start it")
        self.plan = plan


class UnconfirmedError(RefusedError):
    """Data may be replaced, and that is not confirmed. ``confirm``: the name to repeat."""

    problem_type = "unconfirmed"

    def __init__(self, message: str, confirm: str) -> None:
        super().__init__(message, hint=f"check the name, then confirm with it: {confirm}")
        self.confirm = confirm


def make_plan(wiring: Wiring, actor: Actor, request: RestoreRequest) -> StoredPlan:
    """Raises UsageError, and what planning raises."""
    request.check()
    refuse_unseen(wiring, actor, request)
    refuse_unnamed(wiring, actor, request)
    return _store(wiring, actor, request, _planned(wiring, request))


def request_restore(
    wiring: Wiring, actor: Actor, wanted: str | RestoreRequest, confirm: str | None
) -> tuple[RestoreRecord, JobRecord]:
    """Queue a plan by its id, or a request. Raises whatever would make the restore fail, as far as that can be
    checked now."""
    shown = wiring.catalog.plans.get(wanted, wiring.clock()) if isinstance(wanted, str) else None
    request = RestoreRequest.from_json(shown.request) if shown is not None else wanted
    if isinstance(request, str):
        raise NotFoundError(f"there is no plan {request}")
    request.check()
    request.check_target_folder()
    wiring.settings.needs_restore()
    refuse_unseen(wiring, actor, request)
    refuse_unnamed(wiring, actor, request)
    request = with_real_paths(request)
    refuse_folder(wiring, actor, request)
    chosen = _planned(wiring, request)
    if shown is not None and (other := _difference(promise(shown.document), promise(chosen.as_json()), request)):
        raise PlanChangedError(
            "the plan has changed since it was shown", _store(wiring, actor, request, chosen), detail=other
        )
    _refuse_unconfirmed(request, confirm)
    require_keys(wiring, request.server, base_of(chosen).chain)
    if not request.thaw:
        refuse_cold(base_of(chosen))
    return _queue(wiring, actor, request, chosen)


def perform_restore(wiring: Wiring, run: JobRun) -> Result:
    """Do the restore whose row the job's arguments name (``restore``), or the one that they hold (``request``)."""
    arguments = run.job.arguments
    waiting = wiring.catalog.restores.get(str(arguments["restore"])) if "restore" in arguments else None
    kept: Mapping[str, Any] = arguments if waiting is None else waiting.request or {}
    request = RestoreRequest.from_json(kept["request"])
    promised = kept.get("promise")

    def as_promised(chosen: TablePlan) -> None:
        if promised and (other := _difference(promised, promise(chosen.as_json()), request)):
            raise RefusedError(
                "the restore would differ from the plan that was started",
                detail=other,
                hint="request a new plan and start that one",
            )

    if waiting is not None:
        refuse_changed(request)
        if not request.of_tables and not kept["promise"]["until"]:
            request = replace(request, target=f"backup:{waiting.backup_id}")
    outcome = restore(wiring, request, run, waiting=waiting, as_promised=as_promised)
    wiring.catalog.restores.keep_outcome(outcome.restore_id, _without_rows(outcome.as_json()))
    return of_restore(outcome)


def of_restore(outcome: Outcome) -> Result:
    """What the row of a restore's job says."""
    problem = None
    if not outcome.is_good:
        problem = BackupdError(
            f"restore {outcome.restore_id} finished with errors",
            detail=_trouble(outcome),
            hint="everything else was restored; check what is named above before you use it",
        )
    # Without phases: rates count those of the restore itself.
    return Result(
        outcome.restore_id,
        max((phase.bytes for phase in outcome.phases), default=0),
        problem=problem,
        partial=problem is not None,
        outcome=outcome,
    )


# -- inside


def _planned(wiring: Wiring, request: RestoreRequest) -> Plan | TablePlan:
    if request.of_tables:
        return chosen_way(wiring, request.server, request.target, request.table_options)[0]
    return planned_whole(wiring, request)[0]


def _store(wiring: Wiring, actor: Actor, request: RestoreRequest, chosen: Plan | TablePlan) -> StoredPlan:
    now = wiring.clock()
    found = StoredPlan(new_id(now), request.server, now, actor.name, now + VALID, request.as_json(), chosen.as_json())
    wiring.catalog.plans.add(found, now)
    return found


def _difference(shown: Mapping[str, Any], now: Mapping[str, Any], request: RestoreRequest) -> str:
    """How two promises differ, a line each. For ``latest`` the position is not compared: it is another one each
    time, as was meant."""
    ignored = {"until"} if isinstance(parse_target(request.target).goal, Latest) else set()
    return "\n".join(
        f"{name}: {now[name]}, was {shown[name]}"
        for name in ("chain", "way", "tables", "until")
        if name not in ignored and now[name] != shown[name]
    )


def _refuse_unconfirmed(request: RestoreRequest, confirm: str | None) -> None:
    if not request.replaces_live:
        return
    if confirm is None:
        raise UnconfirmedError(
            f"the restore writes into the running server {request.into} and needs a confirmation", request.into
        )
    if confirm != request.into:
        raise UnconfirmedError(f"{confirm[:80]} does not match the target server {request.into}", request.into)


def _queue(
    wiring: Wiring, actor: Actor, request: RestoreRequest, chosen: Plan | TablePlan
) -> tuple[RestoreRecord, JobRecord]:
    now = wiring.clock()
    wiring.catalog.restores.settle(now)
    earlier = earlier_attempt(wiring, request, chosen)
    if earlier is not None and (ending := view(wiring, earlier).job) is not None and ending.state is JobState.RUNNING:
        raise BusyError(
            f"the previous attempt, job {ending.id}, is still ending", hint="repeat the request in a few seconds"
        )
    refuse_shared(wiring, request)
    restore_id = earlier.id if earlier is not None else new_id(now)
    arguments = {"restore": restore_id, "target": request.target}
    job = queued(wiring, JobKind.RESTORE, request.server, by=actor.name, arguments=arguments)
    return wiring.catalog.restores.queue(replace(row_of(request, chosen, job), id=restore_id), job), job


def _trouble(outcome: Outcome) -> str:
    if isinstance(outcome, RestoreOutcome):
        return "\n".join(f"{check.name}: {check.detail}" for check in outcome.checks if check.outcome == "failed")
    return "\n".join(
        [
            *(f"{one.goal.source.shown}: {one.trouble}" for one in outcome.tables if one.trouble),
            *outcome.orphans,
            *(f"{one['kind']} {one['name']}: {one['why']}" for one in outcome.objects.as_json()["failed"]),
        ]
    )


def _without_rows(document: dict[str, Any]) -> dict[str, Any]:
    """No value of a table goes into the catalog."""
    for table in document.get("tables", ()):
        if table["difference"]:
            table["difference"].pop("samples")
    return document


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
        chosen_way(wiring, server, target, TableOptions.of(tables, None, options))[0].base
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

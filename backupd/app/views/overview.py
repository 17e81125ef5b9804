"""Every server at a glance: can it be recovered as promised, and if not, what is wrong and what to do.

However many servers there are, a few statements read what changes all the time, and the rows of the status of each of
them (see ``backupd.app.views.standings``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from backupd.alerts.rules import POLICY, PROTECTION, RPO, RTO, STREAM
from backupd.app.binlogs.status import NOT_RUNNING, OFF, acknowledged, state_of, stream_troubles
from backupd.app.binlogs.stream_report import SILENT
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.app.copies.protection import protection_of
from backupd.app.jobs.jobs import BAD as OF_JOBS
from backupd.app.schedule.calendar import legs
from backupd.app.views.objectives import first_backup
from backupd.app.views.server_status import (
    LastProof,
    NextRun,
    Reason,
    ServerOverview,
    Status,
    StreamView,
)
from backupd.app.views.standings import UNSEEN, ServerStatus, StatusCache, status_cache
from backupd.app.views.timeline import destination_troubles
from backupd.binlog.stream_status import StreamState
from backupd.catalog.backups import Absence
from backupd.catalog.jobs import OPEN
from backupd.catalog.overview import is_in_trouble
from backupd.model.backup_record import EVERY_SERVER, HoldKind
from backupd.model.binlog import Gap
from backupd.model.document import made_of
from backupd.model.event import Incident, Severity
from backupd.model.job import BACKUPS, JobRecord, JobState, LastJob
from backupd.model.proof import FAILED, INEXACT, UNDECIDED
from backupd.model.text import format_duration, format_time

GAP = "binlog-gap"
FEW = 100
"""Up to this number of servers the rows are asked for by their names; beyond that, all are."""
_FRESH_GAP = timedelta(days=7)
"""A gap that was noticed within this time is worth a warning; an older one is only shown."""
_T = TypeVar("_T", JobRecord, LastJob, Incident)
_SAID_HERE = frozenset({POLICY.broken, RPO.broken, RTO.broken, STREAM.broken, PROTECTION.broken})
"""Incidents of these kinds report what is looked at here anyway."""


def overview(wiring: Wiring, now: datetime, servers: Collection[str] | None = None) -> tuple[ServerOverview, ...]:
    """Of every configured server, or those of ``servers``, in the order of the configuration. Raises CatalogError, and
    NotFoundError for one of ``servers`` that is not configured."""
    known = status_cache(wiring.catalog)
    for name in servers or ():
        wiring.settings.server(name)
    names = tuple(name for name in wiring.settings.servers if servers is None or name in servers)
    only = names if servers is not None and len(names) <= FEW else None
    return known.shared(wiring, now, names, lambda: tuple(_made(wiring, known, now, names, only)))


@dataclass(frozen=True, slots=True)
class _Around:
    """What is known of one server besides what is in its overview."""

    recovery: ServerStatus
    last_jobs: Sequence[LastJob]
    absence: Absence | None
    said: tuple[Mapping[str, Any], datetime] | None


def _made(
    wiring: Wiring, known: StatusCache, now: datetime, names: Sequence[str], only: Collection[str] | None
) -> Iterator[ServerOverview]:
    """Of these names; ``only``: whose rows are read, None: those of every server."""
    catalog = wiring.catalog
    recovery = known.of(wiring, names, now, only)
    jobs = _by_server(catalog.jobs.list(only, state=OPEN))
    last = _by_server(catalog.glances.last_jobs(only))
    incidents = _by_server(catalog.incidents.list(only, is_open=True))
    tests, streams = catalog.glances.tests(only), catalog.glances.streams(only)
    absences = {absence.server: absence for absence in catalog.absences.all(only)}
    holds = {(one.server, one.kind): one for one in catalog.holds.all(only)}
    schedules = catalog.schedules.all() if any(one.found.bare for one in recovery.values()) else {}
    for name in names:
        server, looked = wiring.settings.server(name), recovery.get(name)
        around = _Around(looked or UNSEEN, last[name], absences.get(name), streams.get(name))
        view, test, promised = (
            around.recovery.view,
            tests.get(name),
            server.policy.objectives if server.usable else None,
        )
        state = state_of(wiring, name, around.said and around.said[0])
        troubles = destination_troubles(server, around.said[0] if around.said else None, now)
        held, paused = (
            holds.get((name, kind)) or holds.get((EVERY_SERVER, kind)) for kind in (HoldKind.HOLD, HoldKind.PAUSE)
        )
        made = replace(
            view,
            name=name,
            policy=server.policy_name,
            labels=server.config.labels,
            rpo=max(now - view.latest, timedelta()) if view.latest is not None else None,
            rpo_objective=promised.rpo if promised else None,
            rto_objective=promised.rto if promised else None,
            reach=tuple(replace(one, trouble=troubles.get(one.name, "")) for one in view.reach),
            stream=_stream(state, around.said, now),
            next_runs=tuple(_next_runs(wiring, server, known, now)),
            last_proof=made_of(LastProof, test, warnings=tuple(test.warnings or ()), older=bool(test.older))
            if test
            else None,
            running=tuple(job for job in jobs[name] if job.state is JobState.RUNNING),
            waiting=sum(job.state is not JobState.RUNNING for job in jobs[name]),
            incidents=tuple(incidents[name]),
            held=held,
            paused=paused,
            last_jobs=tuple(last[name]),
            absent_since=around.absence.since if around.absence else None,
            looked_at=looked.at if looked and not looked.found.trouble else None,
            first_due=first_backup(
                wiring.settings,
                name,
                schedules,
                now,
                busy=any(job.kind in BACKUPS for job in jobs[name]),
                ended=any(job.kind in BACKUPS for job in last[name]),
            )
            if server.usable and around.recovery.found.bare
            else None,
        )
        reasons = sorted(_reasons(wiring, made, server, around, now), key=lambda reason: -reason.status.rank)
        yield replace(made, status=reasons[0].status if reasons else Status.GOOD, reasons=tuple(reasons))


def _by_server(found: Iterable[_T]) -> Mapping[str, list[_T]]:
    by_name: dict[str, list[_T]] = defaultdict(list)
    for one in found:
        by_name[one.server].append(one)
    return by_name


def _next_runs(wiring: Wiring, server: ServerSettings, known: StatusCache, now: datetime) -> Iterator[NextRun]:
    if not server.usable:
        return
    runs = [(start, leg) for leg in legs(wiring.settings, server.name) if (start := known.coming(leg, now))]
    for start, leg in sorted(runs, key=lambda run: (run[0], run[1].leg)):
        yield NextRun(leg.leg, leg.kind, start)


def _stream(state: str, said: tuple[Mapping[str, Any], datetime] | None, now: datetime) -> StreamView | None:
    if state == OFF:
        return None
    row, at = said if said is not None else ({}, None)
    return StreamView(
        state,
        at,
        int(row.get("spool_bytes") or 0),
        int(row.get("max_spool_bytes") or 0),
        str(row.get("error") or ""),
        acknowledged(said, now),
    )


# -- what is wrong


def _reasons(
    wiring: Wiring, made: ServerOverview, server: ServerSettings, around: _Around, now: datetime
) -> Iterator[Reason]:
    """Everything that is not as it should be, in the order in which reasons of one rank are shown."""
    recovery = around.recovery
    if not server.usable:
        yield Reason(
            Status.BAD,
            f"its policy {made.policy} cannot be used: no scheduled job of this server starts",
            "; ".join(str(problem) for problem in server.problems[:3]),
        )
    yield from _of_recovery(made, recovery)
    if recovery.behind:
        yield Reason(
            Status.WARNING,
            f"recoverability is shown as of {format_time(recovery.at)}: later changes are not evaluated yet",
            "repeat in a few seconds; while no service runs: backupd timeline " + made.name,
        )
    yield from _of_last_proof(made)
    if made.latest is not None:
        yield from (
            Reason(Status.WARNING, f"{one.name}: {one.trouble}", f"backupd binlog status {made.name}")
            for one in made.reach
            if one.trouble
        )
        yield from (
            Reason(Status.WARNING, doubt, f"backupd timeline {made.name} shows what can be recovered")
            for doubt in recovery.found.doubts
        )
    if made.paused is None:
        yield from _of_stream(made, around, now)
    yield from _of_incidents_and_jobs(made, around)
    span = protection_of(wiring, made.name).within
    if recovery.found.unprotected_since is not None and now - recovery.found.unprotected_since > span and server.usable:
        yield Reason(
            Status.WARNING,
            f"no protected backup for {_span(now - recovery.found.unprotected_since)}: too few verified copies at the "
            "destinations",
            f"backupd replicate {made.name}",
        )
    yield from _of_gaps(made, around, now)
    if made.paused is not None:
        yield Reason(
            Status.WARNING,
            f"scheduled jobs are suspended: {made.paused.text}",
            f"backupd resume {'--all' if made.paused.server == EVERY_SERVER else made.name}",
        )
    if around.absence is not None and all(job.id != around.absence.job_id for job in made.running):
        yield Reason(
            Status.BAD,
            f"out of rotation since {format_time(around.absence.since)}, and the job that took it out is over",
            f"run the policy's hooks.after by hand; backupd jobs show {around.absence.job_id}",
        )


def _of_recovery(made: ServerOverview, recovery: ServerStatus) -> Iterator[Reason]:
    """Can the server be recovered at all, and as the objectives promise?"""
    name = made.name
    kind = " --kind logical" if made.tables_only else ""
    if recovery.found.trouble:
        message, _line, rest = recovery.found.trouble.partition("\n")
        yield Reason(Status.BAD, f"cannot determine the recoverable points in time: {message}", rest)
    elif recovery is UNSEEN:
        yield Reason(Status.WARNING, "its state is not determined yet", "repeat in a few seconds")
    elif made.latest is None and made.first_due is not None:
        runs = any(job.kind in BACKUPS for job in made.running)
        when = "is running" if runs else f"starts at {format_time(made.first_due)}"
        yield Reason(
            Status.WARNING,
            f"no backup has been taken yet: the first one {when}",
            f"to take one now: backupd backup {name}{kind}",
        )
    elif made.latest is None:
        yield Reason(Status.BAD, "nothing can be recovered: there is no usable backup", f"backupd backup {name}{kind}")
    elif made.rpo_kept is False and made.rpo is not None and made.rpo_objective is not None:
        yield Reason(
            Status.BAD,
            f"data loss if the server failed now: {_span(made.rpo)}; objectives.rpo is {_span(made.rpo_objective)}",
            f"to find the cause: backupd timeline {name}",
        )
    if made.rto_kept is False and made.rto is not None and made.rto_objective is not None:
        yield Reason(
            Status.BAD,
            f"estimated restore time: {_span(made.rto)}; objectives.rto is {_span(made.rto_objective)}",
            f"to see how long each step takes: backupd plan {name}",
        )


def _of_last_proof(made: ServerOverview) -> Iterator[Reason]:
    name, proof = made.name, made.last_proof
    if proof is None:
        return
    if proof.outcome == FAILED:
        yield Reason(
            Status.BAD,
            f"the last test restore found bad data: {_first_line(proof.error)}",
            f"to see its jobs: backupd jobs {name}; take a full backup now: backupd backup {name} --kind full",
        )
    elif proof.outcome == UNDECIDED:
        yield Reason(
            Status.WARNING,
            f"the last test restore did not complete: {_first_line(proof.error)}",
            f"backupd test-restore {name}",
        )
    elif proof.outcome == INEXACT:
        yield Reason(
            Status.WARNING,
            "the last test restore was inexact: "
            f"{next(iter(proof.warnings), 'it may hold other rows than the source')}",
            f"backupd test-restore {name}",
        )
    elif proof.older:
        yield Reason(
            Status.WARNING,
            "the last test restore did not cover the server's newest data: "
            f"{next(iter(proof.warnings), 'later transactions exist')}",
            f"to find the cause: backupd timeline {name}; then backupd test-restore {name}",
        )


def _of_stream(made: ServerOverview, around: _Around, now: datetime) -> Iterator[Reason]:
    stream = made.stream
    if stream is None:
        return
    silent = stream.told_at is not None and now - stream.told_at > SILENT
    if not silent and stream.state == StreamState.STREAMING:
        yield from (
            Reason(Status.WARNING, text, f"backupd binlog status {made.name}")
            for text in stream_troubles(made.name, around.said, now)
        )
        return
    how = f"{stream.state}: {_first_line(stream.error)}"
    if stream.state == NOT_RUNNING:
        how = "its process does not run"
    elif silent and stream.told_at is not None:
        how = f"no report since {format_time(stream.told_at)}"
    yield Reason(
        Status.WARNING if stream.state == StreamState.WAITING else Status.BAD,
        f"the binary log is not streamed ({how})",
        f"is the service running, and the server up? backupd binlog status {made.name}",
    )


def _of_incidents_and_jobs(made: ServerOverview, around: _Around) -> Iterator[Reason]:
    reported = set()
    for incident in made.incidents:
        if incident.kind not in _SAID_HERE:
            reported.add(incident.job_id)
            # What a job that failed took from what can be recovered is said by ``_of_recovery``.
            bad = incident.severity is Severity.ERROR and incident.kind not in OF_JOBS
            yield Reason(Status.BAD if bad else Status.WARNING, incident.message, incident.hint)
    for job in around.last_jobs:
        if job.id not in reported and is_in_trouble(job, around.last_jobs):
            yield Reason(
                Status.WARNING,
                f"the last {job.kind}{f' ({job.leg})' if job.leg else ''} is {job.state}"
                f"{f': {_first_line(job.message)}' if job.message else ''}",
                job.hint or f"backupd jobs show {job.id}",
            )


def _of_gaps(made: ServerOverview, around: _Around, now: datetime) -> Iterator[Reason]:
    fresh = [
        gap for gap in around.recovery.found.gaps if now - gap.noticed_at < _FRESH_GAP and not _is_behind(gap, made)
    ]
    if fresh and all(incident.kind != GAP for incident in made.incidents):
        yield Reason(
            Status.WARNING,
            f"binary logs are missing ({len(fresh)} new gaps): {fresh[-1].reason}",
            f"to see the lost points in time: backupd timeline {made.name}; to start a new recovery window: backupd "
            f"backup {made.name} --kind {'logical' if made.tables_only else 'full'}",
        )


def _is_behind(gap: Gap, made: ServerOverview) -> bool:
    """Was a backup begun since, from which the recoverable moments go on?"""
    at = gap.noticed_at if gap.to_at is None else min(gap.noticed_at, gap.to_at)
    return any(last.started_at > at for last in made.last_backups)


def _span(span: timedelta) -> str:
    return format_duration(span.total_seconds())


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]

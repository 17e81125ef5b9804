"""The values of all metrics: what the overview says, as numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from importlib.metadata import version

from backupd.app.context.wiring import Wiring
from backupd.app.views.destinations import DestinationView, destination_views
from backupd.app.views.overview import overview
from backupd.app.views.server_status import ServerOverview
from backupd.binlog.stream_status import StreamState
from backupd.catalog.jobs import OPEN
from backupd.catalog.overview import is_in_trouble
from backupd.metrics import Values
from backupd.model.event import Severity

_DAY = timedelta(days=1)


def measure(wiring: Wiring, now: datetime, *, everything: bool = True) -> Values:
    """Of the servers that are configured in ``wiring``; ``everything``: also of what belongs to no server. Raises
    CatalogError."""
    begun = time.monotonic()
    found = Values()
    found.set("backupd_build_info", 1, version("backupd"))
    servers = overview(wiring, now)
    for server in servers:
        _server(found, server, now)
    _jobs(found, wiring, now, servers, everything=everything)
    if everything:
        _installation(found, wiring, now)
        for place in destination_views(wiring, now):
            _place(found, place)
    found.set("backupd_collect_seconds", time.monotonic() - begun)
    return found


def _installation(found: Values, wiring: Wiring, now: datetime) -> None:
    glances = wiring.catalog.glances
    on_watch = wiring.catalog.watch.is_held()
    found.set("backupd_service_on_watch", None if on_watch is None else int(on_watch))
    states = Counter(job.state for job in wiring.catalog.jobs.list(state=OPEN))
    for state in OPEN:
        found.set("backupd_jobs", states[state], str(state))
    opened = Counter(incident.severity for incident in wiring.catalog.incidents.open())
    for severity in (Severity.WARNING, Severity.ERROR):
        found.set("backupd_incidents_open", opened[severity], str(severity))
    for message_state, count in glances.messages().items():
        found.set("backupd_messages", count, str(message_state))
    oldest = glances.oldest_message()
    found.set("backupd_message_oldest_queued_seconds", _age(oldest, now) if oldest is not None else 0)


def _server(found: Values, server: ServerOverview, now: datetime) -> None:
    name = server.name

    def tell(metric: str, value: float | None) -> None:
        found.set(f"backupd_{metric}", value, name)

    tell("server_status", server.status.rank)
    if server.looked_at is not None:
        tell("server_recoverable", server.latest is not None and not server.tables_only)
        tell("server_tables_recoverable", server.latest is not None)
        tell("server_latest_recoverable_timestamp_seconds", _stamp(server.latest))
        tell("server_first_recoverable_timestamp_seconds", _stamp(server.first))
        tell("server_rpo_seconds", _seconds(server.rpo))
        tell("server_rto_predicted_seconds", _seconds(server.rto))
        tell("server_windows", server.windows)
        tell("server_gaps", server.gaps)
        tell("server_gap_noticed_timestamp_seconds", _stamp(server.gap_noticed_at))
        tell("server_backups", server.backups)
        tell("server_protected_backups", server.protected)
        tell("server_stored_bytes", server.bytes_stored)
    tell("server_rpo_objective_seconds", _seconds(server.rpo_objective))
    tell("server_rto_objective_seconds", _seconds(server.rto_objective))
    tell("server_held", server.held is not None)
    tell("server_paused", server.paused is not None)
    tell("server_absent", server.absent_since is not None)
    for run in server.next_runs:
        found.set("backupd_server_next_run_timestamp_seconds", _stamp(run.at), name, run.leg)
    for backup in server.last_backups:
        labels = name, str(backup.kind), backup.table_set
        for metric, value in (
            ("success_timestamp_seconds", _stamp(backup.finished_at)),
            ("age_seconds", _age(backup.finished_at, now)),
            ("duration_seconds", backup.seconds),
            ("source_bytes", backup.bytes_source),
            ("stored_bytes", backup.bytes_stored),
            ("new_bytes", backup.bytes_new),
            ("missing_tables", backup.tables_missing),
        ):
            found.set(f"backupd_backup_last_{metric}", value, *labels)
    if (proof := server.last_proof) is not None:
        tell("proof_last_timestamp_seconds", _stamp(proof.finished_at))
        tell("proof_last_good", proof.is_good)
        tell("proof_last_good_timestamp_seconds", _stamp(proof.proved_at))
        tell("proof_age_seconds", _age(proof.proved_at, now) if proof.proved_at is not None else None)
        tell("proof_compared_tables", proof.tables_compared)
    if server.stream is not None:
        tell("stream_up", server.stream.state == StreamState.STREAMING)
        tell("stream_spool_bytes", server.stream.spool_bytes)
        tell("stream_spool_limit_bytes", server.stream.spool_limit)
    for reach in server.reach:
        found.set("backupd_destination_server_rpo_seconds", _seconds(reach.rpo), reach.name, name)
    longest: dict[str, float] = {}
    for job in server.running:
        if job.started_at is not None:
            longest[job.kind] = max(longest.get(job.kind, 0.0), _age(job.started_at, now))
    for kind, seconds in longest.items():
        found.set("backupd_job_running_seconds", seconds, name, kind)


def _jobs(found: Values, wiring: Wiring, now: datetime, servers: Sequence[ServerOverview], *, everything: bool) -> None:
    glances = wiring.catalog.glances
    ours = [glances.last_jobs([""])] if everything else []
    for last in (*ours, *(server.last_jobs for server in sorted(servers, key=lambda one: one.name))):
        for job in last:
            labels = job.server, job.kind, job.leg
            found.set("backupd_job_last_failed", is_in_trouble(job, last), *labels)
            found.set("backupd_job_last_success_timestamp_seconds", _stamp(job.succeeded_at), *labels)
    known = {server.name for server in servers} | ({""} if everything else set())
    for (name, kind, state), count in glances.ended_jobs(now - _DAY).items():
        if name in known:
            found.set("backupd_jobs_ended_last_day", count, name, kind, state)


def _place(found: Values, place: DestinationView) -> None:
    def tell(metric: str, value: float | None) -> None:
        found.set(f"backupd_destination_{metric}", value, place.name)

    tell("status", place.status.rank if place.reachable is not None else None)
    tell("reachable", place.reachable)
    tell("checked_timestamp_seconds", _stamp(place.checked_at))
    tell("free_bytes", place.free)
    tell("size_bytes", place.total)
    tell("full_timestamp_seconds", _stamp(place.earliest_full_on))
    tell("stored_bytes", place.bytes_stored)
    tell("backups", place.backups)
    tell("behind_backups", place.behind_backups)
    tell("behind_bytes", place.behind_bytes)
    tell("behind_seconds", _seconds(place.behind) or 0)
    tell("binlog_lag_seconds", _seconds(place.lag))


def _stamp(moment: datetime | None) -> float | None:
    return moment.timestamp() if moment is not None else None


def _seconds(span: timedelta | None) -> float | None:
    return span.total_seconds() if span is not None else None


def _age(moment: datetime, now: datetime) -> float:
    return max(0.0, (now - moment).total_seconds())

"""The values of all metrics: what the overview says, as numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from importlib.metadata import version

from backupd.app.context.wiring import Wiring
from backupd.app.views.clusters import window
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
    _nodes(found, wiring, now, servers)
    if everything:
        _installation(found, wiring, now)
        for destination in destination_views(wiring, now):
            _destination(found, destination)
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

    def put(metric: str, value: float | None) -> None:
        found.set(f"backupd_{metric}", value, name)

    put("server_status", server.status.rank)
    if server.looked_at is not None:
        put("server_recoverable", server.latest is not None and not server.tables_only)
        put("server_tables_recoverable", server.latest is not None)
        put("server_latest_recoverable_timestamp_seconds", _stamp(server.latest))
        put("server_first_recoverable_timestamp_seconds", _stamp(server.first))
        put("server_rpo_seconds", _seconds(server.rpo))
        put("server_rto_predicted_seconds", _seconds(server.rto))
        put("server_windows", server.windows)
        put("server_gaps", server.gaps)
        put("server_gap_noticed_timestamp_seconds", _stamp(server.gap_noticed_at))
        put("server_backups", server.backups)
        put("server_protected_backups", server.protected)
        put("server_stored_bytes", server.bytes_stored)
    put("server_rpo_objective_seconds", _seconds(server.rpo_objective))
    put("server_rto_objective_seconds", _seconds(server.rto_objective))
    put("server_held", server.held is not None)
    put("server_paused", server.paused is not None)
    put("server_absent", server.absent_since is not None)
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
        put("proof_last_timestamp_seconds", _stamp(proof.finished_at))
        put("proof_last_good", proof.is_good)
        put("proof_last_good_timestamp_seconds", _stamp(proof.proved_at))
        put("proof_age_seconds", _age(proof.proved_at, now) if proof.proved_at is not None else None)
        put("proof_compared_tables", proof.tables_compared)
    if server.stream is not None:
        put("stream_up", server.stream.state == StreamState.STREAMING)
        put("stream_spool_bytes", server.stream.spool_bytes)
        put("stream_spool_limit_bytes", server.stream.spool_limit)
        if (waits := server.stream.acknowledgement) is not None:
            put("stream_acknowledged", waits.holds)
            put("stream_acknowledged_since_timestamp_seconds", _stamp(waits.since))
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


def _nodes(found: Values, wiring: Wiring, now: datetime, servers: Sequence[ServerOverview]) -> None:
    """Of servers that were seen to be nodes of a Galera cluster."""
    known = wiring.catalog.nodes.servers()
    nodes = {wiring.settings.groups.get(name, name) for name in known}
    for name in sorted(server.name for server in servers if server.name in nodes):
        seen = window(wiring, name, now)
        if seen is not None:
            found.set("backupd_server_ist_window_seconds", _seconds(seen.left), name)
            found.set("backupd_server_ist_restore_seconds", seen.verdict.seconds, name)


def _destination(found: Values, destination: DestinationView) -> None:
    def put(metric: str, value: float | None) -> None:
        found.set(f"backupd_destination_{metric}", value, destination.name)

    put("status", destination.status.rank if destination.reachable is not None else None)
    put("reachable", destination.reachable)
    put("checked_timestamp_seconds", _stamp(destination.checked_at))
    put("free_bytes", destination.free)
    put("size_bytes", destination.total)
    put("full_timestamp_seconds", _stamp(destination.earliest_full_on))
    put("stored_bytes", destination.bytes_stored)
    put("backups", destination.backups)
    put("behind_backups", destination.behind_backups)
    put("behind_bytes", destination.behind_bytes)
    put("behind_seconds", _seconds(destination.behind) or 0)
    put("binlog_lag_seconds", _seconds(destination.lag))


def _stamp(moment: datetime | None) -> float | None:
    return moment.timestamp() if moment is not None else None


def _seconds(span: timedelta | None) -> float | None:
    return span.total_seconds() if span is not None else None


def _age(moment: datetime, now: datetime) -> float:
    return max(0.0, (now - moment).total_seconds())

"""The way back: plan, restore, test restore. Resolve from the catalog, execute without it, record."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from backupd.app.dependence import require_keys
from backupd.app.settings import ServerSettings
from backupd.app.wiring import Wiring, owner, owner_is_alive, worker_count
from backupd.model.backup import BackupRecord
from backupd.model.errors import BackupdError, CancelledError, DamagedError, NotFoundError, RefusedError
from backupd.model.ids import new_id
from backupd.model.job import JobState, RestoreRecord
from backupd.model.progress import Report
from backupd.model.proof import Check, Phase, Proof
from backupd.recovery.chains import restorable
from restore import executor
from restore.checks import examine
from restore.executor import RestoreOutcome, RestoreSpec
from restore.plan import Plan, Rate
from restore.planner import Preferences, make_plan
from restore.proof import make_proof
from restore.scratch import ScratchSpec, scratch_instance
from restore.staging import unfinished
from restore.target import parse_target
from storage.destination import Destination

MODES = ("new-server", "replica")
_NO_BYTES = 1e18
"""Bytes a second for a phase whose time does not depend on the size."""


def plan(wiring: Wiring, server_name: str, target: str, datadir: Path | None, *, start: bool = False,
         verify: bool = False) -> Plan:
    """What a restore to ``target`` would do. Moves nothing. Raises UsageError, NotFoundError, RefusedError."""
    server = wiring.settings.server(server_name)
    records = wiring.catalog.backups.list(server_name)
    try:
        found = make_plan(
            server_name, _within_reach(wiring, records), parse_target(target),
            Preferences(destinations=(*server.required, *server.others), rates=measured_rates(wiring, server_name),
                        datadir=datadir, start=start, verify=verify),
            now=wiring.clock())
    except NotFoundError as error:
        error.detail = "\n".join([*([error.detail] if error.detail else []), *_left_out(wiring, records)])
        raise
    left_out = _left_out(wiring, [record for record in records if record.id in found.chain])
    return replace(found, warnings=(*found.warnings, *left_out))


def restore(wiring: Wiring, server_name: str, target: str, datadir: Path, *, start: bool, mode: str,
            report: Report) -> RestoreOutcome:
    """Restore into ``datadir``, or go on with what an interrupted call left there.

    Raises what ``plan`` raises, and RefusedError, DamagedError, KeyUnusableError, ToolError of the execution.
    """
    if mode not in MODES:
        raise RefusedError(f"mode {mode} is not known to this version", hint=f"use one of {', '.join(MODES)}")
    server = wiring.settings.server(server_name)
    chosen = plan(wiring, server_name, _going_on(server_name, target, datadir), datadir, start=start)
    settings = wiring.settings.needs_restore()
    require_keys(wiring, server_name, chosen.chain)
    record = wiring.catalog.backups.get(chosen.backup_id)
    row = _begin(wiring, chosen, datadir)
    spec = RestoreSpec(
        restore_id=row.id, server=server_name, target=target, chain=chosen.chain, moment=record.finished_at,
        datadir=datadir, owner=server.owner, start=start, replica=mode == "replica", checks=_statements(server),
        witness=wiring.catalog.witnesses.of_backup(record.id), workers=worker_count(),
        memory_cap=settings.scratch.memory, programs=wiring.settings.programs)
    try:
        outcome = executor.execute(
            spec, destinations=_sources(wiring, chosen), unsealer=wiring.unsealer(), clock=wiring.clock,
            report=report, on_phase=lambda phase: _note(wiring, row.id, phase))
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt | CancelledError)
        text = str(error) if isinstance(error, BackupdError) else f"stopped: {type(error).__name__}"
        state = JobState.CANCELLED if stopped else JobState.FAILED
        wiring.catalog.restores.finish(row.id, state, wiring.clock(), error=text)
        raise
    wiring.catalog.restores.finish(row.id, JobState.SUCCEEDED, wiring.clock(), phases=outcome.phases)
    return outcome


def test_restore(wiring: Wiring, server_name: str, target: str, report: Report) -> Proof:
    """Restore onto a throw-away server, ask it everything, keep the proof; a failure is a proof too.

    ``target`` may be ``random``: any complete backup. Raises only what makes a test impossible to begin: UsageError,
    NotFoundError, ConfigurationError.
    """
    server = wiring.settings.server(server_name)
    if target == "random":
        target = f"backup:{_any_backup(wiring, server_name).id}"
    chosen = plan(wiring, server_name, target, None, start=True, verify=True)
    settings = wiring.settings.needs_restore()
    unsealer = wiring.unsealer()
    record = wiring.catalog.backups.get(chosen.backup_id)
    phases: list[Phase] = []
    checks: list[Check] = []
    started_at, compared, trouble, obstacle = wiring.clock(), 0, "", ""
    scratch = ScratchSpec(
        scratch_id=new_id(started_at), server=server_name, chain=chosen.chain, path=settings.scratch.path,
        max_bytes=settings.scratch.max_bytes, memory=settings.scratch.memory, workers=worker_count(),
        owner=server.owner, programs=wiring.settings.programs)
    try:
        require_keys(wiring, server_name, chosen.chain)
        with scratch_instance(scratch, destinations=_sources(wiring, chosen), unsealer=unsealer, clock=wiring.clock,
                              report=report, on_phase=phases.append) as copy:
            begun = wiring.clock()
            checks, compared = examine(
                copy.connection, statements=_statements(server), target=record.finished_at,
                witness=wiring.catalog.witnesses.of_backup(record.id), position=record.position,
                workers=worker_count(), report=report)
            full = wiring.catalog.backups.get(chosen.chain[0])
            phases.append(Phase("verified", (wiring.clock() - begun).total_seconds(), full.stats.bytes_source))
    except DamagedError as error:
        trouble = str(error)
    except BackupdError as error:
        obstacle = str(error)
    proof = make_proof(
        proof_id=scratch.scratch_id, server=server_name, backup_id=record.id, target=target, started_at=started_at,
        finished_at=wiring.clock(), phases=phases, checks=checks, tables_compared=compared, error=trouble,
        obstacle=obstacle)
    wiring.catalog.proofs.add(proof)
    return proof


def _going_on(server: str, target: str, datadir: Path) -> str:
    """The target, or, where an interrupted restore to the very same target waits in ``datadir``, its backup: a newer
    backup that came meanwhile must not keep it from being finished."""
    earlier = unfinished(datadir)
    if earlier is None or (earlier.server, earlier.target) != (server, target):
        return target
    return f"backup:{earlier.chain[-1]}"


def _statements(server: ServerSettings) -> tuple[str, ...]:
    tests = server.policy.test_restore if server.usable else None  # a broken policy must not keep from restoring
    return tuple(check.sql for check in tests.checks) if tests else ()


def _any_backup(wiring: Wiring, server: str) -> BackupRecord:
    usable = restorable(_within_reach(wiring, wiring.catalog.backups.list(server)))
    if not usable:
        raise NotFoundError(f"server {server} has no restorable backup", hint=f"`backupd backups {server}` shows them")
    return random.choice(usable)  # noqa: S311  a lottery, not a secret


def _begin(wiring: Wiring, chosen: Plan, datadir: Path) -> RestoreRecord:
    """The row of this restore: a new one, or that of the interrupted one it goes on with."""
    restores = wiring.catalog.restores
    restores.abandon_dead(owner_is_alive, wiring.clock())
    for row in restores.list(chosen.server, datadir=str(datadir), limit=1):
        if row.state in (JobState.FAILED, JobState.CANCELLED, JobState.ABANDONED) and row.backup_id == chosen.backup_id:
            return restores.resume(row.id, owner())
    row = RestoreRecord(
        id=new_id(wiring.clock()), server=chosen.server, backup_id=chosen.backup_id, target=chosen.target,
        datadir=str(datadir), state=JobState.RUNNING, started_at=wiring.clock(), owner=owner())
    restores.start(row)
    return row


def _note(wiring: Wiring, restore_id: str, phase: Phase) -> None:
    wiring.catalog.restores.phase_done(restore_id, phase)


def _sources(wiring: Wiring, chosen: Plan) -> list[Destination]:
    return [wiring.destination(name) for name in chosen.destinations]


def _within_reach(wiring: Wiring, records: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    """``records`` without copies at destinations that are not configured any more."""
    configured = wiring.settings.destinations
    return tuple(replace(record, copies=tuple(copy for copy in record.copies if copy.destination in configured))
                 for record in records)


def _left_out(wiring: Wiring, records: Iterable[BackupRecord]) -> tuple[str, ...]:
    names = {copy.destination for record in records for copy in record.copies}
    return tuple(f"destination {name} is not configured any more, so what it holds is not read"
                 for name in sorted(names - set(wiring.settings.destinations)))


def measured_rates(wiring: Wiring, server: str) -> Mapping[str, Rate]:
    """Measured rates of a server by phase, as the planner wants them."""
    return {
        name: Rate(bytes_per_second=rate.bytes_per_second or _NO_BYTES,
                   seconds=0.0 if rate.bytes_per_second else rate.seconds, samples=rate.samples)
        for name, rate in wiring.catalog.rates.of(server).items()
    }

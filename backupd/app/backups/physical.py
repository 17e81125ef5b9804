"""Taking a physical backup, or sending a logical one on its way: resolve the decisions, execute without the catalog,
record what came of it.

Witnesses are taken in the lock of a backup, and on a schedule: what the source's tables held at a moment between two
backups. A test restore that is rolled forward compares the restored copy with the newest witness on its way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from backupd.app.backup_records import add_row, adopt_unknown, clock_warning, record_of
from backupd.app.backups.chains import Circumstances, Decision
from backupd.app.backups.limits import throttled
from backupd.app.backups.logical import dump_tables, shared_fields
from backupd.app.backups.rotation_hooks import away
from backupd.app.context.logging_setup import say
from backupd.app.context.members import choices, member_at, none_left, one_line, streamed_member
from backupd.app.context.server_identity import meet, problem_of, reason_of, refuse_strange_member, refuse_stranger
from backupd.app.context.settings import ServerSettings
from backupd.app.context.trust import require_signing
from backupd.app.context.wiring import JobRun, Wiring
from backupd.app.retention.retention import relieve
from backupd.app.verify.consistency import pass_gate
from backupd.backup.host_configuration import collect
from backupd.backup.physical import Parent, PhysicalOutcome, PhysicalSpec, execute, slow_destinations
from backupd.backup.server_checks import REMEDY, elsewhere, in_no_backup, left_out, lost_words
from backupd.engine.server.probe import examine, uncovered
from backupd.engine.sql.tables import list_tables
from backupd.engine.toolset import physical_tool, refuse_clashes, refuse_unfit, shortcomings
from backupd.engine.witness import LockWindowWitness, take
from backupd.model.backup_record import BackupKind, BackupRecord
from backupd.model.errors import (
    BackupdError,
    ConfigurationError,
    DestinationFullError,
    ElsewhereError,
    RefusedError,
    ServerError,
    TablesChangedError,
    ToolError,
)
from backupd.model.job import Progress
from backupd.model.manifest import BodyFacts
from backupd.model.proof import Witness
from backupd.model.server_facts import Identity
from backupd.model.text import new_id
from backupd.recovery.members import taken_because
from restore.datadir.staging import restored_by
from restore.planning.plan import DEFAULT_RATES
from restore.runbook.backup_runbook import render_runbook
from storage.destination import Destination

REPEATS = 2
"""How often a physical backup is taken again in one job when tables were changed under the tool."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A committed backup and the witness of its very moment, where there is one."""

    outcome: PhysicalOutcome
    witness: Witness | None
    problem: str


@dataclass(frozen=True, slots=True)
class Made:
    """``problem``: what is missing in a backup that can be used nevertheless; ``accepted``: the next one would lack it,
    too."""

    record: BackupRecord
    problem: BackupdError | None = None
    accepted: bool = True


def take_backup(wiring: Wiring, server_name: str, kind: BackupKind, run: JobRun) -> Made:
    """Take one backup now, as ``run``, and give its record. Where an increment cannot be built on what there is, a full
    backup is taken instead, and ``reason`` of the record says why.

    Raises NotFoundError (server), RefusedError (a backup of it runs already) and whatever made the backup fail; then
    nothing of it is left. Where a destination is full, what the rules have expired there makes room, and the backup is
    tried once more.
    """
    server = wiring.settings.server(server_name)
    with wiring.locked(f"backup-{server_name}", f"a backup of {server_name} is running already"):
        if server.is_group:
            return _of_a_member(wiring, server, kind, run)
        return _taken(wiring, server, kind, run, lambda: None)


def _of_a_member(wiring: Wiring, server: ServerSettings, kind: BackupKind, run: JobRun) -> Made:
    """Through the best member; through the next one where that fails before anything was stored."""
    found = choices(wiring, server, kind, run.job.id)
    failed: list[tuple[str, BackupdError]] = []
    for choice in found:
        if choice.left:
            continue
        stored = threading.Event()
        because = taken_because(found, choice.name, [(name, one_line(error)) for name, error in failed])
        try:
            return _taken(wiring, server.through(choice.name, because), kind, run, stored.set)
        except (ServerError, ToolError, RefusedError, ConfigurationError) as error:
            run.check()
            if stored.is_set():
                raise
            failed.append((choice.name, error))
            say(
                "member-failed",
                f"no backup is taken through {choice.name}: {error}",
                level=logging.WARNING,
                server=server.name,
                job=run.job.id,
            )
    if len({error.message for _name, error in failed}) == 1:
        raise failed[0][1]
    raise none_left(server, found, [(name, one_line(error)) for name, error in failed])


def _taken(wiring: Wiring, server: ServerSettings, kind: BackupKind, run: JobRun, begun: Callable[[], None]) -> Made:
    with away(wiring, server, run):
        try:
            return _run(wiring, server, kind, run, begun)
        except DestinationFullError as error:
            relieve(wiring, error, run)
            return _run(wiring, server, kind, run, begun)


def _run(wiring: Wiring, server: ServerSettings, kind: BackupKind, run: JobRun, begun: Callable[[], None]) -> Made:
    """``begun`` is called before anything is stored."""
    destinations = wiring.required(server)
    for destination in destinations:
        # One of the runs that are dead may have died between its manifest and its row.
        adopt_unknown(wiring, destination, server.name)
    run.check()
    if kind is BackupKind.LOGICAL:
        return Made(*dump_tables(wiring, server, run, destinations, begun))
    repeated: list[str] = []
    because = ""
    for left in range(REPEATS, -1, -1):
        try:
            with ExitStack() as stack:
                spec, met = resolve(
                    wiring,
                    server,
                    kind,
                    run,
                    destinations,
                    stack.enter_context(wiring.workdir(run.job.id)),
                    because=because,
                )
                spec = replace(
                    spec,
                    repeats=left,
                    warnings=(*spec.warnings, *repeated),
                    member=partial(member_at, wiring, server, spec.info.server_uuid),
                )
                throttle = stack.enter_context(throttled(wiring, server, spec.connection, run))
                begun()
                taken = _execute(wiring, server, replace(spec, throttle=throttle, send=throttle.send), run)
            break
        except TablesChangedError as error:
            run.check()
            if not left:
                raise
            because = because or (error.message if error.as_full else "")
            repeated.append(f"the backup was taken again, because {error.message}")
            say("backup-repeated", repeated[-1], level=logging.WARNING, server=server.name, job=run.job.id)
            run.report(Progress("copy", note=repeated[-1]))
    record = record_backup(wiring, spec, taken, throttle.warnings)
    record = replace(record, apart=met is not None and met.is_stranger)
    problem = problem_of(met, record) or _problem(record, spec, taken.outcome.facts)
    return Made(record, problem, not taken.outcome.facts.missing)


def resolve(
    wiring: Wiring,
    server: ServerSettings,
    kind: BackupKind,
    run: JobRun,
    destinations: tuple[Destination, ...],
    workdir: Path,
    *,
    because: str = "",
) -> tuple[PhysicalSpec, Identity | None]:
    """Freeze every decision about this backup, and who answers. Reads the server, the keyring and the tools; changes
    nothing. ``because``: why an increment that was due cannot be."""
    keys, fingerprints = wiring.recipients()
    require_signing(wiring.settings, server.name)
    connection = server.connection()
    with connection.connect() as session:
        probed = examine(session)
        if server.policy.physical is None and (far := elsewhere(session, probed.info.hostname)) is not None:
            raise ElsewhereError(far, hint=f"take a dump from here: backupd backup {server.name} --kind logical")
        met = meet(wiring, server.name, session, probed.info, member=server.member)
        refuse_strange_member(server, met)
        gate = pass_gate(wiring, server, session, probed.info.role, run)
        refuse_clashes(session, probed.info)
        tool = physical_tool(probed.info, paths=wiring.settings.programs)
        refuse_unfit(session, probed.info, tool.tool)
        decision = (
            Decision(BackupKind.PHYSICAL_FULL, reason=because)
            if because
            else Circumstances(wiring, server, probed.info, tool, session, destinations, fingerprints).decide(kind)
        )
        # Another question only where there is something to ask for.
        lost = (
            in_no_backup(left_out(list_tables(session), probed.info.flavour, tool.tool.name), server.policy.logical)
            if uncovered(probed.info.engines, probed.info.flavour, tool.tool.name)
            else {}
        )
    policy, last = server.policy, decision.parent
    artefact = collect(connection, probed.info, policy.config_files)
    shared = shared_fields(wiring, server, run, destinations, partial(render_runbook, earlier=decision.chain))
    reason = reason_of(met) or decision.reason
    full = f"a full backup was taken instead of an increment: {decision.reason}" if decision.reason else ""
    warnings = (
        *probed.warnings,
        *shortcomings(tool, probed.info, paths=wiring.settings.programs),
        *artefact.warnings,
        *(f"{key.name}: {key.warning}" for key in keys if key.warning),
        *clock_warning(shared["behind"]),
        *filter(None, (full, reason_of(met))),
        *gate.warnings,
    )

    spec = PhysicalSpec(
        **shared,
        connection=connection,
        info=probed.info,
        tool=tool,
        recipients=fingerprints,
        workdir=workdir,
        parallel=policy.physical.parallel if policy.physical else 1,
        warnings=warnings,
        parent=Parent(tuple(record.id for record in decision.chain), last.to_lsn) if last else None,
        reason=reason,
        flags=gate.flags,
        config=lambda: artefact.content,
        spool=wiring.settings.spool / "clone",
        restored_by=restored_by(Path(probed.info.datadir)),
        lost=lost,
    )
    return spec, met


def _problem(record: BackupRecord, spec: PhysicalSpec, facts: BodyFacts) -> BackupdError | None:
    if facts.missing:
        return BackupdError(
            f"{_count(len(facts.missing))} missing in the physical backup {record.id}, though it was taken"
            f" {REPEATS + 1} times; everything else is in it",
            detail="\n".join(facts.warnings[-1:]),
            hint="take the backup at a time when these tables are not dropped or renamed, or move them to InnoDB",
        )
    if not record.tables_missing:
        return None
    return BackupdError(
        f"{_count(record.tables_missing)} missing in the physical backup {record.id} and in every logical one;"
        " everything else is in it",
        detail="\n".join(lost_words(engine, names) for engine, names in spec.lost.items()),
        hint=REMEDY,
    )


def _count(tables: int) -> str:
    return "1 table is" if tables == 1 else f"{tables} tables are"


def _execute(wiring: Wiring, server: ServerSettings, spec: PhysicalSpec, run: JobRun) -> Taken:
    policy = server.policy.witness
    if not policy.enabled:
        outcome = execute(spec, run.context(wiring))
        return Taken(outcome, None, "")
    with LockWindowWitness(spec.connection, server=spec.server, clock=wiring.clock, report=run.report) as witness:
        outcome = execute(spec, run.context(wiring), on_stderr=witness.on_stderr)
        try:
            seen = witness.collect(max_seconds=policy.max_duration.total_seconds())
        except KeyboardInterrupt:
            # The backup is committed. Whoever stops the job now comes too late for that, and saves the reading only.
            return Taken(outcome, None, "the job was stopped while they were read")
        return Taken(outcome, seen, witness.problem)


def record_backup(wiring: Wiring, spec: PhysicalSpec, taken: Taken, limits: tuple[str, ...] = ()) -> BackupRecord:
    """Write the rows of a committed backup and of its witness. ``limits``: what is to be said about those."""
    header, facts = taken.outcome.header, taken.outcome.facts
    warnings = (*facts.warnings, *limits, *_slow(wiring, taken.outcome))
    if taken.problem:
        warnings = (*warnings, f"no witness was read, so a test restore has nothing to compare with: {taken.problem}")
    record = record_of(spec, header, facts, warnings)
    add_row(wiring, spec, record)
    if taken.witness is not None:
        wiring.catalog.witnesses.add(new_id(wiring.clock()), taken.witness, backup_id=record.id)
    return record


def _slow(wiring: Wiring, outcome: PhysicalOutcome) -> tuple[str, ...]:
    header = outcome.header
    rate = wiring.catalog.rates.of(header.server).get("prepared") or DEFAULT_RATES["prepared"]
    return slow_destinations(
        outcome.speeds,
        seconds=(header.finished_at - header.started_at).total_seconds(),
        prepare_seconds=rate.estimate(header.stats.bytes_source),
        limits={
            name: destination.max_upload
            for name, destination in wiring.settings.destinations.items()
            if destination.max_upload is not None
        },
    )


def take_witness(wiring: Wiring, run: JobRun) -> str:
    """Read the checksums of the server's tables now, within the policy's budget; gives the id of the witness.

    Raises RefusedError for a server without a binary log, whose moments cannot be found again, and for another server
    than the one that is meant; ServerError.
    """
    server = wiring.settings.server(run.job.server)
    if server.is_group:
        server = streamed_member(wiring, server)
    budget = server.policy.witness.max_duration
    connection = server.connection()
    refuse_stranger(
        wiring, server.name, connection, "no witness of it is taken: restored copies would be compared with its tables"
    )
    witness = take(
        connection, server=server.name, max_seconds=budget.total_seconds(), clock=wiring.clock, report=run.report
    )
    if not witness.position.file:
        raise RefusedError(
            f"{server.name} writes no binary log: no restore can reach the position of this witness",
            hint="enable log_bin, or remove witness.schedule from the policy; each full backup has its own witness",
        )
    run.check()
    witness_id = new_id(wiring.clock())
    wiring.catalog.witnesses.add(witness_id, witness)
    return witness_id


def forget_old(wiring: Wiring) -> None:
    """Forget witnesses that no restore can come to any more: those before the oldest backup of their server. Raises
    CatalogError."""
    for name in wiring.settings.servers:
        starts = [record.started_at for record in wiring.catalog.backups.list(name)]
        if starts:
            wiring.catalog.witnesses.forget_before(name, min(starts))

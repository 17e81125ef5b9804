"""Test restores: onto a throw-away server, rolled forward to the target, compared with the source on the way."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from backupd.app.binlogs.targets import Targets, history
from backupd.app.context.keys import require_keys
from backupd.app.context.wiring import Wiring, run_context
from backupd.app.metacopies.catalog_copies import after_job
from backupd.app.restores.plan import (
    moment_of,
    plan,
    sources,
    statements,
)
from backupd.app.restores.request import RestoreOptions
from backupd.app.restores.thaw_wait import refuse_cold
from backupd.app.restores.usable_backups import within_reach
from backupd.app.verify.missing_tables import doubt, settle_doubts
from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import ReplaySpec, Stop
from backupd.model.errors import BackupdError, DamagedError
from backupd.model.job import Report
from backupd.model.proof import Check, Proof, Tally, Witness
from backupd.model.server_facts import ClusterPosition, Evidence
from backupd.model.text import format_time, new_id
from backupd.process.run_context import RunContext
from backupd.recovery.chains import restorable
from backupd.recovery.runs import Histories
from backupd.recovery.windows import Window, windows
from restore.datadir.checks import FAILED, PASSED, compare_with_witness, examine, verdict
from restore.fetch.chain import merged
from restore.planning.plan import Plan
from restore.planning.starting_backup import none_restorable
from restore.replay.private_replay import RolledForward
from restore.scratch_server import Scratch, ScratchSpec, scratch_instance

_WITNESSES = 50
"""How many of the newest witnesses are looked at."""
RANDOM = "random"
"""The target of a test restore that picks one of all moments."""
REPLAYED = "binary logs replayed to the target"
PLACED = "position in the Galera cluster"


def test_restore(wiring: Wiring, server_name: str, target: str, report: Report) -> Proof:
    """Restore onto a throw-away server, ask it everything, keep the proof; a failure is a proof too.

    ``target`` may be ``random``: any moment that is recoverable. Where binary logs are replayed, the newest witness
    between the backup and the target is compared on the way. Raises only what makes a test impossible to begin:
    UsageError, NotFoundError, ConfigurationError, and what reading the archive's indexes does.
    """
    server = wiring.settings.server(server_name)
    chosen = _anywhere(wiring, server_name) if target == RANDOM else _planned(wiring, server_name, target)
    settings = wiring.settings.needs_restore()
    refuse_cold(
        chosen,
        hint=f"a test restore thaws nothing: `backupd thaw {server_name} --to "
        f"{chosen.target}`, then test it; or keep a copy of the backups that are tested at a destination without "
        "archive classes",
    )
    record = wiring.catalog.backups.get(chosen.backup_id)
    trial = _trial(wiring, chosen, record)
    context = run_context(wiring, report)
    checks: list[Check] = []
    started_at, tally, trouble, obstacle = wiring.clock(), Tally(), "", ""
    scratch = ScratchSpec(
        scratch_id=new_id(started_at),
        server=server_name,
        chain=chosen.chain,
        replay=trial.replay,
        path=settings.scratch.path,
        max_bytes=settings.scratch.max_bytes,
    )
    try:
        require_keys(wiring, server_name, chosen.chain)
        with scratch_instance(scratch, sources(wiring, chosen), context) as copy:
            examination = _Examination(copy, trial, context)
            rolled = examination.roll_forward()
            full = wiring.catalog.backups.get(chosen.chain[0])
            with context.watch.phase("verified", full.stats.bytes_source):
                checks, tally = examine(
                    copy.connection,
                    context,
                    statements=statements(server),
                    target=moment_of(chosen, record),
                    witness=trial.witness,
                    position=rolled.stop.position if rolled else record.position,
                    compared=examination.compared,
                )
                checks += _replay_checks(rolled)
            checks += _of_node(wiring, record, copy.node)
    except DamagedError as error:
        trouble = str(error)
        doubt(wiring, record.id, error)
    except BackupdError as error:
        obstacle = str(error)
    older, inexact = chosen.older is not None, bool(chosen.inexact)
    outcome, failure = verdict(checks, tally, error=trouble, obstacle=obstacle, older=older, inexact=inexact)
    proof = Proof(
        id=scratch.scratch_id,
        server=server_name,
        backup_id=record.id,
        target=chosen.target if target == RANDOM else target,
        outcome=outcome,
        started_at=started_at,
        finished_at=wiring.clock(),
        phases=merged(context.watch.phases),
        checks=tuple(checks),
        tables_compared=tally.equal,
        tables_present=tally.present,
        not_looked_at=tally.unseen,
        error=failure,
        warnings=chosen.warnings,
        older=older,
        flags=_flags(wiring, chosen),
    )
    wiring.catalog.proofs.add(proof)
    if proof.is_good:
        settle_doubts(wiring, chosen.chain)
    after_job(wiring)
    return proof


def _flags(wiring: Wiring, chosen: Plan) -> tuple[str, ...]:
    """Of every backup of its chain."""
    return tuple(sorted({flag for name in chosen.chain for flag in wiring.catalog.backups.get(name).flags}))


@dataclass(frozen=True, slots=True)
class _Trial:
    """What is replayed, and where it stops to be compared. ``witness``: what to compare with, at ``stop``; None as a
    stop: at the backup itself, before anything is replayed."""

    replay: ReplaySpec | None
    witness: Witness | None
    stop: Stop | None


@dataclass(slots=True)
class _Examination:
    _copy: Scratch
    _trial: _Trial
    _context: RunContext
    compared: tuple[Sequence[Check], Tally] | None = None

    def roll_forward(self) -> RolledForward | None:
        """Replay, and compare on the way; None where there is nothing to replay."""
        if self._copy.roll_forward is None:
            return None
        if self._trial.stop is None:
            self._compare()
        return self._copy.roll_forward(self._at)

    def _at(self, stop: Stop) -> None:
        if self._trial.stop is not None and (stop.file, stop.pos) == (self._trial.stop.file, self._trial.stop.pos):
            self._compare()

    def _compare(self) -> None:
        witness = self._trial.witness
        if witness is None or self.compared is not None:
            return
        with self._context.watch.phase("verified"):
            self.compared = compare_with_witness(self._copy.connection, witness, witness.position, self._context)


def _planned(wiring: Wiring, server: str, target: str) -> Plan:
    """A test uses what there is; its proof says how old that is."""
    return plan(
        wiring,
        server,
        target,
        None,
        start=True,
        verify=True,
        options=RestoreOptions(accept_older=True, accept_inexact=True),
    )


def _anywhere(wiring: Wiring, server: str) -> Plan:
    """To a moment drawn from all that are recoverable, or, where no binary logs are archived, to any backup."""
    usable = restorable(within_reach(wiring, wiring.catalog.backups.list(server)))
    if not usable:
        raise none_restorable(server, [one for one in wiring.catalog.backups.list(server) if one.server == server])
    archived = history(wiring, wiring.settings.server(server))
    wide: list[Window] = []
    if archived:
        logs, repeats = Histories(archived.branches, archived.runs), archived.resolver.repeats
        found = windows(logs, usable, now=wiring.clock(), repeats=repeats)
        wide = [window for window in found if window.run is not None and window.end > window.begin]
    if wide:
        window = random.choices(wide, [(one.end - one.begin).total_seconds() for one in wide])[0]  # noqa: S311  lottery
        moment = window.begin + timedelta(seconds=random.uniform(0, (window.end - window.begin).total_seconds()))  # noqa: S311
        return _planned(wiring, server, f"{format_time(moment)}@{window.branch}")
    return _planned(wiring, server, f"backup:{random.choice(usable).id}")  # noqa: S311  a lottery, not a secret


def _trial(wiring: Wiring, chosen: Plan, record: BackupRecord) -> _Trial:
    """The newest witness between the backup and the target, with the replay cut in two where it was taken."""
    own = wiring.catalog.witnesses.of_backup(record.id)
    spec = chosen.replay
    if spec is None:
        return _Trial(None, own, None)
    server = wiring.settings.server(chosen.server)
    targets = Targets(
        wiring, chosen.server, wiring.catalog.binlogs.branches(chosen.server), prefer=(*server.required, *server.others)
    )
    for witness in wiring.catalog.witnesses.between(chosen.server, record.started_at, wiring.clock(), limit=_WITNESSES):
        for number, leg in enumerate(spec.legs):
            parts = targets.split(leg, witness.position)
            if parts:
                legs = (*spec.legs[:number], *parts, *spec.legs[number + 1 :])
                return _Trial(replace(spec, legs=legs), witness, parts[0].stop)
    return _Trial(spec, own, None)


def _of_node(wiring: Wiring, record: BackupRecord, found: ClusterPosition | None) -> list[Check]:
    """Is a backup of a Galera node where its record says, in the history of the cluster? One that does not say it
    does from then on."""
    node = record.node
    if node is None or found is None:
        return []
    if node.position is None:
        proved = replace(node, uuid=found.uuid, seqno=found.seqno, evidence=str(Evidence.PROOF))
        wiring.catalog.backups.set_node(record.id, proved)
        return [Check(PLACED, PASSED, f"{found}, which the backup did not record")]
    if node.position != found:
        return [Check(PLACED, FAILED, f"InnoDB is at {found}, the backup's record says {node.position}")]
    return [Check(PLACED, PASSED, str(found))]


def _replay_checks(rolled: RolledForward | None) -> list[Check]:
    if rolled is None:
        return []
    position = f"{rolled.stop.file}:{rolled.stop.pos}" + (f" (GTID {rolled.stop.gtids})" if rolled.stop.gtids else "")
    events = f"; state restored of the events {', '.join(rolled.events)}" if rolled.events else ""
    remarks = f"; {'; '.join(rolled.remarks)}" if rolled.remarks else ""
    return [Check(REPLAYED, PASSED, f"{rolled.transactions} transactions to {position}{events}{remarks}")]

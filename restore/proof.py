"""A test restore from end to end, and what it proved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from threading import Event

from backupd.model.clock import Clock
from backupd.model.errors import BackupdError, CancelledError
from backupd.model.progress import Report
from backupd.model.proof import Check, Phase, Proof, Witness
from backupd.transfer.unseal import Unsealer
from restore.build import Stopwatch
from restore.checks import FAILED, examine
from restore.fetch import default_workers
from restore.scratch import ScratchSpec, scratch_instance
from storage.destination import Destination


@dataclass(frozen=True, slots=True)
class ProofSpec:
    """One test restore. ``target``: as it was asked for; ``moment``: the restored one, for the policy's ``checks``."""

    scratch: ScratchSpec
    target: str
    moment: datetime
    checks: tuple[str, ...] = ()
    witness: Witness | None = None


def prove(
    spec: ProofSpec,
    *,
    destinations: Sequence[Destination],
    unsealer: Unsealer,
    clock: Clock,
    report: Report,
    cancel: Event | None = None,
    on_phase: Callable[[Phase], None] = lambda _phase: None,
) -> Proof:
    """Restore onto a scratch instance, look at everything, throw it away, and say what came of it.

    Whatever goes wrong with the backup or the restore is the proof's ``error``; raises CancelledError only.
    """
    started_at = clock()
    phases: list[Phase] = []
    checks: list[Check] = []
    compared = 0
    error = ""

    def note(phase: Phase) -> None:
        phases.append(phase)
        on_phase(phase)

    try:
        with scratch_instance(
            spec.scratch,
            destinations=destinations,
            unsealer=unsealer,
            clock=clock,
            report=report,
            cancel=cancel,
            on_phase=note,
        ) as copy:
            facts = copy.last.body.facts
            with Stopwatch(note).phase("verified", copy.last.header.stats.bytes_source):
                checks, compared = examine(
                    copy.connection,
                    statements=spec.checks,
                    target=spec.moment,
                    witness=spec.witness,
                    position=facts.position,
                    workers=spec.scratch.workers or default_workers(),
                    report=report,
                )
    except CancelledError:
        raise
    except BackupdError as failure:
        error = str(failure)
    return make_proof(
        proof_id=spec.scratch.scratch_id,
        server=spec.scratch.server,
        backup_id=spec.scratch.chain[-1],
        target=spec.target,
        started_at=started_at,
        finished_at=clock(),
        phases=phases,
        checks=checks,
        tables_compared=compared,
        error=error,
    )


def make_proof(
    *,
    proof_id: str,
    server: str,
    backup_id: str,
    target: str,
    started_at: datetime,
    finished_at: datetime,
    phases: Sequence[Phase],
    checks: Sequence[Check],
    tables_compared: int,
    error: str = "",
) -> Proof:
    """``failed`` when anything failed or ended early (``error``: its whole text), ``proved`` when tables were
    compared with a witness, ``restored`` when there was none to compare with."""
    if error or any(check.outcome == FAILED for check in checks):
        outcome = "failed"
        error = error or "; ".join(f"{check.name}: {check.detail}" for check in checks if check.outcome == FAILED)
    else:
        outcome = "proved" if tables_compared else "restored"
    return Proof(
        id=proof_id,
        server=server,
        backup_id=backup_id,
        target=target,
        outcome=outcome,
        started_at=started_at,
        finished_at=finished_at,
        phases=tuple(phases),
        checks=tuple(checks),
        tables_compared=tables_compared,
        error=error,
    )

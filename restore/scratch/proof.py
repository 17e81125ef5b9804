"""Puts together what a test restore proved."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from backupd.model import proof as proofs
from backupd.model.proof import Check, Phase, Proof, Tally
from restore.datadir.checks import FAILED


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
    tally: Tally,
    error: str = "",
    obstacle: str = "",
    warnings: Sequence[str] = (),
    older: bool = False,
    inexact: bool = False,
) -> Proof:
    """``failed`` when a check failed or the data was found damaged (``error``: the whole text), ``undecided`` when
    something else ended the test early (``obstacle``: the whole text), ``inexact`` when the replay may have given other
    rows (a check that failed then says no more than that), ``proved`` when tables were compared with a witness,
    ``restored`` when there was none to compare with or not all of it could be looked at, or when what was restored is
    ``older`` than what is known
    to exist."""
    told = "; ".join(f"{check.name}: {check.detail}" for check in checks if check.outcome == FAILED)
    if error or (told and not inexact):
        outcome, error = proofs.FAILED, error or told
    elif obstacle:
        outcome, error = proofs.UNDECIDED, obstacle
    elif inexact:
        outcome, error = proofs.INEXACT, told
    else:
        outcome = proofs.PROVED if tally.equal and not tally.unseen and not older else proofs.RESTORED
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
        tables_compared=tally.equal,
        tables_present=tally.present,
        not_looked_at=tally.unseen,
        error=error,
        warnings=tuple(warnings),
        older=older,
    )

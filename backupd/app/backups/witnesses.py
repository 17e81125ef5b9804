"""Witnesses on a schedule of their own: what the source's tables held at a moment between two backups.

A test restore that is rolled forward compares the restored copy with the newest witness on its way.
"""

from __future__ import annotations

from backupd.app.context.run import JobRun
from backupd.app.context.server_identity import refuse_stranger
from backupd.app.context.wiring import Wiring
from backupd.engine.witness import take
from backupd.model.errors import RefusedError
from backupd.model.text import new_id


def take_witness(wiring: Wiring, run: JobRun) -> str:
    """Read the checksums of the server's tables now, within the policy's budget; gives the id of the witness.

    Raises RefusedError for a server without a binary log, whose moments cannot be found again, and for another server
    than the one that is meant; ServerError.
    """
    server = wiring.settings.server(run.job.server)
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
            f"{server.name} writes no binary log: no restore comes to the moment that was just read",
            hint="turn log_bin on, or take witness.schedule out of the policy; full backups have "
            "witnesses of their own",
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

"""Proofs and witnesses, kept at every destination beside the backups that they are about, so that they outlive the
catalog. Whatever is missing there is put, so it does not matter when this was last done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from backupd.app.wiring import Wiring
from backupd.model.errors import LockedError, NotFoundError
from backupd.transfer import proofdoc
from backupd.transfer.proofdoc import Kept, KeptWitness
from backupd.transfer.seal import Sealer
from storage.destination import Destination


def keep_proofs(wiring: Wiring, destination: Destination, sealer: Sealer) -> int:
    """Put what the catalog knows and ``destination`` lacks, of configured servers, and take away what is older than
    every backup of its server and that the catalog has forgotten. How many were put. Raises DestinationError."""
    count = 0
    for server in wiring.settings.servers:
        stored = {proof_id for _server, proof_id in proofdoc.listed(destination, server)}
        proofs = {proof.id: proof for proof in wiring.catalog.proofs.list(server)}
        witnesses = wiring.catalog.witnesses.ids(server)
        known = {*proofs, *witnesses}
        for kept in _missing(wiring, proofs, witnesses, stored):
            proofdoc.put(destination, kept, sealer)
            count += 1
        if stored - known:
            _forget(wiring, destination, server, stored - known)
    return count


def _missing(wiring: Wiring, proofs: Mapping[str, Kept], witnesses: tuple[str, ...], stored: set[str],
             ) -> Iterator[Kept]:
    yield from (proof for proof_id, proof in proofs.items() if proof_id not in stored)
    for witness_id in witnesses:
        if witness_id in stored:
            continue
        try:
            yield KeptWitness(witness_id, wiring.catalog.witnesses.get(witness_id),
                              wiring.catalog.witnesses.backup_of(witness_id))
        except NotFoundError:
            continue  # forgotten meanwhile


def _forget(wiring: Wiring, destination: Destination, server: str, unknown: set[str]) -> None:
    """Only where the catalog has backups to go by: an empty one, after a loss, says nothing."""
    starts = [record.started_at for record in wiring.catalog.backups.list(server)]
    if not starts:
        return
    oldest = _stamp(min(starts))
    for proof_id in sorted(unknown):
        if proof_id < oldest:  # ids begin with their time
            try:
                proofdoc.remove(destination, server, proof_id)
            except LockedError:
                return  # a rule of the place keeps it for now, and what is younger even longer


def _stamp(moment: datetime) -> str:
    return f"{moment:%Y%m%dT%H%M%SZ}"

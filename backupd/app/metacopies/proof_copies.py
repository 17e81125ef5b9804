"""Proofs and witnesses, kept at every destination beside the backups that they are about, so that they outlive the
catalog.

Whatever is missing there is put, so it does not matter when this was last done. What a catalog does not know may be
what it has lost: only what is stored at the destination counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from datetime import datetime, timedelta

from backupd.app.context.trust import signed_servers
from backupd.app.context.wiring import Wiring
from backupd.model.errors import LockedError, NotFoundError
from backupd.transfer.records import proofs as proofdoc
from backupd.transfer.records.manifests import backup_ids
from backupd.transfer.records.proofs import Kept, KeptWitness
from backupd.transfer.records.sealing import Sealer
from storage import layout
from storage.destination import Destination

KEPT = timedelta(days=400)
"""For so long, at least, a proof outlives its backup at a destination."""


def keep_proofs(
    wiring: Wiring, destination: Destination, sealer: Sealer, damaged: Collection[str] = ()
) -> frozenset[str]:
    """Put what the catalog knows and ``destination`` lacks, or has without the signature that it needs, of configured
    servers, and take away what the catalog has forgotten, once it is ``KEPT`` old and older than every backup of its
    server there. What is ``damaged`` (keys), or of which nobody knows what was stored, is put again. Keys of what was
    put. Raises DestinationError."""
    done: set[str] = set()
    signed = signed_servers(wiring.settings)
    deposits = wiring.catalog.deposits
    recorded = deposits.at(destination.name).keys() - set(damaged)
    for server in wiring.settings.servers:
        stored = {proof_id for _server, proof_id in proofdoc.listed(destination, server)}
        proofs = {proof.id: proof for proof in wiring.catalog.proofs.list(server)}
        witnesses = wiring.catalog.witnesses.ids(server)
        known = {*proofs, *witnesses}
        good = stored - proofdoc.unsigned(destination, server) if server in signed else stored
        good = {proof_id for proof_id in good if layout.proof_key(server, proof_id) in recorded}
        for kept in _missing(wiring, proofs, witnesses, good):
            key = layout.proof_key(kept.server, kept.id)
            deposits.put(destination.name, key, proofdoc.put(destination, kept, sealer))
            done.add(key)
        if stored - known:
            _forget(wiring, destination, server, stored - known)
    return frozenset(done)


def _missing(
    wiring: Wiring,
    proofs: Mapping[str, Kept],
    witnesses: tuple[str, ...],
    stored: set[str],
) -> Iterator[Kept]:
    yield from (proof for proof_id, proof in proofs.items() if proof_id not in stored)
    for witness_id in witnesses:
        if witness_id in stored:
            continue
        try:
            yield KeptWitness(
                witness_id, wiring.catalog.witnesses.get(witness_id), wiring.catalog.witnesses.backup_of(witness_id)
            )
        except NotFoundError:
            continue  # forgotten meanwhile


def _forget(wiring: Wiring, destination: Destination, server: str, unknown: set[str]) -> None:
    """A proof is younger than its backup: one that is older than all that are there is of one that is not. Where there
    are none at all, something else has happened than that they became old."""
    oldest = min((backup_id for _server, backup_id in backup_ids(destination, server)), default="")
    limit = min(oldest, _stamp(wiring.clock() - KEPT))
    for proof_id in sorted(unknown):
        if proof_id < limit:  # ids begin with their time
            try:
                proofdoc.remove(destination, server, proof_id)
                wiring.catalog.deposits.forget(destination.name, [layout.proof_key(server, proof_id)])
            except LockedError:
                return  # a rule of the place keeps it for now, and what is younger even longer


def _stamp(moment: datetime) -> str:
    return f"{moment:%Y%m%dT%H%M%SZ}"

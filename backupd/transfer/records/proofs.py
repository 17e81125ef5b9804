"""Proofs and witnesses at a destination, sealed: they outlive the catalog, and they name tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backupd.model.document import opened_limit, parsed
from backupd.model.errors import DamagedError, ObjectMissingError
from backupd.model.proof import Proof, Witness
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.manifests import get_document, put_bytes
from storage import layout
from storage.destination import Destination

FORMAT = "backupd-proof/1"


@dataclass(frozen=True, slots=True)
class KeptWitness:
    """A witness as it is kept: with its id, and the backup in whose very moment it was read, if any."""

    id: str
    witness: Witness
    backup_id: str | None

    @property
    def server(self) -> str:
        """The server that the witness is of."""
        return self.witness.server


Kept = Proof | KeptWitness


def put(destination: Destination, kept: Kept, sealer: Sealer) -> str:
    """Store it sealed; again is harmless. The SHA-256 (64 hex) of what is stored now."""
    sealed = sealer.seal(_encoded(kept))
    put_bytes(destination, layout.proof_key(kept.server, kept.id), sealed)
    return hashlib.sha256(sealed).hexdigest()


def load(destination: Destination, server: str, proof_id: str, unsealer: Unsealer) -> tuple[Kept, str] | None:
    """What is there, and the SHA-256 of how it is stored; None where it is gone. Raises DamagedError,
    KeyUnusableError."""
    key = layout.proof_key(server, proof_id)
    try:
        sealed = get_document(destination, key)
    except ObjectMissingError:
        return None
    where = f"{destination.name}: {key}"
    try:
        kept = _decoded(parsed(unsealer.unseal(sealed, limit=opened_limit(len(sealed)))))
        if (kept.server, kept.id) != (server, proof_id):
            raise ValueError(f"it belongs to {kept.id} of {kept.server}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(
            f"{where} is damaged",
            [f"{where}: {error}"],
            hint="no backup depends on it; delete it there, and test that backup anew",
        ) from error
    return kept, hashlib.sha256(sealed).hexdigest()


def listed(destination: Destination, server: str | None = None) -> Iterator[tuple[str, str]]:
    """(server, id) of every proof and witness there, oldest first within a server. Reads none."""
    for info in destination.list(layout.PROOFS if server is None else f"{layout.PROOFS}{server}/"):
        owner = layout.proof_of(info.key)
        if owner is not None:
            yield owner


def unsigned(destination: Destination, server: str) -> set[str]:
    """Ids of those of ``server`` without a signature. Reads none."""
    keys = {info.key for info in destination.list(f"{layout.PROOFS}{server}/")}
    return {
        owner[1]
        for key in keys
        if (owner := layout.proof_of(key)) is not None and layout.signature_key(key) not in keys
    }


def remove(destination: Destination, server: str, proof_id: str) -> None:
    """Remove a proof or a witness; nothing happens where there is none."""
    destination.delete(layout.proof_key(server, proof_id))


def _encoded(kept: Kept) -> bytes:
    document: dict[str, Any] = {"format": FORMAT}
    if isinstance(kept, KeptWitness):
        # as_json rounds the seconds for readers; what is kept is exact
        document["witness"] = {**kept.witness.as_json(), "seconds": kept.witness.seconds}
        document |= {"id": kept.id, "backup": kept.backup_id}
    else:
        document["proof"] = {**kept.as_json(), "phases": [[p.name, p.seconds, p.bytes] for p in kept.phases]}
    return json.dumps(document, sort_keys=True).encode()


def _decoded(document: dict[str, Any]) -> Kept:
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']!r} is not known to this version")
    if "witness" in document:
        return KeptWitness(document["id"], Witness.from_json(document["witness"]), document["backup"])
    data = document["proof"]
    phases = [dict(zip(("name", "seconds", "bytes"), phase, strict=True)) for phase in data["phases"]]
    return Proof.from_json({**data, "phases": phases})

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from backupd.model.errors import DamagedError, KeyUnusableError
from backupd.transfer.records import proofs as proofdoc
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.proofs import KeptWitness
from storage import layout
from tests.support.catalog.samples import proof, witness
from tests.support.stores.homes import Homes
from tests.support.stores.memory import MemoryDestination

SERVER = "shop-db1"
PROOF = replace(proof(), id="20261122T120000Z-0000000a")
WITNESS = KeptWitness("20261121T120000Z-0000000b", witness(), "20261121T120000Z-0000000c")


def test_proofs_and_witnesses_come_back_exactly_and_nobody_without_the_key_reads_a_table_name(homes: Homes) -> None:
    there = MemoryDestination("offsite")
    sealer = Sealer([homes.one], homes.both)
    loose = replace(WITNESS, id="20261121T120000Z-0000000d", backup_id=None)
    digests: dict[str, str] = {}
    for kept in (PROOF, WITNESS, loose):
        digests[kept.id] = proofdoc.put(there, kept, sealer)
    assert list(proofdoc.listed(there, SERVER)) == [(SERVER, one.id) for one in (WITNESS, loose, PROOF)]
    opener = Unsealer(homes.both)
    for kept in (PROOF, WITNESS, loose):
        assert proofdoc.load(there, SERVER, kept.id, opener) == (kept, digests[kept.id])
    for info in there.list(""):
        with there.get(info.key) as stream:
            assert "rders" not in stream.read().decode("latin-1")
    with pytest.raises(KeyUnusableError):
        proofdoc.load(there, SERVER, PROOF.id, Unsealer(homes.stranger))
    proofdoc.remove(there, SERVER, PROOF.id)
    assert proofdoc.load(there, SERVER, PROOF.id, opener) is None


def test_what_is_damaged_or_lies_under_anothers_name_is_refused(homes: Homes) -> None:
    there = MemoryDestination("offsite")
    sealer = Sealer([homes.one], homes.both)
    opener = Unsealer(homes.both)
    for content in (
        b"nonsense",
        sealer.seal(b"[]"),
        sealer.seal(b'{"format": "backupd-proof/9"}'),
        sealer.seal(b"\xff"),
        sealer.seal(proofdoc._encoded(replace(PROOF, server="other"))),
    ):
        there.put(layout.proof_key(SERVER, PROOF.id), io.BytesIO(content))
        with pytest.raises(DamagedError):
            proofdoc.load(there, SERVER, PROOF.id, opener)

"""The file by which a node's server knows its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from backupd.model.errors import RefusedError
from backupd.model.server_facts import ClusterPosition
from restore.datadir.occupancy import find_account
from restore.galera import grastate
from restore.galera.grastate import Grastate

UUID = "0b9cbe35-cd8b-11f0-bb2f-6e4ab2a3b9c1"


def test_it_is_written_as_a_server_reads_it_for_that_server_alone(short_tmp: Path) -> None:
    (short_tmp / "grastate.dat").write_text("seqno: -1")
    account = find_account("mysql")
    grastate.write(short_tmp, ClusterPosition(UUID, 8203), account)
    path = short_tmp / "grastate.dat"
    assert path.read_text() == (
        f"# GALERA saved state\nversion: 2.1\nuuid:    {UUID}\nseqno:   8203\nsafe_to_bootstrap: 0\n"
    )
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (account.uid, 0o660)
    assert grastate.read(short_tmp) == Grastate(ClusterPosition(UUID, 8203))


@pytest.mark.parametrize(
    ("uuid", "seqno", "explicit"),
    [(UUID, 0, True), (UUID, -1, False), ("00000000-0000-0000-0000-000000000000", 7, False)],
)
def test_only_a_seqno_of_a_cluster_is_explicit(uuid: str, seqno: int, explicit: bool) -> None:
    assert Grastate.decode(Grastate(ClusterPosition(uuid, seqno)).encode()).is_explicit is explicit


@pytest.mark.parametrize("text", ["", "uuid: x\nseqno: 1\n", f"uuid: {UUID}\n", f"uuid: {UUID}\nseqno: 1e9\n", "\xff"])
def test_what_no_server_wrote_is_refused(text: str, short_tmp: Path) -> None:
    (short_tmp / "grastate.dat").write_bytes(text.encode("latin-1"))
    with pytest.raises(RefusedError, match="cannot be read"):
        grastate.read(short_tmp)


def test_without_the_file_nothing_is_known(short_tmp: Path) -> None:
    (short_tmp / "galera.cache").touch()
    grastate.remove(short_tmp)
    assert grastate.read(short_tmp) is None
    assert not (short_tmp / "galera.cache").exists()

"""What a dead node left: looked at, moved aside, never deleted."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from backupd.model.errors import RefusedError
from backupd.model.server_facts import ClusterPosition
from restore.galera import grastate
from restore.galera.old_datadir import aside_name, move_aside, refuse_no_old_datadir, remains_of, remove_foreign_logs
from tests.support.logs.node_logs import Happened, write

UUID = "0b9cbe35-cd8b-11f0-bb2f-6e4ab2a3b9c1"


def data_of(folder: Path, seqno: int) -> Path:
    datadir = folder / "mysql"
    datadir.mkdir()
    (datadir / "ibdata1").write_bytes(b"data")
    grastate.write(datadir, ClusterPosition(UUID, seqno))
    return datadir


def test_after_a_clean_stop_the_seqno_is_known_exactly(short_tmp: Path) -> None:
    found = remains_of(data_of(short_tmp, 8203), "")
    assert found is not None
    assert (found.position, found.exact) == (ClusterPosition(UUID, 8203), True)
    assert found.words(9000) == "the old data directory is at seqno 8203; the cluster is at 9000"


@pytest.mark.parametrize("log_bin", ["", "node1-bin"])
def test_after_a_crash_its_binary_logs_show_what_it_certainly_had(short_tmp: Path, log_bin: str) -> None:
    datadir = data_of(short_tmp, -1)
    written = write([Happened.ROWS, Happened.DDL, Happened.ROWS], first=500)
    (datadir / "node1-bin.000007").write_bytes(written.data)
    (datadir / "node1-bin.000008").write_bytes(write([], first=503).data[:-3])  # the machine died here
    (datadir / "node1-relay-bin.000009").write_bytes(write([Happened.ROWS], first=90000).data)
    before = {path: path.read_bytes() for path in datadir.iterdir()}
    found = remains_of(datadir, log_bin)
    assert found is not None
    assert (found.position, found.exact) == (ClusterPosition(UUID, 502), False)
    assert {path: path.read_bytes() for path in datadir.iterdir()} == before


def test_without_logs_nothing_is_known(short_tmp: Path) -> None:
    found = remains_of(data_of(short_tmp, -1), "")
    assert found is not None
    assert found.position is None
    assert remains_of(short_tmp / "none", "") is None


def test_it_is_moved_once_and_whole(short_tmp: Path) -> None:
    datadir = data_of(short_tmp, 7)
    aside = aside_name(datadir, "20261128T020000Z-7f3a9c01")
    move_aside(datadir, aside)
    move_aside(datadir, aside)
    assert not datadir.exists()
    assert sorted(path.name for path in aside.iterdir()) == ["grastate.dat", "ibdata1"]
    datadir.mkdir()
    move_aside(datadir, aside)
    assert datadir.exists(), "an empty one is no old data directory"


def test_one_that_cannot_be_renamed_is_refused_with_the_reason(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_path: Path, _goal: Path) -> Path:
        raise OSError(errno.EBUSY, "Device or resource busy")

    datadir = data_of(short_tmp, 7)
    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(RefusedError, match="cannot be moved aside: Device or resource busy"):
        move_aside(datadir, aside_name(datadir, "r"))


def test_a_folder_of_something_else_is_refused(short_tmp: Path) -> None:
    (short_tmp / "letter.txt").touch()
    with pytest.raises(RefusedError, match="no data directory of a node"):
        refuse_no_old_datadir(short_tmp)


def test_logs_of_the_node_that_was_backed_up_leave_the_copy(short_tmp: Path) -> None:
    log = write([Happened.ROWS], first=5).data
    for name in ("node2-bin.000004", "relay.000001"):
        (short_tmp / name).write_bytes(log)
    kept = ("ibdata1", "undo001", "t.000001")
    for name in (*kept, "node2-bin.index", "master.info", "galera.cache", "gvwstate.dat", "donor_galera_info"):
        (short_tmp / name).write_bytes(b"x")
    remove_foreign_logs(short_tmp)
    assert sorted(path.name for path in short_tmp.iterdir()) == sorted(kept)

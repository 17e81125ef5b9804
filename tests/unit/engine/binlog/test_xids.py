"""Xid events, compared with what the servers' own program prints of the same logs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from backupd.engine.binlog.xids import SharedXid, shared_xid, xids
from backupd.model.errors import DamagedError
from tests.support.logs.binlogs import real_logs
from tests.support.logs.node_logs import Happened, Written, write
from tests.support.servers.datadir import find_program


def printed(path: Path) -> list[int]:
    done = subprocess.run([find_program("mariadb-binlog"), str(path)], capture_output=True, check=True)
    return [int(number) for number in re.findall(rb"\tXid = (\d+)$", done.stdout, re.MULTILINE)]


def test_they_are_those_that_the_program_prints_and_no_number_of_a_statement() -> None:
    found = 0
    for path in sorted({log.path for log in real_logs("mariadb").files.values()}):
        assert [xid.number for xid in xids(path)] == printed(path)
        found += len(printed(path))
    assert found > 20


def test_those_before_the_start_are_passed_over_and_each_ends_where_its_transaction_does(tmp_path: Path) -> None:
    written = write([Happened.ROWS, Happened.DDL, Happened.NOTHING, Happened.ROWS], first=50)
    (tmp_path / "node1-bin.000001").write_bytes(written.data)
    found = list(xids(tmp_path / "node1-bin.000001", since=written.ends[50]))
    assert [(xid.number, xid.end) for xid in found] == [(53, written.ends[53])]


def test_a_flipped_bit_is_no_seqno(tmp_path: Path) -> None:
    data = bytearray(write([Happened.ROWS], first=50).data)
    data[-8] ^= 1
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(DamagedError, match="checksum"):
        list(xids(tmp_path / "log"))


ROWS, DDL, NOTHING = Happened.ROWS, Happened.DDL, Happened.NOTHING


def meeting(folder: Path, ours: list[Written], theirs: list[Written]) -> SharedXid | None:
    """Of two nodes whose files are these, oldest first."""
    for name, written in (("node1", ours), ("node2", theirs)):
        for number, one in enumerate(written, start=1):
            (folder / f"{name}-bin.{number:06}").write_bytes(one.data)
    mine = [folder / f"node1-bin.{number:06}" for number in range(len(ours), 0, -1)]
    names = [f"node2-bin.{number:06}" for number in range(len(theirs), 0, -1)]
    return shared_xid(mine, names, lambda name: folder / name)


def test_without_common_gtids_two_nodes_meet_at_a_xid(tmp_path: Path) -> None:
    rows = [ROWS, DDL, NOTHING, ROWS]  # Xids 50 and 53
    theirs = [write(rows, first=50, gtid=700), write(rows, first=54, gtid=703)]
    ours = write(rows, first=50)
    found = meeting(tmp_path, [ours], theirs)
    assert found is not None
    assert (found.name, found.number, found.ends) == ("node2-bin.000001", 53, (ours.ends[53], theirs[0].ends[53]))
    assert found.agrees
    assert shared_xid([tmp_path / "node1-bin.000001"], ["node2-bin.000002"], lambda name: tmp_path / name) is None


def test_a_file_that_defines_things_only_leaves_it_to_the_one_before(tmp_path: Path) -> None:
    ours = [write([ROWS, ROWS], first=50), write([DDL], first=52), write([], first=53)]
    found = meeting(tmp_path, ours, [write([ROWS, DDL, ROWS], first=51)])
    assert found is not None
    assert (found.number, found.ours.name, found.ends[0]) == (51, "node1-bin.000001", ours[0].ends[51])
    assert found.agrees, "what is before the other's file is not compared"
    assert meeting(tmp_path, [write([DDL], first=50)], [write([ROWS], first=51)]) is None


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([ROWS, ROWS, ROWS], [ROWS, NOTHING, ROWS]),  # one is missing there: it logs what is written on it only
        ([ROWS, NOTHING, ROWS], [ROWS, ROWS, ROWS]),
    ],
)
def test_the_same_number_among_others_is_no_meeting(
    tmp_path: Path, ours: list[Happened], theirs: list[Happened]
) -> None:
    found = meeting(tmp_path, [write(ours, first=50)], [write([*theirs, ROWS], first=50)])
    assert found is not None
    assert (found.number, found.agrees) == (52, False)


def test_the_same_number_of_another_transaction_is_no_meeting(tmp_path: Path) -> None:
    found = meeting(tmp_path, [write([ROWS], first=50)], [write([ROWS], first=50, schema="other")])
    assert found is not None
    assert not found.agrees

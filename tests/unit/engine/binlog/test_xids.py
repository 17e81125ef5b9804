"""Xid events, compared with what the servers' own program prints of the same logs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from backupd.engine.binlog.xids import xids
from backupd.model.errors import DamagedError
from tests.support.logs.binlogs import real_logs
from tests.support.logs.node_logs import Happened, write
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

"""Logs with a hole: what our own reader and the servers' tools make of them."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest

from backupd.engine.binlog.events import LONG_EVENT, read_format
from backupd.engine.binlog.hole import MARK, begin_behind_hole, copy_without, hole_of
from backupd.engine.binlog.scan import scan
from backupd.model.binlog import same
from backupd.model.errors import DamagedError, StreamError
from tests.support.logs.binlogs import FLAVOURS, all_of, real_logs, why_not
from tests.support.servers import mysql
from tests.support.servers.datadir import find_program

UUID = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
OTHER = "46a038ea-eb63-11f1-a86e-02fc00000001"
FLAVOUR = pytest.mark.parametrize("flavour", FLAVOURS)


def beginning(flavour: str) -> bytes:
    if why := why_not(flavour):
        pytest.skip(why)
    return real_logs(flavour).files["statements"].path.read_bytes()[:4096]


def sets(flavour: str) -> list[str]:
    if flavour == "mariadb":
        return ["", "0-1-5", "0-1-5,7-4294967295-18446744073709551615"]
    return ["", f"{UUID}:1-5", f"{UUID}:1-5:9,{OTHER}:77", f"{UUID}:1-3:tag_a:4:7-9,{OTHER}:1:a:2:b:3"]


@FLAVOUR
def test_the_head_says_what_is_executed_and_every_event_of_the_hole_is_valid(flavour: str, tmp_path: Path) -> None:
    first = beginning(flavour)
    for number, gtids in enumerate(sets(flavour)):
        for end in (900, 4096, LONG_EVENT, LONG_EVENT + 600, LONG_EVENT + 601, 2 * LONG_EVENT + 530, 5_000_000):
            path = tmp_path / f"{number}-{end}.000001"
            assert begin_behind_hole(path, first, gtids, end)
            found = scan(io.BytesIO(path.read_bytes()))
            assert same(found.gtids_after, gtids, mariadb=flavour == "mariadb")
            assert (found.end, found.tail, found.transactions, found.remarks) == (end, 0, 0, ())
            hole = hole_of(path)
            assert hole is not None
            assert (hole.end, path.stat().st_size) == (end, end)
            copy_without(hole, path, path.with_suffix(".copy"))
            assert path.with_suffix(".copy").read_bytes() == path.read_bytes()[: hole.start]
            assert path.stat().st_mode & 0o077 == 0


@FLAVOUR
def test_where_the_head_does_not_fit_nothing_is_made(flavour: str, tmp_path: Path) -> None:
    first = beginning(flavour)
    path = tmp_path / "binlog.000001"
    least = next(end for end in range(200, 2000) if begin_behind_hole(path, first, "", end))
    assert least > read_format(io.BytesIO(first)).end + len(MARK)
    path.unlink()
    assert not begin_behind_hole(path, first, "", least - 1)
    assert not path.exists()
    for cut in (b"", first[:50]):
        with pytest.raises(StreamError):
            begin_behind_hole(path, cut, "", 5000)
    with pytest.raises(DamagedError):
        begin_behind_hole(path, b"\0" * 500, "", 5000)


@FLAVOUR
def test_a_whole_log_has_no_hole_and_a_torn_hole_is_none(flavour: str, tmp_path: Path) -> None:
    first = beginning(flavour)
    assert all(hole_of(one.path) is None for one in real_logs(flavour).files.values())
    path = tmp_path / "binlog.000001"
    assert begin_behind_hole(path, first, "", 5_000_000)
    whole = hole_of(path)
    assert whole is not None
    with path.open("r+b") as stream:  # a page that never reached the disk
        stream.seek(whole.start + 2 * LONG_EVENT)
        stream.write(bytes(4096))
    torn = hole_of(path)
    assert torn is not None
    assert torn.end == whole.start + 2 * LONG_EVENT


@FLAVOUR
def test_the_servers_own_tool_reads_what_is_behind_a_hole(flavour: str, tmp_path: Path) -> None:
    log = real_logs(flavour).files["statements"] if not why_not(flavour) else None
    if log is None:
        pytest.skip(why_not(flavour))
    scanned, transactions = all_of(log.path)
    half = transactions[len(transactions) // 2]
    state = scan(io.BytesIO(log.path.read_bytes()), stop=half.start).gtids_after
    path = tmp_path / log.path.name
    assert begin_behind_hole(path, log.path.read_bytes(), state, half.start)
    with path.open("ab") as stream:
        stream.write(log.path.read_bytes()[half.start :])
    name = "mysqlbinlog" if flavour == "mysql" else "mariadb-binlog"
    program = str(mysql.root_programs() / name) if flavour == "mysql" else find_program(name)

    def printed(file: Path, *words: str) -> list[str]:
        done = subprocess.run(
            [program, "--no-defaults", "--verify-binlog-checksum", *words, str(file)], capture_output=True, check=True
        )
        return [line for line in done.stdout.decode("utf-8", "replace").splitlines() if "end_log_pos" in line]

    start = f"--start-position={half.start}"
    behind = [line for line in printed(log.path, start) if f"end_log_pos {half.start} " not in line]
    assert len(behind) > 10
    assert printed(path, start)[-len(behind) + 5 :] == behind[5:]
    assert printed(path)[-len(behind) + 5 :] == behind[5:]
    assert scanned.end >= half.end

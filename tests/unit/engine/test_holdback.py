"""Programs that keep the end of a binary log for themselves are found out, named, and not run again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from backupd.backup.finding import Severity
from backupd.backup.server_checks import Streaming as Wish
from backupd.backup.server_checks import examine_binary_log
from backupd.binlog.stream_status import StreamEventKind, StreamState
from backupd.engine.log_client import BinlogTool, binlog_tool, tried
from backupd.engine.server.probe import examine
from backupd.engine.sql.client import Connection
from backupd.model.server_facts import Flavour, Position
from tests.support.logs.streaming import (
    FAST,
    Streaming,
    insert,
    log_status,
    make_server,
    prepare,
    through_socket,
    tool_of,
    until,
)
from tests.support.servers.server import Server
from tests.support.servers.stacks import MARIADB, MYSQL_CLONE, Stack, stacks

_BUFFERING = """#!/usr/bin/python3
# The program of before its flush: of what comes only whole blocks of 4 KiB are written, the rest at its end.
import os, pathlib, subprocess, sys, time
real, args = "{real}", sys.argv[1:]
target = next((one.partition("=")[2] for one in args if one.startswith("--result-file=")), "")
if not target:
    os.execv(real, [real, *args])
held = pathlib.Path(target, ".held")
held.mkdir()
child = subprocess.Popen([real, *("--result-file=%s/" % held if one.startswith("--result-file=") else one
                                  for one in args)])
ended = False
while not ended:
    ended = child.poll() is not None
    for path in sorted(held.iterdir()):
        there = pathlib.Path(target) / path.name
        have = there.stat().st_size if there.exists() else 0
        size = path.stat().st_size
        size = size if ended else size // 4096 * 4096
        if size > have or not there.exists():
            with there.open("ab") as file:
                file.write(path.read_bytes()[have:size])
    time.sleep(0.01)
sys.exit(child.returncode)
"""
_BROKEN = """#!/bin/sh
test -e {log} || exit 9  # so it cannot be confined
case "$*" in *--result-file=*) date +%s.%N >> {log}; echo 'Got error reading packet from server' >&2; exit 1;; esac
exec {real} "$@"
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with make_server(MARIADB) as running:
        prepare(running)
        yield running


def program(path: Path, text: str) -> BinlogTool:
    path.write_text(text)
    path.chmod(0o755)
    return binlog_tool(Flavour.MARIADB, paths={"mariadb-binlog": str(path)})


@pytest.fixture
def buffering(short_tmp: Path) -> BinlogTool:
    return program(short_tmp / "mysqlbinlog-5.6", _BUFFERING.format(real=real_program()))


def real_program() -> str:
    return binlog_tool(Flavour.MARIADB).tool.path


def position(server: Server) -> Position:
    return Position(*log_status(server))


def dumps(server: Server) -> int:
    return sum("Binlog Dump" in str(row[4]) for row in server.query("SHOW PROCESSLIST"))


def test_a_program_that_holds_back_is_told_from_one_that_does_not_and_from_a_server_that_does_not_answer(
    server: Server, buffering: BinlogTool, tmp_path: Path
) -> None:
    size = server.query("SHOW BINARY LOGS")
    real = binlog_tool(Flavour.MARIADB)
    assert tried(real, through_socket(server), position(server), tmp_path, 77).holds is False
    nowhere = Connection(socket=str(tmp_path / "nowhere"), user="x", password="y")
    silent = tried(buffering, nowhere, position(server), tmp_path, 77)
    assert silent.holds is None
    assert silent.said
    assert tried(buffering, through_socket(server), position(server), tmp_path, 77).holds is True
    # It is a property of the program: remembered, nobody is asked again.
    assert tried(real, nowhere, Position("x", 4), tmp_path, 77).holds is False
    assert tried(buffering, nowhere, Position("x", 4), tmp_path, 77).holds is True
    newer = replace(buffering, tool=replace(buffering.tool, sha256="0" * 64))
    assert tried(newer, nowhere, Position("x", 4), tmp_path, 77).holds is None
    assert server.query("SHOW BINARY LOGS") == size  # nothing was written into the server for it
    assert not list(tmp_path.glob("trial-*"))


@pytest.mark.parametrize("stack", stacks(MYSQL_CLONE))
def test_the_mysqlbinlog_of_the_tests_holds_nothing_back(stack: Stack, tmp_path: Path) -> None:
    with make_server(stack) as running:
        prepare(running)
        found = tried(tool_of(running), through_socket(running), position(running), tmp_path, 77)
        assert found.holds is False, found


def test_a_stream_with_such_a_program_is_refused_by_name_and_leaves_no_connections(
    server: Server, buffering: BinlogTool, tmp_path: Path
) -> None:
    insert(server, 3)
    before = dumps(server)
    with Streaming(server, tmp_path / "spool", tool=buffering, programs=tmp_path) as streaming:
        event = streaming.told(StreamEventKind.FAILED)
        time.sleep(3 * FAST.most)  # and it is tried again
        assert streaming.streamer.status().state is StreamState.FAILED
        assert streaming.streamer.status().restarts == 0  # no stream was begun
    assert str(buffering.tool.path) in event.message
    assert buffering.tool.version_text in event.message
    assert "5.7.26" in event.hint
    assert dumps(server) <= before + 1  # what the server itself keeps of the one trial, until it writes again
    with through_socket(server).connect() as session:
        info = examine(session, tolerant=True).info
        paths = {"mariadb-binlog": buffering.tool.path}
        found = list(examine_binary_log(session, info, Wish(), programs=paths, spool=tmp_path))
        (refused,) = [one for one in found if one.severity is Severity.ERROR]
        assert buffering.tool.version_text in refused.message
        assert "5.7.26" in refused.hint
        good = list(examine_binary_log(session, info, Wish(), spool=tmp_path))
        assert any("up to its end" in one.message for one in good if one.severity is Severity.OK)


def test_lives_that_end_at_once_get_rarer_although_the_server_answers(
    server: Server, tmp_path: Path, short_tmp: Path
) -> None:
    log = short_tmp / "lives"
    log.touch()
    log.chmod(0o666)
    (short_tmp / "programs").mkdir(mode=0o755)
    tool = program(short_tmp / "programs" / "broken", _BROKEN.format(log=log, real=real_program()))
    with Streaming(server, tmp_path / "spool", tool=tool, pace=replace(FAST, first=0.1, most=1.6, away=0.1)):
        until(lambda: log.exists() and len(log.read_text().split()) >= 6, "it was tried again and again")
    begun = [float(line) for line in log.read_text().split()]
    pauses = [later - earlier for earlier, later in pairwise(begun)]
    for pause, least in zip(pauses, (0.1, 0.2, 0.4, 0.8, 1.6), strict=False):
        assert pause >= least, pauses


def test_the_trial_is_stopped_when_the_stream_is(server: Server, buffering: BinlogTool, tmp_path: Path) -> None:
    with Streaming(server, tmp_path / "spool", tool=buffering, programs=tmp_path):
        until(lambda: bool(list(tmp_path.glob("trial-*"))), "it is tried")
        began = time.monotonic()
    assert time.monotonic() - began < 4
    assert not (tmp_path / "programs.json").exists()

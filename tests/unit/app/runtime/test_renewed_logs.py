"""Logs that a process writes itself for as long as it lives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.app.runtime.child_process import LOG_SIZE, LogEnd, open_log, renew_log


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "db1.log"
    assert open_log(path) == path
    return path


@pytest.fixture
def stderr(log: Path) -> Iterator[int]:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    yield descriptor
    os.close(descriptor)


def test_a_long_log_is_put_aside_and_a_short_one_goes_on(log: Path, stderr: int) -> None:
    os.write(stderr, b"short\n")
    renew_log(log, stderr)
    assert not log.with_suffix(".log.1").exists()
    os.write(stderr, b"x" * LOG_SIZE)
    end = LogEnd(log, LOG_SIZE)
    renew_log(log, stderr)
    os.write(stderr, b"new\n")
    assert (log.read_bytes(), log.with_suffix(".log.1").stat().st_size) == (b"new\n", LOG_SIZE + 6)
    assert end.tail(0, 10) == "new"


@pytest.mark.parametrize("made", [True, False])
def test_where_somebody_else_has_put_the_log_aside_its_process_follows(log: Path, stderr: int, *, made: bool) -> None:
    log.rename(log.with_suffix(".log.1"))
    if made:
        log.write_bytes(b"")
    renew_log(log, stderr)
    os.write(stderr, b"new\n")
    assert log.read_bytes() == b"new\n"


def test_a_process_without_a_log_gets_none(tmp_path: Path) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    renew_log(tmp_path / "db1.log", nothing)
    os.close(nothing)
    assert not (tmp_path / "db1.log").exists()

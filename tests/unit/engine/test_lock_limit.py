from __future__ import annotations

import threading
from pathlib import Path

import pytest

from backupd.engine.server_load import LockWatch, kill_lock_statements
from backupd.engine.sql.client import Connection
from tests.support.servers.backups import connection_to
from tests.support.servers.mariadb import PrivateServer
from tests.support.service.processes import until

SENT = "261121 02:03:34 Executing FLUSH TABLES WITH READ LOCK..."
SCANNED = ".261121 02:03:35 >> log scanned up to (334470649)"


def watch(place: Path, stopped: threading.Event, seconds: float) -> LockWatch:
    """Of a server that does not answer."""
    return LockWatch(Connection(socket=str(place / "nothing")), stopped.set, seconds=seconds)


@pytest.mark.parametrize(
    "line",
    [
        SENT,
        "2026-11-21T02:03:34.1-00:00 0 [Note] [MY-011825] [Xtrabackup] Executing FLUSH TABLES WITH READ LOCK...",
        "261121 02:03:34 Executing FLUSH NO_WRITE_TO_BINLOG TABLES...",
    ],
)
def test_a_lock_that_is_not_got_stops_the_tool_even_when_the_server_is_gone(tmp_path: Path, line: str) -> None:
    stopped = threading.Event()
    with watch(tmp_path, stopped, 0.05) as lock:
        for heard in (line, SCANNED, "", "."):
            lock.heard(heard)
        assert stopped.wait(120)
        assert lock.expired
        assert "cannot connect to the server" in lock.trouble


@pytest.mark.parametrize(
    "lines",
    [
        [SENT, "261121 02:03:35 Starting to backup non-InnoDB tables and files"],
        ["261121 02:03:35 Executing FLUSH NO_WRITE_TO_BINLOG ENGINE LOGS..."],
        ["261121 02:03:35 [01] Streaming ./shop/orders.ibd", SCANNED],
    ],
)
def test_anything_else_stops_nothing(tmp_path: Path, lines: list[str]) -> None:
    stopped = threading.Event()
    before = threading.enumerate()
    with watch(tmp_path, stopped, 3600) as lock:
        for line in lines:
            lock.heard(line)
        until(lambda: all(thread in before for thread in threading.enumerate()))  # nobody counts seconds any more
        assert not lock.expired
    assert not stopped.is_set()


def test_nothing_is_stopped_once_the_run_is_over(tmp_path: Path) -> None:
    stopped = threading.Event()
    before = threading.enumerate()
    with watch(tmp_path, stopped, 3600) as lock:
        lock.heard(SENT)
        assert not all(thread in before for thread in threading.enumerate()), "somebody counts the seconds"
    lock.heard(SENT)
    until(lambda: all(thread in before for thread in threading.enumerate()))
    assert not stopped.is_set()


def test_without_a_waiting_statement_nothing_is_killed(shared_server: PrivateServer) -> None:
    assert kill_lock_statements(connection_to(shared_server)) == 0

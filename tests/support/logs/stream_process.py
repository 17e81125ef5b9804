"""A streamer as a process of its own, so that it can be killed: socket and spool are its arguments."""

from __future__ import annotations

import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

from backupd.binlog.spool_files import Spool
from backupd.binlog.supervisor import Streamer
from backupd.engine.server.binary_logs import BinlogSource
from backupd.engine.sql.client import Connection
from tests.support.logs.streaming import FAST, PASSWORD, USER

if __name__ == "__main__":
    socket, folder = sys.argv[1:]
    Streamer(
        "db1",
        BinlogSource(Connection(socket=socket, user=USER, password=PASSWORD)),
        Spool(Path(folder)),
        installation="test",
        wanted=None,
        max_spool_bytes=2**40,
        clock=lambda: datetime.now(UTC),
        on_event=lambda _event: None,
        pace=FAST,
    ).run(threading.Event())

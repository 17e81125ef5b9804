"""A load that kills itself: ``python -m tests.support.restores.load_victim SOCKET FOLDER TABLES BYTES``."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from backupd.engine.sql.client import Connection
from backupd.model.job import Progress
from backupd.model.table import DumpedTable
from backupd.process.run_context import RunContext
from restore.cutover import table_load as tableload
from restore.cutover.parallel_load import load

STAGING = {"shop": "backupd_restore_victim_1"}


def main(socket: str, folder: Path, listed: Path, enough: int) -> None:
    def report(progress: Progress) -> None:
        if progress.bytes_done >= enough:
            os.kill(os.getpid(), signal.SIGKILL)

    tableload.COMMIT_BYTES = 64 * 1024
    tables = [DumpedTable.from_json(one) for one in json.loads(listed.read_text())]
    load(Connection(socket=socket, user="root"), folder, tables, STAGING, RunContext(workers=3, report=report))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))

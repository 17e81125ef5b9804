"""A process that archives a spool until it is killed: ``python -m tests.support.logs.archiving SPOOL HOME KEY
FOLDER``."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from backupd.binlog import segment_sealer
from backupd.binlog.archiver import Archiver
from backupd.binlog.spool_files import Spool
from backupd.transfer.records.encryption import Sealer
from storage.filesystem import FilesystemDestination
from tests.support.logs.archived import Books


def main(spool: str, home: str, key: str, folder: str) -> None:
    segment_sealer.SMALL_PART = 1  # parts of pieces are taken over, however small the logs of a test are
    destination = FilesystemDestination("disk", Path(folder))
    with Archiver(
        Spool(Path(spool)),
        {"disk": destination},
        Sealer([key], Path(home)),
        Books(forgotten=True),
        checkpoint=timedelta(0),
        clock=lambda: datetime.now(UTC),
    ) as archiver:
        print("archiving", flush=True)
        while True:
            archiver.step(datetime.now(UTC))


if __name__ == "__main__":
    main(*sys.argv[1:])

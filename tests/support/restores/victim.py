"""A restore that kills itself: ``python -m tests.support.restores.victim MOMENT COUNT REPOSITORY BACKUP HOME
DATADIR``."""

from __future__ import annotations

import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from backupd.model.job import Progress
from backupd.model.proof import Phase
from backupd.model.text import new_id
from backupd.process.run_context import RunContext, Stopwatch
from backupd.transfer.records.encryption import Unsealer
from restore.fetch.sources import Sources
from restore.whole_server import RestoreSpec, execute
from storage.filesystem import FilesystemDestination


def main(moment: str, count: int, repository: Path, backup_id: str, home: Path, datadir: Path) -> None:
    left = count

    def reach(name: str) -> None:
        nonlocal left
        if name == moment:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def report(progress: Progress) -> None:
        reach(progress.phase)

    def on_phase(phase: Phase) -> None:
        reach(phase.name)

    rename = Path.rename

    def counted(self: Path, target: Path) -> Path:
        reach("rename")
        return rename(self, target)

    Path.rename = counted  # type: ignore[method-assign, assignment]  # to die between two moves
    spec = RestoreSpec(
        restore_id=new_id(datetime.now(UTC)),
        server="shop",
        target="latest",
        chain=(backup_id,),
        moment=datetime.now(UTC),
        datadir=datadir,
        owner="mysql",
        start=True,
    )
    sources = Sources([FilesystemDestination("local", repository)], Unsealer(home))
    execute(spec, sources, RunContext(report=report, watch=Stopwatch(on_phase)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5]), Path(sys.argv[6]))

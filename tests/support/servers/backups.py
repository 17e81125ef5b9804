"""Taking, unpacking and preparing real backups in tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.physical.capture import CaptureRequest, FileEvent, PhysicalTool
from backupd.engine.physical.mariabackup_xtrabackup import MariaBackup
from backupd.engine.server.backup_files import XTRABACKUP
from backupd.engine.server.sandbox import worker
from backupd.engine.sql.client import Connection
from backupd.engine.toolset import find_tool
from backupd.model.server_facts import Receipts
from backupd.process.pipeline import run
from tests.support.logs.stream import Extraction
from tests.support.servers.server import BACKUP_PASSWORD, BACKUP_USER, Server

MEMORY = 96 * 1024 * 1024


def the_tool() -> MariaBackup:
    return MariaBackup(find_tool(("mariadb-backup",)), XTRABACKUP)


def connection_to(server: Server) -> Connection:
    return Connection(socket=str(server.socket), user=BACKUP_USER, password=BACKUP_PASSWORD)


@dataclass(frozen=True)
class Taken:
    base: Path
    receipts: Receipts
    sizes: dict[str, int]
    log: list[str]

    def copy(self, target: Path) -> Path:
        return Path(shutil.copytree(self.base, target, symlinks=True))


def take(
    server: Server,
    base: Path,
    *,
    tool: PhysicalTool | None = None,
    lsn: int | None = None,
    on_event: Callable[[FileEvent], None] = lambda _event: None,
) -> Taken:
    """A backup of ``server``, unpacked into ``base``."""
    workdir = base.with_name(base.name + ".work")
    workdir.mkdir()
    log: list[str] = []
    extraction = Extraction(base)
    request = CaptureRequest(connection_to(server), workdir, incremental_lsn=lsn, on_stderr=log.append)
    with (tool or the_tool()).capture(request) as capture:
        for event in capture.events():
            extraction.take(event)
            on_event(event)
        receipts = capture.receipts()
    return Taken(base, receipts, extraction.sizes, log)


def prepare(base: Path, *increments: Path, tool: PhysicalTool | None = None) -> list[str]:
    """Run the steps; the log of each."""
    give_to_worker(base, *increments)
    return [run(step.command).stderr for step in (tool or the_tool()).prepare(base, increments, memory=MEMORY)]


def give_to_database(base: Path) -> None:
    give_to("mysql", base)


def give_to_worker(*folders: Path) -> None:
    """As a restore does before it prepares them."""
    user = worker()
    if user is not None:
        give_to(user, *folders)


def give_to(user: str, *folders: Path) -> None:
    for path in (each for folder in folders for each in (folder, *folder.rglob("*"))):
        shutil.chown(path, user, user)


def signal_all(word: str, number: signal.Signals) -> list[int]:
    """To everybody whose command line has ``word`` in it; some go with the first. Who they were."""
    found = children(word)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return found


def children(word: str) -> list[int]:
    """Process ids of everybody whose command line has ``word`` in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found

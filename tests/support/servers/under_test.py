"""Each physical tool with a server of its own, so that one test can ask the same of all of them.

mariadb-backup is on every machine of ours. xtrabackup is tested where $BACKUPD_TEST_XTRABACKUP names it,
$BACKUPD_TEST_XBSTREAM the xbstream beside it, and $BACKUPD_TEST_MYSQLD a server of the series that it is for.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from backupd.engine.physical.capture import Data, FileEvent, PhysicalTool
from backupd.engine.physical.mariabackup_xtrabackup import MariaBackup, XtraBackup
from backupd.engine.server.backup_files import XTRABACKUP
from backupd.engine.toolset import find_tool
from backupd.model.server_facts import Tool
from tests.support.oracle import Sums
from tests.support.servers.backups import Taken, give_to_database, take, the_tool
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import BACKUP_USER, Server

TOOLS = ("mariadb-backup", "xtrabackup")
_NEEDED = ("BACKUPD_TEST_XTRABACKUP", "BACKUPD_TEST_XBSTREAM", "BACKUPD_TEST_MYSQLD")
TABLES = ("shop.orders", "shop.notes")
DOUBLINGS = 16


@dataclass(frozen=True)
class ToolUnderTest:
    """``redo``: what it calls its copy of the redo log; ``unpack``: the tool's own program for its streams;
    ``another``: the same tool with another path; ``copy_of``: a server for a prepared datadir."""

    name: str
    tool: PhysicalTool
    server: Server
    redo: str
    unpack: str
    another: Callable[[Tool], PhysicalTool]
    copy_of: Callable[[Path], Server]

    def take(
        self,
        base: Path,
        *,
        tool: PhysicalTool | None = None,
        lsn: int | None = None,
        on_event: Callable[[FileEvent], None] = lambda _event: None,
    ) -> Taken:
        return take(self.server, base, tool=tool or self.tool, lsn=lsn, on_event=on_event)

    def wrapped(self, place: Path, script: str) -> PhysicalTool:
        """The tool behind a shell script in which ``"$TOOL"`` is the real one."""
        path = place / f"wrapper-{secrets.token_hex(4)}"
        path.write_text(f"#!/bin/sh\nTOOL={self.tool.tool.path}\n{script}\n")
        path.chmod(0o755)
        return self.another(replace(self.tool.tool, path=str(path)))

    def write(self) -> None:
        """Change many rows: that is redo, and something for an increment."""
        self.server.execute(
            "UPDATE shop.orders SET v = CONCAT(LEFT(v, 140), LEFT(UUID(), 8)) WHERE id <= 4000",
            "INSERT INTO shop.notes SELECT MAX(i) + 1, 'note' FROM shop.notes",
        )

    def busy(self) -> Callable[[FileEvent], None]:
        """For ``take``: writes once while the tool copies."""
        done: list[bool] = []

        def write(event: FileEvent) -> None:
            if isinstance(event, Data) and event.path.startswith("shop/orders.ibd") and not done:
                done.append(True)
                self.write()

        return write

    def checksums(self, server: Server | None = None) -> dict[str, int]:
        rows = (server or self.server).query(f"CHECKSUM TABLE {', '.join(TABLES)}")
        return Sums({str(name): int(value) for name, value in rows})

    def rows_of(self, prepared: Path) -> dict[str, int]:
        """Start a server on ``prepared`` and look; the folder is gone afterwards."""
        give_to_database(prepared)
        with self.copy_of(prepared) as server:
            return self.checksums(server)


@contextmanager
def under_test(name: str) -> Iterator[ToolUnderTest]:
    """The tool called ``name`` and a server with rows; skips when it is not there."""
    made = _mariadb() if name == "mariadb-backup" else _xtrabackup()
    with made.server as server:
        server.create_backup_users()
        if name == "xtrabackup" and server.roles:  # from 8.0 on it asks performance_schema.log_status for the position
            server.execute(f"GRANT SELECT ON performance_schema.* TO {BACKUP_USER}@localhost")
        server.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.orders (id INT PRIMARY KEY AUTO_INCREMENT, v VARCHAR(200)) ENGINE=InnoDB",
            "CREATE TABLE shop.notes (i INT, v VARCHAR(100)) ENGINE=MyISAM",
            "INSERT INTO shop.notes VALUES (1, 'one'), (2, 'two')",
            "INSERT INTO shop.orders (v) VALUES (REPEAT('x', 150))",
            *["INSERT INTO shop.orders (v) SELECT REPEAT(CHAR(65 + id % 26), 150) FROM shop.orders"] * DOUBLINGS,
        )
        server.restart()  # after a checkpoint there is little redo, and new tables have their names
        yield made


def _mariadb() -> ToolUnderTest:
    return ToolUnderTest(
        "mariadb-backup",
        the_tool(),
        PrivateServer(),
        MariaBackup.redo_file,
        "mbstream",
        lambda tool: MariaBackup(tool, XTRABACKUP),
        lambda base: PrivateServer(datadir=base, binlog=False),
    )


def _xtrabackup() -> ToolUnderTest:
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not set: no real xtrabackup to test")
    from tests.support.servers.mysql import MySQLServer

    tool = find_tool(("xtrabackup",), paths={"xtrabackup": os.environ[_NEEDED[0]]})
    return ToolUnderTest(
        "xtrabackup",
        XtraBackup(tool, XTRABACKUP),
        MySQLServer(),
        XtraBackup.redo_file,
        os.environ[_NEEDED[1]],
        lambda other: XtraBackup(other, XTRABACKUP),
        lambda base: MySQLServer(datadir=base, binlog=False),
    )

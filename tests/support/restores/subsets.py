"""Chains of real backups for tests that take single tables out of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from backupd.backup.physical import Parent
from backupd.engine.sql.client import Connection
from backupd.model.binlog import ReplaySpec
from backupd.model.manifest import Header
from backupd.model.table import TableName, TablePattern
from backupd.model.text import new_id
from backupd.process.run_context import RunContext
from backupd.transfer.records.encryption import Unsealer
from restore.fetch.sources import Sources
from restore.scratch_server import ScratchSpec
from restore.subset import Needed, SubsetCopy, subset_instance
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys
from tests.support.oracle import Sums
from tests.support.restores.rolling import Kind
from tests.support.restores.taken import now, physical_backup
from tests.support.servers import mysql
from tests.support.servers.server import Server

MIB = 1024 * 1024


@dataclass
class ChainRepository:
    """A repository with one chain of backups of ``server``."""

    kind: Kind
    server: Server
    keys: Keys
    folder: Path
    headers: list[Header] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.destination.initialise(now())

    @property
    def destination(self) -> FilesystemDestination:
        return FilesystemDestination("local", self.folder / "repository")

    @property
    def chain(self) -> tuple[str, ...]:
        return tuple(header.backup_id for header in self.headers)

    @property
    def programs(self) -> dict[str, str]:
        return {} if self.kind.mariadb else {"mysqld": str(mysql.root_programs() / "mysqld")}

    def take(self, hear: Callable[[str], None] | None = None) -> Header:
        """The next backup: the full one, then increments. ``hear`` gets what the tool prints, while it runs."""
        parent = Parent(self.chain, self.headers[-1].to_lsn) if self.headers else None
        spool = self.folder / "spool"
        header = physical_backup(
            self.server, self.keys, self.destination, spool=spool, programs=self.programs, parent=parent, hear=hear
        )
        self.headers.append(header)
        return header

    def spec(self, *, replay: ReplaySpec | None = None, length: int | None = None) -> ScratchSpec:
        return ScratchSpec(
            scratch_id=new_id(now()),
            server="shop",
            chain=self.chain[:length],
            path=self.folder / "scratch",
            replay=replay,
        )

    @property
    def sources(self) -> Sources:
        return Sources([self.destination], Unsealer(self.keys.secret_home), [self.destination])

    @property
    def context(self) -> RunContext:
        return RunContext(memory=256 * MIB, programs=self.programs)

    @contextlib.contextmanager
    def copy(
        self,
        *patterns: str,
        replay: ReplaySpec | None = None,
        length: int | None = None,
        needed: Needed | None = None,
    ) -> Iterator[SubsetCopy]:
        """The tables that fit ``patterns``, of the first ``length`` backups."""
        with subset_instance(
            self.spec(replay=replay, length=length),
            [TablePattern.parse(text) for text in patterns],
            self.sources,
            self.context,
            needed=needed,
        ) as copy:
            yield copy


def sums(asked: Server | Connection, tables: list[str]) -> dict[str, object]:
    """CHECKSUM TABLE of quoted names."""
    statement = f"CHECKSUM TABLE {', '.join(tables)} EXTENDED"
    if isinstance(asked, Server):
        rows = asked.query(statement)
    else:
        with asked.connect() as session:
            rows = session.query(statement)
    return Sums({str(name): number for name, number in rows})


def name(text: str) -> TableName:
    schema, _, table = text.partition(".")
    return TableName(schema, table)

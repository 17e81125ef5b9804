"""Chains of real backups for tests that take single tables out of them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from backupd.backup.commit import Documents
from backupd.backup.physical import Parent, PhysicalSpec, execute
from backupd.engine.server.probe import probe
from backupd.engine.sql.client import Connection
from backupd.engine.toolset import physical_tool
from backupd.model.binlog import ReplaySpec
from backupd.model.manifest import Body, Header
from backupd.model.table import TableName, TablePattern
from backupd.model.text import new_id
from backupd.process.run_context import RunContext
from backupd.transfer.records.encryption import Unsealer
from restore.fetch.sources import Sources
from restore.runbook.backup_runbook import render_runbook
from restore.runbook.shared_steps import render_unpack
from restore.scratch_server import ScratchSpec
from restore.subset import Needed, SubsetCopy, subset_instance
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys
from tests.support.oracle import Sums
from tests.support.restores.rolling import Kind
from tests.support.restores.taken import now
from tests.support.servers import mysql
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, Server
from tests.support.stores.folders import make_short_directory

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
        connection = Connection(socket=str(self.server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
        info = probe(connection)

        def documents(body: Body, header: Header) -> Documents:
            return Documents(
                runbook=render_runbook(header, body, destinations=["local"]).encode(),
                unpack=render_unpack(header.backup_id, body.entries, header.objects),
            )

        workdir = make_short_directory("bt-work-")
        try:
            outcome = execute(
                PhysicalSpec(
                    backup_id=new_id(now()),
                    server="shop",
                    connection=connection,
                    info=info,
                    tool=physical_tool(info, paths=self.programs),
                    destinations=(self.destination,),
                    recipients=(self.keys.fingerprint,),
                    gnupg_home=self.keys.public_home,
                    identity_key=b"k" * 32,
                    workdir=workdir,
                    started_at=now(),
                    documents=documents,
                    spool=self.folder / "spool",
                    parent=Parent(self.chain, self.headers[-1].to_lsn) if self.headers else None,
                ),
                RunContext(now),
                on_stderr=hear,
            )
        finally:
            shutil.rmtree(workdir)
        self.headers.append(outcome.header)
        return outcome.header

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

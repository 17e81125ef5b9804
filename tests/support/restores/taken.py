"""A real backup of a private server: the real tool, real sealing, a repository on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from backupd.backup.commit import Documents
from backupd.backup.physical import Parent, PhysicalSpec, execute
from backupd.engine.server.probe import probe
from backupd.engine.sql.client import Connection
from backupd.engine.toolset import NO_PATHS, physical_tool
from backupd.engine.witness import take
from backupd.model.manifest import Body, Header
from backupd.model.proof import Witness
from backupd.model.text import new_id
from backupd.process.run_context import RunContext
from backupd.transfer.records.encryption import Unsealer
from backupd.transfer.records.manifests import load_body
from restore.runbook.backup_runbook import render_runbook
from restore.runbook.shared_steps import render_unpack
from restore.whole_server import RestoreSpec
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer
from tests.support.servers.server import Server
from tests.support.stores.folders import make_short_directory


def now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Taken:
    """``folder`` of the repository; ``witness`` of the moment right after, when nothing was written meanwhile."""

    folder: Path
    header: Header
    body: Body
    witness: Witness

    @property
    def destination(self) -> FilesystemDestination:
        return FilesystemDestination("local", self.folder)

    def spec(self, datadir: Path, *, start: bool = False, replica: bool = False) -> RestoreSpec:
        return RestoreSpec(
            restore_id=new_id(now()),
            server="shop",
            target="latest",
            chain=(self.header.backup_id,),
            moment=self.header.finished_at,
            datadir=datadir,
            owner="mysql",
            start=start,
            replica=replica,
            witness=self.witness,
        )

    def copy(self, folder: Path) -> Taken:
        """The same backup in a repository of its own, to be damaged."""
        shutil.copytree(self.folder, folder)
        return Taken(folder, self.header, self.body, self.witness)


def physical_backup(
    server: Server,
    keys: Keys,
    destination: FilesystemDestination,
    *,
    spool: Path | None = None,
    programs: Mapping[str, str] = NO_PATHS,
    parent: Parent | None = None,
    hear: Callable[[str], None] | None = None,
) -> Header:
    """A full backup, or an increment of ``parent``. ``hear`` gets what the tool prints, while it runs."""
    connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
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
                tool=physical_tool(info, paths=programs),
                destinations=(destination,),
                recipients=(keys.fingerprint,),
                gnupg_home=keys.public_home,
                identity_key=b"k" * 32,
                workdir=workdir,
                started_at=now(),
                documents=documents,
                spool=spool,
                parent=parent,
            ),
            RunContext(now),
            on_stderr=hear,
        )
    finally:
        shutil.rmtree(workdir)
    return outcome.header


def take_backup(server: PrivateServer, keys: Keys, folder: Path) -> Taken:
    destination = FilesystemDestination("local", folder)
    destination.initialise(now())
    header = physical_backup(server, keys, destination)
    connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    witness = take(connection, server="shop", max_seconds=60)
    return Taken(folder, header, load_body(destination, header, Unsealer(keys.secret_home)), witness)

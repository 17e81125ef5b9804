"""A real backup of a private server: the real tool, real sealing, a repository on disk."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from backupd.backup.commit import Documents
from backupd.backup.physical import PhysicalSpec, execute
from backupd.engine.server.probe import probe
from backupd.engine.sql.client import Connection
from backupd.engine.toolset import physical_tool
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


def take_backup(server: PrivateServer, keys: Keys, folder: Path) -> Taken:
    destination = FilesystemDestination("local", folder)
    destination.initialise(now())
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
                tool=physical_tool(info),
                destinations=(destination,),
                recipients=(keys.fingerprint,),
                gnupg_home=keys.public_home,
                identity_key=b"k" * 32,
                workdir=workdir,
                started_at=now(),
                documents=documents,
            ),
            RunContext(now),
        )
    finally:
        shutil.rmtree(workdir)
    witness = take(connection, server="shop", max_seconds=60)
    body = load_body(destination, outcome.header, Unsealer(keys.secret_home))
    return Taken(folder, outcome.header, body, witness)

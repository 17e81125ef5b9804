"""Logical backups for tests, without an application around them: a spec, and a look at what was committed."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from backupd.backup.commit import Documents
from backupd.backup.logical import LogicalOutcome, LogicalSpec, execute
from backupd.engine.dump.exact_reader import ExactDump
from backupd.engine.dump.insert_files import DumpTool
from backupd.engine.dump.selection import mydumper_tool, select
from backupd.engine.server.probe import probe
from backupd.engine.sql.client import Connection
from backupd.model.manifest import Body, Header
from backupd.model.table import DumpedTable, TableName, TablePattern, definition_path, table_folder
from backupd.model.text import new_id
from backupd.process.run_context import RunContext
from backupd.transfer.records.encryption import Unsealer
from backupd.transfer.records.manifests import load_body
from restore.runbook.backup_runbook import render_logical_runbook
from restore.runbook.shared_steps import render_unpack
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys, gpg
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, Server


def now() -> datetime:
    return datetime.now(UTC)


@dataclass
class DumpRepository:
    """One destination and one server; ``dump`` takes logical backups of it."""

    base: Path
    server: Server
    keys: Keys

    def __post_init__(self) -> None:
        self.destination = FilesystemDestination("local", self.base / "repository")
        if not self.destination.is_initialised():
            self.destination.initialise(now())
        self.connection = Connection(socket=str(self.server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)

    def spec(self, *patterns: str, tools: Sequence[DumpTool] = (), **others: Any) -> LogicalSpec:
        info = probe(self.connection)
        folder = self.base / "spool"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)

        def documents(body: Body, header: Header) -> Documents:
            return Documents(
                render_logical_runbook(header, body, destinations=["local"]).encode(),
                render_unpack(header.backup_id, body.entries, header.objects),
            )

        include = tuple(TablePattern.parse(pattern) for pattern in patterns or ("*.*",))
        spec = LogicalSpec(
            backup_id=new_id(now()),
            server="shop",
            connection=self.connection,
            info=info,
            destinations=(self.destination,),
            recipients=(self.keys.fingerprint,),
            gnupg_home=self.keys.public_home,
            identity_key=b"k" * 32,
            started_at=now(),
            documents=documents,
            select=partial(select, include=include),
            whole=lambda schema: True,
            tools=tuple(tools) or (mydumper_tool(info.flavour), ExactDump()),
            folder=folder,
            max_lock=30.0,
        )  # what a policy may allow at most: the machine of the tests may be slow
        return replace(spec, **others)

    def dump(self, *patterns: str, **others: Any) -> LogicalOutcome:
        return execute(self.spec(*patterns, **others), RunContext(now))

    # -- looking inside

    def body(self, outcome: LogicalOutcome) -> Body:
        return load_body(self.destination, outcome.header, Unsealer(self.keys.secret_home))

    def content(self, outcome: LogicalOutcome, path: str) -> str:
        """Of a small file of the backup."""
        entry = next(entry for entry in self.body(outcome).entries if entry.path == path)
        sealed = self.base / "repository/objects" / entry.bundle[:2] / entry.bundle
        opened = gpg(self.keys.secret_home, "--decrypt", str(sealed))
        plain = subprocess.run(["zstd", "-q", "-d", "-c"], input=opened, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
            member = tar.extractfile(path)
            assert member is not None
            return member.read().decode()

    def runbook(self, outcome: LogicalOutcome) -> str:
        return (self.base / "repository/servers/shop" / outcome.header.backup_id / "RUNBOOK.md").read_text()

    def do_by_hand(self, outcome: LogicalOutcome, client: str) -> None:
        """Run the shell blocks of the runbook. ``client``: the command that loads into a server."""
        done = subprocess.run(
            ["sh"],
            input="\n".join(re.findall(r"^```sh\n(.*?)^```$", self.runbook(outcome), re.MULTILINE | re.DOTALL)),
            text=True,
            capture_output=True,
            check=False,
            env={
                "PATH": "/usr/bin:/bin",
                "GNUPGHOME": str(self.keys.secret_home),
                "REPOSITORY": str(self.base / "repository"),
                "WORK": str(self.base / "work"),
                "CLIENT": client,
            },
        )
        assert done.returncode == 0, done.stderr

    def objects(self) -> set[str]:
        return {path.name for path in (self.base / "repository/objects").rglob("*") if path.is_file()}

    def left_in_spool(self) -> list[Path]:
        return list((self.base / "spool").rglob("*"))


def table(outcome: LogicalOutcome, name: str) -> DumpedTable:
    """What became of ``schema.table``."""
    wanted = TableName(*name.split("."))
    return next(one for one in outcome.dump.tables if one.name == wanted)


def paths_of(body: Body, name: str) -> list[str]:
    folder = table_folder(TableName(*name.split(".")))
    assert definition_path(TableName(*name.split("."))).startswith(folder)
    return [entry.path for entry in body.entries if entry.path.startswith(folder)]

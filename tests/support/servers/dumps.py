"""Running a tool that dumps tables, and loading what it wrote with the server's own client."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from backupd.engine.dump.insert_files import DumpedFile, DumpRequest, DumpTable, DumpTool
from backupd.engine.server.definitions import TableDefinition
from backupd.engine.sql.client import Connection
from backupd.model.table import TableName, quote_name
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import root_programs
from tests.support.servers.server import Server

HEAD = (
    b"SET SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO,ALLOW_INVALID_DATES', foreign_key_checks = 0, unique_checks = 0;\n"
)


@dataclass
class Dumped:
    """``texts``: of each table, the content of its files."""

    texts: dict[TableName, list[bytes]] = field(default_factory=dict)
    rows: dict[TableName, int] = field(default_factory=dict)
    verdicts: dict[TableName, str | None] = field(default_factory=dict)

    @property
    def good(self) -> set[str]:
        return {name.table for name, why in self.verdicts.items() if why is None}

    def why(self, table: str) -> str:
        return next(why or "" for name, why in self.verdicts.items() if name.table == table)


def connection_to(server: Server, *, user: str = "root", password: str = "") -> Connection:
    return Connection(socket=str(server.socket), user=user, password=password)


def wanted(names: Iterable[TableName], *, engine: str = "InnoDB") -> tuple[DumpTable, ...]:
    return tuple(DumpTable(name, engine, 0) for name in names)


def dump(
    tool: DumpTool,
    request: DumpRequest,
    *,
    opened: Callable[[], None] = lambda: None,
    during: Callable[[DumpedFile], None] = lambda _file: None,
) -> Dumped:
    """One whole run into a folder of its own. ``opened`` is called once the snapshots are there, ``during`` with each
    file."""
    folder = request.folder / f"run-{len(list(request.folder.iterdir()))}"
    folder.mkdir()
    dumped = Dumped()
    with tool.run(replace(request, folder=folder)) as run:
        run.open(120)
        opened()
        for file in run.files():
            during(file)
            dumped.texts.setdefault(file.table, []).append(b"".join(file.blocks()))
            dumped.rows[file.table] = dumped.rows.get(file.table, 0) + (file.rows or 0)
            assert file.size == sum(map(len, file.blocks()))
            file.path.unlink()
        dumped.verdicts.update(run.verdicts())
    assert not list(folder.iterdir()), "nothing is left in the folder"
    return dumped


def load(server: Server, schema: str, dumped: Dumped, definitions: Iterable[TableDefinition]) -> None:
    """Create ``schema`` with these tables and load their files, as a client does."""
    server.execute(f"CREATE DATABASE {quote_name(schema)}")
    known = list(definitions)
    # The definitions first: a file of rows may say SET NAMES binary.
    texts = [HEAD, *(definition.create.encode() + b";\n" for definition in known)]
    for definition in known:
        texts += dumped.texts.get(definition.name, [])
    program = "mariadb" if isinstance(server, PrivateServer) else str(root_programs() / "mysql")
    done = subprocess.run(
        [
            program,
            f"--defaults-file={server.client_file()}",
            "--default-character-set=utf8mb4",
            "--binary-mode",
            schema,
        ],
        input=b"".join(texts),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:].decode(errors="replace")


def processes_in(folder: Path) -> Sequence[int]:
    """Of the programs that work in ``folder``."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal() and int(place.name) != os.getpid():
            try:
                name, work = (place / "comm").read_text().strip(), str((place / "cwd").readlink())
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if name == "mydumper" and work.startswith(str(folder)):
                found.append(int(place.name))
    return found

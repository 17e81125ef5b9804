"""A folder in the layout of a logical backup as SQL files for people, with a script that loads all of them in order.

The files are what the backup holds; ``README.sql`` is read by the client and names them. Nothing that is there is ever
overwritten, and nothing is there until all of it is.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backupd.model.dump import decode_name, definition_path, schema_folder, table_folder, triggers_path
from backupd.model.errors import RefusedError
from backupd.model.server import Flavour
from backupd.model.table import TableName, quote_name
from backupd.process.durable import sync_folder

README = "README.sql"
_PARTIAL = ".partial"
_CLIENTS = {Flavour.MARIADB: "mariadb", Flavour.MYSQL: "mysql --loose-commands",
            Flavour.PERCONA: "mysql --loose-commands"}
"""MySQL's client of 9.7 takes ``source`` for SQL unless it is told; older ones do not know the option."""
_SETTINGS = """\
SET NAMES utf8mb4;
SET SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO,NO_ENGINE_SUBSTITUTION,ALLOW_INVALID_DATES';
SET SESSION time_zone = '+00:00';
SET SESSION foreign_key_checks = 0;
/*M!101100 SET SESSION system_versioning_insert_history = 1 */;
"""
_HEAD = """\
-- Written by backupd. Load everything with
--
--     cd {folder}
--     {client} < {readme}
--
-- Each file can be loaded alone, too, into any schema ({program} SCHEMA < FILE): definition.sql creates a table,
-- data-*.sql are its rows, triggers.sql its triggers. Create those last, or the rows fire them.
-- Tables that exist already are errors, nothing is overwritten: the client stops at the first one.

"""


@dataclass(frozen=True, slots=True)
class Written:
    """``files`` without the README; ``bytes`` of all of them."""

    files: int
    bytes: int
    tables: int


def write_sql(folder: Path, target: Path, flavour: Flavour = Flavour.MARIADB) -> Written:
    """Put the files of ``folder`` and a README.sql into ``target``, which must be empty or not exist. ``folder`` is
    left as it is; on the same file system both then share the files. ``flavour``: of the server they are for.

    Raises RefusedError for a target that holds something or cannot be written.
    """
    try:
        return _write(folder, target.absolute(), _CLIENTS[flavour])
    except OSError as error:
        room = "make room there, or" if error.errno == 28 else "mend that, or"
        raise RefusedError(f"cannot write SQL files to {target}: {error.strerror}",
                           detail=f"at {error.filename}" if error.filename else "",
                           hint=f"{room} name another folder; nothing was left there") from error


def _write(folder: Path, target: Path, client: str) -> Written:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RefusedError(f"{target} is there already and is not an empty folder",
                           hint="name one that does not exist; nothing is overwritten")
    partial = target.with_name(f".{target.name}{_PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, mode=0o700)
    try:
        paths = sorted(path.relative_to(folder) for path in folder.rglob("*.sql"))
        size = sum(_put(folder / path, partial / path) for path in paths)
        tables = _tables(paths)
        script = _head(target, client) + "".join(_script(partial, paths, tables))
        (partial / README).write_text(script, encoding="utf-8", errors="surrogateescape")
        for made in (path for path in partial.rglob("*") if path.is_dir()):
            sync_folder(made)
        partial.rename(target)  # in the place of an empty folder, too
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Written(len(paths), size, len(tables))


def _put(source: Path, target: Path) -> int:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _tables(paths: Iterable[Path]) -> tuple[TableName, ...]:
    return tuple(sorted({TableName(decode_name(path.parts[1]), decode_name(path.parts[2]))
                         for path in paths if path.parts[0] == "tables" and len(path.parts) == 4}))


def _script(folder: Path, paths: Sequence[Path], tables: Sequence[TableName]) -> Iterator[str]:
    """Sequences first, because tables may take values from them; triggers once all rows are there."""
    there = {str(path) for path in paths}
    schemas = sorted({table.schema for table in tables} | {decode_name(path.parts[1]) for path in paths
                                                           if path.parts[0] == "schemas"})
    for schema in schemas:
        create = schema_folder(schema) + "create.sql"
        if create in there:
            yield _source(create)
        else:
            yield f"CREATE DATABASE IF NOT EXISTS {quote_name(schema)};\n"
    for table in sorted(tables, key=lambda one: not _is_sequence(folder, one)):
        yield f"\n{_SETTINGS}USE {quote_name(table.schema)};\n"
        rows = [path for path in sorted(there) if path.startswith(table_folder(table) + "data-")]
        yield from map(_source, (definition_path(table), *rows))
    for part in ("routines", "views", "triggers", "events"):
        for schema in schemas:
            scripts = ([triggers_path(table) for table in tables if table.schema == schema] if part == "triggers"
                       else [f"{schema_folder(schema)}{part}.sql"])
            if found := [script for script in scripts if script in there]:
                yield f"\n{_SETTINGS}USE {quote_name(schema)};\n"
                yield from map(_source, found)
    yield "\nSET SESSION foreign_key_checks = 1;\n"


def _head(target: Path, client: str) -> str:
    return _HEAD.format(folder=shlex.quote(str(target)), client=client, program=client.partition(" ")[0], readme=README)


def _source(path: str) -> str:
    return f"source {path}\n"


def _is_sequence(folder: Path, table: TableName) -> bool:
    path = folder / definition_path(table)
    return path.is_file() and b"CREATE SEQUENCE" in path.read_bytes()[:1024]

"""A folder in the layout of a logical backup as SQL files for people, with a script that loads all of them in order.

The files are what the backup holds. ``load.sh`` gives them to the client, one call for each: a client that reads files
from within a file (``source``) goes on behind an error in one of them (MariaDB's), and rows would get into a table that
was there before. Nothing that is there is ever overwritten, and nothing is there until all of it is.

The views of several schemas are one script, each behind those that it reads. The script of one schema has its views in
order; where a view reads one of another schema that reads the first schema again, no order of whole scripts loads.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from backupd.engine.sql.dialect import tokens_of
from backupd.engine.toolset import CLIENTS
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Flavour
from backupd.model.table import (
    TableName,
    decode_name,
    definition_path,
    quote_name,
    schema_folder,
    table_folder,
    triggers_path,
)
from backupd.process.folders import sync_folder
from restore.cutover.parallel_load import is_sequence
from restore.cutover.schema_objects import script_text
from restore.datadir.occupancy import refuse_nested
from restore.runbook.shared_steps import shell, sql

_SET_DELIMITER = "DELIMITER "
_UTF8 = "SET NAMES utf8mb4;"

README = "README.sql"
SCRIPT = "load.sh"
_PARTIAL = ".partial"
_FOLDERS = ("schemas", "tables")
VIEWS = "views.sql"
"""Of all schemas, where more than one has views."""


@dataclass(frozen=True, slots=True)
class _View:
    """``script``: with the settings that it was made in."""

    name: TableName
    statement: str
    script: str


def joined(scripts: Mapping[str, str]) -> str:
    """Of the scripts of views by schema. A circle, which only names can make, is cut somewhere."""
    views = {view.name: view for schema, text in scripts.items() for view in _views(schema, text)}
    reads = {name: _named(view, views.__contains__) for name, view in views.items()}
    ordered: dict[TableName, None] = {}
    while len(ordered) < len(reads):
        ready = [name for name, of in reads.items() if name not in ordered and of <= ordered.keys()]
        ordered |= dict.fromkeys(ready or [next(name for name in reads if name not in ordered)])
    return "".join(f"USE {quote_name(name.schema)};\n{views[name].script}\n" for name in ordered)


def _views(schema: str, text: str) -> Iterator[_View]:
    lines = iter(text.split("\n"))
    script = [_UTF8]
    for line in lines:
        if not line or line.startswith("--"):
            continue
        script.append(line)
        body = [line]
        delimiter = line.removeprefix(_SET_DELIMITER)
        if line.startswith(_SET_DELIMITER) and delimiter != ";":
            body = list(takewhile(delimiter.__ne__, lines))
            script += [*body, delimiter, _SET_DELIMITER + ";"]
        statement = "\n".join(body)
        if statement.startswith("CREATE "):
            yield _View(TableName(schema, _made(statement)), statement, "\n".join(script))
            script = [_UTF8]


def _made(statement: str) -> str:
    """The name of the view."""
    words = tokens_of(statement)
    for word in words:
        if word.word == "VIEW":
            name = next(words, None)
            return name.plain if name else ""
    return ""


def _named(view: _View, known: Callable[[TableName], bool]) -> set[TableName]:
    found = set()
    words = list(tokens_of(view.statement))
    for at, token in enumerate(words):
        if token.kind == "name":
            qualified = at > 1 and words[at - 1].text == "." and words[at - 2].kind == "name"
            found.add(TableName(words[at - 2].plain if qualified else view.name.schema, token.plain))
    return {name for name in found if known(name)} - {view.name}


def write_sql(folder: Path, target: Path, flavour: Flavour = Flavour.MARIADB) -> None:
    """Put the files of ``folder``, a load.sh and a README.sql into ``target``, which must be empty or not exist.
    ``folder`` is left as it is; on the same file system both then share the files. ``flavour``: of the server they are
    for.

    Raises RefusedError for a target that holds something, is where ``refuse_target`` allows none, or cannot be
    written.
    """
    refuse_target(target)
    try:
        _write(folder, Path(os.path.realpath(target)), CLIENTS[flavour].client)
    except OSError as error:
        room = "free space there, or" if error.errno == 28 else "correct the cause, or"
        raise RefusedError(
            f"cannot write SQL files to {target}: {error.strerror}",
            detail=f"at {error.filename}" if error.filename else "",
            hint=f"{room} name another folder; nothing was left there",
        ) from error


def refuse_target(target: Path) -> None:
    """Raises RefusedError for a folder in a data directory, in a repository, or where restores are built."""
    refuse_nested(Path(os.path.realpath(target)))


def _write(folder: Path, target: Path, client: str) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RefusedError(
            f"{target} exists and is not an empty folder",
            hint="name one that does not exist; nothing is overwritten",
        )
    partial = target.with_name(f".{target.name}{_PARTIAL}")
    _remove_partial(partial)
    partial.mkdir(parents=True, mode=0o700)
    try:
        paths = sorted(path.relative_to(folder) for path in folder.rglob("*.sql"))
        for path in paths:
            _put(folder / path, partial / path)
        named = ([decode_name(part) for part in path.parts[1:3]] for path in paths if path.match("tables/*/*/*"))
        tables = sorted({TableName(schema, table) for schema, table in named})
        views = {
            decode_name(path.parts[1]): script_text(partial / path)
            for path in paths
            if path.match(f"schemas/*/{VIEWS}")
        }
        if len(views) > 1:
            (partial / VIEWS).write_text(joined(views), encoding="utf-8", errors="surrogateescape", newline="")
        words = {"client": client, "script": SCRIPT, "readme": README}
        (partial / README).write_text(sql("load_readme", **words), encoding="utf-8")
        script = shell("load", **words) + "\n\n" + "".join(_script(partial, paths, tables, views))
        (partial / SCRIPT).write_text(script, encoding="utf-8", errors="surrogateescape")
        (partial / SCRIPT).chmod(0o700)
        for made in (path for path in partial.rglob("*") if path.is_dir()):
            sync_folder(made)
        partial.rename(target)  # in the place of an empty folder, too
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _remove_partial(partial: Path) -> None:
    """What a killed call left. Raises RefusedError where something is there that such a call does not make."""
    if not os.path.lexists(partial):
        return
    foreign = (
        [partial.name]
        if partial.is_symlink() or not partial.is_dir()
        else [
            path.name
            for path in sorted(partial.iterdir())
            if not (path.suffix == ".sql" or path.name in (SCRIPT, *_FOLDERS))
        ]
    )
    if foreign:
        raise RefusedError(
            f"{partial} is needed to write the files in, but was not created by backupd",
            detail="\n".join(foreign[:20]),
            hint="move it away, or name another folder",
        )
    shutil.rmtree(partial)


def _put(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _script(folder: Path, paths: Sequence[Path], tables: Sequence[TableName], views: Collection[str]) -> Iterator[str]:
    """Sequences first, because tables may take values from them; triggers once all rows are there. ``views``: schemas
    with some."""
    there = {str(path) for path in paths}
    schemas = sorted(
        {table.schema for table in tables}
        | {decode_name(path.parts[1]) for path in paths if path.parts[0] == "schemas"}
    )
    for schema in schemas:
        create = schema_folder(schema) + "create.sql"
        if create not in there:
            (folder / create).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / create).write_text(
                f"CREATE DATABASE IF NOT EXISTS {quote_name(schema)};\n", encoding="utf-8", errors="surrogateescape"
            )
        yield _load(create, "")
    for table in sorted(tables, key=lambda one: not is_sequence(folder, one)):
        rows = [path for path in sorted(there) if path.startswith(table_folder(table) + "data-")]
        for path in (definition_path(table), *rows):
            yield _load(path, table.schema)
    for part in ("routines", "views", "triggers", "events"):
        if part == "views" and len(views) > 1:
            yield _load(VIEWS, "")
            continue
        for schema in schemas:
            scripts = (
                [triggers_path(table) for table in tables if table.schema == schema]
                if part == "triggers"
                else [f"{schema_folder(schema)}{part}.sql"]
            )
            for path in scripts:
                if path in there:
                    yield _load(path, schema)


def _load(path: str, schema: str) -> str:
    return f'load {shlex.quote(path)} {shlex.quote(schema)} "$@"\n'

"""What must lie in a prepared backup, by the file list of the last backup that was applied to it.

The tools say "completed OK!" over missing tables, and a table that was dropped between two increments must not come
back. Suffixes while a backup is not prepared yet, as measured with mariadb-backup 10.11.19 and as xtrabackup's manual
has them:

* ``t.ibd.delta`` with ``t.ibd.meta``: the pages of ``t.ibd`` that changed since the backup before
* ``t.new`` (``t.new.delta``): ``t.ibd``, made or rebuilt after the last checkpoint
* ``t.del``, ``t.ren``: ``t`` was dropped, or renamed to the name that stands in it, while the tool ran; newer
  xtrabackup writes the tablespace's number instead of its name

For ``t.new`` and ``t.del`` of an increment mariadb-backup (10.11.19) removes ``t.ibd`` of the backup before, whatever
that has become since: after RENAME TABLE t TO old, CREATE TABLE t it is all that there is of ``old``. Prepare then
makes ``old`` of its changed pages alone, or leaves it out, and says "completed OK!": ``put_aside``.

RENAME TABLE a.t TO b.t of a table with DATA DIRECTORY moves ``t.frm`` only (MariaDB 10.11.19): its link and its data
keep the old schema's name, at the source as in every backup, and the next start finds no tablespace:
``rejoin_renamed``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from backupd.engine.physical.capture import Data, End, FileEvent, Remove, Rename
from backupd.engine.physical.external_tablespaces import target_of
from backupd.engine.physical.tablefiles import (
    fulltext_id,
    owner_of,
    part_name,
    space_id,
    space_id_of_meta,
    stem_of,
    table_of,
)
from backupd.model.errors import OTHER_BACKUP, DamagedError, UnrestorableError
from backupd.model.table import BaseTable, TableName

_DATA, _LINK = ".ibd", ".isl"
_DELTA, _META, _NEW, _DROPPED, _RENAMED = ".delta", ".meta", ".new", ".del", ".ren"
_TEMPORARY = "#sql"
_HEAD = 64
"""Bytes of a tablespace that tell its number."""
_INNODB = "innodb"
_INDEX_OF_OTHERS = (".MYI", ".MAI")
_PARTITION = re.compile("#[Pp]#")
_AUXILIARY = re.compile("FTS_[0-9a-f]{16}_")
"""Tables of a full-text index, which have no definition of their own."""
_VIEW = b"TYPE=VIEW"
_DEFINITION = ".frm"
"""Files by which a server before MySQL 8 knows a table."""
_OPTIONS = "/db.opt"
"""The same of a schema."""


class Contents:
    """What the stream of a backup came to. ``paths``: of its files. ``renamed``: what the files ``*.ren`` say, stem by
    stem."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._notes: dict[str, bytes] = {}

    @property
    def renamed(self) -> dict[str, str]:
        """Stem to stem, of the files ``*.ren`` that are in the backup."""
        return {
            path.removesuffix(_RENAMED): os.fsdecode(text).strip().removesuffix(_DATA).removeprefix("./")
            for path, text in self._notes.items()
            if path in self.paths
        }

    def take(self, event: FileEvent) -> None:
        """One event of the stream."""
        match event:
            case Data() if event.path.endswith(_RENAMED):
                self._notes[event.path] = self._notes.get(event.path, b"") + bytes(event.payload)
            case End():
                self.paths.add(event.path)
            case Remove():
                self.paths.discard(event.path)
            case Rename():
                self.paths.discard(event.path)
                self.paths.add(event.to)


def expected_files(paths: Iterable[str]) -> frozenset[str]:
    """Files that a prepared backup has, when ``paths`` are those of the last one applied. Only what is certain: data of
    tables, what lies beside it in the folders of schemas, and the system tablespace."""
    listed = list(paths)
    unsure = {
        path.removesuffix(suffix) + _DATA for path in listed for suffix in (_DROPPED, _RENAMED) if path.endswith(suffix)
    }
    numbered = any(path.rpartition("/")[2].removesuffix(_DATA).isdecimal() for path in unsure)
    found = {final for path in listed for final in [_final(path)] if final and _TEMPORARY not in final}
    return frozenset(path for path in found if path not in unsure and not (numbered and path.endswith(_DATA)))


def _final(path: str) -> str:
    """The name of ``path`` after prepare, "" when it is nothing that has to be there then (``#innodb_redo/...``)."""
    if path.startswith("#") or path.endswith((_META, _DROPPED, _RENAMED)):
        return ""
    name = path.removesuffix(_DELTA)
    if name.endswith(_NEW):
        name = name.removesuffix(_NEW) + _DATA
    return name if "/" in name or name.endswith(_DATA) or name.startswith("ibdata") else ""


def put_aside(base: Path, increment: Path) -> tuple[str, ...]:
    """Before ``increment`` is applied to ``base`` by mariadb-backup: give each tablespace that this would remove for
    its name's sake, though its table lives on under another one, the name that the tool itself gives what is in its
    way. It finds tablespaces by their numbers. Returns the stems that they had."""
    doomed = {
        path.relative_to(increment).as_posix().removesuffix(suffix)
        for suffix in (_NEW, _DROPPED)
        for path in increment.glob(f"*/*{suffix}")
    }
    there = {stem: number for stem in sorted(doomed) if (number := _number(base / f"{stem}{_DATA}"))}
    if not there:
        return ()
    living = {
        space_id_of_meta(meta.read_text(encoding="ascii", errors="replace"))
        for meta in increment.glob(f"*/*{_DATA}{_META}")
    }
    kept = {stem: number for stem, number in there.items() if number in living}
    for stem, number in kept.items():
        path = base / f"{stem}{_DATA}"
        path.rename(path.with_name(f"xtrabackup_tmp_#{number}{_DATA}"))
    return tuple(kept)


def of_others(base: Path, paths: Iterable[str], tables: Iterable[BaseTable]) -> list[TableName]:
    """Those of ``tables`` whose tablespace in the prepared ``base`` (its files: ``paths``) has another number than at
    the source: its rows are none of theirs, and a server does not open it. Of partitioned tables and of those that lie
    elsewhere nothing is told."""
    listed = list(paths)
    numbers = {
        table.name: table.space
        for table in tables
        if table.engine.lower() == _INNODB and table.space is not None and not table.shared and not table.parts
    }
    elsewhere = {path.removesuffix(_LINK) for path in listed if path.endswith(_LINK)}
    stems = (path.removesuffix(_DATA) for path in listed if path.endswith(_DATA) and stem_of(path) + _DATA == path)
    names = {stem: table_of(stem) for stem in stems if stem not in elsewhere}
    return sorted(
        name for stem, name in names.items() if name in numbers and _number(base / f"{stem}{_DATA}") != numbers[name]
    )


_MISSED = re.compile(r"Tablespace (?P<number>\d+) was not found at \./(?P<path>\S+\.ibd) ")


def without_earlier_names(log: str, base: Path) -> str:
    """``log`` of mariadb-backup's prepare of some tables, without the lines that miss a tablespace by a name which
    another one has in ``base``: its table had that name before a RENAME, and was left out."""

    def is_taken(line: str) -> bool:
        missed = _MISSED.search(line)
        return missed is not None and _number(base / missed["path"]) not in (0, int(missed["number"]))

    return "\n".join(line for line in log.splitlines() if not is_taken(line))


def _number(tablespace: Path) -> int:
    """0 where there is no such file."""
    try:
        with tablespace.open("rb") as file:
            return space_id(file.read(_HEAD))
    except FileNotFoundError:
        return 0


def swapped(renamed: Mapping[str, str]) -> tuple[str, ...]:
    """Stems whose renames (old to new) lead back to themselves, as with two tables that took each other's name. The
    tools' prepare cannot follow that in an increment (mariadb-backup 10.11.19: "Can't rename ... errno 2")."""
    found: set[str] = set()
    for stem in renamed:
        way = [stem]
        while (to := renamed.get(way[-1])) is not None and to not in way:
            way.append(to)
        if to == stem and len(way) > 1:
            found.update(way)
    return tuple(sorted(found))


def _abandoned(paths: Collection[str], tables: Collection[BaseTable]) -> set[str]:
    """Tablespaces among ``paths`` that were copied and then lost their table, which was dropped, moved to another
    schema or engine, or partitioned anew before the position: xtrabackup 2.4 leaves these to the redo log, so that
    prepare removes or renames them. With them the full-text indexes of their schemas, which do not tell whose they
    are."""
    parts = {table.name: table.parts or ("",) for table in tables if table.engine.lower() == _INNODB}
    found: set[str] = set()
    for path in paths:
        owner = owner_of(path) if path.endswith((_DATA, _LINK)) else None
        part = part_name(path.removeprefix(stem_of(path)).rpartition(".")[0])
        if owner is not None and part not in parts.get(owner, ()):
            found.add(path)
    schemas = {path.partition("/")[0] for path in found}
    return found | {path for path in paths if fulltext_id(path) is not None and path.partition("/")[0] in schemas}


def verify_tables(
    base: Path, last: Sequence[str], *, tables: Collection[BaseTable] | None = None, partial: bool = False
) -> None:
    """Does the prepared ``base`` hold the tables of the last backup applied (file list ``last``), and no dropped one?

    ``tables``: those that the server had at that backup's position, None where nobody listed them.
    ``partial``: were some tables left out on purpose? xtrabackup's prepare removes full-text indexes whose table is not
    there, and which table one is of, only a server on the copy can tell: ``verify_fulltext``. Raises
    UnrestorableError naming every table that is wrong.
    """
    expected = frozenset(path for path in expected_files(last) if not (partial and fulltext_id(path) is not None))
    there = {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()}
    missing = expected - there
    if tables is not None:
        missing -= _abandoned(missing, tables)
    wrong = [f"{path} is missing" for path in sorted(missing)]
    wrong += [
        f"{path} is there, though its table was dropped before the backup"
        for path in sorted(there - expected)
        if path.endswith(_DEFINITION) and "/" in path and _TEMPORARY not in path
    ]
    if wrong:
        raise UnrestorableError(
            f"{len(wrong)} files of the prepared {base} are not those of the backup", wrong, hint=OTHER_BACKUP
        )


def remove_dropped_schemas(base: Path, last: Collection[str]) -> None:
    """Remove the empty folders of schemas that were dropped before the last backup applied (file list ``last``):
    xtrabackup 2.4.20 leaves them, and to a server that knows tables by their definitions each folder is a schema."""
    defined = {path.partition("/")[0] for path in last if path.endswith((_DEFINITION, _OPTIONS))}
    if defined:
        for folder in list(base.iterdir()):
            if folder.name not in defined and folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
                folder.rmdir()


def verify_fulltext(datadir: Path, last: Sequence[str], numbers: Collection[int]) -> None:
    """Are the full-text indexes of these tables (by InnoDB's numbers) in ``datadir`` as in the backup's list ``last``?
    Raises DamagedError."""
    wrong = [
        f"{path} is missing"
        for path in sorted(expected_files(last))
        if fulltext_id(path) in numbers and not (datadir / path).is_file()
    ]
    if wrong:
        raise DamagedError(
            f"{len(wrong)} files of full-text indexes are not in the prepared {datadir}",
            wrong,
            hint="restore the whole backup beside the server (--datadir FOLDER --start), and copy the "
            "tables from there",
        )


def rejoin_renamed(base: Path) -> tuple[str, ...]:
    """Give tablespaces of the prepared ``base`` that were left behind by a RENAME into another schema the name of their
    table; call it before the links are remapped. Returns the tables (``schema/table``).

    Raises DamagedError, before anything moves, where several tables could be meant.
    """
    definitions = {
        path.relative_to(base).as_posix().removesuffix(_DEFINITION): path
        for path in sorted(base.glob(f"*/*{_DEFINITION}"))
    }
    if not definitions:
        return ()  # a server that keeps them elsewhere
    moves: list[tuple[str, str]] = []
    doubts: list[str] = []
    for link in sorted(base.glob(f"*/*{_LINK}")):
        stem = link.relative_to(base).as_posix().removesuffix(_LINK)
        name, *_ = _PARTITION.split(stem)
        table = name.rpartition("/")[2]
        left = _left_behind(base, link)
        if left and name in definitions:  # renamed to another name, too: then the link moved, but not the data
            moves.append((left, stem))
        if name in definitions or _TEMPORARY in name or _AUXILIARY.match(table):
            continue
        part = stem.removeprefix(name)
        able = [
            other
            for other, path in definitions.items()
            if other.rpartition("/")[2] == table and not _has_data(base / other, part) and not _is_view(path)
        ]
        if len(able) == 1:
            moves.append((stem, able[0] + part))
        elif able:
            doubts.append(f"{stem}{_DATA} may belong to {' or '.join(able)}")
    if doubts:
        raise DamagedError(
            f"the tablespaces of {len(doubts)} renamed tables cannot be assigned",
            doubts,
            hint="restore another backup; at the source, RENAME TABLE back to the old schema makes the"
            " next backup right",
        )
    for stem, to in moves:
        for suffix in (_DATA, _LINK):
            if (base / f"{stem}{suffix}").exists():
                (base / f"{stem}{suffix}").rename(base / f"{to}{suffix}")
    return tuple(to for _stem, to in moves)


def _left_behind(base: Path, link: Path) -> str:
    """What the data of ``link`` is called in the backup (without suffix) where it bears its old schema's name."""
    if link.with_suffix(_DATA).exists():
        return ""
    source = Path(target_of(link))
    stem = f"{source.parent.name}/{source.stem}"
    lies_there = (base / f"{stem}{_DATA}").is_file() and not (base / f"{stem}{_LINK}").exists()
    return stem if lies_there and source.suffix == _DATA and stem.rpartition("/")[2] == link.stem else ""


def _has_data(table: Path, part: str) -> bool:
    names = [f"{table.name}{part}{suffix}" for suffix in (_DATA, _LINK)]
    names += [] if part else [table.name + suffix for suffix in _INDEX_OF_OTHERS]
    return any((table.parent / name).exists() for name in names)


def _is_view(definition: Path) -> bool:
    with definition.open("rb") as file:
        return file.read(len(_VIEW)) == _VIEW

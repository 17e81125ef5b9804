"""Tablespaces outside the datadir: finding them in a fetched backup, and giving them a place of their own.

What was measured with MariaDB 10.11.19, source alive on the same host, strace on prepare and on the started
server:

* mariadb-backup streams ``shop/t.ibd`` (the data, in the schema's folder) and ``shop/t.isl`` (a text file:
the absolute path at the source). A MyISAM table with DATA DIRECTORY comes as plain files in its place; an
Aria table with DATA DIRECTORY makes the tool fail ("aria_read data from ... failed with error 9"). External
undo, redo and system tablespaces come flattened into the top folder. * ``--prepare`` opens only files in
the target, also when the redo log names the live file and the .isl is there. So prepare needs no remapping;
it is confined all the same. * **A started server opens what the .isl names**: the live source's file,
read-write. So the .isl must change before the first start. * Without the .isl, or with one that names the
file's place in the schema's folder, all tables can be read, but the first ALTER of such a table crashes the
server (the dictionary says DATA DIRECTORY, no path is known). With one that names a path elsewhere
*inside* the datadir, ALTER fails with error 1210 and the folder shows up as a schema. A relative path
crashes too. With an absolute path outside the datadir everything works: ALTER, TRUNCATE, RENAME, DROP. *
backup-my.cnf keeps ``innodb_undo_directory`` of the source: prepare ignores it, a server must not be given
it.

Hence ``remap``, between prepare and the first start: data to a folder beside the datadir, .isl rewritten.
On MySQL 8 and later the dictionary itself holds the paths; that is for the day its tool is supported.

What must lie in a prepared backup, by the file list of the last backup that was applied to it.

The tools say "completed OK!" over missing tables, and a table that was dropped between two increments must not come
back. Suffixes while a backup is not prepared yet, as measured with mariadb-backup 10.11.19 and as xtrabackup's manual
has them:

* ``t.ibd.delta`` with ``t.ibd.meta``: the pages of ``t.ibd`` that changed since the backup before
* ``t.new`` (``t.new.delta``): ``t.ibd``, made or rebuilt after the last checkpoint
* ``t.del``, ``t.ren``: ``t`` was dropped, or renamed to the name that it holds, while the tool ran; newer
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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from backupd.engine.physical.capture import Data, End, FileEvent, Remove, Rename
from backupd.engine.physical.tablefiles import (
    fulltext_id,
    owner_of,
    part_name,
    space_id,
    space_id_of_meta,
    stem_of,
    table_of,
)
from backupd.engine.server.probe import linked_tablespace
from backupd.model.errors import OTHER_BACKUP, DamagedError, RefusedError, UnrestorableError
from backupd.model.table import BaseTable, TableName
from backupd.process.folders import write_anew

LINK_SUFFIX = ".isl"
_DATA = ".ibd"
_DATA_SUFFIXES = (_DATA, ".new", ".ibd.delta")
"""Before prepare, a table made shortly before the backup is called ``t.new``; ``.delta`` is an increment's."""


@dataclass(frozen=True, slots=True)
class ExternalTablespace:
    """``link`` and ``data``: paths of the .isl and .ibd relative to the backup's folder. ``source``:
    absolute path of the data on the source's host."""

    link: str
    data: str
    source: str

    @property
    def source_folder(self) -> str:
        """The DATA DIRECTORY at the source: ``source`` without schema and file."""
        return str(PurePosixPath(self.source).parent.parent)


def find_external(base: Path) -> tuple[ExternalTablespace, ...]:
    """The tablespaces in ``base`` (a fetched backup, prepared or not) that lay outside the source's datadir.

    Raises DamagedError for a link that is not readable or whose data is not in the backup.
    """
    return _checked(base, _read_links(base))


def remap(base: Path, *, store: Path, final: Path | None = None) -> tuple[ExternalTablespace, ...]:
    """Move the external tablespaces of the prepared backup in ``base`` to ``store`` and make the links name them.

    ``store`` must be on the same file system as ``base`` (files are renamed), not inside it and not inside the future
    datadir; it is made when there is something for it. ``final``: the path that ``store`` will have when the server
    starts, if that is another. Each folder of the source gets a folder of its own (``1``, ``2`` ...). Repeating it
    after an interruption finishes the work. Returns what was still to do, ``source`` being the path at the source.

    Raises RefusedError for a ``store`` inside ``base``, DamagedError as ``find_external`` does, before anything moves.
    Call ``assert_local`` before a server is started.
    """
    final = final or store
    if not final.is_absolute():
        raise RefusedError(f"{final} is not absolute", hint="the server needs the whole path")
    if base == store or base in store.parents:
        raise RefusedError(
            f"{store} is inside {base}: MariaDB allows no DATA DIRECTORY inside its datadir",
            hint="choose a folder outside of it",
        )
    links = _read_links(base)
    pending = _checked(base, [link for link in links if final not in Path(link.source).parents])
    first = _highest_number(store) + 1
    numbers = {folder: str(first + index) for index, folder in enumerate(sorted({t.source_folder for t in pending}))}
    for tablespace in pending:
        within = PurePosixPath(numbers[tablespace.source_folder]) / tablespace.data
        # The link first: a server that is started on a half-done remap finds no file, instead of its source's.
        _write_link(base / tablespace.link, final / within)
        _move(base / tablespace.data, store / within)
    for tablespace in links:
        path = Path(tablespace.source)
        if final in path.parents and (base / tablespace.data).is_file():  # interrupted between the two steps
            _move(base / tablespace.data, store / path.relative_to(final))
    return pending


def relink(base: Path, *, store: Path, final: Path) -> None:
    """Make every link in ``base`` that leads below ``store`` lead to the same path below ``final``: for a copy that a
    server worked on where it was built, before it is put where it will stay. Repeating it is harmless."""
    for link in _read_links(base):
        path = Path(link.source)
        if store in path.parents:
            _write_link(base / link.link, final / path.relative_to(store))


def assert_local(base: Path, allowed: Path) -> None:
    """Does every link in ``base`` lead to an existing file below ``allowed``, and no symbolic link out of ``base``?

    The last look before a server is started. Raises RefusedError naming what leads elsewhere.
    """
    if found := astray(base, (allowed,)):
        raise RefusedError(
            f"files of {base} are outside of it; a server started on it would open them",
            detail="\n".join(found[:50]),
            hint="remap the external tablespaces first",
        )


def astray(base: Path, allowed: Sequence[Path]) -> list[str]:
    """What in ``base`` leads to no existing file below a folder of ``allowed``, or by a symbolic link out of ``base``:
    a line each."""
    found: list[str] = []
    for link in _read_links(base):
        path = Path(link.source)
        if not any(folder in path.parents for folder in allowed) or ".." in path.parts or not path.is_file():
            found.append(f"{link.link} leads to {link.source or 'nothing'}")
    for path in sorted(base.rglob("*")):
        if path.is_symlink() and base.resolve() not in path.resolve().parents:
            found.append(f"{path.relative_to(base)} is a link to {path.readlink()}")
    return found


def _read_links(base: Path) -> list[ExternalTablespace]:
    found: list[ExternalTablespace] = []
    for link in sorted(base.glob(f"*/*{LINK_SUFFIX}")):
        name = link.relative_to(base).as_posix()
        found.append(ExternalTablespace(name, name.removesuffix(LINK_SUFFIX) + _DATA, target_of(link)))
    return found


def target_of(link: Path) -> str:
    """What the .isl file ``link`` of a copy names; "" where it is none."""
    try:
        return linked_tablespace(link)
    except OSError:
        return ""


def _checked(base: Path, links: Sequence[ExternalTablespace]) -> tuple[ExternalTablespace, ...]:
    damages: list[str] = []
    for link in links:
        stem = link.data.removesuffix(_DATA)
        if not link.source.startswith("/") or "\0" in link.source:
            damages.append(f"{link.link} does not name an absolute path: {link.source[:200]!r}")
        elif not any((base / f"{stem}{suffix}").is_file() for suffix in _DATA_SUFFIXES):
            damages.append(f"{link.link} names {link.source}, but {link.data} is not in the backup")
    if damages:
        raise DamagedError(
            "tablespaces outside the datadir are not complete",
            damages,
            hint="choose another backup (--to backup:ID); without them the server would open files of its source",
        )
    return tuple(links)


def _highest_number(store: Path) -> int:
    numbers = [int(entry.name) for entry in store.iterdir() if entry.name.isdecimal()] if store.is_dir() else []
    return max(numbers, default=0)


def _move(data: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    data.rename(target)


def _write_link(link: Path, target: Path) -> None:
    """Replace the link's text in one step; its owner and mode stay."""
    status = link.lstat()
    fresh = link.with_name(link.name + "~")
    owner = (status.st_uid, status.st_gid) if os.geteuid() == 0 else None
    write_anew(fresh, os.fsencode(target), owner=owner, mode=status.st_mode & 0o7777)
    fresh.rename(link)


_DELTA, _META, _NEW, _DROPPED, _RENAMED = ".delta", ".meta", ".new", ".del", ".ren"
_TEMPORARY = "#sql"
_HEAD = 64
"""Bytes of a tablespace that hold its number."""
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
    tables, what is beside it in the folders of schemas, and the system tablespace."""
    listed = list(paths)
    uncertain = {
        path.removesuffix(suffix) + _DATA for path in listed for suffix in (_DROPPED, _RENAMED) if path.endswith(suffix)
    }
    numbered = any(path.rpartition("/")[2].removesuffix(_DATA).isdecimal() for path in uncertain)
    found = {final for path in listed for final in [_final(path)] if final and _TEMPORARY not in final}
    return frozenset(path for path in found if path not in uncertain and not (numbered and path.endswith(_DATA)))


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
    the source: its rows are none of theirs, and a server does not open it. Of partitioned tables and of those that are
    elsewhere nothing is reported."""
    listed = list(paths)
    numbers = {
        table.name: table.space
        for table in tables
        if table.engine.lower() == _INNODB and table.space is not None and not table.shared and not table.parts
    }
    elsewhere = {path.removesuffix(LINK_SUFFIX) for path in listed if path.endswith(LINK_SUFFIX)}
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
    prepare removes or renames them. With them the full-text indexes of their schemas, which do not show whose they
    are."""
    parts = {table.name: table.parts or ("",) for table in tables if table.engine.lower() == _INNODB}
    found: set[str] = set()
    for path in paths:
        owner = owner_of(path) if path.endswith((_DATA, LINK_SUFFIX)) else None
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
        f"{path} exists, but its table was dropped before the backup"
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
    for link in sorted(base.glob(f"*/*{LINK_SUFFIX}")):
        stem = link.relative_to(base).as_posix().removesuffix(LINK_SUFFIX)
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
            hint="restore another backup; to make the next backup restorable, RENAME TABLE back to the old schema at "
            "the source",
        )
    for stem, to in moves:
        for suffix in (_DATA, LINK_SUFFIX):
            if (base / f"{stem}{suffix}").exists():
                (base / f"{stem}{suffix}").rename(base / f"{to}{suffix}")
    return tuple(to for _stem, to in moves)


def _left_behind(base: Path, link: Path) -> str:
    """What the data of ``link`` is called in the backup (without suffix) where it bears its old schema's name."""
    if link.with_suffix(_DATA).exists():
        return ""
    source = Path(target_of(link))
    stem = f"{source.parent.name}/{source.stem}"
    lies_there = (base / f"{stem}{_DATA}").is_file() and not (base / f"{stem}{LINK_SUFFIX}").exists()
    return stem if lies_there and source.suffix == _DATA and stem.rpartition("/")[2] == link.stem else ""


def _has_data(table: Path, part: str) -> bool:
    names = [f"{table.name}{part}{suffix}" for suffix in (_DATA, LINK_SUFFIX)]
    names += [] if part else [table.name + suffix for suffix in _INDEX_OF_OTHERS]
    return any((table.parent / name).exists() for name in names)


def _is_view(definition: Path) -> bool:
    with definition.open("rb") as file:
        return file.read(len(_VIEW)) == _VIEW

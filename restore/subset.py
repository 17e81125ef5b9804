"""Some tables of a physical backup, and of the rest only what a server cannot do without: fetched, prepared, started.

Measured with MariaDB 10.11.19 and MySQL 9.7.4: recovery leaves out the redo of tablespaces whose files are not there,
increments are applied to what there is, and the server starts. MariaDB knows a table by its ``.frm``, so one without is
not there for it; MySQL keeps its dictionary in one file and answers error 1812 for a table without its own. A row whose
foreign key is referenced by a table that is not there can be deleted in MariaDB and not in MySQL.

Tables have earlier names: increments hold pages by number of their tablespace.

A table that was renamed between two backups is in the earlier one under its old name, and an increment's pages of it
are worth nothing without that file. A name alone says nothing: after ``RENAME orders TO old, new TO orders`` both
exist before and after. What follows a table is the number of its tablespace: increments have it in ``.meta`` files,
all others in their first page.

Most tables whose number is not in the earlier backup were made, truncated or rebuilt since. mariadb-backup marks those
that the redo log knows as made since the last checkpoint with ``.new``, and the dictionary's header says which numbers
had been given when the checkpoint was written; so only where an unknown number is older, the beginnings of all files of
the earlier backup are looked at (at most 16 MiB each).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from backupd.engine.physical.capture import PhysicalTool
from backupd.engine.physical.clone import system_tablespace
from backupd.engine.physical.datafiles import verify_fulltext
from backupd.engine.physical.mariabackup_xtrabackup import MariaBackup
from backupd.engine.physical.tablefiles import (
    fulltext_id,
    highest_space_id,
    left_behind,
    owner_of,
    space_id,
    space_id_of_meta,
    stem_of,
    table_of,
)
from backupd.engine.physical.tablespace_transport import Known, drop_tables, read_dictionary, unreadable
from backupd.engine.server.launch import options_for_copy
from backupd.engine.sql.dialect import Dialect, dialect_of
from backupd.model.errors import NotFoundError
from backupd.model.manifest import Entry
from backupd.model.table import TableName, TablePattern, fits_any
from backupd.model.text import few
from backupd.process.run_context import RunContext
from restore.fetch.chain import backup_folders
from restore.fetch.objects import fetch
from restore.fetch.sources import Loaded, Sources
from restore.replay.private_replay import tables_of
from restore.scratch_server import Scratch, ScratchSpec, Workshop, workshop

_DELTA, _META, _NEW, _DATA, _RENAMED = ".delta", ".meta", ".new", ".ibd", ".ren"
_AT_ONCE = 32
_PAGE = 16384

Fetch = Callable[[Loaded, Path], object]
"""Brings what a part of a backup holds to a folder."""

_DEFINITION, _TRIGGERS = ".frm", ".TRG"
_NAMED = 10
Needed = Callable[[Known], Collection[TableName]]


def earlier_names(
    chain: Sequence[Loaded],
    picked: Sequence[Loaded],
    wanted: Collection[str],
    backup_folders: Sequence[Path],
    tool: PhysicalTool,
    fetch: Fetch,
) -> tuple[frozenset[str], ...]:
    """For each backup of ``chain`` the stems (``tablefiles.stem_of``) that are needed besides those of ``picked``, the
    parts that were chosen by the names that are ``wanted`` and fetched to ``backup_folders``. Raises what ``fetch``
    does."""
    more: list[frozenset[str]] = [frozenset() for _ in chain]
    last = len(chain) - 1
    with tempfile.TemporaryDirectory(prefix="look-", dir=backup_folders[0].parent) as folder:
        members = [
            _Member(whole, part, part_folder, Path(folder), fetch)
            for whole, part, part_folder in zip(chain, picked, backup_folders, strict=True)
        ]
        more[last] = members[last].renamed(wanted)
        sought = members[last].changed(members[last].picked) | members[last].changed(
            path for path in members[last].paths if stem_of(path) in more[last]
        )
        for number in range(last - 1, -1, -1):
            member = members[number]
            if not sought:
                break
            found = member.by_name(full=not number)
            unknown = sought - set(found)
            if unknown:
                recent = _recent(unknown, backup_folders[0], chain[0]) if isinstance(tool, MariaBackup) else frozenset()
                others = member.search(unknown, only_new=recent)
                more[number] = frozenset(stem_of(path) for path in others.values())
                found = {**found, **others}
            # Whole files need nothing from before; what was not found did not exist yet.
            sought = {number for number, path in found.items() if number in sought and path.endswith(_DELTA)}
    return tuple(more)


def _recent(unknown: Collection[int], base: Path, full: Loaded) -> frozenset[int]:
    """Those given after the checkpoint of the ``full`` backup in ``base``: where it has them, they are marked."""
    info = full.body.facts.server
    if info.encrypted:
        return frozenset()
    options = {name: value or "" for name, value in options_for_copy(base, {}).items()}
    page = int(options.get("innodb_page_size") or info.variables.get("innodb_page_size") or _PAGE)
    highest = highest_space_id(base / system_tablespace({**info.variables, **options}), page)
    return frozenset() if highest is None else frozenset(number for number in unknown if number > highest)


class _Member:
    """One backup of the chain: all its files (``paths``), and those that were fetched (``picked``)."""

    def __init__(self, whole: Loaded, part: Loaded, part_folder: Path, folder: Path, fetch: Fetch) -> None:
        self._whole, self._part_folder, self._folder, self._fetch = whole, part_folder, folder, fetch
        self._entries = {entry.path: entry for entry in whole.body.entries if stem_of(entry.path)}
        self.paths = tuple(self._entries)
        self.picked = tuple(entry.path for entry in part.body.entries if entry.path in self._entries)

    def renamed(self, wanted: Collection[str]) -> frozenset[str]:
        """Stems of files that belong to a ``wanted`` table by a RENAME while the backup ran (a file ``old.ren`` names
        the new one), or by one into another schema that left a link behind."""
        notes = [path for path in self.paths if path.endswith(_RENAMED) and stem_of(path) not in wanted]
        found = {stem_of(path) for path, head in self._heads(notes) if _named(head) in wanted}
        return frozenset(found | {old for old, new in left_behind(self.paths).items() if new in wanted})

    def changed(self, paths: Iterable[str]) -> set[int]:
        """Numbers of those tablespaces among ``paths`` of which this backup holds the changed pages only."""
        metas = [path for path in paths if path.endswith(_META)]
        return {number for _path, number in self._numbers(metas)}

    def by_name(self, *, full: bool) -> dict[int, str]:
        """The fetched tablespaces of an increment or a ``full`` backup: the file of each number."""
        files = [path for path in self.picked if path.endswith((_DATA if full else _META, _NEW))]
        return {number: _file_of(path) for path, number in self._numbers(files)}

    def search(self, unknown: Collection[int], *, only_new: Collection[int]) -> dict[int, str]:
        """Look for ``unknown`` numbers in the files that were not fetched. ``only_new``: those that can only be in
        files which are marked as new."""
        others = [path for path in self.paths if path not in set(self.picked)]
        kinds = [(_META,), (_NEW,)] if set(unknown) <= set(only_new) else [(_META,), (_NEW,), (_DATA,)]
        found: dict[int, str] = {}
        for suffixes in kinds:
            files = [path for path in others if path.endswith(suffixes)]
            for begin in range(0, len(files), _AT_ONCE):
                if set(unknown) <= set(found):
                    return found
                found |= {
                    number: _file_of(path)
                    for path, number in self._numbers(files[begin : begin + _AT_ONCE])
                    if number in unknown
                }
        return found

    def _numbers(self, paths: Sequence[str]) -> Iterator[tuple[str, int]]:
        for path, head in self._heads(paths):
            number = space_id_of_meta(head.decode("latin-1")) if path.endswith(_META) else space_id(head)
            if number is not None:
                yield path, number

    def _heads(self, paths: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        """The beginnings of files, from where they were fetched to; of others the first parts are fetched now."""
        missing = [path for path in paths if not (self._part_folder / path).is_file()]
        if missing:
            entries = tuple(_beginning(self._entries[path]) for path in missing)
            body = replace(self._whole.body, entries=entries)
            self._fetch(Loaded(self._whole.header, body, self._whole.body), self._folder)
        for path in paths:
            part_folder = self._folder if path in missing else self._part_folder
            with (part_folder / path).open("rb") as file:
                yield path, file.read(4096)


def _beginning(entry: Entry) -> Entry:
    """The first part of a file as a file of its own."""
    if len(entry.parts) < 2:
        return entry
    first = entry.parts[0]
    return replace(entry, size=first.size, sha256=first.sha256, parts=(first,))


def _file_of(path: str) -> str:
    return path.removesuffix(_META) + _DELTA if path.endswith(_META) else path


def _named(note: bytes) -> str:
    """The stem that an ``old.ren`` names: ``shop/new``, as a path or not, with its suffix or not."""
    text = note.decode("utf-8", "surrogateescape").strip()
    return stem_of("/".join(text.split("/")[-2:]))


@dataclass(frozen=True, slots=True)
class Part:
    """Which files are taken. ``stems``: tables, in every backup of a chain; ``earlier``: for each backup those that
    hold one of them under another name; ``fulltext``: numbers of tables whose full-text indexes are taken."""

    stems: frozenset[str]
    earlier: tuple[frozenset[str], ...] = ()
    fulltext: frozenset[int] = frozenset()

    def of(self, chain: Sequence[Loaded]) -> tuple[Loaded, ...]:
        """That part of every backup of ``chain``."""
        earlier = self.earlier or tuple(frozenset[str]() for _ in chain)
        return tuple(self._cut(loaded, self.stems | more) for loaded, more in zip(chain, earlier, strict=True))

    def left_out(self, path: str) -> bool:
        """Is ``path`` missing in the prepared copy on purpose?"""
        return not self._takes(path, self.stems | (self.earlier[-1] if self.earlier else frozenset()))

    def _takes(self, path: str, stems: Collection[str]) -> bool:
        stem = stem_of(path)
        number = None if stem else fulltext_id(path)
        return stem in stems if stem else number is None or number in self.fulltext

    def _cut(self, loaded: Loaded, stems: frozenset[str]) -> Loaded:
        stems |= _definitions_only(entry.path for entry in loaded.body.entries)
        return loaded.cut(lambda entry: self._takes(entry.path, stems))


def _definitions_only(paths: Iterable[str]) -> frozenset[str]:
    """Stems of views, and of tables that have no file of their own but their definition."""
    found: dict[str, bool] = {}
    for path in paths:
        stem = stem_of(path)
        found[stem] = found.get(stem, True) and path.endswith(_DEFINITION)
    return frozenset(stem for stem, only in found.items() if stem and only)


def part_of(chain: Sequence[Loaded], wanted: Callable[[TableName], bool]) -> Part:
    """The tables that are ``wanted``, by the names that they have anywhere in ``chain``."""
    every = {stem_of(entry.path) for loaded in chain for entry in loaded.body.entries}
    stems = frozenset(stem for stem in every if stem and "/#" not in stem and wanted(table_of(stem)))
    needs_fulltext = _dialect(chain[-1]).needs_fulltext_files
    return Part(stems, fulltext=_fulltext_beside(chain[-1], stems) if needs_fulltext else frozenset())


def _dialect(loaded: Loaded) -> Dialect:
    server = loaded.body.facts.server
    return dialect_of(server.flavour, server.version)


def _fulltext_beside(loaded: Loaded, stems: Collection[str]) -> frozenset[int]:
    """Numbers of all tables with full-text indexes in the schemas of ``stems``: one whose indexes are not there ends
    MySQL when it stops."""
    schemas = {stem.partition("/")[0] for stem in stems}
    return frozenset(
        number
        for entry in loaded.body.entries
        if entry.path.partition("/")[0] in schemas and (number := fulltext_id(entry.path)) is not None
    )


def subset_of(chain: Sequence[Loaded], wanted: Callable[[TableName], bool]) -> tuple[Loaded, ...]:
    """``chain`` cut down to the files of the tables that are ``wanted`` and what belongs to no table. The statistics of
    its headers are of the part: ``bytes_stored`` is what has to be fetched, ``bytes_source`` what that becomes."""
    return part_of(chain, wanted).of(chain)


def tables_in(loaded: Loaded) -> tuple[TableName, ...]:
    """The tables of a physical backup that have files of their own, by its list of files. Where a table was renamed
    while the backup ran, only the note's content says which: then views count as tables, too."""
    paths = [entry.path for entry in loaded.body.entries]
    moved = left_behind(paths)
    renamed = {stem_of(path) for path in paths if path.endswith(_RENAMED)}
    alone = set[str]() if renamed else _definitions_only(paths) - set(moved.values())
    stems = {moved.get(stem, stem) for stem in map(stem_of, paths) if stem} - alone - renamed
    return tuple(sorted(table_of(stem) for stem in stems if "/#" not in stem))


@dataclass(slots=True)
class SubsetCopy(Scratch):
    """A running copy of some tables. ``tables`` that were asked for, are there and can be read; ``also``: what else is
    there, since a replay needs it; ``unreadable``: asked for and there, but the server cannot read it, with its words;
    ``left_out``: tables of the backup that were not fetched. ``fetched``: bytes, as they are stored."""

    tables: tuple[TableName, ...] = ()
    also: tuple[TableName, ...] = ()
    unreadable: Mapping[TableName, str] = field(default_factory=dict)
    left_out: tuple[TableName, ...] = ()
    fetched: int = 0


@contextlib.contextmanager
def subset_instance(
    spec: ScratchSpec,
    tables: Sequence[TablePattern],
    sources: Sources,
    context: RunContext,
    *,
    needed: Needed | None = None,
) -> Iterator[SubsetCopy]:
    """``scratch_instance`` of those tables that fit one of ``tables``.

    Where the spec has a replay: ``needed``, given what the copy knows of its tables, says which ones have to be there
    and are replayed (None: those asked for, and the parents of their foreign keys and theirs); what of these is in the
    backup is fetched, too, and children that are not there are dropped from the copy. Raises as ``scratch_instance``
    does, and NotFoundError when no table fits.
    """
    work = workshop(spec, sources, context)
    making = _Making(work, _wanted(work, tables), needed)
    making.refuse_nothing(tables)
    work.refuse(making.chain)
    with work.place() as folder:
        subset = None
        while subset is None:
            with making.started(folder) as copy:
                subset = making.complete(copy, tables)
                if subset is not None:
                    yield subset


def _wanted(work: Workshop, tables: Sequence[TablePattern]) -> Callable[[TableName], bool]:
    variables = work.chain[-1].body.facts.server.variables
    lower = variables.get("lower_case_table_names") == "1"
    patterns = [TablePattern.parse(pattern.text.lower()) for pattern in tables] if lower else list(tables)
    return lambda name: fits_any(name, patterns)


class _Making:
    """The part of a chain that is taken, until it is enough."""

    def __init__(self, work: Workshop, wanted: Callable[[TableName], bool], needed: Needed | None) -> None:
        self._work, self._wanted, self._needed = work, wanted, needed
        self._part = part_of(work.chain, wanted)
        self._required: frozenset[TableName] = frozenset()

    @property
    def chain(self) -> tuple[Loaded, ...]:
        return self._part.of(self._work.chain)

    def refuse_nothing(self, tables: Sequence[TablePattern]) -> None:
        """Before anything is fetched; MySQL may have tables without files of their own, and a replay makes some."""
        last = self._work.chain[-1]
        if self._work.replaying is None and _dialect(last).has_every_table_in_files and not self._part.stems:
            raise self._nothing(tables)

    @contextlib.contextmanager
    def started(self, folder: Path) -> Iterator[Scratch]:
        work = self._work
        with work.pinned():
            work.fetch(self.chain, folder)
            earlier = earlier_names(
                work.chain,
                self.chain,
                self._part.stems,
                backup_folders(work.chain, folder),
                work.tool,
                lambda loaded, peek: fetch(loaded, work.sources, peek, work.context, durable=False),
            )
            if any(earlier):
                before = self._part.earlier or earlier
                self._part = replace(self._part, earlier=tuple(map(frozenset.union, before, earlier)))
                work.refuse(self.chain, there=folder)
                work.fetch(self.chain, folder)
            chain = self.chain
            built = work.assemble(chain, folder, left_out=self._part.left_out)
        with work.started(chain, folder, built, clean=False) as copy:
            yield copy

    def complete(self, copy: Scratch, tables: Sequence[TablePattern]) -> SubsetCopy | None:
        """The copy, when everything is there that must be; None when the next one will have more."""
        work = self._work
        chain, last = self.chain, work.chain[-1]
        with_triggers = {
            name for entry in last.body.entries if entry.path.endswith(_TRIGGERS) and (name := owner_of(entry.path))
        }
        there = {table_of(stem) for stem in self._part.stems}
        absent = [name for name in tables_in(last) if name not in there]
        with copy.connection.connect() as session:
            known, said = read_dictionary(session, absent=absent, with_triggers=with_triggers)
            required = self._require(known) if work.replaying is not None else frozenset[TableName]()
            more = part_of(work.chain, required.__contains__)
            numbers = known.numbers(name for name in known.tables if self._wanted(name) or name in required)
            grown = replace(
                self._part, stems=self._part.stems | more.stems, fulltext=self._part.fulltext | more.fulltext | numbers
            )
            if _files(grown.of(work.chain)) != _files(chain):
                self._part = grown
                return None
            if _dialect(last).needs_fulltext_files and work.replaying is None:
                verify_fulltext(copy.datadir, [entry.path for entry in last.body.entries], numbers)
            asked = [name for name in known.tables if self._wanted(name)]
            there |= set(asked)
            copy.warnings += said
            if not asked and work.replaying is None:
                raise self._nothing(tables)
            if work.replaying is not None:
                copy.warnings += drop_tables(session, known.children(there.__contains__))
                work.tables = tuple(sorted(required))
            trouble = unreadable(session, asked)
        return SubsetCopy(
            **{one.name: getattr(copy, one.name) for one in fields(Scratch)},
            tables=tuple(name for name in asked if name not in trouble),
            also=tuple(name for name in known.tables if name in there and not self._wanted(name)),
            unreadable=trouble,
            left_out=tuple(absent),
            fetched=sum(loaded.header.stats.bytes_stored for loaded in chain),
        )

    def _require(self, known: Known) -> frozenset[TableName]:
        if self._needed is not None:
            return frozenset(self._needed(known))
        replaying = self._work.replaying
        named = () if replaying is None else tables_of(replaying.spec)
        return known.ancestors([*named, *(name for name in known.tables if self._wanted(name))])

    def _nothing(self, tables: Sequence[TablePattern]) -> NotFoundError:
        last = self._work.chain[-1]
        names = tables_in(last)
        schemas = {pattern.schema for pattern in tables}
        near = [name.shown for name in names if name.schema in schemas] or sorted({name.schema for name in names})
        shown = few(near, _NAMED)
        return NotFoundError(
            f"no table of backup {last.header.backup_id} is {' or '.join(pattern.text for pattern in tables)}",
            detail=f"the backup holds {shown}" if near else "the backup holds no tables",
            hint="write schema.table as it was called when the backup was taken; upper and lower case differ",
        )


def _files(chain: Sequence[Loaded]) -> list[int]:
    return [len(loaded.body.entries) for loaded in chain]

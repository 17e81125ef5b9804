"""Earlier names of the tables that are taken out of a chain: increments hold pages by number of their tablespace.

A table that was renamed between two backups lies in the earlier one under its old name, and an increment's pages of it
are worth nothing without that file. A name alone tells nothing: after ``RENAME orders TO old, new TO orders`` both
exist before and after. What follows a table is the number of its tablespace: increments have it in ``.meta`` files,
all others in their first page.

Most tables whose number is not in the earlier backup were made, truncated or rebuilt since. mariadb-backup marks those
that the redo log knows as made since the last checkpoint with ``.new``, and the dictionary's header says which numbers
had been given when the checkpoint was written; so only where an unknown number is older, the beginnings of all files of
the earlier backup are looked at (at most 16 MiB each).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from backupd.engine.instance.launch import options_for_copy
from backupd.engine.physical.capture import PhysicalTool
from backupd.engine.physical.clone import system_tablespace
from backupd.engine.physical.mariabackup import MariaBackup
from backupd.engine.physical.tablefiles import highest_space_id, left_behind, space_id, space_id_of_meta, stem_of
from backupd.model.manifest import Entry
from restore.fetch.sources import Loaded

_DELTA, _META, _NEW, _DATA, _RENAMED = ".delta", ".meta", ".new", ".ibd", ".ren"
_AT_ONCE = 32
_PAGE = 16384

Fetch = Callable[[Loaded, Path], None]
"""Brings what a part of a backup holds to a folder."""


def earlier_names(
    chain: Sequence[Loaded],
    picked: Sequence[Loaded],
    wanted: Collection[str],
    places: Sequence[Path],
    tool: PhysicalTool,
    fetch: Fetch,
) -> tuple[frozenset[str], ...]:
    """For each backup of ``chain`` the stems (``tablefiles.stem_of``) that are needed besides those of ``picked``, the
    parts that were chosen by the names that are ``wanted`` and fetched to ``places``. Raises what ``fetch`` does."""
    more: list[frozenset[str]] = [frozenset() for _ in chain]
    last = len(chain) - 1
    with tempfile.TemporaryDirectory(prefix="look-", dir=places[0].parent) as folder:
        members = [
            _Member(whole, part, place, Path(folder), fetch)
            for whole, part, place in zip(chain, picked, places, strict=True)
        ]
        more[last] = members[last].renamed(wanted)
        sought = members[last].changed(members[last].picked) | members[last].changed(
            path for path in members[last].paths if stem_of(path) in more[last]
        )
        for number in range(last - 1, -1, -1):
            member = members[number]
            if not sought:
                break
            found = member.by_name() if number else member.whole_by_name()
            unknown = sought - set(found)
            if unknown:
                recent = _recent(unknown, places[0], chain[0]) if isinstance(tool, MariaBackup) else frozenset()
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

    def __init__(self, whole: Loaded, part: Loaded, place: Path, folder: Path, fetch: Fetch) -> None:
        self._whole, self._place, self._folder, self._fetch = whole, place, folder, fetch
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

    def by_name(self) -> dict[int, str]:
        """The fetched tablespaces of an increment: the file of each number."""
        files = [path for path in self.picked if path.endswith((_META, _NEW))]
        return {number: _file_of(path) for path, number in self._numbers(files)}

    def whole_by_name(self) -> dict[int, str]:
        """The same of a full backup."""
        files = [path for path in self.picked if path.endswith((_DATA, _NEW))]
        return {number: path for path, number in self._numbers(files)}

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
        missing = [path for path in paths if not (self._place / path).is_file()]
        if missing:
            entries = tuple(_beginning(self._entries[path]) for path in missing)
            body = replace(self._whole.body, entries=entries)
            self._fetch(Loaded(self._whole.header, body, self._whole.body), self._folder)
        for path in paths:
            place = self._folder if path in missing else self._place
            with (place / path).open("rb") as file:
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

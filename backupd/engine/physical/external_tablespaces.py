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
server (the dictionary says DATA DIRECTORY, no path is known). With one that names a place elsewhere
*inside* the datadir, ALTER fails with error 1210 and the folder shows up as a schema. A relative path
crashes too. With an absolute path outside the datadir everything works: ALTER, TRUNCATE, RENAME, DROP. *
backup-my.cnf keeps ``innodb_undo_directory`` of the source: prepare ignores it, a server must not be given
it.

Hence ``remap``, between prepare and the first start: data to a folder beside the datadir, .isl rewritten.
On MySQL 8 and later the dictionary itself holds the paths; that is for the day its tool is supported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from backupd.engine.server.census import linked_tablespace
from backupd.model.errors import DamagedError, RefusedError
from backupd.process.folders import write_anew

LINK_SUFFIX = ".isl"
_DATA_SUFFIX = ".ibd"
_DATA_SUFFIXES = (_DATA_SUFFIX, ".new", ".ibd.delta")
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
            hint="choose a folder beside it",
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
    """Make every link in ``base`` that leads below ``store`` lead to the same place below ``final``: for a copy that a
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
            f"files of {base} lie elsewhere; a server started on it would open them",
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
        found.append(ExternalTablespace(name, name.removesuffix(LINK_SUFFIX) + _DATA_SUFFIX, target_of(link)))
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
        stem = link.data.removesuffix(_DATA_SUFFIX)
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

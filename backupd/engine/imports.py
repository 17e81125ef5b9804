"""Tables that came in as files (ALTER TABLE ... IMPORT TABLESPACE), which no increment holds wholly.

Measured with MariaDB 10.11.19: DISCARD gives the table a new id, IMPORT keeps it and writes every page with log
sequence number 0; the redo log says nothing of the pages. So an increment leaves them out as old ones, and the copy
shows the rows from before. A table that was made in any other way has pages younger than itself, or, as long as they
were not written, zeros. Hence the proof: no page of a table that is newer than a backup may be older than that backup.

Measured with MySQL 5.6.24, 5.7.13 and 9.7.4: IMPORT gives every page the log sequence number of the moment and the
number of its own tablespace, so an increment holds them all. (XtraBackup 2.4.20 with 5.7.13: of a table imported while
the tool runs prepare removes the file, following the redo log of DISCARD. Such a backup is not noticed when it is
taken; every restore of it stops and names the table.) TRUNCATE of 5.7 keeps the tablespace and gives the table
a new id, and pages that the table no longer uses stay as they were: they are older than the backup and in it. So there
an older page is no import where it bears the number of its own tablespace: numbers are never used again, so the backup
has the page of that very tablespace.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.census import linked_tablespace
from backupd.engine.client import Session, is_denied
from backupd.engine.probe import read_dialect
from backupd.model.errors import ServerError
from backupd.model.server import Flavour
from backupd.process.otherfolders import open_plain

_LSN = slice(16, 24)
_SPACE = slice(34, 38)
_FLAGS = slice(54, 58)
_EXPORT = ".cfg"
_HEADER = 64
_ZEROS = bytes(_HEADER)
_SYSTEM = frozenset({0, 0xFFFFFFFE})
"""Numbers of the system tablespace and, from MySQL 8 on, of mysql.ibd, which no view tells the file of: nothing is
imported into these."""


@dataclass(frozen=True, slots=True)
class _Table:
    """``path``: where its file lies or should lie. ``known``: the server has opened it since its start, or lists it
    nevertheless."""

    id: int
    name: str
    space: int
    path: Path
    known: bool

    @property
    def is_temporary(self) -> bool:
        return "/#sql" in self.name


def newest_table(session: Session) -> int | None:
    """The highest id of an InnoDB table; None where the account may not ask, or where a table lacks its own file: that
    one may be imported later under the id that it has now. Raises ServerError."""
    try:
        tables = _tables(session)
    except ServerError as error:
        if is_denied(error):
            return None
        raise
    if any(_lacks_file(table) for table in tables if not table.is_temporary):
        return None
    return max((table.id for table in tables), default=0)


def imported_tables(session: Session, *, newer_than: int, lsn: int) -> tuple[str, ...]:
    """Names (``schema/table``) of tables with an id above ``newer_than`` that hold pages of ``lsn`` or older.

    Reads the beginnings of all pages of those tables' files. Raises ServerError, OSError for a file that may not be
    read; a table that vanishes meanwhile is no import.
    """
    newer = [table for table in _tables(session) if table.id > newer_than]
    if not newer:
        return ()
    size = int(str(session.scalar("SELECT @@GLOBAL.innodb_page_size")))
    stamped = read_dialect(session).flavour is not Flavour.MARIADB
    return tuple(sorted(
        table.name for table in newer
        if has_old_pages(table.path, lsn=lsn, page_size=size, own=table.space if stamped else None)))


def existing_tables(session: Session, names: Collection[str]) -> tuple[str, ...]:
    """Those of ``names`` (``schema/table``) that the server knows and that have a file. Raises ServerError."""
    return tuple(sorted(table.name for table in _tables(session) if table.name in names and table.path.is_file()))


def has_old_pages(path: Path, *, lsn: int, page_size: int, own: int | None = None) -> bool:
    """Is a page of the tablespace at ``path`` written and not younger than ``lsn``? ``page_size``: the server's own,
    in bytes. ``own``: the tablespace's number, on a server whose imports give all pages a new age: old pages that bear
    both this number and an age are its own. False for a file that is not there. Raises OSError."""
    try:
        with open(open_plain(path, follow=True), "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor has no path
            first = file.read(_HEADER)
            step = _page_size(int.from_bytes(first[_FLAGS]), page_size)
            rest = False
            for header in _headers(file.fileno(), step):
                rest = True
                if _is_old(header, lsn, own):
                    return True
            # A server may write the first page of a new file long before it knows its number.
            if own is not None and int.from_bytes(first[_SPACE]) == own:
                return False  # 5.7 writes it without an age, and again long after the pages of a rebuilt table
            return rest and first != _ZEROS and _is_old(first, lsn, own)
    except FileNotFoundError:
        return False


def _is_old(header: bytes, lsn: int, own: int | None) -> bool:
    age = int.from_bytes(header[_LSN])
    return age <= lsn and not (age and own is not None and int.from_bytes(header[_SPACE]) == own)


def _headers(descriptor: int, step: int) -> Iterator[bytes]:
    """Beginnings of all pages that were written, but for the first."""
    offset = step
    while len(header := os.pread(descriptor, _HEADER, offset)) == _HEADER:
        if header != _ZEROS:
            yield header
        offset += step


def _page_size(flags: int, default: int) -> int:
    """Of ROW_FORMAT=COMPRESSED the files have smaller pages; FSP_SPACE_FLAGS tell, unless they are those of MariaDB's
    full_crc32 format (bit 4), which has no such tables."""
    compressed = 0 if flags & 0x10 else flags >> 1 & 0xF
    return 512 << compressed if compressed else default


def _lacks_file(table: _Table) -> bool:
    """Is its file gone, or somebody else's or with the sign of an export, put there to be imported?"""
    try:
        with open(open_plain(table.path, follow=True), "rb") as file:  # noqa: PTH123 - a descriptor has no path
            header = file.read(_HEADER)
    except OSError:
        return True
    if table.known:
        return False
    return int.from_bytes(header[_SPACE]) != table.space or table.path.with_suffix(_EXPORT).exists()


def _tables(session: Session) -> list[_Table]:
    """All that are not in the system tablespace."""
    dialect = read_dialect(session)
    datadir = Path(str(session.scalar("SELECT @@GLOBAL.datadir")))
    tables = session.query(f"SELECT TABLE_ID, NAME, SPACE FROM information_schema.{dialect.innodb_tables}")  # noqa: S608 - ours
    view = dialect.innodb_tables.replace("TABLES", "TABLESPACES")
    names = dict(session.query(f"SELECT SPACE, NAME FROM information_schema.{view}"))  # noqa: S608 - ours
    paths = {str(row[0]): datadir / str(row[1]) for row in session.query(dialect.tablespaces)}
    found: list[_Table] = []
    for number, name, space in tables:
        if int(space) not in _SYSTEM:
            path = paths.get(str(names.get(space, "")))
            found.append(_Table(int(number), str(name), int(space), path or _usual_path(datadir, str(name)),
                                path is not None))
    return found


def _usual_path(datadir: Path, name: str) -> Path:
    """Of a table that MariaDB has not opened since its start: it lists only what it has opened."""
    try:
        return Path(linked_tablespace(datadir / f"{name}.isl"))
    except OSError:
        return datadir / f"{name}.ibd"

"""Tables that came in as files (ALTER TABLE ... IMPORT TABLESPACE), which no increment holds wholly.

Measured with MariaDB 10.11.19: DISCARD gives the table a new id, IMPORT keeps it and writes every page with log
sequence number 0; the redo log says nothing of the pages. So an increment leaves them out as old ones, and the copy
shows the rows from before. A table that was made in any other way has pages younger than itself, or, as long as they
were not written, zeros. Hence the proof: no page of a table that is newer than a backup may be older than that backup.

Measured with MySQL 5.6.24, 5.7.13 and 9.7.4: IMPORT gives every page the log sequence number of the moment and the
number of its own tablespace, so an increment holds them all. TRUNCATE of 5.7 keeps the tablespace and gives the table
a new id, and pages that the table no longer uses stay as they were: they are older than the backup and in it. So there
an older page is no import where it bears the number of its own tablespace: numbers are never used again, so the backup
has the page of that very tablespace.

XtraBackup 2.4.20 with 5.6.24 and 5.7.13: DISCARD writes the removal of the file into the redo log and IMPORT gives the
file the same number, so the tool's prepare removes it (``ImportWatch``). IMPORT ends with a checkpoint, so a backup
that begins behind it does not have that removal in its redo log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.physical.tablefiles import space_id, stem_of, table_of
from backupd.engine.server.binary_logs import current_lsn
from backupd.engine.server.probe import linked_tablespace, read_dialect
from backupd.engine.sql.client import Session, is_denied
from backupd.model.errors import ServerError, TablesChangedError
from backupd.model.server_facts import Flavour
from backupd.process.folders import open_plain

_LSN = slice(16, 24)
_SPACE = slice(34, 38)
_FLAGS = slice(54, 58)
_EXPORT = ".cfg"
_HEADER = 64
_ZEROS = bytes(_HEADER)
_SYSTEM = frozenset({0, 0xFFFFFFFE})
"""Numbers of the system tablespace and, from MySQL 8 on, of mysql.ibd, of which no view shows the file: nothing is
imported into these."""
_REDO_HEADER, _BLOCK, _OF_BLOCK = 2048, 512, slice(12, 508)
"""Bytes of xtrabackup_logfile before its first block, of a block, and those of a block that belong to records."""
_REMOVED = (0x23, 0xA3)
"""MLOG_FILE_DELETE, also with the mark of a single record. The number of the tablespace follows, a page
number (0), and the path with its length before and a NUL behind it."""
_LONGEST = 1100
_SUFFIX = b".ibd\0"
_NAMED = re.compile(rb"\0(?=(?P<size>[\0-\4].)(?P<path>[^\0]+\.ibd\0)\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Table:
    """``path``: where its file is or should lie. ``known``: the server has opened it since its start, or lists it
    nevertheless."""

    id: int
    name: str
    space: int
    path: Path
    known: bool

    @property
    def is_temporary(self) -> bool:
        return "/#sql" in self.name


class ImportWatch:
    """Finds the tables whose tablespace was imported or discarded while an xtrabackup before 8.0 ran: what its prepare
    makes of their files is not what the server had. Make it before the tool starts. Raises ServerError."""

    def __init__(self, session: Session) -> None:
        self._datadir = Path(str(session.scalar("SELECT @@GLOBAL.datadir")))
        self._lsn = current_lsn(session) or 0
        self._page_size = int(str(session.scalar("SELECT @@GLOBAL.innodb_page_size")))
        self._without = {
            number
            for number, name in _numbered(session).items()
            if _number_in(_usual_path(self._datadir, name)) not in (0, number)
        }
        self._there: dict[int, str] = {}
        self._removals = Removals()

    def redo(self, payload: memoryview) -> None:
        """The next bytes of the redo log as the tool writes it."""
        self._removals.take(payload)

    def look(self, session: Session) -> None:
        """At the position of the backup. Raises ServerError."""
        self._there = _numbered(session)

    def refuse(self) -> None:
        """Raises TablesChangedError naming those tables."""
        found = [name for number, name in self._there.items() if "/#" not in name and self._is_touched(number, name)]
        if found:
            names = dict.fromkeys(table_of(stem_of(name)).shown for name in sorted(found))
            raise TablesChangedError(
                f"a tablespace was imported or discarded while the backup ran: {', '.join(names)}",
                detail="the redo log removes the file, so that no restore of this backup would have the table",
                hint="take the backup when no IMPORT TABLESPACE or DISCARD TABLESPACE runs",
            )

    def _is_touched(self, number: int, name: str) -> bool:
        if number not in self._without and number not in self._removals.spaces:
            return False
        path = _usual_path(self._datadir, name)
        own = _number_in(path) == number
        if number in self._without:
            return own
        # Whoever writes rows can write the bytes of such a record; but not make each page of a table younger by it.
        return not (own and has_old_pages(path, lsn=self._lsn, page_size=self._page_size))


class Removals:
    """``spaces``: numbers of the tablespaces whose removal is recorded in an xtrabackup_logfile."""

    def __init__(self) -> None:
        self.spaces: set[int] = set()
        self._header = _REDO_HEADER
        self._raw = b""
        self._records = b""

    def take(self, payload: memoryview) -> None:
        """The next bytes of the file, in pieces of any size."""
        skipped = min(self._header, len(payload))
        self._header -= skipped
        raw = self._raw + payload[skipped:]
        whole = len(raw) // _BLOCK * _BLOCK
        self._raw = raw[whole:]
        begin = max(len(self._records) - len(_SUFFIX) + 1, 0)
        records = self._records + b"".join(raw[at : at + _BLOCK][_OF_BLOCK] for at in range(0, whole, _BLOCK))
        while (begin := records.find(_SUFFIX, begin)) >= 0:
            begin += len(_SUFFIX)
            self._note(records[max(begin - _LONGEST, 0) : begin])
        self._records = records[-_LONGEST:]

    def _note(self, record: bytes) -> None:
        """``record`` ends with a path."""
        for found in _NAMED.finditer(record):
            if int.from_bytes(found["size"]) == len(found["path"]):
                for length in range(1, 6):
                    begin = found.start() - length
                    if begin > 0 and record[begin - 1] in _REMOVED and _packed_size(record[begin]) == length:
                        self.spaces.add(_unpacked(record[begin : found.start()]))


def _packed_size(first: int) -> int:
    """How many bytes a number takes that InnoDB wrote packed and that begins with ``first``."""
    return next((size for size, limit in enumerate((0x80, 0xC0, 0xE0, 0xF0), 1) if first < limit), 5)


def _unpacked(number: bytes) -> int:
    return int.from_bytes(number[1:]) if len(number) == 5 else int.from_bytes(number) & (1 << 7 * len(number)) - 1


def _numbered(session: Session) -> dict[int, str]:
    """Of all tables and partitions that are not in the system tablespace, names (``schema/table``) by the number of the
    tablespace."""
    rows = session.query(f"SELECT SPACE, NAME FROM information_schema.{read_dialect(session).innodb_tables}")  # noqa: S608 - ours
    return {int(number): str(name) for number, name in rows if int(number) not in _SYSTEM and "/" in str(name)}


def _number_in(path: Path) -> int | None:
    """The tablespace's number that the file at ``path`` bears; None where none can be read."""
    try:
        return space_id(_head(path))
    except OSError:
        return None


def _head(path: Path) -> bytes:
    """The beginning of a file's first page. Raises OSError."""
    with open(open_plain(path, follow=True), "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor has no path
        return file.read(_HEADER)


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

    def is_imported(table: _Table) -> bool:
        return has_old_pages(table.path, lsn=lsn, page_size=size, own=table.space if stamped else None)

    return tuple(sorted(table.name for table in newer if is_imported(table)))


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
    """Of ROW_FORMAT=COMPRESSED the files have smaller pages; FSP_SPACE_FLAGS tell it, unless they are those of
    MariaDB's full_crc32 format (bit 4), which has no such tables."""
    compressed = 0 if flags & 0x10 else flags >> 1 & 0xF
    return 512 << compressed if compressed else default


def _lacks_file(table: _Table) -> bool:
    """Is its file gone, or somebody else's or with the sign of an export, put there to be imported?"""
    try:
        header = _head(table.path)
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
            if path is not None and not os.access(path, os.F_OK):
                path = None  # MySQL 5.7 records the former path of a table that was renamed into another schema
            found.append(
                _Table(int(number), str(name), int(space), path or _usual_path(datadir, str(name)), path is not None)
            )
    return found


def _usual_path(datadir: Path, name: str) -> Path:
    """Of a table that MariaDB has not opened since its start: it lists only what it has opened."""
    try:
        return Path(linked_tablespace(datadir / f"{name}.isl"))
    except OSError:
        return datadir / f"{name}.ibd"

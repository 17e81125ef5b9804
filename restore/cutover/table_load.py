"""One table on its way into a staging schema: created, filled file by file, given its keys, counted.

Everything is written down in the journal as it happens, so that another process can go on wherever this one stopped.
Rows and the note of them are one transaction where the engine has such; a table of another engine is filled anew.

Files of rows are read as they are in a logical backup, cut into statements without a parser for values. Every tool
writes a newline in a value as ``\\n``, so outside of names ``;`` and a newline end a statement; names stand
in the statement's head, which is understood. Each statement must be one that puts rows into this one table, or a
setting of the session: whatever else a file holds does not reach the server.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from backupd.engine.server.definitions import read_definition
from backupd.engine.sql.client import Session, error_code, is_denied
from backupd.model.errors import BackupdError, ServerError, StreamError
from backupd.model.table import DumpedTable, Outcome, TableName, data_path, definition_path, quote_name, table_folder
from backupd.model.text import format_size
from backupd.process.folders import digest_of
from restore.cutover.staging_schema import TABLE, Entry, Journal, StagedTable, State, staged_table

_PIECE = 1024 * 1024
_LONGEST_HEAD = 8 * 1024 * 1024
_SKIPPED = re.compile(rb"(?:\s+|--[^\n]*(?:\n|\Z)|/\*(?:[^!M]|M!999999)[^*]*\*/\s*;?)+")
_NAME = rb"`(?:[^`]|``)*+`"
_HEAD = re.compile(rb"INSERT (?:IGNORE )?INTO (?P<table>%b)\s*(?:\((?:\s*%b\s*,?)*+\)\s*)?VALUES?\b" % (_NAME, _NAME))
_SETTING = re.compile(rb"(?:/\*M?!\d*\s*)?SET\s(?!.*\b(?:GLOBAL|PERSIST|PASSWORD)\b)", re.IGNORECASE | re.DOTALL)
_SEQUENCE = re.compile(rb"(?:SELECT|DO) SETVAL\((?P<table>%b)" % _NAME, re.IGNORECASE)

COMMIT_BYTES = 32 * 1024 * 1024
"""Rows in one transaction: what a kill costs, what the server may have to undo, and what a cluster takes at once."""
DEFER_BYTES = 32 * 1024 * 1024
"""From here on secondary keys are built when all rows are there: sorting once is cheaper than a million insertions
(MariaDB 10.11, 80 MB of rows with two keys: 5.7 instead of 8 to 9 s of the server's processor time while the buffer
pool holds them, 14 to 20 instead of 123 s of wall time when it does not)."""
_ATTEMPTS = 5
_TRY_AGAIN = frozenset({1205, 1213})
_STRICT = frozenset({140, 1005, 1031, 1118, 1478})
"""What a server that is strict about the options of InnoDB refuses, and another one takes with a warning."""
_FOR_ALL = frozenset({0, 1053, 1077, 1152, 1153, 1158, 1159, 1160, 1161, 1290, 1317, 1836, 1927, 2006, 2013})
"""The server is not there any more, or takes no rows of anybody: nothing that one table could help."""
_NO_SUCH_TABLE = 1146
_HARMLESS = frozenset({1287, 1681, 3674, 3719, 3778, 3950, 4079})
"""That something in a definition is out of fashion, or that an index will not be used."""
_FULL = frozenset({1021, 1114})
_NO_ROOM = ("No space left on device", "errno: 28", "Errcode: 28", "OS error 28")
_LARGEST_PACKET = 1024**3
_ROW_OF_PACKET = 64
"""Bytes that a statement is longer than its text."""


@dataclass(frozen=True, slots=True)
class Statement:
    """``is_setting``: it sets something in the session, else it puts in rows. ``text`` is valid until the next one is
    asked for. ``end``: bytes of the file up to and with this one; ``digest``: SHA-256 of all of them."""

    is_setting: bool
    text: memoryview
    end: int
    digest: str


def statements(file: BinaryIO, table: str) -> Iterator[Statement]:
    """All statements of a file of ``table``, one in memory at a time. Raises StreamError for anything unexpected."""
    reader = _Reader(file, quote_name(table).encode("utf-8", "surrogateescape"))
    while reader.begin():
        yield from reader.statement()


class _Reader:
    def __init__(self, file: BinaryIO, quoted: bytes) -> None:
        self._file, self._quoted = file, quoted
        self._buffer = bytearray()
        self._offset = 0
        self._hash = hashlib.sha256()
        self._ended = False

    def begin(self) -> bool:
        """Pass over what is between statements; False at the end of the file."""
        while True:
            while len(self._buffer) < _PIECE and not self._ended:
                self._fill()
            skipped = _SKIPPED.match(self._buffer)
            if skipped is None:
                return bool(self._buffer)
            self._consume(skipped.end())

    def statement(self) -> Iterator[Statement]:
        is_setting, searched = self._judge()
        while (found := self._buffer.find(b";\n", max(0, searched))) < 0:
            if self._ended:
                if not self._buffer.endswith(b";"):
                    raise self._wrong("ends within a statement")
                found = len(self._buffer) - 1
                break
            searched = max(searched, len(self._buffer) - 1)
            self._fill()
        with memoryview(self._buffer) as whole, whole[: found + 1] as taken, whole[:found] as text:
            self._hash.update(taken)
            yield Statement(is_setting, text, self._offset + found + 1, self._hash.hexdigest())
        self._offset += found + 1
        del self._buffer[: found + 1]

    def _judge(self) -> tuple[bool, int]:
        """Is the statement a setting, and where are its names over?"""
        while True:
            match = _HEAD.match(self._buffer) or _SEQUENCE.match(self._buffer)
            if match is not None:
                if match["table"] != self._quoted:
                    raise self._wrong("holds rows of another table")
                return False, match.end()
            end = -1 if self._buffer.startswith(b"INSERT") else self._buffer.find(b";\n")
            if end >= 0 or self._ended or len(self._buffer) > _LONGEST_HEAD:
                if _SETTING.match(self._buffer, 0, end if end >= 0 else len(self._buffer)):
                    return True, 0
                raise self._wrong("holds a statement that is no INSERT into its table")
            self._fill()

    def _fill(self) -> None:
        piece = self._file.read(_PIECE)
        self._ended = not piece
        self._buffer += piece

    def _consume(self, size: int) -> None:
        self._hash.update(memoryview(self._buffer)[:size])
        self._offset += size
        del self._buffer[:size]

    def _wrong(self, what: str) -> StreamError:
        return StreamError(
            f"a file of rows {what}, at byte {self._offset}",
            hint="restore from another copy or another backup; `backupd verify` checks all of them",
        )


class LeftOutError(Exception):
    """This table cannot be loaded; the others go on. The text says why, for people."""


@dataclass(frozen=True, slots=True)
class Means:
    """What all tables of a load share. ``settings``: statements for a session before each file. ``transactional``:
    engines, in upper case. ``moved`` receives bytes that were loaded; ``doing`` of work that moves none; ``warn`` of
    what people should know; ``stopped`` raises once somebody asked to stop."""

    journal: Journal
    earlier: Mapping[str, Entry]
    settings: tuple[str, ...]
    transactional: frozenset[str]
    max_packet: int
    moved: Callable[[int], None]
    doing: Callable[[str], None]
    warn: Callable[[str], None]
    stopped: Callable[[], None]


@dataclass(slots=True)
class RowFile:
    """``position``: bytes of it that are loaded, ``rows`` what came out of them."""

    key: str
    path: Path
    size: int
    position: int = 0
    rows: int = 0


@dataclass(slots=True, eq=False)
class TableLoad:
    """``files`` still to load; ``active``: sessions at work on it. Guarded by the one that hands out the work."""

    source: DumpedTable
    staged: TableName
    folder: Path
    means: Means
    files: deque[RowFile] = field(default_factory=deque)
    active: int = 0
    parallel: bool = False
    done: bool = False
    rows: int = 0
    failure: str = ""
    _all: list[RowFile] = field(default_factory=list)
    _definition: StagedTable = field(default_factory=lambda: StagedTable(""))
    _warned: int = 0
    _first_warning: str = ""

    @property
    def name(self) -> TableName:
        """The table's name in the backup."""
        return self.source.name

    @property
    def remaining(self) -> int:
        """Bytes of its files that are not loaded yet."""
        return sum(file.size - file.position for file in self.files)

    # -- the three acts

    def begin(self, session: Session) -> None:
        """Have the table there, ready for what ``files`` then holds. Raises LeftOutError, ServerError."""
        self._definition, digest = self._read_definition()
        self._all = self._find_files()
        self._use(session)
        if not self._goes_on(session, digest):
            self._create(session, digest)
        self.parallel = self._is_transactional(session)
        self.files.extend(file for file in self._all if file.position < file.size or not file.size)
        self.means.moved(sum(file.position for file in self._all))

    def load(self, session: Session, file: RowFile) -> None:
        """Take what is left of one file. Raises LeftOutError, ServerError, CancelledError."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._load(session, file)
            except ServerError as error:
                if error_code(error) not in _TRY_AGAIN or attempt == _ATTEMPTS or not self.parallel:
                    raise self._judged(error) from error
                session.execute("ROLLBACK")
            except StreamError as error:
                raise LeftOutError(f"{file.key}: {error.message}") from error
            else:
                return

    def finish(self, session: Session) -> None:
        """Build its keys, count its rows. Raises LeftOutError, ServerError."""
        self._use(session)
        key = table_folder(self.name)
        try:
            if self._definition.later:
                self.means.journal.set_state(session, key, State.FILLED)
                self._add_keys(session)
            counted = self._count(session)
        except ServerError as error:
            raise self._judged(error) from error
        self._compare(counted)
        self.rows = counted
        self.means.journal.set_state(session, key, State.DONE, counted)
        self.done = True
        if self._warned:
            self.means.warn(
                f"{self.name.shown}: the server warned while it took the rows, {self._warned} times in "
                f"all: {self._first_warning}"
            )

    def discard(self, session: Session) -> None:
        """Leave nothing of it. Raises ServerError."""
        session.execute("ROLLBACK")
        self._use(session)
        self._drop(session)

    # -- definition

    def _read_definition(self) -> tuple[StagedTable, str]:
        """The definition to create it by, and the digest of the one in the backup."""
        if self.source.outcome is not Outcome.DUMPED:
            raise LeftOutError(f"the backup does not hold it: {self.source.reason or self.source.outcome}")
        if self.staged.table == TABLE:
            raise LeftOutError("backupd uses this table name in staging schemas: write it as SQL files")
        try:
            raw = (self.folder / definition_path(self.name)).read_bytes()
            definition = read_definition(self.name, raw)
            fit = staged_table(definition, defer=self.source.bytes >= DEFER_BYTES)
        except FileNotFoundError as error:
            raise LeftOutError("the backup does not hold its definition") from error
        except ValueError as error:
            raise LeftOutError(str(error)) from error
        if fit.rows_elsewhere and self.source.files:
            raise LeftOutError(f"its engine {definition.engine} would write the rows to another place")
        return fit, hashlib.sha256(raw).hexdigest()

    def _find_files(self) -> list[RowFile]:
        keys = [data_path(self.name, number) for number in range(self.source.files)]
        there = {path.name for path in (self.folder / table_folder(self.name)).glob("data-*.sql")}
        if there != {Path(key).name for key in keys}:
            raise LeftOutError(f"{len(there)} files with its rows are there, the backup has {len(keys)}")
        return [RowFile(key, self.folder / key, (self.folder / key).stat().st_size) for key in keys]

    # -- what was done before

    def _goes_on(self, session: Session, digest: str) -> bool:
        """Is the table there from an earlier attempt, out of these very files?"""
        earlier = self.means.earlier.get(table_folder(self.name))
        if earlier is None or earlier.state is State.MAKING or earlier.digest != digest or not self._engine(session):
            return False
        entries = [self.means.earlier.get(file.key) for file in self._all]
        if any(entry is None or entry.size != file.size for entry, file in zip(entries, self._all, strict=True)):
            return False
        known = [entry for entry in entries if entry is not None]
        if earlier.state is State.DONE:
            if not self._is_transactional(session) and self._count(session) != earlier.rows:
                return False
            self.done, self.rows = True, earlier.rows
        elif not self._is_transactional(session) or not all(map(_is_prefix, self._all, known)):
            return False
        for file, entry in zip(self._all, known, strict=True):
            file.position, file.rows = entry.position, entry.rows
        return True

    def _create(self, session: Session, digest: str) -> None:
        journal, key = self.means.journal, table_folder(self.name)
        if key in self.means.earlier:
            self._drop(session)
        journal.write(session, Entry(key, State.MAKING, self.source.bytes, digest=digest))
        try:
            _rows, warnings = self._run_create(session)
        except ServerError as error:
            raise self._judged(error) from error
        if warnings and (words := _warning(session)):
            self.means.warn(f"{self.name.shown}: the server accepted its definition with a warning: {words}")
        session.execute("START TRANSACTION")
        journal.write(session, *(Entry(file.key, State.FILE, file.size) for file in self._all))
        journal.set_state(session, key, State.LOADING)
        session.execute("COMMIT")

    def _run_create(self, session: Session) -> tuple[int, int]:
        statement = self._definition.create.encode("utf-8", "surrogateescape")
        try:
            return session.send(statement)
        except ServerError as error:
            if error_code(error) not in _STRICT or self._definition.engine != "INNODB":
                raise
            strict = session.scalar("SELECT @@SESSION.innodb_strict_mode")
            if not strict:
                raise
            try:
                session.execute("SET SESSION innodb_strict_mode = OFF")
            except ServerError as denied:
                raise error from denied
            try:
                return session.send(statement)
            finally:
                session.execute("SET SESSION innodb_strict_mode = ON")

    def _drop(self, session: Session) -> None:
        what = "SEQUENCE" if self._definition.sequence else "TABLE"
        session.execute(f"DROP {what} IF EXISTS {self.staged}")
        folder = table_folder(self.name)
        known = {path for path in self.means.earlier if path.startswith(folder)}
        self.means.journal.forget(session, *known, folder, *(file.key for file in self._all))

    # -- rows

    def _load(self, session: Session, file: RowFile) -> None:
        reached, digest, rows, opened = file.position, "", 0, False
        self._use(session)
        try:
            with file.path.open("rb") as source:
                for statement in statements(source, self.name.table):
                    if statement.is_setting:
                        session.send(statement.text)
                    elif statement.end > file.position:
                        if not opened:
                            self._open(session, file)
                            opened = True
                        rows += self._insert(session, statement)
                        self.means.moved(statement.end - reached)
                        reached, digest = statement.end, statement.digest
                    if opened and reached - file.position >= COMMIT_BYTES:
                        self._commit(session, file, reached, rows, digest)
                        rows, opened = 0, False
            self.means.moved(file.size - reached)
            reached = file.size
            self._commit(session, file, file.size, rows, "")
        except BaseException:
            self.means.moved(file.position - reached)
            raise

    def _commit(self, session: Session, file: RowFile, position: int, rows: int, digest: str) -> None:
        """``digest`` "": the whole file, whose own is not needed any more."""
        self.means.journal.advance(session, file.key, position, rows, digest)
        session.execute("COMMIT")
        file.position, file.rows = position, file.rows + rows

    def _open(self, session: Session, file: RowFile) -> None:
        if not self.parallel:
            return  # both kinds of tables in one transaction is what servers warn of, or refuse
        session.execute("START TRANSACTION")
        position = self.means.journal.position(session, file.key)
        if position != file.position:
            raise BackupdError(
                f"another session is loading {file.key}",
                detail=f"it is loaded up to byte {position}, and was up to byte {file.position}",
                hint="wait for the other restore to end, then repeat the command",
            )

    def _insert(self, session: Session, statement: Statement) -> int:
        self.means.stopped()
        size = len(statement.text) + _ROW_OF_PACKET
        if size > self.means.max_packet:
            raise LeftOutError(_too_large(size, self.means.max_packet))
        rows, warnings = session.send(statement.text)
        if warnings:
            self._first_warning = self._first_warning or _warning(session)
            self._warned += warnings if self._first_warning else 0
        return rows

    # -- the end

    def _add_keys(self, session: Session) -> None:
        there = {
            str(row[0])
            for row in session.query(
                "SELECT DISTINCT INDEX_NAME FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = %s AND "
                "TABLE_NAME = %s",
                self.staged.schema,
                self.staged.table,
            )
        }
        missing = [clause for name, clause in self._definition.later if name not in there]
        if missing:
            self.means.doing(f"building {len(missing)} keys of {self.name.shown}")
            session.send(f"ALTER TABLE {self.staged} {', '.join(missing)}".encode("utf-8", "surrogateescape"))

    def _count(self, session: Session) -> int:
        history = " FOR SYSTEM_TIME ALL" if self._definition.versioned else ""
        return int(session.scalar(f"SELECT COUNT(*) FROM {self.staged}{history}"))  # noqa: S608  a quoted name

    def _compare(self, counted: int) -> None:
        if self._definition.sequence:
            return
        taken = sum(file.rows for file in self._all)
        if counted != taken:
            raise LeftOutError(f"{counted} rows are there, though the server accepted {taken}")
        if self.source.rows not in (None, counted):
            raise LeftOutError(f"{counted} rows were loaded, the backup has {self.source.rows}")

    # -- small questions

    def _use(self, session: Session) -> None:
        """Whatever a file has set before."""
        for setting in self.means.settings:
            session.execute(setting)
        session.execute(f"USE {quote_name(self.staged.schema)}")

    def _engine(self, session: Session) -> str:
        """As the server lists it, in upper case; empty when there is no such table."""
        found = {
            str(name): str(engine)
            for name, engine in session.query(
                "SELECT TABLE_NAME, ENGINE FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
                self.staged.schema,
                self.staged.table,
            )
        }
        return found.get(self.staged.table, found.get(self.staged.table.lower(), "")).upper()

    def _is_transactional(self, session: Session) -> bool:
        return self._engine(session) in self.means.transactional and not self._definition.sequence

    def _judged(self, error: ServerError) -> Exception:
        """What the server's refusal means: the end of everything, or of this table."""
        code = error_code(error)
        if code in _FULL or any(words in error.detail for words in _NO_ROOM):
            return ServerError(
                f"the server has no room for {self.name.shown}",
                detail=error.detail,
                hint="free space where its data and temporary files are; the same command then continues where it "
                "stopped",
            )
        if code in _FOR_ALL or is_denied(error):
            return error
        if code == _NO_SUCH_TABLE and "nextval(" in self._definition.create:
            return LeftOutError(
                f"{error.detail}; the sequence that it takes values from must exist on the server: restore the "
                "sequence first, then this table"
            )
        return LeftOutError(error.detail)


def _is_prefix(file: RowFile, entry: Entry) -> bool:
    """Is what was loaded the beginning of this file?"""
    return entry.position in (0, file.size) or digest_of(file.path, 0, entry.position) == entry.digest


def _warning(session: Session) -> str:
    """The first that says that something is not what it was."""
    for row in session.query("SHOW WARNINGS LIMIT 10"):
        level, code, text = (str(value, "utf-8", "replace") if isinstance(value, bytes) else value for value in row)
        if level != "Note" and code not in _HARMLESS:
            return f"{text} ({code})"
    return ""


def _too_large(size: int, limit: int) -> str:
    if size > _LARGEST_PACKET:
        return f"one of its rows needs a statement of {format_size(size)}, and no server accepts more than 1 GiB"
    wanted = 1 << (size - 1).bit_length()
    return (
        f"one of its rows needs a statement of {format_size(size)}, and the server accepts {format_size(limit)} at "
        f"most: SET GLOBAL max_allowed_packet = {wanted}, then repeat the command"
    )

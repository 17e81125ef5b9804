"""What errant transactions did, by the replica's own binary log, read over SQL: nothing of it need be archived.

Files are read from the newest to the oldest, each from its beginning in pieces, so that no single answer is long, and
for a bounded time: an errant transaction of yesterday is named with its statement, one of last year by its GTID alone
where the log is large, or gone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backupd.engine.binlog.statements import masked
from backupd.engine.server.binary_logs import gtids_before
from backupd.engine.server.errant import Errant, GtidState, advice, ends, errant, incomparable, read_gtids
from backupd.engine.sql.client import Connection, Session
from backupd.model.binlog import MysqlGtids, is_log_name
from backupd.model.errors import ServerError

_PIECE = 2000
"""Events in one answer."""
_MOST = 20
"""Transactions whose statements are given."""
_LINES = 8
"""Lines of one transaction."""
_LENGTH = 300
_LOOKS, _PAUSE = 4, 0.5
"""How often a source is asked again, and after how many seconds: with semi-synchronous replication a replica has a
transaction before its source has committed it."""
_GTID = re.compile(r"GTID_NEXT\s*=\s*'([^']+)'|\bGTID (\d+-\d+-\d+)")
_TABLE = re.compile(r"table_id: \d+ \((.+)\)")
_TEXTS = frozenset({"Query", "Query_compressed", "Rows_query", "Annotate_rows"})
_ROWS = {"Write": "insert into", "Update": "update", "Delete": "delete from"}
_NO_TEXT = frozenset({"BEGIN", "COMMIT"})


@dataclass(frozen=True, slots=True)
class ErrantStatements:
    """One errant transaction as the binary log has it: ``gtid``, where it begins (``file`` and ``pos``), and what it
    did in a few lines, without secrets."""

    gtid: str
    file: str
    pos: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.gtid} at {self.file}:{self.pos}: {'; '.join(self.lines) or 'empty'}"


@dataclass(frozen=True, slots=True)
class ErrantReport:
    """What a look at a replica found. ``unchecked``: why its transactions could not be compared; empty where they
    were. ``hint``: what to do about those that were found."""

    found: tuple[Errant, ...] = ()
    statements: tuple[ErrantStatements, ...] = ()
    unchecked: str = ""
    hint: str = ""

    @property
    def detail(self) -> str:
        """One line for each errant transaction that is known by its statement, or else for each origin."""
        return "\n".join([*map(str, self.found), *map(str, self.statements)])


def look_for_errant(replica: Connection, sources: Sequence[Connection]) -> ErrantReport:
    """Compare what ``replica`` has executed with what the servers that it replicates from have: the replica first, for
    the sources go on. Raises ServerError for a replica that cannot be asked; a source that cannot be leaves it
    unchecked."""
    with replica.connect() as session:
        state = read_gtids(session)
        for left in range(_LOOKS, -1, -1):
            states: list[GtidState] = []
            for source in sources:
                try:
                    with source.connect() as other:
                        states.append(read_gtids(other))
                except ServerError as error:
                    return ErrantReport(unchecked=f"its source cannot be asked: {error.line}")
            found = errant(state, states)
            if not found or not left:
                break
            time.sleep(_PAUSE)
        return report_errant(session, state, found, incomparable(state, states))


def report_errant(session: Session, state: GtidState, found: tuple[Errant, ...], unchecked: str = "") -> ErrantReport:
    """With the statements of ``found`` from the binary log of ``session``, whose server's state is ``state``. Raises
    ServerError."""
    if not found:
        return ErrantReport(unchecked=unchecked)
    statements = statements_of(session, found, mariadb=state.mariadb)
    return ErrantReport(found, statements, hint=advice(found, mariadb=state.mariadb))


def statements_of(
    session: Session, found: Sequence[Errant], *, mariadb: bool, seconds: float = 20.0
) -> tuple[ErrantStatements, ...]:
    """The errant transactions ``found`` that are in the binary log of the server of ``session``, oldest first: 20 at
    most, and what can be read within ``seconds``; nothing where the account may not read the log. Raises ServerError
    when the server is gone."""
    deadline = time.monotonic() + seconds
    wanted = tuple(found)
    known: list[ErrantStatements] = []
    for row in reversed(session.permitted("SHOW BINARY LOGS", also=(_NO_BINARY_LOG,)) or []):
        name = str(row[0])
        if not wanted or not is_log_name(name) or time.monotonic() > deadline or len(known) >= _MOST:
            break
        try:
            before = gtids_before(session, name) or ""
            here = _after(wanted, before, mariadb=mariadb)
            if here:
                known = [*_read(session, name, here, deadline, mariadb=mariadb), *known]
        except ServerError:
            session.ping()  # it is there: the file is not any more, or may not be read
            break
        wanted = _before(wanted, before, mariadb=mariadb)
    return tuple(known[-_MOST:])


_NO_BINARY_LOG = 1381


def _after(wanted: Sequence[Errant], before: str, *, mariadb: bool) -> tuple[Errant, ...]:
    """Those of which something was executed after ``before``, the state at the beginning of a file."""
    return tuple(one for one in wanted if not _is_known(one, one.last, before, mariadb=mariadb))


def _before(wanted: Sequence[Errant], before: str, *, mariadb: bool) -> tuple[Errant, ...]:
    """Those of which something may be in an older file."""
    return tuple(one for one in wanted if _is_known(one, one.first, before, mariadb=mariadb))


def _is_known(one: Errant, number: int, state: str, *, mariadb: bool) -> bool:
    if mariadb:
        domain, server = map(int, one.origin.split("-"))
        return ends(state).get((domain, server), 0) >= number
    held = MysqlGtids.parse(state).runs.get(one.origin, ())
    return any(first <= number <= last for first, last in held)


def _read(
    session: Session, name: str, wanted: Sequence[Errant], deadline: float, *, mariadb: bool
) -> Iterator[ErrantStatements]:
    at, gtid, begun = 4, "", 0
    lines: list[str] = []
    tables: dict[str, None] = {}
    while time.monotonic() < deadline:
        rows = session.query("SHOW BINLOG EVENTS IN %s FROM %s LIMIT %s", name, at, _PIECE, shown=True)
        for _file, pos, kind, _server, _end, info in rows:
            if str(kind).startswith(("Gtid", "Anonymous_Gtid")) and (match := _GTID.search(str(info))):
                if gtid:
                    yield ErrantStatements(gtid, name, begun, tuple(lines[:_LINES]))
                gtid, begun = (match[1] or match[2]), int(pos)
                gtid = gtid if _is_wanted(gtid, wanted, mariadb=mariadb) else ""
                lines, tables = [], {}
            elif gtid:
                _note(str(kind), str(info), lines, tables)
        if len(rows) < _PIECE:
            break
        at = int(rows[-1][4])
    if gtid:
        yield ErrantStatements(gtid, name, begun, tuple(lines[:_LINES]))


def _is_wanted(gtid: str, wanted: Sequence[Errant], *, mariadb: bool) -> bool:
    origin, _, number = gtid.lower().rpartition("-" if mariadb else ":")
    return number.isdecimal() and any(origin == one.origin and one.first <= int(number) <= one.last for one in wanted)


def _note(kind: str, info: str, lines: list[str], tables: dict[str, None]) -> None:
    """Add what one event says to ``lines``. Rows without the statement that made them are named by their table."""
    if len(lines) > _LINES:
        return
    if kind in _TEXTS:
        text = " ".join(masked(info.removeprefix("# ")).split())
        if text.upper() not in _NO_TEXT:
            lines.append(text if len(text) <= _LENGTH else f"{text[:_LENGTH]} ...")
    elif kind == "Table_map" and (match := _TABLE.fullmatch(info)):
        tables[match[1]] = None
    elif (verb := _ROWS.get(kind.partition("_")[0])) and tables:
        line = f"rows: {verb} {', '.join(tables)}"
        if line not in lines:
            lines.append(line)
        tables.clear()

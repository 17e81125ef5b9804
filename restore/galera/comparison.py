"""A node that came back, compared with a member of its cluster: definitions, and checksums of tables at one seqno.

Checksums alone miss an index that is there twice. Both servers are asked in snapshots of the same seqno: one is opened
on each in turn until they meet, because writers do not wait for us.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from backupd.engine.server.snapshot import digests, list_objects
from backupd.engine.sql.client import Connection, Session
from backupd.engine.sql.tables import list_tables
from backupd.engine.witness import SNAPSHOT_ENGINES, checksums
from backupd.model.document import Document
from backupd.model.table import TableName

_ROUNDS = 3
"""A table that differs is looked at so often: a transaction may be visible a moment before its seqno is."""
_MEET_SECONDS = 10.0
_DEFINITION_SECONDS = 60.0
BUDGET = 60.0
"""Seconds for checksums, the smallest tables first."""


@dataclass(frozen=True, slots=True)
class Compared(Document):
    """``tables``: how many had equal checksums; ``skipped``: how many were not compared, for lack of time or of a
    snapshot; ``differing``: tables and objects that are not the same. ``seqno``: of the last snapshot, -1 where the two
    never met at one."""

    member: str
    tables: int
    skipped: int
    differing: tuple[str, ...] = ()
    seqno: int = -1


def compare(member: str, theirs: Connection, ours: Connection, *, budget: float = BUDGET) -> Compared:
    """The node at ``ours`` with the member at ``theirs``. Raises ServerError."""
    end = time.monotonic() + budget
    with theirs.connect() as one, ours.connect() as other:
        tables = sorted(
            (table for table in list_tables(one) if not table.is_system and table.engine in SNAPSHOT_ENGINES),
            key=lambda table: (table.size, table.name),
        )
        wanted = [table.name for table in tables if not table.is_sequence]
        looked: dict[TableName, str] = {}
        seqno = -1
        for number in range(_ROUNDS):
            left = [table for table in wanted if looked.get(table, not number)]
            if not left or time.monotonic() > end or (met := _meet(one, other)) < 0:
                break
            seqno = met
            for table in left:
                if time.monotonic() > end:
                    break
                looked[table] = _difference(one, other, table)
            _close(one, other)
        differing = [words for words in looked.values() if words]
        equal = len(looked) - len(differing)
        differing += _definitions(one, other)
    return Compared(member, equal, len(wanted) - len(looked), tuple(differing), seqno)


def _difference(one: Session, other: Session, table: TableName) -> str:
    """In words; "" of a table that is the same on both."""
    theirs, ours = checksums(one, (table,)), checksums(other, (table,))
    name = str(table)
    if name in theirs.values and theirs.values[name] == ours.values.get(name):
        return ""
    return f"{table.shown}: {ours.failed.get(name) or theirs.failed.get(name) or 'other rows'}"


def _meet(one: Session, other: Session) -> int:
    """Open a snapshot on each, of one seqno; gives it, -1 where they did not meet."""
    deadline = time.monotonic() + _MEET_SECONDS
    first, second = _open(one), _open(other)
    while first != second or first < 0:
        if time.monotonic() > deadline:
            _close(one, other)
            return -1
        if first < second or first < 0:
            first = _open(one)
        else:
            second = _open(other)
    return first


def _open(session: Session) -> int:
    """Begin a snapshot; gives its seqno, -1 where that moved meanwhile."""
    before = _last_committed(session)
    session.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    session.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
    return before if _last_committed(session) == before else -1


def _close(*sessions: Session) -> None:
    for session in sessions:
        session.execute("ROLLBACK")


def _last_committed(session: Session) -> int:
    return int(session.query("SHOW GLOBAL STATUS LIKE 'wsrep_last_committed'")[0][1])


def _definitions(one: Session, other: Session) -> list[str]:
    """Objects whose definitions differ each time that both are asked."""
    found: set[str] = set()
    for number in range(_ROUNDS):
        theirs = digests(one, list_objects(one), seconds=_DEFINITION_SECONDS)
        ours = digests(other, list_objects(other), seconds=_DEFINITION_SECONDS)
        now = {
            f"{kind} {name}: another definition"
            for kind in {*theirs, *ours}
            for name in {*theirs.get(kind, {}), *ours.get(kind, {})}
            if theirs.get(kind, {}).get(name) != ours.get(kind, {}).get(name)
        }
        found = now if number == 0 else found & now
        if not found:
            break
    return sorted(found)

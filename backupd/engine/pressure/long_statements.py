"""Statements that are running now, of which a lock on all tables would wait for, with everybody else behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from backupd.engine.binlog.statements import effect, masked
from backupd.engine.sql.client import Session
from backupd.model.binlog import ChangeKind
from backupd.model.table import TableName

_NOT_STATEMENTS = frozenset(
    {
        "sleep",
        "daemon",
        "binlog dump",
        "binlog dump gtid",
        "connect",
        "delayed insert",
        "slave_io",
        "field list",
        "quit",
    }
)
_NO_TABLES = re.compile(r"\s*(?:SELECT|DO)\s+(?:SLEEP|GET_LOCK|\w*WAIT\w*)\s*\([^()]*\)\s*;?\s*", re.IGNORECASE)
_WAITS_FOR_US = re.compile(r"Waiting for (?:global read lock|backup lock|commit lock)", re.IGNORECASE)
_WAITS_FOR_DEFINITION = re.compile(r"Waiting for table metadata lock", re.IGNORECASE)
_SHOWN = 120
_STRUCTURE = frozenset({ChangeKind.CREATE, ChangeKind.ALTER, ChangeKind.DROP})
_ROWS = frozenset({ChangeKind.INSERT, ChangeKind.UPDATE, ChangeKind.DELETE})


@dataclass(frozen=True, slots=True)
class Running:
    """``statement``: its beginning, without secrets. ``seconds`` that it has been at it."""

    id: int
    user: str
    host: str
    schema: str
    seconds: int
    state: str
    statement: str

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (connection {self.id}) since {self.seconds} s: {self.statement}"


@dataclass(frozen=True, slots=True)
class Changing:
    """A statement that changes the definitions of ``tables``, or rebuilds them."""

    by: Running
    tables: tuple[TableName, ...]


def running(session: Session, seconds: float) -> tuple[Running, ...]:
    """Statements that have been running for ``seconds`` or longer, the oldest first. Those that only sleep or wait for
    a lock by name are none, nor are those that themselves wait for a lock on everything. Needs PROCESS to see those of
    other accounts. Raises ServerError."""
    return tuple(
        sorted(
            (one for one, _text in _statements(session) if one.seconds >= seconds),
            key=lambda one: (-one.seconds, one.id),
        )
    )


def changing(session: Session) -> tuple[Changing, ...]:
    """Statements that alter, create or drop tables just now, as far as their text tells. Raises ServerError."""
    found = []
    for one, text in _statements(session):
        tables = tuple(
            TableName(change.schema, change.name)
            for change in effect(text, one.schema).changes
            if change.kind in _STRUCTURE and change.name
        )
        if tables:
            found.append(Changing(one, tables))
    return tuple(found)


def waiting(session: Session) -> tuple[Changing, ...]:
    """Statements that wait just now until nobody uses a table any more whose definition (or all rows, or name) they
    change, as far as their text tells which. Raises ServerError."""
    found = []
    for one, text in _statements(session):
        if _WAITS_FOR_DEFINITION.match(one.state):
            tables = tuple(
                TableName(change.schema, change.name)
                for change in effect(text, one.schema).changes
                if change.kind not in _ROWS and change.name
            )
            if tables:
                found.append(Changing(one, tables))
    return tuple(found)


def _statements(session: Session) -> Iterator[tuple[Running, str]]:
    for row in session.records("SHOW FULL PROCESSLIST", shown=True):
        text = row["Info"]
        state = str(row["State"] or "")
        if (
            not text
            or int(row["Id"]) == session.thread_id
            or str(row["Command"]).lower() in _NOT_STATEMENTS
            or _NO_TABLES.fullmatch(str(text))
            or _WAITS_FOR_US.match(state)
        ):
            continue
        shown = " ".join(masked(str(text)).split())
        yield (
            Running(
                id=int(row["Id"]),
                user=str(row["User"]),
                host=str(row["Host"] or "").partition(":")[0],
                schema=str(row["db"] or ""),
                seconds=int(row["Time"] or 0),
                state=state,
                statement=shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ...",
            ),
            str(text),
        )

"""Sources whose logs are replayed for some tables only, onto copies that hold just these."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backupd.engine.binlog.scan import scan
from backupd.engine.server.launch import LaunchedServer
from backupd.engine.sql import tables as foreignkeys
from backupd.engine.sql.client import Connection
from backupd.model.binlog import Stop, Transaction
from backupd.model.server_facts import Position, ServerInfo
from backupd.model.table import TableName
from restore.replay.related_tables import Relatives, relatives
from restore.replay.replay import Replayed
from tests.support.oracle import Sums
from tests.support.restores.rolling import (
    Ask,
    Kind,
    Logs,
    asking,
    empty_copy,
    here,
    logs,
    place,
    roll,
    running_copy,
    with_hole,
)
from tests.support.servers.server import Server

OWN = "('mysql', 'information_schema', 'performance_schema', 'sys')"


@dataclass(frozen=True)
class Base:
    """What a backup would know: where the source was, its tables, constraints and triggers."""

    start: Position
    tables: frozenset[TableName]
    keys: tuple[foreignkeys.ForeignKey, ...]
    triggers: dict[TableName, str]


def base_of(kind: Kind, source: Server) -> Base:
    with Connection(socket=str(source.socket), user="root").connect() as session:
        keys = foreignkeys.graph(session)
    triggers: dict[TableName, str] = {}
    for schema, table, body in source.query(
        "SELECT EVENT_OBJECT_SCHEMA, EVENT_OBJECT_TABLE, ACTION_STATEMENT FROM information_schema.TRIGGERS "
        f"WHERE TRIGGER_SCHEMA NOT IN {OWN}"
    ):
        name = TableName(str(schema), str(table))
        triggers[name] = f"{triggers.get(name, '')} {body}"
    return Base(place(kind, source), tables_of(source.query), keys, triggers)


def tables_of(ask: Ask) -> frozenset[TableName]:
    return frozenset(
        TableName(str(schema), str(table))
        for schema, table in ask(
            "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES "
            "WHERE TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED') "
            f"AND TABLE_SCHEMA NOT IN {OWN}"
        )
    )


def since(base: Base, what: Logs) -> list[Transaction]:
    """The index of the logs."""
    found: list[Transaction] = []
    for path in what.files:
        begin = base.start.pos if path.name == base.start.file else 0

        def take(one: Transaction, begin: int = begin) -> None:
            if one.start >= begin:
                found.append(one)

        with path.open("rb") as stream:
            scan(stream, stop=what.stop.pos if path.name == what.stop.file else None, on_transaction=take)
    return found


def relatives_of(base: Base, what: Logs, wanted: Collection[TableName]) -> Relatives:
    return relatives(
        wanted,
        since(base, what),
        lambda name: [key.parent for key in base.keys if key.child == name and key.acts],
        triggers=base.triggers,
        known=base.tables,
    )


class SavedTables:
    """Tables as they were at the base, kept as statements."""

    def __init__(self, source: Server) -> None:
        self.base_tables: dict[TableName, list[str]] = {}
        self._schemas = [
            str(source.query(f"SHOW CREATE DATABASE `{schema}`")[0][1])
            for schema in sorted({name.schema for name in tables_of(source.query)})
        ]
        for name in sorted(tables_of(source.query)):
            self.base_tables[name] = list(_statements(source, name))
        self._triggers = {
            (TableName(str(schema), str(table)), str(trigger)): str(
                source.query(f"SHOW CREATE TRIGGER `{schema}`.`{trigger}`")[0][2]
            )
            for schema, table, trigger in source.query(
                "SELECT EVENT_OBJECT_SCHEMA, EVENT_OBJECT_TABLE, TRIGGER_NAME FROM information_schema.TRIGGERS "
                f"WHERE TRIGGER_SCHEMA NOT IN {OWN}"
            )
        }

    def put(self, server: LaunchedServer, tables: Collection[TableName]) -> None:
        """Those of ``tables`` that there were, and nothing else; constraints to others are left out."""
        with server.connection.connect() as session:
            session.execute("SET SESSION foreign_key_checks = 0")
            for statement in self._schemas:
                session.execute(statement)
            for name in tables:
                if name in self.base_tables:
                    session.execute(f"USE `{name.schema}`")
                    for statement in self.base_tables[name]:
                        session.execute(_without_parents(statement, name.schema, tables))
            for (table, _name), statement in self._triggers.items():
                if table in tables:
                    session.execute(f"USE `{table.schema}`")
                    session.execute(statement)


def _statements(source: Server, name: TableName) -> Iterator[str]:
    yield str(source.query(f"SHOW CREATE TABLE {name}")[0][1])
    rows = source.query(f"SELECT * FROM {name}")
    if rows:
        values = ", ".join("(" + ", ".join(_literal(value) for value in row) + ")" for row in rows)
        yield f"INSERT INTO {name} VALUES {values}"


def _literal(value: Any) -> str:
    return "NULL" if value is None else str(value) if isinstance(value, int) else f"'{value}'"


def _without_parents(statement: str, schema: str, tables: Collection[TableName]) -> str:
    def kept(match: re.Match[str]) -> str:
        return match[0] if TableName(match[1] or schema, match[2]) in tables else ""

    return re.sub(
        r",\n  CONSTRAINT `[^`]+` FOREIGN KEY \([^)]*\) REFERENCES (?:`([^`]+)`\.)?`([^`]+)`[^,\n]*", kept, statement
    )


def checksums(ask: Ask, tables: Collection[TableName]) -> dict[TableName, Any]:
    """Content and definition of those that are there."""
    there = tables_of(ask)
    return Sums(
        {
            name: (
                ask(f"CHECKSUM TABLE {name}")[0][1],
                re.sub(r" AUTO_INCREMENT=\d+", "", str(ask(f"SHOW CREATE TABLE {name}")[0][1])),
            )
            for name in sorted(tables)
            if name in there
        }
    )


@contextlib.contextmanager
def narrowed_copy(
    kind: Kind, source: Server, saved: SavedTables, tables: Collection[TableName], folder: Path
) -> Iterator[tuple[LaunchedServer, ServerInfo]]:
    """A private server with ``tables`` of those that were saved."""
    with running_copy(kind, source, empty_copy(kind, folder / "c")) as (server, info):
        saved.put(server, tables)
        yield server, info


def replayed(
    kind: Kind,
    source: Server,
    base: Base,
    saved: SavedTables,
    wanted: Sequence[TableName],
    folder: Path,
    stop: Stop | None = None,
) -> tuple[Relatives, Replayed, dict[TableName, Any]]:
    """The tables rolled forward to ``stop``, or where the source is now: what had to come along, how it went, what
    came out. What the first log holds before the base was not fetched."""
    what = with_hole(logs(source, folder / "whole", base.start, stop or here(kind, source)), folder / "logs")
    needed = relatives_of(base, what, wanted)
    with narrowed_copy(kind, source, saved, needed.tables, folder) as (server, info):
        got = roll(server, info, what, tables=needed.tables)
        with asking(server) as ask:
            return needed, got, checksums(ask, wanted)

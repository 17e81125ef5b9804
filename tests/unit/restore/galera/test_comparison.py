"""A comparison says what it compared: no table counts as equal that was not looked at, and a difference that was seen
is not forgotten."""

from __future__ import annotations

import contextlib
from typing import cast

import pytest

from backupd.engine.sql.client import Connection, Session
from backupd.engine.sql.tables import Table
from backupd.engine.witness import Checksums
from backupd.model.table import TableName
from restore.galera import comparison
from restore.galera.comparison import Compared

TABLES = [Table(TableName("shop", name), "BASE TABLE", "InnoDB", size, "") for size, name in enumerate("abc")]


class Sides:
    """Two servers. ``ours``: the checksums of one; the other has 1 everywhere. ``seqno``: where they meet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, seqno: int = 7, clock: float = 0.0, **ours: int) -> None:
        self.asked: list[str] = []
        self.clock, self.cost = 0.0, clock

        def sums(session: Session, tables: tuple[TableName]) -> Checksums:
            (table,) = tables
            self.clock += self.cost
            self.asked.append(table.table)
            return Checksums({str(table): 1 if cast("str", session) == "theirs" else ours.get(table.table, 1)})

        for name, fake in {
            "list_tables": lambda _session: TABLES,
            "checksums": sums,
            "_meet": lambda _one, _other: seqno,
            "_close": lambda *_sessions: None,
            "_definitions": lambda _one, _other: [],
        }.items():
            monkeypatch.setattr(comparison, name, fake)
        monkeypatch.setattr("restore.galera.comparison.time.monotonic", lambda: self.clock)

    def compare(self) -> Compared:
        def at(name: str) -> Connection:
            class Made:
                def connect(self) -> contextlib.nullcontext[str]:
                    return contextlib.nullcontext(name)

            return cast("Connection", Made())

        return comparison.compare("node2", at("theirs"), at("ours"), budget=10.0)


def test_servers_that_never_meet_at_one_seqno_have_no_equal_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Sides(monkeypatch, seqno=-1).compare()
    assert (found.tables, found.skipped, found.seqno) == (0, 3, -1)


def test_a_difference_is_not_forgotten_when_there_is_no_time_for_another_look(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(monkeypatch, clock=2.0, a=9)
    found = sides.compare()
    assert found.differing == ("shop.a: other rows",)
    assert (found.tables, found.skipped) == (2, 0)
    assert sides.asked == ["a", "a", "b", "b", "c", "c"]


def test_a_table_that_differs_is_looked_at_again_and_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Sides(monkeypatch, b=9)
    found = sides.compare()
    assert found == Compared("node2", 2, 0, ("shop.b: other rows",), 7)
    assert sides.asked.count("b") == 6
    assert sides.asked.count("a") == 2


def test_tables_without_a_turn_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Sides(monkeypatch, clock=6.0).compare()
    assert (found.tables, found.skipped) == (1, 2)

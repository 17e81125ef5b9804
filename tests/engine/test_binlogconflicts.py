"""Which transactions can be left out of a replay, on real logs."""

from __future__ import annotations

import io

import pytest

from backupd.engine.binlogconflicts import Conflict, Conflicts
from backupd.model.binlog import Transaction
from tests.support.binlogs import FLAVOURS, Logs, all_of, real_logs, why_not

# The transactions of the chapter "conflicts", in order.
CREATE_C, CREATE_D, FILL_C, FILL_D, BAD, FINE, REMOVE, PUT_BACK, BUILT, ALTER_D, AFTER, MINIMAL, USER = range(13)


@pytest.fixture(scope="module", params=FLAVOURS)
def logs(request: pytest.FixtureRequest) -> Logs:
    if why := why_not(request.param):
        pytest.skip(why)
    return real_logs(request.param)


def told(logs: Logs, chapter: str, *excluded: int, **options: int) -> tuple[list[Transaction], list[Conflict]]:
    path = logs.files[chapter].path
    _, transactions = all_of(path)
    conflicts = Conflicts({transactions[number].gtid for number in excluded}, **options)
    with path.open("rb") as stream:
        found = list(conflicts.look(stream))
    assert not conflicts.missing
    return transactions, found


def pairs(logs: Logs, *excluded: int) -> list[tuple[int, int, str]]:
    transactions, found = told(logs, "conflicts", *excluded)
    numbers = {one.gtid: number for number, one in enumerate(transactions)}
    return [(numbers[one.gtid], numbers[one.excluded], one.table) for one in found]


def test_a_row_that_was_changed_again_is_a_conflict(logs: Logs) -> None:
    # MINIMAL changes another row of the table, which its image of one column does not show.
    assert pairs(logs, BAD) == [(BUILT, BAD, "shop.c"), (MINIMAL, BAD, "shop.c")]


def test_leaving_out_both_is_none(logs: Logs) -> None:
    assert pairs(logs, BAD, BUILT, MINIMAL) == []


def test_rows_that_nobody_changed_again_are_none(logs: Logs) -> None:
    assert pairs(logs, FINE) == [(MINIMAL, FINE, "shop.c")]
    assert pairs(logs, MINIMAL) == []
    assert pairs(logs, USER) == []


def test_a_row_that_was_deleted_and_put_back_is_left_to_the_server(logs: Logs) -> None:
    assert pairs(logs, REMOVE) == [(ALTER_D, REMOVE, "shop.d")]


def test_a_definition_conflicts_with_all_that_touches_its_table(logs: Logs) -> None:
    assert pairs(logs, ALTER_D) == [(AFTER, ALTER_D, "shop.d")]
    assert [later for later, _, _ in pairs(logs, CREATE_D)] == [FILL_D, REMOVE, PUT_BACK, ALTER_D, AFTER]


def test_too_many_rows_to_remember_are_a_conflict_with_every_change_of_that_table(logs: Logs) -> None:
    transactions, found = told(logs, "conflicts", BAD, images_at_most=0)
    assert [one.gtid for one in found] == [transactions[number].gtid for number in (FINE, BUILT, MINIMAL)]


def test_parts_of_xa_transactions_are_left_out_together(logs: Logs) -> None:
    transactions, found = told(logs, "two_phases", 0)
    assert transactions[1].gtid in {one.gtid for one in found}
    _, found = told(logs, "two_phases", 1)
    assert [one.gtid for one in found] == [transactions[1].gtid]
    assert "stays prepared" in found[0].why


def test_statements_about_the_same_table_conflict(logs: Logs) -> None:
    path = logs.files["statements"].path
    _, transactions = all_of(path)
    number, changed = next((number, one) for number, one in enumerate(transactions)
                           if one.statement.startswith("INSERT INTO s (t) VALUES ('statement')"))
    _, found = told(logs, "statements", number)
    assert found
    assert {one.table for one in found} == {"shop.s"}
    assert {one.excluded for one in found} == {changed.gtid}


def test_dropping_a_schema_touches_its_tables(logs: Logs) -> None:
    _, transactions = all_of(logs.files["rows"].path)
    _, found = told(logs, "rows", 0)
    assert transactions[0].statement == "CREATE DATABASE shop"
    assert len(found) == len(transactions) - 1


def test_only_the_replayed_part_counts(logs: Logs) -> None:
    path = logs.files["conflicts"].path
    _, transactions = all_of(path)
    conflicts = Conflicts({transactions[BAD].gtid, "nosuch"})
    data = path.read_bytes()

    assert conflicts.look(io.BytesIO(data), since=transactions[FINE].start) == ()
    assert conflicts.missing == tuple(sorted((transactions[BAD].gtid, "nosuch")))
    assert conflicts.look(io.BytesIO(data), stop=transactions[BUILT].start) == ()
    assert conflicts.missing == ("nosuch",)
    assert [one.gtid for one in conflicts.look(io.BytesIO(data), since=transactions[FINE].start)] == [
        transactions[BUILT].gtid, transactions[MINIMAL].gtid]

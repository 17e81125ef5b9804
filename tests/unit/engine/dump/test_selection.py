"""Which tables a policy's patterns take; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backupd.engine.dump.selection import Selection, select
from backupd.engine.sql.tables import Table
from backupd.model.table import TableName, TablePattern


def table(schema: str, name: str, size: int = 100, engine: str = "InnoDB") -> Table:
    return Table(TableName(schema, name), "BASE TABLE", engine, size, "")


TABLES = [
    table("shop", "orders", 5000),
    table("shop", "audit_1"),
    table("shop", "audit_2"),
    table("shop", "Orders"),
    table("crm", "people"),
    table("mysql", "user"),
    table("sys", "sys_config"),
    table("MySQL", "odd"),
]


def selected(include: Sequence[str], exclude: Sequence[str] = (), **more: Any) -> Selection:
    return select(
        more.pop("tables", TABLES),
        list(map(TablePattern.parse, include)),
        list(map(TablePattern.parse, exclude)),
        **more,
    )


def names(selection: Selection) -> list[str]:
    return [one.name.shown for one in selection.taken]


def test_what_is_included_and_not_excluded_is_taken_in_order_and_never_system_tables() -> None:
    assert names(selected(["*.*"])) == ["crm.people", "shop.Orders", "shop.audit_1", "shop.audit_2", "shop.orders"]
    assert names(selected(["shop.*", "crm.people"], ["shop.audit_*"])) == ["crm.people", "shop.Orders", "shop.orders"]
    assert names(selected(["mysql.*"])) == []


def test_upper_and_lower_case_are_different_tables() -> None:
    assert names(selected(["shop.orders"])) == ["shop.orders"]
    assert names(selected(["shop.o*"])) == ["shop.orders"]


def test_a_table_above_the_size_is_reported_as_left_out_with_both_sizes() -> None:
    found = selected(["shop.*"], max_size=4096)
    assert "shop.orders" not in names(found)
    assert found.skipped == ((TableName("shop", "orders"), "larger than max_size: about 4.9 KiB, 4.0 KiB allowed"),)
    assert found.size == 300


def test_no_size_keeps_out_what_no_other_backup_covers() -> None:
    rocks = [*TABLES, table("shop", "rocks", 10**9, "ROCKSDB")]
    assert "shop.rocks" not in names(selected(["shop.*"], tables=rocks, max_size=4096))
    assert "shop.rocks" in names(selected(["shop.*"], tables=rocks, max_size=4096, always={"ROCKSDB"}))
    assert "shop.rocks" not in names(selected(["crm.*"], tables=rocks, always={"ROCKSDB"}))


def test_what_no_other_backup_covers_is_taken_unasked_where_it_may_be_unless_a_pattern_leaves_it_out() -> None:
    rocks = [*TABLES, table("shop", "rocks", 10**9, "ROCKSDB"), table("mysql", "rocks", 1, "ROCKSDB")]
    unasked: dict[str, Any] = {"tables": rocks, "max_size": 4096, "always": {"ROCKSDB"}, "unasked": True}
    assert names(selected(["crm.*"], **unasked)) == ["crm.people", "shop.rocks"]
    assert names(selected(["crm.*"], ["shop.r*"], **unasked)) == ["crm.people"]


def test_patterns_that_fit_nothing_are_told_and_the_one_for_everything_is_not() -> None:
    assert selected(["shop.*", "shop.oders"], ["crm.log_*"]).warnings == (
        "no table matches shop.oders of the tables to include",
        "no table matches crm.log_* of the tables to exclude",
    )
    assert selected(["*.*"], tables=[]).warnings == ()


def test_a_leftover_of_an_alter_table_is_left_out_and_told_unless_it_is_asked_for_by_name() -> None:
    left = TableName("shop", "#mysql50##sql-1f_8")
    tables = [*TABLES, Table(left, "BASE TABLE", "InnoDB", 1, ""), table("shop", "#sql-like")]
    found = selected(["shop.*"], tables=tables)
    assert left not in [one.name for one in found.taken]
    assert TableName("shop", "#sql-like") in [one.name for one in found.taken]
    assert found.warnings == (f"left out as temporary tables of a running or interrupted ALTER TABLE: {left}",)
    asked = selected([str(left)], tables=tables)
    assert [one.name for one in asked.taken] == [left]


def test_tables_without_rows_of_their_own_are_taken_with_their_definition_alone() -> None:
    found = selected(
        ["shop.*"],
        tables=[
            table("shop", "all", engine="MRG_MyISAM"),
            table("shop", "hole", engine="BLACKHOLE"),
            table("shop", "t"),
        ],
    )
    assert names(found) == ["shop.all", "shop.hole", "shop.t"]
    assert found.bare == {
        TableName("shop", "all"): "its engine, MRG_MyISAM, shows the rows of other tables",
        TableName("shop", "hole"): "its engine, BLACKHOLE, keeps no rows",
    }


def test_a_table_that_the_server_cannot_open_is_taken_so_that_it_is_named() -> None:
    assert names(selected(["shop.*"], tables=[table("shop", "torn", 0, "")], max_size=1)) == ["shop.torn"]

from __future__ import annotations

import pytest

from backupd.model.errors import RefusedError, UsageError
from backupd.model.table import TableName
from restore.planning.table_plan import Renaming, goals

ORDERS, ITEMS = TableName("shop", "orders"), TableName("shop", "items")


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("orders_restored", TableName("shop", "orders_restored")),
        ("other.orders", TableName("other", "orders")),
        ("*_restored", TableName("shop", "orders_restored")),
        ("other.*", TableName("other", "orders")),
        ("other.old_*_x", TableName("other", "old_orders_x")),
        ("`my.shop`.`or``der`", TableName("my.shop", "or`der")),
    ],
)
def test_what_a_name_means(text: str, becomes: TableName) -> None:
    assert goals([ORDERS], Renaming.parse(text))[0].target == becomes


def test_without_a_name_every_table_keeps_its_own() -> None:
    assert [goal.target for goal in goals([ORDERS, ITEMS], None)] == [ORDERS, ITEMS]


@pytest.mark.parametrize("text", ["", ".", "shop.", ".orders", "a.b.c", "*.orders", "**", "a*b*", "`shop`", "`a`.b"])
def test_a_name_that_is_none_is_refused_with_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        Renaming.parse(text)
    assert "SCHEMA.TABLE" in refused.value.hint


def test_two_tables_never_become_one() -> None:
    with pytest.raises(RefusedError) as refused:
        goals([ORDERS, ITEMS], Renaming.parse("restored"))
    assert "shop.items" in refused.value.detail
    assert "*" in refused.value.hint


@pytest.mark.parametrize("name", ["x" * 65, "ends with ", "nul\0"])
def test_a_name_that_no_server_takes_is_refused(name: str) -> None:
    with pytest.raises(RefusedError):
        goals([ORDERS], Renaming("", name))

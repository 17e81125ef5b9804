"""Names for tables that were renamed aside."""

from __future__ import annotations

import pytest

from backupd.model.errors import UsageError
from backupd.model.table import TableName
from restore.cutover.plan import beside


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("orders", "orders__before_7"),
        ("x" * 64, "x" * 46 + "__before_7"),
        ("ж" * 60, "ж" * 44 + "__before_7"),
        ("we`ird.", "we`ird.__before_7"),
    ],
)
def test_a_suffix_is_appended_and_a_long_name_shortened(table: str, expected: str) -> None:
    assert beside(TableName("shop", table), "__before_7", lambda _: False) == TableName("shop", expected)


def test_a_taken_name_gets_a_number() -> None:
    taken = {"orders__before_7", "orders__before_7_2"}
    found = beside(TableName("shop", "orders"), "__before_7", lambda name: name.table in taken)
    assert found.table == "orders__before_7_3"


@pytest.mark.parametrize("suffix", ["", "`; DROP", "x" * 41, "é", "___ "])
def test_a_suffix_that_may_not_stand_in_a_name_is_refused(suffix: str) -> None:
    with pytest.raises(UsageError):
        beside(TableName("shop", "orders"), suffix, lambda _: False)

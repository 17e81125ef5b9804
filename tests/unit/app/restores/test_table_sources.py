from __future__ import annotations

import pytest

from backupd.app.restores.request import TableOptions
from backupd.model.table import TableName
from restore.planning.table_plan import goals

TABLES = [TableName(*name.split(".")) for name in ("shop.orders", "shop.lines", "archive.pages", "mysql.user")]


@pytest.mark.parametrize(
    ("patterns", "rename", "whole"),
    [
        (["shop.*"], None, ("shop",)),
        (["*.*"], None, ("archive", "shop")),
        (["sho?.*", "archive.*"], None, ("archive", "shop")),
        (["shop.orders"], None, ()),
        (["shop.ord*", "shop.l*"], None, ()),
        (["`shop`.`*`"], None, ()),
        (["shop.*"], "*_old", ("shop",)),
        (["shop.*"], "shop.*", ("shop",)),
        (["shop.*"], "other.*", ()),
    ],
)
def test_a_schema_is_taken_whole_when_all_of_its_tables_are_and_keep_its_name(
    patterns: list[str], rename: str | None, whole: tuple[str, ...]
) -> None:
    options = TableOptions.of(patterns, rename)
    fitting = [name for name in TABLES if any(pattern.fits(name) for pattern in options.tables)]
    assert options.whole_schemas(goals(fitting, options.renaming)) == whole

"""Names of tables and the files that a logical backup keeps them in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backupd.model.server_facts import Position
from backupd.model.table import (
    DumpedTable,
    DumpFacts,
    Outcome,
    TableName,
    TablePattern,
    data_path,
    decode_name,
    definition_path,
    encode_name,
    fits_any,
    quote_name,
    schema_folder,
    triggers_path,
)

NAMES = st.text(min_size=1, max_size=64)


@given(NAMES)
def test_every_name_comes_back_from_its_file_name(name: str) -> None:
    assert decode_name(encode_name(name)) == name


@given(NAMES, NAMES, NAMES, NAMES)
def test_different_tables_have_different_files_inside_of_their_folder(
    one: str, two: str, three: str, four: str
) -> None:
    names = {TableName(one, two), TableName(three, four), TableName(two, one)}
    paths = {path(name) for name in names for path in (definition_path, triggers_path)}
    assert len(paths) == 2 * len(names)
    for path in paths:
        assert path.count("/") == 3
        assert ".." not in path.split("/")
        assert path.isprintable()


def test_the_layout_is_the_one_that_is_told() -> None:
    odd = TableName("my.shop", "or/der ü")
    assert data_path(odd, 3) == "tables/my%2Eshop/or%2Fder%20ü/data-00003.sql"
    assert schema_folder("..") == "schemas/%2E%2E/"
    assert all(len(encode_name(char * 64).encode()) <= 255 for char in "a ./%ü漢")


def test_what_became_of_tables_survives_json() -> None:
    facts = DumpFacts(
        (
            DumpedTable(
                TableName("a", "b"),
                Outcome.DUMPED,
                "InnoDB",
                3,
                10,
                1,
                "mydumper",
                note="x",
                position=Position("binlog.000001", 4, "0-1-1"),
            ),
            DumpedTable(TableName("a", "c"), Outcome.FAILED, reason="it is marked as crashed"),
        ),
        ("a",),
        "small",
        0.25,
        {"sql_mode": ""},
    )
    assert DumpFacts.from_json(facts.as_json()) == facts
    assert [one.name.table for one in facts.failed] == ["c"]


@pytest.mark.parametrize(
    ("pattern", "fits", "not_fits"),
    [
        ("shop.orders", [("shop", "orders")], [("shop", "Orders"), ("shop", "orders2"), ("xshop", "orders")]),
        ("shop.*", [("shop", "orders"), ("shop", "a.b")], [("shop2", "orders")]),
        ("*.log_?", [("a", "log_1")], [("a", "log_10")]),
        ("shop.[a]", [("shop", "[a]")], [("shop", "a")]),
        ("`my.shop`.`a*`", [("my.shop", "a*")], [("my.shop", "ab")]),
        ("`my.shop`.*", [("my.shop", "a*"), ("my.shop", "b.c")], [("my_shop", "a"), ("my", "shop.a")]),
        ("`a*`.b?", [("a*", "b1")], [("ax", "b1"), ("a*", "b")]),
        ("shop*.`or.der`", [("shop2", "or.der")], [("shop2", "or_der")]),
    ],
)
def test_patterns_fit_what_they_say(pattern: str, fits: list[tuple[str, str]], not_fits: list[tuple[str, str]]) -> None:
    parsed = TablePattern.parse(pattern)
    assert all(parsed.fits(TableName(*name)) for name in fits)
    assert not any(parsed.fits(TableName(*name)) for name in not_fits)


@pytest.mark.parametrize("text", ["", "orders", "shop.", ".orders", "a.b.c", "`a`", "`a.b", "a`.b", "`a`b.c", " .x"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"schema\.table"):
        TablePattern.parse(text)


def test_a_whole_schema_may_be_quoted() -> None:
    pattern = TablePattern.parse("`my.shop`.*")
    assert pattern.takes_all_of("my.shop")
    assert not pattern.takes_all_of("my_shop")
    assert pattern.reaches("my.shop")
    assert (pattern.schema, pattern.table) == ("my.shop", None)
    assert not TablePattern.parse("`my.shop`.`*`").takes_all_of("my.shop")


@given(NAMES, NAMES)
def test_a_table_is_shown_so_that_a_pattern_means_just_it(schema: str, table: str) -> None:
    name = TableName(schema, table)
    assert TablePattern.parse(name.shown).table == name
    assert fits_any(name, [TablePattern.parse(name.shown)])
    assert TableName.parse(str(name)) == name
    assert str(name) == quote_name(schema, table)

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.oracle import (
    DataDiffersError,
    Rows,
    Sums,
    Total,
    differences,
    judged,
    not_proved,
    nothing_lost,
    reads_rows,
    same,
    stored,
    unaltered,
)
from tests.support.servers.server import Server


def test_an_assert_over_data_says_that_data_differs() -> None:
    sums, other = Sums({"`a`.`b`": 1, "`a`.`c`": 2}), {"`a`.`b`": 1, "`a`.`c`": 3}
    with pytest.raises(DataDiffersError, match=r"'`a`.`c`'\]: found 2, expected 3"):
        assert sums == other
    with pytest.raises(DataDiffersError, match="found 3, expected 2"):
        assert other == sums
    with pytest.raises(DataDiffersError):
        assert ({"view": "x"}, sums) == ({"view": "x"}, other)
    with pytest.raises(DataDiffersError):
        assert Total(3) == 4, "the sum of the bank"
    with pytest.raises(DataDiffersError, match="found \\[\\(1,\\)\\], expected \\[\\(1,\\), \\(2,\\)\\]"):
        assert Rows([(1,)]) == [(1,), (2,)]
    with pytest.raises(DataDiffersError):
        assert sums in [other, {}]
    assert sums != other


def test_an_assert_over_anything_else_is_an_ordinary_failure() -> None:
    for left, right in ((1, 2), ({"a": 1}, {"a": 2}), ([1], [2])):
        with pytest.raises(AssertionError) as error:
            assert left == right
        assert error.type is AssertionError
    with pytest.raises(AssertionError) as error:
        assert Total(3) != 3
    assert error.type is AssertionError


def test_a_test_restore_that_proves_what_it_must_not_is_a_matter_of_data_and_one_that_fails_is_none() -> None:
    proof = json.loads('{"outcome": "proved"}', object_hook=judged)
    with pytest.raises(DataDiffersError):
        assert proof["outcome"] == "failed"
    with pytest.raises(DataDiffersError, match="although a table is missing"):
        not_proved(proof, "a table is missing")
    failed = json.loads('{"outcome": "failed"}', object_hook=judged)
    not_proved(failed, "a table is missing")
    with pytest.raises(AssertionError) as error:
        assert failed["outcome"] == "proved"
    assert error.type is AssertionError


def test_what_is_compared_by_name(tmp_path: Path) -> None:
    same({"a": 1}, {"a": 1})
    with pytest.raises(DataDiffersError, match="data differs: the shop"):
        same(b"1", b"2", "the shop")
    nothing_lost([3, 2, 1], [1, 2])
    with pytest.raises(DataDiffersError, match="lost: 4"):
        nothing_lost([3, 2, 1], [1, 4])
    (tmp_path / "objects").mkdir()
    for name in ("one", "two"):
        (tmp_path / "objects" / name).write_text(name)
    before = stored(tmp_path)
    assert stored(tmp_path, besides={"objects"}) == {}
    (tmp_path / "objects" / "new").write_text("new")
    unaltered(tmp_path, before)
    (tmp_path / "objects" / "one").unlink()
    unaltered(tmp_path, before, gone={"objects/one"})
    with pytest.raises(DataDiffersError, match="objects/one: gone"):
        unaltered(tmp_path, before)
    (tmp_path / "objects" / "one").write_text("One")
    with pytest.raises(DataDiffersError, match="objects/one: altered"):
        unaltered(tmp_path, before, gone={"objects/one"})


def test_differences_name_what_is_missing_and_what_is_too_much() -> None:
    assert differences({"a": 1}, {"b": 1}) == ["  ['a'] is too much", "  ['b'] is missing"]
    assert len(differences({str(number): 1 for number in range(100)}, {})) == 41


def test_rows_of_a_users_tables_are_data_and_those_of_the_servers_own_are_not(shared_server: Server) -> None:
    assert reads_rows("select count(*) from `shop`.orders")
    assert reads_rows("CHECKSUM TABLE shop.orders")
    assert not reads_rows("SELECT user FROM mysql.user")
    assert not reads_rows("SELECT COUNT(*) FROM information_schema.TABLES")
    assert not reads_rows("SELECT @@server_id")
    assert not reads_rows("SHOW TABLES FROM shop")
    assert type(shared_server.scalar("SELECT COUNT(*) FROM shop.orders")) is Total
    assert type(shared_server.query("SELECT id FROM shop.orders LIMIT 1")) is Rows
    assert type(shared_server.scalar("SELECT @@server_id")) is int

from __future__ import annotations

from typing import Any

import pytest

from backupd.cli.commands.tables import difference_text
from backupd.cli.main import main
from tests.support.service.fake import FakeService

TO = ["restore", "shop-db1", "--to", "latest"]
SOME = ["--tables", "shop.orders"]


@pytest.mark.parametrize(
    "arguments",
    [
        [*TO],
        [*TO, "--into", "shop-db1"],
        [*TO, "--datadir", "/x", "--as", "other"],
        [*TO, "--datadir", "/x", "--compare"],
        [*TO, *SOME],
        [*TO, *SOME, "--into", "shop-db1", "--sql", "/x"],
        [*TO, *SOME, "--into", "shop-db1", "--datadir", "/x"],
        [*TO, *SOME, "--into", "shop-db1", "--start"],
        [*TO, *SOME, "--into", "shop-db1", "--mode", "replica"],
        [*TO, *SOME, "--into", "shop-db1", "--replay-with", "pipe"],
        [*TO, *SOME, "--into", "shop-db1", "--triggers", "some"],
        [*TO, *SOME, "--sql", "/x", "--confirm", "shop-db1"],
        [*TO, *SOME, "--sql", "/x", "--keys", "50"],
        [*TO, *SOME, "--into", "shop-db1", "--keys", "1001"],
        ["plan", "shop-db1", "--to", "latest", "--as", "other"],
        ["plan", "shop-db1", "--to", "latest", *SOME, "--datadir", "/x"],
        ["backup", "shop-db1", "--kind", "full", "--set", "small"],
    ],
)
def test_options_that_do_not_belong_together_are_wrong_usage(
    service: FakeService, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "--" in capsys.readouterr().err
    assert service.calls == []


def found(**changes: Any) -> dict[str, Any]:
    return {
        "live": "shop.orders",
        "comparable": True,
        "why_not": None,
        "restored_rows": 100,
        "live_rows": 40,
        "missing": 61,
        "added": 1,
        "changed": 0,
        "key": ["id", "line"],
        "samples": {"missing": [["7", "1"]], "added": [["9", "2"]], "changed": []},
        "columns_differ": ["note is compared no more: the live table has none"],
        "definition_differs": [],
        "remarks": [],
        "same": False,
        **changes,
    }


def test_a_difference_is_told_with_numbers_and_keys() -> None:
    text = difference_text(found())
    assert "61 are missing" in text
    assert "missing, by id/line: 7/1, ..." in text
    assert "added, by id/line: 9/2" in text
    assert "changed, by" not in text
    many = found(missing=40, samples={"missing": [[str(number)] for number in range(40)], "added": [], "changed": []})
    assert "8, 9, ...\n" in difference_text(many)
    assert "37, 38, ...\n" in difference_text(many, 39)
    assert "38, 39\n" in difference_text(many, 1000)
    assert "note is compared no more" in text


def test_equal_tables_and_those_that_cannot_be_compared_are_told_apart() -> None:
    equal = {"missing": 0, "added": 0, "columns_differ": []}
    assert "equal" in difference_text(found(**equal, same=True))
    nothing: dict[str, list[str]] = {"missing": [], "added": [], "changed": []}
    other = difference_text(
        found(
            **equal, samples=nothing, remarks=["as text"], definition_differs=["the live table has, ...: KEY `k` (`k`)"]
        )
    )
    assert "the same 40 rows as the restored one, another definition\n  as text\n  the live table has" in other
    assert "equal" not in other
    assert "no common column" in difference_text(found(comparable=False, why_not="no common column"))

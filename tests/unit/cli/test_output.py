"""What people see of names that somebody chose to be hostile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from backupd.app.binlogs.search import Found
from backupd.cli.commands.binlog import _show_found
from backupd.cli.output import Screen, visible
from backupd.cli.render import show_plan_warnings
from backupd.model.binlog import Change, ChangeKind, Ending, Segment, Transaction
from backupd.model.errors import BackupdError

HOSTILE = "a\x1b[31mRED\x07\x9b2J\u202eevil\u2066\x7f"
WRITTEN_OUT = "a\\x1b[31mRED\\x07\\x9b2J\\u202eevil\\u2066\\x7f"
SAID: dict[str, Callable[[Screen], None]] = {
    "a line": lambda screen: screen.line(HOSTILE),
    "a table": lambda screen: screen.table(("NAME",), [(HOSTILE,)]),
    "facts": lambda screen: screen.facts([("name", HOSTILE)]),
    "a warning": lambda screen: screen.warn(HOSTILE),
    "an error": lambda screen: screen.error(BackupdError("it failed", detail=HOSTILE)),
}


@pytest.mark.parametrize("way", SAID)
def test_what_would_act_on_a_terminal_is_written_out(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    SAID[way](Screen(as_json=False))
    shown = capsys.readouterr()
    assert WRITTEN_OUT in shown.out + shown.err


def test_ordinary_text_stays_as_it_is() -> None:
    for text in ("shop.orders", "größe → 5\u00a0%", "表.ひらがな", ""):
        assert visible(text) == text
    assert visible("a\nb") == "a\\nb"
    assert visible("a\nb\tc", keep="\n\t") == "a\nb\tc"


def test_a_document_is_exact(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(as_json=True).document({"name": HOSTILE})
    assert json.loads(capsys.readouterr().out) == {"name": HOSTILE}


def test_a_transaction_with_hostile_names_stays_on_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    now = datetime(2026, 11, 21, tzinfo=UTC)
    change = Change("sho\np", HOSTILE, ChangeKind.DELETE, 2)
    one = Transaction(
        "",
        4,
        90,
        now,
        precise=True,
        server_id=1,
        changes=(change,),
        statement=f"DROP\n{HOSTILE}",
        xid="x\ry",
        state="prepared",
    )
    segment = Segment(
        "db1", "b", "bin 'log.000001", 1, 0, 90, Ending.OPEN, "", "", 1, now, now, True, (1,), "mariadb", "", ""
    )
    found = Found(one, segment.file, "b", segment, (change,), f"{segment.file}:4")
    _show_found(Screen(as_json=False), "db1", found)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert f"in sho\\np.{WRITTEN_OUT}" in lines[0]
    assert "XA transaction x\\ry" in lines[1]
    assert lines[2].strip() == f"DROP {WRITTEN_OUT}"
    assert """--to 'bin '"'"'log.000001:4' --tables 'sho\\np.""" in lines[3]
    assert lines[3].endswith(" --into db1 --compare")


LONG = 2500


@pytest.mark.parametrize("count", [0, 1, 999, 1000, 1001, LONG])
def test_a_long_list_is_one_array(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    values = [{"name": f"line\n{number}", "of": [{}, [number], {"größe": None}]} for number in range(count)]
    Screen(as_json=True).documents(iter(values))
    assert capsys.readouterr().out == json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    Screen(as_json=False).documents(values)
    assert capsys.readouterr().out == ""


def _failing(after: int) -> Iterator[dict[str, int]]:
    yield from ({"number": number} for number in range(after))
    raise BackupdError("the catalog is gone")


def _shown(screen: Screen, values: Iterator[dict[str, int]]) -> None:
    try:
        screen.documents(values)
    except BackupdError as error:
        screen.error(error)


def test_a_list_that_fails_on_its_way_is_no_document(capsys: pytest.CaptureFixture[str]) -> None:
    _shown(Screen(as_json=True), _failing(LONG))
    told = capsys.readouterr()
    assert told.out.startswith('[\n  {\n    "number": 0\n')
    assert "error: the catalog is gone" in told.err
    with pytest.raises(json.JSONDecodeError):
        json.loads(told.out)
    _shown(Screen(as_json=True), _failing(3))
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "the catalog is gone"


def test_a_long_table_has_one_head_and_straight_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(as_json=False).table(("NAME", "SIZE", "END"), ((f"n{row}", str(row), "x") for row in range(LONG)))
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[0].split()) == (LONG + 1, ["NAME", "SIZE", "END"])
    assert [line.split() for line in lines[1:]] == [[f"n{row}", str(row), "x"] for row in range(LONG)]
    assert {line.index("x") for line in lines[1001:]} == {lines[1001].index("x")}
    Screen(as_json=False).table(("NAME", "SIZE"), ())
    assert capsys.readouterr().out.split() == ["NAME", "SIZE"]


def test_a_plan_names_settings_of_the_source_once_and_says_all_else(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = "20261121T020000Z-7f3a9c01", "20261122T020000Z-7f3a9c01"
    show_plan_warnings(
        Screen(as_json=False),
        (first, second),
        (
            "this takes 2h",
            f"{second}: sync_binlog is 0, not 1: a crash of the host loses the end of the binary log",
            f"{first}: table shop.x is MyISAM",
            f"{second}: binlog_format is MIXED: a replay of statements may change other rows",
        ),
    )
    assert capsys.readouterr().err.splitlines() == [
        "warning: this takes 2h",
        f"warning: {first}: table shop.x is MyISAM",
        f"warning: settings of the source: sync_binlog, binlog_format; what they mean: backupd backups show {second}",
    ]

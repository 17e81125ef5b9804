"""What people see of names that somebody chose to be hostile."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from backupd.app.binlogs.transactions import Found
from backupd.cli.commands.binlog import _tell
from backupd.cli.output import Screen, visible
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
    _tell(Screen(as_json=False), "db1", found)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert f"in sho\\np.{WRITTEN_OUT}" in lines[0]
    assert "XA transaction x\\ry" in lines[1]
    assert lines[2].strip() == f"DROP {WRITTEN_OUT}"
    assert """--to 'bin '"'"'log.000001:4' --tables 'sho\\np.""" in lines[3]
    assert lines[3].endswith(" --into db1 --compare")

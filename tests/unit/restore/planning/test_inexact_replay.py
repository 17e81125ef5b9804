"""Temporary tables that were open at a backup's position, told from the statements of the index."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pytest

from backupd.model.binlog import Transaction
from backupd.model.errors import RefusedError
from restore.planning.inexact_replay import InexactError, open_before, over_temporary, refuse_pipe

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
MADE = "CREATE TEMPORARY TABLE IF NOT EXISTS shop.`Tmp1` (id INT)"
READ = "INSERT INTO shop.log SELECT id FROM tmp1"
GONE = "DROP /*!40005 TEMPORARY */ TABLE IF EXISTS `tmp0`,`shop`.`tmp1`"


def replayed(*statements: str) -> list[Transaction]:
    return [
        Transaction(f"0-1-{number}", 100 * number, 100 * number + 99, AT, precise=False, server_id=1, statement=text)
        for number, text in enumerate(statements, 10)
    ]


def why(*statements: str, before: tuple[str, ...] = (), known: bool = True) -> str:
    return over_temporary(replayed(*statements), open_before(before), known=known, backup="B")


def test_what_is_open_at_a_place_is_what_was_made_and_not_dropped_before() -> None:
    assert open_before([MADE]) == Counter(tmp1=1)
    assert not open_before([MADE, GONE])
    assert open_before([MADE, "CREATE TEMPORARY TABLE tmp1 AS SELECT 1", GONE]) == Counter(tmp1=1), "another session's"
    assert not open_before(["CREATE TABLE tmp1 (id INT)", "INSERT INTO t VALUES ('CREATE TABLE x')"])


def test_a_table_that_was_open_and_is_made_only_if_it_is_not_there_is_refused_by_name() -> None:
    assert why(MADE, READ, before=(MADE,)) == (
        "0-1-11 of 2026-11-21T12:00:00Z uses the temporary table tmp1, which was open at the position of backup B "
        "and is in no backup"
    )
    assert why(f"{MADE}; {READ}", before=(MADE,)).startswith("0-1-10 of ")
    assert why(READ, before=(MADE,)).startswith("0-1-10 of "), "made before, read behind"
    assert why(GONE, "CREATE TEMPORARY TABLE tmp9 (id INT)", "INSERT INTO shop.log SELECT id FROM tmp9") == ""
    assert "which may have been open" in why(MADE, READ, known=False)


def test_a_table_that_lives_within_what_is_replayed_is_none_of_these() -> None:
    for before in ((), (MADE, GONE)):
        assert why(MADE, READ, GONE, MADE, READ, before=before) == ""
    assert why("CREATE TEMPORARY TABLE tmp1 (id INT)", READ, GONE, known=False) == ""
    assert why(MADE, GONE, "INSERT INTO shop.log VALUES (1)", before=(MADE,)) == "", "nothing is read from it"
    assert why("INSERT INTO shop.log SELECT id FROM shop.other", before=(MADE,)) == ""


def test_the_refusal_names_the_option() -> None:
    assert str(InexactError(why(READ, before=(MADE,)))) == (
        "inexact replay: the restored rows may differ from the source\n"
        "detail: 0-1-10 of 2026-11-21T12:00:00Z uses the temporary table tmp1, which was open at the position of "
        "backup B and is in no backup\n"
        "hint: choose a target before it, or after a backup that was taken when no temporary table was open; ROW as "
        "binlog_format is exact; to restore it anyway: --accept-inexact"
    )


def test_xa_and_single_transactions_that_are_left_out_are_refused_for_the_pipe() -> None:
    refuse_pipe(replayed(READ), exclude=False)
    with pytest.raises(RefusedError, match="cannot leave out single transactions"):
        refuse_pipe(replayed(READ), exclude=True)
    prepared = Transaction("0-1-7", 700, 799, AT, precise=False, server_id=1, state="prepared", xid="X'31',X'',1")
    with pytest.raises(RefusedError, match="the logs hold XA transactions") as refused:
        refuse_pipe([*replayed(READ), prepared], exclude=False)
    assert refused.value.detail == "0-1-7 of 2026-11-21T12:00:00Z is one"

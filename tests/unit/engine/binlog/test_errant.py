"""Errant transactions: the arithmetic, for both families."""

from __future__ import annotations

import pytest

from backupd.engine.server.errant import (
    GtidState,
    advice,
    as_received,
    errant,
    errant_among,
    incomparable,
    own_numbers,
)

A = "aaaaaaaa-0000-0000-0000-000000000001"
B = "bbbbbbbb-0000-0000-0000-000000000002"


def mysql(uuid: str, executed: str, *, why: str = "") -> GtidState:
    return GtidState(False, 1, uuid, executed, why=why)


def mariadb(server_id: int, executed: str, received: str = "") -> GtidState:
    return GtidState(True, server_id, "", executed, received)


def test_what_was_written_on_a_replica_of_mysql_is_errant_run_by_run() -> None:
    found = errant(mysql(B, f"{A}:1-100,{B}:1-3:7"), [mysql(A, f"{A}:1-120")])
    assert [(one.gtids, one.first, one.last, one.own) for one in found] == [
        (f"{B}:1-3", 1, 3, True),
        (f"{B}:7", 7, 7, True),
    ]


def test_what_an_earlier_source_wrote_is_named_with_its_uuid_and_tags_are_origins() -> None:
    found = errant(mysql(B, f"{A}:1-9:tag:1-2"), [mysql("c" + A[1:], f"{A}:1-9:tag:1")])
    assert [(one.origin, one.gtids, one.own) for one in found] == [(f"{A}:tag", f"{A}:tag:2", False)]


def test_a_replica_that_is_behind_and_one_with_several_sources_have_none() -> None:
    assert errant(mysql(B, f"{A}:1-5"), [mysql(A, f"{A}:1-9")]) == ()
    assert errant(mysql(B, f"{A}:1-5,{B[:-1]}9:1"), [mysql(A, f"{A}:1-9"), mysql("", f"{B[:-1]}9:1")]) == ()


def test_a_later_transaction_of_the_source_does_not_hide_an_earlier_one_of_a_mariadb_replica() -> None:
    found = errant(mariadb(2, "0-1-200,0-2-101", "0-1-200"), [mariadb(1, "0-1-250")])
    assert [(one.gtids, one.own) for one in found] == [("0-2-1 to 0-2-101", True)]


def test_of_a_server_id_that_the_source_knows_only_what_is_later_is_errant() -> None:
    found = errant(mariadb(2, "0-1-200,0-2-101,5-9-1", "0-1-200"), [mariadb(1, "0-2-100,0-1-250")])
    assert [(one.gtids, one.own) for one in found] == [("0-2-101", True), ("5-9-1", False)]


def test_a_source_that_was_made_of_a_backup_knows_older_servers_by_its_position() -> None:
    source = mariadb(1, "", "0-9-80")
    assert errant(mariadb(2, "0-8-50,0-9-80"), [source]) == ()
    own = errant(mariadb(2, "0-8-50,0-2-60"), [source])
    assert [one.gtids for one in own] == ["0-2-1 to 0-2-60"], "what it wrote itself is not excused by a position"


def test_without_the_source_members_are_compared_and_what_that_wrote_is_no_ones_own() -> None:
    ahead, behind = mysql(B, f"{A}:1-100,{B}:1"), mysql("c" + A[1:], f"{A}:1-90")
    assert [one.gtids for one in errant_among(ahead, [behind], [A])] == [f"{B}:1"]
    found = errant_among(mariadb(2, "0-1-100,0-2-7"), [mariadb(3, "0-1-90")], ["1"])
    assert [one.origin for one in found] == ["0-2"]


def test_what_cannot_be_compared_is_told_and_never_counts_as_without_errant_transactions() -> None:
    assert "gtid_mode is OFF" in incomparable(mysql(B, "", why="its gtid_mode is OFF"), [mysql(A, "")])
    assert "gtid_mode is OFF" in incomparable(mysql(B, ""), [mysql(A, "", why="its gtid_mode is OFF")])
    assert "nothing in common" in incomparable(mysql(B, ""), [mariadb(1, "")])
    assert "no source" in incomparable(mysql(B, ""), [])
    assert incomparable(mysql(B, ""), [mysql(A, "")]) == ""


def test_a_mariadb_replica_without_a_log_is_compared_by_what_it_received() -> None:
    copy = GtidState(True, 9, "", "", "0-1-200,3-4-1", why="it writes no binary log")
    source = mariadb(1, "0-1-200,0-2-150")
    assert errant(copy, [source]) == (), "it cannot be compared as it is"
    assert [one.gtids for one in errant(as_received(copy), [source])] == ["3-4-1"]
    ahead = as_received(GtidState(True, 9, "", "", "0-1-201", why="it writes no binary log"))
    assert [one.gtids for one in errant(ahead, [source])] == ["0-1-201"], "the source was turned back"
    logs = mariadb(9, "0-1-5", "0-1-4")
    assert as_received(logs) is logs
    off = mysql(B, "", why="its gtid_mode is OFF")
    assert as_received(off) is off


def test_a_source_with_transactions_of_the_replica_s_own_number_is_noticed() -> None:
    source = mariadb(1, "0-1-250,0-9-100", "7-9-3")
    assert own_numbers(mariadb(9, "", "0-1-250"), [source]) == ("0-9-100", "7-9-3")
    assert own_numbers(mariadb(8, "", "0-1-250"), [source]) == ()
    assert own_numbers(mysql(B, f"{A}:1"), [mysql(A, f"{A}:1")]) == ()


def test_the_advice_names_each_transaction_to_inject() -> None:
    said = advice(errant(mysql(B, f"{B}:4-5"), [mysql(A, "")]), mariadb=False)
    assert f"SET GTID_NEXT='{B}:4'; BEGIN; COMMIT; SET GTID_NEXT='{B}:5'; BEGIN; COMMIT;" in said
    many = advice(errant(mysql(B, f"{B}:1-1000"), [mysql(A, "")]), mariadb=False)
    assert len(many) < 2500
    assert f"{B}:1-1000" in many


@pytest.mark.parametrize("text", ["0-1", "0-1-x", "uuid:1"])
def test_what_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a GTID"):
        errant(mariadb(2, text), [mariadb(1, "")])

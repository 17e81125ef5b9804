"""What of a new replica is compared with its source before it is handed over, and what is said where nothing is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import pytest

from backupd.engine.consistency import WITNESS, Compared
from backupd.engine.server.errant import GtidState
from backupd.model.errors import RefusedError
from backupd.model.proof import Check
from backupd.model.server_facts import Flavour, Version
from backupd.process.run_context import RunContext
from restore.planning.plan import ComparedBy
from restore.replica import hand_over
from restore.replica.hand_over import COMPARED, HandOver, compare_checksums, compare_gtids, foreseen, judged
from restore.replica.source import SourceFacts

A, B = "aaaaaaaa-0000-0000-0000-000000000001", "bbbbbbbb-0000-0000-0000-000000000002"
MYSQL = SourceFacts("db1:3306", Flavour.MYSQL, Version(9, 7), A, 7, "db1", 3306, True, "off", is_readable=True)
MARIADB = SourceFacts("db1:3306", Flavour.MARIADB, Version(10, 11), A, 7, "db1", 3306, True, "on")
NO_LOG = "it writes no binary log, so what was written on it has no GTIDs"


class Source:
    """Of which only the address is asked."""

    address = "db1:3306"

    @contextlib.contextmanager
    def connect(self) -> Iterator[str]:
        yield "source"


def compared(monkeypatch: pytest.MonkeyPatch, here: GtidState, there: GtidState) -> HandOver:
    read = {"replica": here, "source": there}
    monkeypatch.setattr(hand_over, "read_gtids", read.__getitem__)
    return compare_gtids(cast(Any, "replica"), cast(Any, Source()))


def test_a_replica_of_mysql_is_compared_by_the_gtids_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    done = compared(monkeypatch, GtidState(False, 9, B, f"{A}:1-9"), GtidState(False, 7, A, f"{A}:1-10"))
    assert (done.by, done.why, done.check.outcome) == (ComparedBy.GTIDS, "", "passed")
    with pytest.raises(RefusedError, match="executed transactions that its source has not") as caught:
        compared(monkeypatch, GtidState(False, 9, B, f"{A}:1-9,{B}:1"), GtidState(False, 7, A, f"{A}:1-10"))
    assert f"{B}:1" in caught.value.detail


def test_a_replica_of_mariadb_is_compared_by_what_it_received(monkeypatch: pytest.MonkeyPatch) -> None:
    source = GtidState(True, 7, "", "0-7-90,1-8-4")
    done = compared(monkeypatch, GtidState(True, 9, "", "", "0-7-90,1-8-3", why=NO_LOG), source)
    assert (done.by, done.why) == (ComparedBy.RECEIVED, "")
    assert "what is written on the replica itself has none" in done.check.detail
    for received, words in (("0-7-91", "0-7-91"), ("0-7-90,5-5-5", "5-5-1 to 5-5-5")):
        with pytest.raises(RefusedError, match="executed transactions that its source has not") as caught:
            compared(monkeypatch, GtidState(True, 9, "", "", received, why=NO_LOG), source)
        assert words in caught.value.detail


def test_a_source_with_events_of_the_replica_s_own_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = GtidState(True, 7, "", "0-9-80,0-7-90")
    with pytest.raises(RefusedError, match="own server_id 9: a replica does not apply these") as caught:
        compared(monkeypatch, GtidState(True, 9, "", "", "0-7-90", why=NO_LOG), source)
    assert caught.value.detail == "0-9-80"


def test_what_cannot_be_compared_never_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    off = "its gtid_mode is OFF"
    done = compared(monkeypatch, GtidState(False, 9, B, why=off), GtidState(False, 7, A, why=off))
    assert (done.by, done.check.outcome) == (ComparedBy.NOTHING, "skipped")
    assert off in done.check.detail


@pytest.mark.parametrize(
    ("source", "by_gtid", "delay", "by", "why"),
    [
        (MYSQL, True, 0, ComparedBy.GTIDS, ""),
        (MYSQL, True, 60, ComparedBy.GTIDS, ""),
        (MARIADB, True, 0, ComparedBy.RECEIVED, ""),
        (MYSQL, False, 0, ComparedBy.CHECKSUMS, ""),
        (MYSQL, False, 60, ComparedBy.NOTHING, "a delayed replica"),
        (MARIADB, False, 0, ComparedBy.NOTHING, "may not read every table"),
    ],
)
def test_the_plan_says_what_will_be_compared(
    source: SourceFacts, by_gtid: bool, delay: int, by: ComparedBy, why: str
) -> None:
    found = foreseen(source, by_gtid=by_gtid, delay=delay)
    assert found[0] is by
    assert why in found[1]
    assert bool(found[1]) == (by is ComparedBy.NOTHING)


def test_checksums_are_all_equal_or_say_what_was_not_compared() -> None:
    assert judged(Compared(("`a`.`b`",), {}, {}, WITNESS)).check == Check(
        COMPARED, "passed", "1 tables have the source's checksums at one position"
    )
    some = judged(Compared(("`a`.`b`",), {}, {"`a`.`c`": "engine MEMORY"}, WITNESS))
    assert (some.by, some.check.outcome) == (ComparedBy.CHECKSUMS, "skipped")
    assert "not compared: 1 tables: `a`.`c` (engine MEMORY)" in some.check.detail
    none = judged(Compared((), {}, {"`a`.`c`": "engine MEMORY"}, WITNESS))
    assert (none.by, none.check.outcome) == (ComparedBy.NOTHING, "skipped")
    with pytest.raises(RefusedError, match="1 tables of the replica are not as at its source") as caught:
        judged(Compared(("`a`.`b`",), {"`a`.`c`": "its checksum is 1 where the source has 2"}, {}, WITNESS))
    assert "`a`.`c` its checksum is 1" in caught.value.detail


def test_an_account_that_may_not_read_and_a_comparison_that_fails_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_over, "read_grants", lambda _session: None)
    monkeypatch.setattr(hand_over, "sees_all", lambda _grants: False)
    done = compare_checksums(cast(Any, Source()), cast(Any, None), RunContext())
    assert (done.by, "may not read every table" in done.why) == (ComparedBy.NOTHING, True)
    monkeypatch.setattr(hand_over, "sees_all", lambda _grants: True)

    def fails(*_arguments: object, **_options: object) -> Compared:
        raise RefusedError("the replica did not apply", detail="in 30 seconds")

    monkeypatch.setattr(hand_over, "at_one_position", fails)
    done = compare_checksums(cast(Any, Source()), cast(Any, None), RunContext())
    assert (done.by, done.check.outcome) == (ComparedBy.NOTHING, "skipped")
    assert "did not apply: in 30 seconds" in done.why

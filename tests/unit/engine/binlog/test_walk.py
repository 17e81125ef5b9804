"""The walk over logs before a replay: how much of them is still to be executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from backupd.engine.binlog.walk import Walk, walk
from backupd.engine.relay_logs import Leg
from backupd.engine.replay_applier import refuse_repeated
from backupd.engine.replay_pipe import refuse_inexact
from backupd.model.binlog import ReplayMethod, Stop, plus
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Position, Version
from backupd.process.run_context import RunContext
from tests.support.catalog.samples import server_info
from tests.support.logs.binlogs import all_of, real_logs, why_not


def test_what_was_executed_before_a_log_is_entered_by_gtid_is_counted_apart() -> None:
    path = real_logs("mariadb").files["statements"].path
    scan, transactions = all_of(path)
    half = len(transactions) // 2
    state = plus(scan.gtids_before, transactions[half - 1].gtid, mariadb=True)
    for place in (Position(path.name, 4, state), Position("", 0, state)):
        found = walk([path], place)
        assert (found.repeated, found.transactions) == (half, len(transactions) - half)
    whole = walk([path], Position(path.name, 4, scan.gtids_before))
    assert (whole.repeated, whole.transactions) == (0, len(transactions))
    inside = walk([path], Position(path.name, transactions[half].start, state))
    assert (inside.repeated, inside.transactions) == (0, len(transactions) - half)


def test_a_log_of_another_branch_is_refused_though_it_has_the_same_numbers() -> None:
    path = real_logs("mariadb").files["statements"].path
    _scan, transactions = all_of(path)
    domain, server, sequence = transactions[0].gtid.split("-")
    with pytest.raises(RefusedError, match="do not continue"):
        walk([path], Position("", 0, f"{domain}-{int(server) + 1}-{sequence}"))


def _repeated(folder: Path) -> tuple[Path, str, int, int, int]:
    """A log whose third transaction comes again with the same GTID at its end: name, GTID, and the places before the
    third, after it and at the end."""
    whole = real_logs("mariadb").files["statements"].path
    _scan, transactions = all_of(whole)
    third, data = transactions[2], whole.read_bytes()
    end = transactions[-1].end
    path = folder / "binlog.000001"
    path.write_bytes(data[:end] + data[third.start : third.end])
    return path, third.gtid, third.start, third.end, end


def _leg(path: Path, start: Position, found: Walk) -> Leg:
    return Leg(
        server_info(version=Version(10, 11)),
        (path,),
        start,
        Stop("", "", 0, ""),
        ReplayMethod.PIPE,
        path.parent,
        RunContext(),
        found=found,
    )


def test_a_gtid_that_occurs_twice_is_seen_and_only_the_pipe_takes_it_from_a_place(tmp_path: Path) -> None:
    path, gtid, before, after, end = _repeated(tmp_path)
    scan, transactions = all_of(real_logs("mariadb").files["statements"].path)
    states = {before: transactions[1].gtid, after: gtid, end: transactions[-1].gtid}
    for pos, state in states.items():
        found = walk([path], Position(path.name, pos, plus(scan.gtids_before, state, mariadb=True)))
        assert found.twice == [gtid]
        with pytest.raises(RefusedError, match="twice") as caught:
            refuse_repeated(found)
        assert "--replay-with pipe" in caught.value.hint
        refuse_inexact(_leg(path, Position(path.name, pos, state), found))
    by_gtid = Position("", 0, plus(scan.gtids_before, transactions[1].gtid, mariadb=True))
    with pytest.raises(RefusedError, match="twice"):
        refuse_inexact(_leg(path, by_gtid, walk([path], by_gtid)))
    once = walk(
        [real_logs("mariadb").files["statements"].path],
        Position("", 0, "" if not scan.gtids_before else scan.gtids_before),
    )
    assert once.twice == []
    refuse_repeated(once)


def test_a_place_and_a_gtid_that_are_not_the_same_place_are_refused() -> None:
    path = real_logs("mariadb").files["statements"].path
    scan, transactions = all_of(path)
    for other in (3, 8):
        state = plus(scan.gtids_before, transactions[other].gtid, mariadb=True)
        with pytest.raises(RefusedError, match=r"do not match in these binary logs|logs begin after"):
            walk([path], Position(path.name, transactions[5].end, state))


@pytest.mark.parametrize("flavour", ["mariadb", "mysql"])
def test_data_that_statements_change_is_seen_and_rows_are_something_else(flavour: str) -> None:
    if why := why_not(flavour):
        pytest.skip(why)
    for chapter in ("statements", "rows"):
        path = real_logs(flavour).files[chapter].path
        found = walk([path], Position("", 0, all_of(path)[0].gtids_before))
        assert found.by_statement is (chapter == "statements")

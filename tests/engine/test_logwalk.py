"""The walk over logs before a replay: how much of them is still to be executed."""

from __future__ import annotations

import pytest

from backupd.engine.logwalk import walk
from backupd.model.errors import RefusedError
from backupd.model.gtid import plus
from backupd.model.server import Position
from tests.support.binlogs import all_of, real_logs


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

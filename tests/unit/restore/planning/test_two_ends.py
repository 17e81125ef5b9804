"""A server that came back with less than what is archived of it: which end is the latest?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from backupd.model.binlog import Branch, BranchReason, Ending, Run
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Position
from restore.planning.plan import Plan
from restore.planning.planner import Preferences
from tests.unit.restore.planning.test_past_end import BRANCH, DEFAULT, at, plan

LESS = Branch(
    "shop",
    "20261121T120600Z-00000002",
    at(6),
    BranchReason.LOST_TAIL,
    "",
    "mariadb",
    "bin",
    1,
    at(5),
    BRANCH.id,
    Position("bin.000001", 700, "0-1-4"),
    names_go_on=True,
    note="the server's binary log has lost what was behind bin.000001:700",
)

ON = Run(
    "shop", LESS.id, "local", 1, 0, 1, 800, "0-1-4", "0-1-5", at(7), at(7), at(10), 1000, 500, 1, 1, ending=Ending.OPEN
)


def planned(target: str, preferences: Preferences = DEFAULT, less: Branch = LESS) -> Plan:
    """Five transactions were archived, of which the server has the first three; then it went on."""
    stamps = [at(minute) for minute in (1, 2, 3, 4, 5)]
    return plan(target, *stamps, confirmed=at(5), branches=(BRANCH, less), more=(ON,), preferences=preferences)


def test_the_latest_of_a_server_that_lost_the_end_of_its_log_is_asked_for_by_its_branch() -> None:
    with pytest.raises(RefusedError, match="two ends of shop") as refused:
        planned("latest")
    assert "archived up to bin.000001:900" in refused.value.message
    assert f"latest@{BRANCH.id}" in refused.value.hint
    assert f"latest@{LESS.id}" in refused.value.hint
    before = planned(f"latest@{BRANCH.id}").until
    assert before is not None
    assert (before.branch, before.pos) == (BRANCH.id, 900)
    after = planned(f"latest@{LESS.id}").until
    assert after is not None
    assert (after.branch, after.pos) == (LESS.id, 800)


def test_who_can_not_be_asked_gets_the_end_of_the_present_branch_with_a_warning() -> None:
    found = planned("latest", replace(DEFAULT, accept_older=True))
    assert found.until is not None
    assert found.until.branch == LESS.id
    assert any("two ends of shop" in text for text in found.warnings)


def test_nothing_is_asked_where_nothing_was_lost() -> None:
    assert planned("latest", less=replace(LESS, fork=Position("bin.000001", 900, "0-1-6"))).until is not None

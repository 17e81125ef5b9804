"""Targets inside a hole of the archive, and the latest moment in front of one."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from backupd.model.binlog import Branch, BranchReason, Ending, FilePosition, Run, Stop
from backupd.model.errors import NotFoundError, RefusedError
from backupd.model.server_facts import Position
from backupd.recovery.windows import RouteLeg
from restore.planning.plan import Plan
from restore.planning.planner import Preferences, make_plan
from restore.planning.target import OlderError, parse_target
from restore.planning.target_resolution import History, Material
from tests.unit.restore.planning.test_planner import NOW, backup

SERVER = "shop"
BRANCH = Branch(SERVER, "b1", NOW - timedelta(days=9), BranchReason.FIRST, "", "mariadb", "binlog", 1)


def run(first: FilePosition, last: FilePosition, before: str, after: str) -> Run:
    return Run(
        SERVER,
        BRANCH.id,
        "local",
        *first,
        *last,
        before,
        after,
        NOW - timedelta(hours=2),
        NOW - timedelta(hours=1),
        NOW,
        900,
        90,
        1,
        9,
        ending=Ending.OPEN,
    )


RUNS = (run((1, 0), (2, 700), "", "0-1-20"), run((5, 0), (5, 900), "0-1-40", "0-1-50"))
ENDS = ("binlog.000002:700", "binlog.000005:0")


class Nowhere:
    """A resolver that finds no target in what is archived."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def stop_for_time(
        self, branch: str, start: FilePosition, end: FilePosition, moment: datetime, since: datetime
    ) -> Stop | None:
        raise AssertionError(branch, start, end, moment, since)

    def later_before(self, branch: str, place: FilePosition, moment: datetime, since: datetime) -> Stop | None:
        raise AssertionError(branch, place, moment, since)

    def stop_for_gtid(self, branch: str, gtid: str, *, before: bool) -> Stop | None:
        self.asked.append(f"{branch} {gtid} {before}")
        return None

    def stop_for_position(self, branch: str, number: int, pos: int) -> Stop | None:
        self.asked.append(f"{branch} {number}:{pos}")
        return None

    def doubts(
        self, branch: str, start: FilePosition, stop: FilePosition, end: FilePosition, moment: datetime
    ) -> tuple[str, ...]:
        raise AssertionError(branch, start, stop, end, moment)

    def repeats(self, _leg: RouteLeg) -> bool:
        return False

    def material(self, leg: RouteLeg, stop: Stop) -> Material:
        raise AssertionError(leg, stop)


def planned(target: str, place: Position) -> Plan:
    return make_plan(
        SERVER,
        [replace(backup(1), position=place)],
        parse_target(target),
        Preferences(),
        now=NOW,
        history=History((BRANCH,), RUNS, (), Nowhere()),
    )


@pytest.mark.parametrize("target", ["before-gtid:0-1-30", "binlog.000003:500", "binlog.000002:701"])
def test_a_target_inside_is_refused_with_both_ends(target: str) -> None:
    with pytest.raises(RefusedError) as refused:
        planned(target, Position("binlog.000001", 400, "0-1-3"))
    for end in ENDS:
        assert end in refused.value.message


@pytest.mark.parametrize("target", ["before-gtid:0-1-60", "binlog.000006:4"])
def test_what_is_behind_everything_is_not_said_to_be_in_it(target: str) -> None:
    with pytest.raises(NotFoundError) as refused:
        planned(target, Position("binlog.000001", 400, "0-1-3"))
    assert ENDS[1] not in refused.value.message


def test_the_latest_moment_in_front_of_it_is_not_given_without_a_word() -> None:
    with pytest.raises(OlderError) as refused:
        planned("latest", Position("binlog.000002", 700, "0-1-20"))
    for end in ENDS:
        assert end in refused.value.detail

"""What proves that one archived file follows another."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from backupd.model.binlog import Ending, Run
from backupd.recovery.runs import follows, joined, reaches

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def run(number: int, ending: Ending, before: str, after: str) -> Run:
    return Run(
        "db1", "b", "local", number, 0, number, 900, before, after, NOON, NOON, None, 900, 400, 1, 9, ending=ending
    )


@pytest.mark.parametrize(
    ("ending", "after", "before", "proved"),
    [
        (Ending.ROTATED, "", "", True),
        (Ending.STOPPED, "", "", True),
        (Ending.CRASHED, "", "", True),
        (Ending.CUT, "", "", False),
        (Ending.OPEN, "", "", False),
        (Ending.ROTATED, "0-1-9", "0-1-9", True),
        (Ending.CRASHED, "0-1-9", "0-1-9", True),
        (Ending.CUT, "0-1-9", "0-1-9", True),
        (Ending.OPEN, "0-1-9", "0-1-9", False),
        (Ending.CUT, "0-1-9", "0-1-11", False),
        (Ending.CRASHED, "0-1-9", "0-1-11", False),
        (Ending.CUT, "0-1-9", "", False),
        (Ending.CUT, "", "0-1-9", False),
    ],
)
def test_a_file_of_which_nobody_knows_whether_it_is_whole_is_gone_on_from_by_gtids_alone(
    ending: Ending, after: str, before: str, proved: bool
) -> None:
    one, other = run(1, ending, "", after), run(2, Ending.OPEN, before, before)
    assert follows(one, other) is proved
    assert len(joined([one, other])) == (1 if proved else 2)


def test_a_piece_follows_the_one_that_ends_where_it_begins() -> None:
    one = replace(run(1, Ending.OPEN, "", ""), last_pos=400)
    assert follows(one, replace(run(1, Ending.OPEN, "", ""), first_pos=400))
    assert not follows(one, replace(run(1, Ending.OPEN, "", ""), first_pos=401))


def test_the_beginning_of_the_next_file_is_reached_only_by_a_file_that_may_be_whole() -> None:
    assert [reaches(run(1, ending, "", ""), (2, 0)) for ending in Ending] == [False, True, True, True, False]
    assert reaches(run(1, Ending.CUT, "", "0-1-9"), (2, 0))  # the state at the beginning of the next one tells
    assert reaches(run(1, Ending.CUT, "", ""), (1, 900))

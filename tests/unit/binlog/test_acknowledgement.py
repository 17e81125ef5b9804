"""Since when RPO 0 holds: only what the counters at both ends of a window show."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from backupd.binlog.acknowledgement import SPOOL, Evidence, Look
from backupd.engine.server.semi_sync import SemiSync
from backupd.model.acknowledged import AcknowledgedWindow as Window

START = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
WELL = SemiSync("source", "replica", True, True, "AFTER_SYNC", 10.0, True, 1, 1, 50, 2, 1, 1_000)
BRANCH = "20261128T120000Z-00000001"


def look(second: float, *, attached: bool = True, read: float = 0.1, **other: Any) -> Look:
    at = START + timedelta(seconds=second)
    counters = replace(WELL, uptime=1_000 + round(second), counted_at=at + timedelta(seconds=read))
    return Look(at, attached, replace(counters, **other))


def after(*looks: Look, evidence: Evidence | None = None) -> Evidence:
    found = evidence or Evidence(SPOOL)
    for one in looks:
        found = found.after(one, BRANCH)
    return found


def moment(second: float) -> datetime:
    return START + timedelta(seconds=second)


def test_a_window_has_a_look_at_both_ends_and_grows_while_nothing_speaks_against_it() -> None:
    assert after(look(0)).since is None
    assert after(look(0)).windows == ()
    found = after(look(0), look(2), look(4, acknowledged=70))
    assert found.windows == (Window(BRANCH, moment(0.1), moment(4)),)
    assert (found.why, found.since, found.until, found.lost_at) == ("", moment(0.1), moment(4), None)
    assert Evidence.from_json(found.as_json()) == found


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"source": ""}, "is off"),
        ({"on": False}, "is off"),
        ({"wait_point": "AFTER_COMMIT"}, "AFTER_COMMIT"),
        ({"status": False}, "fallen back"),
        ({"clients": 2}, "not by backupd alone"),
        ({"clients": 3, "needed": 2}, "not by backupd alone"),
        ({"clients": 0}, "counts no"),
    ],
)
def test_nothing_is_claimed_by_a_look_that_speaks_against_it(other: dict[str, Any], why: str) -> None:
    found = after(look(0), look(2), look(4, **other))
    assert why in found.why
    assert (found.since, found.lost_at) == (None, moment(2))
    again = after(look(6), evidence=found)
    assert again.windows == found.windows
    assert again.why
    assert after(look(8), evidence=again).windows == (
        Window(BRANCH, moment(0.1), moment(2)),
        Window(BRANCH, moment(6.1), moment(8)),
    )


def test_a_server_that_waits_for_all_of_several_replicas_waits_for_ours() -> None:
    assert after(look(0, clients=2, needed=2), look(2, clients=2, needed=2)).since == moment(0.1)


def test_nothing_is_claimed_while_ours_is_not_a_semi_synchronous_one() -> None:
    assert "catches up" in after(look(0, attached=False), look(2, attached=False)).why


@pytest.mark.parametrize(
    ("other", "why", "answered"),
    [
        ({"unacknowledged": 3}, "answered 1 commits", True),
        ({"fell_back": 2}, "fell back", True),
        ({"unacknowledged": 1}, "were reset", False),
        ({"fell_back": 0}, "were reset", False),
        ({"acknowledged": 3}, "were reset", False),
        ({"uptime": 2}, "restarted", False),
        ({"uptime": 1_050}, "restarted", False),
    ],
)
def test_counters_that_moved_or_began_anew_end_the_window_at_the_look_before(
    other: dict[str, Any], why: str, answered: bool
) -> None:
    found = after(look(0), look(2), look(4, **other))
    assert why in found.why
    assert found.windows == (Window(BRANCH, moment(0.1), moment(2)),)
    assert found.lost_at == moment(2)
    assert (found.answered_at is not None) is answered


def test_a_stream_that_is_interrupted_goes_on_with_its_window_where_the_counters_show_that() -> None:
    """Commits waited meanwhile."""
    before = after(look(0), look(2))
    found = before.interrupted("the connection broke", moment(3))
    assert (found.since, found.lost_at, found.why) == (None, moment(2), "the connection broke")
    assert after(look(9), evidence=found).windows == (Window(BRANCH, moment(0.1), moment(9)),)
    late = after(look(50), evidence=found)
    assert "not asked for" in late.why
    assert late.windows == before.windows
    (_first, second) = after(look(52), evidence=late).windows
    assert second.since == moment(50.1)


def test_another_branch_is_another_window() -> None:
    found = after(look(0), look(2)).after(look(4), "another")
    assert [window.branch for window in found.windows] == [BRANCH, "another"]

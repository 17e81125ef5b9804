"""The drawn timeline: what lies where."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from api.web.drawing import EVERYTHING, SPANS, draw, view_of
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy
from backupd.model.binlog import Branch, BranchReason, Gap, Run
from backupd.model.proof import FAILED, PROVED, Proof
from backupd.model.server_facts import Position
from backupd.recovery.timeline import Timeline
from backupd.recovery.windows import Window
from tests.support.catalog.samples import backup, proof

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
PLACE = Position("binlog.000001", 4, "")
RUN = Run("shop", "b1", "local", 1, 4, 9, 9, "", "", None, None, None, 1, 1, 1, 1)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def taken(ago: timedelta, kind: BackupKind = BackupKind.PHYSICAL_FULL, **changes: object) -> BackupRecord:
    made = backup(int(ago.total_seconds()), kind=kind)
    moment = NOW - ago
    values = {
        "started_at": moment - timedelta(minutes=1),
        "finished_at": moment,
        "tables_missing": 0,
        "copies": (Copy("local", "complete", moment),),
        **changes,
    }
    return replace(made, **values)  # type: ignore[arg-type]  # fields by name


def window(begin: timedelta, end: timedelta, *, branch: str = "b1", alone: bool = False, **changes: object) -> Window:
    found = Window(
        NOW - begin, NOW - end, "the archive ends there", branch, taken(begin), None if alone else RUN, ("local",)
    )
    return replace(found, **changes)  # type: ignore[arg-type]  # fields by name


def of(*windows: Window, gaps: Sequence[Gap] = (), branches: Sequence[str] = ("b1",)) -> Timeline:
    known = tuple(
        Branch("shop", name, NOW - 40 * DAY + number * DAY, BranchReason.FIRST, "u", "mariadb", "binlog", 1)
        for number, name in enumerate(branches)
    )
    return Timeline("shop", NOW, windows, tuple(gaps), (), known)


def test_the_narrowest_usual_span_that_holds_everything_is_shown_first_and_ends_now() -> None:
    young, old = of(window(3 * HOUR, HOUR)), of(window(30 * DAY, HOUR))
    assert (view_of(young, []).name, view_of(old, []).name) == ("1d", "7d")
    assert view_of(of(), []).name == "1d", "nothing at all can be drawn, too"
    for view in (view_of(young, []), view_of(old, [], span="30d"), view_of(old, [], span=EVERYTHING)):
        assert 98 < view.percent(NOW) < 100
    assert view_of(old, [], span=EVERYTHING).percent(NOW - 30 * DAY) == pytest.approx(1, abs=0.5)
    assert view_of(old, [], span="<b>") == view_of(old, [])


@pytest.mark.parametrize("span", list(SPANS))
def test_a_chosen_moment_lies_in_the_middle_but_where_now_or_the_beginning_is_near(span: str) -> None:
    timeline = of(window(800 * DAY, HOUR))
    chosen = NOW - 400 * DAY
    assert view_of(timeline, [], span=span, around=chosen).percent(chosen) == pytest.approx(50)
    assert view_of(timeline, [], span=span, around=NOW).percent(NOW) > 98
    ahead = view_of(timeline, [], span=span, around=NOW + 9999 * DAY)
    assert ahead.end - NOW <= ahead.length * 0.02, "there is nothing to see in the future"


def test_what_lies_between_two_moments_is_shown_with_a_little_room() -> None:
    view = view_of(of(), [], between=(NOW - 2 * DAY, NOW - DAY))
    assert view.begin < NOW - 2 * DAY
    assert NOW - DAY < view.end < NOW
    same = view_of(of(), [], between=(NOW - DAY, NOW - DAY))
    assert same.length >= timedelta(minutes=10)


def test_windows_gaps_and_what_is_not_recoverable_yet_lie_at_their_times() -> None:
    gap = Gap("shop", "b1", "", PLACE, PLACE, NOW - 12 * HOUR, NOW - 6 * HOUR, "purged", NOW)
    elsewhere = replace(gap, destination="offsite")
    timeline = of(window(24 * HOUR, 12 * HOUR), window(6 * HOUR, HOUR), gaps=(gap, elsewhere))
    drawing = draw(timeline, [], [], view_of(timeline, [], span="1d"))
    first, second, hole, partly, lost = drawing.bars
    assert [bar.kind for bar in drawing.bars] == ["recoverable", "recoverable", "gap", "gap-place", "lost"]
    assert hole.x == pytest.approx(first.x + first.width)
    assert hole.x + hole.width == pytest.approx(second.x)
    assert lost.x == pytest.approx(second.x + second.width)
    assert lost.x + lost.width == pytest.approx(drawing.now)
    assert first.width == pytest.approx(2 * second.width * 1.2)
    assert "any moment from 2026-11-20 03:00:00Z to 2026-11-20 15:00:00Z, from local" in first.title
    assert hole.title == "gap everywhere, 2026-11-20 15:00:00Z to 2026-11-20 21:00:00Z: purged"
    assert partly.title.startswith("gap at offsite")
    assert "not recoverable yet: what was committed since 2026-11-21 02:00:00Z (1h)" in lost.title


def test_backups_without_logs_are_points_and_doubtful_windows_say_why() -> None:
    timeline = of(window(5 * HOUR, 5 * HOUR, alone=True), window(4 * HOUR, HOUR, conditions=("a statement",)))
    point, doubtful, _lost = draw(timeline, [], [], view_of(timeline, [])).bars
    assert (point.kind, point.width, doubtful.kind) == ("point", 0.0, "doubtful")
    assert point.title.startswith("only this moment: 2026-11-20 22:00:00Z")
    assert doubtful.title.endswith("; doubtful: a statement")


def test_a_gap_whose_times_nobody_knows_is_not_drawn_and_one_that_goes_on_ends_now() -> None:
    unknown = Gap("shop", "b1", "", PLACE, PLACE, None, None, "purged", NOW)
    open_end = Gap("shop", "b1", "", PLACE, None, NOW - 2 * HOUR, None, "purged", NOW)
    timeline = of(gaps=(unknown, open_end))
    drawing = draw(timeline, [], [], view_of(timeline, []))
    (hole,) = drawing.bars
    assert hole.x + hole.width == pytest.approx(drawing.now)


def test_each_branch_has_a_lane_the_newest_on_top_and_the_oldest_share_the_last() -> None:
    names = ["b1", "b2", "b3", "b4", "b5"]
    timeline = of(
        *(window((30 - 5 * n) * HOUR, (26 - 5 * n) * HOUR, branch=name) for n, name in enumerate(names)), branches=names
    )
    drawing = draw(timeline, [], [], view_of(timeline, [], span="7d"))
    assert [bar.lane for bar in drawing.bars if bar.kind == "recoverable"] == [2, 2, 2, 1, 0]
    assert drawing.lanes == 3


def test_marks_that_would_hide_each_other_are_one_that_looks_like_the_worst_of_them() -> None:
    increments = [taken(DAY + n * timedelta(minutes=5), BackupKind.PHYSICAL_INCREMENTAL) for n in range(6)]
    damaged = replace(increments[2], state=BackupState.DAMAGED)
    far = taken(5 * DAY, BackupKind.LOGICAL, tables_missing=2)
    gone = taken(6 * DAY, state=BackupState.DELETED)
    timeline = of(window(7 * DAY, HOUR))
    marks = draw(timeline, [*increments[:2], damaged, *increments[3:], far, gone], [], view_of(timeline, [])).backups
    assert [(mark.kind, mark.tone, len(mark.ids)) for mark in marks] == [
        ("logical", "warning", 1),
        ("increment", "bad", 6),
    ], "what is marked as deleted is not drawn"
    assert "2 tables missing" in marks[0].title
    assert marks[1].title.startswith("6 backups, ")
    assert "1 of them not good" in marks[1].title
    assert (marks[1].begin, marks[1].end) == (NOW - DAY - timedelta(minutes=25), NOW - DAY)
    zoomed = view_of(timeline, [], between=(marks[1].begin, marks[1].end))
    assert len(draw(timeline, increments, [], zoomed).backups) == 6, "nearer, each is itself"


def test_proofs_are_marks_with_their_outcome() -> None:
    def ended(ago: timedelta, outcome: str) -> Proof:
        return replace(proof(outcome=outcome), finished_at=NOW - ago)

    timeline = of(window(7 * DAY, HOUR))
    marks = draw(
        timeline,
        [],
        [ended(DAY, PROVED), ended(2 * DAY, FAILED), ended(3 * DAY, "undecided"), ended(30 * DAY, FAILED)],
        view_of(timeline, []),
    ).proofs
    assert [mark.tone for mark in marks] == ["warning", "bad", "good"], "what is not in sight is not drawn"


def test_slices_cover_what_is_recoverable_and_lead_to_moments_inside_of_it() -> None:
    timeline = of(window(20 * HOUR, 20 * HOUR, alone=True), window(10 * HOUR, HOUR))
    slices = draw(timeline, [], [], view_of(timeline, [], span="1d")).slices
    assert all(any(window.holds(one.moment) for window in timeline.windows) for one in slices)
    assert NOW - 20 * HOUR in {one.moment for one in slices}, "a lone backup is met exactly"
    assert 9 / 24.48 * 120 - 1 <= len(slices) <= 9 / 24.48 * 120 + 3


@pytest.mark.parametrize("span", list(SPANS))
def test_ticks_are_few_and_evenly_spread_and_midnight_has_its_date(span: str) -> None:
    timeline = of(window(800 * DAY, HOUR))
    ticks = draw(timeline, [], [], view_of(timeline, [], span=span)).ticks
    assert 3 <= len(ticks) <= 9
    steps = {round(other.x - one.x, 3) for one, other in itertools.pairwise(ticks)}
    assert len(steps) == 1
    assert (ticks[0].is_spare, ticks[1].is_spare) == (False, True)
    if span == "1d":
        assert "Nov 21" in {tick.text for tick in ticks}


def test_the_chosen_moment_is_marked_only_where_it_is_in_sight() -> None:
    timeline = of(window(30 * DAY, HOUR))
    view = view_of(timeline, [], span="1d")
    assert draw(timeline, [], [], view, NOW - HOUR).chosen == pytest.approx(view.percent(NOW - HOUR))
    assert draw(timeline, [], [], view, NOW - 9 * DAY).chosen is None

"""Binary logs under the rules: what stays for which backup, what goes, in which order, and what holds it back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from backupd.app.retention import retention as logretention
from backupd.app.retention.decisions import NOTHING, first_files, solve
from backupd.app.retention.preview import preview
from backupd.app.retention.retention import clear, make_room
from backupd.app.retention.rules import BinlogRun, Decisions, LogPosition, Stored, View
from backupd.app.views.capacity import forecast
from backupd.app.views.policies import SPAN, streamed
from backupd.catalog.session import Catalog
from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import Branch, BranchReason, Ending, Segment
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Position
from backupd.transfer.leases import Pin
from backupd.transfer.records.manifests import put_bytes
from storage import layout
from tests.support.catalog.histories import NOW, days_ago, rules, stored, view
from tests.support.catalog.installation import SERVER, Installation
from tests.support.service.shop import apply

OLD = "20261001T000000Z-00000001"
NEW = "20261110T000000Z-00000002"


def branch(name: str = OLD, **changes: Any) -> Branch:
    plain = Branch(SERVER, name, days_ago(400), BranchReason.FIRST, "u", "mariadb", "binlog", 1)
    return replace(plain, **changes)


def placed(name: str, days: float, number: int, *, on: str = OLD, **changes: Any) -> Stored:
    return stored(name, days_ago(days), log_position=LogPosition(on, number), **changes)


def run(first: int, last: int, begin: float, end: float, *, on: str = OLD) -> BinlogRun:
    return BinlogRun(f"{first} to {last}", days_ago(begin), days_ago(end), 100, on, first, last)


def solved(one: View, **keep: Any) -> Decisions:
    return solve(replace(one, branches=one.branches or (branch(),)), rules(**keep), now=NOW, zone=UTC)


def told(decisions: Decisions) -> list[tuple[int, int, bool]]:
    return [(one.run.first, one.run.last, one.keep) for one in decisions.runs]


FIVE = [placed(f"d{number}", number + 0.1, 100 - 10 * number) for number in range(5)]
"""The newest goes on from file 100, the oldest, of four days ago, from file 60."""


def test_logs_stay_from_the_file_of_the_oldest_kept_backup_on() -> None:
    decisions = solved(view(FIVE, runs=(run(40, 105, 6, 0),)), daily=3)
    assert told(decisions) == [(40, 79, False), (80, 105, True)]
    assert "file 80 is the first that is still needed" in decisions.runs[0].reason
    assert "replay from d2" in decisions.runs[1].reason


def test_outside_the_window_a_backup_is_one_moment_only_where_the_policy_says_so() -> None:
    one = view(FIVE, runs=(run(40, 105, 6, 0),))
    assert told(solved(one, recovery_window="1d", daily=5)) == [(40, 59, False), (60, 105, True)]
    assert told(solved(one, recovery_window="1d", daily=5, binlogs="window")) == [(40, 89, False), (90, 105, True)]
    with pytest.raises(ValidationError, match="needs a recovery_window"):
        rules(daily=5, binlogs="window")
    with pytest.raises(ValidationError, match="keeps nothing"):
        rules(binlogs="all")


@pytest.mark.parametrize("change", [{"pinned": True}, {"proved_at": days_ago(1)}])
def test_what_somebody_keeps_or_was_proved_needs_its_logs_outside_the_window_too(change: dict[str, Any]) -> None:
    backups = [*FIVE[:-1], replace(FIVE[-1], **change)]
    decisions = solved(view(backups, runs=(run(40, 105, 6, 0),)), recovery_window="1d", daily=5, binlogs="window")
    assert told(decisions) == [(40, 59, False), (60, 105, True)]


def test_what_a_restore_reads_keeps_its_logs() -> None:
    one = view(FIVE, runs=(run(40, 105, 6, 0),), being_read=frozenset({"d4"}))
    assert told(solved(one, recovery_window="1d", binlogs="window")) == [(40, 59, False), (60, 105, True)]


def test_a_hold_no_rules_and_no_restorable_backup_keep_every_log() -> None:
    one = view(FIVE, runs=(run(1, 105, 60, 0),), branches=(branch(),))
    assert told(solved(replace(one, hold="court"), daily=1)) == [(1, 105, True)]
    assert told(solve(one, None, now=NOW, zone=UTC)) == [(1, 105, True)]
    broken = tuple(replace(backup, usable=False) for backup in FIVE)
    assert told(solved(replace(one, backups=broken), daily=1)) == [(1, 105, True)]


def test_a_backup_whose_place_is_not_certain_keeps_what_may_be_its_own() -> None:
    unsure = [*FIVE[:2], stored("lost", days_ago(3.5))]
    decisions = solved(view(unsure, runs=(run(1, 20, 9, 6), run(40, 105, 6, 0))), daily=9)
    assert told(decisions) == [(1, 20, False), (40, 105, True)]
    assert "is uncertain" in decisions.runs[1].reason


def test_nothing_of_the_branch_that_the_server_is_on_goes_before_a_backup_lies_on_it() -> None:
    reset = branch(NEW, reason=BranchReason.RESET, parent=OLD)
    one = view(FIVE, runs=(run(40, 105, 6, 0.05), run(1, 3, 0.05, 0, on=NEW)), branches=(branch(), reset))
    assert told(solved(one, daily=2)) == [(40, 89, False), (90, 105, True), (1, 3, True)]
    fresh = replace(one, backups=(placed("fresh", 0.01, 2, on=NEW), *FIVE))
    assert told(solved(fresh, daily=1)) == [(40, 105, False), (1, 1, False), (2, 3, True)]


def test_a_backup_needs_the_branches_that_fork_off_later_and_of_lost_tails_the_files_before() -> None:
    tail = branch(
        NEW,
        reason=BranchReason.LOST_TAIL,
        parent=OLD,
        fork=Position("binlog.000070", 400, ""),
        names_go_on=True,
        first_number=71,
    )

    def first(*backups: Stored) -> tuple[int, int]:
        found = first_files(backups, (branch(), tail))
        return found[OLD].number, found[NEW].number

    assert first(placed("a", 3, 65)) == (65, 0)
    assert first(placed("b", 1, 75, on=NEW)) == (NOTHING, 75)
    assert first(placed("c", 1, 69, on=NEW)) == (69, 69)
    assert first(placed("d", 3, 72)) == (72, 0), "it is on the tail that was lost; the present branch stays anyhow"
    unknown = replace(tail, fork=None, names_go_on=False)
    assert first_files([placed("a", 3, 65)], (branch(), unknown, branch("z", parent=NEW)))[NEW].number == NOTHING


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.booleans(),
)
def test_what_a_kept_backup_can_be_rolled_forward_with_never_goes(
    found: Sequence[tuple[int, int]], count: int, window: bool
) -> None:
    backups = [placed(f"b{number}", 61 - at, at) for number, (at, _) in enumerate(found)]
    runs, at = [], 1
    for _place, length in sorted(found):
        runs.append(run(at, at + length, 61 - min(at, 60), 61 - min(at + length, 60)))
        at += length + 2
    keep: dict[str, Any] = {"daily": count, **({"recovery_window": "20d"} if window else {})}
    decisions = solved(view(backups, runs=tuple(runs)), **keep)
    oldest = min(one.backup.log_position.number for one in decisions.kept if one.backup.log_position)
    assert all(one.run.last < oldest for one in decisions.runs if not one.keep)
    going = [one.run.last for one in decisions.runs if not one.keep]
    staying = [one.run.first for one in decisions.runs if one.keep]
    assert not going or not staying or max(going) < min(staying), "no hole appears in what stays"
    assert sum(one.run.last - one.run.first + 1 for one in decisions.runs) == sum(r.last - r.first + 1 for r in runs)


# -- applied


def logged(one: Installation, *, destinations: Sequence[str] = ("local",)) -> None:
    """Three files for each day since 30 days ago, and the binary log positions of the installation's backups."""
    now = one.clock()
    begin = now - timedelta(days=30)
    one.catalog.binlogs.add_branch(branch(noticed_at=begin))
    for number in range(1, 91):
        at = begin + timedelta(hours=8) * (number - 1)
        segment = Segment(
            SERVER,
            OLD,
            f"binlog.{number:06d}",
            number,
            0,
            100,
            Ending.ROTATED,
            f"0-1-{number}",
            f"0-1-{number + 1}",
            1,
            at,
            at + timedelta(hours=8),
            False,
            (1,),
            "mariadb",
            "10.11.6",
            "0" * 64,
        )
        for destination in destinations:
            one.catalog.binlogs.add_segment(segment, destination, 50, at)
            put_bytes(one.at(destination), layout.segment_key(SERVER, segment.key), b"{}")
    for record in one.catalog.backups.list(SERVER):
        one.catalog.backups.add(at_its_place(record, begin), replace=True)


def at_its_place(record: BackupRecord, begin: datetime) -> BackupRecord:
    number = int((record.finished_at - begin) / timedelta(hours=8)) + 1
    return replace(record, position=Position(f"binlog.{number:06d}", 40, f"0-1-{number}"), server_uuid="u")


def files(one: Installation, place: str = "local") -> list[int]:
    """Those that both the catalog and the destination have."""
    known = [found.key.number for found in one.catalog.binlogs.segments(SERVER, OLD) if place in found.destinations]
    there = {
        owner[1].number
        for info in one.at(place).list(layout.BINLOGS)
        if (owner := layout.segment_of(info.key)) is not None
    }
    assert set(known) == there
    return known


Make = Callable[..., Installation]


@pytest.fixture
def month(installation: Make) -> Callable[[str], Installation]:
    """Makes an installation with a backup of each of the last ten days and the logs of thirty."""

    def make(keep: str) -> Installation:
        one = installation(keep)
        one.daily(10)
        logged(one)
        return one

    return make


def test_the_preview_tells_what_goes_and_why_and_changes_nothing(month: Callable[[str], Installation]) -> None:
    one = month("{local: {daily: 3}}")
    (decisions,) = preview(one.wiring, SERVER, now=one.clock())
    gone, kept = decisions.runs
    assert gone.run.name == f"binlog.000001 to binlog.{gone.run.last:06d}"
    assert kept.run.name == f"binlog.{gone.run.last + 1:06d} to binlog.000090"
    assert (gone.keep, kept.keep) == (False, True)
    assert (gone.run.bytes, kept.run.bytes) == (50 * gone.run.last, 50 * (90 - gone.run.last))
    assert "can still be undeleted" in gone.reason
    assert files(one) == list(range(1, 91))
    assert decisions.recoverable[0].until > one.clock() - timedelta(hours=1), "up to the end of the logs"


def test_logs_go_after_the_backups_that_needed_them(month: Callable[[str], Installation]) -> None:
    one = month("{local: {daily: 3}}")
    done = apply(one.wiring, SERVER, one.run(), really=True)
    oldest = min(int(record.position.file[-6:]) for record in one.catalog.backups.list(SERVER))
    assert files(one) == list(range(oldest, 91)), "what can be undeleted can still be rolled forward"
    assert any("can still be undeleted" in text for text in done.held)
    one.clock.move(days=2)
    apply(one.wiring, SERVER, one.run(), really=True)
    apply(one.wiring, SERVER, one.run(), really=True)
    left = min(int(record.position.file[-6:]) for record in one.catalog.backups.list(SERVER))
    assert left > oldest
    assert files(one) == list(range(left, 91))
    (found,) = one.catalog.binlogs.runs(SERVER)
    assert (found.first_number, found.last_number, found.segments) == (left, 90, 91 - left)


def test_a_kill_on_the_way_leaves_no_hole_in_what_stays(
    month: Callable[[str], Installation], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = month("{local: {daily: 10}}")
    monkeypatch.setattr(logretention, "_BATCH", 3)
    cancel = threading.Event()
    steps = iter(range(100))

    def fence() -> None:
        if next(steps) == 4:
            raise RefusedError("another worker has it")

    with pytest.raises(RefusedError, match="another worker"):
        apply(one.wiring, SERVER, one.run(cancel=cancel, fence=fence))
    there = files(one)
    assert 1 < there[0] < 60
    assert there == list(range(there[0], 91))


def test_logs_that_a_restore_reads_since_a_moment_ago_stay(month: Callable[[str], Installation]) -> None:
    one = month("{local: {recovery_window: 2d, daily: 10, binlogs: window}}")
    (decisions,) = preview(one.wiring, SERVER, now=one.clock())
    assert any(not item.keep for item in decisions.runs)
    middle = sorted(record.id for record in one.catalog.backups.list(SERVER))[4]
    with Pin(one.at(), "20261121T040000Z-0000000a", [(SERVER, middle)], clock=one.clock):
        done = clear(one.wiring, one.at(), decisions, one.run())
    assert any("restore 20261121T040000Z-0000000a reads here" in text for text in done.held)
    assert files(one) == list(range(1, 91))


def test_a_rule_that_strips_many_backups_of_their_logs_at_once_needs_a_word(
    month: Callable[[str], Installation],
) -> None:
    one = month("{local: {daily: 10}}")
    apply(one.wiring, SERVER, one.run())
    before = files(one)
    one.write("{local: {recovery_window: 1d, daily: 10, binlogs: window}}")
    with pytest.raises(RefusedError, match="more than half") as refused:
        apply(one.wiring, SERVER, one.run())
    assert "binary logs that" in refused.value.detail
    assert files(one) == before
    done = apply(one.wiring, SERVER, one.run(), really=True)
    assert done.cleared["local"].segments == len(before) - len(files(one)) > 0
    assert done.as_json()["binlogs"]["local"]["bytes"] == 50 * done.cleared["local"].segments


def test_each_destination_keeps_what_its_own_backups_need(installation: Make) -> None:
    one = installation("{local: {daily: 2}, offsite: {daily: 10}}", "local", "offsite")
    one.daily(10)
    logged(one, destinations=("local", "offsite"))
    for _ in range(3):
        apply(one.wiring, SERVER, one.run(), really=True)
        one.clock.move(days=1.5)
    assert files(one)[0] > files(one, "offsite")[0]
    assert {run.destination: run.first_number for run in one.catalog.binlogs.runs(SERVER)} == {
        "local": files(one)[0],
        "offsite": files(one, "offsite")[0],
    }


def test_a_full_disk_is_relieved_of_logs_that_nobody_needs(
    month: Callable[[str], Installation], catalog: Catalog
) -> None:
    one = month("{local: {daily: 10}}")
    assert make_room(one.wiring, "local", 0, one.run())
    oldest = min(int(record.position.file[-6:]) for record in catalog.backups.list(SERVER))
    assert files(one) == list(range(oldest, 91))
    assert not make_room(one.wiring, "local", 0, one.run())
    assert len(one.present()) == 10


def test_what_is_streamed_goes_on_in_an_outlook() -> None:
    older, newest = streamed([run(40, 60, 9, 7), run(70, 105, 5, 0)], NOW)
    assert (older.last_at, older.log_position) == (days_ago(7), None)
    assert newest.last_at > NOW + SPAN
    (begun,) = streamed((), NOW)
    assert begun.first_at == NOW
    decisions = solved(view([stored("base", days_ago(-1))], runs=(begun,)), recovery_window="7d")
    assert [item.keep for item in decisions.runs] == [True]


def test_binary_logs_are_part_of_what_fills_a_destination(month: Callable[[str], Installation]) -> None:
    one = month("{local: {daily: 10}}")
    found = forecast(one.wiring, "local")
    assert found is not None
    (shop,) = found.servers
    assert shop.stored == 10 * 10 + 90 * 50
    assert shop.added == pytest.approx(10 * 9 / 10 + 150, rel=0.2)

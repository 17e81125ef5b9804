from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, Stats, partial_words
from backupd.model.errors import NotFoundError, RefusedError
from backupd.model.server_facts import Position
from restore.planning.plan import Plan, Rate
from restore.planning.planner import Preferences, make_plan
from restore.planning.starting_backup import same_position
from restore.planning.target import parse_target

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def backup(
    hour: int,
    *,
    state: BackupState = BackupState.COMPLETE,
    kind: BackupKind = BackupKind.PHYSICAL_FULL,
    parent: str | None = None,
    copies: tuple[str, ...] = ("local", "offsite"),
) -> BackupRecord:
    finished = datetime(2026, 11, 21, hour, tzinfo=UTC)
    return BackupRecord(
        id=f"20261121T{hour:02}0000Z-0000000{hour % 10}",
        server="shop",
        kind=kind,
        state=state,
        parent=parent,
        started_at=finished - timedelta(minutes=5),
        finished_at=finished,
        stats=Stats(bytes_source=10**9, bytes_stored=4 * 10**8, bytes_new=10**8, files=200, files_linked=150),
        position=Position("bin.000007", hour * 1000, f"0-1-{hour * 100}"),
        flavour="mariadb",
        server_version="10.11.19",
        tool_version="10.11.19",
        copies=tuple(Copy(name, "complete", finished) for name in copies),
    )


def plan(target: str, backups: list[BackupRecord], preferences: Preferences | None = None) -> Plan:
    return make_plan("shop", backups, parse_target(target), preferences or Preferences(), now=NOW)


BACKUPS = [backup(2), backup(4), backup(6)]


def test_latest_means_the_newest_restorable_backup_and_says_why() -> None:
    newest = plan("latest", BACKUPS)
    assert newest.backup_id == BACKUPS[2].id
    assert "newest restorable" in newest.reason
    assert newest.warnings == ()


def test_latest_passes_over_a_damaged_backup_and_says_so() -> None:
    newest = plan("latest", [*BACKUPS[:2], replace(BACKUPS[2], state=BackupState.DAMAGED)])
    assert newest.backup_id == BACKUPS[1].id
    assert any("damaged" in warning and BACKUPS[2].id in warning for warning in newest.warnings)


def test_latest_passes_over_a_partial_backup_while_there_is_a_whole_one_and_by_name_says_what_it_lacks() -> None:
    partial = replace(BACKUPS[2], missing=("shop.cache",))
    chosen = plan("latest", [*BACKUPS[:2], partial])
    assert chosen.backup_id == BACKUPS[1].id
    assert chosen.reason.startswith("the newest restorable backup that lacks no tables")
    assert f"--to backup:{partial.id}" in chosen.reason
    assert plan("latest", [partial]).backup_id == partial.id
    named = plan(f"backup:{partial.id}", [*BACKUPS[:2], partial])
    assert partial_words(partial.id, ["shop.cache"]) in named.warnings, "in the restore's own words, so it is said once"


def test_a_doubtful_backup_is_chosen_by_its_name_only() -> None:
    doubtful = replace(BACKUPS[2], doubtful="it may not be prepared")
    assert plan("latest", [*BACKUPS[:2], doubtful]).backup_id == BACKUPS[1].id
    assert plan(f"backup:{doubtful.id}", [*BACKUPS[:2], doubtful]).backup_id == doubtful.id


def test_an_old_newest_backup_is_pointed_out() -> None:
    old = make_plan("shop", BACKUPS, parse_target("latest"), Preferences(), now=NOW + timedelta(days=9))
    assert any("9d" in warning for warning in old.warnings)


@pytest.mark.parametrize(
    "target", ["gtid:0-1-400", "bin.000007:4000", "2026-11-21T04:00:00Z", "backup:20261121T040000Z-00000004"]
)
def test_a_target_that_is_exactly_a_backups_position_needs_no_binary_log(target: str) -> None:
    assert plan(target, BACKUPS).backup_id == BACKUPS[1].id


@pytest.mark.parametrize(
    ("target", "before", "after"),
    [
        ("2026-11-21T05:00:00Z", 4, 6),
        ("2026-11-21T01:00:00Z", None, 2),
        ("2026-11-21T11:00:00Z", 6, None),
        ("gtid:0-1-401", 4, 6),
        ("before-gtid:0-1-400", 2, 4),
        ("bin.000007:4001", 4, 6),
        ("bin.000001:9", None, 2),
        ("bin.000010:9", 6, None),
    ],
)
def test_a_target_between_backups_is_refused_with_the_nearest_points_named(
    target: str, before: int | None, after: int | None
) -> None:
    with pytest.raises(RefusedError) as refused:
        plan(target, BACKUPS)
    detail = refused.value.detail
    assert (f"nearest before: backup:20261121T0{before}" in detail) == (before is not None)
    assert (f"nearest after:  backup:20261121T0{after}" in detail) == (after is not None)
    assert "--to backup:" in refused.value.hint


@pytest.mark.parametrize("target", ["latest", f"backup:{BACKUPS[0].id}"])
def test_without_a_replay_no_transaction_is_left_out_and_asking_for_it_is_refused(target: str) -> None:
    with pytest.raises(RefusedError, match=r"^0-1-7 cannot be left out: the backup is the target"):
        plan(target, BACKUPS, Preferences(exclude=("0-1-7",)))
    old = replace(BACKUPS[0], flavour="mysql", server_version="5.6.24")
    with pytest.raises(RefusedError, match=r"cannot be left out: binary logs are replayed onto mysql 5\.7\.6"):
        plan(f"backup:{old.id}", [old], Preferences(exclude=("0-1-7",)))


def test_a_target_that_cannot_be_ordered_still_names_what_is_recoverable() -> None:
    with pytest.raises(RefusedError, match="recoverable") as refused:
        plan("gtid:3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5", BACKUPS)
    assert "recoverable: backup:" in refused.value.detail


def test_an_unknown_branch_or_backup_or_server_is_not_found() -> None:
    for target, backups in (
        ("latest@other", BACKUPS),
        ("backup:20261121T040000Z-ffffffff", BACKUPS),
        ("latest", []),
    ):
        with pytest.raises(NotFoundError):
            plan(target, backups)


def test_a_deleted_or_logical_backup_is_refused_by_id_and_never_chosen_otherwise() -> None:
    gone = replace(backup(8), state=BackupState.DELETED)
    dump = replace(backup(9), kind=BackupKind.LOGICAL)
    assert plan("latest", [*BACKUPS, gone, dump]).backup_id == BACKUPS[2].id
    with pytest.raises(RefusedError, match="deleted"):
        plan(f"backup:{gone.id}", [gone])
    with pytest.raises(RefusedError, match="logical"):
        plan(f"backup:{dump.id}", [dump])


def test_an_increment_brings_its_whole_chain_in_order() -> None:
    one = backup(3, kind=BackupKind.PHYSICAL_INCREMENTAL, parent=BACKUPS[0].id)
    two = backup(5, kind=BackupKind.PHYSICAL_INCREMENTAL, parent=one.id)
    assert plan(f"backup:{two.id}", [BACKUPS[0], two, one]).chain == (BACKUPS[0].id, one.id, two.id)
    with pytest.raises(NotFoundError, match=one.id):
        plan(f"backup:{two.id}", [BACKUPS[0], two])


def test_latest_is_an_increment_and_says_its_chain_and_all_of_its_bytes() -> None:
    one = replace(backup(7, kind=BackupKind.PHYSICAL_INCREMENTAL, parent=BACKUPS[2].id))
    newest = plan("latest", [*BACKUPS, one])
    assert newest.chain == (BACKUPS[2].id, one.id)
    assert (newest.bytes_source, newest.bytes_stored) == (2 * 10**9, 8 * 10**8)
    assert "of 2 backups" in newest.steps[0].title
    assert "1 increment" in newest.steps[1].title
    assert newest.position == one.position


def test_an_increment_whose_parent_cannot_be_used_is_passed_over_and_named() -> None:
    one = backup(7, kind=BackupKind.PHYSICAL_INCREMENTAL, parent=BACKUPS[2].id)
    for state in (BackupState.DAMAGED, BackupState.DELETED):
        torn = [*BACKUPS[:2], replace(BACKUPS[2], state=state), one]
        newest = plan("latest", torn)
        assert newest.chain == (BACKUPS[1].id,)
        assert any(one.id in text and "parent backup" in text for text in newest.warnings)
    with pytest.raises(RefusedError, match=f"builds on {BACKUPS[2].id}, marked as deleted") as refused:
        plan(f"backup:{one.id}", torn)
    assert f"undelete {BACKUPS[2].id}" in refused.value.hint
    elsewhere = replace(one, copies=(Copy("vault", "complete", one.finished_at),))
    assert plan("latest", [*BACKUPS, elsewhere]).chain == (BACKUPS[2].id,)


def test_a_copy_that_is_marked_deleted_is_not_read() -> None:
    both = backup(2)
    expired = replace(both, copies=(replace(both.copies[0], state="deleted"), both.copies[1]))
    assert plan("latest", [expired]).destinations == ("offsite",)


def test_destinations_are_ordered_by_preference_and_damaged_copies_come_last() -> None:
    both = backup(2)
    assert plan("latest", [both], Preferences(destinations=("offsite",))).destinations == ("offsite", "local")
    bad = replace(both, copies=(replace(both.copies[0], state="damaged"), both.copies[1]))
    worse = plan("latest", [bad], Preferences(destinations=("local",)))
    assert worse.destinations == ("offsite", "local")
    assert any("local is damaged" in warning for warning in worse.warnings)


def test_a_start_that_was_measured_counts_and_a_speed_that_was_not_is_said_to_be_assumed() -> None:
    rate = Rate(10e6, 12.5, samples=4, speed_assumed=True)
    assert rate.estimate(20_000_000) == 14.5
    assert rate.basis == "measured here: 12.5 s to begin over 4 runs; assumed: 10 MB/s"
    assert Rate(1e18, samples=1).basis == "measured here: nearly no time over 1 run"
    assert Rate(10e6, 12.5, samples=4).basis == "measured here: 10 MB/s + 12 s over 4 runs"


def test_estimates_come_from_measured_rates_and_say_so() -> None:
    measured = plan(
        "latest",
        BACKUPS,
        Preferences(rates={"fetched": Rate(2e8, 1.0, samples=4)}, start=True, datadir=Path("/srv/mysql")),
    )
    steps = {step.name: step for step in measured.steps}
    assert list(steps) == ["fetched", "prepared", "restored", "started"]
    assert steps["fetched"].seconds == pytest.approx(6.0)
    assert "measured here: 200 MB/s" in steps["fetched"].estimate
    assert "assumed" in steps["prepared"].estimate
    assert measured.seconds == pytest.approx(sum(step.seconds for step in measured.steps))
    assert "/srv/mysql" in steps["restored"].title
    assert measured.as_json()["steps"][0]["bytes"] == 10**9


def test_positions_are_equal_whatever_the_order_of_their_domains_but_never_without_a_binary_log() -> None:
    assert same_position(Position("a.1", 4, "0-1-5,1-1-9"), Position("b.2", 5, "1-1-9, 0-1-5"))
    assert not same_position(Position("a.1", 4, "0-1-5"), Position("a.1", 4, "0-1-6"))
    assert same_position(Position("a.1", 4), Position("a.1", 4, "0-1-6"))
    assert not same_position(Position(), Position())


def test_the_newest_by_time_is_chosen_and_one_that_is_ahead_by_position_is_named() -> None:
    ahead = replace(backup(2), position=Position("bin.000007", 99_000, "0-1-900"))
    chosen = plan("latest", [ahead, backup(4), backup(6)])
    assert chosen.backup_id == backup(6).id
    assert any(f"--to backup:{ahead.id}" in text and backup(6).id in text for text in chosen.warnings)
    for position in (Position(), Position("other.000009", 99_000), Position("bin.000007", 99_000, "0-1-1")):
        unclear = plan("latest", [replace(ahead, position=position), backup(4), backup(6)])
        assert (unclear.backup_id, unclear.warnings) == (backup(6).id, ())


def test_a_binary_log_that_began_again_does_not_bring_old_data_back() -> None:
    anew = replace(backup(8), position=Position("bin.000001", 400, "0-1-3"))
    for older in (BACKUPS, BACKUPS[:1]):
        chosen = plan("latest", [*older, anew])
        assert chosen.backup_id == anew.id
        assert any(f"--to backup:{older[-1].id}" in text for text in chosen.warnings)


def test_where_every_backup_is_damaged_they_are_listed_with_the_way_to_try_one() -> None:
    damaged = [replace(b, state=BackupState.DAMAGED) for b in BACKUPS]
    with pytest.raises(NotFoundError, match="3 exist, but are marked as damaged") as none:
        plan("latest", damaged)
    assert all(b.id in none.value.detail for b in damaged)
    assert f"--to backup:{BACKUPS[2].id}" in none.value.hint
    assert plan(f"backup:{BACKUPS[2].id}", damaged).backup_id == BACKUPS[2].id


def test_latest_never_means_a_backup_of_another_server_of_that_name() -> None:
    theirs = [replace(backup(hour), server_uuid="A") for hour in (2, 6)]
    ours = replace(backup(4), server_uuid="B", manifest="f" * 64)
    found = plan("latest", [*theirs, ours])
    assert found.backup_id == ours.id
    assert any("of server A; ours is B" in warning for warning in found.warnings)
    assert plan(f"backup:{theirs[1].id}", [*theirs, ours]).backup_id == theirs[1].id
    with pytest.raises(RefusedError):
        plan("2026-11-21T02:00:00Z", [*theirs, ours])
    with pytest.raises(NotFoundError, match="of its own") as refused:
        plan("latest", [*theirs, replace(ours, state=BackupState.DAMAGED)])
    assert theirs[1].id in refused.value.hint


def test_after_a_rebuild_the_moments_before_a_server_was_replaced_are_still_targets() -> None:
    before, after = replace(backup(2), server_uuid="A"), replace(backup(4), server_uuid="B", manifest="f" * 64)
    assert plan("latest", [before, after]).backup_id == after.id
    assert plan("2026-11-21T02:00:00Z", [before, after]).backup_id == before.id
    known = replace(before, manifest="e" * 64)
    assert plan("2026-11-21T02:00:00Z", [known, after]).warnings == ()


def test_what_every_backup_of_a_chain_warns_of_is_said_once() -> None:
    note = "MEMORY tables are restored empty"
    chain = [replace(backup(2), warnings=(note, "the clock jumped"))]
    for hour in (3, 4):
        chain.append(replace(backup(hour, kind=BackupKind.PHYSICAL_INCREMENTAL, parent=chain[-1].id), warnings=(note,)))
    assert plan("latest", chain).warnings == (f"{chain[-1].id}: {note}", f"{chain[0].id}: the clock jumped")

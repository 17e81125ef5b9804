from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from backupd.backup.server_checks import rocks_words
from backupd.cli.commands.binlog import show_timeline
from backupd.cli.output import Screen
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy, Stats
from backupd.model.binlog import Branch, BranchReason, Ending, Run
from backupd.model.server_facts import Position
from backupd.model.table import TableName
from backupd.recovery.runs import executed, same_state
from backupd.recovery.timeline import Objectives, Timeline, timeline

START = datetime(2026, 11, 21, tzinfo=UTC)
NOW = START + timedelta(hours=12)
FIRST = Branch("shop", "20261121T000000Z-00000001", START, BranchReason.FIRST, "", "mariadb", "bin", 1)


def at(hour: float) -> datetime:
    return START + timedelta(hours=hour)


def backup(hour: int, file: int, *places: str) -> BackupRecord:
    return BackupRecord(
        id=f"20261121T{hour:02}0000Z-00000000",
        server="shop",
        kind=BackupKind.PHYSICAL_FULL,
        state=BackupState.COMPLETE,
        parent=None,
        started_at=at(hour) - timedelta(minutes=1),
        finished_at=at(hour),
        stats=Stats(10**9, 10**8, 10**8, 10, 0),
        position=Position(f"bin.{file:06}", 400, f"0-1-{file * 10}"),
        flavour="mariadb",
        server_version="10.11.19",
        tool_version="10.11.19",
        copies=tuple(Copy(name, "complete", at(hour)) for name in places or ("local", "offsite")),
    )


def run(destination: str, first: int, last: int, until: float, *, ending: Ending = Ending.ROTATED) -> Run:
    return Run(
        "shop",
        FIRST.id,
        destination,
        first,
        0,
        last,
        1000,
        f"0-1-{first * 10 - 10}",
        f"0-1-{last * 10}",
        at(first),
        at(until),
        at(until),
        1000 * (last - first + 1),
        500,
        last - first + 1,
        10,
        ending=ending,
    )


BACKUPS = (backup(2, 3), backup(9, 8, "local"))
WHOLE = (run("local", 1, 12, 11.9, ending=Ending.OPEN), run("offsite", 1, 11, 11))


def made(*runs: Run, rpo: float = 60) -> Timeline:
    return timeline(
        "shop",
        BACKUPS,
        (FIRST,),
        runs,
        now=NOW,
        objectives=Objectives(timedelta(seconds=rpo), timedelta(hours=1)),
        predicted_rto=timedelta(minutes=9),
    )


def test_a_window_goes_from_the_first_backup_to_what_was_confirmed_and_each_destination_has_its_end() -> None:
    found = made(*WHOLE)
    assert [(w.begin, w.end, w.destinations) for w in found.windows] == [(at(2), at(11.9), ("local", "offsite"))]
    assert found.latest == at(11.9)
    reaches = {reach.name: reach for reach in found.destinations}
    assert (reaches["offsite"].latest, reaches["offsite"].behind) == (at(11), timedelta(minutes=54))
    assert (found.rpo, found.rpo_kept, found.rto_kept) == (timedelta(minutes=6), False, True)


def test_of_a_server_of_which_only_dumps_are_taken_the_moments_are_those_of_tables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dumps = (
        replace(backup(2, 3), kind=BackupKind.LOGICAL),
        replace(backup(9, 8, "local"), kind=BackupKind.LOGICAL, table_set="two"),
    )
    promised = Objectives(timedelta(minutes=10), timedelta(hours=1))
    found = timeline("shop", dumps, (FIRST,), WHOLE, now=NOW, objectives=promised, by_dumps=True)
    assert found.tables_only
    assert [(w.begin, w.end, w.destinations) for w in found.windows] == [(at(2), at(11.9), ("local", "offsite"))]
    assert (found.rpo, found.rpo_kept, found.rto_kept) == (timedelta(minutes=6), True, None)
    assert found.as_json()["tables_only"] is True
    show_timeline(Screen(as_json=False), found)
    shown = capsys.readouterr().out
    assert shown.startswith(
        "tables of shop are recoverable up to 2026-11-21 11:54:00Z, 6m ago\n"
        "the whole server is not recoverable: its policy takes only logical backups, which restore tables\n"
    )
    assert "--kind full" not in shown
    nothing = timeline("shop", (), (FIRST,), WHOLE, now=NOW, objectives=promised, by_dumps=True)
    assert (nothing.latest, nothing.tables_only) == (None, True)
    show_timeline(Screen(as_json=False), nothing)
    assert "backupd backup shop --kind logical" in capsys.readouterr().out
    assert timeline("shop", dumps, (FIRST,), WHOLE, now=NOW).latest is None, "whose policy takes physical ones"
    whole = timeline("shop", (*dumps, backup(5, 5)), (FIRST,), WHOLE, now=NOW, by_dumps=True)
    assert (whole.tables_only, whole.windows[0].begin) == (False, at(5))


def test_of_tables_whose_changes_are_not_replayed_the_timeline_tells(capsys: pytest.CaptureFixture[str]) -> None:
    told = rocks_words([TableName("shop", "r")])
    rocks = replace(BACKUPS[1], warnings=("the clock was wrong", told))
    found = timeline("shop", (BACKUPS[0], rocks), (FIRST,), WHOLE, now=NOW)
    assert found.warnings == (f"{rocks.id}: {told}",)
    show_timeline(Screen(as_json=False), found)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        f"! {rocks.id}: the 1 tables of engine ROCKSDB are in physical backups, and come back only with a restore "
        "of the whole server as it was at a backup: the private server of a test restore, of a restore of tables "
        "and of a replay does not load that engine, so these backups are never proved, and a restore to a later "
        "moment stops at the first change of their rows: shop.r"
    ) in shown
    assert timeline("shop", (replace(rocks, finished_at=at(1)), BACKUPS[1]), (FIRST,), WHOLE, now=NOW).warnings == ()
    assert timeline("shop", (rocks,), (), (), now=NOW).warnings == (), "nothing is replayed at all"


def test_before_the_first_backup_is_due_no_promise_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    promised = Objectives(timedelta(minutes=10), timedelta(hours=1))
    young = timeline("shop", (), (), (), now=NOW, objectives=promised, first_due=at(13))
    assert (young.rpo_kept, young.rto_kept, young.as_json()["objectives"]["kept"]) == (None, None, True)
    show_timeline(Screen(as_json=False), young)
    shown = capsys.readouterr().out
    assert "nothing of shop is recoverable yet: its first backup is due at 2026-11-21 13:00:00Z" in shown
    assert "NOT KEPT" not in shown
    assert timeline("shop", (), (), (), now=NOW, objectives=promised).rpo_kept is False, "it was due"


def test_a_backup_of_the_future_does_not_hide_for_how_long_nothing_was_backed_up() -> None:
    """As it is there after the clock was ahead for a while."""
    wrong = backup(20, 8)
    found = timeline("shop", (*BACKUPS[:1], wrong), (), (), now=NOW, objectives=Objectives(timedelta(hours=9)))
    assert (found.latest, found.rpo, found.rpo_kept) == (at(2), timedelta(hours=10), False)
    assert [(reach.latest, reach.rpo) for reach in found.destinations if reach.name == "local"] == [
        (at(2), timedelta(hours=10))
    ]
    assert "ended in the future" in found.warnings[0]
    alone = timeline("shop", (wrong,), (), (), now=NOW, objectives=Objectives(timedelta(hours=9)))
    assert (alone.latest, alone.rpo) == (wrong.finished_at, timedelta(0)), "the clock may be behind now"


def test_a_missing_segment_splits_the_window_and_the_gap_names_both_places() -> None:
    torn = (run("local", 1, 5, 5), run("local", 7, 12, 11.9, ending=Ending.OPEN))
    document = made(*torn).as_json()
    assert [(w["from"], w["to"]) for w in document["windows"]] == [
        ("2026-11-21T02:00:00Z", "2026-11-21T05:00:00Z"),
        ("2026-11-21T09:00:00Z", "2026-11-21T11:54:00Z"),
    ]
    assert [
        (gap["after"]["file"], gap["after"]["pos"], gap["before"]["file"], gap["destination"])
        for gap in document["gaps"]
    ] == [("bin.000005", 1000, "bin.000007", "")]
    assert "bin.000005:1000 and bin.000007:0" in document["windows"][0]["reason_end"]


def test_a_gap_at_one_destination_is_filled_by_another_and_named_all_the_same() -> None:
    found = made(run("local", 1, 5, 5), run("local", 7, 12, 11.9), run("offsite", 1, 11, 11))
    assert [(w.begin, w.end) for w in found.windows] == [(at(2), at(11.9))]
    assert [(gap.destination, gap.after.file) for gap in found.gaps] == [("local", "bin.000005")]


def test_without_binary_logs_every_backup_is_one_moment() -> None:
    found = timeline("shop", BACKUPS, (), (), now=NOW)
    assert [(w.begin, w.end, w.reason_end) for w in found.windows] == [
        (at(2), at(2), "no binary logs are archived"),
        (at(9), at(9), "no binary logs are archived"),
    ]
    assert found.rpo_kept is None


def test_the_document_has_the_promised_fields() -> None:
    document = json.loads(json.dumps(made(*WHOLE).as_json()))
    assert {"windows", "gaps", "latest", "warnings", "destinations", "branches", "last_proof", "objectives"} <= set(
        document
    )
    assert {"from", "to", "reason_end", "branch", "base", "destinations"} <= set(document["windows"][0])
    assert set(document["destinations"][0]) == {"name", "latest", "behind_seconds", "rpo_seconds", "trouble"}
    assert set(document["branches"][0]) == {"id", "reason", "from", "to", "parent", "fork"}
    assert document["objectives"] == {
        "rpo": 60,
        "rto": 3600,
        "achieved_rpo": 360,
        "predicted_rto": 540,
        "rpo_kept": False,
        "rto_kept": True,
        "kept": False,
    }


def test_a_backup_between_two_histories_is_on_none_of_them() -> None:
    later = replace(
        FIRST,
        id="20261121T090100Z-00000002",
        noticed_at=at(9.1),
        since=at(8.9),
        reason=BranchReason.RESET,
        parent=FIRST.id,
    )
    found = timeline("shop", BACKUPS, (FIRST, later), [run("local", 1, 7, 8.9)], now=NOW)
    doubtful = next(window for window in found.windows if window.base is BACKUPS[1])
    assert (doubtful.run, doubtful.branch) == (None, "")
    assert "is uncertain" in doubtful.reason_end


def test_a_transaction_that_is_stamped_later_than_what_was_confirmed_moves_no_end() -> None:
    whole = run("local", 1, 12, 11, ending=Ending.OPEN)
    for stamp in (11.5, 12.5, 24 * 365):
        assert made(replace(whole, last_at=at(stamp))).latest == at(11), stamp
    assert made(replace(whole, last_at=at(11.5))).rpo == timedelta(hours=1)


def test_where_the_server_was_never_asked_a_stamp_that_has_not_come_yet_moves_no_end_either() -> None:
    unasked = replace(run("local", 1, 12, 11, ending=Ending.OPEN), confirmed_at=None)
    assert made(unasked).latest == at(11) - timedelta(microseconds=1)
    assert made(replace(unasked, last_at=at(12.1))).latest == at(9), "the last backup"


def test_what_was_confirmed_by_a_clock_that_was_ahead_says_nothing() -> None:
    window = made(replace(run("local", 1, 12, 11.5), confirmed_at=at(12.1))).windows[-1]
    assert (window.end, "because the clock was wrong" in window.reason_end) == (at(9), True)
    (window,) = made(replace(run("local", 1, 12, 11.5), confirmed_at=NOW + timedelta(seconds=2))).windows
    assert window.end == NOW, "two hosts differ a little"


def test_a_backup_before_a_confirmation_of_its_branch_is_on_it_whatever_the_next_branch_knew() -> None:
    """A spool that was put back noticed the third branch, and knew nothing of the second."""
    second = replace(
        FIRST,
        id="20261121T030000Z-00000002",
        noticed_at=at(3),
        since=at(2.9),
        reason=BranchReason.RESET,
        parent=FIRST.id,
    )
    third = replace(second, id="20261121T100000Z-00000003", noticed_at=at(10), since=at(2.5))
    of_second = replace(run("local", 1, 9, 9.5, ending=Ending.OPEN), branch=second.id, first_at=at(3))
    for confirmed, home in ((9.5, second.id), (8.0, "")):
        runs = [run("local", 1, 2, 2.5), replace(of_second, confirmed_at=at(confirmed))]
        found = timeline("shop", BACKUPS, (FIRST, second, third), runs, now=NOW)
        assert next(window.branch for window in found.windows if window.base is BACKUPS[1]) == home
        assert [end for _branch, end in found.branch_ends()] == [at(2.9), at(confirmed), None]


def test_a_latest_moment_of_a_branch_that_the_server_left_is_said_to_be_none_of_the_present() -> None:
    later = replace(FIRST, id="20261121T113000Z-00000002", noticed_at=at(11.5), since=at(11.3), parent=FIRST.id)
    found = timeline("shop", BACKUPS, (FIRST, later), [run("local", 1, 10, 11.2)], now=NOW)
    (warning,) = found.as_json()["warnings"]
    assert f"since 2026-11-21T11:30:00Z it continues as branch {later.id}" in warning
    assert "nothing can be restored yet; take a full backup now: backupd backup shop --kind full" in warning
    assert made(*WHOLE).warnings == ()


def test_what_troubles_a_destination_or_the_stream_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"local": "repository.json is not there"}
    found = timeline("shop", BACKUPS, (FIRST,), WHOLE, now=NOW, troubles=told, warnings=["the stream stands still"])
    assert [reach["trouble"] for reach in found.as_json()["destinations"]] == [told["local"], ""]
    assert found.warnings == (
        "the stream stands still",
        "destination local: repository.json is not there",
        "the latest point in time is recoverable only from local",
    )
    show_timeline(Screen(as_json=False), found)
    shown = " ".join(capsys.readouterr().out.split())
    assert "! the stream stands still" in shown
    assert "yes, see above" in shown


def test_states_are_compared_in_the_writing_of_either_family() -> None:
    uuid = "22222222-0000-0000-0000-000000000000"
    assert executed(f"{uuid}:1-7", f"{uuid}:1-4")
    assert not executed(f"{uuid}:1-4", f"{uuid}:1-7")
    assert executed("0-1-7", "0-2-7")
    assert not same_state("0-1-7", "0-2-7")
    assert not executed("0-1-7", f"{uuid}:1")


def test_the_picture_names_windows_gaps_destinations_and_broken_promises(capsys: pytest.CaptureFixture[str]) -> None:
    show_timeline(Screen(as_json=False), made(run("local", 1, 5, 5), run("local", 7, 12, 11.9)))
    shown = capsys.readouterr().out
    for text in (
        "recoverable up to 2026-11-21 11:54:00Z",
        "bin.000005:1000 ── bin.000007:0, everywhere",
        "objectives.rpo is 1m: NOT KEPT",
        "objectives.rto is 1h: kept",
        "last test",
    ):
        assert text in shown
    show_timeline(Screen(as_json=False), timeline("shop", (), (), (), now=NOW))
    assert "nothing of shop is recoverable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flavour", "version", "rolled"),
    [
        ("mysql", "5.6.24", False),
        ("percona", "5.7.5", False),
        ("mysql", "5.7.6", True),
        ("mysql", "8.0.36", True),
        ("mariadb", "5.5.68", True),
    ],
)
def test_a_server_that_no_log_is_replayed_onto_has_the_moments_of_its_backups_only(
    flavour: str, version: str, rolled: bool
) -> None:
    backups = [replace(one, flavour=flavour, server_version=version) for one in BACKUPS]
    found = timeline("shop", backups, (FIRST,), WHOLE, now=NOW)
    if rolled:
        assert [(w.begin, w.end) for w in found.windows] == [(at(2), at(11.9))]
        return
    assert [(w.begin, w.end) for w in found.windows] == [(at(2), at(2)), (at(9), at(9))]
    assert found.latest == at(9)
    assert all(
        f"replayed onto {flavour} 5.7.6 and later only, and this server is {version}" in w.reason_end
        for w in found.windows
    )

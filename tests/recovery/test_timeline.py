from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from backupd.cli.screen import Screen
from backupd.cli.timeline import show_timeline
from backupd.model.backup import BackupKind, BackupRecord, BackupState, Copy
from backupd.model.binlog import Branch, BranchReason, Ending, Run
from backupd.model.manifest import Stats
from backupd.model.server import Position
from backupd.recovery.runs import executed, same_state
from backupd.recovery.timeline import Objectives, Timeline, timeline

START = datetime(2026, 11, 21, tzinfo=UTC)
NOW = START + timedelta(hours=12)
FIRST = Branch("shop", "20261121T000000Z-00000001", START, BranchReason.FIRST, "", "mariadb", "bin", 1)


def at(hour: float) -> datetime:
    return START + timedelta(hours=hour)


def backup(hour: int, file: int, *places: str) -> BackupRecord:
    return BackupRecord(
        id=f"20261121T{hour:02}0000Z-00000000", server="shop", kind=BackupKind.PHYSICAL_FULL,
        state=BackupState.COMPLETE, parent=None, started_at=at(hour) - timedelta(minutes=1), finished_at=at(hour),
        stats=Stats(10**9, 10**8, 10**8, 10, 0), position=Position(f"bin.{file:06}", 400, f"0-1-{file * 10}"),
        flavour="mariadb", server_version="10.11.19", tool_version="10.11.19",
        copies=tuple(Copy(name, "complete", at(hour)) for name in places or ("local", "offsite")))


def run(destination: str, first: int, last: int, until: float, *, ending: Ending = Ending.ROTATED) -> Run:
    return Run("shop", FIRST.id, destination, first, 0, last, 1000, f"0-1-{first * 10 - 10}", f"0-1-{last * 10}",
               at(first), at(until), at(until), 1000 * (last - first + 1), 500, last - first + 1, 10, ending=ending)


BACKUPS = (backup(2, 3), backup(9, 8, "local"))
WHOLE = (run("local", 1, 12, 11.9, ending=Ending.OPEN), run("offsite", 1, 11, 11))


def made(*runs: Run, rpo: float = 60) -> Timeline:
    return timeline("shop", BACKUPS, (FIRST,), runs, now=NOW,
                    objectives=Objectives(timedelta(seconds=rpo), timedelta(hours=1)),
                    predicted_rto=timedelta(minutes=9))


def test_a_window_goes_from_the_first_backup_to_what_was_confirmed_and_each_destination_has_its_end() -> None:
    found = made(*WHOLE)
    assert [(w.begin, w.end, w.destinations) for w in found.windows] == [(at(2), at(11.9), ("local", "offsite"))]
    assert found.latest == at(11.9)
    reaches = {reach.name: reach for reach in found.destinations}
    assert (reaches["offsite"].latest, reaches["offsite"].behind) == (at(11), timedelta(minutes=54))
    assert (found.rpo, found.rpo_kept, found.rto_kept) == (timedelta(minutes=6), False, True)


def test_a_missing_segment_splits_the_window_and_the_gap_names_both_places() -> None:
    torn = (run("local", 1, 5, 5), run("local", 7, 12, 11.9, ending=Ending.OPEN))
    document = made(*torn).as_json()
    assert [(w["from"], w["to"]) for w in document["windows"]] == [
        ("2026-11-21T02:00:00Z", "2026-11-21T05:00:00Z"),
        ("2026-11-21T09:00:00Z", "2026-11-21T11:54:00Z")]
    assert [(gap["after"]["file"], gap["after"]["pos"], gap["before"]["file"], gap["destination"])
            for gap in document["gaps"]] == [("bin.000005", 1000, "bin.000007", "")]
    assert "bin.000005:1000 and bin.000007:0" in document["windows"][0]["reason_end"]


def test_a_gap_at_one_destination_is_filled_by_another_and_named_all_the_same() -> None:
    found = made(run("local", 1, 5, 5), run("local", 7, 12, 11.9), run("offsite", 1, 11, 11))
    assert [(w.begin, w.end) for w in found.windows] == [(at(2), at(11.9))]
    assert [(gap.destination, gap.after.file) for gap in found.gaps] == [("local", "bin.000005")]


def test_without_binary_logs_every_backup_is_one_moment() -> None:
    found = timeline("shop", BACKUPS, (), (), now=NOW)
    assert [(w.begin, w.end, w.reason_end) for w in found.windows] == [
        (at(2), at(2), "no binary logs are archived"), (at(9), at(9), "no binary logs are archived")]
    assert found.rpo_kept is None


def test_the_document_has_the_promised_fields() -> None:
    document = json.loads(json.dumps(made(*WHOLE).as_json()))
    assert {"windows", "gaps", "latest", "destinations", "branches", "last_proof", "objectives"} <= set(document)
    assert {"from", "to", "reason_end", "branch", "base", "destinations"} <= set(document["windows"][0])
    assert set(document["destinations"][0]) == {"name", "latest", "behind_seconds", "rpo_seconds"}
    assert set(document["branches"][0]) == {"id", "reason", "from", "to", "parent", "fork"}
    assert document["objectives"] == {"rpo": 60, "rto": 3600, "achieved_rpo": 360, "predicted_rto": 540,
                                      "rpo_kept": False, "rto_kept": True, "kept": False}


def test_a_backup_between_two_histories_is_on_none_of_them() -> None:
    later = replace(FIRST, id="20261121T090100Z-00000002", noticed_at=at(9.1), since=at(8.9), reason=BranchReason.RESET,
                    parent=FIRST.id)
    found = timeline("shop", BACKUPS, (FIRST, later), [run("local", 1, 7, 8.9)], now=NOW)
    doubtful = next(window for window in found.windows if window.base is BACKUPS[1])
    assert (doubtful.run, doubtful.branch) == (None, "")
    assert "not certain" in doubtful.reason_end


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
    for text in ("recoverable up to 2026-11-21 11:54:00Z", "bin.000005:1000 ── bin.000007:0, everywhere",
                 "objectives.rpo is 1m: NOT KEPT", "objectives.rto is 1h: kept", "last test"):
        assert text in shown
    show_timeline(Screen(as_json=False), timeline("shop", (), (), (), now=NOW))
    assert "nothing of shop is recoverable" in capsys.readouterr().out

"""Where a replay begins, what is remembered of it, and what two attempts have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.engine.physical.streaming import innodb_position
from backupd.model.binlog import ReplayLeg, ReplayMethod, ReplaySpec, Stop, Transaction
from backupd.model.proof import Phase
from backupd.model.server_facts import Position
from restore.datadir.staging import State
from restore.fetch.chain import merged
from restore.replay import private_replay as rollforward
from restore.replay.private_replay import RolledForward, beginning, goal_of
from tests.support.restores.stored_segments import BASE, BRANCH, transaction

START = Position("bin.000001", 300, "0-1-1")
STOP = Stop(BRANCH, "bin.000002", 500, "0-1-6", BASE)
LEG = ReplayLeg((), START, STOP, 740, 5)
FOUND = [transaction(2, 300, 400, 2), transaction(3, 450, 600, 3)]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[Path]:
    """Of a backup whose tool recorded its place too early, which no tool does as it is told."""

    def held(path: Path, since: int, until: int | None) -> list[Transaction]:
        return [one for one in FOUND if path.name == "bin.000001" and since <= one.start < (until or 2**40)]

    monkeypatch.setattr(rollforward, "_transactions", held)
    return [tmp_path / "bin.000001", tmp_path / "bin.000002"]


def at(files: Sequence[Path], place: Position | None, *, seconds: float = 60) -> rollforward.Beginning:
    return beginning(LEG, files, place, taken_until=BASE + timedelta(seconds=seconds), mariadb=True)


def test_a_replay_begins_where_the_backup_was_taken_unless_the_files_are_provably_further(
    files: Sequence[Path],
) -> None:
    further = at(files, Position("bin.000001", 600))
    assert further.position == Position("bin.000001", 600, "0-1-3")
    assert further.skipped == 2
    assert "2 transactions after" in further.reason
    for place in (
        None,
        Position("bin.000001", 300),
        Position("bin.000001", 200),
        Position("bin.000001", 550),
        Position("bin.000009", 4),
        Position("older.000007", 999),
    ):
        assert at(files, place).position == START, place
    # A place that was reached after the backup had ended is one of an earlier sequence of files.
    assert at(files, Position("bin.000001", 600), seconds=2.5).position == START


def test_the_place_that_innodb_names_is_read_from_what_the_tools_print() -> None:
    mariadb = (
        "InnoDB: Last binlog file './binlog.000001', position 77\n"
        "[00] Last binlog file ./binlog.000003, position 5102864\n"
    )
    assert innodb_position(["nothing", mariadb]) == Position("binlog.000003", 5102864)
    assert innodb_position(
        ["xtrabackup: Last MySQL binlog file position 1234, file name mysql-bin.000002\n", "done\n"]
    ) == Position("mysql-bin.000002", 1234)
    assert innodb_position(["InnoDB: Last MySQL binlog file position 0 98, file name ./b.000002\n"]) == Position(
        "b.000002", 98
    )
    assert innodb_position(["completed OK!\n"]) is None


def test_what_was_replayed_survives_being_written_down() -> None:
    rolled = RolledForward(
        STOP,
        ReplayMethod.APPLIER,
        "why",
        5,
        740,
        1.5,
        excluded=("0-1-4",),
        doubtful=("a",),
        events=("s.e: enabled",),
        prepared_xa=("'x'",),
        warnings=("w",),
    )
    assert RolledForward.from_json(rolled.as_json()) == rolled
    assert [word for word in ("'x'", "0-1-4", "a", "w") if not any(word in text for text in rolled.remarks)] == []


def test_an_interrupted_attempt_goes_on_for_any_target_until_logs_were_replayed_and_then_only_for_its_own() -> None:
    spec = ReplaySpec((LEG,), ReplayMethod.APPLIER, "", 740, 5, (1,))
    left_out = goal_of(replace(spec, exclude=("0-1-4",)))
    assert goal_of(spec) == f"{BRANCH} bin.000002:500"
    assert left_out != goal_of(spec)
    assert goal_of(None) == ""
    asked = State("r", "shop", "latest", ("full",), goal=goal_of(spec))
    for stage in ("fetching", "prepared", "replaying"):
        assert replace(asked, stage=stage, goal="", target="other").same_work(asked)
    for stage in ("replayed", "placing", "placed", "finished"):
        assert replace(asked, stage=stage).same_work(asked)
        assert not replace(asked, stage=stage, target="other", goal=left_out).same_work(asked)
        assert not replace(asked, stage=stage, goal="").same_work(asked)
        assert not replace(asked, stage=stage, goal=left_out).same_work(asked)
    # What was the latest moment when it began goes on being its goal.
    assert replace(asked, stage="placed", goal="earlier").same_work(asked)
    assert not replace(asked, stage="finished", goal="earlier").same_work(asked)
    # Words that mean it later, too.
    assert asked.words == f"bin.000002:500@{BRANCH}"
    assert replace(asked, target="before-gtid:0-1-4").words == "before-gtid:0-1-4"
    assert replace(asked, goal=left_out, target=f"latest@{BRANCH}").words == f"bin.000002:500@{BRANCH}"
    assert replace(asked, goal="").words == "backup:full"
    kept = replace(asked, stage="replayed", position=Position("bin.000001", 9), replay={"file": "x"})
    assert State.decode(kept.encode()) == kept


def test_parts_of_a_phase_are_told_as_one() -> None:
    assert merged([Phase("a", 1.0, 5), Phase("b", 2.0), Phase("a", 3.0, 7)]) == (Phase("a", 4.0, 12), Phase("b", 2.0))

"""Which binary logs a runbook takes for a moment, and what it refuses: its step followed word for word."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.model.binlog import Branch, BranchReason, Ending, Transaction
from backupd.model.server_facts import Position
from backupd.model.text import format_time
from backupd.transfer import log_segments
from restore.runbook.backup_runbook import choose_logs
from storage import layout
from storage.filesystem import FilesystemDestination
from tests.support.keys import Keys
from tests.support.restores.builder import Builder
from tests.support.restores.stored_segments import (
    BASE,
    BRANCH,
    SERVER,
    branch,
    content,
    segment,
    store_segment,
    transaction,
)

CHILD = "20261121T090500Z-bbbbbbbb"
FORKED = {
    "id": CHILD,
    "noticed_at": BASE + timedelta(seconds=40),
    "since": BASE + timedelta(seconds=39),
    "reason": BranchReason.LOST_TAIL,
    "parent": BRANCH,
    "names_go_on": True,
}
"""A branch that the parent's lost end began, but for its fork."""


@dataclass
class Hand:
    """A backup that stands at byte 300 of file 1, taken at 9:00, and the archive around it."""

    keys: Keys
    base: Path
    tries: int = 0
    signed: bool = False

    def __post_init__(self) -> None:
        self.place = FilesystemDestination("local", self.base / "repository")
        self.place.initialise(BASE)
        builder = Builder(self.keys)
        header, body = builder.manifest(builder.entries({"ibdata1": b"x"}))
        facts = replace(
            body.facts,
            position=Position("bin.000001", 300, "0-1-1"),
            server=replace(body.facts.server, server_uuid="uid"),
        )
        self.script = choose_logs(
            replace(header, server=SERVER, started_at=BASE - timedelta(seconds=1), finished_at=BASE),
            replace(body, facts=facts),
            signed=self.signed,
        )

    def branch(self, **values: object) -> Branch:
        found = branch(**values)
        log_segments.put_branch(self.place, found)
        return found

    def store_segment(
        self,
        number: int,
        start: int,
        end: int,
        ending: Ending,
        *found: Transaction,
        of: str = BRANCH,
        before: str = "0-1-1",
        after: str = "0-1-1",
    ) -> Path:
        draft = replace(segment(number, start, end, ending, found, before=before, after=after), branch=of)
        done = store_segment(draft, found, [self.place], self.keys, self.base)
        return self.base / "repository" / layout.segment_folder(SERVER, done.key)

    def choose(self, to: str, **more: str) -> subprocess.CompletedProcess[str]:
        self.tries += 1
        self.work = self.base / f"work-{self.tries}"
        self.work.mkdir()
        script = f'set -eu\n{self.script}\necho "$REPLAY from $BEGIN to $END"'
        return subprocess.run(
            ["sh", "-c", script],
            text=True,
            capture_output=True,
            check=False,
            env={
                "PATH": "/usr/bin:/bin",
                "GNUPGHOME": str(self.keys.secret_home),
                "WORK": str(self.work),
                "TO": to,
                "REPOSITORY": str(self.base / "repository"),
                "SERVER": SERVER,
                **more,
            },
        )

    def chosen(self, to: str, **more: str) -> str:
        done = self.choose(to, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-1].strip()

    def refused(self, to: str, **more: str) -> str:
        done = self.choose(to, **more)
        assert done.returncode != 0, done.stdout
        return done.stderr


@pytest.fixture
def hand(keys: Keys, tmp_path: Path) -> Hand:
    """A whole file, of which pieces are still there, and the pieces of the next one."""
    found = Hand(keys, tmp_path)
    found.branch()
    found.store_segment(1, 0, 600, Ending.OPEN, transaction(1, 200, 300, -60))
    found.store_segment(
        1,
        0,
        1000,
        Ending.ROTATED,
        transaction(1, 200, 300, -60),
        transaction(2, 300, 700, 10.25, precise=True),
        before="0-1-0",
        after="0-1-2",
    )
    found.store_segment(2, 0, 400, Ending.OPEN, transaction(3, 256, 400, 20), before="0-1-2", after="0-1-3")
    found.store_segment(2, 400, 800, Ending.OPEN, transaction(4, 400, 800, 30), before="0-1-3", after="0-1-4")
    return found


def at(seconds: float) -> str:
    return format_time(BASE + timedelta(seconds=seconds))


def test_the_stop_is_right_before_the_first_transaction_that_is_later(hand: Hand) -> None:
    assert hand.chosen("") == "from 4 to"
    assert hand.chosen("latest") == "1 2 from 300 to"
    assert (hand.work / "logs/1").read_bytes() == content(1, 1000)
    assert (hand.work / "logs/2").read_bytes() == content(2, 800)
    for seconds, expected in (
        (10.2, "from 4 to 300"),
        (10.25, "1 2 from 300 to 256"),
        (20, "1 2 from 300 to 400"),
        (29.999, "1 2 from 300 to 400"),
    ):
        assert hand.chosen(at(seconds)) == expected, seconds
    assert "ENDS BEFORE" in hand.choose(at(31)).stderr
    assert "after" in hand.refused(at(-1))
    assert "set it to latest" in hand.refused("yesterday")


def test_times_that_a_session_set_end_no_replay_and_bring_nothing_later(hand: Hand) -> None:
    hand.store_segment(
        2,
        800,
        900,
        Ending.ROTATED,
        transaction(5, 800, 850, -(10**9)),
        transaction(6, 850, 900, 10**9),
        before="0-1-4",
        after="0-1-6",
    )
    late = transaction(7, 200, 300, 7200)
    rest = [transaction(8 + n, 300 + n, 301 + n, 40 + n) for n in range(20)]
    hand.store_segment(3, 0, 900, Ending.OPEN, late, *rest, before="0-1-6", after="0-1-27")
    assert hand.chosen(at(35)) == "1 2 from 300 to 800", "what was stamped into the past and the future is left out"
    assert hand.chosen(at(42.5)) == "1 2 from 300 to 800", "three are too few to contradict a later time"
    assert hand.chosen(at(55.5)) == "1 2 3 from 300 to 316"
    assert hand.chosen(at(7200)) == "1 2 3 from 300 to"


def test_what_is_missing_or_damaged_stops_only_who_needs_it(hand: Hand) -> None:
    hand.store_segment(4, 0, 500, Ending.ROTATED, transaction(9, 256, 500, 40), before="0-1-8", after="0-1-9")
    assert hand.chosen(at(25)) == "1 2 from 300 to 400"
    assert "gap: binary log 3" in hand.refused("latest")
    last = hand.store_segment(3, 0, 500, Ending.ROTATED, transaction(8, 256, 500, 35), before="0-1-4", after="0-1-8")
    assert "gap: between binary logs 2 and 3" in hand.refused("latest"), "the end of file 2 is not known"
    hand.store_segment(2, 800, 900, Ending.ROTATED, before="0-1-4", after="0-1-4")
    assert hand.chosen("latest") == "1 2 3 4 from 300 to"
    part = last / layout.part_name(0)
    part.write_bytes(part.read_bytes()[:-9])
    assert hand.chosen(at(25)) == "1 2 from 300 to 400"
    assert f"{last.name}/{part.name}" in hand.refused("latest")
    for path in hand.base.glob("repository/binlogs/*/*/0000000002-000000000400-*/segment.json"):
        path.unlink()
    assert "gap: bytes 400 to 800 of binary log 2" in hand.refused("latest")


def test_the_history_is_the_one_that_the_server_was_on_and_what_is_not_certain_is_asked(hand: Hand) -> None:
    fork = Position("bin.000002", 400, "0-1-3")
    child = hand.branch(
        id=CHILD,
        noticed_at=BASE + timedelta(seconds=28),
        since=BASE + timedelta(seconds=25),
        reason=BranchReason.LOST_TAIL,
        parent=BRANCH,
        fork=fork,
        names_go_on=True,
        first_number=3,
    )
    hand.store_segment(3, 0, 600, Ending.OPEN, transaction(40, 256, 600, 60), of=CHILD, before="0-1-3", after="0-1-40")
    assert hand.chosen("latest") == "1 2 3 from 300 to"
    assert (hand.work / "logs/2").stat().st_size == 400, "what the crash lost is left out"
    assert hand.chosen(at(22)) == "1 2 from 300 to 400"
    assert "set HISTORY" in hand.refused(at(26))
    assert hand.chosen(at(26), HISTORY=BRANCH) == "1 2 from 300 to 400"
    assert hand.chosen(at(31), HISTORY=BRANCH) == "1 2 from 300 to"
    assert "no history" in hand.refused("latest", HISTORY="another")
    hand.branch(
        **{
            **{name: getattr(child, name) for name in ("id", "noticed_at", "since", "parent", "fork")},
            "reason": BranchReason.RESET,
            "first_number": 1,
        }
    )
    assert f"the server was on history {CHILD}" in hand.refused("latest")
    assert hand.chosen(at(22)) == "1 2 from 300 to 400"


def test_nothing_of_the_parent_is_left_out_before_a_fork(hand: Hand) -> None:
    hand.branch(**FORKED, fork=Position("bin.000002", 1000, "0-1-5"), first_number=3)
    hand.store_segment(3, 0, 600, Ending.OPEN, transaction(40, 256, 600, 60), of=CHILD, before="0-1-5", after="0-1-40")
    for to in ("latest", at(70)):
        assert "gap: bytes 800 to 1000 of binary log 2" in hand.refused(to)
    assert hand.chosen(at(25), HISTORY=CHILD) == "1 2 from 300 to 400", "what is missing is not needed"
    hand.branch(**FORKED, fork=Position("bin.000002", 800, "0-1-5"), first_number=3)
    assert hand.chosen("latest") == "1 2 3 from 300 to"
    hand.branch(**FORKED, fork=Position("bin.000002", 800, ""), first_number=3)
    assert hand.chosen("latest") == "1 2 3 from 300 to", "without GTIDs the bytes tell"
    hand.branch(**FORKED, fork=Position("bin.000002", 800, "0-1-4"), first_number=3)
    assert "gap: between binary logs 2 and 3" in hand.refused("latest")


def test_a_file_of_the_parent_that_is_missing_before_a_fork_is_a_gap(hand: Hand) -> None:
    hand.store_segment(2, 800, 900, Ending.ROTATED, before="0-1-4", after="0-1-4")
    hand.branch(**FORKED, fork=Position("bin.000003", 1000, "0-1-8"), first_number=4)
    hand.store_segment(4, 0, 600, Ending.OPEN, transaction(40, 256, 600, 60), of=CHILD, before="0-1-8", after="0-1-40")
    for to in ("latest", at(70)):
        assert "gap: binary log 3" in hand.refused(to)
    assert hand.chosen(at(25), HISTORY=CHILD) == "1 2 from 300 to 400"
    hand.store_segment(3, 0, 1000, Ending.ROTATED, transaction(8, 256, 1000, 35), before="0-1-4", after="0-1-8")
    assert hand.chosen("latest") == "1 2 3 4 from 300 to"
    hand.branch(**FORKED, fork=Position("bin.000002", 900, "0-1-4"), first_number=4)
    assert "gap: binary log 3" in hand.refused("latest"), "what the parent has of it came after the fork"


def test_a_backup_of_what_the_server_lost_is_not_gone_on_from(hand: Hand) -> None:
    hand.store_segment(1, 200, 600, Ending.OPEN, transaction(1, 256, 600, 60), of=CHILD, before="", after="0-1-40")
    hand.branch(**FORKED, fork=Position("bin.000001", 200, ""), first_number=1)
    assert "it holds what the server had lost" in hand.refused("latest"), "the file is the child's by now"
    hand.branch(**FORKED, fork=Position("bin.000001", 200, ""), first_number=2)
    assert "it holds what the server had lost" in hand.refused("latest"), "the file was left before the backup's place"


def test_a_place_that_is_none_of_these_logs_is_refused(hand: Hand) -> None:
    script = hand.script
    for said, instead in (
        ("POS=300", "POS=500"),
        ("GTID='0-1-1'", "GTID=1-1-1"),
        ("GTID='0-1-1'", "GTID=0-1-0"),
        ("UUID='uid'", "UUID=another"),
    ):
        assert said in script
        hand.script = script.replace(said, instead)
        assert "histor" in hand.refused("latest"), instead

"""A replay that takes longer than the members keep what the node will lack: told while there is time, and once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from backupd.model.errors import RefusedError
from backupd.model.job import Progress
from backupd.model.server_facts import ClusterPosition
from backupd.process.run_context import RunContext
from backupd.recovery.ist import Outcome
from restore.galera import window
from restore.galera.cluster import Cluster
from restore.galera.window import AFTERWARDS, Window
from tests.unit.restore.galera.test_cluster import STATE, UUID

MIB = 2**20
START = datetime(2026, 11, 28, 22, 0, tzinfo=UTC)


@dataclass
class Played:
    """A member that commits 100 transactions and 1 MiB a second, and whose gcache holds 1,000 MiB."""

    seconds: float = 0.0
    downto: int = 1
    is_up: bool = True
    told: list[tuple[str, str]] = field(default_factory=list)
    shown: list[Progress] = field(default_factory=list)

    def look(self) -> Cluster:
        if not self.is_up:
            raise RefusedError("no member of the cluster lab takes part in it")
        state = replace(
            STATE,
            position=ClusterPosition(UUID, 60_000 + round(100 * self.seconds)),
            cached_downto=self.downto,
            written_bytes=round(MIB * self.seconds),
            gcache_bytes=1000 * MIB,
        )
        return Cluster("lab", {"node2": state}, {})

    def window(self) -> Window:
        """Of a copy that will be at 50,000: 100 MiB of the cache are behind it when it begins."""
        context = RunContext(
            clock=lambda: START + timedelta(seconds=self.seconds),
            report=self.shown.append,
        )
        return Window(ClusterPosition(UUID, 50_000), self.look, context, lambda *words: self.told.append(words))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    made = Played()
    monkeypatch.setattr(window, "time", SimpleNamespace(monotonic=lambda: 1000.0 + made.seconds))
    return made


def replayed(seen: Window, part: int) -> None:
    seen.report(Progress("replay", part, 100, note="0-1-7"))


def test_a_slow_replay_is_told_before_ist_is_missed_and_once(played: Played) -> None:
    seen = played.window()
    seen.step()
    replayed(seen, 0)
    played.seconds = 1
    replayed(seen, 1)
    assert seen.rest() is None, "a second says nothing"
    played.seconds = 100
    replayed(seen, 5)
    found = seen.step()
    assert seen.rest() == timedelta(seconds=1900) + AFTERWARDS
    assert found is not None
    assert found.outcome is Outcome.LATE
    ((what, hint),) = played.told
    assert "restored to seqno 50000 will miss IST: the restore is predicted to take 31m 55s" in what
    assert "node2 drops seqno 50001 in 13m 20s" in what
    assert "take a backup of another node now" in hint
    assert "set gcache.size to" in hint
    assert seen.warnings == [what]
    replayed(seen, 6)
    assert played.shown[-1].note.startswith("IST will be missed")
    assert played.shown[-1].note.endswith("; 0-1-7")
    seen.step()
    assert len(played.told) == 1

    played.seconds, played.downto = 2000, 50_002
    found = seen.step()
    assert found is not None
    assert found.outcome is Outcome.SST
    assert "has missed IST" in played.told[-1][0]


def test_a_replay_that_ends_in_time_and_one_that_gets_faster_are_not_told(played: Played) -> None:
    seen = played.window()
    seen.step()
    replayed(seen, 0)
    played.seconds = 100
    replayed(seen, 50)
    found = seen.step()
    assert found is not None
    assert found.is_ist
    assert not played.told
    assert played.shown[-1].note == "0-1-7"


def test_what_was_told_is_not_shown_any_more_when_it_is_over(played: Played) -> None:
    seen = played.window()
    seen.step()
    replayed(seen, 0)
    played.seconds = 100
    replayed(seen, 5)
    seen.step()
    played.seconds = 110
    replayed(seen, 90)
    seen.step()
    replayed(seen, 91)
    assert played.shown[-1].note == "0-1-7"


def test_members_that_do_not_answer_for_a_moment_are_no_verdict(played: Played) -> None:
    seen = played.window()
    played.is_up = False
    assert seen.step() is None
    assert not played.told


def test_the_last_look_ends_with_the_replay(played: Played) -> None:
    seen = played.window()
    with seen.watched():
        replayed(seen, 1)
    assert [progress.bytes_done for progress in played.shown] == [1]

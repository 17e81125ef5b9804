"""Since when RPO 0 holds: only what the counters at both ends of a window show. And how a server that has fallen back
is brought back: by acknowledging ahead of the destinations, while nothing is claimed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backupd.binlog import acknowledger
from backupd.binlog.acknowledgement import DESTINATION, SPOOL, Evidence, Look
from backupd.binlog.acknowledger import Acknowledger
from backupd.binlog.archive_state import Committed
from backupd.binlog.session import Session
from backupd.binlog.spool_files import Spool
from backupd.engine.server.binary_logs import SourceState
from backupd.engine.server.semi_sync import AFTER_SYNC, SemiSync
from backupd.model.acknowledged import AcknowledgedWindow as Window

START = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
WELL = SemiSync(
    "source", "replica", True, True, "AFTER_SYNC", 10.0, True, 1, 1, 50, 2, 1, 1_000, flushed=500, ours=True
)
BRANCH = "20261128T120000Z-00000001"


def look(second: float, *, attached: bool = True, read: float = 0.1, branch: str = BRANCH, **other: Any) -> Look:
    at = START + timedelta(seconds=second)
    counters = replace(
        WELL, uptime=1_000 + round(second), flushed=500 + round(second), counted_at=at + timedelta(seconds=read)
    )
    return Look(at, attached, replace(counters, **other), branch)


def after(*looks: Look, evidence: Evidence | None = None) -> Evidence:
    found = evidence or Evidence(SPOOL)
    for one in looks:
        found = found.after(one)
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
        ({"ours": False}, "no dump of backupd's"),  # and the one client that it counts is another
        ({"flushed": -1}, "does not say since when"),
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
        ({"flushed": 1, "acknowledged": 900}, "were reset", False),  # FLUSH STATUS, and counters that caught up
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


def test_another_branch_is_another_window_that_begins_with_a_look_at_it() -> None:
    before = after(look(0), look(2))
    found = after(look(4, branch="another", acknowledged=900), evidence=before)
    assert (found.windows, found.since) == (before.windows, None)
    assert "another history" in found.why
    (_first, second) = after(look(6, branch="another", acknowledged=901), evidence=found).windows
    assert second == Window("another", moment(4.1), moment(6))


def test_a_clock_of_the_server_that_is_set_back_ends_the_window() -> None:
    """Nothing shows how long the server was not asked."""
    before = after(look(0), look(100), look(102))
    found = after(look(50, uptime=1_050, flushed=550), evidence=before)
    assert (found.windows, found.since) == (before.windows, None)
    assert "set back" in found.why


@pytest.mark.parametrize("began", [{"uptime": 2}, {"flushed": 2}])
def test_counters_that_began_a_moment_ago_show_nothing_yet(began: dict[str, Any]) -> None:
    """Had they begun once more since, their age could be the same within what two clocks may differ by."""
    later: dict[str, Any] = {name: value + 2 for name, value in began.items()}
    latest: dict[str, Any] = {name: value + 4 for name, value in began.items()}
    found = after(look(0, **began), look(2, **later))
    assert found.since is None
    assert after(look(4, **latest), evidence=found).since == moment(2.1)


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
MIB = 1024 * 1024


class Scene:
    """A server that is looked at every two seconds, with a timeout of 4 s, and a spool whose one file has ``size``
    bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: str = DESTINATION) -> None:
        self.now = 100.0
        self.size = 10 * MIB
        self.stored = Committed(BRANCH, 1, 1000)
        self.fell_back = 0
        monkeypatch.setattr(acknowledger, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.acknowledger = Acknowledger(
            "db",
            mode,
            cast(Spool, self),
            None,
            committed=lambda: self.stored,
            on_asked=lambda: None,
            clock=lambda: NOON,
            report=lambda _event: None,
        )

    def files(self) -> tuple[SimpleNamespace, ...]:
        return (SimpleNamespace(branch=BRANCH, number=1, size=self.size),)

    def look(self, *, status: bool) -> bool:
        """Two seconds later. Gives whether RPO 0 is claimed then."""
        self.now += 2
        at = NOON + timedelta(seconds=self.now)
        counters = SemiSync(
            "source", "replica", on=True, status=status, wait_point=AFTER_SYNC, timeout=4.0, clients=1,
            fell_back=self.fell_back, uptime=int(self.now), flushed=int(self.now), counted_at=at, ours=True,
        )  # fmt: skip
        session = SimpleNamespace(acknowledges=True, start=SimpleNamespace(branch=SimpleNamespace(id=BRANCH)))
        state = SimpleNamespace(server_time=at, semi_sync=counters)
        self.acknowledger.saw(cast(SourceState, state), cast(Session, session))
        evidence = self.acknowledger.evidence
        return evidence is not None and evidence.since is not None

    def stores(self, position: int) -> None:
        self.stored = Committed(BRANCH, 1, position)
        self.acknowledger.rouse()

    def ahead(self, position: int, behind: float = 9.0) -> bool:
        """Is the position acknowledged ahead?"""
        how = self.acknowledger._ahead  # as a session asks
        return how(BRANCH, (1, position), behind)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_while_the_server_waits_nothing_is_acknowledged_ahead(scene: Scene) -> None:
    scene.stores(2000)
    assert not scene.ahead(3000)
    assert [scene.look(status=True) for _turn in range(3)] == [False, True, True]
    assert not scene.ahead(3000)


def test_a_server_that_has_fallen_back_is_brought_back_and_claimed_when_all_is_stored(scene: Scene) -> None:
    scene.fell_back = 1
    assert not scene.look(status=False)
    assert not scene.ahead(3000)  # nothing was stored for longer than the server's timeout
    scene.stores(2000)
    assert scene.ahead(3000)
    assert scene.ahead(4000)  # at once: another commit may have come
    assert not scene.ahead(4000)  # once each
    assert not scene.look(status=True)
    assert scene.ahead(5000)
    scene.now += 0.9
    assert not scene.ahead(6000)  # commits are held up
    scene.now += 0.2
    assert scene.ahead(6000)
    for _turn in range(3):
        scene.stores(5999)
        assert not scene.look(status=True)
    assert not scene.ahead(7000, behind=1.9)  # they keep up
    assert not scene.ahead(8000)
    assert not scene.look(status=True)
    assert not scene.look(status=True)  # they lack a byte of what was acknowledged ahead
    scene.stores(6000)
    assert [scene.look(status=True) for _turn in range(4)] == [False, False, True, True]
    evidence = scene.acknowledger.evidence
    assert evidence is not None
    assert len(evidence.windows) == 1


def test_where_nobody_writes_any_more_the_destinations_have_all_and_are_waited_for_again(scene: Scene) -> None:
    scene.look(status=False)
    scene.stores(2000)
    assert scene.ahead(3000)
    scene.look(status=True)
    scene.stores(3000)
    scene.look(status=True)
    scene.now += 2
    assert not scene.ahead(4000)


def test_destinations_that_hang_again_hold_commits_up(scene: Scene) -> None:
    scene.look(status=False)
    scene.stores(2000)
    assert scene.ahead(3000)
    scene.look(status=True)
    scene.now += 2.1
    assert not scene.ahead(4000)


def test_of_destinations_that_lack_much_nothing_is_acknowledged_ahead(scene: Scene) -> None:
    scene.size = 65 * MIB
    scene.look(status=False)
    scene.stores(MIB - 1)
    assert not scene.ahead(70 * MIB)
    scene.look(status=False)
    scene.stores(MIB)
    scene.look(status=False)
    assert scene.ahead(70 * MIB)


def test_with_spool_everything_is_acknowledged_at_once_and_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, SPOOL)
    scene.look(status=False)
    scene.acknowledger.rouse()
    assert not scene.ahead(3000)
    assert [scene.look(status=True) for _turn in range(2)] == [False, True]

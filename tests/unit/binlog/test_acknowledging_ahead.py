"""A server that has fallen back is brought back by acknowledging ahead of the destinations; nothing is claimed then."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import cast

import pytest

from backupd.binlog import acknowledger
from backupd.binlog.acknowledgement import DESTINATION, SPOOL
from backupd.binlog.acknowledger import Acknowledger
from backupd.binlog.archive_state import Committed
from backupd.binlog.session import Session
from backupd.binlog.spool_files import Spool
from backupd.engine.server.binary_logs import SourceState
from backupd.engine.server.semi_sync import AFTER_SYNC, SemiSync

BRANCH = "20260101T000000Z-00000001"
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
            fell_back=self.fell_back, uptime=int(self.now), counted_at=at,
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
        """Is the place acknowledged ahead?"""
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

"""From which backup a restore begins, and what its replay is made of, is shown to be whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import cast

import pytest

from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import ReplayMethod, SegmentKey, Stop
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Position
from backupd.recovery.windows import RouteLeg, Span
from restore.planning.plan import Rate
from restore.planning.starting_backup import Choice, Manner, choose
from restore.planning.target_resolution import Archive, History, Material, Resolution, TargetResolver, Way
from tests.unit.restore.planning.test_planner import backup

STOP = Stop("main", "bin.000009", 500, "0-1-900")
END = SegmentKey("main", 9, 0, 800)


@dataclass
class Archived:
    """What stands in the archive behind each backup's position."""

    materials: dict[Position, Material] = field(default_factory=dict)

    def material(self, leg: RouteLeg, _stop: Stop) -> Material:
        return self.materials[leg.start]


def way(base: BackupRecord) -> Way:
    return Way(base, (RouteLeg("main", (Span("main", (7, 0), (10, 0)),), base.position, STOP.position),))


def material(*segments: SegmentKey, size: int = 1000) -> Material:
    return Material(segments, size, 1, (1,))


def chosen(costs: dict[str, float], *ways: tuple[Way, Material]) -> Choice:
    archived = Archived({each.base.position: held for each, held in ways})
    resolver = cast("TargetResolver", archived)
    archive = Archive(History((), (), (), resolver), [each.base for each, _held in ways], now=datetime.now(UTC))
    return choose(
        Resolution(STOP, tuple(each for each, _held in ways)),
        archive,
        resolver,
        Manner(ReplayMethod.APPLIER, "", Rate(1.0)),
        lambda base: costs[base.id],
    )


WHOLE = (SegmentKey("main", 7, 0, 900), SegmentKey("main", 8, 0, 900), END)


@pytest.mark.parametrize(
    ("newer", "older", "replayed", "taken"),
    [(10.0, 5.0, 100, "newer"), (500.0, 5.0, 100, "older"), (10.0, 20.0, 1, "newer")],
)
def test_the_backup_is_taken_with_which_fetch_and_replay_together_end_first(
    newer: float, older: float, replayed: int, taken: str
) -> None:
    near, far = way(backup(8)), way(backup(6))
    choice = chosen(
        {near.base.id: newer, far.base.id: older},
        (near, material(*WHOLE, size=10)),
        (far, material(*WHOLE, size=10 + replayed)),
    )
    assert choice.base == {"newer": near, "older": far}[taken].base
    assert choice.reason.startswith({"newer": "the nearest", "older": "faster"}[taken])


@pytest.mark.parametrize(
    ("segments", "why"),
    [
        (WHOLE[1:], "8:0-900 does not follow"),
        ((WHOLE[0], END), "9:0-800 does not follow"),
        (WHOLE[:2], "the segments end before bin.000009:500"),
        ((*WHOLE[:2], SegmentKey("main", 9, 0, 499)), "the segments end before bin.000009:500"),
        ((*WHOLE[:2], SegmentKey("main", 9, 0, 300), SegmentKey("main", 9, 301, 800)), "9:301-800 does not follow"),
        ((), "the segments end before bin.000009:500"),
    ],
)
def test_a_replay_with_a_hole_or_without_its_end_is_refused(segments: tuple[SegmentKey, ...], why: str) -> None:
    base = way(backup(8))
    with pytest.raises(RefusedError) as caught:
        chosen({base.base.id: 1.0}, (base, material(*segments)))
    assert why in caught.value.detail


@pytest.mark.parametrize(
    "segments",
    [
        WHOLE,
        (*WHOLE[:2], SegmentKey("main", 9, 0, 500)),
        (*WHOLE[:2], SegmentKey("main", 9, 0, 300), SegmentKey("main", 9, 200, 800)),
    ],
)
def test_one_that_reaches_the_stop_is_planned(segments: tuple[SegmentKey, ...]) -> None:
    base = way(backup(8))
    assert chosen({base.base.id: 1.0}, (base, material(*segments))).replay is not None

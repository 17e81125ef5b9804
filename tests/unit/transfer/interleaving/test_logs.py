from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from backupd.model.binlog import Ending
from backupd.transfer import log_segments
from backupd.transfer.log_segments import PartsGoneError
from backupd.transfer.records.segment_documents import Sealed, Sealing, SegmentHeader
from storage.destination import Capability
from tests.support.logs.archived import QuickSealer, branch_of
from tests.support.logs.archived_logs import seal_log
from tests.support.logs.real_logs import real_logs
from tests.unit.transfer.interleaving.test_backups import Stepped, World, explore

BRANCH = branch_of("20261121T040000Z-0000000a")


class Copying(Stepped):
    capabilities = Capability.COPIES

    def duplicate(self, source: str, target: str) -> bool:
        done: bool = self._call(("duplicate", source, target), lambda: self._world.place.duplicate(source, target))
        return done


@pytest.fixture
def world() -> World:
    """Its destination holds two pieces of a log for days."""
    return World()


@pytest.fixture
def sealed(tmp_path: Path, world: World) -> Callable[[bool], Sealed]:
    """The whole file, put together from the pieces that ``world`` has; with the sealed bytes of these, or without."""
    log, sealer = real_logs()[0], QuickSealer()
    ends = (0, log.cuts[1], log.size)
    pieces = [
        seal_log(tmp_path / f"{end}", sealer, BRANCH, 1, log.data, start=start, end=end, ending=Ending.OPEN)
        for start, end in pairwise(ends)
    ]
    for piece in pieces:
        log_segments.put(world.place, piece, now=world.now())
    world.hours = 24 * 7

    def made(bytes_here: bool) -> Sealed:
        sealing = Sealing(tmp_path / "new", sealer)
        for transaction in log.transactions:
            sealing.transaction(transaction)
        for piece in pieces:
            if not bytes_here:
                Sealed.lighten(piece.folder)
            for part in piece.header.parts:
                sealing.borrow(part, piece.folder)
        whole = seal_log(tmp_path / "whole", sealer, BRANCH, 1, log.data).header.segment
        return sealing.finish(whole, tmp_path / "together")

    return made


def storing(sealed: Sealed, world: World) -> Callable[[Stepped], str]:
    def run(place: Stepped) -> str:
        try:
            log_segments.put(copying(place), sealed, now=world.now())
        except PartsGoneError:
            return "to be sealed anew"
        return "stored"

    return run


def copying(place: Stepped) -> Stepped:
    place.__class__ = Copying
    return place


def sweeping(place: Stepped) -> str:
    log_segments.clear_strays(place, now=place.clock())
    return "swept"


def dropping(place: Stepped) -> str:
    """The pieces go at any moment, as by the retention of another process."""
    for key in log_segments.of_file(place, BRANCH.server, BRANCH.id, 1):
        if key.end < real_logs()[0].size or key.start:
            log_segments.remove(place, BRANCH.server, key)
    return "dropped"


def whole(world: World, outcomes: tuple[str, str]) -> None:
    found = [item for item in log_segments.headers(world.place) if isinstance(item, SegmentHeader)]
    stored = [header for header in found if (header.segment.start, header.segment.end) == (0, real_logs()[0].size)]
    assert len(stored) == (outcomes[0] == "stored")
    for header in stored:
        assert log_segments.problems(world.place, header) == {}


@pytest.mark.parametrize("other", [sweeping, dropping])
@pytest.mark.parametrize("bytes_here", [True, False])
def test_nothing_takes_parts_that_a_larger_segment_takes_over(
    world: World, sealed: Callable[[bool], Sealed], other: Callable[[Stepped], str], bytes_here: bool
) -> None:
    outcomes: set[str] = set()

    def check(world: World, ended: tuple[str, str]) -> None:
        outcomes.add(ended[0])
        whole(world, ended)

    assert explore(world, (storing(sealed(bytes_here), world), other), check) > 50
    assert outcomes == ({"stored", "to be sealed anew"} if other is dropping and not bytes_here else {"stored"})

"""One look at the spool, beside what the archive knows of it."""

from __future__ import annotations

from dataclasses import dataclass

from backupd.binlog.archive.checkpoint import Cut, Held, LogFile, Place
from backupd.binlog.archive.state import ArchiveState
from backupd.binlog.spool.files import Spooled
from backupd.model.binlog import Branch, Gap, SegmentKey
from backupd.model.server_facts import Position

_FIRST_EVENT = 4


@dataclass(frozen=True, slots=True)
class Outlook:
    """``branches``: newest last; ``files``: in log order. ``state`` is the living one."""

    branches: tuple[Branch, ...]
    files: tuple[Spooled, ...]
    state: ArchiveState

    @property
    def server(self) -> str:
        """All branches of a spool are of one."""
        return self.branches[-1].server

    def branch(self, name: str) -> Branch:
        return next(branch for branch in self.branches if branch.id == name)

    def turn(self, name: str) -> int | None:
        """Which one, in time; None for a branch that the spool does not know."""
        return next((turn for turn, branch in enumerate(self.branches) if branch.id == name), None)

    def place(self, branch: str, number: int, pos: int) -> Place | None:
        turn = self.turn(branch)
        return None if turn is None else (turn, number, pos)

    def log(self, file: Spooled) -> LogFile:
        return self.state.file(file.branch, file.number)

    def lacking(self, held: Held) -> list[tuple[Spooled, Cut]]:
        """What a destination that holds ``held`` is to get, in log order."""
        return [(file, cut) for file in self.files for cut in self.log(file).lacks(held)]

    def unfinished(self) -> list[SegmentKey]:
        """What some destination is still to get, in log order."""
        lacks = {
            self.log(file).key(cut)
            for holding in self.state.holdings.values()
            for file, cut in self.lacking(holding.stored)
        }
        turns = {branch.id: turn for turn, branch in enumerate(self.branches)}
        return sorted(lacks, key=lambda key: (turns[key.branch], key))

    def missing_bytes(self, held: Held) -> int:
        """How much of the files' bytes a destination does not hold."""
        return sum(
            max(0, file.size - self.log(file).reach(held))
            for file in self.files
            if not self.log(file).is_complete(held)
        )

    def frontier(self, held: Held) -> Place | None:
        """Up to where a destination has everything, as far as the spool tells."""
        place = self.place(*self.state.passed) if self.state.passed else None
        for file in self.files:
            log = self.log(file)
            if log.is_complete(held):
                place = _later(place, self.place(file.branch, file.number, file.size))
                continue
            if reached := log.reach(held):
                place = _later(place, self.place(file.branch, file.number, reached))
            break
        return place

    def archived_to(self) -> tuple[int, int] | None:
        """In the newest branch: number of the oldest file that some destination does not have whole, and how far all of
        them have it."""
        if not self.branches:
            return None
        newest = self.branches[-1].id
        after: tuple[int, int] | None = None
        if self.state.passed is not None and self.state.passed[0] == newest:
            after = (self.state.passed[1] + 1, 0)
        for file in (file for file in self.files if file.branch == newest):
            log = self.log(file)
            held = [holding.stored for holding in self.state.holdings.values()]
            if not all(log.is_complete(one) for one in held):
                return file.number, min(log.reach(one) for one in held)
            after = (file.number + 1, 0)
        return after

    def end(self) -> Place | None:
        """Up to where the spool has come."""
        if not self.files:
            return self.place(*self.state.passed) if self.state.passed else None
        last = self.files[-1]
        return self.place(last.branch, last.number, last.size)

    def gap_of(self, file: Spooled) -> Gap | None:
        """The gap behind what could be read of a damaged file."""
        log = self.log(file)
        if log.damaged_at is None:
            return None
        branch = self.branch(file.branch)
        after = next(
            (other for other in self.files if other.branch == file.branch and other.number > file.number), None
        )
        return Gap(
            server=branch.server,
            branch=branch.id,
            destination="",
            after=Position(file.name, log.cut_to),
            before=Position(after.name, _FIRST_EVENT) if after else None,
            from_at=None,
            to_at=None,
            reason=f"{file.name} is damaged ({log.damage})",
            noticed_at=log.damaged_at,
        )


def _later(one: Place | None, other: Place | None) -> Place | None:
    """A file that was brought back lies before what has left the spool already."""
    return max((place for place in (one, other) if place is not None), default=None)

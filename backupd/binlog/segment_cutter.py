"""What the archive ships now, decided from what there is. Pure.

A file that grows is cut into *pieces*, at most one in each checkpoint and only when there is something new. A file that
has ended is one *whole* segment. Where pieces become too many they are merged: the next one begins at 0 again and
replaces those before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from backupd.engine.binlog.transactions import ScanContext
from backupd.model.binlog import Ending, SegmentKey
from backupd.model.document import Document

MOST_PIECES = 60
"""Pieces of one file before they are merged."""

Held = Mapping[SegmentKey, Ending]
"""What a destination holds, with the ending that is written there."""


class LogCoordinate(NamedTuple):
    """A position in the spool's logs; sorts in log order. ``branch``: its turn among the branches, oldest first."""

    branch: int
    number: int
    position: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes ``[start, end)`` of a file become a segment. ``remark``: why it ends where it should not."""

    start: int
    end: int
    ending: Ending = Ending.OPEN
    remark: str = ""

    def as_json(self) -> list[Any]:
        """As ``archive.json`` has it; ``from_json`` reads it."""
        return [self.start, self.end, str(self.ending), self.remark]

    @classmethod
    def from_json(cls, data: list[Any]) -> Cut:
        """Raises ValueError, TypeError for what ``as_json`` did not write."""
        start, end, ending, remark = data
        return cls(start, end, Ending(ending), remark)


@dataclass(frozen=True, slots=True)
class LogFile(Document):
    """What the archive decided for one file of the spool.

    ``cuts``: its pieces; ``whole``: the segment that replaces them once the file has ended. ``context``: to scan on
    behind the last piece, None where an earlier version has seen the file end. ``damage``: why nothing behind the
    pieces can be archived, and when that was noticed; they are all there will be.
    """

    branch: str
    number: int
    cuts: tuple[Cut, ...] = ()
    whole: Cut | None = None
    context: ScanContext | None = None
    damage: str = ""
    damaged_at: datetime | None = None

    @property
    def cut_to(self) -> int:
        """Up to where the pieces go, 0 without any."""
        return max((cut.end for cut in self.cuts), default=0)

    @property
    def wanted(self) -> tuple[Cut, ...]:
        """What every destination is to hold, in log order."""
        return self.cuts if self.whole is None else (self.whole,)

    def key(self, cut: Cut) -> SegmentKey:
        """The segment that ``cut`` becomes."""
        return SegmentKey(self.branch, self.number, cut.start, cut.end)

    def with_piece(self, cut: Cut, context: ScanContext) -> LogFile:
        """With one more piece; one that begins at 0 replaces all before it."""
        return replace(self, cuts=(*self.cuts, cut) if cut.start else (cut,), context=context)

    def ended_at(self, size: int, ending: Ending) -> LogFile:
        """As a file that has ended with ``size`` bytes: one whole segment."""
        return replace(self, whole=Cut(0, size, ending))

    def damaged(self, good: int, reason: str, now: datetime) -> LogFile:
        """Nothing of this ended file behind its pieces and ``good`` will ever be archived."""
        last = (Cut(self.cut_to, good, Ending.CUT, reason),) if good > self.cut_to else ()
        return replace(self, cuts=(*self.cuts, *last), whole=None, context=None, damage=reason, damaged_at=now)

    def lacks(self, held: Held) -> tuple[Cut, ...]:
        """What a destination that holds ``held`` is still to get. What was a piece there may have to get its ending."""
        return tuple(
            cut
            for cut in self.wanted
            if (ending := held.get(self.key(cut))) is None or (ending is Ending.OPEN and cut.ending is not Ending.OPEN)
        )

    def is_complete(self, held: Held) -> bool:
        """Will nothing more of an ended file ever come to a destination that holds ``held``?"""
        return (self.whole is not None or bool(self.damage)) and not self.lacks(held)

    def reach(self, held: Held) -> int:
        """Up to where ``held`` has the file without a hole."""
        reached = 0
        for key in sorted(held):
            if (key.branch, key.number) == (self.branch, self.number) and key.start <= reached:
                reached = max(reached, key.end)
        return reached


def next_piece(
    file: LogFile, size: int, *, now: datetime, cut_at: datetime | None, checkpoint: timedelta
) -> int | None:
    """Where the next piece of a growing file begins, None when none is due.

    ``cut_at``: when the last piece of any file was cut. A clock that was set back makes one due.
    """
    if size <= file.cut_to or file.damage:
        return None
    if cut_at is not None and cut_at <= now < cut_at + checkpoint:
        return None
    return 0 if len(file.cuts) >= MOST_PIECES else file.cut_to


class Marks:
    """Moments at positions of the log, in log order: at ``at`` the log went up to ``coordinate``. Old ones thin out."""

    def __init__(self, most: int = 512) -> None:
        self._most = most
        self._marks: list[tuple[LogCoordinate, datetime]] = []

    def add(self, coordinate: LogCoordinate, at: datetime) -> None:
        """One behind the last replaces it where nothing changed in between; a smaller one is not believed."""
        if self._marks and coordinate < self._marks[-1][0]:
            return
        if len(self._marks) >= 2 and coordinate == self._marks[-1][0] == self._marks[-2][0]:
            self._marks.pop()
        self._marks.append((coordinate, at))
        if len(self._marks) > self._most:
            # The first two say since when; every second of the older half goes.
            half = self._most // 2
            self._marks = self._marks[:2] + self._marks[2:half:2] + self._marks[half:]

    def latest_within(self, coordinate: LogCoordinate | None) -> tuple[LogCoordinate, datetime] | None:
        """The last moment at which the log did not go beyond ``coordinate``."""
        if coordinate is None:
            return None
        return next((mark for mark in reversed(self._marks) if mark[0] <= coordinate), None)

    def first_beyond(self, coordinate: LogCoordinate | None) -> datetime | None:
        """The first moment at which the log went beyond ``coordinate``."""
        return next((at for found, at in self._marks if coordinate is None or found > coordinate), None)

    def forget_within(self, coordinate: LogCoordinate | None) -> None:
        """Everybody is past ``coordinate``: only the last mark that it holds is still of use."""
        if (last := self.latest_within(coordinate)) is not None:
            self._marks = self._marks[self._marks.index(last) :]

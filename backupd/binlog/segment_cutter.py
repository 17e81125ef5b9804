"""What the archive ships now, decided from what there is. Pure.

A file that grows is cut into *pieces*, at most one in each checkpoint and only when there is something new. A file that
has ended is one *whole* segment. Where pieces become too many they are merged: the next one begins at 0 again and
replaces those before it.

Cutting segments out of the spool's files, and keeping them sealed until every destination has them.

What is kept can be made again at any time, so it is bounded: of what waits for destinations that are down, the newest
is thrown away first and sealed anew when its turn comes.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from backupd.binlog.spool_files import Spooled
from backupd.engine.binlog.scan import Scan, scan
from backupd.engine.binlog.transactions import ScanContext
from backupd.model.binlog import Branch, Ending, Segment, SegmentKey, Transaction
from backupd.model.document import Document, made_of
from backupd.model.errors import DamagedError, StreamError
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.segment_documents import Sealed, Sealing

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
    behind the last piece. ``damage``: why nothing behind the pieces can be archived, and when that was noticed; they
    are all there will be.
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
        return replace(self, whole=Cut(0, size, ending), context=None)

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
    """Moments at places of the log, in log order: at ``at`` the log went up to ``place``. Old ones thin out."""

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


_NEW = "new"


class DamagedLogError(DamagedError):
    """A file of the spool cannot be read behind ``good``, the end of its last whole transaction (0: of none)."""

    def __init__(self, file: Spooled, damages: Sequence[str], good: int) -> None:
        super().__init__(
            f"binary log {file.name} in the spool is damaged behind byte {good}",
            damages,
            hint="backupd fetches it from the server again",
        )
        self.good = good


class Cutter:
    """Everything lies in ``folder``, which is emptied of what ``keep`` does not name. Raises OSError."""

    def __init__(self, folder: Path, sealer: Sealer, *, most_bytes: int) -> None:
        self._folder = folder
        self._sealer = sealer
        self._most = most_bytes
        self._kept: dict[SegmentKey, Sealed] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def piece(self, file: Spooled, branch: Branch, start: int, context: ScanContext | None) -> tuple[Cut, Scan] | None:
        """Cut ``[start, ...)`` behind the last complete transaction that the file has now; None without a new one.

        ``context`` is that of the scan which ended at ``start``, None for 0. Raises DamagedLogError.
        """
        sealing = Sealing(self._folder / _NEW, self._sealer, piece=True)
        try:
            found = _scanned(file, sealing, start, file.size, context)
        except StreamError:
            return None  # not even its first event is complete
        if found.end <= start:
            return None
        cut = Cut(start, found.end)
        self._finish(sealing, file, branch, cut, found)
        return cut, found

    def sealed(self, file: Spooled, branch: Branch, log: LogFile, cut: Cut) -> Sealed:
        """The sealed segment for ``cut``; made (again) where it is not there. Raises DamagedLogError."""
        key = log.key(cut)
        kept = self._kept.get(key) or Sealed.load(self._path(key))
        if kept is None or kept.header.segment.ending is not cut.ending:
            sealing = Sealing(self._folder / _NEW, self._sealer, piece=cut.ending is Ending.OPEN)
            try:
                context = _scanned(file, None, 0, cut.start, None).context if cut.start else None
                found = _scanned(file, sealing, cut.start, cut.end, context)
                if found.end + found.tail < cut.end:
                    raise DamagedLogError(file, [f"it has {found.end + found.tail} of its {cut.end} bytes"], found.end)
            except StreamError as error:
                raise DamagedLogError(file, [error.message], 0) from error
            except FileNotFoundError as error:
                raise DamagedLogError(file, ["it is not there"], 0) from error
            kept = self._finish(sealing, file, branch, cut, found)
        self._kept[key] = kept
        return kept

    def tidy(self, wanted: Sequence[SegmentKey], busy: Collection[SegmentKey]) -> None:
        """Remove what nobody wants; of ``wanted`` (in log order) the newest that are too much. Nothing of ``busy``."""
        by_name = {self._path(key).name: key for key in wanted}
        at_work = {self._path(key).name for key in busy}
        sizes: Mapping[str, int] = {path.name: _size(path) for path in self._folder.iterdir()}
        self._kept = {key: kept for key, kept in self._kept.items() if key in by_name.values() or key in busy}
        for name in sizes.keys() - by_name.keys() - at_work:
            Sealed.remove(self._folder / name)
        total = sum(size for name, size in sizes.items() if name in by_name)
        for name in reversed(by_name):
            if total <= self._most:
                return
            if name in sizes and name not in at_work:
                Sealed.remove(self._folder / name)
                self._kept.pop(by_name[name], None)
                total -= sizes[name]

    def _finish(self, sealing: Sealing, file: Spooled, branch: Branch, cut: Cut, found: Scan) -> Sealed:
        with file.path.open("rb") as stream:
            stream.seek(cut.start)
            sha256 = sealing.plain(stream, cut.start, cut.end)
        remarks = [cut.remark] if cut.remark else []
        if found.end < cut.end:
            remarks.append(f"its last {cut.end - found.end} bytes are no complete transaction")
        segment = made_of(
            Segment,
            found,
            server=branch.server,
            branch=branch.id,
            file=file.name,
            number=file.number,
            start=cut.start,
            end=cut.end,
            ending=cut.ending,
            gtids_before=branch.executed(found.gtids_before),
            gtids_after=branch.executed(found.gtids_after),
            flavour=found.context.flavour,
            server_version=found.context.server_version,
            sha256=sha256,
            remarks=(*found.remarks, *remarks),
        )
        target = self._path(segment.key)
        shutil.rmtree(target, ignore_errors=True)
        self._kept[segment.key] = sealing.finish(segment, target)
        return self._kept[segment.key]

    def _path(self, key: SegmentKey) -> Path:
        return self._folder / f"{key.branch}-{key.number:010d}-{key.start:012d}-{key.end:012d}"


def _scanned(file: Spooled, sealing: Sealing | None, start: int, end: int, context: ScanContext | None) -> Scan:
    good = start

    def take(transaction: Transaction) -> None:
        nonlocal good
        good = transaction.end
        if sealing is not None:
            sealing.transaction(transaction)

    with file.path.open("rb") as stream:
        stream.seek(start)
        try:
            return scan(stream, start=start, context=context, stop=end, on_transaction=take)
        except DamagedError as error:
            raise DamagedLogError(file, error.damages, good) from error


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0

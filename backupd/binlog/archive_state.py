"""What the archive knows: the state that it keeps in the spool's folder, and what the recorder has still to be given.

The state says how files were cut, and what each destination holds of them. It is only about files that are in the
spool. Where it is lost, the files are cut anew from their beginning, and what destinations hold of them already is
found there. ``SpoolView`` is one look at the spool beside that state.

The ``Recorder`` of the application writes into the catalog. The ``Ledger`` gives it everything in order; only what the
recorder took counts as done.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from backupd.binlog.segment_cutter import Cut, Held, LogCoordinate, LogFile
from backupd.binlog.shipper import Delivery
from backupd.binlog.spool_files import Spooled
from backupd.model.binlog import Branch, Ending, FilePosition, Gap, Segment, SegmentKey
from backupd.model.errors import BackupdError
from backupd.model.server_facts import Position
from backupd.model.text import format_time, parse_time
from backupd.process.folders import write_whole

_FORMAT = "backupd-archive/1"
_NAME = "archive.json"
_FIRST_EVENT = 4


@dataclass(slots=True)
class Holding:
    """What one destination holds: ``stored`` of the files in the spool, as the recorder knows it; ``drops``: pieces
    there that a larger segment replaced."""

    stored: dict[SegmentKey, Ending] = field(default_factory=dict)
    drops: set[SegmentKey] = field(default_factory=set)


@dataclass(slots=True)
class ArchiveState:
    """``passed``: (branch, number, size) of the last file that left the spool. ``cut_at``: of the last piece."""

    files: dict[tuple[str, int], LogFile] = field(default_factory=dict)
    holdings: dict[str, Holding] = field(default_factory=dict)
    passed: tuple[str, int, int] | None = None
    cut_at: datetime | None = None

    def file(self, branch: str, number: int) -> LogFile:
        """What was decided for a file; an empty decision where there is none."""
        return self.files.get((branch, number)) or LogFile(branch, number)

    def keep(self, file: LogFile) -> None:
        """Remember what was decided for ``file``."""
        self.files[file.branch, file.number] = file

    def prune(self, present: Iterable[tuple[str, int]]) -> None:
        """Forget files that are not in the spool any more."""
        here = set(present)
        self.files = {key: file for key, file in self.files.items() if key in here}
        for holding in self.holdings.values():
            holding.stored = {key: ending for key, ending in holding.stored.items() if (key.branch, key.number) in here}


class StateFile:
    """The state in ``folder``. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._written = b""

    def load(self, destinations: Iterable[str]) -> ArchiveState:
        """The state, with a holding for each of ``destinations`` and no other. One that cannot be read is none."""
        try:
            state = _decode(json.loads(self._path.read_bytes()))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            state = ArchiveState()
        state.holdings = {name: state.holdings.get(name) or Holding() for name in destinations}
        return state

    def save(self, state: ArchiveState) -> None:
        """Nothing is written where nothing changed."""
        raw = json.dumps(_encode(state), separators=(",", ":"), sort_keys=True).encode()
        if raw != self._written:
            write_whole(self._path, raw)
            self._written = raw


def _encode(state: ArchiveState) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "files": [file.as_json() for _key, file in sorted(state.files.items())],
        "holdings": {
            name: {
                "stored": [[*_key(key), str(ending)] for key, ending in sorted(holding.stored.items())],
                "drops": [_key(key) for key in sorted(holding.drops)],
            }
            for name, holding in state.holdings.items()
        },
        "passed": list(state.passed) if state.passed else None,
        "cut_at": format_time(state.cut_at) if state.cut_at else None,
    }


def _decode(data: Mapping[str, Any]) -> ArchiveState:
    if data["format"] != _FORMAT:
        raise ValueError(f"format {data['format']!r} is not known to this version")
    files = [LogFile.from_json(item) for item in data["files"]]
    passed = data["passed"]
    return ArchiveState(
        files={(file.branch, file.number): file for file in files},
        holdings={
            name: Holding(
                {SegmentKey(*key): Ending(ending) for *key, ending in item["stored"]},
                {SegmentKey(*key) for key in item["drops"]},
            )
            for name, item in data["holdings"].items()
        },
        passed=(passed[0], passed[1], passed[2]) if passed else None,
        cut_at=parse_time(data["cut_at"]) if data["cut_at"] else None,
    )


def _key(key: SegmentKey) -> list[Any]:
    return [key.branch, key.number, key.start, key.end]


class Committed(NamedTuple):
    """Every required destination holds the log up to byte ``position`` of file ``number`` of ``branch``; it was read
    back there."""

    branch: str
    number: int
    position: int


@dataclass(frozen=True, slots=True)
class SpoolView:
    """``branches``: newest last; ``files``: in log order. ``state`` is the living one."""

    branches: tuple[Branch, ...]
    files: tuple[Spooled, ...]
    state: ArchiveState

    @property
    def server(self) -> str:
        """All branches of a spool are of one."""
        return self.branches[-1].server

    def branch(self, name: str) -> Branch:
        """The branch with the id ``name``. Raises StopIteration where the spool does not know it."""
        return next(branch for branch in self.branches if branch.id == name)

    def turn(self, name: str) -> int | None:
        """Which one, in time; None for a branch that the spool does not know."""
        return next((turn for turn, branch in enumerate(self.branches) if branch.id == name), None)

    def coordinate(self, branch: str, number: int, pos: int) -> LogCoordinate | None:
        """Where byte ``pos`` of a file is among all logs; None for a branch that the spool does not know."""
        turn = self.turn(branch)
        return None if turn is None else LogCoordinate(turn, number, pos)

    def log(self, file: Spooled) -> LogFile:
        """What the archive decided for ``file``."""
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

    def pieces(self) -> list[SegmentKey]:
        """All that were cut of the files in the spool, in log order."""
        return [log.key(cut) for log in map(self.log, self.files) for cut in log.cuts]

    def missing_bytes(self, held: Held) -> int:
        """How much of the files' bytes a destination does not hold."""
        missing = (file for file in self.files if not self.log(file).is_complete(held))
        return sum(max(0, file.size - self.log(file).reach(held)) for file in missing)

    def frontier(self, held: Held, *, past_damage: bool = True) -> LogCoordinate | None:
        """Up to where a destination has everything, by what the spool knows. ``past_damage``: also what is behind a
        file whose end could not be read."""
        coordinate = self.coordinate(*self.state.passed) if self.state.passed else None
        for file in self.files:
            log = self.log(file)
            if log.is_complete(held) and (past_damage or not log.damage):
                coordinate = _later(coordinate, self.coordinate(file.branch, file.number, file.size))
                continue
            if reached := log.reach(held):
                coordinate = _later(coordinate, self.coordinate(file.branch, file.number, reached))
            break
        return coordinate

    def archived_to(self) -> FilePosition | None:
        """In the newest branch: number of the oldest file that some destination does not have whole, and how far all of
        them have it."""
        if not self.branches:
            return None
        newest = self.branches[-1].id
        after: FilePosition | None = None
        if self.state.passed is not None and self.state.passed[0] == newest:
            after = (self.state.passed[1] + 1, 0)
        for file in (file for file in self.files if file.branch == newest):
            log = self.log(file)
            held = [holding.stored for holding in self.state.holdings.values()]
            if not all(log.is_complete(one) for one in held):
                return file.number, min(log.reach(one) for one in held)
            after = (file.number + 1, 0)
        return after

    def committed(self, held: Iterable[Held]) -> Committed | None:
        """Up to where all destinations, which hold ``held``, have everything."""
        reached = [self.frontier(one, past_damage=False) for one in held]
        known = [coordinate for coordinate in reached if coordinate is not None]
        if not known or len(known) < len(reached):
            return None
        lowest = min(known)
        return Committed(self.branches[lowest.branch].id, lowest.number, lowest.position)

    def end(self) -> LogCoordinate | None:
        """Up to where the spool has come."""
        if not self.files:
            return self.coordinate(*self.state.passed) if self.state.passed else None
        last = self.files[-1]
        return self.coordinate(last.branch, last.number, last.size)

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


def _later(one: LogCoordinate | None, other: LogCoordinate | None) -> LogCoordinate | None:
    """A file that was brought back is before what has left the spool already."""
    return max((coordinate for coordinate in (one, other) if coordinate is not None), default=None)


class Recorder(Protocol):
    """All are called from the thread that calls ``Archiver.step``, in an order in which each thing comes after what it
    needs. Any may be called again with the same facts (after a kill), and must not mind. One that raises BackupdError
    is called again in the next step.
    """

    def branch_stored(self, branch: Branch) -> None:
        """Of this branch segments will follow. Called once in each process, before anything else of the branch."""

    def segment_stored(self, segment: Segment, destination: str, stored_bytes: int, at: datetime) -> None:
        """The segment is at ``destination`` and was read back there.

        A segment that was known as OPEN may come again with the same key and another ``ending``: its file turned out to
        have ended right there.
        """

    def segments_dropped(self, server: str, keys: Sequence[SegmentKey], destination: str) -> None:
        """These pieces are no more: a segment that was reported before holds all of them."""

    def confirmed(self, destination: str, branch: str, position: FilePosition, at: datetime) -> None:
        """Everything that the source had committed at ``at`` (its own clock) is at ``destination``; its log ended
        at ``position`` then."""

    def gap(self, gap: Gap) -> None:
        """Binary logs are missing for ever. Called once in each process."""


_Entry = Callable[[ArchiveState], None]


class Ledger:
    """Entries wait here as long as the recorder refuses them; a kill forgets them, and then they are found again."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._entries: deque[_Entry] = deque()
        self._reported: set[Branch | Gap] = set()
        self._stored: dict[str, dict[SegmentKey, Ending]] = {}
        self._dropped: dict[str, set[SegmentKey]] = {}
        self._confirmed: dict[str, datetime] = {}

    def branch(self, branch: Branch) -> None:
        """Report ``branch``, once in each process."""
        if branch not in self._reported:
            self._reported.add(branch)
            self._entries.append(lambda _state: self._recorder.branch_stored(branch))

    def gap(self, gap: Gap) -> None:
        """Report ``gap``, once in each process."""
        if gap not in self._reported:
            self._reported.add(gap)
            self._entries.append(lambda _state: self._recorder.gap(gap))

    def stored(self, destination: str, delivery: Delivery, at: datetime) -> None:
        """Report that ``destination`` has a segment, since ``at``."""
        segment = delivery.header.segment
        waiting = self._stored.setdefault(destination, {})
        waiting[segment.key] = segment.ending

        def write(state: ArchiveState) -> None:
            self._recorder.segment_stored(segment, destination, delivery.header.stored_bytes, at)
            holding = state.holdings[destination]
            holding.stored[segment.key] = segment.ending
            holding.drops.update(delivery.replaced)
            waiting.pop(segment.key, None)

        self._entries.append(write)

    def dropped(self, destination: str, server: str, keys: tuple[SegmentKey, ...]) -> None:
        """Report that pieces were removed at ``destination``."""
        waiting = self._dropped.setdefault(destination, set())
        waiting.update(keys)

        def write(state: ArchiveState) -> None:
            self._recorder.segments_dropped(server, keys, destination)
            holding = state.holdings[destination]
            holding.drops.difference_update(keys)
            for key in keys:
                holding.stored.pop(key, None)
            waiting.difference_update(keys)

        self._entries.append(write)

    def confirm(self, destination: str, branch: str, position: FilePosition, at: datetime) -> str:
        """What is stored comes first: until that is reported, nothing is confirmed. Why it was not reported, or ""."""
        if not self.is_clear or self._confirmed.get(destination) == at:
            return ""
        try:
            self._recorder.confirmed(destination, branch, position, at)
        except BackupdError as error:
            return str(error)
        self._confirmed[destination] = at
        return ""

    def write(self, state: ArchiveState) -> str:
        """Report to the recorder, and note in ``state`` what it took. Why it takes no more, "" when it took all."""
        while self._entries:
            try:
                self._entries[0](state)
            except BackupdError as error:
                return str(error)
            self._entries.popleft()
        return ""

    @property
    def is_clear(self) -> bool:
        """Was everything reported?"""
        return not self._entries

    def held(self, destination: str, state: ArchiveState) -> dict[SegmentKey, Ending]:
        """What ``destination`` holds, reported or not."""
        return {**state.holdings[destination].stored, **self._stored.get(destination, {})}

    def to_drop(self, destination: str, state: ArchiveState) -> tuple[SegmentKey, ...]:
        """Pieces at ``destination`` that are to be removed."""
        return tuple(sorted(state.holdings[destination].drops - self._dropped.get(destination, set())))

"""What the recorder is still to be told, in order. Only what it took counts as done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import datetime

from backupd.binlog.archive.recorder import Recorder
from backupd.binlog.archive.shipper import Delivery
from backupd.binlog.archive.state import ArchiveState
from backupd.model.binlog import Branch, Ending, Gap, SegmentKey
from backupd.model.errors import BackupdError

_Entry = Callable[[ArchiveState], None]


class Ledger:
    """Entries wait here as long as the recorder refuses them; a kill forgets them, and then they are found again."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._entries: deque[_Entry] = deque()
        self._told: set[Branch | Gap] = set()
        self._stored: dict[str, dict[SegmentKey, Ending]] = {}
        self._dropped: dict[str, set[SegmentKey]] = {}
        self._confirmed: dict[str, datetime] = {}

    def branch(self, branch: Branch) -> None:
        if branch not in self._told:
            self._told.add(branch)
            self._entries.append(lambda _state: self._recorder.branch_stored(branch))

    def gap(self, gap: Gap) -> None:
        if gap not in self._told:
            self._told.add(gap)
            self._entries.append(lambda _state: self._recorder.gap(gap))

    def stored(self, destination: str, delivery: Delivery, at: datetime) -> None:
        segment = delivery.stored.header.segment
        waiting = self._stored.setdefault(destination, {})
        waiting[segment.key] = segment.ending

        def write(state: ArchiveState) -> None:
            self._recorder.segment_stored(segment, destination, delivery.stored.bytes, at)
            holding = state.holdings[destination]
            holding.stored[segment.key] = segment.ending
            holding.drops.update(delivery.replaced)
            waiting.pop(segment.key, None)

        self._entries.append(write)

    def dropped(self, destination: str, server: str, keys: tuple[SegmentKey, ...]) -> None:
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

    def confirm(self, destination: str, branch: str, place: tuple[int, int], at: datetime) -> str:
        """What is stored comes first: while that cannot be told, nothing is confirmed. Why it was not told, or ""."""
        if not self.is_clear or self._confirmed.get(destination) == at:
            return ""
        try:
            self._recorder.confirmed(destination, branch, place, at)
        except BackupdError as error:
            return str(error)
        self._confirmed[destination] = at
        return ""

    def write(self, state: ArchiveState) -> str:
        """Tell the recorder, and note in ``state`` what it took. Why it takes no more, "" when it took all."""
        while self._entries:
            try:
                self._entries[0](state)
            except BackupdError as error:
                return str(error)
            self._entries.popleft()
        return ""

    @property
    def is_clear(self) -> bool:
        """Was everything told?"""
        return not self._entries

    def held(self, destination: str, state: ArchiveState) -> dict[SegmentKey, Ending]:
        """What ``destination`` holds, told or not."""
        return {**state.holdings[destination].stored, **self._stored.get(destination, {})}

    def to_drop(self, destination: str, state: ArchiveState) -> tuple[SegmentKey, ...]:
        """Pieces at ``destination`` that are to be removed."""
        return tuple(sorted(state.holdings[destination].drops - self._dropped.get(destination, set())))

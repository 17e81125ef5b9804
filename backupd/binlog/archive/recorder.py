"""Whom the archive tells what it has done: the application writes it into the catalog."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from backupd.model.binlog import Branch, Gap, Segment, SegmentKey


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
        """These pieces are no more: a segment that was told before holds all of them."""

    def confirmed(self, destination: str, branch: str, place: tuple[int, int], at: datetime) -> None:
        """Everything that the source had committed at ``at`` (its own clock) is at ``destination``; it was at ``place``
        (file number, position) then."""

    def gap(self, gap: Gap) -> None:
        """Binary logs are missing for ever. Called once in each process."""

"""What a restore waits for before it reads: parts of it may lie where they have to be thawed first.

A part is a backup of the chain, by its id, or the binary logs (``LOGS`` of the model). The base is read while what
comes after it is still being thawed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from backupd.model.errors import ArchivedError
from backupd.model.job import Report

T = TypeVar("T")
_TRIES = 3


class ThawWait(Protocol):
    """Every method may ask destinations, and raises DestinationError when nothing can come of waiting."""

    def is_open(self, part: str) -> bool:
        """Can it be read now?"""
        ...

    def wait(self, part: str, report: Report, cancelled: Callable[[], bool]) -> None:
        """Return when it can be read. Raises CancelledError."""
        ...

    def reopen(self, part: str) -> bool:
        """Something of it could not be read, because it is archived (again): ask for it. False where nothing is asked
        for: nobody wants to pay for that."""
        ...


class NoThawWait:
    """Everything is read at once; what is archived is refused."""

    def is_open(self, part: str) -> bool:
        """Always."""
        del part
        return True

    def wait(self, part: str, report: Report, cancelled: Callable[[], bool]) -> None:
        """Nothing to wait for."""

    def reopen(self, part: str) -> bool:
        """Never: nothing is asked of an archive."""
        del part
        return False


NO_THAW_WAIT = NoThawWait()


def read_when_thawed(
    thaw: ThawWait,
    part: str,
    read: Callable[[], T],
    report: Report,
    cancelled: Callable[[], bool],
    *,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> T:
    """What ``read`` gives, once the part can be read; again when a thawed copy went away meanwhile. ``read`` goes on
    where it stopped. ``waiting`` is entered while nothing but the thaw is waited for."""
    for _ in range(_TRIES):
        with waiting():
            thaw.wait(part, report, cancelled)
        try:
            return read()
        except ArchivedError:
            with waiting():
                if not thaw.reopen(part):
                    raise
    with waiting():
        thaw.wait(part, report, cancelled)
    return read()

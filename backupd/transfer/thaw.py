"""Archived objects of a destination: which of those wanted cannot be read, and asking for them, many at once.

Whoever asks looks first: what is being thawed already, by an earlier call that was killed before it could say so, is
not asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import TypeVar

from backupd.model.errors import DestinationError, ObjectMissingError, RefusedError
from backupd.model.manifest import Header
from backupd.model.thaw import LOGS
from backupd.process.throttle import Throttle
from backupd.transfer.records.segment_documents import SegmentHeader
from storage import layout
from storage.destination import ArchiveDestination, Coldness, ColdState, Tier

WORKERS = 16
"""Questions that are under way at once; each is a short request and a thread that waits for it."""
BATCH = 200
"""Answers that are handed over together."""
_BETWEEN = 1024 * 1024
"""Bytes before the start of a replay that may be read along: events of no transaction may be before it."""
_SLACK = timedelta(hours=12)
"""Places round the end of a thawed copy to whole days."""

T = TypeVar("T")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Want:
    """An object that something needs. ``part``: what needs it: a backup by its id, or ``LOGS``."""

    key: str
    size: int
    part: str


def wants_of_backup(header: Header) -> tuple[Want, ...]:
    """Everything of a backup that may be cold."""
    return tuple(Want(layout.object_key(item.name), item.size, header.backup_id) for item in header.objects)


def wants_of_segment(header: SegmentHeader, begin: int, end: int) -> tuple[Want, ...]:
    """What may be cold of an archived binary log and is needed to replay bytes ``[begin, end)`` of its file, or none of
    it: the first part of the file, for its format description, and all from the last transaction before ``begin``
    on."""
    parts = {0: header.parts[0]} if header.segment.start == 0 and header.parts else {}
    if begin < end:
        parts |= {number: part for number, _at, part in header.parts_between(begin - _BETWEEN, end)}
    return tuple(Want(header.folder + part.stored.name, part.stored.size, LOGS) for part in parts.values())


def look(destination: ArchiveDestination, keys: Sequence[str]) -> dict[str, Coldness]:
    """How these objects stand; those that are not there are left out. Raises DestinationError."""

    def ask_one(key: str) -> Coldness | None:
        try:
            return destination.coldness(key)
        except ObjectMissingError:
            return None

    found: dict[str, Coldness] = {}
    for batch in _at_once(keys, ask_one):
        found |= {one.key: one for one in batch if one is not None}
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of asking for ``key``. ``coldness``: its state, None where it cannot be had: ``problem`` says why.
    ``paid``: a request for it was made now."""

    key: str
    coldness: Coldness | None
    problem: str = ""
    paid: bool = False


def ask(
    destination: ArchiveDestination,
    keys: Sequence[str],
    tier: Tier,
    days: int,
    *,
    now: datetime,
    pace: Throttle,
    again: bool = False,
) -> Iterator[tuple[Asked, ...]]:
    """Ask for these objects, in batches as they are answered.

    What can be read for about as long as asked for is left as it is, and so is what is being thawed, but with
    ``again``: then it is asked for at ``tier``, which is a faster one. ``pace`` is taken from by each request. Raises
    DestinationError after the batches that could be had.
    """

    def ask_one(key: str) -> Asked:
        try:
            before = destination.coldness(key)
            if suffices(before, days, now, again=again):
                return Asked(key, before)
            pace.take(1)
            return Asked(key, destination.thaw(key, tier, days), paid=True)
        except (ObjectMissingError, RefusedError) as error:
            return Asked(key, None, error.message)

    yield from _at_once(keys, ask_one)


def suffices(found: Coldness, days: int, now: datetime, *, again: bool = False) -> bool:
    """Need it not be asked for: is it there for about as long as wanted, or under way?"""
    if found.state is ColdState.THAWING:
        return not again
    if found.state is ColdState.THAWED:
        return found.until is None or found.until >= now + timedelta(days=days) - _SLACK
    return found.state is ColdState.WARM


def _at_once(items: Iterable[T], do: Callable[[T], Answer]) -> Iterator[tuple[Answer, ...]]:
    """Answers in batches; what fails with a DestinationError ends it after the answers that came before are given."""
    left = iter(items)
    with ThreadPoolExecutor(max_workers=WORKERS, thread_name_prefix="thaw") as pool:
        while batch := list(islice(left, BATCH)):
            futures = [pool.submit(do, item) for item in batch]
            done: list[Answer] = []
            trouble: DestinationError | None = None
            for future in futures:
                try:
                    done.append(future.result())
                except DestinationError as error:
                    trouble = trouble or error
                    for other in futures:  # what does not answer takes its time each time
                        other.cancel()
                except CancelledError:
                    continue
            if done:
                yield tuple(done)
            if trouble is not None:
                raise trouble

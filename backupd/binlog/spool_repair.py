"""Damaged files of the spool: how far one can be read, what a fresh copy is worth, and fetching it once more.

A damaged file in the spool is good up to its last whole transaction before the damage. A copy that has just come and is
damaged shows nothing, neither of the server nor of the spool: it may have been altered on its way.

A file may be damaged here although the server has it whole, and so may one copy of it. So a file is damaged *at the
server* only where two copies, each over another connection, have the same bytes; then, and where the server no
longer has the file, nothing mends it, and the archive records a gap. Everything else is tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from backupd.binlog.continuity import (
    Comparison,
    digest_of,
    ending_at_server,
    ending_of,
    fingerprint_of,
    head_of,
    is_whole,
)
from backupd.binlog.spool_files import Doubt, Spool, Spooled
from backupd.binlog.stream_status import StreamEvent, StreamEventKind
from backupd.engine.binlog.scan import Scan, scan
from backupd.engine.receiver.endings import EndKind, end_kind
from backupd.engine.server.binary_logs import BinlogSource, SourceState
from backupd.model.binlog import Ending, Transaction
from backupd.model.errors import DamagedError, StreamError, ToolError
from backupd.model.text import Clock


class DamagedCopyError(ToolError):
    """What came of a file is damaged; two such copies with the same bytes show that the server's file is."""

    def __init__(self, name: str, address: str, why: str) -> None:
        super().__init__(
            f"the copy of {name} from {address} is damaged",
            detail=why,
            hint="backupd fetches it again; if this recurs, check the network between the hosts",
        )


@dataclass(frozen=True, slots=True)
class Readable:
    """``end``: behind the last whole transaction (0: not even its head can be read); GTIDs and ``last_at`` are of what
    is before it. ``size``: what was read, ``damage``: why nothing behind ``end`` can be, "" without any."""

    end: int
    size: int
    gtids_before: str
    gtids_after: str
    last_at: datetime | None
    damage: str = ""


def read(path: Path, on_transaction: Callable[[Transaction], None] | None = None) -> Readable:
    """Read a file to its end, or to where it is damaged. Raises OSError."""
    good = 0

    def take(transaction: Transaction) -> None:
        nonlocal good
        good = transaction.end
        if on_transaction is not None:
            on_transaction(transaction)

    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            return _readable(scan(file, stop=size, on_transaction=take), size)
    except StreamError as error:
        return Readable(0, size, "", "", None, error.message)
    except DamagedError as error:
        damage = "; ".join(error.damages)
    head = head_of(path)
    if not good and head is None:
        return Readable(0, size, "", "", None, damage)
    try:
        return _readable(scan_to(path, good or (head.size if head else 0)), size, damage)
    except (DamagedError, StreamError):
        return Readable(0, size, "", "", None, damage)


def read_fresh(path: Path, address: str) -> Scan:
    """Read a copy that has just come from ``address``. Raises DamagedCopyError, OSError."""
    try:
        with path.open("rb") as file:
            return scan(file)
    except (DamagedError, StreamError) as error:
        raise DamagedCopyError(path.name, address, str(error)) from error


def scan_to(path: Path, stop: int) -> Scan:
    """Raises DamagedError, StreamError, OSError."""
    with path.open("rb") as file:
        return scan(file, stop=stop)


_ENOUGH, _MOST = 64 * 1024, 32 * 1024 * 1024
"""Bytes at the end of a file that hold its last transactions, and so many are read for them at most."""
_LAST = 512
"""Transactions."""


def last_of(path: Path, starts: Iterable[int]) -> tuple[Transaction, ...]:
    """The last transactions of a file; none where reading them would take long, or it is damaged. ``starts``: where
    transactions begin. Raises OSError."""
    size = path.stat().st_size
    start = max((one for one in starts if size - one >= _ENOUGH), default=0)
    head = head_of(path)
    if head is None or size - start > _MOST:
        return ()
    found: deque[Transaction] = deque(maxlen=_LAST)
    try:
        context = replace(scan_to(path, head.size).context, end=start) if start else None
        with path.open("rb") as file:
            file.seek(start)
            scan(file, start=start, context=context, stop=size, on_transaction=found.append)
    except (DamagedError, StreamError):
        return ()
    return tuple(found)


def _readable(found: Scan, size: int, damage: str = "") -> Readable:
    return Readable(found.end, size, found.gtids_before, found.gtids_after, found.last_at, damage)


@dataclass(frozen=True, slots=True)
class _Copy:
    """What came of a file. ``digest``: of all its bytes; ``torn``: the server could not read on."""

    path: Path
    found: Readable
    digest: str
    torn: str = ""

    @property
    def damage(self) -> str:
        return self.torn or self.found.damage


@dataclass(slots=True)
class Mender:
    """``fetch`` copies one of the server's files as it is now, over a new connection; ``look`` asks the
    server."""

    server: str
    source: BinlogSource
    spool: Spool
    fetch: Callable[[str], Path]
    look: Callable[[], SourceState]
    clock: Clock
    report: Callable[[StreamEvent], None]

    def mend(self, doubt: Doubt) -> None:
        """Mend a file, or judge that it cannot be. Only while its branch is known to be the server's present one.

        Raises DamagedCopyError where copies differ from each other, ServerError, ToolError, OSError: try again.
        """
        there = (*self.spool.files(), self.spool.newest())
        file = next((one for one in there if one is not None and one.key == doubt.key), None)
        if file is None:
            self.spool.judge(doubt)
            return
        state = self.look()
        if all(log.name != file.name for log in state.logs):
            self.spool.judge(doubt, "the server no longer has the file")
            return
        if self.spool.is_fatal(file.name):
            self.spool.judge(doubt, "the server crashes when it reads the file")
            return
        first = self._copy(file.name)
        if not first.damage:
            self._take(doubt, file, first)
            return
        second = self._copy(file.name)  # over another connection, and at another moment
        if not second.damage:
            self._take(doubt, file, second)
        elif self._are_equal(first, second):
            if file.ended is None:
                # What comes next is compared with what is here: only what can be read shows that it goes on.
                self.spool.cut(file, min(doubt.good, second.found.end))
            still = (
                ""
                if file.ended is not None
                else "; nothing behind that can be archived before the server begins its next file: run FLUSH BINARY "
                "LOGS there, and take a full backup"
            )
            self.spool.judge(doubt, _at_the_server(second) + still)
        else:
            raise DamagedCopyError(file.name, self.source.address, f"{first.damage}; another copy: {second.damage}")

    def bring_back(self, number: int) -> bool:
        """A file of the present branch that a gap is recorded behind: is it at the server, whole, after all? What is
        archived of it is compared with it before it is replaced. Raises as ``mend``."""
        branch = self.spool.branches()[-1]
        name = branch.file(number)
        listed = {log.number: log for log in self.look().logs}
        if name not in {log.name for log in listed.values()} or number + 1 not in listed:
            return False
        copy = self._copy(name)
        if copy.damage or copy.found.end < copy.found.size or (ending := self._ending(number, copy)) is Ending.CUT:
            return False
        self.spool.bring_back(branch, number, copy.path, ending)
        words = (
            f"{name} of {self.server}, which was given up earlier, was fetched completely from the server: the gap "
            "behind it closes when it is archived"
        )
        self.report(StreamEvent(StreamEventKind.MENDED, self.clock(), words))
        return True

    def damaged_there(self, name: str) -> str:
        """Why the server's own file is damaged, "" where two copies do not show that. Raises as ``mend``."""
        first = self._copy(name)
        second = self._copy(name)
        return _at_the_server(second) if second.damage and self._are_equal(first, second) else ""

    def _copy(self, name: str) -> _Copy:
        torn = ""
        try:
            path = self.fetch(name)
        except ToolError as error:
            path = self.spool.incoming / name
            if end_kind(error.detail) is not EndKind.TORN or not path.exists():
                raise
            torn = "the server itself cannot read it beyond that"
        return _Copy(path, read(path), digest_of(path), torn)

    @staticmethod
    def _are_equal(first: _Copy, second: _Copy) -> bool:
        """The file may have grown in between."""
        return (
            first.found.end == second.found.end
            and second.found.size >= first.found.size
            and digest_of(second.path, end=first.found.size) == first.digest
        )

    def _take(self, doubt: Doubt, file: Spooled, copy: _Copy) -> None:
        if copy.found.size < file.size and self._is_only_a_part(copy):
            # A server that is shut down ends a copy as if it were whole.
            raise DamagedCopyError(file.name, self.source.address, f"only {copy.found.size} bytes of it were received")
        if not self._is_the_same(doubt, file, copy):
            self.spool.judge(doubt, "the server has another file of this name now")
            return
        if file.ended is None:
            self.spool.cut(file, doubt.good)
        elif file.branch == self.spool.branches()[-1].id:
            self.spool.renew(file, copy.path, self._ending(file.number, copy))
        else:
            self.spool.renew(file, copy.path, file.ended)
        self.spool.judge(doubt)
        words = (
            f"{file.name} of {self.server} was damaged in the spool behind byte"
            f" {doubt.good}, and was fetched from the server again: nothing is missing"
        )
        self.report(StreamEvent(StreamEventKind.MENDED, self.clock(), words, detail=doubt.why))

    def _is_only_a_part(self, copy: _Copy) -> bool:
        if ending_of(copy.path, copy.found.size) is not Ending.CUT:
            return False
        return any(log.name == copy.path.name and log.size > copy.found.size for log in self.look().logs)

    def _is_the_same(self, doubt: Doubt, file: Spooled, copy: _Copy) -> bool:
        """Is it the file that is here? By the bytes that can be read here. Where these are none, a file of the branch
        before it shows that the branch is the server's; for a branch of the past nothing does."""
        with file.path.open("rb") as kept, copy.path.open("rb") as fresh:
            equal = Comparison(kept, fresh).go_on()
        if equal < doubt.good or (file.ended is not None and copy.found.size < doubt.good):
            return False
        if file.branch != self.spool.branches()[-1].id:
            return doubt.good > 0 and copy.found.size == file.size
        newest = self.spool.newest()
        is_newest = newest is not None and file.number == newest.number
        return doubt.good > 0 or not is_newest or self._has_the_one_before(file)

    def _has_the_one_before(self, file: Spooled) -> bool:
        marks = [mark for mark in self.spool.fingerprints() if mark.number < file.number]
        if not marks:
            return True  # it is the branch's first
        mark = marks[-1]
        before = self.spool.branches()[-1].file(mark.number)
        path = self.fetch(before)
        if (found := read(path)).damage:
            raise DamagedCopyError(before, self.source.address, found.damage)
        return found.size == mark.size and fingerprint_of(path, mark.branch, mark.number, mark.size) == mark

    def _ending(self, number: int, copy: _Copy) -> Ending:
        size = copy.found.size
        return ending_at_server(copy.path, size, lambda: is_whole(self.look(), number, size))


def _at_the_server(copy: _Copy) -> str:
    return f"two copies over two connections are the same, so the file is damaged at the server ({copy.damage})"

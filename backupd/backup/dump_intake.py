"""Files that dump tools write, packed while the tools run, each gone from the disk as soon as it was read.

What is on the disk has a bound: when the destinations are slower than the tools, the tools stand still. Small files
wait on the disk until their table is known to be good, because they share objects with others, and because their order
should not depend on which of them was finished first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from backupd.engine.dump.insert_files import DumpedFile, DumpRun, RowMeter
from backupd.model.errors import CancelledError, ServerError, ToolError
from backupd.model.manifest import BUNDLE_LIMIT
from backupd.model.table import TableName, data_path
from backupd.process.throttle import Throttle
from backupd.transfer.parts import Packer

_LOOK_SECONDS = 0.2
_RESUME = 0.5
"""Of the bound, below which the tools go on."""


class Pausable(Protocol):
    """Work that stands still while the disk has no room for more of its files."""

    def pause(self) -> None:
        """Stand still until ``resume``; may be called again meanwhile."""

    def resume(self) -> None:
        """Go on."""


@dataclass(slots=True)
class Received:
    """Of one table, so far. ``rows``: as they came by; ``reported``: as the tool counted them, where it did. ``small``
    files are on the disk, the others packed as ``paths``; ``files`` counts both."""

    rows: int = 0
    reported: int = 0
    bytes: int = 0
    paths: list[str] = field(default_factory=list)
    small: list[DumpedFile] = field(default_factory=list)

    @property
    def files(self) -> int:
        """Number of files that came of the table."""
        return len(self.paths) + len(self.small)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A run gives no more files. ``error``: what ended it, None for its own end."""

    run: int
    error: Exception | None


class Intake:
    """One for each group of runs. A context manager that joins its threads: leave the runs first, which ends them.

    ``room``: bytes of complete files that may wait on the disk. ``pressure``: why the server should be left alone, or
    nothing; then everything stands still until ``throttle`` lets it pass. ``arrived`` receives table and size of each
    file.
    """

    def __init__(
        self,
        packer: Packer,
        *,
        throttle: Throttle,
        pressure: Callable[[], str],
        room: int,
        cancel: threading.Event | None,
        arrived: Callable[[TableName, int], None],
    ) -> None:
        self._packer, self._throttle, self._pressure, self._room = packer, throttle, pressure, room
        self._cancel, self._arrived = cancel, arrived
        self._queue: queue.SimpleQueue[DumpedFile | _Ended] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._waiting = 0
        self._full = False
        self._over = False
        self._standing: tuple[Pausable, ...] = ()
        self._received: dict[TableName, Received] = {}

    def take(self, runs: Sequence[DumpRun], others: Sequence[Pausable] = ()) -> dict[int, Exception]:
        """Pack what ``runs`` write, until all have ended; gives what ended a run (by its number) before its time.
        ``others`` stand still when the runs do. Raises whatever packing does, and CancelledError."""
        self._standing = (*runs, *others)
        for number, run in enumerate(runs):
            thread = threading.Thread(target=self._feed, args=[number, run], name="dump", daemon=True)
            self._threads.append(thread)
            thread.start()
        try:
            return self._take_all(len(runs))
        finally:
            with self._lock:
                self._over = True  # nobody may be stopped any more: it would never end
                self._resume()

    def rows(self, table: TableName) -> int:
        """How many came of ``table``."""
        return self._received.get(table, Received()).rows

    def reported(self, table: TableName) -> int:
        """How many should have come of ``table``, by what its tool counted when it wrote them."""
        return self._received.get(table, Received()).reported

    def keep(self, table: TableName) -> Received:
        """``table`` is good: pack what is still on the disk, and report what there is of it."""
        received = self._received.setdefault(table, Received())
        received.small.sort(key=lambda file: (len(file.path.name), file.path.name))
        for file in received.small:
            self._pack(file, received, RowMeter())
        received.small.clear()
        return self._received.pop(table)

    def drop(self, table: TableName) -> None:
        """``table`` is not part of the backup: take back what was packed of it."""
        received = self._received.pop(table, Received())
        for path in received.paths:
            self._packer.remove(path)
        for file in received.small:
            file.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for thread in self._threads:
            thread.join()
        if isinstance(error, ServerError | ToolError):  # others are of the whole backup
            for table in tuple(self._received):
                self.drop(table)

    # -- inside

    def _take_all(self, going: int) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        while going:
            self._stand_back()
            try:
                item = self._queue.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(item, DumpedFile):
                self._file(item)
                continue
            going -= 1
            if isinstance(item.error, CancelledError):
                raise item.error
            if item.error is not None:
                errors[item.run] = item.error
        return errors

    def _feed(self, number: int, run: DumpRun) -> None:
        error: Exception | None = None
        try:
            for file in run.files():
                with self._lock:
                    self._waiting += file.size
                    if self._waiting > self._room and not self._full and not self._over:
                        self._full = True
                        self._pause()
                self._queue.put(file)
        except Exception as ended:  # noqa: BLE001  handed over to whoever called take
            error = ended
        self._queue.put(_Ended(number, error))

    def _file(self, file: DumpedFile) -> None:
        received = self._received.setdefault(file.table, Received())
        meter = RowMeter()
        if file.size < BUNDLE_LIMIT:
            for content in _read(file):
                meter.add(content)
            received.small.append(file)
        else:
            self._pack(file, received, meter)
        received.rows += meter.rows
        received.reported += meter.rows if file.rows is None else file.rows
        received.bytes += file.size
        self._arrived(file.table, file.size)
        with self._lock:
            self._waiting -= file.size
            if self._full and self._waiting <= self._room * _RESUME:
                self._full = False
                self._resume()

    def _pack(self, file: DumpedFile, received: Received, meter: RowMeter) -> None:
        path = data_path(file.table, len(received.paths))
        received.paths.append(path)
        offset = 0
        try:
            for content in _read(file):
                self._pass(len(content))
                self._packer.data(path, offset, memoryview(content))
                meter.add(content)
                offset += len(content)
        except ToolError:  # whoever drops the table can only drop what has ended
            self._packer.end(path)
            raise
        self._packer.end(path)
        file.path.unlink(missing_ok=True)

    def _pass(self, size: int) -> None:
        if self._pressure():
            self._stand_back()
        self._throttle.take(size)

    def _stand_back(self) -> None:
        """While the server is pressed, nothing reads from it."""
        if self._cancel is not None and self._cancel.is_set():
            raise CancelledError("the dump was cancelled")
        if not self._pressure():
            return
        with self._lock:
            self._pause()
        try:
            self._throttle.take(0)
        finally:
            with self._lock:
                if not self._full:
                    self._resume()

    def _pause(self) -> None:
        for one in self._standing:
            one.pause()

    def _resume(self) -> None:
        for one in self._standing:
            one.resume()


def _read(file: DumpedFile) -> Iterator[bytes]:
    try:
        yield from file.blocks()
    except OSError as error:
        raise ToolError(
            f"a file of the dump cannot be read: {error.strerror}",
            detail=str(file.path),
            hint="check the disk of the spool (dmesg)",
        ) from error


def together(path: str) -> str:
    """Which small files share objects: those of all tables of a schema, so that thousands of small tables do not make
    thousands of objects."""
    return "/".join(path.split("/")[:2])

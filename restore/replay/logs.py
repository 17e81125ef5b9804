"""The archived binary logs of a replay, as plain files with their original names, each proved before it is used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from threading import Event, Lock
from typing import TypeVar

from backupd.engine.binlog.events import MariadbState, MysqlState
from backupd.engine.binlog.hole import begin_behind_hole, hole_of
from backupd.model.binlog import ReplayLeg, ReplaySpec, SegmentKey
from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    CancelledError,
    DamagedError,
    DestinationError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
    StreamError,
)
from backupd.model.job import Progress
from backupd.model.manifest import PART_SIZE
from backupd.process.folders import digest_of, write_private
from backupd.process.run_context import RunContext
from backupd.transfer import log_segments as segments
from backupd.transfer.log_segments import holding
from backupd.transfer.records.segment_documents import SegmentHeader
from restore.datadir.occupancy import RESERVE, refuse_full
from restore.fetch.objects import default_workers
from restore.fetch.sources import Sources
from storage.destination import Destination

T = TypeVar("T")

COPIES = 2
"""How many copies of the logs are on the disk while they are replayed: fetched, and as relay logs of the copy."""
_NO_HOLE = 2 * PART_SIZE
"""A replay that begins before reads its first file from the first byte: no part can be left out."""


@dataclass(frozen=True, slots=True)
class Logs:
    """``legs``: of each leg its files in log order, the last one cut at the stop; ``warnings``: copies that could not
    be used, one line each."""

    legs: tuple[tuple[Path, ...], ...]
    warnings: tuple[str, ...]


def refuse_no_room_for(spec: ReplaySpec, folder: Path) -> None:
    """Raises RefusedError when the logs of ``spec`` do not fit at ``folder`` (or the nearest one above it)."""
    size = spec.size + sum(min(leg.since, _NO_HOLE) for leg in spec.legs)
    refuse_full(
        folder,
        size * COPIES + RESERVE,
        "the binary logs",
        detail=f"{size:,} bytes of logs, {COPIES} times while they are replayed; {RESERVE:,} bytes reserve",
        hint="free some space there, or choose a target closer to a backup",
    )


def fetch_logs(server: str, spec: ReplaySpec, sources: Sources, folder: Path, context: RunContext) -> Logs:
    """Bring the segments of every leg to ``folder``, which belongs to us; what an earlier call left there is used as
    far as its digests are right.

    Of the first file only what is replayed is read, and its first part, for its format description: it has a hole
    (``engine.binlog.hole``) up to the last transaction before the start. Parts behind the stop are not read.

    The archives are tried in their order, for each segment anew, and for each part of one where a part is not what
    was stored. Raises RefusedError for logs that do not follow
    each other, naming both positions; DamagedError when no destination has a segment as it was stored, ArchivedError
    when it has to be thawed first, or DestinationError when none could be asked, naming the positions between which
    nothing can be replayed; KeyUnusableError, CancelledError.
    """
    job = _Job(server, sources, context)
    wanted: list[tuple[Path, list[_File]]] = []
    for number, leg in enumerate(spec.legs, start=1):
        target = folder / f"{number}"
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted.append((target, _files(server, leg)))
    job.total = sum(file.size for _target, files in wanted for file in files)
    with ThreadPoolExecutor(max_workers=default_workers(), thread_name_prefix="logs") as pool:
        pending = [[pool.submit(job.bring, target, file) for file in files] for target, files in wanted]
        try:
            legs = tuple(tuple(future.result() for future in futures) for futures in pending)
        except CancelledError:
            if job.failure is None:
                raise
            raise job.failure from None  # of another file: this one was only given up
    return Logs(legs, tuple(job.warnings))


@dataclass(frozen=True, slots=True)
class _File:
    """The segments of one file, from its first byte on; ``end``: where the replay stops in it, None for all of it.
    ``since``: where it begins in it, 0 for its beginning; ``name``: of the file that this is a position of."""

    segments: tuple[SegmentKey, ...]
    end: int | None
    since: int = 0
    name: str = ""

    @property
    def stop(self) -> int:
        """Where what is needed of it ends."""
        return self.segments[-1].end if self.end is None else self.end

    @property
    def size(self) -> int:
        """Bytes that are replayed of it."""
        return max(0, self.stop - self.since)


def _files(server: str, leg: ReplayLeg) -> list[_File]:
    """Raises RefusedError where something is missing between two segments, or before the first."""
    found: list[_File] = []
    before: SegmentKey | None = None
    for number, group in groupby(leg.segments, key=lambda key: key.number):
        keys = tuple(group)
        if before is not None and number != before.number + 1:
            raise _hole(server, f"file {before.number}", f"file {number}")
        end = 0
        for key in keys:
            if key.start != end:
                raise _hole(server, f"byte {end} of file {number}", f"byte {key.start} of file {number}")
            end = key.end
        before = keys[-1]
        found.append(_File(keys, None) if found else _File(keys, None, leg.since, leg.start.file))
    if before is None:
        return []
    stop = leg.stop
    if int(stop.file.rpartition(".")[2]) != before.number or before.end < stop.pos:
        raise _hole(
            server, f"byte {before.end} of file {before.number}", f"{stop.file}:{stop.pos}, where the replay is to end"
        )
    return [*found[:-1], replace(found[-1], end=stop.pos)]


def _hole(server: str, after: str, before: str) -> RefusedError:
    return RefusedError(
        "the archived binary logs are not complete: nothing was restored",
        detail=f"the last position before the gap is {after}, the first after it {before}",
        hint=f"`backupd timeline {server}` shows what is recoverable; choose a target before the gap",
    )


class _Job:
    total = 0
    """Bytes that are replayed."""
    failure: BaseException | None = None
    """What went wrong first."""

    def __init__(self, server: str, sources: Sources, context: RunContext) -> None:
        self._server, self._context = server, context
        self._destinations, self._unsealer = sources.archives, sources.unsealer
        self._lock = Lock()
        self._done = 0
        self._failed = Event()
        self._named: dict[SegmentKey, str] = {}
        self._bound: dict[tuple[str, SegmentKey], SegmentHeader] = {}
        self.warnings: list[str] = []

    def bring(self, folder: Path, file: _File) -> Path:
        """Make the file in ``folder`` hold exactly what it should; gives its path."""
        try:
            return self._bring(folder, file)
        except BaseException as error:
            with self._lock:
                self.failure = self.failure or error
            self._failed.set()
            raise

    def _bring(self, folder: Path, file: _File) -> Path:
        path, have = self._begun(folder, file)
        for key in file.segments:
            if path is not None and (key.end <= have or key.start >= file.stop):
                continue  # it was read along with another, or nothing of it is replayed
            self._refuse_cancelled()
            before = max(have, file.since)
            path, have = self._segment(folder, key, have, file)
            self._note(max(0, have - before), path.name)
        assert path is not None  # noqa: S101  a file has segments
        if path.stat().st_size != file.stop:
            os.truncate(path, file.stop)
        return path

    def _refuse_cancelled(self) -> None:
        if self._failed.is_set() or self._context.is_cancelled():
            raise CancelledError(
                "the restore was cancelled while binary logs were fetched",
                hint="the same command continues where it stopped",
            )

    def _begun(self, folder: Path, file: _File) -> tuple[Path | None, int]:
        """Begin the file with a hole up to the last transaction before the start, where parts can be left out for it:
        its path, and where it goes on. None, and 0, where it is read from its beginning."""
        if not file.since:
            return None, 0
        self._refuse_cancelled()
        within = next((key for key in file.segments if key.end > file.since), file.segments[-1])
        head = self._from_any(file.segments[0], lambda _destination, header, _failures: header)
        first = head.parts[0].size if head.parts else 0
        if head.segment.file != file.name or head.segment.start:
            return None, 0

        def behind(destination: Destination, header: SegmentHeader, _failures: list[BackupdError]) -> tuple[int, str]:
            at = next((at for _number, at, _part in header.parts_between(file.since, file.since + 1)), file.since)
            if at <= first:
                return 0, ""
            found = _executed(header, segments.read_places(destination, header, self._unsealer), file.since)
            self._bound[destination.name, header.segment.key] = header  # the index shows that, too
            return found

        end, gtids = self._from_any(within, behind)
        if not end:
            return None, 0
        path = folder / _safe(file.name)
        if not _goes_on_at(path, end):
            path.unlink(missing_ok=True)
            beginning = self._from_any(file.segments[0], self._first_part)
            if not begin_behind_hole(path, beginning, gtids, end):
                return None, 0
        return path, end

    def _first_part(self, destination: Destination, header: SegmentHeader, failures: list[BackupdError]) -> bytes:
        self._require_bound(destination, header)
        try:
            return segments.read_part(destination, header, 0, self._unsealer)
        except (DamagedError, ObjectMissingError, ArchivedError) as error:
            return self._elsewhere(destination, header, failures)(0, error)

    def _segment(self, folder: Path, key: SegmentKey, have: int, file: _File) -> tuple[Path, int]:
        """Bring a segment into the file, which holds all up to ``have``, or is not there. The file, and up to where it
        holds now what it should: up to the end of ``key``, or the stop, at least."""

        def read(destination: Destination, header: SegmentHeader, failures: list[BackupdError]) -> tuple[Path, int]:
            return self._read(destination, header, folder, have, file.stop, failures)

        return self._from_any(key, read)

    def _from_any(self, key: SegmentKey, read: Callable[[Destination, SegmentHeader, list[BackupdError]], T]) -> T:
        """What ``read`` gives of a segment, at the first destination where it gives anything; of a larger one where
        nobody has this one any more."""
        failures: list[BackupdError] = []

        def ask(destination: Destination, wanted: SegmentKey) -> T:
            header = segments.load_header(destination, self._server, wanted)
            self._named[wanted] = self._named[key] = header.segment.file
            return read(destination, header, failures)

        for destination in self._destinations:
            try:
                found = ask(destination, key)
            except (DamagedError, DestinationError, NotFoundError) as error:
                failures.append(error)
                continue
            self._warn(failures)
            return found
        # Its file has ended since this was planned, say: the stream stores it whole then, and takes its pieces away. It
        # may do that, and more than once, while this looks for them.
        for destination in self._destinations:
            tried: set[SegmentKey] = set()
            try:
                while left := [one for one in holding(destination, self._server, key) if one not in tried]:
                    tried.add(left[0])
                    try:
                        return ask(destination, left[0])
                    except (DamagedError, DestinationError, NotFoundError) as error:
                        failures.append(error)
            except DestinationError as error:
                failures.append(error)
        raise _unreadable(self._named.get(key) or f"file {key.number}", key, failures)

    def _warn(self, failures: Sequence[BackupdError]) -> None:
        with self._lock:
            self.warnings += [line for error in failures if (line := _line(error)) not in self.warnings]

    def _read(
        self,
        destination: Destination,
        header: SegmentHeader,
        folder: Path,
        have: int,
        stop: int,
        failures: list[BackupdError],
    ) -> tuple[Path, int]:
        """Bring one segment from ``destination``, and parts that it lacks from elsewhere: of it what is behind ``have``
        and before ``stop``."""
        key = header.segment.key
        path = folder / _safe(header.segment.file)
        passed: list[BackupdError] = []
        instead = self._elsewhere(destination, header, passed)
        if key.start >= have and key.end <= stop:
            if not _holds(path, key, header.segment.sha256):
                self._require_bound(destination, header)
                _shorten(path, key.start)
                segments.fetch(destination, header, self._unsealer, path, append=key.start > 0, instead=instead)
        else:
            self._require_bound(destination, header)
            begin, end = max(have, key.start), min(key.end, stop)
            with _file_at(path):
                segments.fetch_range(destination, header, self._unsealer, path, begin, end, instead=instead)
        failures += passed
        return path, min(key.end, stop)

    def _require_bound(self, destination: Destination, header: SegmentHeader) -> None:
        """Once for each description."""
        where = destination.name, header.segment.key
        if self._bound.get(where) != header:
            segments.require_bound(destination, header, self._unsealer)
            self._bound[where] = header

    def _note(self, size: int, name: str) -> None:
        with self._lock:
            self._done += size
            self._context.report(Progress("logs", self._done, self.total, note=name))

    def _elsewhere(
        self, destination: Destination, header: SegmentHeader, passed: list[BackupdError]
    ) -> segments.Instead:
        """A part that ``destination`` does not give, from the first other destination that does; what was passed over
        goes to ``passed``. Raises what ``destination`` said where no destination has it."""

        def read(number: int, error: BackupdError) -> bytes:
            passed.append(error)
            for other in self._destinations:
                if other is destination:
                    continue
                try:
                    return segments.read_part(other, header, number, self._unsealer)
                except (DamagedError, DestinationError, NotFoundError) as failure:
                    passed.append(failure)
            raise error

        return read


def _safe(name: str) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise DamagedError("a segment has an invalid binary log name", [repr(name)])
    return name


def _holds(path: Path, key: SegmentKey, digest: str) -> bool:
    """Is the segment in the file already, byte for byte?"""
    if not path.is_file() or path.stat().st_size < key.end:
        return False
    return digest_of(path, key.start, key.end) == digest


@contextlib.contextmanager
def _file_at(path: Path) -> Iterator[None]:
    """Let there be a file (0600) at ``path``; one that was made for it goes when the block fails."""
    made = not path.exists()
    if made:
        write_private(path, b"")
    try:
        yield
    except BaseException:
        if made:
            path.unlink()
        raise


def _executed(header: SegmentHeader, transactions: Iterable[tuple[str, int, int]], since: int) -> tuple[int, str]:
    """The end of the last transaction that ends by ``since``, or the beginning of the segment, and all that is executed
    there, as its log records it."""
    segment = header.segment
    state = (MariadbState if segment.flavour == "mariadb" else MysqlState)(segment.gtids_before)
    last = segment.start
    for gtid, _start, end in transactions:
        if end > since:
            break
        last = end
        if gtid and isinstance(state, MariadbState):
            domain, server, sequence = gtid.split("-")
            state.add(domain, int(server), int(sequence))
        elif gtid:
            source, _, number = gtid.rpartition(":")
            state.add(source, 0, int(number))
    return last, str(state)


def _goes_on_at(path: Path, end: int) -> bool:
    """Is there a file whose hole ends at ``end``?"""
    try:
        hole = hole_of(path)
    except (FileNotFoundError, DamagedError, StreamError):
        return False
    return hole is not None and hole.end == end


def _shorten(path: Path, size: int) -> None:
    """What is there from ``size`` on is not what it should be."""
    if size and path.is_file():
        os.truncate(path, size)
    else:
        path.unlink(missing_ok=True)


def _unreadable(name: str, key: SegmentKey, failures: Sequence[BackupdError]) -> BackupdError:
    hole = f"nothing after {name}:{key.start} can be replayed; the archive continues at {name}:{key.end}"
    message = f"bytes {key.start} to {key.end} of binary log {name} cannot be read from any destination"
    hint = (
        "repeat the command: it plans again with the readable copies. `backupd verify` checks every copy; a copy "
        "stored elsewhere can be put back at its destination"
    )
    lines = [
        line for error in failures for line in (error.damages if isinstance(error, DamagedError) else [_line(error)])
    ]
    if any(isinstance(error, ArchivedError) for error in failures):
        return ArchivedError(
            message,
            detail="\n".join([hole, *lines]),
            hint="it is in an archive class: thaw it first with `backupd thaw SERVER --to "
            "TARGET`, or repeat this with --thaw TIER; it continues",
        )
    gone = (DamagedError, NotFoundError, ObjectMissingError)
    if any(isinstance(error, gone) for error in failures) or not failures:
        return DamagedError(message, [hole, *lines], hint=hint)
    return DestinationError(
        message,
        detail="\n".join([hole, *lines]),
        hint="check that the destination can be reached, then repeat the command: it continues",
    )


def _line(error: BackupdError) -> str:
    return error.line[:400]

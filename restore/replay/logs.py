"""The archived binary logs of a replay, as plain files with their original names, each proved before it is used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from threading import Event, Lock

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
)
from backupd.model.job import Progress
from backupd.process.folders import digest_of
from backupd.process.run_context import RunContext
from backupd.transfer import log_segments as segments
from backupd.transfer.log_segments import holding
from backupd.transfer.records.segment_documents import SegmentHeader
from restore.datadir.occupancy import RESERVE, refuse_full
from restore.fetch.objects import default_workers
from restore.fetch.sources import Sources
from storage.destination import Destination

COPIES = 3
"""How many copies of the logs are on the disk while they are replayed: fetched, served, and as relay logs of the
copy."""


@dataclass(frozen=True, slots=True)
class Logs:
    """``legs``: of each leg its files in log order, the last one cut at the stop; ``warnings``: copies that could not
    be used, one line each."""

    legs: tuple[tuple[Path, ...], ...]
    warnings: tuple[str, ...]


def refuse_no_room_for(spec: ReplaySpec, folder: Path) -> None:
    """Raises RefusedError when the logs of ``spec`` do not fit at ``folder`` (or the nearest one above it)."""
    refuse_full(
        folder,
        spec.size * COPIES + RESERVE,
        "the binary logs",
        detail=f"{spec.size:,} bytes of logs, {COPIES} times while they are replayed; {RESERVE:,} bytes reserve",
        hint="free some space there, or choose a target closer to a backup",
    )


def fetch_logs(server: str, spec: ReplaySpec, sources: Sources, folder: Path, context: RunContext) -> Logs:
    """Bring the segments of every leg to ``folder``, which belongs to us; what an earlier call left there is used as
    far as its digests are right.

    The archives are tried in their order, for each segment anew, and for each part of one where a part is not what
    was stored. Raises RefusedError for logs that do not follow
    each other, naming both positions; DamagedError when no destination has a segment as it was stored, ArchivedError
    when it has to be thawed first, or DestinationError when none could be asked, naming the positions between which
    nothing can be replayed; KeyUnusableError, CancelledError.
    """
    total = sum(key.end - key.start for leg in spec.legs for key in leg.segments)
    job = _Job(server, sources, context, total)
    wanted: list[tuple[Path, list[_File]]] = []
    for number, leg in enumerate(spec.legs, start=1):
        target = folder / f"{number}"
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted.append((target, _files(server, leg)))
    with ThreadPoolExecutor(max_workers=default_workers(), thread_name_prefix="logs") as pool:
        pending = [[pool.submit(job.bring, target, file) for file in files] for target, files in wanted]
        legs = tuple(tuple(future.result() for future in futures) for futures in pending)
    return Logs(legs, tuple(job.warnings))


@dataclass(frozen=True, slots=True)
class _File:
    """The segments of one file, from its first byte on; ``end``: where the replay stops in it, None for all of it."""

    segments: tuple[SegmentKey, ...]
    end: int | None


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
        found.append(_File(keys, None))
    if before is None:
        return []
    stop = leg.stop
    if int(stop.file.rpartition(".")[2]) != before.number or before.end < stop.pos:
        raise _hole(
            server, f"byte {before.end} of file {before.number}", f"{stop.file}:{stop.pos}, where the replay is to end"
        )
    return [*found[:-1], _File(found[-1].segments, stop.pos)]


def _hole(server: str, after: str, before: str) -> RefusedError:
    return RefusedError(
        "the archived binary logs are not complete: nothing was restored",
        detail=f"the last position before the gap is {after}, the first after it {before}",
        hint=f"`backupd timeline {server}` shows what is recoverable; choose a target before the gap",
    )


class _Job:
    def __init__(self, server: str, sources: Sources, context: RunContext, total: int) -> None:
        self._server, self._context, self._total = server, context, total
        self._destinations, self._unsealer = sources.archives, sources.unsealer
        self._lock = Lock()
        self._done = 0
        self._failed = Event()
        self._named: dict[SegmentKey, str] = {}
        self.warnings: list[str] = []

    def bring(self, folder: Path, file: _File) -> Path:
        """Make the file in ``folder`` hold exactly what it should; gives its path."""
        try:
            return self._bring(folder, file)
        except BaseException:
            self._failed.set()
            raise

    def _bring(self, folder: Path, file: _File) -> Path:
        path: Path | None = None
        have = 0
        for key in file.segments:
            if path is not None and key.end <= have:  # a larger segment that was read instead of another holds it
                self._note(key, path.name)
                continue
            if self._failed.is_set() or self._context.is_cancelled():
                raise CancelledError(
                    "the restore was cancelled while binary logs were fetched",
                    hint="the same command continues where it stopped",
                )
            path, have = self._segment(folder, key)
        assert path is not None  # noqa: S101  a file has segments
        end = file.segments[-1].end if file.end is None else file.end
        if path.stat().st_size != end:
            os.truncate(path, end)
        return path

    def _segment(self, folder: Path, key: SegmentKey) -> tuple[Path, int]:
        """The file, and up to where it holds now what it should: up to the end of ``key`` at least."""
        failures: list[BackupdError] = []
        for destination in self._destinations:
            try:
                path = self._read(destination, key, folder, failures)
            except (DamagedError, DestinationError, NotFoundError) as error:
                failures.append(error)
                continue
            with self._lock:
                self.warnings += [_line(error) for error in failures]
            self._note(key, path.name)
            return path, key.end
        # Its file has ended since this was planned, say: the stream stores it whole then, and takes its pieces away.
        for destination in self._destinations:
            try:
                for larger in holding(destination, self._server, key):
                    path = self._read(destination, larger, folder, failures)
                    self._note(key, path.name)
                    return path, larger.end
            except (DamagedError, DestinationError, NotFoundError) as error:
                failures.append(error)
        raise _unreadable(self._named.get(key) or f"file {key.number}", key, failures)

    def _read(self, destination: Destination, key: SegmentKey, folder: Path, failures: list[BackupdError]) -> Path:
        """Bring one segment from ``destination``, and parts that it lacks from elsewhere."""
        header = segments.load_header(destination, self._server, key)
        self._named[key] = header.segment.file
        path = folder / _safe(header.segment.file)
        if not _holds(path, key, header.segment.sha256):
            segments.require_bound(destination, header, self._unsealer)
            _shorten(path, key.start)
            passed: list[BackupdError] = []
            segments.fetch(
                destination,
                header,
                self._unsealer,
                path,
                append=key.start > 0,
                instead=self._elsewhere(destination, header, passed),
            )
            failures += passed
        return path

    def _note(self, key: SegmentKey, name: str) -> None:
        with self._lock:
            self._done += key.end - key.start
            self._context.report(Progress("logs", self._done, self._total, note=name))

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

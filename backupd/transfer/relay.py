"""One stored thing after the other from any of several destinations to another one, compared on its way.

Nothing is opened, so no key is needed: the bytes that arrive are those that the manifest or the segment's header
describes, or none do.
"""

from __future__ import annotations

import hashlib
import io
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, TypeVar

from backupd.model.errors import ArchivedError, BackupdError, DamagedError, DestinationError, ObjectMissingError
from backupd.model.job import Progress, Report
from backupd.model.manifest import StoredObject
from backupd.transfer.records.manifests import get_bytes, put_bytes
from storage import layout, objects
from storage.destination import Capability, ChecksumDestination, Destination

PAUSES = (1.0, 5.0, 20.0)
"""Seconds between tries of one thing at a target that fails for a moment."""
_CHUNK = 1 << 20
_STEP = 0.2
"""Seconds between looks whether to stop."""

Check = Callable[[], None]
"""Called often; raises to end the work."""
Found = TypeVar("Found")


class Meter:
    """Counts what was done, and reports it; for any number of threads."""

    def __init__(self, report: Report, phase: str, total: int = 0, files_total: int = 0, note: str = "") -> None:
        self._report, self._phase, self._note = report, phase, note
        self.total, self.files_total = total, files_total
        self.bytes = self.files = 0
        self._lock = threading.Lock()

    def add(self, size: int, files: int = 0) -> None:
        """``size`` bytes, and so many files, more."""
        with self._lock:
            self.bytes += size
            self.files += files
            progress = Progress(self._phase, self.bytes, self.total, self.files, self.files_total, self._note)
        self._report(progress)


@dataclass(frozen=True, slots=True)
class Tally:
    """What was brought: ``sent`` bytes of ``things``; ``present``: how many were there already."""

    sent: int = 0
    things: int = 0
    present: int = 0


@dataclass(frozen=True, slots=True)
class Document:
    """``where`` it was read, for people. ``signature``: what lay beside it, None where nothing did."""

    where: str
    key: str
    content: bytes
    signature: bytes | None


class Relay:
    """``sources`` in the order to ask them; for any number of threads. ``moved`` hears of bytes as they pass."""

    def __init__(
        self,
        sources: Sequence[Destination],
        target: Destination,
        *,
        check: Check = lambda: None,
        moved: Callable[[int], None] = lambda _size: None,
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        self.target = target
        self._sources = tuple(sources)
        self._check, self._moved, self._pauses = check, moved, pauses
        self._lock = threading.Lock()
        self._tally = Tally()
        self._remarks: dict[str, None] = {}
        self._stored: set[str] = set()

    @property
    def tally(self) -> Tally:
        """What was brought until now."""
        with self._lock:
            return self._tally

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was found wrong at sources and got around with another one."""
        with self._lock:
            return tuple(self._remarks)

    @property
    def stored(self) -> frozenset[str]:
        """Keys whose bytes were sent, and taken by the target."""
        with self._lock:
            return frozenset(self._stored)

    def bring(self, key: str, item: StoredObject) -> bool:
        """Make ``key`` at the target hold the bytes of ``item``; False when it did already, which is read, or
        confirmed by a destination that audits itself. Raises as ``send`` does."""
        if self._patiently(lambda: not found_wrong(self.target, key, item)):
            self.pass_over(item)
            return False
        self.send(key, item)
        return True

    def pass_over(self, item: StoredObject) -> None:
        """``item`` is there already."""
        with self._lock:
            self._tally = Tally(self._tally.sent, self._tally.things, self._tally.present + 1)
        self._moved(item.size)

    def send(self, key: str, item: StoredObject) -> None:
        """Put the bytes of ``item``, of the first source that has them, whatever is there.

        Raises DamagedError naming every source when none has the true bytes, DestinationError when sources or the
        target fail, and what ``check`` raises.
        """
        failures: list[BackupdError] = []
        for source in self._sources:
            self._check()
            try:
                self._patiently(partial(self._pass, source, key, item))
            except _SourceError as error:
                failures.append(error.cause)
                continue
            self._note(failures)
            return
        raise _no_source(self.target, key, failures)

    def documents(self, key: str) -> Iterator[Document]:
        """The small document under ``key`` at each source that gives it, in the order of the sources; no more are asked
        than somebody wants. Raises what the first failed with when none gave it and some failed."""
        found = False
        failures: list[BackupdError] = []
        for source in self._sources:
            self._check()
            try:
                content = get_bytes(source, key)
                signature = _bytes(source, layout.signature_key(key))
            except ObjectMissingError:
                continue
            except (DestinationError, DamagedError) as error:  # out of reach, or nobody we trust vouches for it
                failures.append(error)
                continue
            found = True
            yield Document(f"{source.name}: {key}", key, content, signature)
        if failures and not found:
            raise failures[0]

    def first_good(
        self, key: str, decode: Callable[[bytes, str], Found], message: str, missing: BackupdError | None = None
    ) -> tuple[Document, Found]:
        """The first document under ``key`` at a source that ``decode`` (of its bytes and where it is) can read, and
        what that gave. Raises DamagedError with ``message``; ``missing`` where no source has one."""
        damages: list[str] = []
        for document in self.documents(key):
            try:
                return document, decode(document.content, document.where)
            except DamagedError as error:
                damages += error.damages
        if missing is not None and not damages:
            raise missing
        hint = "`backupd verify` shows what else is damaged"
        raise DamagedError(message, damages or [f"{key} is missing"], hint=hint)

    def put(self, document: Document) -> None:
        """Byte for byte, and behind its signature, so that it stays as good as it was."""
        if document.signature is not None:
            self._patiently(partial(put_bytes, self.target, layout.signature_key(document.key), document.signature))
        self._patiently(partial(put_bytes, self.target, document.key, document.content))

    def holds(self, document: Document) -> bool:
        """Is it at the target already?"""
        return bool(self._patiently(lambda: _bytes(self.target, document.key) == document.content))

    # -- inside

    def _pass(self, source: Destination, key: str, item: StoredObject) -> None:
        try:
            opened = source.get(key, length=item.size + 1)  # one byte more, so that bytes appended to it are noticed
        except DestinationError as error:
            raise _SourceError(error) from error
        with opened as stream:
            passing = _Passing(stream, source, key, item, self._check, self._moved)
            try:
                # Not closed here: a driver may have done that, and there is nothing of its own to give back.
                self.target.put(key, io.BufferedReader(passing, _CHUNK))
            except BaseException as error:
                self._moved(-passing.passed)
                if passing.failure is not None:
                    raise _SourceError(passing.failure) from error
                raise
        with self._lock:
            self._stored.add(key)
            self._tally = Tally(self._tally.sent + item.size, self._tally.things + 1, self._tally.present)

    def _patiently(self, work: Callable[[], object]) -> object:
        """``work``, again after a pause where the target fails for a moment."""
        for pause in self._pauses:
            try:
                return work()
            except DestinationError as error:
                if not error.retryable or type(error) is not DestinationError:
                    raise
                self._pause(pause)
        self._check()
        return work()

    def _pause(self, seconds: float) -> None:
        """Whoever asks to stop does not wait for its end."""
        end = time.monotonic() + seconds
        self._check()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _STEP))
            self._check()

    def _note(self, failures: Sequence[BackupdError]) -> None:
        with self._lock:
            self._remarks.update(dict.fromkeys(line_of(error) for error in failures))


def found_wrong(destination: Destination, key: str, item: StoredObject, *, fresh: bool = False) -> str:
    """What is wrong with what is under ``key``, "" when nothing is. It is read, unless the checksum that the
    destination recorded shows what is there now: where the destination audits itself, or we have just stored it
    (``fresh``). In an archive class the recorded one has to do. Raises ArchivedError where there is none either."""
    audited = Capability.AUDITED in destination.capabilities
    recorded: str | None = None
    try:
        size = destination.stat(key).size
        recorded = checksum(destination, key)
        if size != item.size:
            return f"holds {size} bytes where {item.size} were stored"
        if recorded is None or not (audited or fresh):
            return objects.problem(destination, key, item)
    except ObjectMissingError:
        return "is missing"
    except ArchivedError:
        if recorded is None:
            raise
    return "" if recorded == item.sha256 else "holds other bytes than were stored (by the destination's SHA-256)"


def checksum(destination: Destination, key: str) -> str | None:
    """The SHA-256 of ``key`` as the destination itself recorded it, None where it has none. Raises
    ObjectMissingError."""
    if Capability.CHECKSUMS in destination.capabilities and isinstance(destination, ChecksumDestination):
        return destination.checksum(key)
    return None


def _bytes(destination: Destination, key: str) -> bytes | None:
    try:
        return get_bytes(destination, key)
    except ObjectMissingError:
        return None


class _SourceError(Exception):
    """It is the source that failed, not the target."""

    def __init__(self, cause: BackupdError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class _Passing(io.RawIOBase):
    """What a source gives, compared at its end: before that nobody who reads it to the end believes it."""

    def __init__(
        self,
        stream: BinaryIO,
        source: Destination,
        key: str,
        item: StoredObject,
        check: Check,
        moved: Callable[[int], None],
    ) -> None:
        self._stream, self._source, self._key, self._item = stream, source, key, item
        self._check, self._moved = check, moved
        self._digest = hashlib.sha256()
        self.passed = 0
        self.failure: BackupdError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]  # all that a reader passes
        self._check()
        try:
            data = self._stream.read(min(len(buffer), _CHUNK))
            self._digest.update(data)
            self.passed += len(data)
            if not data:
                self._judge()
        except BackupdError as error:
            self.failure = error
            raise
        except OSError as error:  # the medium itself: a bad sector
            self.failure = self._damaged(f"cannot be read: {error.strerror or error}")
            raise self.failure from error
        self._moved(len(data))
        buffer[: len(data)] = data
        return len(data)

    def _judge(self) -> None:
        if self.passed != self._item.size:
            raise self._damaged(f"holds {self.passed} bytes where {self._item.size} were stored")
        if self._digest.hexdigest() != self._item.sha256:
            raise self._damaged("holds other bytes than were stored (SHA-256 differs)")

    def _damaged(self, problem: str) -> DamagedError:
        return DamagedError(
            f"{self._source.name}: {self._key} is damaged", [f"{self._source.name}: {self._key}: {problem}"]
        )


def _no_source(target: Destination, key: str, failures: Sequence[BackupdError]) -> BackupdError:
    damaged = [error for error in failures if isinstance(error, (DamagedError, ObjectMissingError))]
    if failures and not damaged:
        return failures[0]
    lines = [line_of(error) for error in failures] or [f"{key}: no destination holds it"]
    return DamagedError(
        f"{key} cannot be copied to {target.name}: no destination has the original",
        lines,
        hint="`backupd verify` shows what else is damaged, and repairs what another copy can repair",
    )


def line_of(error: BackupdError) -> str:
    """``error`` in one line: of damage the first thing that is damaged."""
    if isinstance(error, DamagedError) and error.damages:
        return error.damages[0]
    return error.line

"""An archive under test: a spool that the test fills, destinations that can fail, and a recorder that keeps count."""

from __future__ import annotations

import hashlib
import io
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

from backupd.binlog.archiver import Archiver, Shipped
from backupd.binlog.spool_files import Spool, Spooled
from backupd.model.binlog import Branch, BranchReason, FilePosition, Gap, Segment, SegmentKey
from backupd.model.errors import CatalogError
from backupd.transfer import log_segments as segments
from backupd.transfer.collection import collect
from backupd.transfer.fsck import Invariant, examine
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.segment_documents import SegmentHeader, decode_segment
from storage import layout
from storage.destination import Destination, ObjectInfo
from tests.support.logs.real_logs import RealLog
from tests.support.oracle import same
from tests.support.stores.memory import MemoryDestination

START = datetime(2026, 11, 21, 4, 0, 0, tzinfo=UTC)
BRANCH = "20261121T040000Z-0000000a"
CHECKPOINT = timedelta(seconds=60)


class Killed(BaseException):
    """The process dies here."""


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def move(self, seconds: float) -> datetime:
        self.now += timedelta(seconds=seconds)
        return self.now


class Faults:
    """Counts what is done, and dies at operation ``at``: before it is done or (``after``) right after."""

    def __init__(self, at: int = -1, *, after: bool = False) -> None:
        self.at, self.after, self.count = at, after, 0
        self.changes: set[int] = set()
        self._lock = threading.Lock()

    def before(self) -> None:
        with self._lock:
            self.count += 1
            if self.count == self.at and not self.after:
                raise Killed

    def behind(self) -> None:
        """Of those that change something."""
        self.changes.add(self.count)
        if self.count == self.at and self.after:
            raise Killed


class Faulty(MemoryDestination):
    """``refuse``: what every call raises; ``hang``: calls wait until it is set; ``twist``: keys that contain this are
    given back wrong. No key may get a segment of other content than before."""

    def __init__(self, name: str, clock: Callable[[], datetime], faults: Faults | None = None) -> None:
        super().__init__(name, clock=clock)
        self.faults = faults or Faults()
        self.refuse: Exception | None = None
        self.hang: threading.Event | None = None
        self.twist = ""
        self.lose = ""
        self.contents: dict[str, str] = {}

    def _trouble(self) -> None:
        if self.hang is not None:
            self.hang.wait(60)
        if self.refuse is not None:
            raise self.refuse
        self.faults.before()

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        self._trouble()
        data = stream.read()
        if key.endswith(layout.SEGMENT):
            sha256 = decode_segment(data, where=key).segment.sha256
            assert self.contents.setdefault(key, sha256) == sha256, f"{key} got other content"
        info = super().put(key, io.BytesIO(data))
        if self.lose and self.lose in key:
            super().delete(key)
        self.faults.behind()
        return info

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        self._trouble()
        stream = super().get(key, offset=offset, length=length)
        if self.twist and self.twist in key:
            data = bytearray(stream.read())
            data[-1] ^= 1
            return io.BytesIO(data)
        return stream

    def stat(self, key: str) -> ObjectInfo:
        self._trouble()
        return super().stat(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._trouble()
        return super().list(prefix)

    def duplicate(self, source: str, target: str) -> bool:
        self._trouble()
        done = super().duplicate(source, target)
        self.faults.behind()
        return done

    def delete(self, key: str) -> None:
        self._trouble()
        super().delete(key)
        self.faults.behind()


class QuickSealer(Sealer):
    """Seals without gpg, and differently each time; for tests of what happens around it."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.recipients = ("A" * 40,)
        self.faults = faults or Faults()
        self.calls = 0
        self.refuse: Exception | None = None

    def seal(self, plain: bytes | bytearray | memoryview, *, compressed: object = None) -> bytes:
        if self.refuse is not None:
            raise self.refuse
        self.faults.before()
        self.calls += 1
        return secrets.token_bytes(16) + bytes(plain)

    def seal_pieces(self, plain: Iterable[bytes | bytearray | memoryview], size: int, target: Path) -> tuple[int, str]:
        sealed = self.seal(b"".join(plain))
        target.write_bytes(sealed)
        return len(sealed), hashlib.sha256(sealed).hexdigest()


@dataclass
class Books:
    """A recorder as strict as the catalog: nothing before what it needs."""

    branches: dict[str, Branch] = field(default_factory=dict)
    segments: dict[tuple[str, SegmentKey], Segment] = field(default_factory=dict)
    confirmations: dict[str, tuple[tuple[int, int], datetime]] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    broken: bool = False
    forgotten: bool = False
    """It may have been told by a process before this one what it is not told again."""
    faults: Faults = field(default_factory=Faults)

    def _open(self) -> None:
        self.faults.before()
        if self.broken:
            raise CatalogError("the catalog's database is locked")

    def branch_stored(self, branch: Branch) -> None:
        self._open()
        self.branches[branch.id] = branch

    def segment_stored(self, segment: Segment, destination: str, stored_bytes: int, at: datetime) -> None:
        self._open()
        assert segment.branch in self.branches
        assert stored_bytes > 0
        self.segments[destination, segment.key] = segment
        self.faults.behind()

    def segments_dropped(self, server: str, keys: Sequence[SegmentKey], destination: str) -> None:
        self._open()
        for key in keys:
            held = [other for name, other in self.segments if name == destination and other != key]
            assert self.forgotten or any(
                (other.branch, other.number) == (key.branch, key.number)
                and other.start <= key.start
                and key.end <= other.end
                for other in held
            )
            self.segments.pop((destination, key), None)
        self.faults.behind()

    def confirmed(self, destination: str, branch: str, position: FilePosition, at: datetime) -> None:
        self._open()
        assert branch in self.branches
        self.confirmations[destination] = (position, at)

    def gap(self, gap: Gap) -> None:
        self._open()
        self.gaps.append(gap)

    def of(self, destination: str) -> list[SegmentKey]:
        return sorted(key for name, key in self.segments if name == destination)


class House:
    """Fills a spool by hand and archives it to ``destinations``."""

    def __init__(
        self,
        folder: Path,
        destinations: Sequence[Destination],
        clock: Clock,
        *,
        sealer: Sealer | None = None,
        books: Books | None = None,
        branch: str = BRANCH,
    ) -> None:
        self.spool = Spool(folder)
        self.destinations: Mapping[str, Destination] = {item.name: item for item in destinations}
        self.clock = clock
        self.sealer = sealer or QuickSealer()
        self.books = books or Books()
        with self.spool.locked():
            if not self.spool.branches():
                self.spool.begin(branch_of(branch))
        self.branch = self.spool.branches()[-1]

    def grow(self, log: RealLog, size: int | None = None) -> Spooled:
        """The stream has written the first ``size`` bytes of ``log``."""
        found = next((file for file in self.spool.files() if file.number == log.number), None)
        if found is None:
            (self.spool.incoming / log.name).write_bytes(b"")
            found = self.spool.take(self.branch, log.number, log.name)
        found.path.write_bytes(log.data[:size])
        return next(file for file in self.spool.files() if file.number == log.number)

    def end(self, log: RealLog, size: int | None = None) -> None:
        self.spool.end(self.grow(log, size), log.ending)

    def archiver(self, **settings: float) -> Archiver:
        return Archiver(
            self.spool,
            self.destinations,
            self.sealer,
            self.books,
            checkpoint=CHECKPOINT,
            clock=self.clock,
            patience=settings.pop("patience", 300.0),
            letting_go=settings.pop("letting_go", 5.0),
            most_sealed=int(settings.pop("most_sealed", 1 << 30)),
        )

    def step(self, seconds: float = 0, **settings: float) -> Shipped:
        """One step of an archiver of its own."""
        with self.archiver(**settings) as archiver:
            return archiver.step(self.clock.move(seconds))

    def judge(self, verdict: str) -> None:
        """The stream has fetched again what is damaged."""
        for doubt in self.spool.doubts():
            self.spool.judge(doubt, verdict)

    def settle(self) -> None:
        """Step until nothing more happens."""
        with self.archiver() as archiver:
            for _ in range(50):
                done = archiver.step(self.clock.move(400))
                assert not done.trouble, done.trouble
                assert not done.unrecorded
                if not (done.stored or done.dropped or done.removed):
                    return
        raise AssertionError("it never comes to rest")

    def key(self, log: RealLog, start: int = 0, end: int | None = None) -> SegmentKey:
        return SegmentKey(self.branch.id, log.number, start, log.size if end is None else end)

    def keys(self, name: str) -> list[SegmentKey]:
        return [key for _server, key in segments.keys(self.destinations[name])]

    def check(self, name: str, logs: Sequence[RealLog]) -> None:
        """Exactly ``logs`` are at the destination, whole, byte for byte, and the recorder knows; what a kill left there
        is found, and collected."""
        destination = self.destinations[name]
        found = [header for header in segments.headers(destination) if isinstance(header, SegmentHeader)]
        assert [(h.segment.number, h.segment.start, h.segment.end) for h in found] == [
            (log.number, 0, log.size) for log in logs
        ]
        for header, log in zip(found, logs, strict=True):
            same(plain_of(destination, header), log.archived, header.folder)
            assert header.segment.ending is log.ending
            assert header.segment.transactions == len(log.transactions)
            assert self.books.segments[name, header.segment.key] == header.segment
        assert self.books.of(name) == [header.segment.key for header in found]

        def later() -> datetime:
            return self.clock() + timedelta(days=30)

        assert {item.invariant for item in examine(destination, None, clock=later)} <= {
            Invariant.NO_ORPHAN_SEGMENT_PART
        }
        collect(destination, clock=later)
        assert examine(destination, None, clock=later) == []


def plain_of(destination: Destination, header: SegmentHeader) -> bytes:
    """What QuickSealer sealed."""
    assert segments.problems(destination, header) == {}
    plain = b""
    for part in header.parts:
        with destination.get(header.folder + part.stored.name) as stream:
            plain += stream.read()[16:]
    same(hashlib.sha256(plain).hexdigest(), header.segment.sha256, header.folder)
    return plain


def branch_of(name: str) -> Branch:
    return Branch(
        server="shop",
        id=name,
        noticed_at=START,
        reason=BranchReason.FIRST,
        server_uuid="u",
        flavour="mariadb",
        basename="binlog",
        first_number=1,
    )

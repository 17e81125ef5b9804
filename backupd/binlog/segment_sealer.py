"""Segments of the spool's files, scanned and sealed in one pass, and kept sealed until every destination has them.

The bytes are read twice, but once each: by the scan, which goes ahead, and by the thread that seals what the scan has
found to be whole transactions. Right after the server has sent them they are in the page cache.

A larger segment is put together from the pieces that were sealed before: it takes over their parts as they are, and
only seals what is new, the index, and parts that are too small to stay alone. So the pieces of a file are kept until it
is whole everywhere: of those that every destination has, the description and the transactions. What cannot be put
together is sealed anew from the spool.

What is kept can be made again at any time, so it is bounded: of what waits for destinations that are down, the newest
is thrown away first and sealed anew when its turn comes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from backupd.binlog.segment_cutter import Cut, LogFile
from backupd.binlog.spool_files import Spooled
from backupd.engine.binlog.scan import Scan, scan
from backupd.engine.binlog.transactions import ScanContext
from backupd.model.binlog import Branch, Ending, Segment, SegmentKey, Transaction
from backupd.model.document import Document, made_of
from backupd.model.errors import DamagedError, StreamError
from backupd.model.manifest import PART_SIZE
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.segment_documents import Sealed, SealedPart, Sealing, without_flag

SMALL_PART = 4 * 1024 * 1024
"""Plain bytes of a part below which it is sealed again together with its neighbours, where these are small, too."""
HEAD = 8 * 1024
"""Bytes at the beginning of a file, its format description among them, that are a part of their own where the file has
others: a replay that begins further on needs no more of what is before."""
_NEW = "new"
_READ = 1 << 20
_FINDINGS = "findings.json"


class DamagedLogError(DamagedError):
    """A file of the spool cannot be read behind ``good``, the end of its last whole transaction (0: of none)."""

    def __init__(self, file: Spooled, damages: Sequence[str], good: int) -> None:
        super().__init__(
            f"binary log {file.name} in the spool is damaged behind byte {good}",
            damages,
            hint="backupd fetches it from the server again",
        )
        self.good = good


@dataclass(frozen=True, slots=True)
class Findings(Document):
    """What a scan found, as Scan has it, and one over several pieces."""

    gtids_before: str
    gtids_after: str
    transactions: int
    first_at: datetime | None
    last_at: datetime | None
    precise: bool
    server_ids: tuple[int, ...]
    remarks: tuple[str, ...]
    flavour: str
    server_version: str

    @classmethod
    def of(cls, found: Scan) -> Findings:
        return made_of(cls, found, flavour=found.context.flavour, server_version=found.context.server_version)

    def plus(self, later: Findings) -> Findings:
        """With those of what follows."""
        return replace(
            self,
            gtids_after=later.gtids_after,
            transactions=self.transactions + later.transactions,
            first_at=min((at for at in (self.first_at, later.first_at) if at is not None), default=None),
            last_at=max((at for at in (self.last_at, later.last_at) if at is not None), default=None),
            precise=self.precise and later.precise,
            server_ids=tuple(sorted({*self.server_ids, *later.server_ids})),
            remarks=tuple(dict.fromkeys((*self.remarks, *later.remarks))),
        )


@dataclass(slots=True)
class _Reading:
    """SHA-256 of the first ``end`` bytes of a file (their in-use flag cleared), and which file on the disk it was."""

    inode: int
    end: int
    digest: hashlib._Hash


@dataclass(frozen=True, slots=True)
class _Piece:
    sealed: Sealed
    findings: Findings

    @property
    def segment(self) -> Segment:
        return self.sealed.header.segment


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes ``[start, end)`` of a file: taken over as ``part``, which is in ``folder``, or sealed (None)."""

    start: int
    end: int
    part: SealedPart | None = None
    folder: Path = Path()

    @property
    def is_small(self) -> bool:
        return self.part is None or self.part.size < SMALL_PART


class _Compared:
    """Takes what is sealed again, in order: are the bytes of each of ``parts``, but for those that are skipped, the
    ones that were sealed before? Those behind all of them go to ``digest``."""

    def __init__(self, parts: Iterable[_Span], digest: hashlib._Hash) -> None:
        self._sizes = deque((part.end - part.start, part.part.sha256) for part in parts if part.part is not None)
        self._digest = digest
        self._own, self._came = hashlib.sha256(), 0
        self.is_same = True

    def skip(self) -> None:
        """The next part was taken over."""
        self._sizes.popleft()

    def update(self, data: bytes, /) -> None:
        view = memoryview(data)
        while view and self._sizes:
            size, sha256 = self._sizes[0]
            taken = view[: size - self._came]
            self._own.update(taken)
            self._came += len(taken)
            view = view[len(taken) :]
            if self._came == size:
                self.is_same = self.is_same and self._own.hexdigest() == sha256
                self._own, self._came = hashlib.sha256(), 0
                self._sizes.popleft()
        self._digest.update(view)


class Cutter:
    """Everything lies in ``folder``, which ``tidy`` empties of all that it need not keep. Raises OSError."""

    def __init__(self, folder: Path, sealer: Sealer, *, most_bytes: int) -> None:
        self._folder = folder
        self._sealer = sealer
        self._most = most_bytes
        self._kept: dict[SegmentKey, Sealed] = {}
        self._read: dict[tuple[str, int], _Reading] = {}
        self._anew: set[SegmentKey] = set()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def piece(self, file: Spooled, branch: Branch, log: LogFile, start: int) -> tuple[Cut, ScanContext] | None:
        """Cut ``[start, ...)`` behind the last complete transaction that the file has now; None without a new one.

        ``start``: behind the last piece of ``log``, or 0 for one that replaces them. Raises DamagedLogError.
        """
        try:
            return self._grown(file, branch, log, start)
        except StreamError:
            return None  # not even its first event is complete

    def sealed(self, file: Spooled, branch: Branch, log: LogFile, cut: Cut) -> Sealed:
        """The sealed segment for ``cut``; made (again) where it is not there. Raises DamagedLogError."""
        key = log.key(cut)
        kept = self._kept.get(key) or Sealed.load(self._path(key))
        if kept is None or kept.header.segment.ending is not cut.ending:
            try:
                kept = self._made(file, branch, log, cut)
            except StreamError as error:
                raise DamagedLogError(file, [error.message], 0) from error
            except FileNotFoundError as error:
                raise DamagedLogError(file, ["it is not there"], 0) from error
        self._kept[key] = kept
        return kept

    def seal_anew(self, key: SegmentKey) -> None:
        """A destination lacks parts that were taken over, and they are not here any more."""
        self._anew.add(key)
        self._kept.pop(key, None)
        Sealed.remove(self._path(key))

    def tidy(
        self, wanted: Sequence[SegmentKey], busy: Collection[SegmentKey], pieces: Collection[SegmentKey], *, light: bool
    ) -> None:
        """Remove what nobody wants; of ``wanted`` (in log order) the newest that are too much. Nothing of ``busy``.
        ``pieces``: of files that are not whole everywhere; where all destinations can copy what they hold (``light``),
        the sealed bytes of those that nobody wants go."""
        by_name = {self._path(key).name: key for key in (*wanted, *(key for key in pieces if key not in wanted))}
        at_work = {self._path(key).name for key in busy}
        of_pieces = {self._path(key).name for key in pieces}
        needed = {self._path(key).name for key in wanted}
        sizes: Mapping[str, int] = {path.name: _size(path) for path in self._folder.iterdir()}
        self._kept = {key: kept for key, kept in self._kept.items() if key in by_name.values() or key in busy}
        self._anew.intersection_update(wanted)
        files = {(key.branch, key.number) for key in by_name.values()}
        self._read = {key: reading for key, reading in self._read.items() if key in files}
        for name in sizes.keys() - by_name.keys() - at_work:
            Sealed.remove(self._folder / name)
        total = sum(size for name, size in sizes.items() if name in by_name)
        for name in reversed(by_name):
            spared = name not in sizes or name in at_work
            if spared or (total <= self._most and (name in needed or not light)):
                continue
            self._kept.pop(by_name[name], None)
            if name in of_pieces:
                Sealed.lighten(self._folder / name)
            else:
                Sealed.remove(self._folder / name)
            total -= sizes[name]

    # -- inside

    def _grown(self, file: Spooled, branch: Branch, log: LogFile, start: int) -> tuple[Cut, ScanContext] | None:
        if start == 0 and (pieces := self._pieces(file, log)):
            found = self._together(file, branch, pieces, log.context, Cut(0, file.size))
            if found is not None:
                return found if found[0].end > log.cut_to else None
        sealing = Sealing(self._folder / _NEW, self._sealer, piece=True)
        scanned, sha256 = self._cut(file, sealing, start, file.size, log.context if start else None)
        if scanned.end <= start:
            return None
        cut = Cut(start, scanned.end)
        self._finish(sealing, file, branch, cut, Findings.of(scanned), sha256, scanned.end)
        return cut, scanned.context

    def _made(self, file: Spooled, branch: Branch, log: LogFile, cut: Cut) -> Sealed:
        key = log.key(cut)
        can_join = cut.start == 0 and cut not in log.cuts and key not in self._anew
        pieces = self._pieces(file, log) if can_join else None
        if pieces and log.cut_to <= cut.end and self._together(file, branch, pieces, log.context, cut) is not None:
            return self._kept[key]
        sealing = Sealing(self._folder / _NEW, self._sealer, piece=cut.ending is Ending.OPEN)
        context = _scanned(file, None, 0, cut.start, None).context if cut.start else None
        scanned, sha256 = self._cut(file, sealing, cut.start, cut.end, context, whole=True)
        return self._finish(sealing, file, branch, cut, Findings.of(scanned), sha256, scanned.end)

    def _pieces(self, file: Spooled, log: LogFile) -> list[_Piece] | None:
        """The pieces of a file from its beginning on, sealed for the same keys as now; None where one is not known any
        more, or is not what the file holds."""
        found: list[_Piece] = []
        end = 0
        for cut in log.cuts:
            sealed = Sealed.described(self._path(log.key(cut)))
            if sealed is None or cut.start != end or sealed.header.recipients != self._sealer.recipients:
                return None
            try:
                text = (sealed.folder / _FINDINGS).read_text()
                found.append(_Piece(sealed, Findings.from_json(json.loads(text))))
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                return None
            end = cut.end
        if not found:
            return None
        reading = self._read.get(file.key)
        if reading is None or (reading.inode, reading.end) != (file.path.stat().st_ino, end):
            self._read.pop(file.key, None)
            reading = self._read_again(file, found)
        return found if reading is not None else None

    def _read_again(self, file: Spooled, pieces: Sequence[_Piece]) -> _Reading | None:
        """What an earlier process had read, or of another file than the one that is there now: does it hold what the
        pieces hold?"""
        whole = hashlib.sha256()
        with file.path.open("rb") as stream:
            inode = os.fstat(stream.fileno()).st_ino
            for piece in pieces:
                own = hashlib.sha256()
                for data in _plain(stream, piece.segment.start, piece.segment.end):
                    own.update(data)
                    whole.update(data)
                if own.hexdigest() != piece.segment.sha256:
                    return None
        reading = self._read[file.key] = _Reading(inode, pieces[-1].segment.end, whole)
        return reading

    def _together(
        self, file: Spooled, branch: Branch, pieces: Sequence[_Piece], context: ScanContext | None, cut: Cut
    ) -> tuple[Cut, ScanContext] | None:
        """A segment of the pieces and of what follows them up to ``cut.end``; of a piece up to its last complete
        transaction. None where it cannot be put together, or the file has other bytes now. Raises DamagedLogError."""
        findings = pieces[0].findings
        for piece in pieces[1:]:
            findings = findings.plus(piece.findings)
        sealing = Sealing(self._folder / _NEW, self._sealer, piece=cut.ending is Ending.OPEN)
        if not _have_lines(sealing, pieces):
            return None
        reached = good = pieces[-1].segment.end
        if context is None or context.end != reached:
            return None
        if cut.end > reached:
            scanned = _scanned(file, sealing, reached, cut.end, context)
            context, good = scanned.context, scanned.end
            findings = findings.plus(Findings.of(scanned))
            if cut.ending is Ending.OPEN:
                cut = replace(cut, end=good)
            elif scanned.end + scanned.tail < cut.end:
                raise _too_short(file, scanned, cut.end)
        digest = self._read[file.key].digest.copy()
        compared = _Compared(_parts_of(pieces), digest)
        with file.path.open("rb") as stream:
            for span in _joined((*_parts_of(pieces), _Span(reached, cut.end))):
                if span.part is not None:
                    sealing.borrow(span.part, span.folder)
                    compared.skip()
                    continue
                for start, size in _in_parts(span.start, span.end, headed=cut.end > PART_SIZE):
                    stream.seek(start)
                    sealing.part(stream, start, size, compared)
            if not compared.is_same:
                return None
            reading = _Reading(os.fstat(stream.fileno()).st_ino, cut.end, digest)
        kept = self._finish(sealing, file, branch, cut, findings, digest.hexdigest(), good)
        kept.pieces = {piece.segment.key: piece.segment.sha256 for piece in pieces}
        self._read[file.key] = reading
        return cut, context

    def _cut(
        self,
        file: Spooled,
        sealing: Sealing,
        start: int,
        end: int,
        context: ScanContext | None,
        *,
        whole: bool = False,
    ) -> tuple[Scan, str]:
        """Scan ``[start, end)`` and seal it meanwhile, up to the last complete transaction or (``whole``) all of it.
        Gives the SHA-256 of what was sealed, too. Raises DamagedLogError, StreamError."""
        own = hashlib.sha256()
        with (
            file.path.open("rb") as again,
            ThreadPoolExecutor(1, thread_name_prefix="seal") as worker,
        ):
            inode = os.fstat(again.fileno()).st_ino
            before = self._read.get(file.key)
            so_far: hashlib._Hash | None = None
            if start and before is not None and (before.inode, before.end) == (inode, start):
                so_far = before.digest.copy()
            digests = (own,) if so_far is None else (own, so_far)
            works: list[Future[None]] = []
            at = start

            def seal(size: int) -> None:
                nonlocal at
                works.append(worker.submit(sealing.part, again, at, size, *digests))
                at += size

            def follow(good: int) -> None:
                while good - at >= (PART_SIZE if at else PART_SIZE + HEAD):
                    seal(PART_SIZE if at else HEAD)

            again.seek(start)
            try:
                scanned = _scanned(file, sealing, start, end, context, follow)
                if whole and scanned.end + scanned.tail < end:
                    raise _too_short(file, scanned, end)
                to = end if whole else scanned.end
                # A piece's part that is not small is taken over as it is: it cannot be divided later.
                for _start, size in _in_parts(at, to, headed=to >= SMALL_PART if not whole else to > PART_SIZE):
                    seal(size)
                for work in works:
                    work.result()
            except BaseException:
                for work in works:
                    work.cancel()
                raise
        if not start or so_far is not None:
            self._read[file.key] = _Reading(inode, to, so_far or own)
        return scanned, own.hexdigest()

    def _finish(
        self,
        sealing: Sealing,
        file: Spooled,
        branch: Branch,
        cut: Cut,
        found: Findings,
        sha256: str,
        good: int,
    ) -> Sealed:
        """``good``: where the last complete transaction ends."""
        remarks = [cut.remark] if cut.remark else []
        if good < cut.end:
            remarks.append(f"its last {cut.end - good} bytes are no complete transaction")
        segment = made_of(
            Segment,
            found,
            server=branch.server,
            branch=branch.id,
            file=file.name,
            number=file.number,
            start=cut.start,
            end=cut.end,
            ending=cut.ending,
            gtids_before=branch.executed(found.gtids_before),
            gtids_after=branch.executed(found.gtids_after),
            sha256=sha256,
            remarks=(*found.remarks, *remarks),
        )
        target = self._path(segment.key)
        (self._folder / _NEW / _FINDINGS).write_text(json.dumps(found.as_json()))
        shutil.rmtree(target, ignore_errors=True)
        kept = self._kept[segment.key] = sealing.finish(segment, target)
        return kept

    def _path(self, key: SegmentKey) -> Path:
        return self._folder / f"{key.branch}-{key.number:010d}-{key.start:012d}-{key.end:012d}"


def _scanned(
    file: Spooled,
    sealing: Sealing | None,
    start: int,
    end: int,
    context: ScanContext | None,
    follow: Callable[[int], None] = lambda _good: None,
) -> Scan:
    """``follow`` hears where each complete transaction ends. Raises DamagedLogError, StreamError."""
    good = start

    def take(transaction: Transaction) -> None:
        nonlocal good
        good = transaction.end
        if sealing is not None:
            sealing.transaction(transaction)
        follow(good)

    with file.path.open("rb") as stream:
        stream.seek(start)
        try:
            return scan(stream, start=start, context=context, stop=end, on_transaction=take)
        except DamagedError as error:
            raise DamagedLogError(file, error.damages, good) from error


def _have_lines(sealing: Sealing, pieces: Sequence[_Piece]) -> bool:
    """Give the transactions of ``pieces`` to ``sealing``. False where some are not there: what was not synced may have
    lost its end with the power."""
    for piece in pieces:
        count = 0
        try:
            for lines in piece.sealed.kept_lines():
                sealing.lines(lines)
                count += lines.count(b"\n")
        except (FileNotFoundError, DamagedError):
            return False
        if count != piece.segment.transactions:
            return False
    return True


def _too_short(file: Spooled, scanned: Scan, size: int) -> DamagedLogError:
    return DamagedLogError(file, [f"it has {scanned.end + scanned.tail} of its {size} bytes"], scanned.end)


def _parts_of(pieces: Sequence[_Piece]) -> Iterator[_Span]:
    at = 0
    for piece in pieces:
        for part in piece.sealed.header.parts:
            yield _Span(at, at + part.size, part, piece.sealed.folder)
            at += part.size


def _joined(spans: Iterable[_Span]) -> Iterator[_Span]:
    """The same bytes: small neighbours are sealed together."""
    small: list[_Span] = []
    for span in spans:
        if span.is_small:
            small.append(span)
            continue
        yield from _as_one(small)
        small = []
        yield span
    yield from _as_one(small)


def _as_one(spans: Sequence[_Span]) -> Iterator[_Span]:
    filled = [span for span in spans if span.start < span.end]
    if len(filled) == 1:
        yield filled[0]
    elif filled:
        yield _Span(filled[0].start, filled[-1].end)


def _in_parts(start: int, end: int, *, headed: bool) -> Iterator[tuple[int, int]]:
    """Where the parts of those bytes begin, and their sizes. ``headed``: the beginning of a file is a part of its own
    (``HEAD``)."""
    if headed and start == 0 and end > HEAD:
        yield 0, HEAD
        start = HEAD
    for at in range(start, end, PART_SIZE):
        yield at, min(PART_SIZE, end - at)


def _plain(stream: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Those bytes of a file, as the archive keeps them: without the in-use flag; as far as there are so many."""
    stream.seek(start)
    while start < end and (data := stream.read(min(_READ, end - start))):
        yield without_flag(data) if start == 0 else data
        start += len(data)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0

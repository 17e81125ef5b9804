"""Cutting segments out of the spool's files, and keeping them sealed until every destination has them.

What is kept can be made again at any time, so it is bounded: of what waits for destinations that are down, the newest
is thrown away first and sealed anew when its turn comes.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from backupd.binlog.archive.checkpoint import Cut, LogFile
from backupd.binlog.spool_files import Spooled
from backupd.engine.binlog.scan import Scan, ScanContext, scan
from backupd.model.binlog import Branch, Ending, Segment, SegmentKey, Transaction
from backupd.model.errors import DamagedError, StreamError
from backupd.transfer.log_segments import Sealed, Sealing
from backupd.transfer.seal.seal import Sealer

_NEW = "new"


class DamagedLogError(DamagedError):
    """A file of the spool cannot be read behind ``good``, the end of its last whole transaction (0: of none)."""

    def __init__(self, file: Spooled, damages: Sequence[str], good: int) -> None:
        super().__init__(
            f"binary log {file.name} in the spool is damaged behind byte {good}",
            damages,
            hint="it is fetched from its server again",
        )
        self.good = good


class Cutter:
    """Everything lies in ``folder``, which is emptied of what ``keep`` does not name. Raises OSError."""

    def __init__(self, folder: Path, sealer: Sealer, *, most_bytes: int) -> None:
        self._folder = folder
        self._sealer = sealer
        self._most = most_bytes
        self._kept: dict[SegmentKey, Sealed] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def piece(self, file: Spooled, branch: Branch, start: int, context: ScanContext | None) -> tuple[Cut, Scan] | None:
        """Cut ``[start, ...)`` behind the last complete transaction that the file has now; None without a new one.

        ``context`` is that of the scan which ended at ``start``, None for 0. Raises DamagedLogError.
        """
        sealing = Sealing(self._folder / _NEW, self._sealer, piece=True)
        try:
            found = _scanned(file, sealing, start, file.size, context)
        except StreamError:
            return None  # not even its first event is complete
        if found.end <= start:
            return None
        cut = Cut(start, found.end)
        self._finish(sealing, file, branch, cut, found)
        return cut, found

    def sealed(self, file: Spooled, branch: Branch, log: LogFile, cut: Cut) -> Sealed:
        """The sealed segment for ``cut``; made (again) where it is not there. Raises DamagedLogError."""
        key = log.key(cut)
        kept = self._kept.get(key) or Sealed.load(self._path(key))
        if kept is None or kept.header.segment.ending is not cut.ending:
            sealing = Sealing(self._folder / _NEW, self._sealer, piece=cut.ending is Ending.OPEN)
            try:
                context = _scanned(file, None, 0, cut.start, None).context if cut.start else None
                found = _scanned(file, sealing, cut.start, cut.end, context)
                if found.end + found.tail < cut.end:
                    raise DamagedLogError(file, [f"it has {found.end + found.tail} of its {cut.end} bytes"], found.end)
            except StreamError as error:
                raise DamagedLogError(file, [error.message], 0) from error
            except FileNotFoundError as error:
                raise DamagedLogError(file, ["it is not there"], 0) from error
            kept = self._finish(sealing, file, branch, cut, found)
        self._kept[key] = kept
        return kept

    def tidy(self, wanted: Sequence[SegmentKey], busy: Collection[SegmentKey]) -> None:
        """Remove what nobody wants; of ``wanted`` (in log order) the newest that are too much. Nothing of ``busy``."""
        places = {self._path(key).name: key for key in wanted}
        at_work = {self._path(key).name for key in busy}
        sizes: Mapping[str, int] = {path.name: _size(path) for path in self._folder.iterdir()}
        self._kept = {key: kept for key, kept in self._kept.items() if key in places.values() or key in busy}
        for name in sizes.keys() - places.keys() - at_work:
            Sealed.remove(self._folder / name)
        total = sum(size for name, size in sizes.items() if name in places)
        for name in reversed(places):
            if total <= self._most:
                return
            if name in sizes and name not in at_work:
                Sealed.remove(self._folder / name)
                self._kept.pop(places[name], None)
                total -= sizes[name]

    def _finish(self, sealing: Sealing, file: Spooled, branch: Branch, cut: Cut, found: Scan) -> Sealed:
        with file.path.open("rb") as stream:
            stream.seek(cut.start)
            sha256 = sealing.plain(stream, cut.start, cut.end)
        remarks = [cut.remark] if cut.remark else []
        if found.end < cut.end:
            remarks.append(f"its last {cut.end - found.end} bytes are no complete transaction")
        segment = Segment(
            server=branch.server,
            branch=branch.id,
            file=file.name,
            number=file.number,
            start=cut.start,
            end=cut.end,
            ending=cut.ending,
            gtids_before=branch.executed(found.gtids_before),
            gtids_after=branch.executed(found.gtids_after),
            transactions=found.transactions,
            first_at=found.first_at,
            last_at=found.last_at,
            precise=found.precise,
            server_ids=found.server_ids,
            flavour=found.flavour,
            server_version=found.server_version,
            sha256=sha256,
            remarks=(*found.remarks, *remarks),
        )
        target = self._path(segment.key)
        shutil.rmtree(target, ignore_errors=True)
        self._kept[segment.key] = sealing.finish(segment, target)
        return self._kept[segment.key]

    def _path(self, key: SegmentKey) -> Path:
        return self._folder / f"{key.branch}-{key.number:010d}-{key.start:012d}-{key.end:012d}"


def _scanned(file: Spooled, sealing: Sealing | None, start: int, end: int, context: ScanContext | None) -> Scan:
    good = start

    def take(transaction: Transaction) -> None:
        nonlocal good
        good = transaction.end
        if sealing is not None:
            sealing.transaction(transaction)

    with file.path.open("rb") as stream:
        stream.seek(start)
        try:
            return scan(stream, start=start, context=context, stop=end, on_transaction=take)
        except DamagedError as error:
            raise DamagedLogError(file, error.damages, good) from error


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.is_dir() else 0

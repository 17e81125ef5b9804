"""Sealing one segment of a binary log into a folder: once, for all destinations.

What is in the folder is complete when its ``segment.json`` is there. Until then it is the rest of a process that died,
and no byte of it was given to any destination; afterwards the same bytes go to all of them, however often.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from backupd.engine.binlog.index import index_head, index_line
from backupd.engine.binlog.scan import clear_flag
from backupd.model.binlog import Segment, Transaction
from backupd.model.errors import DamagedError, StreamError
from backupd.model.manifest import PART_SIZE, StoredObject
from backupd.process.folders import sync_folder, write_private
from backupd.transfer.records.segment_documents import (
    SealedPart,
    SegmentHeader,
    decode_segment,
    encode_segment,
    segment_digest,
)
from backupd.transfer.seal.seal import Sealer
from storage.contract import layout

INDEX_PART = 8 * 1024 * 1024
"""Bytes of index that fill one part of it; each part begins with the head and can be read alone."""
_FLAGGED = 22
"""Bytes at the beginning of a file that hold its in-use flag."""


class Sealing:
    """Seals one segment. ``transaction`` and ``plain`` may come in any order, then ``finish``.

    ``folder`` is made afresh. ``piece``: of a file that still grows; its parts are named so. All methods raise
    ToolError and KeyUnusableError as Sealer does, and OSError.
    """

    def __init__(self, folder: Path, sealer: Sealer, *, piece: bool = False) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        self._folder = folder
        self._sealer = sealer
        self._piece = piece
        self._parts: list[SealedPart] = []
        self._index: list[SealedPart] = []
        self._lines = bytearray(index_head())

    def transaction(self, transaction: Transaction) -> None:
        """Take the next transaction of the index."""
        self._lines += index_line(transaction)
        if len(self._lines) >= INDEX_PART:
            self._close_index()

    def plain(self, stream: BinaryIO, start: int, end: int) -> str:
        """Seal bytes ``[start, end)`` of a file from ``stream``, which stands at ``start``; their SHA-256.

        A whole file's beginning loses its in-use flag. Raises StreamError when the stream ends too early.
        """
        digest = hashlib.sha256()
        while start < end:
            part = self._part(stream, start, end, digest)
            self._parts.append(part)
            start += part.size
        return digest.hexdigest()

    def finish(self, segment: Segment, target: Path) -> Sealed:
        """Make the folder complete and durable, and rename it to ``target``. ``segment`` is what was sealed."""
        header = SegmentHeader(segment, self._sealer.recipients, tuple(self._parts), ())
        self._lines[: len(index_head())] = index_head(segment_digest(header))
        self._close_index()
        header = replace(header, index=tuple(self._index))
        fresh = self._folder / f"{layout.SEGMENT}.new"
        write_private(fresh, encode_segment(header))
        fresh.rename(self._folder / layout.SEGMENT)
        sync_folder(self._folder)
        self._folder.rename(target)
        return Sealed(target, header)

    def _part(self, stream: BinaryIO, start: int, end: int, digest: hashlib._Hash) -> SealedPart:
        """A function of its own, so that no two parts are in memory."""
        data = bytearray(stream.read(min(PART_SIZE, end - start)))
        if not data:
            raise StreamError(
                f"a binary log in the spool ends {end - start} bytes too early",
                hint="was a file in the spool's folder cut by hand? Move the folder away to begin anew",
            )
        if start == 0 and len(data) >= _FLAGGED:
            data[:_FLAGGED] = clear_flag(bytes(data[:_FLAGGED]))
        digest.update(data)
        return self._seal(layout.part_name(len(self._parts), piece=self._piece), data)

    def _close_index(self) -> None:
        self._index.append(self._seal(layout.index_name(len(self._index)), self._lines))
        self._lines = bytearray(index_head())

    def _seal(self, name: str, data: bytes | bytearray) -> SealedPart:
        sealed = self._sealer.seal(data)
        write_private(self._folder / name, sealed)
        return SealedPart(
            StoredObject(name, len(sealed), hashlib.sha256(sealed).hexdigest()),
            len(data),
            hashlib.sha256(data).hexdigest(),
        )


class Sealed:
    """A sealed segment in a private folder. ``header`` tells what it is."""

    def __init__(self, folder: Path, header: SegmentHeader) -> None:
        self.folder = folder
        self.header = header

    @classmethod
    def load(cls, folder: Path) -> Sealed | None:
        """What ``folder`` holds, None unless it is complete."""
        try:
            raw = (folder / layout.SEGMENT).read_bytes()
            header = decode_segment(raw, where=str(folder / layout.SEGMENT))
            whole = all((folder / item.name).stat().st_size == item.size for item in header.sealed)
        except (FileNotFoundError, NotADirectoryError, DamagedError):
            return None
        return cls(folder, header) if whole else None

    def open(self, item: StoredObject) -> BinaryIO:
        return (self.folder / item.name).open("rb")

    @staticmethod
    def remove(folder: Path) -> None:
        """The header first, so that a half removed folder is not taken for a whole one."""
        (folder / layout.SEGMENT).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

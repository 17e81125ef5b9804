"""What is compressed inside binary logs.

MySQL's Transaction_payload: fields of (type, length, value), then all events of a transaction in one zstd frame or
more, without checksums of their own. MariaDB's compressed queries and rows: one byte (bit 7 set, algorithm in bits
4-6, size of the length in bits 0-2), the length before compression (big endian), then zlib's stream.
"""

from __future__ import annotations

import zlib
from typing import BinaryIO, cast

import zstandard

from backupd.engine.binlog.events import LONG_EVENT, Pull

_END, _SIZE, _ALGORITHM = 0, 1, 2
_ZSTD, _PLAIN = 0, 255
_ZLIB = 0
_CHUNK = 64 * 1024


class CompressionError(Exception):
    """What is compressed cannot be read."""


def open_payload(body: Pull) -> BinaryIO | Pull:
    """The events in a Transaction_payload as a stream. Raises CompressionError."""
    algorithm = _PLAIN
    try:
        while (field := _packed(body)) != _END:
            value = Pull(body.take, length) if (length := _packed(body)) else None
            if field == _ALGORITHM and value is not None:
                algorithm = _packed(value)
            if value is not None:
                value.skip(value.left)
    except ValueError as error:
        raise CompressionError(f"the head of a compressed transaction is broken: {error}") from None
    if algorithm == _PLAIN:
        return body
    if algorithm != _ZSTD:
        raise CompressionError(f"compression {algorithm} of transactions is not known")
    reader = zstandard.ZstdDecompressor().stream_reader(
        cast("BinaryIO", body), read_size=_CHUNK, read_across_frames=True
    )
    return cast("BinaryIO", _Zstd(reader))


class _Zstd:
    def __init__(self, reader: zstandard.ZstdDecompressionReader) -> None:
        self._reader = reader

    def read(self, size: int) -> bytes:
        try:
            return self._reader.read(size)
        except zstandard.ZstdError as error:
            raise CompressionError(f"a compressed transaction cannot be read: {error}") from None


def inflated(body: Pull) -> bytes | Pull:
    """Compressed bytes of MariaDB; a Pull where they are too many to be held. Raises CompressionError."""
    try:
        head = body.take(1)[0]
        length = int.from_bytes(body.take(head & 0x07), "big")
    except ValueError:
        raise CompressionError("compressed bytes end in their head") from None
    if not head & 0x80 or (head >> 4) & 0x07 != _ZLIB:
        raise CompressionError(f"compression {head:#x} is not known")
    pull = Pull(_Inflater(body).read, length)
    return pull if length > LONG_EVENT else pull.take(length)


class _Inflater:
    def __init__(self, body: Pull) -> None:
        self._body = body
        self._zlib = zlib.decompressobj()
        self._input = b""

    def read(self, size: int) -> bytes:
        while True:
            try:
                piece = self._zlib.decompress(self._input, size)
            except zlib.error as error:
                raise CompressionError(f"compressed bytes cannot be read: {error}") from None
            self._input = self._zlib.unconsumed_tail
            if piece:
                return piece
            if self._zlib.eof or not (self._input or (more := self._body.read(_CHUNK))):
                raise CompressionError("compressed bytes end early")
            self._input = self._input or more


def _packed(body: Pull) -> int:
    """An integer as the protocol packs them: one byte up to 250, else 252, 253, 254 and 2, 3 or 8 bytes."""
    first = body.take(1)[0]
    if first <= 250:
        return first
    if first not in {252, 253, 254}:
        raise ValueError(f"{first} is no packed number")
    return int.from_bytes(body.take({252: 2, 253: 3, 254: 8}[first]), "little")

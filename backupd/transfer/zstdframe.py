"""Decompressing exactly one zstd frame (RFC 8878), piece by piece, with a bound on what comes out.

The library alone does not do: asked for a piece it may return a gigabyte (128 KiB per 4 bytes of input), its
reader takes an input that stops early for a normal end, and bytes behind the frame go unnoticed. So the
frame's blocks are counted here: every piece that is handed over ends at a block's end, and a block holds at
most 128 KiB.
"""

from __future__ import annotations

from io import BytesIO

import zstandard

from backupd.model.errors import DamagedError

_WINDOW_LIMIT = 128 * 1024 * 1024
"""Bytes of memory that a frame may ask for; the zstd program has the same limit."""
_RLE, _RESERVED = 1, 3


class FrameDecoder:
    """Feed the pieces of one frame, then ask for ``result``.

    ``limit``: bytes that may come out. All methods raise DamagedError.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._frame = zstandard.ZstdDecompressor(max_window_size=_WINDOW_LIMIT).decompressobj()
        self._plain = BytesIO()
        self._pending = bytearray()
        self._in_header = True
        self._block_left = 0
        self._last_block = False
        self._trailer = 0
        self._tail_left = -1

    def feed(self, piece: bytes | memoryview) -> None:
        """Take the next bytes of the frame."""
        if self._pending:
            self._pending += piece
            data = memoryview(bytes(self._pending))
            self._pending.clear()
        else:
            data = memoryview(piece)
        if self._in_header:
            data = self._read_header(data)
        while len(data) and not self._in_header:
            data = self._step(data)

    def result(self) -> bytes:
        """Everything, once the frame has been complete."""
        if self._tail_left != 0 or self._pending or not self._frame.eof or self._frame.unused_data:
            raise _damaged("the compressed data is cut off")
        return self._plain.getvalue()

    def _read_header(self, data: memoryview) -> memoryview:
        try:
            if len(data) < 5 or len(data) < zstandard.frame_header_size(data):
                self._pending += data
                return data[:0]
            size = zstandard.frame_header_size(data)
            parameters = zstandard.get_frame_parameters(data)
        except zstandard.ZstdError as error:
            raise _damaged(f"the decrypted data is not a zstd frame: {error}") from error
        known = parameters.content_size != zstandard.CONTENTSIZE_UNKNOWN
        if known and parameters.content_size > self._limit:
            raise _damaged(f"it holds {parameters.content_size} bytes where {self._limit} are expected")
        if bytes(data[:4]) != zstandard.FRAME_HEADER:
            raise _damaged("the decrypted data is not a zstd frame")
        self._trailer = 4 if parameters.has_checksum else 0
        self._in_header = False
        self._decompress(data[:size])
        return data[size:]

    def _step(self, data: memoryview) -> memoryview:
        """Take one piece that ends at the latest where the current block ends."""
        if self._tail_left == 0:
            raise _damaged("bytes follow the end of the compressed data")
        if self._tail_left > 0:
            taken = data[:self._tail_left]
            self._tail_left -= len(taken)
            self._decompress(taken)
            return data[len(taken):]
        if self._block_left == 0:
            if len(data) < 3:
                self._pending += data
                return data[:0]
            header = int.from_bytes(data[:3], "little")
            kind, size = (header >> 1) & 3, header >> 3
            if kind == _RESERVED or size > 128 * 1024:
                raise _damaged("the compressed data has a malformed block")
            self._last_block = bool(header & 1)
            self._block_left = 3 + (1 if kind == _RLE else size)
        taken = data[:self._block_left]
        self._block_left -= len(taken)
        self._decompress(taken)
        if self._block_left == 0 and self._last_block:
            self._tail_left = self._trailer
        return data[len(taken):]

    def _decompress(self, piece: memoryview) -> None:
        try:
            plain = self._frame.decompress(piece)
        except zstandard.ZstdError as error:
            raise _damaged(f"the compressed data is damaged: {error}") from error
        if self._plain.tell() + len(plain) > self._limit:
            raise _damaged(f"it holds more than the {self._limit} bytes that are expected")
        self._plain.write(plain)


def _damaged(reason: str) -> DamagedError:
    return DamagedError("a sealed object is damaged", [reason],
                        hint="restore from another destination's copy of this backup")

"""The bytes of a sealed object, read without any key: the OpenPGP packets outside, and the zstd frame inside.

OpenPGP (RFC 4880, RFC 9580): a sealed object is one session key packet per recipient, then one integrity protected data
packet, then nothing. gpg is more generous: it accepts marker and private packets behind the data, other bits in unused
places of the session key packets, and (with an option in somebody's gpg.conf) data without integrity protection.
Nothing of that changes the plaintext, but an object that is not byte for byte in the form in which it was made is
damaged.

zstd (RFC 8878): padding of frames, and decompressing exactly one, with a bound on what comes out. The library alone is
not enough: its reader takes an input that stops early for a normal end, bytes behind the frame go unnoticed, and a
small input may become gigabytes. So a frame must state its size (all of ours do), the size must be within the limit
before a byte is decompressed, and nothing may follow the frame. One call takes half the time that many pieces take.

Encryption keeps lengths, so the exact length of a compressed file would reveal which known file it is. A skippable
frame (RFC 8878, 3.1.2; ``zstd -d`` passes over it) before the data fills it up to one of few lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import zstandard

from backupd.model.errors import DamagedError

_SESSION_KEY = 1
_DATA_UNPROTECTED = 9
_DATA_WITH_MDC = 18
_DATA_WITH_AEAD = 20
_MPI_COUNTS = {1: 1, 2: 1, 16: 2, 18: 1}
"""Public key algorithm (RSA, RSA, Elgamal, ECDH) to the number of integers in its session key packet."""
_ECDH = 18


def key_ids(stored: bytes | bytearray | memoryview) -> tuple[str, ...]:
    """Read the form of a sealed object: the ids (16 hex digits) of the encryption (sub)keys that it is sealed for, in
    the order of the packets. Raises DamagedError, saying what is wrong with it."""
    data = memoryview(stored)
    try:
        return _key_ids(data)
    except (ValueError, IndexError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it ends in the middle of a packet"
        raise damaged(reason) from error


def _key_ids(data: memoryview) -> tuple[str, ...]:
    found: list[str] = []
    for tag, body in _packets(data):
        if tag == _SESSION_KEY:
            found.append(_session_key(body))
        elif tag == _DATA_UNPROTECTED:
            raise ValueError("its data is encrypted without integrity protection")
        elif tag not in (_DATA_WITH_MDC, _DATA_WITH_AEAD):
            raise ValueError(f"it holds an OpenPGP packet of type {tag}, which does not belong there")
        elif body[:1] != b"\x01":
            raise ValueError("its data packet is of an unknown version")
        elif not found:
            raise ValueError("it is not encrypted for any key")
    return tuple(found)


def _packets(data: memoryview) -> Iterator[tuple[int, bytes]]:
    """Tag and body of each packet up to the data packet (of which only the first byte is given), which must
    be last."""
    position = 0
    while True:
        tag, position, length = _header(data, position)
        if tag == _SESSION_KEY:
            if length is None or position + length > len(data):
                raise ValueError("a session key packet is cut off")
            yield tag, bytes(data[position : position + length])
            position += length
            continue
        yield tag, bytes(data[_first_byte(data, position, length)])
        if _end_of_data(data, position, length) != len(data):
            raise ValueError("its data does not end where the object ends")
        return


def _header(data: memoryview, position: int) -> tuple[int, int, int | None]:
    """Tag, position after the tag (and after the length of an old packet), and the length of an old
    packet."""
    first = data[position]
    if not first & 0x80:
        raise ValueError("it is not OpenPGP data")
    if first & 0x40:
        tag = first & 0x3F
        if tag == _SESSION_KEY:
            position, length, last = _new_length(data, position + 1)
            if not last:
                raise ValueError("a session key packet has a partial length")
            return tag, position, length
        return tag, position + 1, None
    size = first & 3
    if size == 3:
        raise ValueError("a packet has no length")
    octets = 1 << size
    raw = data[position + 1 : position + 1 + octets]
    if len(raw) != octets:
        raise IndexError
    return (first >> 2) & 0x0F, position + 1 + octets, int.from_bytes(raw, "big")


def _first_byte(data: memoryview, position: int, length: int | None) -> slice:
    if length is None:
        position, _, _ = _new_length(data, position)
    return slice(position, position + 1)


def _end_of_data(data: memoryview, position: int, length: int | None) -> int:
    if length is not None:
        return position + length
    last = False
    while not last:
        position, size, last = _new_length(data, position)
        position += size
        if position > len(data):
            raise ValueError("its data is cut off")
    return position


def _new_length(data: memoryview, position: int) -> tuple[int, int, bool]:
    """Position after a new-format length, the length, and whether it is the last (not partial)."""
    first = data[position]
    if first < 192:
        return position + 1, first, True
    if first < 224:
        return position + 2, ((first - 192) << 8) + data[position + 1] + 192, True
    if first < 255:
        return position + 1, 1 << (first & 0x1F), False
    raw = data[position + 1 : position + 5]
    if len(raw) != 4:
        raise IndexError
    return position + 5, int.from_bytes(raw, "big"), True


def _session_key(body: bytes) -> str:
    """The key id of one session key packet, once its integers are found to be in their only correct form."""
    if len(body) < 10 or body[0] != 3:
        raise ValueError("a session key packet is of an unknown version")
    key_id, algorithm, position = body[1:9].hex().upper(), body[9], 10
    count = _MPI_COUNTS.get(algorithm)
    if count is None:  # an algorithm of the future: gpg knows better
        return key_id
    integer = b""
    for _ in range(count):
        bits = int.from_bytes(body[position : position + 2], "big")
        octets = (bits + 7) // 8
        integer = body[position + 2 : position + 2 + octets]
        if not integer or len(integer) != octets or int.from_bytes(integer, "big").bit_length() != bits:
            raise ValueError("a session key packet holds a malformed integer")
        position += 2 + len(integer)
    if algorithm == _ECDH:
        # A Curve25519 point (0x40, 32 bytes little-endian): the highest bit means nothing and is always
        # clear.
        if len(integer) == 33 and integer[0] == 0x40 and integer[-1] & 0x80:
            raise ValueError("a session key packet holds a malformed point")
        position += 1 + body[position]
    if position != len(body):
        raise ValueError("a session key packet has a wrong length")
    return key_id


WINDOW_LIMIT = 128 * 1024 * 1024
"""Bytes of memory that a frame may ask for; the zstd program has the same limit."""
_EMPTY_FRAME = 32
"""Bytes that a frame of nothing has at the most: header, one block, checksum."""


_SKIPPABLE = (0x184D2A50).to_bytes(4, "little")
_PADDING_HEAD = 8
"""Bytes of a skippable frame before its content: magic number and length."""


def padding(size: int) -> bytes:
    """The skippable frame to put before a frame of ``size`` bytes.

    Both together have a length of which only as many leading bits are not zero as its exponent has bits: at most 12 %
    more, 3 % at 1 MiB (Padme: Nikitin and others, "Reducing Metadata Leakage from Encrypted Files and Communication
    with PURBs", 2019).
    """
    length = padded(size + _PADDING_HEAD)
    fill = length - size - _PADDING_HEAD
    return _SKIPPABLE + fill.to_bytes(4, "little") + bytes(fill)


def padded(length: int) -> int:
    """The next length, in bytes, that padding makes of ``length`` bytes."""
    exponent = max(length, 2).bit_length() - 1
    step = 1 << exponent - exponent.bit_length()
    return -(-length // step) * step


class FrameDecoder:
    """Feed the pieces of one frame, with or without padding before it, then ask for ``result``.

    ``limit``: bytes that may come out, and, but for what incompressible data adds, that may go in. All methods raise
    DamagedError.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._most = padded(limit + limit // 128 + 1024)  # ZSTD_compressBound, generously
        self._frame = bytearray()

    def feed(self, piece: bytes | memoryview) -> None:
        """Take the next bytes of the frame."""
        self._frame += piece
        if len(self._frame) > self._most:
            raise damaged(f"it holds more than the {self._limit} bytes that are expected")

    def result(self) -> bytes:
        """Everything, once the frame has been complete."""
        if self._frame.startswith(_SKIPPABLE):
            # Where the length is cut off or goes too far, what is left is no frame.
            del self._frame[: _PADDING_HEAD + int.from_bytes(self._frame[4:_PADDING_HEAD], "little")]
        try:
            if bytes(self._frame[:4]) != zstandard.FRAME_HEADER:
                raise damaged("the decrypted data is not a zstd frame")
            size = zstandard.get_frame_parameters(self._frame).content_size
            if size == zstandard.CONTENTSIZE_UNKNOWN:
                raise damaged("the zstd frame does not tell its size")
            if size > self._limit:
                raise damaged(f"it holds {size} bytes where {self._limit} are expected")
            decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT)
            if size == 0:
                return _nothing(decompressor, bytes(self._frame))
            plain = decompressor.decompress(self._frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise damaged(f"the compressed data is damaged: {error}") from error
        if len(plain) != size:
            raise damaged(f"it holds {len(plain)} bytes where {size} were stored")
        return plain


def _nothing(decompressor: zstandard.ZstdDecompressor, frame: bytes) -> bytes:
    """The library takes any frame that announces nothing for a good one: look whether it is whole."""
    reader = decompressor.decompressobj()
    if len(frame) > _EMPTY_FRAME or reader.decompress(frame) or not reader.eof or reader.unused_data:
        raise damaged("the compressed data is cut off, or longer than declared")
    return b""


def damaged(reason: str) -> DamagedError:
    """The error for a sealed object that is not as it was made."""
    return DamagedError(
        "a sealed object is damaged", [reason], hint="restore from another destination's copy of this backup"
    )

"""The packet layer of the client/server protocol: messages out of the bytes of a connection.

A packet is its length (three bytes), a sequence number (one byte) and a payload. A payload of 16,777,215 bytes goes on
in the next packet, and an empty packet ends one that is a multiple of that. What belongs together is a message.

A message that fits into the buffer is given as a whole, any other piece by piece as it comes: whatever a server sends,
no more than the buffer is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

BUFFER = 512 * 1024
FULL = 0xFFFFFF
"""A payload of this size goes on in the next packet."""
_HEADER = 4
FIRST_PIECE = 64
"""The first piece of a long message has at least as many bytes."""


class Piece(NamedTuple):
    """Of a message; ``first`` and ``last``: is it the beginning, is it the end? ``data`` is valid until more
    comes."""

    first: bool
    last: bool
    data: memoryview


class Packets:
    """Of one connection: fill ``space``, say how much with ``came``, and take the ``pieces``."""

    def __init__(self, size: int = BUFFER) -> None:
        self._view = memoryview(bytearray(size))
        self._from = self._to = 0
        self._inside = False
        self._left = 0
        self._goes_on = False

    def space(self) -> memoryview:
        """Where the next bytes of the connection belong; never empty once all pieces were taken. No piece is valid
        afterwards."""
        rest = self._to - self._from
        self._view[:rest] = bytes(self._view[self._from : self._to])
        self._from, self._to = 0, rest
        return self._view[rest:]

    def came(self, count: int) -> None:
        """So many bytes were put into ``space``."""
        self._to += count

    def here(self) -> tuple[memoryview, int, int]:
        """The buffer, and where in it the next packet begins and what came ends; nothing within a message."""
        return self._view, self._from, self._from if self._inside else self._to

    def skip(self, to: int) -> None:
        """The packets before ``to``, as of ``here``, were taken."""
        self._from = to

    def pieces(self) -> Iterator[Piece]:
        """What can be given of what came so far."""
        view = self._view
        while True:
            if self._inside:
                piece = self._next_of_long()
                if piece is None:
                    break
                yield piece
                continue
            at, have = self._from, self._to - self._from
            if have < _HEADER:
                break
            size = int.from_bytes(view[at : at + 3], "little")
            if size < FULL and have >= _HEADER + size:
                self._from = at + _HEADER + size
                yield Piece(True, True, view[at + _HEADER : self._from])
                continue
            if size < FULL and _HEADER + size <= len(view):
                break  # it will be here as a whole
            if have < _HEADER + FIRST_PIECE:
                break
            taken = min(have - _HEADER, size)
            self._from = at + _HEADER + taken
            self._inside, self._left, self._goes_on = True, size - taken, size == FULL
            yield Piece(True, self._ends_here(), view[at + _HEADER : self._from])

    def _next_of_long(self) -> Piece | None:
        view, have = self._view, self._to - self._from
        if not self._left:  # a packet of 16 MiB has ended
            if have < _HEADER:
                return None
            self._left = int.from_bytes(view[self._from : self._from + 3], "little")
            self._goes_on = self._left == FULL
            self._from += _HEADER
            have -= _HEADER
        taken = min(have, self._left)
        if not taken and self._left:
            return None
        start = self._from
        self._from += taken
        self._left -= taken
        return Piece(False, self._ends_here(), view[start : self._from])

    def _ends_here(self) -> bool:
        self._inside = bool(self._left) or self._goes_on
        return not self._inside

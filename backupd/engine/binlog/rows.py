"""Table maps and row events: how many rows an event has, and what their images are.

Rows are counted by the lengths of their images, known from the table map's column metadata. No value is decoded. A row
image is a bitmap of NULLs and then the values of those columns that are in the event and not NULL; each value has a
fixed length or says its own. Which lengths follow each other depends only on the table and the bitmap, so this is
worked out once for each bitmap that occurs (``Layout``) and rows are stepped over by it. Most events of an application
have one row, and most of one length also the same lengths of values: these are compared at once (``Shape``).
"""

from __future__ import annotations

import hashlib
import io
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from backupd.engine.binlog.events import (
    DELETE,
    DELETE_COMPRESSED,
    DELETE_COMPRESSED_V1,
    DELETE_V1,
    PARTIAL_UPDATE,
    UPDATE,
    UPDATE_COMPRESSED,
    UPDATE_COMPRESSED_V1,
    UPDATE_V1,
    WRITE,
    WRITE_COMPRESSED,
    WRITE_COMPRESSED_V1,
    WRITE_V1,
    Pull,
    inflated,
)
from backupd.model.binlog import ChangeKind

_INSERTS = (WRITE_V1, WRITE, WRITE_COMPRESSED_V1, WRITE_COMPRESSED)
_UPDATES = (UPDATE_V1, UPDATE, PARTIAL_UPDATE, UPDATE_COMPRESSED_V1, UPDATE_COMPRESSED)
_DELETES = (DELETE_V1, DELETE, DELETE_COMPRESSED_V1, DELETE_COMPRESSED)
ROW_KINDS = {
    **dict.fromkeys(_INSERTS, ChangeKind.INSERT),
    **dict.fromkeys(_UPDATES, ChangeKind.UPDATE),
    **dict.fromkeys(_DELETES, ChangeKind.DELETE),
}
"""The types of row events."""
_SECOND_VERSION = frozenset(
    {WRITE, UPDATE, DELETE, PARTIAL_UPDATE, WRITE_COMPRESSED, UPDATE_COMPRESSED, DELETE_COMPRESSED}
)
_COMPRESSED = range(WRITE_COMPRESSED_V1, DELETE_COMPRESSED + 1)
_JSON = 245
_FIXED = {1: 1, 2: 2, 3: 4, 6: 0, 7: 4, 8: 8, 9: 3, 10: 3, 11: 3, 12: 8, 13: 1, 14: 3}
"""Lengths of types without metadata: TINY, SHORT, LONG, NULL, TIMESTAMP, LONGLONG, INT24, DATE, TIME, DATETIME, YEAR,
NEWDATE. The old TIMESTAMP, TIME and DATETIME of MariaDB with fractions are longer and nothing in the log says so."""
_FRACTIONAL = {17: 4, 18: 5, 19: 3}
_LONG_PREFIX = frozenset({140, 242, _JSON, 249, 250, 251, 252, 255})
"""Their metadata is the size of the length before the value: compressed BLOB, VECTOR, JSON, BLOBs, GEOMETRY."""
_TWO_BYTES_OF_METADATA = frozenset({15, 16, 141, 246, 247, 248, 253, 254})
_ONE_BYTE_OF_METADATA = frozenset({4, 5, *_FRACTIONAL, *_LONG_PREFIX})
_SHAPED = 4096
"""Bytes of rows up to which their shape is kept."""
_MOST_SHAPES = 1024
BEFORE_ROWS = 8
"""Bytes of a row event's body that name its table, and its flags."""
_DIGITS = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
_U16 = struct.Struct("<H")

Layout = tuple[tuple[tuple[int, int], ...], int]
"""Steps (so many bytes, then a value that has its length in front, of so many bytes), and the bytes after the last."""
Column = tuple[int, int]
"""Bytes of fixed length, or 0 and the size of the length in front of the value."""


class MisfitError(Exception):
    """Rows are not as the table map says."""


@dataclass(slots=True)
class Image:
    """Row images with these columns. ``columns``: of those that are in the event; ``full``: are all of them?"""

    columns: tuple[Column, ...]
    full: bool
    layouts: dict[bytes, Layout] = field(default_factory=dict)
    bitmap: int = field(init=False)
    """Bytes of the bitmap of NULLs."""

    def __post_init__(self) -> None:
        self.bitmap = (len(self.columns) + 7) // 8

    def layout(self, nulls: bytes) -> Layout:
        """The steps over a row with this bitmap of NULLs; worked out once for each bitmap, of which 4,096 are kept."""
        if (known := self.layouts.get(nulls)) is not None:
            return known
        bits = int.from_bytes(nulls, "little")
        steps, fixed = [], 0
        for number, (size, prefix) in enumerate(self.columns):
            if bits >> number & 1:
                continue
            fixed += size
            if prefix:
                steps.append((fixed, prefix))
                fixed = 0
        if len(self.layouts) > 4096:
            self.layouts.clear()
        layout = self.layouts[nulls] = (tuple(steps), fixed)
        return layout


@dataclass(frozen=True, slots=True)
class Shape:
    """An event with one row: the bytes that ``pick`` takes of it, from behind table and flags on, are ``bytes``, which
    are all that say how long it is. ``changed``: table and kind of change."""

    pick: Callable[[bytes], tuple[int, ...]]
    bytes: tuple[int, ...]
    changed: tuple[str, str, ChangeKind]


@dataclass(frozen=True, slots=True)
class Header:
    """The images in each row of an event: ``after`` for updates alone."""

    before: Image
    after: Image | None


@dataclass(slots=True)
class TableMap:
    """A table as its event in the log has it. ``types``: the type of each column, a byte each; ``headers`` and
    ``images``: by the bytes that say which columns are there; ``known``: by the type of an event, what was last in
    front of its rows (behind table and flags), and the images of these; ``shapes``: of events with one row, by length
    and type (None: seen once)."""

    schema: str
    name: str
    columns: tuple[Column, ...]
    types: bytes
    headers: dict[bytes, Header] = field(default_factory=dict)
    images: dict[bytes, Image] = field(default_factory=dict)
    known: dict[int, tuple[bytes, tuple[Image, ...]]] = field(default_factory=dict)
    shapes: dict[int, Shape | None] = field(default_factory=dict)

    def image(self, present: bytes) -> Image:
        """The row images that have the columns of the bitmap ``present``."""
        if (known := self.images.get(present)) is None:
            bits = int.from_bytes(present, "little")
            here = tuple(column for number, column in enumerate(self.columns) if bits >> number & 1)
            known = self.images[present] = Image(here, len(here) == len(self.columns))
        return known


def read_table_map(body: bytes) -> TableMap:
    """``body`` without the table's number. Raises MisfitError for types that are not known."""
    try:
        schema, at = _name(body, 2)
        name, at = _name(body, at)
        count, at = _packed(body, at)
        types = body[at : at + count]
        size, at = _packed(body, at + count)
        columns = tuple(_columns(types, body[at : at + size]))
    except (IndexError, struct.error):
        raise MisfitError("a table map is cut") from None
    return TableMap(schema, name, columns, types)


def _columns(types: bytes, metadata: bytes) -> Iterator[Column]:
    at = 0
    for kind in types:
        if kind in _TWO_BYTES_OF_METADATA:
            yield _two_bytes(kind, metadata[at], metadata[at + 1])
            at += 2
        elif kind in _ONE_BYTE_OF_METADATA:
            meta = metadata[at]
            at += 1
            if kind in _FRACTIONAL:
                yield _FRACTIONAL[kind] + (meta + 1) // 2, 0
            else:
                yield (0, meta) if kind in _LONG_PREFIX else (meta, 0)
        elif kind in _FIXED:
            yield _FIXED[kind], 0
        else:
            raise MisfitError(f"columns of type {kind} are not known")


def _two_bytes(kind: int, first: int, second: int) -> Column:
    if kind in {15, 141, 253}:
        return 0, 1 if first | second << 8 < 256 else 2
    if kind == 16:
        return second + (first > 0), 0
    if kind == 246:
        whole = first - second
        return whole // 9 * 4 + _DIGITS[whole % 9] + second // 9 * 4 + _DIGITS[second % 9], 0
    if kind in {247, 248} or first in {247, 248}:
        return second, 0
    longest = ((first >> 4 & 3) ^ 3) << 8 | second
    return 0, 1 if longest < 256 else 2


def _name(body: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + body[at]
    return body[at + 1 : end].decode("utf-8", "replace"), end + 1


def _packed(body: bytes, at: int) -> tuple[int, int]:
    first = body[at]
    if first <= 250:
        return first, at + 1
    size = {252: 2, 253: 3, 254: 8}.get(first, 0)
    return int.from_bytes(body[at + 1 : at + 1 + size], "little"), at + 1 + size


def read_header(table: TableMap, kind: int, body: bytes, at: int) -> tuple[Header, int]:
    """What is in front of the rows, and where they start. ``at``: behind the table's number. Raises MisfitError."""
    at += 2
    updates = ROW_KINDS[kind] is ChangeKind.UPDATE
    try:
        if kind in _SECOND_VERSION:
            at += _U16.unpack_from(body, at)[0]
        count, bitmaps = _packed(body, at)
    except (IndexError, struct.error):
        raise MisfitError("a row event is cut") from None
    size = (count + 7) // 8
    end = bitmaps + (2 * size if updates else size)
    key = body[at:end]
    header = table.headers.get(key)
    if header is None:
        if count != len(table.columns):
            raise MisfitError(f"an event has {count} columns and its table {len(table.columns)}")
        after = table.image(body[bitmaps + size : end]) if updates else None
        header = table.headers[key] = Header(table.image(body[bitmaps : bitmaps + size]), after)
    return header, end


def pull_header(table: TableMap, kind: int, body: Pull) -> Header:
    """The same from a long event; then ``body`` is at its rows. Raises MisfitError."""
    try:
        return read_header(table, kind, _pull_head(kind, body), 0)[0]
    except ValueError:
        raise MisfitError("a row event is cut") from None


def _pull_head(kind: int, body: Pull) -> bytes:
    head = body.take(2)
    if kind in _SECOND_VERSION:
        extra = body.take(2)
        head += extra + body.take(max(0, _U16.unpack(extra)[0] - 2))
    count = body.take(1)
    if count[0] > 250:
        count += body.take({252: 2, 253: 3}.get(count[0], 8))
    bitmap = (_packed(count, 0)[0] + 7) // 8
    bitmaps = body.take(2 * bitmap if ROW_KINDS[kind] is ChangeKind.UPDATE else bitmap)
    return head + count + bitmaps


def count_rows(table: TableMap, kind: int, body: bytes, at: int, stop: int) -> int:
    """How many rows an event has; ``at``: behind the table's number. Raises MisfitError and CompressionError."""
    known = table.known.get(kind)
    if known is not None and body.startswith(known[0], at + 2):
        images, at = known[1], at + 2 + len(known[0])
    else:
        begin = at + 2
        header, at = read_header(table, kind, body, at)
        if kind == PARTIAL_UPDATE or kind in _COMPRESSED:
            return sum(ended for ended in row_images(table, kind, header, body[at:stop]))
        images = (header.before,) if header.after is None else (header.before, header.after)
        table.known[kind] = body[begin:at], images
    if at == stop:
        return 1
    try:
        rows = _count(images, body, at, stop)
    except IndexError:
        raise MisfitError("rows end inside a value") from None
    if rows == 1 and stop - at <= _SHAPED:
        _keep_shape(table, kind, images, body, at, stop)
    return rows


def _keep_shape(table: TableMap, kind: int, images: tuple[Image, ...], body: bytes, at: int, stop: int) -> None:
    """An event of this length and type has one row that begins at ``at``: when that happens again, its shape is kept.
    Another row of the same length may have another one."""
    front = table.known[kind][0]
    key = shape_key(kind, stop - at + len(front) + BEFORE_ROWS)
    shapes = table.shapes
    if key not in shapes:
        if len(shapes) >= _MOST_SHAPES:
            shapes.clear()
        shapes[key] = None
    elif shapes[key] is None:
        decisive = [(0, front), *((len(front) + where, what) for where, what in _decisive(images, body, at))]
        places = [where + more for where, what in decisive for more in range(len(what))]
        shapes[key] = Shape(
            itemgetter(*places),
            tuple(byte for _where, what in decisive for byte in what),
            (table.schema, table.name, ROW_KINDS[kind]),
        )


def shape_key(kind: int, size: int) -> int:
    """``size``: of the event's body, without checksum."""
    return size << 8 | kind


def _count(images: tuple[Image, ...], body: bytes, at: int, stop: int) -> int:
    """The rows, each of these ``images``."""
    rows, first = 0, at
    while at < stop:
        begin = at
        for image in images:
            bitmap = image.bitmap
            nulls = body[at : at + bitmap]
            steps, rest = image.layouts.get(nulls) or image.layout(nulls)
            at += bitmap
            for skip, prefix in steps:
                at += skip
                if prefix == 1:
                    at += 1 + body[at]
                elif prefix == 2:
                    at += 2 + (body[at] | body[at + 1] << 8)
                else:
                    at += prefix + int.from_bytes(body[at : at + prefix], "little")
            at += rest
        rows += 1
        if at == begin:
            break
        if rows == 1 and at < stop and (equal := _all_equal(images, body, first, stop, at - first)):
            return equal
    if at != stop:
        raise MisfitError("the last row does not end where its event ends")
    return rows


def _all_equal(images: tuple[Image, ...], body: bytes, at: int, stop: int, size: int) -> int:
    """How many rows there are, where they all have the NULLs and the lengths of the first one, which takes ``size``
    bytes; else 0."""
    return _equal_rows(body, at, stop, _decisive(images, body, at), size) if not (stop - at) % size else 0


def _decisive(images: tuple[Image, ...], body: bytes, at: int) -> list[tuple[int, bytes]]:
    """What says how long the row at ``at`` is, and how far from its beginning that is."""
    decisive: list[tuple[int, bytes]] = []
    here = at
    for image in images:
        nulls = body[here : here + image.bitmap]
        steps, rest = image.layout(nulls)
        decisive.append((here - at, nulls))
        here += image.bitmap
        for skip, prefix in steps:
            here += skip
            length = body[here : here + prefix]
            decisive.append((here - at, length))
            here += prefix + int.from_bytes(length, "little")
        here += rest
    return decisive


def _equal_rows(body: bytes, at: int, stop: int, decisive: list[tuple[int, bytes]], size: int) -> int:
    """How many rows of ``size`` bytes, all with these NULLs and lengths of values at these places; 0 when they are not
    so.

    If the first row has the length that its NULLs and its values' lengths say, those of the second one stand where they
    are looked for, and so on: equal ones at equal distances are proof.
    """
    rows = (stop - at) // size
    for first_byte, content in decisive:
        for number, byte in enumerate(content, at + first_byte):
            if rows > 1 and body[number:stop:size].count(byte) != rows:
                return 0
    return rows


def row_images(
    table: TableMap, kind: int, header: Header, rows: bytes | Pull, images: list[bytes] | None = None
) -> Iterator[bool]:
    """Step through the rows of any event, image by image: True behind the last one of each row.

    ``images`` gets a digest of each image. Raises MisfitError and CompressionError.
    """
    body = rows if isinstance(rows, Pull) else _pull(rows)
    if kind in _COMPRESSED:
        plain = inflated(body)
        body = plain if isinstance(plain, Pull) else _pull(plain)
    partial = (table.types.count(_JSON) + 7) // 8 if kind == PARTIAL_UPDATE else 0
    try:
        if not body.left:
            yield True
        while body.left:
            _step(header.before, body, images)
            if header.after is not None:
                yield False
                if partial and _packed(body.take(1), 0)[0] & 1:
                    body.skip(partial)
                _step(header.after, body, images)
            yield True
    except ValueError:
        raise MisfitError("rows end inside a value") from None


def _pull(data: bytes) -> Pull:
    return Pull(io.BytesIO(data).read, len(data))


def _step(image: Image, body: Pull, images: list[bytes] | None) -> None:
    if images is not None:
        digest = hashlib.blake2b(digest_size=16)
        body.tap = digest.update
    steps, rest = image.layout(body.take(image.bitmap))
    for skip, prefix in steps:
        body.skip(skip)
        body.skip(int.from_bytes(body.take(prefix), "little"))
    body.skip(rest)
    if images is not None:
        body.tap = None
        images.append(digest.digest())

"""Rows are counted by the lengths of their values: of all at once where every row is like the first one."""

from __future__ import annotations

import random

import pytest

from backupd.engine.binlog.events import UPDATE_V1, WRITE_V1
from backupd.engine.binlog.rows import MisfitError, TableMap, count_rows, read_header, row_images, shape_key

COLUMNS = ((4, 0), (0, 1), (0, 2), (2, 0), (0, 4))
"""Four bytes; up to 255, 65,535 and 4 GiB with their length in front; two bytes between them."""
SIZES = (0, 1, 2, 255)
FRONT = b"\0\0" + bytes([len(COLUMNS)]) + b"\x1f"
"""Flags, the number of columns, and that all are there."""


def row(lengths: tuple[int, int, int], *, nulls: int = 0, filler: bytes = b"x") -> bytes:
    values = [
        b"1234",
        *(size.to_bytes(prefix, "little") + filler * size for size, prefix in zip(lengths, (1, 2, 4), strict=True)),
    ]
    in_order = [values[0], values[1], values[2], b"56", values[3]]
    return bytes([nulls]) + b"".join(value for number, value in enumerate(in_order) if not nulls >> number & 1)


def table() -> TableMap:
    return TableMap("shop", "t", COLUMNS, bytes(len(COLUMNS)))


def stepped(rows: bytes, kind: int) -> int:
    """One by one, by the other way."""
    one = table()
    front = FRONT + (b"\x1f" if kind == UPDATE_V1 else b"")
    header, _at = read_header(one, kind, front + rows, 0)
    return sum(row_images(one, kind, header, rows))


@pytest.mark.parametrize("kind", [WRITE_V1, UPDATE_V1])
def test_rows_are_counted_as_one_by_one_whatever_their_lengths_are(kind: int) -> None:
    dice = random.Random(20261128)
    images = 2 if kind == UPDATE_V1 else 1
    front = FRONT + (b"\x1f" if kind == UPDATE_V1 else b"")
    for _ in range(2000):
        few = [
            row(
                (dice.choice(SIZES), dice.choice(SIZES), dice.choice(SIZES)),
                nulls=dice.choice((0, 0, 0, 2, 18)),
                filler=dice.choice((b"x", b"\0", b"\1", b"\2")),
            )
            for _ in range(dice.randint(1, 3))
        ]
        rows = b"".join(dice.choice(few) for _ in range(images * dice.randint(1, 12)))
        assert count_rows(table(), kind, front + rows, 0, len(front + rows)) == stepped(rows, kind)


def test_rows_of_one_size_with_other_lengths_inside_are_not_taken_for_equal() -> None:
    rows = row((1, 2, 3)) + row((2, 1, 3)) + row((3, 2, 1))
    assert count_rows(table(), WRITE_V1, FRONT + rows, 0, len(FRONT + rows)) == 3
    with pytest.raises(MisfitError):
        count_rows(table(), WRITE_V1, FRONT + rows[:-1], 0, len(FRONT + rows) - 1)
    cut = row((1, 2, 3)) * 3
    with pytest.raises(MisfitError):
        count_rows(table(), WRITE_V1, FRONT + cut[:-1], 0, len(FRONT + cut) - 1)


@pytest.mark.parametrize("kind", [WRITE_V1, UPDATE_V1])
def test_no_event_with_more_rows_has_the_shape_of_one_with_one(kind: int) -> None:
    dice = random.Random(20261129)
    one, images, alike = table(), 2 if kind == UPDATE_V1 else 1, 0
    front = FRONT + (b"\x1f" if kind == UPDATE_V1 else b"")
    for _ in range(4000):
        lengths = dice.choice((0, 1, 2)), dice.choice((0, 1, 2)), dice.choice((0, 1, 2, 17))
        rows = row(lengths, nulls=dice.choice((0, 0, 2)), filler=dice.choice((b"x", b"\0", b"\1")))
        rows = b"".join(dice.choice((rows, row(lengths))) for _ in range(images * dice.choice((1, 1, 2))))
        body = front + rows
        shape = one.shapes.get(shape_key(kind, 6 + len(body)))
        if shape is not None and shape.pick(body[2:]) == shape.bytes:
            assert stepped(rows, kind) == 1
            alike += 1
        assert count_rows(one, kind, body, 0, len(body)) == stepped(rows, kind)
    assert alike > 300

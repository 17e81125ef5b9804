"""The index of a segment: written and read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime

import pytest

from backupd.model.binlog import Change, ChangeKind, Transaction
from backupd.model.errors import DamagedError
from backupd.transfer.records.segment_documents import IndexLines, decode_index, decode_places, index_head
from tests.support.logs.binlogs import all_of, real_logs


def written_by_us(transactions: Iterable[Transaction]) -> list[bytes]:
    return [index_head(), *map(IndexLines().line, transactions)]


def lines() -> list[bytes]:
    return written_by_us(all_of(real_logs("mariadb").files["statements"].path)[1])


def test_an_index_says_what_it_was_given() -> None:
    _, transactions = all_of(real_logs("mariadb").files["two_phases"].path)
    written = written_by_us(transactions)

    assert json.loads(written[0]) == {"format": "backupd-index/1"}
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in written)
    assert list(decode_index(written)) == transactions
    assert list(decode_places(b"".join(written))) == [(one.gtid, one.start, one.end) for one in transactions]
    spaced = [written[0], *(json.dumps(json.loads(line)).encode() + b"\n" for line in written[1:])]
    assert list(decode_places(b"".join(spaced))) == list(decode_places(b"".join(written)))


def test_an_empty_index_is_its_first_line() -> None:
    assert list(decode_index(written_by_us(()))) == []
    assert list(decode_places(index_head())) == []


@pytest.mark.parametrize(
    "broken",
    [b"{}\n", b"no JSON\n", b'{"format": "backupd-index/9"}\n', b"\xff\xfe\n", b"[]\n", b'{"gtid": "0-1-1"}\n'],
)
def test_another_format_and_broken_lines_are_damage(broken: bytes) -> None:
    good = lines()
    for damaged in ([broken, *good[1:]], [*good[:2], broken]):
        with pytest.raises(DamagedError, match="line"):
            list(decode_index(damaged))
        with pytest.raises(DamagedError, match="line"):
            list(decode_places(b"".join(damaged)))


def test_a_line_is_what_an_encoder_makes_of_the_same_transaction() -> None:
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    known = [found for log in real_logs("mariadb").files.values() for found in all_of(log.path)[1]]
    odd = Change('a"\\\n\x00\u20ac\udc80', "\U0001f600", ChangeKind.OTHER, 7)
    at = datetime(2026, 11, 28, 3, 4, 5, 60, UTC)
    assert len(known) > 10
    writer = IndexLines()
    for one in (*known, Transaction("", 0, 2**40, at, True, 0, (odd, odd), "\udcff\t", "prepared", "X'00',1")):
        assert writer.line(one) == (encode(one.as_json()) + "\n").encode("utf-8", "surrogatepass")


def test_what_is_known_of_earlier_lines_changes_no_later_one() -> None:
    """Objects are known by their addresses, which others have afterwards."""
    at, writer = datetime(2026, 11, 28, 3, 4, 5, tzinfo=UTC), IndexLines()
    for number in range(20_000):
        moment = at.replace(second=number % 60)
        changes = (Change("shop", f"t{number % 7000}", ChangeKind.INSERT, number),)
        line = writer.line(Transaction("0-1-1", 4, 5, moment, False, 1, changes))
        assert json.loads(line)["changes"] == [["shop", f"t{number % 7000}", "insert", number]]
        assert json.loads(line)["at"] == f"2026-11-28T03:04:{number % 60:02}Z"

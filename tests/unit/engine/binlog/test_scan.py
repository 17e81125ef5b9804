"""One pass over real binary logs against what the servers' own tools say about them."""

from __future__ import annotations

import io
import itertools
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO, cast

import pytest

from backupd.engine.binlog.events import clear_flag
from backupd.engine.binlog.scan import Scan, scan
from backupd.engine.binlog.transactions import ScanContext
from backupd.model.binlog import Ending, Transaction, same
from tests.support.dice import rounds, thrown
from tests.support.logs.binlogs import (
    FLAVOURS,
    Logs,
    all_of,
    changed,
    edited,
    framed,
    real_logs,
    scanned,
    why_not,
)

CHAPTERS = (
    "rows",
    "statements",
    "two_phases",
    "conflicts",
    "compressed",
    "large",
    "without_checksums",
    "other_gtids",
    "growing",
    "stopped",
)
SMALL = ("statements", "two_phases", "without_checksums", "other_gtids", "growing", "stopped")


@pytest.fixture(scope="module", params=FLAVOURS)
def logs(request: pytest.FixtureRequest) -> Logs:
    if why := why_not(request.param):
        pytest.skip(why)
    return real_logs(request.param)


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_transactions_are_those_that_the_servers_tool_prints(logs: Logs, chapter: str) -> None:
    _, found = all_of(logs.files[chapter].path)
    printed = logs.printed(chapter)

    assert [(one.gtid, one.start, one.end) for one in found] == [(one.gtid, one.start, one.end) for one in printed]
    for mine, theirs in zip(found, printed, strict=True):
        if ("insert", "shop.places") in changed(mine):
            assert changed(mine) == {("insert", "shop.places"): 3}
        else:
            assert changed(mine) == theirs.rows, mine.gtid
        if logs.flavour == "mysql":
            assert mine.precise
            assert round(mine.at.timestamp() * 1e6) == theirs.micros
        else:
            assert not mine.precise
            assert mine.at.microsecond == 0


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_file_is_told_as_its_server_tells_it(logs: Logs, chapter: str) -> None:
    log = logs.files[chapter]
    found, transactions = all_of(log.path)

    assert (found.start, found.end, found.tail) == (0, log.path.stat().st_size, 0)
    assert found.context.flavour == logs.flavour
    assert found.context.checksum == ("none" if chapter == "without_checksums" else "crc32")
    assert same(found.gtids_after, log.gtids, mariadb=logs.flavour == "mariadb")
    assert found.transactions == len(transactions)
    assert found.first_at == min(one.at for one in transactions)
    assert found.last_at == max(one.at for one in transactions)
    assert found.precise == (logs.flavour == "mysql")
    assert {one.server_id for one in transactions} <= set(found.server_ids)
    if log.shown:
        places = {at for first, last, _ in log.shown for at in (first, last)}
        assert {at for one in transactions for at in (one.start, one.end)} <= places


def test_each_file_begins_where_the_one_before_ended(logs: Logs) -> None:
    files = [all_of(logs.files[chapter].path)[0] for chapter in logs.files if chapter != "growing"]

    for earlier, later in itertools.pairwise(files):
        assert same(earlier.gtids_after, later.gtids_before, mariadb=logs.flavour == "mariadb")
    assert files[0].gtids_before == ""
    assert {one.ending for one in files[:-1]} == {Ending.ROTATED}
    assert all(one.context.next_file.startswith("binlog.0000") for one in files[:-1])
    assert files[-1].ending is Ending.STOPPED


def test_a_file_that_is_being_written_is_open_and_a_lost_one_is_cut(logs: Logs) -> None:
    data = logs.files["growing"].path.read_bytes()

    assert scanned(data)[0].ending is Ending.OPEN
    lost = scanned(clear_flag(data[:100]) + data[100:])[0]
    assert lost.ending is Ending.CUT
    assert not lost.context.in_use


def test_statements_are_told_by_kind_and_table(logs: Logs) -> None:
    found, transactions = all_of(logs.files["statements"].path)
    kinds = [(str(change.kind), change.name) for one in transactions for change in one.changes]

    for expected in (
        ("create", "s"),
        ("alter", "s"),
        ("create", "v"),
        ("drop", "v"),
        ("rename", "s2"),
        ("truncate", "s3"),
        ("drop", "s3"),
        ("drop", "nosuch"),
        ("other", ""),
        ("other", "s"),
        ("create", ""),
        ("drop", ""),
        ("insert", "s"),
        ("update", "s"),
        ("delete", "s"),
        ("insert", "m"),
    ):
        assert expected in kinds, expected
    assert "S3cret" not in "".join(one.statement for one in transactions)
    assert len(found.remarks) == (3 if logs.flavour == "mariadb" else 2)
    assert not all_of(logs.files["rows"].path)[0].remarks


def test_an_alter_in_two_parts_takes_effect_in_its_second() -> None:
    _, transactions = all_of(real_logs("mariadb").files["statements"].path)
    parts = [one for one in transactions if "ADD COLUMN two" in one.statement]

    assert [str(change.kind) for one in parts for change in one.changes] == ["other", "alter"]


def test_parts_of_xa_transactions_carry_their_name_and_state(logs: Logs) -> None:
    _, transactions = all_of(logs.files["two_phases"].path)
    parts = [(one.xid, one.state) for one in transactions]

    assert parts[:4] == [
        ("X'6f6e65',X'',1", "prepared"),
        ("X'6f6e65',X'',1", "committed"),
        ("X'74776f',X'',1", "prepared"),
        ("X'74776f',X'',1", "rolled back"),
    ]
    # MariaDB writes an XA transaction of one phase as any other.
    assert parts[4] == (("", "") if logs.flavour == "mariadb" else ("X'7468726565',X'6272616e6368',7", "committed"))


@pytest.mark.campaign
def _together(one: Scan, later: Scan) -> Scan:
    """Both as one; ``later`` went on where ``one`` ended."""
    assert later.start == one.end
    times = [at for at in (one.first_at, one.last_at, later.first_at, later.last_at) if at is not None]
    return replace(
        later,
        start=one.start,
        # A scan that ended before the list of earlier GTIDs knew nothing of them.
        gtids_before=one.gtids_before if one.transactions else one.gtids_before or later.gtids_before,
        transactions=one.transactions + later.transactions,
        first_at=min(times, default=None),
        last_at=max(times, default=None),
        precise=one.precise and later.precise,
        server_ids=tuple(sorted({*one.server_ids, *later.server_ids})),
        remarks=tuple(dict.fromkeys((*one.remarks, *later.remarks))),
    )


def test_a_growing_file_in_pieces_gives_what_one_scan_gives(logs: Logs) -> None:
    dice = thrown("growing")
    for chapter in (*SMALL, "compressed"):
        data = logs.files[chapter].path.read_bytes()
        whole, expected = scanned(data)
        first = next(end for _, _, end in framed(data))
        for _ in range(6 * rounds(1) if chapter != "compressed" else 1):
            looks = sorted({*(dice.randrange(first, len(data)) for _ in range(dice.randrange(1, 12))), len(data)})
            found: list[Transaction] = []
            joined: Scan | None = None
            for look in looks:
                context = (
                    None if joined is None else ScanContext.from_json(json.loads(json.dumps(joined.context.as_json())))
                )
                stream = io.BytesIO(data)
                stream.seek(start := 0 if joined is None else joined.end)
                piece = scan(stream, start=start, context=context, stop=look, on_transaction=found.append)
                joined = piece if joined is None else _together(joined, piece)
            assert joined == whole
            assert found == expected


def test_a_scan_goes_on_only_where_another_ended(logs: Logs) -> None:
    data = logs.files["stopped"].path.read_bytes()
    whole, _ = scanned(data)

    with pytest.raises(ValueError, match="context"):
        scan(io.BytesIO(data[500:]), start=500)
    with pytest.raises(ValueError, match="context"):
        scan(io.BytesIO(data[500:]), start=500, context=whole.context)


class Repeated:
    """A log that is made while it is read: one row event of one transaction comes ``times`` times."""

    def __init__(self, data: bytes, transaction: Transaction, row_event: int, times: int) -> None:
        self._pieces = self._made(data, transaction, row_event, times)
        self._left = bytearray()

    def read(self, size: int) -> bytes:
        while len(self._left) < size and (piece := next(self._pieces, b"")):
            self._left += piece
        out = bytes(self._left[:size])
        del self._left[:size]
        return out

    @staticmethod
    def _made(data: bytes, transaction: Transaction, row_event: int, times: int) -> Iterator[bytes]:
        at = transaction.start
        yield data[:at]
        for _, begin, end in framed(data):
            if transaction.start <= begin < transaction.end:
                for _ in range(times if begin == row_event else 1):
                    yield edited(data[begin:end], at)
                    at += end - begin


def test_a_transaction_of_200_mb_is_read_in_little_memory(logs: Logs) -> None:
    data = logs.files["rows"].path.read_bytes()
    bulk = max(scanned(data)[1], key=lambda one: sum(c.rows for c in one.changes if str(c.kind) == "insert"))
    size, event = max(
        (end - begin, begin) for kind, begin, end in framed(data) if kind in {23, 30} and bulk.start <= begin < bulk.end
    )
    counted = {}
    tracemalloc.start()
    for times in (1, 2, 200_000_000 // size):
        found: list[Transaction] = []
        scan(cast("BinaryIO", Repeated(data, bulk, event, times)), on_transaction=found.append)
        counted[times] = sum(c.rows for c in found[-1].changes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert found[-1].end - found[-1].start > 199_000_000
    assert counted[times] == counted[1] + (times - 1) * (counted[2] - counted[1])
    assert counted[2] - counted[1] > 100
    assert peak < 8_000_000


@pytest.mark.parametrize("chapter", ["compressed", "large"])
def test_long_events_are_read_in_little_memory(logs: Logs, chapter: str) -> None:
    with logs.files[chapter].path.open("rb") as stream:
        tracemalloc.start()
        scan(stream, on_transaction=lambda _one: None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 8_000_000

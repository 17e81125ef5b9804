"""Binary logs that are torn, altered, encrypted or odd: noticed, and never by another error than the promised one."""

from __future__ import annotations

import io
import random
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from backupd.engine.binlog.scan import scan
from backupd.engine.binlog.transactions import Assembler
from backupd.model.binlog import Ending, Transaction
from backupd.model.errors import DamagedError, StreamError
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
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import give_to_database


@pytest.fixture(scope="module", params=FLAVOURS)
def logs(request: pytest.FixtureRequest) -> Logs:
    if why := why_not(request.param):
        pytest.skip(why)
    return real_logs(request.param)


@pytest.mark.parametrize("chapter", ["stopped", "without_checksums", "compressed", "two_phases"])
def test_a_tail_that_is_torn_anywhere_is_no_error(logs: Logs, chapter: str) -> None:
    data = logs.files[chapter].path.read_bytes()
    _, transactions = scanned(data)
    last = transactions[-1] if chapter != "compressed" else min(transactions, key=lambda one: one.end - one.start)
    events = [end for _, _, end in framed(data) if end <= last.start]

    for end in range(last.start, last.end):
        torn, found = scanned(data[:end])
        assert (torn.end, torn.tail) == (events[-1], end - events[-1])
        assert len(found) == transactions.index(last)
        assert torn.ending is not Ending.STOPPED
    assert scanned(data[: last.end])[0].end == last.end


@pytest.mark.parametrize("size", [0, 3, 4, 22, 60, 100])
def test_a_file_without_its_first_event_cannot_be_told(logs: Logs, size: int) -> None:
    with pytest.raises(StreamError):
        scanned(logs.files["growing"].path.read_bytes()[:size])


@pytest.mark.parametrize("chapter", ["statements", "two_phases", "other_gtids", "growing", "conflicts"])
def test_every_flipped_bit_is_noticed_where_there_are_checksums(logs: Logs, chapter: str) -> None:
    data = logs.files[chapter].path.read_bytes()
    dice = thrown(f"flips in {chapter}")
    places = {
        *range(300),
        *range(len(data) - 200, len(data)),
        *(dice.randrange(len(data)) for _ in range(300 * rounds(1))),
    }

    for at in sorted(places):
        bit = dice.randrange(1 if at == 21 else 0, 8)
        with pytest.raises(DamagedError) as caught:
            scanned(data[:at] + bytes((data[at] ^ 1 << bit,)) + data[at + 1 :])
        assert "at byte" in str(caught.value)


def found_in(data: bytes) -> tuple[object, list[Transaction]]:
    """What a scan gives, or says, and what it has handed over by then."""
    found: list[Transaction] = []
    try:
        return scan(io.BytesIO(data), on_transaction=found.append), found
    except (DamagedError, StreamError) as error:
        return (type(error), str(error), error.detail), found


def test_many_events_at_once_are_read_as_one_by_one(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = thrown("at once, and one by one")
    skim = Assembler._skim
    for file in logs.files.values():
        data = file.path.read_bytes()
        if len(data) > 2_000_000:
            continue
        variants = [data]
        for _ in range(4 * rounds(1)):
            at = dice.randrange(200, len(data))
            variants += [data[:at], data[:at] + bytes((data[at] ^ 1 << dice.randrange(8),)) + data[at + 1 :]]
        for variant in variants:
            monkeypatch.setattr(Assembler, "_skim", skim)
            at_once = found_in(variant)
            monkeypatch.setattr(Assembler, "_skim", lambda _it, _data, at, _size, _origin: at)
            assert at_once == found_in(variant), file.path


def test_flipped_bytes_without_checksums_end_in_nothing_else_than_damage(logs: Logs) -> None:
    dice = thrown("flips without checksums")
    noticed = 0
    for chapter in ("without_checksums", "statements"):
        data = logs.files[chapter].path.read_bytes()
        if chapter == "statements":
            data = without_checksums(logs.files["without_checksums"].path.read_bytes(), data)
        for _ in range(400 * rounds(1)):
            at = dice.randrange(4, len(data))
            try:
                scanned(data[:at] + dice.randbytes(1) + data[at + 1 :])
            except DamagedError:
                noticed += 1
    assert noticed > 40


def test_a_gtid_of_the_other_flavour_is_damage(logs: Logs) -> None:
    """A flipped kind makes one of any event that is long enough: MySQL's are 33 and 34, MariaDB's is 162."""
    data = logs.files["without_checksums"].path.read_bytes()
    events = list(framed(data))
    strangers = (33, 34) if any(kind == 163 for kind, _begin, _end in events) else (162,)
    refused = []
    for _kind, begin, _end in events[1:]:
        for stranger in strangers:
            with suppress(DamagedError):
                scanned(data[: begin + 4] + bytes((stranger,)) + data[begin + 5 :])
                continue
            refused.append(stranger)
    assert set(refused) == set(strangers)
    (query, *_) = (begin for kind, begin, end in events if kind == 2 and end - begin > 80)
    with pytest.raises(DamagedError, match="a GTID event of M") as caught:
        scanned(data[: query + 4] + bytes((strangers[0],)) + data[query + 5 :])
    assert f"at byte {query}" in str(caught.value)


def without_checksums(plain: bytes, checked: bytes) -> bytes:
    """The events of ``checked`` behind the first event of ``plain``."""
    out = bytearray(plain[: next(end for _, _, end in framed(plain))])
    for kind, begin, end in framed(checked):
        if kind != 15:
            out += edited(checked[begin : end - 4], len(out), checksum=False)
    return bytes(out)


def test_a_lost_or_a_doubled_event_is_noticed_without_checksums(logs: Logs) -> None:
    data = logs.files["without_checksums"].path.read_bytes()
    _, begin, end = list(framed(data))[5]

    for broken in (data[:begin] + data[end:], data[:end] + data[begin:]):
        with pytest.raises(DamagedError, match="at byte"):
            scanned(broken)


def test_lost_events_that_the_server_tells_of_are_a_remark(logs: Logs) -> None:
    data = logs.files["growing"].path.read_bytes()
    _, begin, end = list(framed(data))[1]

    def incident(event: bytearray) -> None:
        event[4] = 26
        event[19:] = b"\x01\x00\x00" + bytes(4)

    found, _ = scanned(data + edited(data[begin:end], len(data), incident))
    assert any("lost events" in remark for remark in found.remarks)


def test_a_transaction_without_an_end_is_a_remark_and_not_in_the_index(logs: Logs) -> None:
    data = logs.files["stopped"].path.read_bytes()
    _, transactions = scanned(data)
    half = [one for one in framed(data) if transactions[-1].start <= one[1] < transactions[-1].end][:-1]
    stop = next(data[begin:end] for kind, begin, end in framed(data) if kind == 3)
    torn = data[: half[-1][2]]
    found, left = scanned(torn + edited(stop, len(torn)))

    assert len(left) == len(transactions) - 1
    assert found.end == len(torn) + len(stop)
    assert any("is incomplete" in remark for remark in found.remarks)
    assert transactions[-1].gtid not in found.gtids_after.split(",")


def test_columns_that_the_log_does_not_describe_are_a_remark() -> None:
    data = real_logs("mariadb").files["without_checksums"].path.read_bytes()
    table_map, begin, end = next(one for one in framed(data) if one[0] == 19)
    types = data.index(b"copied\0\x03", begin, end) + 8
    # As if its first INT were a TIME(6) of the days before MariaDB 10.1, of which the log gives no length.
    altered = data[:types] + b"\x0b" + data[types + 1 :]
    found, transactions = scanned(altered)

    assert table_map == 19
    assert any("cannot be counted" in remark for remark in found.remarks)
    assert [one.gtid for one in transactions] == [one.gtid for one in scanned(data)[1]]


def test_a_long_event_that_is_torn_or_flipped_is_told_as_any_other(logs: Logs) -> None:
    for chapter in ("large", "compressed"):
        data = logs.files[chapter].path.read_bytes()
        kind, begin, end = max(framed(data), key=lambda one: one[2] - one[1])
        assert end - begin > 1_000_000, kind
        for stop in (begin + 30, begin + 900_000, end - 4, end - 1):
            assert scanned(data[:stop])[0].end <= begin
        for at in (begin + 25, begin + 900_000, end - 1):
            with pytest.raises(DamagedError, match="at byte"):
                scanned(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :])


def test_an_encrypted_log_is_read_as_its_server_streams_it(short_tmp: Path) -> None:
    keys = short_tmp / "keys"
    keys.write_text("1;" + "ab" * 16 + "\n")
    give_to_database(keys)
    with PrivateServer(
        options={
            "plugin_load_add": "file_key_management",
            "encrypt_binlog": 1,
            "file_key_management_filename": str(keys),
        }
    ) as server:
        server.execute(
            "CREATE DATABASE x",
            "CREATE TABLE x.t (i INT PRIMARY KEY)",
            "INSERT INTO x.t VALUES (1), (2)",
            "FLUSH BINARY LOGS",
        )
        with pytest.raises(DamagedError, match="encrypted"):
            all_of(server.datadir / "binlog.000001")
        subprocess.run(
            [
                "mariadb-binlog",
                f"--defaults-file={server.client_file()}",
                "--read-from-remote-server",
                "--raw",
                f"--result-file={short_tmp}/",
                "binlog.000001",
            ],
            check=True,
            capture_output=True,
        )
        gtids = server.scalar("SELECT @@gtid_binlog_pos")
    found, transactions = all_of(short_tmp / "binlog.000001")
    assert found.gtids_after == gtids
    assert [changed(one) for one in transactions] == [{}, {}, {("insert", "x.t"): 2}]


def test_encrypted_files_are_refused_by_name() -> None:
    data = real_logs("mariadb").files["growing"].path.read_bytes()
    with pytest.raises(DamagedError, match="encrypted"):
        scanned(b"\xfdbin" + data[4:])
    first, second = list(framed(data))[:2]

    def start(event: bytearray) -> None:
        event[4] = 164

    noise = random.Random(1).randbytes(400)
    encrypted = data[: first[2]] + edited(data[second[1] : second[2]], first[2], start) + noise
    with pytest.raises(DamagedError, match="encrypted"):
        scanned(encrypted)


@pytest.mark.parametrize("chapter", ["statements", "conflicts", "two_phases"])
def test_logs_without_gtid_events_are_taken_apart_by_their_statements(chapter: str) -> None:
    if why := why_not("mysql"):
        pytest.skip(why)
    data = real_logs("mysql").files[chapter].path.read_bytes()
    _, expected = scanned(data)
    old = bytearray(data[:4])
    for kind, begin, end in framed(data):
        if kind not in {33, 35, 42}:  # as MySQL 5.6 wrote them
            old += edited(data[begin:end], len(old)) if kind != 15 else data[begin:end]
    found, transactions = scanned(bytes(old))

    assert [(one.changes, one.statement, one.state, one.xid) for one in transactions] == [
        (one.changes, one.statement, one.state, one.xid) for one in expected
    ]
    assert {one.gtid for one in transactions} == {""}
    assert [one.at.timestamp() for one in transactions] == [int(one.at.timestamp()) for one in transactions]
    assert (found.gtids_before, found.gtids_after, found.precise, found.end) == ("", "", False, len(old))

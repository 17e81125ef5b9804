"""Which messages of a dump become bytes of a file, and which end it."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backupd.engine.receiver.endings import DamagedDumpError, EndedError, EndKind
from backupd.engine.receiver.log_bytes import LONGEST, LogBytes
from backupd.engine.receiver.packets import Packets, Piece
from backupd.model.errors import MisnamedError

NAME, ADDRESS = "binlog.000007", "db1:3306"
MAGIC = b"\xfebin"


class Memory:
    """Files in memory."""

    def __init__(self, start: int = 4) -> None:
        self.files: dict[str, bytearray] = {NAME: bytearray(MAGIC)}
        self._name, self._start = NAME, start
        self.described: list[tuple[bytes, int, int]] = []

    @property
    def size(self) -> int:
        return self._start + len(self.files[self._name]) - 4

    @property
    def content(self) -> bytes:
        return bytes(self.files[self._name])

    def follow(self, name: str) -> None:
        self._name, self._start = name, 4
        self.files[name] = bytearray(MAGIC)

    def describe(self, description: bytes, seconds: int, server_id: int) -> None:
        self.described.append((description[2:52].rstrip(b"\0"), seconds, server_id))

    def put(self, data: bytes | memoryview) -> None:
        self.files[self._name] += data

    def take_back(self, size: int) -> None:
        del self.files[self._name][size - self._start + 4 :]


def event(kind: int, at: int, body: bytes = b"", *, flags: int = 0, following: int | None = None) -> bytes:
    length = 19 + len(body) + 4
    made = struct.pack(
        "<IBIIIH", 1_780_000_000, kind, 1, length, at + length if following is None else following, flags
    )
    made += body
    return made + zlib.crc32(made).to_bytes(4, "little")


def rotate(name: str = NAME, position: int = 4) -> bytes:
    return event(4, 0, struct.pack("<Q", position) + name.encode(), flags=0x20, following=0)


def description(at: int = 4, *, version: bytes = b"9.7.4", algorithm: int = 1, following: int | None = None) -> bytes:
    body = struct.pack("<H50sIB", 4, version, 0, 19) + bytes(40) + bytes([algorithm])
    return event(15, at, body, following=following)


def takes(log: LogBytes, *events: bytes) -> None:
    log.take(Piece(True, True, memoryview(b"\0" + one)) for one in events)


def in_pieces(one: bytes, size: int = 64) -> Iterator[Piece]:
    message = memoryview(b"\0" + one)
    for at in range(0, len(message), size):
        yield Piece(at == 0, at + size >= len(message), message[at : at + size])


def log_of(sink: Memory, start: int = 4, *, strict: bool = True) -> LogBytes:
    return LogBytes(sink, NAME, start, ADDRESS, strict=strict)


def begun(sink: Memory) -> tuple[LogBytes, int]:
    log = log_of(sink)
    takes(log, rotate(), description())
    return log, sink.size


def test_only_the_events_of_the_file_are_put() -> None:
    sink = Memory()
    log, at = begun(sink)
    one = event(2, at, b"one")
    two = event(16, at + len(one), b"two")
    heartbeat = event(27, 0, NAME.encode(), following=at + len(one))
    takes(log, one, heartbeat, event(41, 0, b"", following=0), two)
    following = "binlog.000008"
    rotated = event(4, sink.size, struct.pack("<Q", 4) + following.encode())
    takes(log, rotated, rotate(following), description())
    assert bytes(sink.files[NAME]) == MAGIC + description() + one + two + rotated
    assert bytes(sink.files[following]) == MAGIC + description()
    assert log.file == following


def test_a_dump_that_begins_within_a_file_describes_it_and_stores_nothing_of_that() -> None:
    sink = Memory(5_000)
    log = log_of(sink, 5_000)
    takes(log, rotate(NAME, 5_000), description(following=0), event(163, 0, b"list", flags=0x20, following=5_000))
    assert sink.described == [(b"9.7.4", 1_780_000_000, 1)]
    assert sink.content == MAGIC
    takes(log, one := event(2, 5_000, b"one"))
    assert sink.content == MAGIC + one


def test_a_description_that_is_sent_again_has_a_wrong_checksum_in_a_log_without_checksums() -> None:
    """Both servers set two of its fields to 0, and count its checksum again in logs with checksums only."""
    sink = Memory(50_000)
    log = log_of(sink, 50_000)
    takes(log, rotate(NAME, 50_000), description(algorithm=0, following=0)[:-1] + b"?", one := event(2, 50_000, b"one"))
    assert sink.content == MAGIC + one
    with pytest.raises(DamagedDumpError, match="damaged") as refused:
        takes(log_of(Memory(50_000), 50_000), rotate(NAME, 50_000), description(following=0)[:-1] + b"?")
    assert "checksum" in refused.value.detail


@pytest.mark.parametrize("at", [2**32 - 100, 2**32 - 26, 2**32, 2**33 + 7])
def test_positions_beyond_4_gib_are_told_modulo(at: int) -> None:
    sink = Memory(at)
    log = log_of(sink, at)
    takes(log, rotate(NAME, at), description(following=0))
    one = event(2, at, b"one", following=(at + 26) % 2**32)  # for one of them: 0, as with artificial events
    takes(log, one)
    assert sink.content == MAGIC + one


def test_a_long_event_comes_piece_by_piece() -> None:
    sink = Memory()
    log, at = begun(sink)
    one = event(30, at, bytes(range(256)) * 9)
    log.take(in_pieces(one))
    takes(log, two := event(16, sink.size, b"xid"))
    assert sink.content == MAGIC + description() + one + two


def test_a_long_event_with_a_wrong_checksum_is_taken_back() -> None:
    sink = Memory()
    log, at = begun(sink)
    one = bytearray(event(30, at, bytes(2_000)))
    one[1_000] ^= 1
    with pytest.raises(DamagedDumpError, match="is damaged") as refused:
        log.take(in_pieces(bytes(one)))
    assert "checksum" in refused.value.detail
    assert sink.content == MAGIC + description()


@pytest.mark.parametrize("came", [-1, +1, +500])
def test_a_long_event_of_another_length_than_its_own_is_taken_back(came: int) -> None:
    sink = Memory()
    log, at = begun(sink)
    one = event(30, at, bytes(2_000))
    with pytest.raises(DamagedDumpError):
        log.take(in_pieces(one + bytes(came) if came > 0 else one[:came]))
    assert sink.content == MAGIC + description()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (lambda at: event(2, at, b"x")[:-1] + b"?", "checksum"),
        (lambda at: event(2, at + 1, b"x"), "ends at"),
        (lambda at: event(2, at, b"x") + b"more", "came"),
        (lambda at: event(2, at, b"x")[:-5], "came"),
        (lambda at: struct.pack("<IBIIIH", 1, 2, 1, LONGEST + 1, at, 0), "bytes long"),
        (lambda _at: b"short", "an event of 5 bytes"),
        (lambda _at: b"", "an event of 0 bytes"),
        (lambda _at: rotate("binlog.000008", 999), "begins at 999"),
    ],
)
def test_what_no_server_sends_is_refused_and_nothing_of_it_is_put(bad: object, why: str) -> None:
    sink = Memory()
    log, at = begun(sink)
    with pytest.raises(DamagedDumpError) as refused:
        takes(log, bad(at))  # type: ignore[operator]  # each is a function
    assert why in refused.value.detail
    assert sink.content == MAGIC + description()


@pytest.mark.parametrize(
    "name",
    ["../../etc/cron.d/x.000001", "/x.000001", "cron.000008", "binlog.000008.sh", "binlog", "-x.000001", "", "\0"],
)
def test_a_rotate_event_names_files_of_this_log_only(name: str) -> None:
    sink = Memory()
    log, _at = begun(sink)
    with pytest.raises(MisnamedError):
        takes(log, rotate(name))
    assert list(sink.files) == [NAME]
    with pytest.raises(MisnamedError):
        takes(log_of(Memory()), rotate(name))


@pytest.mark.parametrize("first", [event(2, 4, b"x"), rotate("binlog.000008"), rotate(NAME, 5), description()])
def test_a_dump_begins_with_the_name_and_place_that_were_asked_for(first: bytes) -> None:
    with pytest.raises(DamagedDumpError):
        takes(log_of(Memory()), first)


def test_a_file_of_mariadb_begins_with_its_gtid_list_or_it_is_rewritten() -> None:
    sink = Memory()
    log = log_of(sink)
    version = b"10.11.19-MariaDB-log"
    takes(log, rotate(), description(version=version))
    with pytest.raises(DamagedDumpError) as refused:
        takes(log, event(2, sink.size, b"# Dum"))
    assert "rewritten" in refused.value.detail
    takes(log, event(163, sink.size, b"list"), event(2, sink.size + 27, b"x"))
    assert sink.content.endswith(event(2, len(sink.content) - 24, b"x"))


def test_without_checksums_lengths_and_positions_are_checked_still() -> None:
    sink = Memory()
    log = log_of(sink)
    takes(log, rotate(), description(algorithm=0))
    at = sink.size
    takes(log, one := event(2, at, b"x")[:-1] + b"?")
    assert sink.content.endswith(one)
    with pytest.raises(DamagedDumpError):
        takes(log, event(2, at, b"x"))


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Could not find first log file name in binary log index file", EndKind.NOT_THERE),
        ("Could not open log file", EndKind.UNOPENED),
        ("File './b.000001' not found (Errcode: 2 \"No such file or directory\")", EndKind.NOT_THERE),
        ("File './b.000001' not found (Errcode: 24 \"Too many open files\")", EndKind.UNOPENED),
        ("Found invalid event in binary log; the first event 'b.000001' at 4", EndKind.TORN),
        ("log event entry exceeded max_allowed_packet; Increase max_allowed_packet on source", EndKind.TORN),
        ("Binlog has bad magic number;  It's not a binary log file", EndKind.TORN),
        ("could not find next log; the first event 'binlog.000001' at 4", EndKind.NO_NEXT),
        ("A slave with the same server_uuid/server_id as this slave has connected to the master", EndKind.TWIN),
        ("A replica with the same server_uuid/server_id as this replica has connected to the source", EndKind.TWIN),
        ("binlog truncated in the middle of event; consider out of disk space on master", EndKind.TORN),
        ("Client requested source to start replication from position > file size", EndKind.TORN),
        ("Client requested master to start replication from impossible position", EndKind.TORN),
        ("Access denied; you need (at least one of) the REPLICATION SLAVE privilege(s)", EndKind.DENIED),
        ("Server shutdown in progress", EndKind.LOST),
        ("something new", EndKind.OTHER),
    ],
)
def test_a_servers_last_words_are_understood(said: str, kind: EndKind) -> None:
    message = b"\xff" + struct.pack("<H", 1236) + b"#HY000" + said.encode()
    with pytest.raises(EndedError) as ended:
        log_of(Memory()).take([Piece(True, True, memoryview(message))])
    assert ended.value.kind is kind
    assert ended.value.said == f"{said} (error 1236)"


def test_the_end_of_the_log_is_an_end_and_anything_else_is_none() -> None:
    with pytest.raises(EndedError) as ended:
        log_of(Memory()).take([Piece(True, True, memoryview(b"\xfe\0\0\2\0"))])
    assert ended.value.kind is EndKind.ALL
    for message in (b"", b"\1", b"\xfe" + bytes(20)):
        with pytest.raises(DamagedDumpError):
            log_of(Memory()).take([Piece(True, True, memoryview(message))])


def test_what_is_damaged_is_put_as_it_came_for_those_who_must_see_it() -> None:
    sink = Memory()
    log = log_of(sink, strict=False)
    bad = event(2, 4 + len(description()), b"x")[:-1] + b"?"
    takes(log, rotate(), description(), bad, event(2, 0, b"x", following=77))
    assert sink.content == MAGIC + description() + bad + event(2, 0, b"x", following=77)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.builds(
                lambda kind, flags, following, body: b"\0" + event(kind, 4, body, flags=flags, following=following),
                st.sampled_from([2, 4, 15, 16, 27, 41, 163]),
                st.sampled_from([0, 1, 0x20]),
                st.one_of(st.none(), st.integers(0, 2**32 - 1)),
                st.binary(max_size=120),
            ),
            st.sampled_from([b"\0" + rotate(), b"\0" + description(), b"\0" + rotate("binlog.000008")]),
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_whatever_a_server_sends_only_files_of_this_log_are_written(messages: list[bytes], strict: bool) -> None:
    sink = Memory()
    log = log_of(sink, strict=strict)
    with contextlib.suppress(DamagedDumpError, EndedError, MisnamedError):
        log.take(Piece(True, True, memoryview(message)) for message in messages)
    assert all(name.rpartition(".")[0] == "binlog" for name in sink.files)
    if strict:
        for content in sink.files.values():
            at = 4
            while at < len(content):
                length, following = struct.unpack_from("<II", content, at + 9)
                assert following == at + length
                at += length
            assert at == len(content)


def test_a_dump_of_another_server_than_the_one_that_was_asked_is_lost_before_anything_of_it_is_put() -> None:
    sink = Memory()
    log = LogBytes(sink, NAME, 4, ADDRESS, strict=True, source_id=2)
    with pytest.raises(EndedError, match="the server with ID 1 answers, before it was that with ID 2") as ended:
        takes(log, rotate(), description())
    assert (ended.value.kind, sink.content) == (EndKind.LOST, MAGIC)
    takes(LogBytes(sink, NAME, 4, ADDRESS, strict=True, source_id=1), rotate(), description())
    assert sink.content == MAGIC + description()


def for_replica(*events: tuple[bytes, bool]) -> Iterator[Piece]:
    for one, asked in events:
        yield Piece(True, True, memoryview(b"\0\xef" + bytes([asked]) + one))


def test_the_last_event_that_is_to_be_acknowledged_is_known_once_it_is_put() -> None:
    sink = Memory()
    log = LogBytes(sink, NAME, 4, ADDRESS, strict=True, semi_sync=True)
    log.take(for_replica((rotate(), False), (description(), False)))
    assert log.asked() is None
    at = sink.size
    one = event(2, at, b"one")
    two = event(2, at + len(one), b"two")
    three = event(2, at + len(one + two), b"three")
    log.take(for_replica((one, True), (two, True), (three, False), (event(27, 0, following=at), True)))
    assert log.asked() == (NAME, at + len(one + two))
    assert log.asked() is None
    long = event(2, sink.size, b"l" * 5_000)
    pieces = list(in_pieces(long))
    first = memoryview(b"\0\xef\x01" + bytes(pieces[0].data[1:]))
    log.take([Piece(True, False, first), *pieces[1:-1]])
    assert log.asked() is None
    log.take(pieces[-1:])
    assert log.asked() == (NAME, sink.size)
    assert sink.content == MAGIC + description() + one + two + three + long


@pytest.mark.parametrize("head", [b"\0", b"\0\xef", b"\0\xee\x01"])
def test_an_event_without_the_mark_of_those_for_a_replica_is_damaged(head: bytes) -> None:
    log = LogBytes(Memory(), NAME, 4, ADDRESS, strict=True, semi_sync=True)
    with pytest.raises(DamagedDumpError, match="is damaged"):
        log.take([Piece(True, True, memoryview(head + (rotate() if len(head) != 2 else b"")))])


def in_packets(*events: bytes) -> bytes:
    return b"".join((len(one) + 1).to_bytes(3, "little") + b"\x07\0" + one for one in events)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from((2, 16, 27, 30)), st.binary(max_size=40)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=2),
    st.integers(30, 120),
)
def test_what_is_taken_in_one_go_is_what_is_taken_one_by_one(
    drawn: list[tuple[int, bytes]], changes: list[tuple[int, int]], cut: int
) -> None:
    """Whatever is changed on its way, and wherever the bytes are cut."""

    def outcome(*, at_once: bool) -> tuple[bytes, str]:
        sink = Memory()
        log, at = begun(sink)
        takes(log, first := event(2, at, b"first"))
        events, at = [], at + len(first)
        for kind, body in drawn:
            events.append(event(kind, at, body, following=None if kind != 27 else at))
            at += len(events[-1]) if kind != 27 else 0
        stream = bytearray(in_packets(*events))
        for where, value in changes:
            stream[where % len(stream)] = value
        packets = Packets(512)
        try:
            for start in range(0, len(stream), cut):
                chunk = stream[start : start + cut]
                packets.space()[: len(chunk)] = chunk
                packets.came(len(chunk))
                if at_once:
                    packets.skip(log.run(*packets.here()))
                log.take(packets.pieces())
        except (DamagedDumpError, EndedError, MisnamedError) as error:
            return sink.content, f"{type(error).__name__} {error}"
        return sink.content, ""

    assert outcome(at_once=True) == outcome(at_once=False)

"""Damage in the spool and on the way from the server: what the server has whole is archived whole."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.binlog.archiver import Archiver
from backupd.binlog.spool_files import Spooled
from backupd.binlog.spool_repair import DamagedCopyError, Mender, read, scan_to
from backupd.binlog.stream_status import StreamEventKind, StreamState
from backupd.engine.server.binary_logs import BinlogSource
from backupd.model.binlog import Ending, SegmentKey
from backupd.model.server_facts import Position
from backupd.recovery.runs import without
from backupd.transfer import log_segments
from backupd.transfer.records.segment_documents import SegmentHeader
from tests.support.logs.archived import Books, QuickSealer, plain_of
from tests.support.logs.streaming import (
    PASSWORD,
    STREAMED,
    USER,
    Proxy,
    Streaming,
    assert_identical,
    insert,
    log_status,
    make_server,
    plain,
    prepare,
    through_socket,
    until,
)
from tests.support.servers.server import Server
from tests.support.servers.stacks import Stack
from tests.support.stores.memory import MemoryDestination

Harm = Callable[[Path, int], None]


def zeros(path: Path, offset: int) -> None:
    """What a power cut leaves of bytes that no fsync had waited for."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(offset)
        file.write(bytes(size - offset))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def truncation(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.truncate(offset)


@pytest.fixture(scope="module", params=STREAMED)
def running(request: pytest.FixtureRequest) -> Iterator[Server]:
    with make_server(request.param) as found:
        prepare(found)
        yield found


@pytest.fixture
def server(running: Server) -> Server:
    """With a fresh file."""
    running.execute("FLUSH BINARY LOGS")
    return running


class Archive:
    """Archives what ``streaming`` copies; ``step`` by hand."""

    def __init__(self, streaming: Streaming, before: Archive | None = None) -> None:
        self.streaming = streaming
        self.books: Books = before.books if before else Books()
        self.destination: MemoryDestination = before.destination if before else MemoryDestination("one")
        self.troubles: list[str] = []
        self.archiver = Archiver(
            streaming.spool,
            {"one": self.destination},
            QuickSealer(),
            self.books,
            checkpoint=timedelta(0),
            clock=lambda: datetime.now(UTC),
        )

    def __enter__(self) -> Archive:
        self.archiver.__enter__()
        return self

    def __exit__(self, *_error: object) -> None:
        self.archiver.__exit__(None, None, None)

    def step(self) -> bool:
        """Whether it archived anything."""
        done = self.archiver.step(datetime.now(UTC))
        if trouble := done.trouble.get(""):
            self.troubles.append(trouble)
        return bool(done.stored)

    def archived(self) -> dict[str, bytes]:
        """By name of the file: what is at the destination from its first byte on."""
        found: dict[str, bytes] = {}
        headers = [one for one in log_segments.headers(self.destination) if isinstance(one, SegmentHeader)]
        for header in sorted(headers, key=lambda header: header.segment.key):
            segment = header.segment
            before = found.get(segment.file, b"")
            if segment.start == len(before) or segment.start == 0:
                found[segment.file] = (b"" if segment.start == 0 else before) + plain_of(self.destination, header)
        return found

    def has_all(self, server: Server, first: str) -> None:
        """Until all that the server has from file ``first`` on is archived, byte for byte. That is read anew each time:
        MariaDB appends a checkpoint to a file some time after it began."""
        wanted: dict[str, bytes] = {}

        def reached() -> bool:
            if self.step():  # there may be more: all that is archived is read only once there is not
                return False
            names = [str(row[0]) for row in server.query("SHOW BINARY LOGS") if str(row[0]) >= first]
            wanted.clear()
            wanted.update({name: plain(server.datadir / name) for name in names})
            return {name: data for name, data in self.archived().items() if name in wanted} == wanted

        try:
            until(reached, "everything is archived as the server has it")
        except AssertionError as error:
            told = [f"{event.kind} {event.message} {event.detail}" for event in self.streaming.events]
            sizes = {name: (len(data), len(wanted.get(name, b""))) for name, data in self.archived().items()}
            raise AssertionError(
                "\n".join(
                    [
                        str(error),
                        str(self.streaming.streamer.status()),
                        str(sizes),
                        str(list(wanted)),
                        *told,
                        *self.troubles[-3:],
                    ]
                )
            ) from None


def rotate(server: Server, count: int = 1) -> None:
    for _ in range(count):
        insert(server, 3, size=2_000)
        server.execute("FLUSH BINARY LOGS")


def file_of(streaming: Streaming, name: str) -> Spooled:
    return next(file for file in streaming.spool.files() if file.name == name)


@pytest.mark.parametrize("harm", [zeros, flip, truncation])
def test_damage_in_the_newest_file_is_fetched_again_after_a_restart(
    server: Server,
    tmp_path: Path,
    harm: Harm,
) -> None:
    first, _ = log_status(server)
    with Streaming(server, tmp_path / "spool") as streaming, Archive(streaming) as archive:
        insert(server, 2, size=3_000)
        streaming.has_all(server)
        archive.has_all(server, first)
        _, durable = log_status(server)
        insert(server, 3, size=3_000)
        streaming.has_all(server)
        newest = file_of(streaming, first)
    harm(newest.path, durable + 1_000)
    insert(server)
    with Streaming(server, tmp_path / "spool") as again, Archive(again, archive) as archive:
        again.has_all(server)
        archive.has_all(server, first)
        assert_identical(again.spool, server)
        rotate(server)
        again.has_all(server)
        archive.has_all(server, first)
    assert len(again.spool.branches()) == 1
    assert (again.spool.gaps(), archive.books.gaps) == ((), [])
    assert not again.kinds(StreamEventKind.FAILED)


def test_damage_in_the_spool_is_mended_while_the_stream_goes_on(server: Server, tmp_path: Path) -> None:
    first, _ = log_status(server)
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
        rotate(server, 3)
        insert(server, 4, size=2_000)
        streaming.has_all(server)
        names = [file.name for file in streaming.spool.files() if file.name >= first]
        flip(file_of(streaming, names[0]).path, 10)  # in its very head
        zeros(file_of(streaming, names[1]).path, 3_000)
        truncation(file_of(streaming, names[2]).path, 3_000)
        flip(file_of(streaming, names[3]).path, 5_000)
        with Archive(streaming) as archive:
            archive.step()
            assert not archive.books.gaps
            assert "damaged behind byte 0" in archive.troubles[0]
            assert "backupd fetches it from the server again" in archive.troubles[0]
            archive.has_all(server, first)
            insert(server, 2)
            streaming.has_all(server)
            archive.has_all(server, first)
    assert len(streaming.kinds(StreamEventKind.MENDED)) == 4
    assert (streaming.spool.gaps(), archive.books.gaps) == ((), [])
    assert len(streaming.spool.branches()) == 1


def test_a_network_that_alters_bytes_costs_time_and_nothing_else(server: Server, tmp_path: Path) -> None:
    assert server.port is not None
    dice = random.Random(13)
    server.connect(user=USER, password=PASSWORD).close()

    def alter(data: bytes) -> bytes:
        if len(data) < 600 or dice.random() < 0.3:
            return data
        offset = dice.randrange(len(data))
        return data[:offset] + bytes([data[offset] ^ (1 << dice.randrange(8))]) + data[offset + 1 :]

    first, _ = log_status(server)
    with (
        Proxy(server.port) as proxy,
        Streaming(server, tmp_path / "spool", connection=proxy.connection()) as streaming,
        Archive(streaming) as archive,
    ):
        insert(server)
        streaming.has_all(server)
        proxy.alters = alter
        end = time.monotonic() + 5
        while time.monotonic() < end:
            rotate(server)
            archive.step()
            # While the broken stream is taken up again nothing slows the server down: without this it makes 1,500
            # files, and archiving these takes minutes.
            time.sleep(0.05)
        proxy.alters = None
        streaming.has_all(server)
        archive.has_all(server, first)
        rotate(server)
        streaming.has_all(server)
        archive.has_all(server, first)
    assert (streaming.spool.gaps(), archive.books.gaps) == ((), [])
    assert len(streaming.spool.branches()) == 1
    # MySQL's connections are encrypted: what was altered breaks them.
    assert archive.troubles or streaming.kinds(StreamEventKind.LOST), "nothing was altered"


@pytest.mark.parametrize("stack", STREAMED)
def test_a_file_that_is_damaged_at_the_server_is_a_gap_and_the_stream_goes_on_behind_it(
    stack: Stack, tmp_path: Path
) -> None:
    with make_server(stack) as server:
        prepare(server)
        rotate(server)
        bad, _ = log_status(server)
        rotate(server)
        growing, _ = log_status(server)
        insert(server, 3, size=2_000)
        flip(server.datadir / bad, 3_000)
        flip(server.datadir / growing, 3_000)
        with Streaming(server, tmp_path / "spool", wanted=Position(bad, 4)) as streaming, Archive(streaming) as archive:

            def was_told() -> bool:
                archive.step()
                return any(
                    "FLUSH BINARY LOGS" in event.hint and f"{growing} is damaged at" in event.message
                    for event in streaming.kinds(StreamEventKind.LOST)
                )

            until(was_told, "what to do there")
            insert(server, 2)
            rotate(server)
            streaming.has_all(server)

            def both() -> bool:
                archive.step()
                return len(archive.books.gaps) == 2

            until(both, "both gaps are known")
            last, _ = log_status(server)
            insert(server, 2)
            streaming.has_all(server)
            archive.has_all(server, last)
            assert streaming.streamer.status().state is StreamState.STREAMING
            before = streaming.streamer.status().restarts
            archive.step()
            insert(server)
            streaming.has_all(server)
            assert streaming.streamer.status().restarts == before
        one, other = archive.books.gaps
        assert one.before is not None
        assert other.before is not None
        assert (one.after.file, one.before.file) == (bad, growing)
        assert (other.after.file, other.before.file) == (growing, last)
        assert 0 < one.after.pos <= 3_000
        assert "damaged at the server" in one.reason
        kept = archive.archived()[bad]
        assert kept == plain(server.datadir / bad)[: one.after.pos]
        assert len(streaming.spool.branches()) == 1
        # It was a disk that read wrong, say, and reads right now: what was given up is archived whole after all.
        flip(server.datadir / bad, 3_000)
        flip(server.datadir / growing, 3_000)
        lost = [(gap.branch, int(gap.after.file[-6:])) for gap in archive.books.gaps]
        with Streaming(server, tmp_path / "spool", given_up=lambda: lost) as again, Archive(again, archive) as archive:
            again.has_all(server)
            archive.has_all(server, bad)
            insert(server)
            again.has_all(server)
            archive.has_all(server, bad)
        again_whole = {number for _branch, number in lost}
        assert {key.start for key in archive.books.of("one") if key.number in again_whole} == {0}
        assert len(again.kinds(StreamEventKind.MENDED)) == 2
        whole = [archive.books.segments["one", key] for key in archive.books.of("one") if key.start == 0]
        assert [
            without(gap, segment) for gap in (one, other) for segment in whole if segment.file == gap.after.file
        ] == [None, None]


@pytest.mark.parametrize("stack", STREAMED)
def test_a_copy_that_is_damaged_at_the_server_later_leaves_what_came_before_as_it_was(
    stack: Stack, tmp_path: Path
) -> None:
    with make_server(stack) as server:
        prepare(server)
        first, _ = log_status(server)
        insert(server, 3, size=2_000)
        with Streaming(server, tmp_path / "spool") as streaming, Archive(streaming) as archive:
            streaming.has_all(server)
            archive.has_all(server, first)
        whole = plain(server.datadir / first)
        flip(server.datadir / first, 3_000)
        with Streaming(server, tmp_path / "spool") as again, Archive(again, archive) as archive:
            event = again.reported(StreamEventKind.LOST)
            assert "damaged" in event.message + event.detail
            insert(server)
            server.execute("FLUSH BINARY LOGS")
            insert(server)
            last, _ = log_status(server)
            again.has_all(server)
            archive.has_all(server, last)
            archive.step()
        assert len(again.spool.branches()) == 1
        (gap,) = again.spool.gaps()
        assert gap.before is not None
        assert (gap.after.file, gap.after.pos, gap.before.file) == (first, len(whole), last)
        assert SegmentKey(gap.branch, 1, 0, len(whole)) in archive.books.of("one")


def test_a_copy_that_ends_too_early_mends_nothing(server: Server, tmp_path: Path) -> None:
    """As one does whose server was shut down meanwhile: the program ends well, and what came can be read."""
    with Streaming(server, tmp_path / "spool") as streaming:
        streaming.has_all(server)
        rotate(server, 1)
        streaming.has_all(server)
    bad = streaming.spool.files()[0]
    whole = plain(server.datadir / bad.name)
    flip(bad.path, 3_000)
    spool = streaming.spool
    copies = [whole[: scan_to(server.datadir / bad.name, len(whole) - 2_100).end], whole]

    def fetch(name: str) -> Path:
        spool.clear_incoming()
        (spool.incoming / name).write_bytes(copies.pop(0))
        return spool.incoming / name

    source = BinlogSource(through_socket(server))
    mender = Mender(
        "db1", source, spool, fetch=fetch, look=source.look, clock=lambda: datetime.now(UTC), report=lambda _event: None
    )
    doubt = spool.doubt(bad, read(bad.path).end, "the checksum is wrong")
    with pytest.raises(DamagedCopyError, match="is damaged") as part:
        mender.mend(doubt)
    assert "bytes of it were received" in part.value.detail
    assert spool.doubts() == (doubt,)
    mender.mend(doubt)
    assert spool.doubts() == ()
    assert plain(bad.path) == whole
    assert spool.files()[0].ended is Ending.ROTATED

"""By when what a server has written is known: the earlier of two clocks, read before the position. The server is fake,
since no real one has a clock that is ahead."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from backupd.binlog.archive_state import Committed
from backupd.binlog.session import Session, Watch
from backupd.binlog.spool_files import Spool
from backupd.binlog.supervisor import Streamer
from backupd.engine.server.binary_logs import BinlogSource
from backupd.model.errors import DestinationError
from backupd.model.server_facts import Position
from tests.support.logs.archived import Faulty, House
from tests.support.logs.real_logs import real_logs

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize("ahead", [timedelta(minutes=30), timedelta(minutes=-30)])
def test_neither_a_clock_of_the_server_that_is_ahead_nor_ours_claims_anything(tmp_path: Path, ahead: timedelta) -> None:
    moments = [NOW, NOW + timedelta(seconds=7)]
    streamer = Streamer(
        "db1",
        cast(BinlogSource, SimpleNamespace()),
        Spool(tmp_path / "spool"),
        installation="i",
        wanted=None,
        max_spool_bytes=1,
        clock=lambda: moments[0],
        on_event=lambda _event: None,
    )

    def look(*, files: bool, dump: int) -> SimpleNamespace:
        del files
        moments.pop(0)  # asking takes a while, and the position is that of its beginning
        return SimpleNamespace(server_time=NOW + ahead, position=Position("binlog.000001", 900), logs=())

    streamer._approach = SimpleNamespace(look=look)  # type: ignore[assignment]  # the fake server
    watch = SimpleNamespace(contradiction=lambda *_all: "", is_stalled=lambda: False, is_note_due=lambda: False)
    session = SimpleNamespace(
        received=(1, 900),
        thread_id=1,
        is_written=lambda _position: None,
        start=SimpleNamespace(branch=SimpleNamespace(id="b")),
    )
    question = streamer._ask(cast(Session, session))
    question.state.exception(timeout=60)
    assert streamer._heed(question, cast(Session, session), cast(Watch, watch)) == ""
    assert streamer._status.server_time == min(NOW, NOW + ahead)


def test_what_one_destination_lacks_is_not_committed(house: House, two: Faulty) -> None:
    log = real_logs()[0]
    heard: list[Committed] = []
    two.refuse = DestinationError("down")
    with house.archiver() as archiver:
        archiver.on_committed = heard.append
        assert archiver.committed() is None
        house.grow(log, log.cuts[1])
        archiver.step(house.clock.move(60))
        assert archiver.committed() is None
        two.refuse = None
        archiver.step(house.clock.move(60))
        first = Committed(house.branch.id, log.number, log.cuts[1])
        assert archiver.committed() == first
        two.refuse = DestinationError("down")
        house.grow(log, log.cuts[3])
        archiver.step(house.clock.move(60))
        assert archiver.committed() == first
        two.refuse = None
        house.end(log)
        archiver.step(house.clock.move(400))
        archiver.step(house.clock.move(400))
        last = Committed(house.branch.id, log.number, log.size)
        assert archiver.committed() == last
    assert heard == sorted(heard)
    assert (heard[0], heard[-1]) == (first, last)
    with house.archiver() as archiver:  # the file has left the spool by now
        archiver.step(house.clock())
        assert archiver.committed() == last


def test_a_catalog_that_is_out_of_reach_does_not_matter(house: House) -> None:
    log = real_logs()[0]
    house.grow(log, log.cuts[1])
    house.books.broken = True
    with house.archiver() as archiver:
        assert archiver.step(house.clock()).unrecorded
        assert archiver.committed() == (house.branch.id, log.number, log.cuts[1])


def test_who_waits_for_what_has_come_does_not_wait_for_the_checkpoint(house: House) -> None:
    log = real_logs()[0]
    house.grow(log, log.cuts[1])
    with house.archiver() as archiver:
        archiver.step(house.clock())
        house.grow(log, log.cuts[2])
        assert not archiver.step(house.clock.move(1)).stored
        archiver.urge()
        assert len(archiver.step(house.clock.move(1)).stored) == 2
        assert archiver.committed() == (house.branch.id, log.number, log.cuts[2])
        house.grow(log, log.cuts[3])
        assert not archiver.step(house.clock.move(1)).stored


def test_nothing_behind_a_file_that_cannot_be_read_counts_as_committed(house: House) -> None:
    log, following = real_logs()[:2]
    good = log.cuts[1]
    house.grow(log)
    broken = bytearray(log.data)
    broken[good + 25] ^= 1
    house.end(log)
    next(file for file in house.spool.files() if file.number == log.number).path.write_bytes(broken)
    house.grow(following)
    with house.archiver() as archiver:
        archiver.step(house.clock())
        house.judge("both copies have the same bytes")
        house.books.broken = True  # so that nothing leaves the spool
        for _ in range(3):
            archiver.step(house.clock.move(400))
        assert archiver.committed() == (house.branch.id, log.number, good)

"""What is acknowledged is on the disk, and what a disk once refused is not taken for durable: with no server."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import pytest

from backupd.binlog import session
from backupd.binlog.acknowledgement import DESTINATION, SPOOL
from backupd.binlog.acknowledger import Acknowledger
from backupd.binlog.archive_state import Committed
from backupd.binlog.connection_start import Start
from backupd.binlog.continuity import resume_at
from backupd.binlog.session import Acknowledging, Session
from backupd.binlog.spool_files import Spool, Spooled
from backupd.engine.binlog.events import FORMAT, HEADER
from backupd.engine.receiver.connection import Request
from backupd.engine.receiver.log_bytes import LogPosition
from backupd.engine.server.binary_logs import ListedLog
from backupd.engine.sql.client import Connection
from backupd.model.binlog import MAGIC, Branch, BranchReason

NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)
_GTID_LIST = 163


def branch(first: int = 7) -> Branch:
    return Branch("db1", "20261128T120000Z-00000001", NOW, BranchReason.FIRST, "uuid", "mariadb", "binlog", first)


def event(kind: int, at: int, size: int = 20) -> bytes:
    length = HEADER.size + size
    return HEADER.pack(0, kind, 1, length, at + length, 0) + bytes(size)


def log(events: int = 3) -> bytes:
    content = MAGIC + event(FORMAT, 4, 80)
    content += event(_GTID_LIST, len(content))
    for _ in range(events):
        content += event(2, len(content))
    return content


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """With the beginning of a file."""
    found = Spool(tmp_path / "spool")
    with found.locked():
        found.begin(branch())
        found.clear_incoming()
        (found.incoming / "binlog.000007").write_bytes(log())
        found.take(branch(), 7, "binlog.000007")
    return found


def newest(spool: Spool) -> Spooled:
    found = spool.newest()
    assert found is not None
    return found


class Dump:
    """Instead of a receiver: gives what the test tells it to. ``done``: what was synced and acknowledged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[object] = []
        self.requests: list[Request] = []
        self.fails = False
        monkeypatch.setattr(session, "Receiver", self._begun)
        monkeypatch.setattr(session, "os", self)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def fdatasync(self, descriptor: int) -> None:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")
        self.done.append(os.fstat(descriptor).st_size)

    def _begun(
        self,
        _connection: Connection,
        request: Request,
        _sink: Session,
        *,
        on_asked: Callable[[LogPosition], None],
        alarm: int | None,
    ) -> Dump:
        self.requests.append(request)
        self.asked, self.alarm = on_asked, alarm
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def acknowledge(self, position: LogPosition) -> None:
        self.done.append(position)


def begun(spool: Spool, acknowledging: Acknowledging, start: Start | None = None) -> Session:
    kept = newest(spool)
    return Session(
        spool,
        Connection(socket="/nowhere", user="stream"),
        start or Start(branch(), 7, kept.name, kept),
        connection_id=1,
        written=None,
        stall=20.0,
        is_whole=lambda _number, _size: True,
        acknowledging=acknowledging,
    )


def test_an_acknowledgement_follows_the_sync_of_what_it_is_for(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    dump, size = Dump(monkeypatch), newest(spool).size
    with begun(spool, Acknowledging(True)) as stream:
        (request,) = dump.requests
        assert request.semi_sync
        stream.put(log()[request.start :])
        assert dump.done == [size]
        more = event(2, size)
        stream.put(more)
        assert dump.done == [size]
        dump.asked(LogPosition("binlog.000007", size + len(more)))
        assert dump.done == [size, size + len(more), LogPosition("binlog.000007", size + len(more))]


def test_nothing_is_acknowledged_that_the_disk_refused_not_by_the_next_dump_either(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, kept = Dump(monkeypatch), newest(spool)
    with begun(spool, Acknowledging(True)) as stream:
        stream.put(log()[dump.requests[0].start :])
        stream.put(event(2, kept.size))
        del dump.done[:]
        dump.fails = True
        with pytest.raises(OSError, match="Input/output"):
            dump.asked(LogPosition("binlog.000007", kept.size + 39))
    assert dump.done == []
    dump.fails = False
    later = Spool(spool.folder)  # another process
    assert later.is_distrusted(kept)
    inode = kept.path.stat().st_ino
    later.write_anew()
    assert kept.path.stat().st_ino != inode
    assert kept.path.read_bytes() == log(4)
    assert later.is_distrusted(kept)
    how = acknowledger(later, SPOOL).how(Start(branch(), 7, kept.name, newest(later)), ())
    assert how is not None
    with begun(later, how) as stream:
        assert dump.requests[-1].start == 4
        stream.put(log(3)[4:])
        assert later.is_distrusted(kept)
        stream.put(log(4)[len(log(3)) :])
        assert not later.is_distrusted(kept)
    assert not Spool(spool.folder).is_distrusted(kept)


def test_a_stream_that_compares_the_end_alone_trusts_nothing(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    dump, kept = Dump(monkeypatch), newest(spool)
    spool.distrust(kept)
    found = resume_at(kept.path)
    assert found is not None
    monkeypatch.setattr(session, "resume_at", lambda _path: replace(found, start=len(log(2))))
    with begun(spool, Acknowledging(True)) as stream:
        assert dump.requests[0].start == len(log(2))
        stream.put(log()[len(log(2)) :])
        assert spool.is_distrusted(kept)


def test_a_sync_by_the_archive_that_fails_counts_as_well(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    kept = newest(spool)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuses)
        with pytest.raises(OSError, match="Input/output"):
            spool.sync(kept)
    assert spool.is_distrusted(kept)  # though the state could not be written either


def acknowledger(spool: Spool, mode: str, committed: Committed | None = None) -> Acknowledger:
    return Acknowledger(
        "db1",
        mode,
        spool,
        None,
        committed=lambda: committed,
        on_asked=lambda: None,
        clock=lambda: NOW,
        report=lambda _event: None,
    )


def stored(size: int, number: int = 7) -> Committed:
    return Committed(branch().id, number, size)


@pytest.mark.parametrize(
    ("mode", "number", "kept", "committed", "expected"),
    [
        (SPOOL, 7, True, None, (True, None)),
        (SPOOL, 7, False, None, (True, None)),
        (SPOOL, 9, False, None, (False, None)),  # behind a gap: its request would acknowledge what is missing
        (DESTINATION, 7, True, stored(200), (True, 200)),
        (DESTINATION, 7, True, None, (True, 4)),
        (DESTINATION, 8, False, stored(200), (False, None)),
        (DESTINATION, 8, False, stored(len(log())), (False, None)),
        (DESTINATION, 8, True, stored(len(log())), (True, 4)),
    ],
)
def test_a_dump_asks_for_no_more_than_is_durable(
    spool: Spool,
    mode: str,
    number: int,
    kept: bool,
    committed: Committed | None,
    expected: tuple[bool, int | None],
) -> None:
    start = Start(branch(), number, f"binlog.{number:06d}", newest(spool) if kept else None)
    logs = [ListedLog(f"binlog.{one:06d}", one, len(log())) for one in (7, 8, 9)]
    how = acknowledger(spool, mode, committed).how(start, logs)
    assert how is not None
    assert (how.attached, how.durable_to) == expected


def test_a_dump_begins_where_the_destinations_have_it(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    dump = Dump(monkeypatch)
    resume = resume_at(newest(spool).path)
    assert resume is not None
    monkeypatch.setattr(session, "resume_at", lambda _path: replace(resume, start=len(log(2))))
    with begun(spool, Acknowledging(True, len(log(1)))):
        assert dump.requests[0].start == len(log(1))
    with begun(spool, Acknowledging(True, len(log(3)))):
        assert dump.requests[1].start == len(log(2))

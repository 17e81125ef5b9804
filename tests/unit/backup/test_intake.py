"""Files of dump tools on their way: the disk of the spool is never full of them, and a pressed server is left alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from backupd.backup.commit import making
from backupd.backup.dump_intake import Intake, together
from backupd.engine.dump.insert_files import DumpedFile, RowMeter
from backupd.model.errors import CancelledError
from backupd.model.table import TableName
from backupd.process.throttle import Throttle, Unlimited
from backupd.transfer.parts import Packed, Packer
from tests.support.restores.dumped import DumpRepository, now

MIB = 1024 * 1024
ORDERS = TableName("shop", "orders")


class Writing:
    """A run that writes ``count`` files of 1 MiB as fast as it may, of rows that are 64 bytes long."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._count = folder, count
        self._going = threading.Event()
        self._going.set()
        self.most = 0
        self.pauses = 0
        self.written = 0

    def open(self, seconds: float) -> None: ...

    def files(self) -> Iterator[DumpedFile]:
        for number in range(self._count):
            self._going.wait()
            path = self._folder / f"{number}.sql"
            path.write_bytes(b"(%061d)\n" % number * (MIB // 64))
            self.written += 1
            self.most = max(self.most, sum(1 for _ in self._folder.iterdir()))
            yield DumpedFile(ORDERS, path, MIB)

    def verdicts(self) -> Mapping[TableName, str | None]:
        return {ORDERS: None}

    def pause(self) -> None:
        self.pauses += 1
        self._going.clear()

    def resume(self) -> None:
        self._going.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._going.set()


class Slow:
    """Lets a mebibyte pass when somebody has opened the gate for it."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)

    def take(self, size: int) -> None:
        if size:
            self.gate.acquire()


def taken(
    repository: DumpRepository,
    run: Writing,
    *,
    throttle: Throttle,
    room: int,
    cancel: threading.Event | None = None,
    pressure: str = "",
) -> tuple[Packed, int]:
    """Everything of ``run``, packed; and how many rows were counted."""
    with making(repository.spec(), clock=now) as made, Packer(made.fanout, workers=1, together=together) as packer:
        with (
            Intake(
                packer,
                throttle=throttle,
                pressure=lambda: pressure,
                room=room,
                cancel=cancel,
                arrived=lambda _table, _size: None,
            ) as intake,
            run,
        ):
            assert intake.take([run]) == {}
            rows = intake.rows(ORDERS)
            intake.keep(ORDERS)
        packed = packer.finish()
        made.discard()
    return packed, rows


def test_a_tool_that_is_faster_than_the_destination_stands_still(repository: DumpRepository, short_tmp: Path) -> None:
    folder = short_tmp / "rows"
    folder.mkdir()
    run, slow = Writing(folder, 20), Slow()

    def let_pass() -> None:
        for _ in range(20):
            deadline = time.monotonic() + 120
            while run.written < 20 and not run.pauses and time.monotonic() < deadline:
                time.sleep(0.001)
            slow.gate.release()

    gate = threading.Thread(target=let_pass)
    gate.start()
    packed, rows = taken(repository, run, throttle=slow, room=4 * MIB)
    gate.join()
    assert run.pauses
    assert run.most <= 4 + 3, "the room, one that exceeds it, one being written, one being read"
    assert packed.size == 20 * MIB
    assert rows == 20 * MIB // 64
    assert list(folder.iterdir()) == []


def test_under_pressure_the_tool_stands_still_until_the_throttle_lets_it_go(
    repository: DumpRepository, short_tmp: Path
) -> None:
    folder = short_tmp / "rows"
    folder.mkdir()
    run = Writing(folder, 3)
    stood: list[int] = []

    class Relieving:
        def take(self, size: int) -> None:
            if not size:
                stood.append(run.pauses)

    taken(repository, run, throttle=Relieving(), room=100 * MIB, pressure="the replica is late")
    assert stood
    assert all(stood), "the tool was stopped before each wait"


def test_a_cancelled_intake_ends(repository: DumpRepository, short_tmp: Path) -> None:
    folder = short_tmp / "rows"
    folder.mkdir()
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        taken(repository, Writing(folder, 3), throttle=Unlimited(), room=MIB, cancel=cancel)
    assert repository.objects() == set()


OF_OLD = (
    b'/* (no) */\nINSERT INTO `t` VALUES\n(1,"a(\\n(b"),\n(2,NULL),\n(3,"x)\\\\");\nINSERT INTO `t` VALUES\n(4,"");\n'
)
OF_NEW = (
    b'/* (no) */\nINSERT INTO `t` VALUES(1,"a(\\n,(b")\n,(2,NULL)\n,(3,"x)\\\\")\n;\n'
    b'INSERT INTO `t` (`a`,`b`) VALUES(4,"")\n;\n'
)


@pytest.mark.parametrize("text", [OF_OLD, OF_NEW])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 13, 14, 15, 1000])
def test_rows_are_counted_wherever_the_pieces_are_cut(text: bytes, size: int) -> None:
    meter = RowMeter()
    for start in range(0, len(text), size):
        meter.add(text[start : start + size])
    assert meter.rows == 4

"""When a destination counts as slow."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from backupd.backup.physical import Speeds, redo_size, slow_destinations
from backupd.model.manifest import Entry
from backupd.process.run_context import Stopwatch
from backupd.transfer.dedup import Load

MIB = 1024 * 1024
GIB = 1024 * MIB


def speeds(rate: float, seconds: float, *, new: int = 10 * GIB) -> Speeds:
    """20 GiB that the source delivered in 40 s; half of it is left to store."""
    return Speeds(20 * GIB, 40.0, 600 * MIB, new, (Load("nas", round(rate * seconds), seconds),))


def test_a_destination_of_five_megabytes_a_second_is_named_with_the_redo_and_the_time_to_prepare() -> None:
    found = slow_destinations(speeds(5 * MIB, 2000), seconds=2048, prepare_seconds=754)
    assert found == (
        (
            "destination nas is slow: it accepted 5.0 MiB/s where 256.0 MiB/s would keep up with the source (512.0 "
            "MiB/s "
            "before compression); the redo log copied meanwhile has 600.0 MiB, and preparing this backup will "
            "take about "
            "12m 34s"
        ),
    )


def test_a_destination_that_our_own_limit_holds_back_is_not_called_slow() -> None:
    (found,) = slow_destinations(speeds(5 * MIB, 2000), seconds=2048, prepare_seconds=754, limits={"nas": 5 * MIB})
    assert found.startswith(
        "max_upload of destination nas (5.0 MiB/s) limited this backup: 5.0 MiB/s were sent where "
        "256.0 MiB/s would keep up with the source"
    )
    (found,) = slow_destinations(speeds(5 * MIB, 2000), seconds=2048, prepare_seconds=754, limits={"nas": 50 * MIB})
    assert found.startswith("destination nas is slow: it accepted 5.0 MiB/s")


@pytest.mark.parametrize(
    ("rate", "busy", "run", "is_slow"),
    [
        (85 * MIB, 200, 250, True),
        (86 * MIB, 200, 250, False),
        (5 * MIB, 55, 60, False),
        (5 * MIB, 55, 61, True),
        (50 * MIB, 100, 201, False),
        (50 * MIB, 101, 201, True),
    ],
)
def test_it_takes_a_third_of_the_speed_a_minute_and_half_of_the_time(
    rate: int, busy: float, run: float, *, is_slow: bool
) -> None:
    assert bool(slow_destinations(speeds(rate, busy), seconds=run, prepare_seconds=1)) is is_slow


def test_what_is_there_already_does_not_have_to_be_stored_fast() -> None:
    assert slow_destinations(speeds(5 * MIB, 100, new=100 * MIB), seconds=120, prepare_seconds=1) == ()


def test_nothing_captured_and_nothing_stored_is_no_reason_to_complain() -> None:
    nothing = Speeds(0, 0.0, 0, 0, (Load("nas", 0, 0.0),))
    assert slow_destinations(nothing, seconds=100, prepare_seconds=1) == ()
    assert slow_destinations(Speeds(GIB, 1.0, 0, 0, (Load("nas", 0, 90.0),)), seconds=100, prepare_seconds=1) == ()


def test_the_stopwatch_counts_the_waiting_and_not_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("backupd.process.run_context.time", SimpleNamespace(monotonic=lambda: now[0]))

    def slowly() -> Iterator[int]:
        for item in range(3):
            now[0] += 2.0
            yield item
        now[0] += 0.5

    watch = Stopwatch()
    seen = []
    for item in watch.over(slowly()):
        now[0] += 100.0
        seen.append(item)
    assert seen == [0, 1, 2]
    assert watch.waited == 6.5


def test_the_redo_of_both_families_is_found() -> None:
    entries = [
        Entry(path, size, "")
        for path, size in (("ib_logfile0", 5), ("xtrabackup_logfile", 7), ("shop/ib_logfile0.ibd", 11))
    ]
    assert redo_size(entries) == 12

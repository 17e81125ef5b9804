"""How a destination's load is measured; what the fan-out stores is asked by the tests of packing."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from backupd.transfer.fanout import Load, LoadMeter


def test_streams_beside_each_other_share_their_seconds() -> None:
    now = [100.0]
    meter = LoadMeter("nas", lambda: now[0])
    with ExitStack() as second:
        with meter.measure(1000):
            now[0] += 2
            second.enter_context(meter.measure(500))
            now[0] += 3
        now[0] += 1
    now[0] += 50
    with meter.measure(500):
        now[0] += 4
    assert meter.load() == Load("nas", 2000, 10.0)
    assert meter.load().rate == 200


def test_time_that_ended_in_a_failure_counts_too() -> None:
    now = [0.0]
    meter = LoadMeter("nas", lambda: now[0])
    with pytest.raises(OSError, match="gone"), meter.measure(10):
        now[0] += 2
        raise OSError("gone")
    assert meter.load().seconds == 2.0


def test_a_destination_that_was_given_nothing_has_no_rate() -> None:
    assert LoadMeter("nas", lambda: 0.0).load().rate == 0

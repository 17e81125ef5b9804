from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backupd.model.errors import CancelledError
from backupd.process.throttle import BURST_SECONDS, TokenBucket, Unlimited

_SETTINGS = settings(max_examples=200, deadline=None, print_blob=True)


@dataclass
class Clock:
    """Time that passes only while somebody waits or idles; as a fraction, so that sums are exact."""

    now: Fraction = Fraction(1000)
    waits: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now  # type: ignore[return-value]  # a number like any other, without rounding

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += Fraction(seconds)
        return False


_steps = st.lists(st.tuples(st.integers(0, 5_000_000), st.fractions(0, 20, max_denominator=64)), max_size=60)


@_SETTINGS
@given(rate=st.integers(1, 3_000_000), steps=_steps)
def test_between_any_two_moments_no_more_passes_than_rate_times_time_and_one_burst(
    rate: int, steps: list[tuple[int, Fraction]]
) -> None:
    clock = Clock()
    bucket = TokenBucket(Fraction(rate), clock=clock, wait=clock.wait)  # type: ignore[arg-type]
    passed: list[tuple[Fraction, int]] = []
    for size, idle in steps:
        bucket.take(size)
        passed.append((clock.now, size))
        clock.now += idle
    for first in range(len(passed)):
        total = 0
        for last in range(first, len(passed)):
            total += passed[last][1]
            since = passed[first - 1][0] if first else Fraction(1000)
            assert total <= rate * (passed[last][0] - since) + rate * Fraction(BURST_SECONDS)
    assert bucket.taken == sum(size for size, _idle in steps)


@_SETTINGS
@given(rate=st.integers(1, 3_000_000), sizes=st.lists(st.integers(1, 5_000_000), min_size=1, max_size=60))
def test_whoever_never_idles_gets_exactly_the_rate_after_the_first_burst(rate: int, sizes: list[int]) -> None:
    clock = Clock()
    bucket = TokenBucket(Fraction(rate), clock=clock, wait=clock.wait)  # type: ignore[arg-type]
    for size in sizes:
        bucket.take(size)
    assert clock.now - 1000 == max(Fraction(0), Fraction(sum(sizes), rate) - Fraction(BURST_SECONDS))


@_SETTINGS
@given(sizes=st.lists(st.integers(1, 100_000), min_size=2, max_size=30))
def test_those_who_ask_at_once_are_served_in_their_order(sizes: list[int]) -> None:
    due: list[float] = []

    def note(seconds: float) -> bool:
        due.append(seconds)
        return False

    bucket = TokenBucket(Fraction(1000), clock=Clock(), wait=note)  # type: ignore[arg-type]
    for size in sizes:
        bucket.take(size)
    assert due == sorted(due)


def test_a_clock_that_stands_still_lets_one_burst_pass_and_no_more() -> None:
    waits: list[float] = []

    def note(seconds: float) -> bool:
        waits.append(seconds)
        return False

    bucket = TokenBucket(100, clock=lambda: 5.0, wait=note)
    for _ in range(10):
        bucket.take(10)
    assert waits == []
    bucket.take(1)
    assert waits == [0.01]


def test_threads_together_get_one_rate() -> None:
    clock = Clock()
    lock = threading.Lock()
    delays: list[float] = []

    def note(seconds: float) -> bool:
        with lock:
            delays.append(seconds)
        return False

    bucket = TokenBucket(1000, clock=lambda: float(clock.now), wait=note)

    def work() -> None:
        for _ in range(100):
            bucket.take(10)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bucket.taken == 8000
    assert max(delays) == pytest.approx(7.0)
    assert len(delays) == 700


def test_a_stop_ends_a_long_wait_at_once() -> None:
    cancel = threading.Event()
    bucket = TokenBucket(1, cancel=cancel)
    started = time.monotonic()
    timer = threading.Timer(0.05, cancel.set)
    timer.start()
    with pytest.raises(CancelledError):
        bucket.take(10_000)
    assert time.monotonic() - started < 600
    timer.join()


def test_a_rate_of_nothing_is_no_rate() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        TokenBucket(0)


def test_unlimited_waits_for_nobody() -> None:
    Unlimited().take(2**60)

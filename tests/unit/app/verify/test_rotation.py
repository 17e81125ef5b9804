"""Which share is read when: pure, over simulated years."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from backupd.app.verify.scrubbing import WHOLE, Rotation, due, read_since
from backupd.transfer.scrub_and_repair import SHARES, share_of
from tests.support.dice import rounds, thrown

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
MONTH = Rotation(period=timedelta(days=30))


def simulated(rotation: Rotation, moments: Iterable[datetime]) -> tuple[dict[int, datetime], list[int], timedelta]:
    """When each share was last read, how many each run read, and the longest that one of them was not."""
    done: dict[int, datetime] = {}
    counts: list[int] = []
    longest = timedelta(0)
    for now in moments:
        shares = due(done, rotation, now)
        longest = max([longest, *(now - done[share] for share in shares if share in done)])
        done |= dict.fromkeys(shares, now)
        counts.append(len(shares))
    return done, counts, longest


def test_without_a_share_and_a_period_everything_is_read_every_time() -> None:
    assert due({}, WHOLE, START) == due(dict.fromkeys(range(SHARES), START), WHOLE, START) == frozenset(range(SHARES))


def test_a_share_of_a_tenth_reads_all_in_ten_runs_whenever_they_come() -> None:
    done, counts, _longest = simulated(Rotation(0.1), (START + timedelta(hours=7 * n * n) for n in range(10)))
    assert counts == [100] * 10
    assert len(done) == SHARES


def test_daily_runs_read_about_a_thirtieth_each_and_all_of_it_within_the_month() -> None:
    _done, counts, longest = simulated(MONTH, (START + n * DAY for n in range(400)))
    assert longest <= timedelta(days=30)
    assert max(counts) <= 70
    assert sum(counts[60:90]) <= 1.2 * SHARES, "not much more than has to be"


def test_weekly_runs_keep_the_month_too() -> None:
    _done, counts, longest = simulated(MONTH, (START + 7 * n * DAY for n in range(60)))
    assert longest <= timedelta(days=30)
    assert max(counts[1:]) < 0.6 * SHARES


def test_what_a_missed_run_would_have_read_the_next_one_reads() -> None:
    done, counts, _longest = simulated(MONTH, [*(START + n * DAY for n in range(40)), START + 45 * DAY])
    assert 160 <= counts[-1] <= 400, "five days' worth, and what could be too old when the next one is as late"
    assert min(done.values()) >= START + 15 * DAY


def test_no_share_stays_unread_for_longer_than_the_period_however_irregular_the_runs_are() -> None:
    dice = thrown("irregular runs")
    for _round in range(rounds(5)):
        period = timedelta(days=dice.randint(5, 90))
        step = min(period / 3, timedelta(days=dice.randint(1, 9)))
        now, moments = START, []
        for _run in range(200):
            now += step * dice.uniform(0.2, 1.0)
            moments.append(now)
        # The next run is expected as late as the last one or within a day, and no step is longer than a third of all.
        done, _counts, longest = simulated(Rotation(period=period), moments)
        assert longest <= period + step
        assert set(done) == set(range(SHARES)) or moments[-1] - START < period


def test_a_whole_run_in_between_leaves_the_load_even() -> None:
    done, _counts, _longest = simulated(MONTH, (START + n * DAY for n in range(20)))
    now = START + 20 * DAY
    done |= dict.fromkeys(due(done, WHOLE, now), now)
    counts = []
    for n in range(1, 61):
        shares = due(done, MONTH, now + n * DAY)
        done |= dict.fromkeys(shares, now + n * DAY)
        counts.append(len(shares))
    assert max(counts) < 0.5 * SHARES


def test_everything_counts_as_read_since_the_oldest_share_and_not_before_each_was_read_once() -> None:
    assert read_since(dict.fromkeys(range(SHARES - 1), START)) is None
    done = {share: START + share * timedelta(minutes=1) for share in range(SHARES)} | {-1: START - DAY}
    assert read_since(done) == START


def test_shares_are_even() -> None:
    counts = [0] * SHARES
    for number in range(20 * SHARES):
        counts[share_of(f"object {number}")] += 1
    assert min(counts) >= 3
    assert max(counts) <= 45

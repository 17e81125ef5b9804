"""Whether a restored node comes back by IST: the rule, the numbers, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backupd.model.server_facts import ClusterPosition
from backupd.recovery.ist import (
    Donor,
    NodeSample,
    Outcome,
    Rejoin,
    advice,
    donor_of,
    forecast,
    is_short,
)

UUID, OTHER = "5c3a1f2e-c0de-11f0-8000-0242ac110002", "11111111-c0de-11f0-8000-0242ac110002"
NOW = datetime(2026, 11, 28, 22, 0, tzinfo=UTC)
MIB = 2**20


def sample(server: str = "db1", **changes: object) -> NodeSample:
    made = NodeSample(
        server=server,
        at=NOW,
        uuid=UUID,
        name="lab",
        node=server,
        status="Primary",
        state="Synced",
        size=3,
        last=100_000,
        downto=60_698,
        written_bytes=0,
        gcache_bytes=512 * MIB,
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # fields by name


def donor(server: str = "db1", *, seqnos: float = 100.0, written: float = MIB, **changes: object) -> Donor:
    return Donor(sample(server, **changes), seqnos, written, timedelta(hours=1), 512 * MIB)


def at(seqno: int, uuid: str = UUID) -> ClusterPosition:
    return ClusterPosition(uuid, seqno)


@pytest.mark.parametrize(
    ("seqno", "outcome"),
    [(60_696, Outcome.SST), (60_697, Outcome.IST), (60_698, Outcome.IST), (100_000, Outcome.IST)],
)
def test_the_donor_must_hold_the_transaction_behind_the_node(seqno: int, outcome: Outcome) -> None:
    # downto <= S + 1, measured at its very boundary
    assert forecast(at(seqno), [donor(seqnos=0.0, written=0.0)], now=NOW).outcome is outcome


def test_a_node_at_the_end_of_the_cluster_needs_nothing_of_an_empty_cache() -> None:
    empty = Donor(sample(downto=None))
    assert forecast(at(100_000), [empty], now=NOW).is_ist
    found = forecast(at(99_999), [empty], now=NOW)
    assert found.outcome is Outcome.SST
    assert "seqno 100000 is in no gcache; the oldest there: db1 nothing" in found.reason


def test_the_numbers_say_until_when_and_from_whom() -> None:
    # 1,000 transactions behind are 10 MiB of 512: the other 502 pass in 502 s
    found = forecast(at(99_000), [donor("db1", downto=99_500), donor("db2")], now=NOW, predicted=timedelta(minutes=5))
    assert (found.donor, found.until) == ("db2", NOW + timedelta(seconds=502))
    assert found.words == (
        "IST from db2 until 2026-11-28T22:08:22Z: 1000 transactions behind, its gcache reaches back to 60698, "
        "512.0 MiB of it at 1.0 MiB/s and 100.0 transactions/s are written"
    )


def test_a_restore_that_ends_too_late_is_told_before_it_begins() -> None:
    found = forecast(at(99_000), [donor()], now=NOW, predicted=timedelta(seconds=503))
    assert found.outcome is Outcome.LATE
    assert "predicted to take 8m 23s, and db1 drops seqno 99001 in 8m 22s" in found.words
    assert forecast(at(99_000), [donor()], now=NOW, predicted=timedelta(seconds=501)).is_ist


@pytest.mark.parametrize(
    ("position", "donors", "words"),
    [
        (None, [donor()], "records no position"),
        (at(-1), [donor()], "records no position"),
        (at(99_000), [], "no node of the cluster answers"),
        (at(99_000), [donor(status="non-Primary")], "no node of the cluster answers"),
        (at(99_000, OTHER), [donor()], f"the backup is of cluster {OTHER}, the nodes are of {UUID}"),
        (at(100_002), [donor()], "100002 is 2 ahead of the cluster's 100000: the cluster lacks 2 transactions"),
    ],
)
def test_what_is_no_node_of_this_history_never_counts_as_ist(
    position: ClusterPosition | None, donors: list[Donor], words: str
) -> None:
    found = forecast(position, donors, now=NOW)
    assert not found.is_ist
    assert words in found.words


def test_of_two_that_hold_it_the_synced_one_gives_it() -> None:
    away = donor("db1", state="Donor/Desynced", seqnos=1.0, written=1.0)
    assert forecast(at(99_000), [away, donor("db2")], now=NOW).donor == "db2"


def test_rates_are_measured_since_the_last_start_and_in_this_cluster() -> None:
    hour = timedelta(hours=1)
    before = sample(at=NOW - 2 * hour, last=5, written_bytes=10**12)  # of before its restart
    begun = sample(at=NOW - hour, last=64_000, written_bytes=100 * MIB, downto=60_698)
    now = sample(last=100_000, written_bytes=460 * MIB, downto=60_698)
    found = donor_of([before, begun, now])
    assert (found.seqnos, found.bytes, found.over) == (10.0, 360 * MIB / 3600, hour)
    assert found.room == 512 * MIB  # nothing was dropped yet
    assert found.window == timedelta(seconds=5120)
    full = donor_of([begun, replace(now, downto=82_001)])
    assert full.room == 18_000 * 360 * MIB // 36_000  # what it holds now is all that it can hold
    assert donor_of([now]).window is None
    assert donor_of([replace(begun, uuid=OTHER), now]).seqnos is None


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seqno=st.integers(0, 2000),
    downtos=st.lists(st.one_of(st.none(), st.integers(1, 2000)), min_size=1, max_size=4),
    last=st.integers(0, 2000),
)
def test_ist_is_promised_only_where_a_donor_has_all_that_is_missing(
    seqno: int, downtos: list[int | None], last: int
) -> None:
    donors = [
        Donor(sample(f"db{number}", last=last, downto=None if one is None else min(one, last + 1)))
        for number, one in enumerate(downtos)
    ]
    found = forecast(at(seqno), donors, now=NOW)
    missing = range(seqno + 1, last + 1)
    able = seqno <= last and (
        not missing or any(one.sample.downto is not None and one.sample.downto <= missing[0] for one in donors)
    )
    assert found.is_ist is able


def test_a_restore_that_takes_most_of_what_is_left_is_reported_with_what_would_help() -> None:
    found = forecast(at(99_000), [donor()], now=NOW, predicted=timedelta(seconds=410))
    assert found.is_ist
    assert is_short(found, NOW)  # 410 of 502 s are more than 80 %
    assert not is_short(forecast(at(99_000), [donor()], now=NOW, predicted=timedelta(seconds=400)), NOW)
    some = advice(donor(), timedelta(seconds=400), timedelta(hours=1))
    assert some is not None
    # 0.8 x 512 s - 400 s; and (400 s + 1 h) / 0.8 x 1 MiB/s
    assert some.words == "take increments every 9.6s or more often, or set gcache.size to 4.9 GiB on each node"
    other = advice(donor(), timedelta(seconds=500), timedelta(hours=1))
    assert other is not None
    assert other.words.startswith("set gcache.size to 5.0 GiB on each node: more frequent")
    assert advice(Donor(sample()), timedelta(seconds=1), timedelta(hours=1)) is None


def test_what_came_stands_beside_what_was_predicted() -> None:
    found = forecast(at(99_000), [donor()], now=NOW, predicted=timedelta(seconds=60))
    began = Rejoin.of("20261128T220000Z-00000001", "shop", "db3", found, NOW)
    assert (began.error, began.is_as_predicted) == (None, None)
    ended = replace(began, came="ist", ended_at=NOW + timedelta(seconds=72))
    assert (ended.error, ended.is_as_predicted) == (12.0, True)
    assert replace(ended, came="sst").is_as_predicted is False
    assert ended.as_json()["error_seconds"] == 12.0

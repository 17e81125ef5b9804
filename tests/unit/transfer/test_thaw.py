"""Asking an archive, many at once."""

from __future__ import annotations

import io
from datetime import timedelta

import pytest

from backupd.model.errors import DestinationError
from backupd.process.throttle import TokenBucket, Unlimited
from backupd.transfer.thaw import BATCH, Asked, ask, look
from storage import layout
from storage.destination import ColdState, Tier
from tests.support.stores.cold import ColdPlace
from tests.support.stores.stock import FakeClock, named


def vault(count: int) -> tuple[ColdPlace, list[str], FakeClock]:
    clock = FakeClock()
    place = ColdPlace("vault", clock, "GLACIER")
    keys = [layout.object_key(named(b"%d" % number).name) for number in range(count)]
    for key in keys:
        place.put(key, io.BytesIO(b"x"))
    return place, keys, clock


def asked(
    place: ColdPlace,
    keys: list[str],
    clock: FakeClock,
    *,
    again: bool = False,
    tier: Tier = Tier.STANDARD,
    days: int = 7,
) -> int:
    """How many requests were made."""
    return sum(
        one.paid for batch in ask(place, keys, tier, days, now=clock(), pace=Unlimited(), again=again) for one in batch
    )


def test_everything_is_asked_for_once_and_the_answers_come_in_batches() -> None:
    place, keys, clock = vault(BATCH + 5)
    batches = list(ask(place, keys, Tier.BULK, 7, now=clock(), pace=Unlimited()))
    assert [len(batch) for batch in batches] == [BATCH, 5]
    assert [one.key for batch in batches for one in batch] == keys
    assert asked(place, keys, clock) == 0
    assert set(place.requests.values()) == {1}


def test_what_is_there_for_less_time_than_wanted_is_asked_for_again_and_costs_no_time() -> None:
    place, keys, clock = vault(2)
    asked(place, keys, clock, days=2)
    clock.move(hours=13)
    assert asked(place, keys, clock, days=2) == 0
    clock.move(hours=20)
    assert asked(place, keys, clock, days=2) == 2
    found = look(place, keys)
    assert all(one.state is ColdState.THAWED and one.until == clock() + timedelta(days=2) for one in found.values())


def test_a_faster_tier_is_asked_for_though_a_slower_one_is_under_way() -> None:
    place, keys, clock = vault(3)
    asked(place, keys, clock, tier=Tier.BULK)
    assert asked(place, keys, clock, tier=Tier.EXPEDITED) == 0
    assert asked(place, keys, clock, tier=Tier.EXPEDITED, again=True) == 3
    clock.move(hours=2)
    assert {one.state for one in look(place, keys).values()} == {ColdState.THAWED}


def test_what_is_missing_is_told_and_what_fails_ends_it_after_what_came_before() -> None:
    place, keys, clock = vault(40)
    place.delete(keys[3])
    place.after = 10
    seen: list[Asked] = []
    with pytest.raises(DestinationError, match="does not answer"):
        for batch in ask(place, keys, Tier.STANDARD, 7, now=clock(), pace=Unlimited()):
            seen += batch
    assert sum(one.paid for one in seen) == 10
    assert sum(place.requests.values()) == 10
    assert [one.key for one in seen if one.coldness is None] in ([keys[3]], [])
    place.silent = False
    assert keys[3] not in look(place, keys)


def test_requests_keep_to_their_rate() -> None:
    place, keys, clock = vault(30)
    waits: list[float] = []
    pace = TokenBucket(10, clock=lambda: 0.0, wait=lambda seconds: waits.append(seconds) or False)  # type: ignore[func-returns-value]  # a list's append
    list(ask(place, keys, Tier.STANDARD, 7, now=clock(), pace=pace))
    assert len(waits) == 20
    assert max(waits) == pytest.approx(2.0)

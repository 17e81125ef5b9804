"""A place that does not answer is asked once, not by everybody."""

from __future__ import annotations

import io
from typing import BinaryIO

import pytest

from backupd.model.errors import DestinationError, ObjectMissingError, UnreachableError
from storage import layout
from storage.destination import Destination, ObjectInfo
from storage.throttle_and_breaker import PAUSE, BreakerDestination, ForwardingDestination
from tests.contract.destination import DestinationContract
from tests.support.stores.memory import MemoryDestination

KEY = layout.object_key("ab" * 32 + "-" + "01" * 8)


class Silent(ForwardingDestination):
    """Does not answer while ``error`` is set; ``asked``: how often it was tried."""

    error: DestinationError | None = None
    asked = 0

    def stat(self, key: str) -> ObjectInfo:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return super().stat(key)

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return super().put(key, stream)


class TestBreaker(DestinationContract):
    @pytest.fixture
    def destination(self) -> Destination:
        return BreakerDestination(MemoryDestination("away", tree=False))

    @pytest.fixture
    def bare(self) -> Destination:
        return BreakerDestination(MemoryDestination("away", tree=False, initialised=False))


def test_while_a_place_is_silent_nobody_waits_for_it_twice_and_then_it_is_asked_again() -> None:
    now = [100.0]
    inner = Silent(MemoryDestination("away"))
    place = BreakerDestination(inner, clock=lambda: now[0])
    place.put(KEY, io.BytesIO(b"x"))
    inner.error = UnreachableError("no answer", detail="timed out", hint="look at it")
    for ask in (
        lambda: place.stat(KEY),
        lambda: place.put(KEY, io.BytesIO(b"y")),
        lambda: list(place.list("objects/")),
        lambda: place.get(KEY),
        place.is_initialised,
    ):
        with pytest.raises(UnreachableError) as caught:
            ask()
        assert str(caught.value) == str(inner.error)
    assert inner.asked == 2
    now[0] += PAUSE
    with pytest.raises(UnreachableError):
        place.stat(KEY)
    assert inner.asked == 3
    inner.error = None
    now[0] += PAUSE
    assert place.stat(KEY).size == 1
    assert place.is_initialised()


def test_any_other_failure_is_that_of_one_call() -> None:
    inner = Silent(MemoryDestination("away"))
    place = BreakerDestination(inner)
    inner.error = DestinationError("refused")
    with pytest.raises(DestinationError, match="refused"):
        place.put(KEY, io.BytesIO(b"x"))
    inner.error = None
    with pytest.raises(ObjectMissingError):
        place.stat(KEY)
    assert list(place.list("")) == []

"""How a destination's load is measured, and what is taken back; what the fan-out stores is asked by the tests of
packing."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import BinaryIO

import pytest

from backupd.model.errors import DestinationError
from backupd.transfer.collection import collect
from backupd.transfer.dedup import Fanout, Load, LoadMeter, Placed
from storage import layout
from storage.destination import ObjectInfo
from storage.memory import MemoryDestination
from storage.throttle_and_breaker import ForwardingDestination
from tests.support.stores.stock import START, FakeClock, backup_id
from tests.support.stores.strict import UndeletableDestination


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


class Plain:
    """A sealer that seals nothing."""

    recipients = ("A" * 40,)

    def seal(self, plain: bytes | memoryview, *, compressed: Callable[[], None] = lambda: None) -> bytes:
        compressed()
        return bytes(plain)


def test_what_may_not_be_deleted_is_taken_out_of_a_backup_all_the_same_and_left_to_a_sweep() -> None:
    free = MemoryDestination("free", tree=False)
    locked = UndeletableDestination("locked", tree=False)
    fan = Fanout(
        [locked, free],
        sealer=Plain(),  # type: ignore[arg-type]  # no gpg
        identity_key=b"k" * 32,
        known={},
        tree=layout.tree_name("shop", backup_id(1)),
    )

    def place(data: bytes) -> Placed:
        return fan.place(data, hashlib.sha256(data).digest(), lambda name: name, read=lambda: None)

    kept, stale = place(b"kept").object, place(b"changed meanwhile").object
    fan.forget({kept.name})
    assert fan.new_objects == (kept,)
    assert {info.key for info in free.list(layout.OBJECTS)} == {layout.object_key(kept.name)}
    assert place(b"changed meanwhile").new, "what was taken back is no longer there to be reused"
    fan.forget({kept.name})
    swept = MemoryDestination("locked", tree=False)  # with credentials that may delete
    swept.__dict__ = locked.__dict__
    assert layout.object_key(stale.name) in {info.key for info in swept.list(layout.OBJECTS)}
    clock = FakeClock(START)
    clock.move(days=1)
    assert collect(swept, clock=clock).objects == 2


class Meeting(ForwardingDestination):
    """Takes an object only when its fellow is being given one, too; then fails where it was told to."""

    def __init__(self, inner: MemoryDestination, both: threading.Barrier, *, fails: bool = False) -> None:
        super().__init__(inner)
        self._both, self._fails = both, fails

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        self._both.wait(300)
        if self._fails:
            raise DestinationError(f"{self.name} takes nothing")
        return super().put(key, stream)


@pytest.mark.parametrize("fails", [False, True])
def test_several_destinations_are_given_an_object_at_the_same_time(fails: bool) -> None:
    both = threading.Barrier(2)
    inner = [MemoryDestination("near", tree=False), MemoryDestination("far", tree=False)]
    fanout = Fanout(
        [Meeting(inner[0], both, fails=fails), Meeting(inner[1], both)],
        identity_key=b"k" * 32,
        known={},
        sealer=Plain(),  # type: ignore[arg-type]  # no gpg
        tree=layout.tree_name("shop", backup_id(1)),
    )
    with pytest.raises(DestinationError, match="near takes nothing") if fails else nullcontext():
        fanout.place(b"x", hashlib.sha256(b"x").digest(), lambda name: name, read=lambda: None)
    key = layout.object_key(fanout.new_objects[0].name)
    assert [key in {info.key for info in one.list("objects/")} for one in inner] == [not fails, True]

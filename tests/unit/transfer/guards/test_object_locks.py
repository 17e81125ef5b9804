"""Copies: what a target holds already, and what a copy builds on, is locked as long as what is sent."""

from __future__ import annotations

from backupd.model.job import silent
from backupd.transfer.copies import Order, replicate
from storage import layout
from storage.memory import MemoryDestination
from tests.support.stores.locked import LockedPlace
from tests.support.stores.stock import FakeClock, Stock, backup_id, named

RUN = "20261121T060000Z-00000009"


def test_a_copy_lengthens_the_locks_of_what_the_target_holds_already() -> None:
    clock = FakeClock()
    source, target = MemoryDestination("a", tree=False, clock=clock), LockedPlace("b", clock)
    stock = Stock(source)
    stock.add(1, {"x": b"one", "y": b"two"})
    stock.add(2, {"x": b"one", "y": b"changed"}, parent=1)
    stock.add(3, {"x": b"of another one"})
    clock.move(hours=1)
    for number, above in ((1, ()), (3, ()), (2, (backup_id(1),))):
        order = Order("shop", backup_id(number), RUN, above, workers=1, pauses=())
        assert replicate([source], target, order, clock=clock, report=silent, check=lambda: None)
        done = clock()
        clock.move(days=10)
    other = layout.backup_folder("shop", backup_id(3))
    assert target.sooner_than(done) == {
        layout.object_key(named(b"of another one").name),
        *(other + name for name in (layout.MANIFEST, layout.BODY, layout.UNPACK, layout.RUNBOOK)),
    }

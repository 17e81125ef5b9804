"""Where nothing may be deleted, marks and notes of quarantine are taken back by documents in their place.

Copies: what a target holds already, and what a copy builds on, is locked as long as what is sent.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from backupd.model.errors import RefusedError
from backupd.model.job import silent
from backupd.transfer.collection import collect, expecting
from backupd.transfer.copies import Order, replicate
from backupd.transfer.dedup import Presence, confirm, load_known, unusable_objects
from backupd.transfer.deletion import is_whole, mark, marked, marks, restorable_at, unmark
from backupd.transfer.leases import Intent, Owner, Pin, is_alive, pins
from storage import layout, objects
from tests.support.stores.locked import LockedPlace
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import START, FakeClock, Stock, backup_id, named
from tests.support.stores.strict import UndeletableDestination

GRACE = timedelta(days=1)


@pytest.fixture
def place() -> UndeletableDestination:
    made = UndeletableDestination("away", tree=False)
    Stock(made).add(1, {"t": b"gold"})
    return made


def test_a_mark_that_cannot_be_deleted_is_taken_back_for_everybody_who_asks(place: UndeletableDestination) -> None:
    owner = ("shop", backup_id(1))
    mark(place, *owner, START)
    unmark(place, *owner, now=START, grace=GRACE)
    assert (marks(place), marked(place, "shop")) == ({}, {})
    assert list(place.list(layout.MARKS)), "it could not be deleted"
    assert restorable_at(place, *owner)
    assert load_known(place, "shop")
    Pin(place, backup_id(7), [owner])._require(*owner)
    Intent([place], "shop", backup_id(8), parents=[owner[1]])._entered()


def test_what_was_taken_back_can_be_marked_again(place: UndeletableDestination) -> None:
    owner = ("shop", backup_id(1))
    for _ in range(2):
        mark(place, *owner, START)
        unmark(place, *owner, now=START, grace=GRACE)
    mark(place, *owner, START + GRACE, reason="retention")
    assert marked(place)[owner].at == START + GRACE
    with pytest.raises(RefusedError, match="marked deleted"):
        Pin(place, backup_id(7), [owner])._require(*owner)


def test_a_mark_that_was_taken_back_explains_no_loss_of_a_manifest() -> None:
    clock = FakeClock()
    place = MemoryDestination("away", tree=False)
    stock = Stock(place)
    for number in range(1, 31):
        stock.add(number, {"t": b"%d" % number})
        mark(place, "shop", backup_id(number), clock())
        put_back = UndeletableDestination("away", tree=False)
        put_back.__dict__ = place.__dict__
        unmark(put_back, "shop", backup_id(number), now=clock(), grace=GRACE)
        if number > 1:
            place.delete(layout.manifest_key("shop", backup_id(number)))
    done = collect(place, clock=clock)
    assert "have lost their manifests" in done.over_limit[0]
    assert not done.side_files


def test_a_quarantine_that_cannot_be_deleted_is_over_for_everybody_who_asks(place: UndeletableDestination) -> None:
    item = named(b"gold")
    objects.quarantine(place, item.name, "rot", START)
    assert objects.quarantined(place) == {item.name}
    assert not Presence(place).holds(item)
    objects.release(place, item.name)
    assert objects.quarantined(place) == frozenset()
    assert (confirm(place, [item]), unusable_objects(place)[1]) == ([], frozenset())
    assert Presence(place).holds(item)
    assert is_whole(place, "shop", backup_id(1))
    objects.quarantine(place, item.name, "rot again", START)
    assert objects.quarantined(place) == {item.name}


def test_a_mark_that_was_taken_back_does_not_explain_that_an_expected_backup_is_missing(
    place: UndeletableDestination,
) -> None:
    owner = ("shop", backup_id(1))
    mark(place, *owner, START)
    unmark(place, *owner, now=START, grace=GRACE)
    del place._blobs[layout.manifest_key(*owner)]
    assert collect(place, clock=FakeClock(), expected=expecting({owner})).missing.backups == {owner}


def test_a_lease_that_cannot_be_deleted_is_dead_for_other_processes_and_machines_too(
    place: UndeletableDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Owner.current()
    with Pin(place, backup_id(7), [("shop", backup_id(1))], clock=FakeClock()):
        pass
    (lease,) = pins(place)
    for asking in (replace(here, pid=1, ticks=1), replace(here, host="elsewhere")):
        monkeypatch.setattr(Owner, "current", lambda asking=asking: asking)
        assert not is_alive(lease, START)


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

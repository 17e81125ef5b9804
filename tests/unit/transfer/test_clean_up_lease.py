"""Removing at places where one is not alone, where not everything may go, and where each step is a round trip."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta

import pytest

from backupd.model.backup_record import Sighting
from backupd.model.errors import BusyError, CancelledError, NotFoundError, RefusedError
from backupd.transfer.collection import collect
from backupd.transfer.deletion import is_whole, mark, marks, sweep, unmark
from backupd.transfer.deletion_limit import LIMIT, DeletionLimit
from backupd.transfer.fsck import examine
from backupd.transfer.holds_and_locks import Backup, Locks, Mark, each
from backupd.transfer.leases import FRESH, Intent, Lease, Owner, await_sweeps, sweeping, sweeps
from backupd.transfer.records.manifests import backup_ids
from storage import layout
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import START, FakeClock, Stock, backup_id, believed, everything, pool, put, wanted
from tests.support.stores.strict import LockingDestination, SlowDestination, UndeletableDestination

GRACE = timedelta(hours=24)
ELSEWHERE = Owner("another-host", "boot", "ns", 4711, 1)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def place(clock: FakeClock) -> MemoryDestination:
    return MemoryDestination("a", clock=clock)


def foreign_sweep(place: MemoryDestination, clock: FakeClock) -> str:
    key = layout.sweep_key(backup_id(7))
    put(place, key, Lease(key, (), ELSEWHERE, clock(), clock()).encode())
    return key


# One at a time


def test_while_another_installation_removes_nothing_is_removed(place: MemoryDestination, clock: FakeClock) -> None:
    Stock(place).add(1, {"t": b"1"})
    Stock(place).add(20, {"t": b"another"})
    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    key = foreign_sweep(place, clock)
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert (done.backups, done.skipped) == ([], True)
    assert "another-host" in done.held[0]
    assert collect(place, clock=clock).skipped
    assert {info.key for info in place.list(layout.SWEEPS)} == {key}, "our own leases are gone"
    place.delete(key)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [backup_id(1)]


def test_of_two_that_begin_together_never_both_go_on(place: MemoryDestination, clock: FakeClock) -> None:
    with sweeping(place, clock=clock), pytest.raises(BusyError), sweeping(place, clock=clock):
        raise AssertionError
    assert sweeps(place) == []


def test_the_lease_of_a_dead_removal_goes_and_whoever_slept_notices(place: MemoryDestination, clock: FakeClock) -> None:
    key = foreign_sweep(place, clock)
    clock.move(seconds=FRESH.total_seconds() + 1)
    assert [finding.subject for finding in examine(place, None, clock=clock)] == [backup_id(7)]
    with sweeping(place, clock=clock) as lease:
        assert {info.key for info in place.list(layout.SWEEPS)} == {lease.lease.key}
        assert key != lease.lease.key
        place.delete(lease.lease.key)  # somebody took us for dead
        with pytest.raises(CancelledError):
            lease.assert_held()


def test_an_undelete_waits_for_the_sweep_that_may_have_read_the_mark(
    place: MemoryDestination, clock: FakeClock
) -> None:
    Stock(place).add(1, {"t": b"1"})
    mark(place, "shop", backup_id(1), clock())
    key = foreign_sweep(place, clock)
    ended = threading.Event()

    def undelete() -> None:
        unmark(place, "shop", backup_id(1), now=clock(), grace=GRACE)
        ended.set()

    thread = threading.Thread(target=undelete)
    thread.start()
    while marks(place):
        ended.wait(0.01)
    assert not ended.wait(0.3)
    place.delete(layout.manifest_key("shop", backup_id(1)))  # that sweep had read it
    place.delete(key)
    thread.join()
    assert not ended.is_set(), "it was told that the backup is gone"
    with pytest.raises(BusyError):
        foreign_sweep(place, clock)
        await_sweeps(place, clock=clock, patience=0.0)


@pytest.fixture(autouse=True)
def _quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(hook: threading.ExceptHookArgs) -> None:
        assert isinstance(hook.exc_value, NotFoundError), hook

    monkeypatch.setattr(threading, "excepthook", told)


# What may not go yet


def test_what_is_locked_stays_whole_is_told_and_goes_later(clock: FakeClock) -> None:
    place = LockingDestination("a", START + timedelta(days=9), clock)
    Stock(place).add(1, {"t": b"1", "u": b"u"})
    Stock(place).add(20, {"t": b"another"})
    mark(place, "shop", backup_id(1), clock())
    before = everything(place)
    clock.move(days=2)
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert (done.backups, done.locked, everything(place)) == ([], 1, before)
    assert "locked until 2026-11-30" in done.lock
    assert done.lock in done.held
    assert is_whole(place, "shop", backup_id(1))
    clock.move(days=8)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [backup_id(1)]
    assert examine(place, None, clock=clock) == []


def test_objects_that_are_locked_for_longer_than_their_manifest_keep_their_tombstones(clock: FakeClock) -> None:
    place = LockingDestination("a", START + timedelta(days=9), clock, locked=(layout.OBJECTS,))
    Stock(place).add(1, {"t": b"1", "u": b"u"})
    Stock(place).add(20, {"t": b"another"})
    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert (done.backups, done.locked, done.objects, len(pool(place))) == ([backup_id(1)], 2, 0, 3)
    assert len(list(place.list(layout.TOMBSTONES))) == 2, "no later backup may count on them"
    clock.move(days=8)
    assert (sweep(place, clock=clock, grace=GRACE, sightings=believed).objects, len(pool(place))) == (2, 1)
    assert examine(place, None, clock=clock) == []


def test_a_full_backup_stays_while_its_increment_is_locked(clock: FakeClock) -> None:
    place = LockingDestination(
        "a", START + timedelta(days=9), clock, locked=(layout.manifest_key("shop", backup_id(2)),)
    )
    stock = Stock(place)
    stock.add(1, {"t": b"1"})
    stock.add(2, {"t": b"2"}, parent=1)
    stock.add(20, {"t": b"20"})
    mark(place, "shop", backup_id(2), clock())
    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == []
    assert len(backup_ids(place)) == 3
    clock.move(days=8)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [backup_id(2), backup_id(1)]


def test_where_nothing_may_be_deleted_marks_are_put_and_files_do_not_pile_up(clock: FakeClock) -> None:
    place = UndeletableDestination("a", clock=clock)
    Stock(place).add(1, {"t": b"1"})
    Stock(place).add(20, {"t": b"another"})
    Stock(place).add(30, {"t": b"30"}, commit=False)
    mark(place, "shop", backup_id(1), clock())
    before = everything(place)
    clock.move(days=2)
    first = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert (first.backups, first.objects, first.locked > 0) == ([], 0, True)
    left = everything(place)
    assert {key.partition("/")[0] for key in left - before} == {"sweeps", "tombstones"}
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert (done.skipped, done.locked, everything(place)) == (True, 1, left)
    assert "deletes nothing" in done.lock
    unmark(place, "shop", backup_id(1), now=clock(), grace=timedelta.max)
    assert marks(place) == {}
    assert everything(place) == left, "the mark says that it is taken back"


# The brake


def days_ids(count: int) -> list[str]:
    return [f"202611{10 + number // 24:02d}T{number % 24:02d}0000Z-{number:08x}" for number in range(count)]


def test_rules_may_let_go_as_many_as_came_in_a_day() -> None:
    present = [("shop", name) for name in days_ids(72)]
    hourly = {("shop", name): START.replace(day=12, hour=number % 24) for number, name in enumerate(days_ids(24))}
    assert not LIMIT.exceeded_by(hourly, present), "hourly backups, of which a day is kept"
    assert LIMIT.exceeded_by(dict.fromkeys(present[:40], START), present), "more than half in one moment"
    assert not LIMIT.exceeded_by(dict.fromkeys(present[:36], START), present)
    assert not DeletionLimit(1.0).exceeded_by(dict.fromkeys(present, START), present)
    assert not DeletionLimit(0.01).exceeded_by(dict.fromkeys(present[:10], START), present), "ten may always go"


def test_a_sweep_does_not_follow_too_many_marks_of_one_day_unless_somebody_said_so(
    place: MemoryDestination, clock: FakeClock
) -> None:
    for number in range(1, 31):
        Stock(place).add(number * 3600, {"t": b"%d" % number})
    clock.move(days=3)
    ids = [name for _server, name in backup_ids(place)]
    for name in ids[:20]:
        mark(place, "shop", name, clock(), reason="a policy that somebody emptied")
    mark(place, "shop", ids[20], clock(), reason="a person")
    clock.move(days=2)

    def known(found: Mapping[Backup, Mark]) -> dict[Backup, Sighting]:
        return {**believed(found), **wanted({("shop", ids[20]): found["shop", ids[20]]})}

    done = sweep(place, clock=clock, grace=GRACE, sightings=known)
    assert done.backups == [ids[20]], "what a person named goes"
    assert len(done.over_limit) == 1
    assert "20 of 30" in done.over_limit[0]
    assert done.over_limit[0] in done.held
    assert len(sweep(place, clock=clock, grace=GRACE, sightings=wanted).backups) == 20


def test_a_pool_whose_manifests_vanished_is_kept_for_a_day(place: MemoryDestination, clock: FakeClock) -> None:
    limit = DeletionLimit(objects=10)
    Stock(place).add(1, {str(number): b"%d" % number for number in range(30)})
    Stock(place).add(20, {"t": b"another"})
    with place.get(layout.manifest_key("shop", backup_id(1))) as stream:
        manifest = stream.read()
    place.delete(layout.manifest_key("shop", backup_id(1)))
    clock.move(days=1)
    done = collect(place, clock=clock, limit=limit)
    assert (done.objects, len(pool(place)), len(done.over_limit)) == (0, 31, 1)
    assert "30 of 31" in done.held[0]
    put(place, layout.manifest_key("shop", backup_id(1)), manifest)
    assert (collect(place, clock=clock, limit=limit).rescued, len(pool(place))) == (30, 31)
    place.delete(layout.manifest_key("shop", backup_id(1)))
    collect(place, clock=clock, limit=limit)
    clock.move(days=1, minutes=1)
    assert collect(place, clock=clock, limit=limit).objects == 30


def test_when_most_manifests_vanished_what_is_left_of_their_backups_stays(
    place: MemoryDestination, clock: FakeClock
) -> None:
    for number in range(1, 21):
        Stock(place).add(number, {"t": b"%d" % number})
    lost = [layout.manifest_key("shop", backup_id(number)) for number in range(1, 16)]
    for key in lost:
        place.delete(key)
    clock.move(days=1)
    before = everything(place)
    done = collect(place, clock=clock, limit=DeletionLimit(objects=10))
    assert {key for key in before - everything(place) if key.startswith(layout.SERVERS)} == set()
    assert len(done.over_limit) == 2
    assert "15 of 20 backups have lost their manifests" in done.over_limit[0]


def test_the_garbage_of_a_run_that_died_and_of_a_backup_that_was_removed_is_no_surprise(
    place: MemoryDestination, clock: FakeClock
) -> None:
    limit = DeletionLimit(objects=10)
    Stock(place).add(1, {str(number): b"%d" % number for number in range(30)})
    Stock(place).add(20, {"t": b"another"})
    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed, limit=limit).objects == 30
    with Intent([place], "shop", backup_id(99), clock=clock) as intent:
        lease = intent.lease
        Stock(place).add(99, {str(number): b"%d" % number for number in range(40)}, commit=False)
    put(place, layout.intent_key(backup_id(99)), Lease(lease.key, lease.backups, ELSEWHERE, clock(), clock()).encode())
    clock.move(hours=1)
    done = collect(place, clock=clock, limit=limit)
    assert (done.objects, done.over_limit) == (40, [])


# Round trips


def test_many_objects_go_several_at_once(clock: FakeClock) -> None:
    place = SlowDestination("a", tree=False, clock=clock)
    Stock(place).add(1, {str(number): b"%d" % number for number in range(300)})
    Stock(place).add(20, {"t": b"another"})
    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    place.wanted = 9
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert (done.objects, len(pool(place))) == (300, 1)
    assert place.most > 8
    assert examine(place, None, clock=clock) == []


def test_each_keeps_the_order_and_raises_what_went_wrong() -> None:
    assert each(lambda number: number * 2, range(100)) == [number * 2 for number in range(100)]

    def fails(number: int) -> int:
        if number == 70:
            raise RefusedError("no")
        return number

    with pytest.raises(RefusedError):
        each(fails, range(100))
    assert Locks().text == ""

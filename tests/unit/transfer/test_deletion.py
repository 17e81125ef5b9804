from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.model.backup_record import Hold, HoldKind
from backupd.model.errors import NotFoundError, RefusedError
from backupd.transfer.collection import collect
from backupd.transfer.deletion import mark, marked, marks, restorable_at, sweep, unmark
from backupd.transfer.fsck import examine
from backupd.transfer.holds_and_locks import Kept, kept_at, put_hold, put_keep, remove_hold
from backupd.transfer.leases import Intent, Pin
from backupd.transfer.records.manifests import backup_ids
from storage import layout, objects
from storage.destination import Destination
from storage.filesystem import FilesystemDestination
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import (
    START,
    FakeClock,
    Stock,
    backup_id,
    believed,
    everything,
    named,
    pool,
    put,
    sealed,
)

GRACE = timedelta(hours=24)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def place(clock: FakeClock) -> MemoryDestination:
    return MemoryDestination("a", clock=clock)


# Marks


def test_a_mark_is_kept_and_taken_back(place: MemoryDestination, clock: FakeClock) -> None:
    Stock(place).add(1, {"t": b"1"})
    assert mark(place, "shop", backup_id(1), START) == START
    assert mark(place, "shop", backup_id(1), START + GRACE) == START, "the first time counts"
    assert marks(place) == {("shop", backup_id(1)): START}
    unmark(place, "shop", backup_id(1), now=START + GRACE / 2, grace=GRACE)
    unmark(place, "shop", backup_id(1), now=START + GRACE / 2, grace=GRACE)
    assert marks(place) == {}
    clock.move(days=9)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == []


def test_what_is_not_there_cannot_be_marked_or_undeleted(place: MemoryDestination) -> None:
    with pytest.raises(NotFoundError):
        mark(place, "shop", backup_id(1), START)
    with pytest.raises(NotFoundError):
        unmark(place, "shop", backup_id(1), now=START, grace=GRACE)
    assert everything(place) == set()


def test_after_the_grace_there_is_no_undelete(place: MemoryDestination) -> None:
    Stock(place).add(1, {"t": b"1"})
    mark(place, "shop", backup_id(1), START)
    with pytest.raises(RefusedError, match="no longer"):
        unmark(place, "shop", backup_id(1), now=START + GRACE, grace=GRACE)


# Sweeps


def test_a_marked_backup_goes_after_its_grace_with_all_that_was_its_own(
    place: MemoryDestination, clock: FakeClock
) -> None:
    stock = Stock(place)
    stock.add(1, {"t": b"old", "same": b"same"})
    stock.add(2, {"t": b"new", "same": b"same"})
    mark(place, "shop", backup_id(1), clock())
    clock.move(hours=23)
    early = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert (early.backups, early.objects) == ([], 0)
    clock.move(hours=1)
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert done.backups == [backup_id(1)]
    assert (done.objects, done.bytes_freed, done.held) == (1, len(sealed(b"old")), [])
    assert backup_ids(place) == [("shop", backup_id(2))]
    assert pool(place) == {named(b"new").name, named(b"same").name}
    assert list(place.trees()) == [(layout.tree_name("shop", backup_id(2)), True)]
    assert examine(place, None, clock=clock) == []
    assert not any(backup_id(1) in key for key in everything(place))


def test_sweeping_twice_changes_nothing_more(place: MemoryDestination, clock: FakeClock) -> None:
    Stock(place).add(1, {"t": b"1"})
    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    sweep(place, clock=clock, grace=GRACE, sightings=believed)
    before = everything(place)
    again = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert (again.backups, again.objects, everything(place)) == ([], 0, before)


def test_a_pinned_backup_stays_until_its_restore_ends(place: MemoryDestination, clock: FakeClock) -> None:
    Stock(place).add(1, {"t": b"1"})
    Stock(place).add(20, {"t": b"20"})
    with Pin(place, backup_id(9), [("shop", backup_id(1))], clock=clock):
        mark(place, "shop", backup_id(1), clock())
        clock.move(days=2)
        done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
        assert done.backups == []
        assert "a restore is reading it" in done.held[0]
        assert pool(place) == {named(b"1").name, named(b"20").name}
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [backup_id(1)]
    assert pool(place) == {named(b"20").name}


def test_a_full_stays_while_a_backup_that_stays_builds_on_it(place: MemoryDestination, clock: FakeClock) -> None:
    stock = Stock(place)
    stock.add(1, {"t": b"1"})
    stock.add(2, {"t": b"2"}, parent=1)
    stock.add(3, {"t": b"3"}, parent=2)
    stock.add(20, {"t": b"20"})
    mark(place, "shop", backup_id(1), clock())
    mark(place, "shop", backup_id(2), clock())
    clock.move(days=2)
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert done.backups == []
    assert len(done.held) == 2
    mark(place, "shop", backup_id(3), clock())
    clock.move(days=2)
    removed = sweep(place, clock=clock, grace=GRACE, sightings=believed).backups
    assert removed == [backup_id(number) for number in (3, 2, 1)], "what builds on others goes first"
    assert pool(place) == {named(b"20").name}


def test_the_last_whole_backup_of_a_server_stays_whatever_its_mark_says(
    place: MemoryDestination, clock: FakeClock
) -> None:
    stock = Stock(place)
    for number in (1, 2, 3):
        stock.add(number, {"t": b"%d" % number})
    place.delete(layout.object_key(named(b"3").name))  # the only unmarked one has lost an object
    for number in (1, 2):
        mark(place, "shop", backup_id(number), clock())
    clock.move(days=2)
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert done.backups == [backup_id(1)]
    assert any("last whole backup" in reason for reason in done.held)
    stock.add(4, {"t": b"4"})
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [backup_id(2)]


def test_no_dump_stands_in_for_the_last_physical_backup_and_a_physical_one_does_for_a_dump(
    place: MemoryDestination, clock: FakeClock
) -> None:
    physical, dumps = Stock(place), Stock(place, kind="logical")
    physical.add(1, {"t": b"1"})
    dumps.add(2, {"t": b"2"})
    dumps.add(3, {"t": b"3"})
    for number in (1, 2):
        mark(place, "shop", backup_id(number), clock())
    clock.move(days=2)
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert done.backups == [backup_id(2)]
    assert any("last whole backup" in reason for reason in done.held)
    mark(place, "shop", backup_id(3), clock())
    clock.move(days=2)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [backup_id(3)]
    assert restorable_at(place, "shop", backup_id(1)) is False  # marked, and there all the same
    assert ("shop", backup_id(1)) in backup_ids(place)


def test_a_backup_kept_on_purpose_stays_whatever_its_mark_says(place: MemoryDestination, clock: FakeClock) -> None:
    for number in (1, 2):
        Stock(place).add(number, {"t": b"%d" % number})
    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    kept = Kept(backups=frozenset({("shop", backup_id(1))}))
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed, kept=lambda _marked: kept).backups == []
    hold = Kept({"shop": Hold("shop", HoldKind.HOLD, "audit", "anna", START)})
    held = sweep(place, clock=clock, grace=GRACE, sightings=believed, kept=lambda _marked: hold)
    assert (held.backups, "audit" in held.held[0]) == ([], True)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [backup_id(1)]


@pytest.mark.parametrize("server", ["shop", "*"])
def test_a_hold_that_is_written_at_the_destination_binds_every_sweep_there(
    place: MemoryDestination, clock: FakeClock, server: str
) -> None:
    for number in (1, 2):
        Stock(place).add(number, {"t": b"%d" % number})
    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    hold = Hold(server, HoldKind.HOLD, "audit", "anna", START)
    put_hold(place, hold)
    assert kept_at(place) == Kept({server: hold})
    held = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert (held.backups, "audit" in held.held[0]) == ([], True)
    put(place, layout.hold_key(server), b"?")
    held = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert held.backups == [], "what it says does not matter, that it is there does"
    assert examine(place, None, clock=clock) == []
    assert remove_hold(place, server)
    assert not remove_hold(place, server)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [backup_id(1)]


def test_a_backup_that_is_kept_at_the_destination_stays_and_its_note_goes_with_it(
    place: MemoryDestination, clock: FakeClock
) -> None:
    for number in (1, 2, 3):
        Stock(place).add(number, {"t": b"%d" % number}, parent=1 if number == 2 else None)
    put_keep(place, "shop", backup_id(2), clock())
    for number in (1, 2):
        mark(place, "shop", backup_id(number), clock())
    clock.move(days=2)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [], "nor what it builds on"
    place.delete(layout.manifest_key("shop", backup_id(2)))
    assert backup_id(2) in {item.subject for item in examine(place, None, clock=clock)}
    sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert kept_at(place) == Kept()
    assert examine(place, None, clock=clock) == []


@pytest.mark.parametrize("harm", ["quarantine", "body"])
def test_what_is_known_to_be_damaged_does_not_count_as_the_backup_that_is_left(
    place: MemoryDestination, clock: FakeClock, harm: str
) -> None:
    stock = Stock(place)
    stock.add(1, {"t": b"1"})
    stock.add(2, {"t": b"2"})
    stock.add(3, {"t": b"3"}, parent=2)
    mark(place, "shop", backup_id(1), clock())
    if harm == "quarantine":
        objects.quarantine(place, named(b"2").name, "other bytes than were stored", clock())
    else:
        put(place, layout.body_key("shop", backup_id(2)), b"bodY")
    clock.move(days=2)
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert done.backups == []
    assert "last whole backup" in done.held[0]
    assert not restorable_at(place, "shop", backup_id(3)), "what it builds on is not whole"


def test_the_last_restorable_chain_stays_whole_though_all_of_it_is_marked(
    place: MemoryDestination, clock: FakeClock
) -> None:
    stock = Stock(place)
    stock.add(1, {"t": b"1"})
    stock.add(2, {"t": b"2"}, parent=1)
    stock.add(3, {"t": b"3"}, parent=2)
    place.delete(layout.body_key("shop", backup_id(3)))
    for number in (1, 2, 3):
        mark(place, "shop", backup_id(number), clock())
    clock.move(days=2)
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert done.backups == [backup_id(3)], "it is not whole, so the one before is the last that restores"
    assert backup_ids(place) == [("shop", backup_id(1)), ("shop", backup_id(2))]
    assert any("last whole backup" in sentence for sentence in done.held)


def test_an_unmarked_increment_keeps_its_parents_whatever_the_catalog_says(
    place: MemoryDestination, clock: FakeClock
) -> None:
    stock = Stock(place)
    for number, parent in ((1, None), (2, 1), (3, 2), (9, None)):
        stock.add(number, {"t": b"%d" % number}, parent=parent)
    for number in (1, 2):
        mark(place, "shop", backup_id(number), clock())
    done = sweep(
        place,
        clock=clock,
        grace=GRACE,
        sightings=believed,
        at_once=frozenset({("shop", backup_id(1)), ("shop", backup_id(2))}),
    )
    assert done.backups == []
    assert restorable_at(place, "shop", backup_id(9))
    assert not restorable_at(place, "shop", backup_id(3)), "what it builds on is marked"


def test_nothing_goes_while_an_intent_cannot_be_read(place: MemoryDestination, clock: FakeClock) -> None:
    Stock(place).add(1, {"t": b"1"})
    Stock(place).add(2, {"t": b"2"})
    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    put(place, layout.intent_key(backup_id(7)), b"?")
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert done.backups == []
    assert "cannot be read" in done.held[0]


def test_a_mark_says_why_and_the_first_reason_stays(place: MemoryDestination, clock: FakeClock) -> None:
    Stock(place).add(1, {})
    mark(place, "shop", backup_id(1), clock(), reason="retention")
    mark(place, "shop", backup_id(1), clock(), reason="again")
    assert [(one.at, one.reason) for one in marked(place).values()] == [(clock(), "retention")]
    assert marked(place, "zoo") == {}


def test_what_a_backup_that_is_being_written_builds_on_stays_and_others_of_its_server_go(
    place: MemoryDestination, clock: FakeClock
) -> None:
    Stock(place, "zoo").add(1, {"t": b"z"})  # of the same name, but another server's
    for number in (1, 2, 20):
        Stock(place).add(number, {"t": str(number).encode()})
    Stock(place, "zoo").add(20, {"t": b"20"})
    for server, number in (("shop", 1), ("shop", 2), ("zoo", 1)):
        mark(place, server, backup_id(number), clock())
    clock.move(days=2)
    parents = Intent([place], "shop", backup_id(3), parents=[backup_id(2)], clock=clock)
    put(place, layout.intent_key(backup_id(3)), parents.lease.encode())
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed, alive=lambda _lease, _now: True)
    assert backup_ids(place) == [("shop", backup_id(2)), ("shop", backup_id(20)), ("zoo", backup_id(20))]
    assert f"{backup_id(3)}, which is being written, builds on it" in done.held[0]
    place.delete(layout.intent_key(backup_id(3)))
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [backup_id(2)]


def test_a_marked_backup_that_is_being_mended_stays(place: MemoryDestination, clock: FakeClock) -> None:
    for number in (1, 20):
        Stock(place).add(number, {"t": str(number).encode()})
    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    with Intent([place], "shop", backup_id(1), clock=clock):
        done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
        assert (done.backups, done.held) == ([], [f"{backup_id(1)} of shop: it is being written"])
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [backup_id(1)]


def test_while_a_manifest_cannot_be_read_no_object_is_collected(place: MemoryDestination, clock: FakeClock) -> None:
    stock = Stock(place)
    stock.add(1, {"t": b"1"})
    stock.add(2, {"t": b"2"})
    key = layout.manifest_key("shop", backup_id(1))
    with place.get(key) as stream:
        good = stream.read()
    put(place, key, good.replace(b"physical", b"phySical"))
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert "cannot be read" in done.held[0]
    assert len(pool(place)) == 2
    mark(place, "shop", backup_id(2), clock())
    clock.move(days=2)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [], "the damaged one may build on it"
    put(place, key, good)
    assert sweep(place, clock=clock, grace=GRACE, sightings=believed).backups == [backup_id(2)]
    assert pool(place) == {named(b"1").name}


def test_a_damaged_backup_itself_can_be_deleted(place: MemoryDestination, clock: FakeClock) -> None:
    Stock(place).add(1, {"t": b"1"})
    put(place, layout.manifest_key("shop", backup_id(1)), b"?")
    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert everything(place) == set()


# Garbage


def test_what_a_dead_run_left_is_collected(place: MemoryDestination, clock: FakeClock) -> None:
    stock = Stock(place)
    stock.add(1, {"t": b"1"})
    before = everything(place)
    stock.add(2, {"t": b"2", "same": b"1"}, commit=False)
    put(place, layout.tombstone_key(named(b"gone").name), b"{}")
    intent = Intent([place], "shop", backup_id(2), clock=clock)
    lease = intent.lease
    assert lease.owner is not None
    dead = dataclasses.replace(lease, owner=dataclasses.replace(lease.owner, pid=2**22 + 5))
    put(place, layout.intent_key(backup_id(2)), dead.encode())
    clock.move(minutes=1)
    done = collect(place, clock=clock)
    assert done.leases == [layout.intent_key(backup_id(2))]
    assert done.trees == [layout.tree_name("shop", backup_id(2))]
    assert len(done.side_files) == 3
    assert done.objects == 1
    assert everything(place) == before
    assert list(place.trees()) == [(layout.tree_name("shop", backup_id(1)), True)]


def test_a_tree_that_was_published_without_a_manifest_is_collected(place: MemoryDestination, clock: FakeClock) -> None:
    Stock(place).add(20, {"t": b"another"})
    before = everything(place)
    Stock(place).add(1, {"t": b"1"})
    place.delete(layout.manifest_key("shop", backup_id(1)))
    collect(place, clock=clock)
    assert everything(place) == before
    assert [name for name, _published in place.trees()] == [layout.tree_name("shop", backup_id(20))]


def test_a_living_run_keeps_everything_it_made(place: MemoryDestination, clock: FakeClock) -> None:
    with Intent([place], "shop", backup_id(1), clock=clock):
        clock.move(hours=5)
        Stock(place).add(1, {"t": b"1"}, commit=False)
        before = everything(place)
        done = collect(place, clock=clock)
        assert everything(place) == before
        assert (done.trees, done.side_files, done.tombstoned) == ([], [], 0)
        assert list(place.trees()) == [(layout.tree_name("shop", backup_id(1)), False)]


def test_an_unnamed_object_waits_for_runs_that_began_before_its_tombstone(
    place: MemoryDestination, clock: FakeClock
) -> None:
    item = named(b"x")
    objects.store(place, item, sealed(b"x"))
    clock.move(hours=1)
    with Intent([place], "shop", backup_id(1), clock=clock):
        clock.move(hours=1)
        done = collect(place, clock=clock)
        assert (done.tombstoned, done.objects) == (1, 0)
        assert backup_id(1) in done.held[0]
        with Intent([place], "shop", backup_id(2), clock=clock):
            clock.move(hours=1)
            assert collect(place, clock=clock).objects == 0
    with Intent([place], "shop", backup_id(3), clock=clock):
        assert collect(place, clock=clock).objects == 1, "this one began after the tombstone"
    assert everything(place) == set()


def test_a_tombstone_is_lifted_when_a_backup_was_committed_meanwhile(
    place: MemoryDestination, clock: FakeClock
) -> None:
    Stock(place).add(1, {"t": b"1"})
    put(place, layout.tombstone_key(named(b"1").name), b'{"at": "2026-01-01T00:00:00Z"}')
    done = collect(place, clock=clock)
    assert (done.rescued, done.objects) == (1, 0)
    assert pool(place) == {named(b"1").name}
    assert examine(place, None, clock=clock) == []


class PowerCutError(Exception):
    pass


class Failing(MemoryDestination):
    """Fails for ever at the given write."""

    writes_left = 10**9

    def _count(self) -> None:
        if not self.writes_left:
            raise PowerCutError
        self.writes_left -= 1

    def put(self, key, stream):  # type: ignore[no-untyped-def]  # as in the base class
        self._count()
        return super().put(key, stream)

    def delete(self, key: str) -> None:
        self._count()
        super().delete(key)

    def remove_tree(self, tree: str) -> None:
        self._count()
        super().remove_tree(tree)


def test_any_prefix_of_a_sweep_leaves_whole_backups_and_garbage_that_the_next_one_finds() -> None:
    def prepared() -> tuple[Failing, FakeClock]:
        clock = FakeClock()
        place = Failing("a", clock=clock)
        stock = Stock(place)
        stock.add(1, {"t": b"1", "same": b"same", "u": b"u"})
        stock.add(2, {"t": b"2", "same": b"same"})
        stock.add(3, {"t": b"3"}, commit=False)
        mark(place, "shop", backup_id(1), clock())
        clock.move(days=2)
        return place, clock

    place, clock = prepared()
    sweep(place, clock=clock, grace=GRACE, sightings=believed)
    clean = everything(place)
    steps = 0
    while True:
        place, clock = prepared()
        place.writes_left = steps
        try:
            sweep(place, clock=clock, grace=GRACE, sightings=believed)
        except PowerCutError:
            pass
        else:
            break
        place.writes_left = 10**9
        broken = [item for item in examine(place, None, clock=clock) if not item.repairable]
        assert broken == [], f"after {steps} steps"
        clock.move(minutes=1)
        sweep(place, clock=clock, grace=GRACE, sightings=believed)
        assert everything(place) == clean, f"after {steps} steps"
        assert examine(place, None, clock=clock) == []
        steps += 1
    assert steps > 10


def test_conformance_of_types() -> None:
    """Both drivers are destinations: mypy reads this."""
    places: list[Destination] = [MemoryDestination("m"), FilesystemDestination("f", Path("/nowhere"))]
    assert len(places) == 2


def test_a_file_of_strangers_among_the_objects_stops_no_deletion(tmp_path: Path) -> None:
    clock = FakeClock()
    place = FilesystemDestination("a", tmp_path / "b")
    place.initialise(START)
    stock = Stock(place)
    stock.add(1, {"t": b"old"})
    stock.add(2, {"t": b"new"})
    stray = place.root / "objects" / "ab" / "stray.txt"
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.touch()
    mark(place, "shop", backup_id(1), START)
    clock.move(days=2)
    done = sweep(place, clock=clock, grace=GRACE, sightings=believed)
    assert (done.backups, done.objects, done.held) == ([backup_id(1)], 1, [])
    assert collect(place, clock=clock).objects == 0
    assert stray.exists()

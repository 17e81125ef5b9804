"""Every interleaving of an increment being written with the deletion of the full backup that it builds on.

As in ``test_interleaving``: both sides run the real order of looking, one destination call at a time, and each mutant
at the end breaks one rule of it and must be found out.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

import pytest

from backupd.model.errors import ObjectMissingError
from backupd.model.manifest import decode_header, encode_header
from backupd.model.text import Clock
from backupd.transfer import deletion as remove
from backupd.transfer.collection import Collected, GarbageCollection
from backupd.transfer.deletion import mark, marks, sweep
from backupd.transfer.holds_and_locks import Backup, Locks
from backupd.transfer.leases import Lease, Owner, _trouble, living_intents
from backupd.transfer.records.manifests import backup_ids, committed
from storage.destination import Destination
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import Stock, backup_id, believed
from tests.unit.transfer.test_interleaving import (
    INTENT,
    MANIFEST,
    LostError,
    Program,
    Stepped,
    World,
    always,
    explore,
    never,
    no_lease,
)

OLD, FULL, INCREMENT, OTHER = map(backup_id, range(4))


@pytest.fixture(autouse=True)
def _decoding_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same manifests are read in every state."""
    monkeypatch.setattr("backupd.transfer.records.manifests.decode_header", functools.cache(decode_header))


@pytest.fixture(autouse=True)
def _one_that_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of a sweep is between those who remove: of them there is one here."""
    monkeypatch.setattr(remove, "sweeping", no_lease)


# The increment


@dataclass(frozen=True)
class Rules:
    """What an increment keeps to. Each False is a mutant."""

    intent_first: bool = True
    fenced: bool = True


def increment(rules: Rules) -> Program:
    def begin(place: Stepped) -> None:
        now = place.clock()
        lease = Lease(INTENT, (("shop", INCREMENT),), Owner("h", "b", "n", 1, 1), now, now, (FULL,))
        place.put(INTENT, io.BytesIO(lease.encode()))

    def held(place: Stepped) -> bool:
        try:
            place.stat(INTENT)
        except ObjectMissingError:
            return False
        return not _trouble(place, "shop", FULL)

    def run(place: Stepped) -> str:
        if rules.intent_first:
            begin(place)
        if _trouble(place, "shop", FULL):
            if rules.intent_first:
                place.delete(INTENT)
            return "gave up"
        if not rules.intent_first:
            begin(place)
        place.put(MANIFEST, io.BytesIO(manifest()))
        if rules.fenced and not held(place):
            place.delete(MANIFEST)
            place.delete(INTENT)
            return "gave up"
        place.delete(INTENT)
        return "committed"

    return run


@functools.cache
def manifest() -> bytes:
    return encode_header(Stock(MemoryDestination("x")).header(2, (), parent=1))


# The deletion

Sweep = Callable[[Destination, Stepped, Callable[[Lease, datetime], bool]], object]


def deletion(sweeping: Sweep, alive: Callable[[Lease, datetime], bool] = always) -> Program:
    def run(place: Stepped) -> str:
        mark(place, "shop", FULL, place.clock(), reason="no rule keeps it")
        sweeping(place, place, alive)
        return "swept"

    return run


def real(destination: Destination, place: Stepped, alive: Callable[[Lease, datetime], bool]) -> object:
    return _sweep(destination, place.clock, alive)


def _sweep(destination: Destination, clock: Clock, alive: Callable[[Lease, datetime], bool]) -> Collected:
    return sweep(destination, clock=clock, grace=timedelta(0), sightings=believed, alive=alive)


def world_with_two_full_backups() -> World:
    world = World()
    stock = Stock(world.place)
    for number in (1, 3):
        stock.add(number, {})
    world.hours = 10
    return world


def unbroken(world: World, outcomes: tuple[str, str]) -> None:
    """An increment that counts itself committed has its full backup, now and after more sweeps, and whoever gave up
    left no manifest; something restorable is always left."""
    names = {name for _server, name in backup_ids(world.place)}
    if (INCREMENT in names) != (outcomes[0] == "committed"):
        raise LostError(outcomes)
    for _round in range(2):
        names = {name for _server, name in backup_ids(world.place)}
        if OTHER not in names or (outcomes[0] == "committed" and not {FULL, INCREMENT} <= names):
            raise LostError(outcomes)
        world.hours += 100
        _sweep(world.place, world.now, never)


@pytest.mark.parametrize("alive", [always, never], ids=["seen alive", "taken for dead"])
def test_no_interleaving_leaves_an_increment_without_its_full_backup(alive: Callable[[Lease, datetime], bool]) -> None:
    states = explore(world_with_two_full_backups(), (increment(Rules()), deletion(real, alive)), unbroken)
    print("states", states)
    assert states > 200


def test_sometimes_the_increment_gives_up_and_sometimes_the_full_backup_stays() -> None:
    """Otherwise the test above would show nothing."""
    ends: set[tuple[str, bool]] = set()

    def note(world: World, outcomes: tuple[str, str]) -> None:
        ends.add((outcomes[0], ("shop", FULL) in backup_ids(world.place)))

    explore(world_with_two_full_backups(), (increment(Rules(fenced=False)), deletion(real)), note)
    assert ends >= {("committed", True), ("gave up", False)}


def test_an_old_backup_of_the_server_goes_while_the_increment_is_written_and_none_that_it_builds_on() -> None:
    """All are marked but the newest; the increment names in its intent what it builds on."""
    ends: set[tuple[str, bool]] = set()

    def program(place: Stepped) -> str:
        mark(place, "shop", OLD, place.clock())
        return deletion(real)(place)

    def world() -> World:
        made = world_with_two_full_backups()
        Stock(made.place).add(0, {})
        return made

    def check(world: World, outcomes: tuple[str, str]) -> None:
        ends.add((outcomes[0], ("shop", OLD) in backup_ids(world.place)))
        unbroken(world, outcomes)

    explore(world(), (increment(Rules()), program), check)
    assert ends == {("committed", False), ("gave up", False)}, "it never waits for the increment"


# Mutants: each must be found out


def asks_for_no_parents(destination: Destination, place: Stepped, alive: Callable[[Lease, datetime], bool]) -> object:
    """As if an intent protected only the backup that it is about."""

    def nobody_builds_on_it(lease: Lease, now: datetime) -> bool:
        return alive(lease, now) and lease.parents == ()

    return _sweep(destination, place.clock, nobody_builds_on_it)


def marks_after_intents(place: Stepped) -> str:
    """A sweep that reads the marks last, and somebody else's mark that comes meanwhile: who began to build on the
    backup in between is seen neither as an intent, nor did it see the mark."""
    running = living_intents(place, place.clock(), always)
    mark(place, "shop", FULL, place.clock())
    due = set() if running else set(marks(place))
    _finish(place, due, list(map(remove._outline, committed(place))), place, always)
    return "swept"


def manifests_before_intents(
    destination: Destination, place: Stepped, alive: Callable[[Lease, datetime], bool]
) -> object:
    """An increment that ends in between is seen neither as a manifest nor as an intent."""
    due = set(marks(destination))
    found = list(map(remove._outline, committed(destination)))
    if living_intents(destination, place.clock(), alive):
        due = set()
    return _finish(destination, due, found, place, alive)


def asks_no_manifest(destination: Destination, place: Stepped, alive: Callable[[Lease, datetime], bool]) -> object:
    """As if the catalog always knew who builds on whom."""
    due = set() if living_intents(destination, place.clock(), alive) else set(marks(destination))
    for server, name in due:
        remove._remove(destination, server, name, Locks())
    return GarbageCollection(destination, place.clock, alive).run()


def _finish(
    destination: Destination,
    due: set[Backup],
    found: list[remove._Outline],
    place: Stepped,
    alive: Callable[[Lease, datetime], bool],
) -> Collected:
    for server, name in due - remove._needed(found, due, []):
        remove._remove(destination, server, name, Locks())
    return GarbageCollection(destination, place.clock, alive).run()


@pytest.mark.parametrize(
    ("rules", "program"),
    [
        (Rules(intent_first=False, fenced=False), deletion(real)),
        (Rules(fenced=False), deletion(manifests_before_intents)),
        (Rules(fenced=False), marks_after_intents),
        (Rules(fenced=False), deletion(asks_for_no_parents)),
        (Rules(fenced=False), deletion(asks_no_manifest)),
        (Rules(), deletion(asks_no_manifest)),
        (Rules(fenced=False), deletion(real, never)),
    ],
    ids=[
        "looks at its parent before the intent",
        "manifests before intents",
        "marks after intents",
        "parents are not asked",
        "manifests are not asked",
        "manifests are not asked, though the increment looks twice",
        "no fence",
    ],
)
def test_a_broken_protocol_is_found_out(rules: Rules, program: Program) -> None:
    with pytest.raises(LostError):
        explore(world_with_two_full_backups(), (increment(rules), program), unbroken)

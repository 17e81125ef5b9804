"""Every interleaving of one backup that reuses an object with a deletion and a collection that want it gone.

Both sides run the real code, one destination call at a time. A program is paused by an exception at its next call and
later run again from the start with the answers it had before, so all states can be reached without threads. States
that were seen before are not explored again.

The mutants at the end show that this check notices what it is for: each breaks one rule of the protocol and must fail.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from backupd.model.errors import BackupdError, ObjectMissingError
from backupd.model.manifest import StoredObject, decode_header, encode_header
from backupd.transfer import deletion as remove
from backupd.transfer.collection import GarbageCollection
from backupd.transfer.dedup import confirm, load_known
from backupd.transfer.deletion import mark, sweep
from backupd.transfer.holds_and_locks import Locks
from backupd.transfer.leases import Lease, Owner, intents, pins
from backupd.transfer.records.manifests import committed
from storage import layout, objects
from storage.destination import Capability, Destination, ObjectInfo, Space
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import START, Stock, backup_id, believed, named, sealed

CONTENT = b"the table that did not change"
IDENTITY = named(CONTENT).name[:64]
INTENT = layout.intent_key(backup_id(2))
MANIFEST = layout.manifest_key("shop", backup_id(2))


@pytest.fixture(autouse=True)
def _decoding_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same two manifests are read in every state."""
    monkeypatch.setattr("backupd.transfer.records.manifests.decode_header", functools.cache(decode_header))


@contextlib.contextmanager
def no_lease(_destination: Destination, **_how: object) -> Iterator[SimpleNamespace]:
    yield SimpleNamespace(assert_held=lambda: None)


@pytest.fixture(autouse=True)
def _one_that_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of a sweep is between those who remove: of them there is one here."""
    monkeypatch.setattr(remove, "sweeping", no_lease)


class PausedError(BaseException):
    """Not an Exception, so that no code under test can mistake it for a failure."""


@dataclass(frozen=True)
class Answer:
    """What a call gave: the same again at every later run."""

    question: tuple[object, ...]
    value: Any
    error: Exception | None
    digest: int


Log = tuple[Answer, ...]
Snapshot = tuple[dict[str, Any], int, int]


class World:
    """The destination that both programs share. An hour passes whenever another of them looks at the clock."""

    def __init__(self) -> None:
        self.place = MemoryDestination("a", tree=False, clock=self.now)
        self.hours = 0
        self.looked = 0

    def now(self) -> datetime:
        return START + timedelta(hours=self.hours)

    def clock(self, who: int) -> datetime:
        self.hours += who != self.looked
        self.looked = who
        return self.now()

    def snapshot(self) -> Snapshot:
        return dict(self.place._blobs), self.hours, self.looked

    def reset(self, state: Snapshot) -> None:
        self.place._blobs, self.hours, self.looked = dict(state[0]), state[1], state[2]


class Stepped:
    """A destination that answers from ``log``, then does one new call for real, then pauses."""

    name = "a"
    capabilities = Capability.NONE

    def __init__(self, world: World, log: Log, who: int) -> None:
        self._world = world
        self._who = who
        self._old = list(log)
        self.log = list(log)
        self._stepped = False

    def _call(self, question: tuple[object, ...], act: Callable[[], Any]) -> Any:
        # What neither side ever changes needs no turn of its own.
        free = question[0] == "clock" or str(question[1]).startswith((layout.PINS, layout.QUARANTINE))
        if self._old:
            answer = self._old.pop(0)
            assert answer.question == question, "a program must be deterministic"
        else:
            if self._stepped:
                raise PausedError
            self._stepped = not free
            value, failure = None, None
            try:
                value = act()
            except BackupdError as error:
                failure = error
            answer = Answer(question, value, failure, hash((question, repr(value), repr(failure))))
            self.log.append(answer)
        if answer.error is not None:
            raise answer.error
        return answer.value

    def clock(self) -> datetime:
        moment: datetime = self._call(("clock",), lambda: self._world.clock(self._who))
        return moment

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        content = stream.read()

        info: ObjectInfo = self._call(("put", key, content), lambda: self._world.place.put(key, io.BytesIO(content)))
        return info

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        def act() -> bytes:
            with self._world.place.get(key, offset=offset, length=length) as stream:
                return stream.read()

        return io.BytesIO(self._call(("get", key), act))

    def stat(self, key: str) -> ObjectInfo:
        info: ObjectInfo = self._call(("stat", key), lambda: self._world.place.stat(key))
        return info

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._call(("list", prefix), lambda: tuple(self._world.place.list(prefix))))

    def delete(self, key: str) -> None:
        self._call(("delete", key), lambda: self._world.place.delete(key))

    def space(self) -> Space | None:
        return None

    def is_initialised(self) -> bool:
        return True

    def initialise(self, now: datetime) -> None:
        raise AssertionError

    def leftovers(self) -> Iterator[str]:
        return iter(())

    def clear_leftovers(self) -> int:
        return 0


Program = Callable[[Stepped], str]
State = tuple[Snapshot, tuple[Log, Log], tuple[str, str]]


def key_of(state: State) -> object:
    (blobs, hours, looked), logs, outcomes = state
    return (
        tuple(sorted((key, blob.data, blob.modified_at) for key, blob in blobs.items())),
        hours,
        looked,
        tuple(tuple(answer.digest for answer in log) for log in logs),
        outcomes,
    )


def explore(world: World, programs: tuple[Program, Program], check: Callable[[World, tuple[str, str]], None]) -> int:
    """Calls ``check`` in every state where both programs have ended; the number of states."""
    waiting: list[State] = [(world.snapshot(), ((), ()), ("", ""))]
    seen: set[int] = set()
    while waiting:
        state = waiting.pop()
        before, logs, outcomes = state
        if all(outcomes):
            world.reset(before)
            check(world, outcomes)
        for turn in (0, 1):
            if outcomes[turn]:
                continue
            world.reset(before)
            stepped = Stepped(world, logs[turn], turn)
            outcome = ""
            with contextlib.suppress(PausedError):
                outcome = programs[turn](stepped)
            log = tuple(stepped.log)
            after: State = (
                world.snapshot(),
                (log, logs[1]) if turn == 0 else (logs[0], log),
                (outcome, outcomes[1]) if turn == 0 else (outcomes[0], outcome),
            )
            known = hash(key_of(after))
            if known not in seen:
                seen.add(known)
                waiting.append(after)
    return len(seen)


# The backup


@dataclass(frozen=True)
class Rules:
    """What a backup keeps to. Each False is a mutant."""

    intent_first: bool = True
    confirms: bool = True
    fenced: bool = False


def backup(rules: Rules) -> Program:
    def begin(place: Stepped) -> None:
        now = place.clock()
        place.put(
            INTENT, io.BytesIO(Lease(INTENT, (("shop", backup_id(2)),), Owner("h", "b", "n", 1, 1), now, now).encode())
        )

    def held(place: Stepped) -> bool:
        try:
            place.stat(INTENT)
        except ObjectMissingError:
            return False
        return True

    def run(place: Stepped) -> str:
        if rules.intent_first:
            begin(place)
        item = load_known(place, "shop").get(IDENTITY)
        if not rules.intent_first:
            begin(place)
        if item is None:
            again = b"sealed another time"  # another session key: never the same bytes
            item = objects.named(IDENTITY, again)
            objects.store(place, item, again)
        if (rules.fenced and not held(place)) or (rules.confirms and confirm(place, [item])):
            place.delete(INTENT)
            return "gave up"
        place.put(MANIFEST, io.BytesIO(manifest(item)))
        if rules.fenced and not held(place):
            place.delete(MANIFEST)
            return "gave up"
        place.delete(INTENT)
        return "committed"

    return run


@functools.cache
def manifest(item: StoredObject) -> bytes:
    return encode_header(Stock(MemoryDestination("x")).header(2, (item,)))


# The other side


def always(_lease: Lease, _now: datetime) -> bool:
    return True


def never(_lease: Lease, _now: datetime) -> bool:
    return False


def deletion(
    collector: type[GarbageCollection] = GarbageCollection,
    alive: Callable[[Lease, datetime], bool] = always,
    *,
    rounds: int = 1,
) -> Program:
    """The older backup vanishes at any moment, whatever runs, and what it named is collected."""

    def run(place: Stepped) -> str:
        remove._remove(place, "shop", backup_id(1), Locks())
        for _round in range(rounds):
            collector(place, place.clock, alive).run()
        return "swept"

    return run


def sweeping(place: Stepped) -> str:
    mark(place, "shop", backup_id(1), place.clock())
    sweep(place, clock=place.clock, grace=timedelta(0), sightings=believed, alive=always)
    return "swept"


def world_with_an_older_backup() -> World:
    world = World()
    Stock(world.place).add(1, {"t": CONTENT})
    for side in (layout.body_key, layout.unpack_key, layout.runbook_key):
        world.place.delete(side("shop", backup_id(1)))
    world.hours = 10
    return world


def whole(world: World, outcomes: tuple[str, str]) -> None:
    """A backup that counts itself committed has its object, now and after another collection."""
    names = {found.backup_id for found in committed(world.place)}
    assert (backup_id(2) in names) == (outcomes[0] == "committed")
    for _round in range(2):
        for found in committed(world.place):
            assert not isinstance(found.header, Exception)
            for item in found.header.objects:
                try:
                    objects.fetch(world.place, item)
                except BackupdError as error:
                    raise LostError(str(error)) from error
        GarbageCollection(world.place, lambda: world.now() + timedelta(days=9), never).run()
    if outcomes[0] == "gave up" and backup_id(1) not in names:
        assert list(world.place.list(layout.OBJECTS)) == [], "garbage that no collection finds"


class LostError(Exception):
    """A committed backup without its object."""


# What must hold


@pytest.mark.parametrize(
    ("rules", "rounds"),
    [
        (Rules(), 2),
        (Rules(fenced=True), 1),
        (Rules(confirms=False), 1),
        (Rules(intent_first=False), 1),
    ],
    ids=["as it is, two collections", "as it is, with the fence", "without the last look", "without the order"],
)
def test_no_collection_takes_what_a_running_backup_counts_on(rules: Rules, rounds: int) -> None:
    """The last two: intent before reading and the last look are each enough where every run is known to live."""
    states = explore(world_with_an_older_backup(), (backup(rules), deletion(rounds=rounds)), whole)
    print("states", states)
    assert states > 300


def test_no_sweep_takes_what_a_running_backup_counts_on() -> None:
    states = explore(world_with_an_older_backup(), (backup(Rules()), sweeping), whole)
    print("states", states)
    assert states > 300


def test_a_backup_that_was_taken_for_dead_never_counts_itself_committed_without_its_objects() -> None:
    states = explore(world_with_an_older_backup(), (backup(Rules(fenced=True)), deletion(alive=never)), whole)
    print("states", states)
    assert states > 300


def test_the_object_is_reused_in_some_interleavings_and_collected_in_others() -> None:
    """Otherwise the tests above would show nothing."""
    ends: set[tuple[str, bool, int]] = set()

    def note(world: World, outcomes: tuple[str, str]) -> None:
        kept = named(CONTENT).name in {layout.name_in(info.key) for info in world.place.list(layout.OBJECTS)}
        ends.add((outcomes[0], kept, sum(1 for _info in world.place.list(layout.OBJECTS))))

    explore(world_with_an_older_backup(), (backup(Rules()), deletion()), note)
    assert {("committed", True, 1), ("committed", False, 1), ("gave up", True, 1)} <= ends


# Mutants: each must be found out


class ManifestsBeforeIntents(GarbageCollection):
    """Looks in the naive order: a backup that ends in between is seen neither as manifest nor as intent."""

    def _look(self) -> list[Lease]:
        self._references.load(self.destination, self.steps)
        return intents(self.destination)


class LooksOnce(GarbageCollection):
    """Deletes on what it knew before the tombstones."""

    _first: list[Lease] | None = None

    def _look(self) -> list[Lease]:
        if self._first is None:
            self._first = super()._look()
        return self._first


class IgnoresIntents(GarbageCollection):
    """A tombstone alone, without waiting for those who began before it."""

    def _look(self) -> list[Lease]:
        super()._look()
        return []


class ForgetsTheFence(GarbageCollection):
    """Leaves the intents of the dead where they are."""

    def _look(self) -> list[Lease]:
        self._references.load(self.destination, self.steps)
        return [
            lease for lease in [*intents(self.destination), *pins(self.destination)] if self.alive(lease, self.clock())
        ]


@pytest.mark.parametrize(
    ("rules", "program"),
    [
        (Rules(intent_first=False, confirms=False), deletion()),
        (Rules(), deletion(ManifestsBeforeIntents)),
        (Rules(intent_first=False), deletion(LooksOnce)),
        (Rules(), deletion(IgnoresIntents)),
        (Rules(fenced=False), deletion(alive=never)),
        (Rules(fenced=True), deletion(ForgetsTheFence, alive=never)),
    ],
    ids=[
        "known is read before the intent",
        "manifests before intents",
        "no second look",
        "tombstones without waiting",
        "no fence",
        "the dead keep their intents",
    ],
)
def test_a_broken_protocol_is_found_out(rules: Rules, program: Program) -> None:
    with pytest.raises(LostError):
        explore(world_with_an_older_backup(), (backup(rules), program), whole)


def test_the_stepped_destination_is_one() -> None:
    place: Destination = Stepped(World(), (), 0)
    assert list(place.leftovers()) == []
    assert sealed(b"x") != b"x"

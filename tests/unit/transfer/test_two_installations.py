"""Two installations at one destination: their backups, removals, undeletes and restores in any order.

Each is a thread that runs the real code; only one of them moves at a time, and at each call of the destination a die
says which one goes on. So a seed tells the whole story. After it, whatever counted itself committed, undeleted or
pinned has to be whole.
"""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from backupd.model.errors import BackupdError, BusyError, CancelledError, NotFoundError, RefusedError
from backupd.model.manifest import encode_header
from backupd.transfer import collection as collect_module
from backupd.transfer import deletion as remove_module
from backupd.transfer import leases as sweeping_module
from backupd.transfer.collection import collect
from backupd.transfer.dedup import confirm, load_known
from backupd.transfer.deletion import is_whole, mark, sweep, unmark
from backupd.transfer.fsck import examine
from backupd.transfer.leases import Intent, Pin
from backupd.transfer.records.manifests import backup_ids, read
from backupd.transfer.relay import Relay
from storage import layout, objects
from storage.destination import Destination, ObjectInfo
from storage.throttle_and_breaker import ForwardingDestination
from tests.support.dice import SOAK, rounds, thrown
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import START, Stock, backup_id, named, put, sealed, wanted

GRACE = timedelta(hours=24)
SHARED = {"a": b"never changes", "b": b"hardly ever", "c": b"neither"}


class Turns:
    """Lets one thread move at a time. Threads that are not among the players (heartbeats, pools) move freely."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._lock = threading.Condition()
        self._players: list[int] = []
        self._turn = 0
        self.errors: list[BaseException] = []

    def play(self, *parts: Callable[[], object]) -> None:
        started = threading.Barrier(len(parts) + 1)

        def run(part: Callable[[], object]) -> None:
            with self._lock:
                self._players.append(threading.get_ident())
            started.wait()
            try:
                self.step()
                part()
            except BaseException as error:  # noqa: BLE001  raised by the test itself, below
                self.errors.append(error)
            finally:
                self._leave()

        threads = [threading.Thread(target=run, args=(part,), daemon=True) for part in parts]
        for thread in threads:
            thread.start()
        with self._lock:
            while len(self._players) < len(parts):
                self._lock.wait(0.01)
            self._players.sort(key=[thread.ident for thread in threads].index)
            self._turn = self._dice.choice(self._players)
        started.wait()
        for thread in threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in threads), "nobody moves any more"
        if self.errors:
            raise self.errors[0]

    def step(self) -> None:
        """Give the turn to anybody, and wait for it to come back."""
        me = threading.get_ident()
        with self._lock:
            if me not in self._players:
                return
            if self._turn == me:
                self._turn = self._dice.choice(self._players)
                self._lock.notify_all()
            while self._turn != me:
                self._lock.wait(30)

    def _leave(self) -> None:
        with self._lock:
            self._players.remove(threading.get_ident())
            if self._players:
                self._turn = self._dice.choice(self._players)
            self._lock.notify_all()


class Shared(ForwardingDestination):
    """The destination that all share: each call is a step."""

    def __init__(self, inner: Destination, turns: Turns) -> None:
        super().__init__(inner)
        self._turns = turns

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        self._turns.step()
        return super().put(key, stream)

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        self._turns.step()
        return super().get(key, offset=offset, length=length)

    def stat(self, key: str) -> ObjectInfo:
        self._turns.step()
        return super().stat(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._turns.step()
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self._turns.step()
        super().delete(key)


class Clock:
    """An hour passes now and then."""

    def __init__(self) -> None:
        self.now = START + timedelta(days=3)

    def __call__(self) -> datetime:
        return self.now


class Story:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock = Clock()
        self.bare = MemoryDestination("bucket", tree=False, clock=self.clock)
        self.turns = Turns(self.dice)
        self.place = Shared(self.bare, self.turns)
        self.promised: set[str] = set()
        self.log: list[str] = []

    def backup(self, number: int, server: str = "shop") -> Callable[[], None]:
        """As a real one: intent, what is known, store, confirm, still held, manifest, still held."""
        files = dict(self.dice.sample(sorted(SHARED.items()), 2)) | {"own": b"own %d" % number}
        name = backup_id(number)

        def run() -> None:
            try:
                with Intent([self.place], server, name, clock=self.clock) as intent:
                    known = load_known(self.place, server)
                    items = []
                    for content in files.values():
                        item = known.get(named(content).name[:64])
                        if item is None:
                            # Another session key: never the same bytes, so never the same name.
                            again = sealed(content) + b" by %d" % number
                            item = objects.named(named(content).name[:64], again)
                            objects.store(self.place, item, again)
                        items.append(item)
                    header = Stock(self.bare, server).header(number, tuple(items))
                    for side, content in (
                        (layout.BODY, b"body"),
                        (layout.UNPACK, b"unpack"),
                        (layout.RUNBOOK, b"runbook"),
                    ):
                        put(self.place, layout.backup_folder(server, name) + side, content)
                    if confirm(self.place, items):
                        return self._say(f"backup {number} gives up")
                    intent.assert_held()
                    put(self.place, layout.manifest_key(server, name), encode_header(header))
                    intent.assert_held()
            except CancelledError:
                return self._say(f"backup {number} was taken for dead")
            self.promised.add(name)
            return self._say(f"backup {number} is there")

        return run

    def removal(self, *numbers: int) -> Callable[[], None]:
        def run() -> None:
            for number in numbers:
                try:
                    mark(self.place, "shop", backup_id(number), self.clock.now - 2 * GRACE)
                    self.promised.discard(backup_id(number))
                except NotFoundError:
                    continue
            for _time in range(2):
                done = sweep(self.place, clock=self.clock, grace=GRACE, sightings=wanted)
                self._say(f"sweep: {done.backups} {done.held}")

        return run

    def undelete(self, number: int) -> Callable[[], None]:
        def run() -> None:
            try:
                unmark(self.place, "shop", backup_id(number), now=self.clock(), grace=timedelta.max)
            except (NotFoundError, BusyError) as error:
                return self._say(f"undelete {number}: {error.message}")
            self.promised.add(backup_id(number))
            return self._say(f"undelete {number}")

        return run

    def restore(self, number: int) -> Callable[[], None]:
        name = backup_id(number)

        def run() -> None:
            try:
                with Pin(self.place, backup_id(5000 + number), [("shop", name)], clock=self.clock):
                    found = read(self.place, "shop", name)
                    assert found is not None, "it was pinned"
                    assert not isinstance(found.header, BackupdError)
                    for item in found.header.objects:
                        objects.fetch(self.place, item)
            except (NotFoundError, RefusedError):
                return self._say(f"restore {number}: too late")
            return self._say(f"restore {number} read all")

        return run

    def copy_back(self, number: int, elsewhere: MemoryDestination) -> Callable[[], None]:
        """Bytes that come back under the names that they had: the copy of another destination."""
        name = backup_id(number)
        found = read(elsewhere, "shop", name)
        assert found is not None
        header = found.header
        assert not isinstance(header, BackupdError)

        def run() -> None:
            relay = Relay([elsewhere], self.place, check=lambda: None, moved=lambda _size: None, pauses=())
            try:
                with Intent([self.place], "shop", name, clock=self.clock) as intent:
                    dying = {layout.name_in(info.key) for info in self.place.list(layout.TOMBSTONES)}
                    if any(item.name in dying for item in header.objects):
                        return self._say(f"copy {number}: later")
                    for item in header.objects:
                        relay.bring(layout.object_key(item.name), item)
                    for item in header.side_files:
                        relay.bring(layout.backup_folder("shop", name) + item.name, item)
                    if confirm(self.place, header.objects):
                        return self._say(f"copy {number}: gives up")
                    intent.assert_held()
                    self.place.put(layout.manifest_key("shop", name), io.BytesIO(encode_header(header)))
                    intent.assert_held()
            except CancelledError:
                return self._say(f"copy {number}: taken for dead")
            self.promised.add(name)
            return self._say(f"copy {number} is there")

        return run

    def _say(self, text: str) -> None:
        self.log.append(text)

    def whole(self) -> None:
        self.clock.now += timedelta(hours=1)
        for _time in range(2):
            present = {name for _server, name in backup_ids(self.bare)}
            assert self.promised <= present, self.log
            for server, name in backup_ids(self.bare):
                assert is_whole(self.bare, server, name), (name, self.log)
            assert any(server == "shop" for server, _name in backup_ids(self.bare)), "something is left"
            collect(self.bare, clock=self.clock)
        assert [item for item in examine(self.bare, None, clock=self.clock) if not item.repairable] == []


def told(seed: int) -> list[str]:
    """One story: what is there, and which four things happen at once, is drawn."""
    story = Story(seed)
    dice = story.dice
    elsewhere = MemoryDestination("vault", tree=False, clock=story.clock)
    for number in range(1, 5):
        files = dict(dice.sample(sorted(SHARED.items()), 2)) | {"own": b"own %d" % number}
        for place in (story.bare, elsewhere):
            Stock(place).add(number, files)
        story.promised.add(backup_id(number))
    for number in range(1, dice.randint(2, 4)):
        mark(story.bare, "shop", backup_id(number), story.clock() - 2 * GRACE)
        story.promised.discard(backup_id(number))
    back = dice.randint(1, 3)
    # A removal that died half way: what the manifest named is still there.
    story.bare.delete(layout.manifest_key("shop", backup_id(back)))
    story.bare.delete(layout.mark_key("shop", backup_id(back)))
    story.promised.discard(backup_id(back))
    others = [number for number in range(1, 5) if number != back]
    doomed = dice.sample(others, dice.randint(0, 2))
    kept = [number for number in others if number not in doomed]  # else it may rightly be deleted once more
    parts = [
        story.removal(*doomed),
        story.removal(),
        dice.choice([story.backup(100), story.copy_back(back, elsewhere)]),
        dice.choice(
            [
                story.undelete(dice.choice(kept)),
                story.restore(dice.choice(others)),
                story.backup(101),
                story.copy_back(back, elsewhere),
            ]
        ),
    ]
    story.turns.play(*parts)
    story.whole()
    return story.log


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping_module, "_LOOK", 0.0005)


def test_no_order_of_two_installations_work_loses_what_one_of_them_counts_on() -> None:
    dice = thrown("two installations")
    seen: set[str] = set()
    for _round in range(rounds(60)):
        seed = dice.randrange(2**32)
        try:
            seen |= {line.partition(" ")[0] for line in told(seed)}
        except BaseException:
            print(f"the story of {seed}")
            raise
    assert {"sweep:", "backup", "copy"} <= seen


# Mutants: each must be found out


@contextmanager
def no_lease(_destination: Destination, *, clock: object, alive: object) -> Iterator[object]:
    """Everybody removes whenever they like."""
    yield SimpleNamespace(assert_held=lambda: None)


def breaks(few: int) -> bool:
    dice = thrown("a broken protocol")
    for _round in range(few):
        try:
            told(dice.randrange(2**32))
        except AssertionError:
            return True
    return False


@SOAK
def test_without_waiting_for_sweeps_an_undelete_promises_what_it_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remove_module, "await_sweeps", lambda *_places, **_how: None)
    assert breaks(3000)


@SOAK
def test_without_leases_of_removals_a_slow_one_takes_what_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remove_module, "sweeping", no_lease)
    monkeypatch.setattr(collect_module, "sweeping", no_lease)
    monkeypatch.setattr(remove_module, "await_sweeps", lambda *_places, **_how: None)
    monkeypatch.setattr(Story, "undelete", Story.restore)  # what is found has to be the copy that came back
    assert breaks(20_000)

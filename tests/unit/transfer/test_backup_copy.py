"""Whatever dies or fails in the middle: what is at the target is a whole backup or none, and the next one finishes."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import BinaryIO

import pytest

from backupd.model.errors import BackupdError, CancelledError, DamagedError, DestinationError, RefusedError
from backupd.model.job import silent
from backupd.transfer.collection import collect
from backupd.transfer.copies import Copied, Order, replicate
from backupd.transfer.deletion import is_whole, mark, sweep
from backupd.transfer.fsck import examine
from backupd.transfer.records.manifests import backup_ids
from backupd.transfer.relay import Relay
from storage import layout
from storage.destination import Destination, ObjectInfo
from tests.support.dice import rounds, thrown, with_another_end
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import FakeClock, Stock, backup_id, believed, named

RUN = "20261121T060000Z-00000009"


class Killed(BaseException):
    """The process dies here."""


class Frail(MemoryDestination):
    """Does ``at_operation(number, name, key)`` before each operation; it may raise."""

    def __init__(self, name: str, clock: FakeClock, *, tree: bool = True) -> None:
        super().__init__(name, tree=tree, clock=clock)
        self.count = 0
        self.at_operation: Callable[[int, str, str], None] = lambda _number, _name, _key: None
        self._turns = threading.Lock()

    def _before(self, name: str, key: str) -> None:
        with self._turns:
            self.count += 1
            number = self.count
        self.at_operation(number, name, key)

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        self._before("put", key)
        return super().put(key, stream)

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        self._before("get", key)
        return super().get(key, offset=offset, length=length)

    def stat(self, key: str) -> ObjectInfo:
        self._before("stat", key)
        return super().stat(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._before("list", prefix)
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self._before("delete", key)
        super().delete(key)

    def publish(self, tree: str) -> None:
        self._before("publish", tree)
        super().publish(tree)


def stocked(clock: FakeClock) -> Frail:
    source = Frail("a", clock)
    stock = Stock(source)
    stock.add(1, {"x": b"one", "y": b"two", "z": b"three"})
    stock.add(2, {"x": b"one", "y": b"changed"}, parent=1)
    return source


def order(number: int, *, workers: int = 1, pauses: tuple[float, ...] = ()) -> Order:
    above = (backup_id(1),) if number == 2 else ()
    return Order("shop", backup_id(number), RUN, above, workers=workers, pauses=pauses)


def copy(
    sources: list[Destination],
    target: Destination,
    clock: FakeClock,
    number: int = 1,
    *,
    workers: int = 1,
    pauses: tuple[float, ...] = (),
) -> Copied | None:
    return replicate(
        sources, target, order(number, workers=workers, pauses=pauses), clock=clock, report=silent, check=lambda: None
    )


def content(destination: Frail) -> dict[str, bytes]:
    found = {}
    for prefix in (layout.OBJECTS, layout.SERVERS):
        for info in MemoryDestination.list(destination, prefix):
            with MemoryDestination.get(destination, info.key) as stream:
                found[info.key] = stream.read()
    return found


def only_whole(target: Destination) -> bool:
    return all(is_whole(target, *owner) for owner in backup_ids(target))


def test_killed_before_any_operation_at_the_target_the_next_run_finishes() -> None:
    clock = FakeClock()
    number = 0
    while True:
        number += 1
        source, target = stocked(clock), Frail("b", clock)

        def die(count: int, _name: str, _key: str, at: int = number) -> None:
            if count >= at:
                raise Killed

        target.at_operation = die
        try:
            copy([source], target, clock)
        except Killed:
            pass
        else:
            break
        target.at_operation = lambda _number, _name, _key: None
        assert only_whole(target), number
        if not backup_ids(target):
            copy([source], target, clock)
        copy([source], target, clock, 2)
        assert content(target) == content(source), number
        later = FakeClock(clock() + timedelta(days=30))
        collect(target, clock=later, alive=lambda _lease, _now: False)
        assert content(target) == content(source), number
        assert examine(target, None, clock=later) == [], number
    assert number > 20


def test_a_target_that_fails_for_a_moment_is_asked_again() -> None:
    clock = FakeClock()
    source, target = stocked(clock), Frail("b", clock)
    failed: set[str] = set()

    def fail_once(_count: int, name: str, key: str) -> None:
        if name == "put" and key.startswith(layout.OBJECTS) and key not in failed:
            failed.add(key)
            raise DestinationError("reset by peer")

    target.at_operation = fail_once
    copied = copy([source], target, clock, pauses=(0.0, 0.0))
    assert copied is not None
    assert len(failed) == 3
    assert copied.sent == sum(item.size for item in (*copied.header.objects, *copied.header.side_files))


def test_bytes_that_change_on_their_way_from_one_source_come_from_the_next() -> None:
    clock = FakeClock()
    one, other, target = stocked(clock), stocked(clock), Frail("b", clock)
    spoilt = layout.object_key(named(b"two").name)

    class Lying(Frail):
        def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
            stream = super().get(key, offset=offset, length=length)
            return io.BytesIO(with_another_end(stream.read())) if key == spoilt else stream

    liar = Lying("liar", clock)
    liar._blobs = one._blobs
    copied = copy([liar, other], target, clock, workers=3)
    assert copied is not None
    assert any("liar" in text for text in copied.remarks)
    assert all(content(target)[key] == value for key, value in content(other).items() if key in content(target))
    with pytest.raises(DamagedError, match="no destination has the original"):
        copy([liar], Frail("c", clock), clock)


def test_a_source_that_dies_in_the_middle_is_replaced_by_the_next() -> None:
    clock = FakeClock()
    one, other, target = stocked(clock), stocked(clock), Frail("b", clock)

    def die(count: int, name: str, _key: str) -> None:
        if name == "get" and count > 8:
            raise DestinationError("gone")

    one.at_operation = die
    copied = copy([one, other], target, clock)
    assert copied is not None
    assert is_whole(target, "shop", backup_id(1))


def test_an_increment_does_not_arrive_before_what_it_builds_on() -> None:
    clock = FakeClock()
    source, target = stocked(clock), Frail("b", clock)
    with pytest.raises(RefusedError, match="without its parent backup"):
        copy([source], target, clock, 2)
    assert backup_ids(target) == []


def test_a_stop_leaves_no_backup_and_no_lease() -> None:
    clock = FakeClock()
    source, target = stocked(clock), Frail("b", clock)

    def stop() -> None:
        if target.count > 8:
            raise CancelledError("stopped")

    with pytest.raises(CancelledError):
        replicate([source], target, order(1, workers=3), clock=clock, report=silent, check=stop)
    assert backup_ids(target) == []
    assert [info.key for info in target.list(layout.INTENTS)] == []
    assert [info.key for info in source.list(layout.PINS)] == []


def test_somebody_who_took_us_for_dead_while_we_committed_wins() -> None:
    clock = FakeClock()
    source, target = stocked(clock), Frail("b", clock)

    def clean_up(_count: int, name: str, key: str) -> None:
        if name == "put" and key.endswith(layout.MANIFEST):
            target._blobs.pop(layout.intent_key(backup_id(1)))

    target.at_operation = clean_up
    with pytest.raises(CancelledError, match="removed by another process"):
        copy([source], target, clock)
    assert backup_ids(target) == []


def test_two_installations_copy_remove_and_collect_at_one_place_and_nothing_is_ever_half() -> None:
    dice = thrown("two installations")
    for _ in range(rounds(6)):
        clock = FakeClock()
        source, target = stocked(clock), Frail("b", clock)
        errors: list[BaseException] = []

        def work(
            kind: str,
            source: Frail = source,
            target: Frail = target,
            clock: FakeClock = clock,
            errors: list[BaseException] = errors,
        ) -> None:
            for _ in range(6):
                try:
                    if kind == "copy":
                        copy([source], target, clock, workers=2)
                        copy([source], target, clock, 2)
                    elif kind == "remove":
                        for owner in backup_ids(target):
                            mark(target, *owner, clock())
                        sweep(target, clock=clock, grace=timedelta(0), sightings=believed)
                    else:
                        collect(target, clock=clock)
                except BackupdError:
                    continue
                except BaseException as error:  # noqa: BLE001  the test's own thread raises it
                    errors.append(error)

        def jolt(_count: int, _name: str, _key: str, clock: FakeClock = clock) -> None:
            if dice.random() < 0.05:
                clock.move(minutes=4)

        target.at_operation = jolt
        threads = [threading.Thread(target=work, args=(kind,)) for kind in ("copy", "copy", "remove", "collect")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert only_whole(target)


def test_a_driver_that_closes_what_it_reads_is_no_trouble() -> None:
    clock = FakeClock()
    source = stocked(clock)

    class Closing(Frail):
        def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
            with stream:
                return super().put(key, stream)

    target = Closing("b", clock)
    moved: list[int] = []
    relay = Relay([source], target, check=lambda: None, moved=moved.append, pauses=())
    item = named(b"one")
    relay.send(layout.object_key(item.name), item)
    assert sum(moved) == item.size

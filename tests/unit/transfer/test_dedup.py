"""How a destination's load is measured, and what is taken back; what the fan-out stores is asked by the tests of
packing."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import pytest

from backupd.model.errors import DestinationError
from backupd.transfer.collection import collect
from backupd.transfer.dedup import Fanout, Load, LoadMeter, Placed, confirm, load_known
from backupd.transfer.deletion import mark, sweep, unmark
from backupd.transfer.fsck import examine
from backupd.transfer.records.manifests import backup_ids, committed
from storage import layout, objects
from storage.destination import ObjectInfo
from storage.filesystem import FilesystemDestination
from storage.objects import quarantine, release
from storage.throttle_and_breaker import ForwardingDestination
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import START, FakeClock, Stock, backup_id, believed, named, pool, put, sealed
from tests.support.stores.strict import UndeletableDestination


@pytest.fixture
def place() -> MemoryDestination:
    return MemoryDestination("a")


def identities(*contents: bytes) -> set[str]:
    return {hashlib.sha256(content).hexdigest() for content in contents}


def test_objects_of_the_newest_backups_are_known(place: MemoryDestination) -> None:
    stock = Stock(place)
    for number in range(1, 6):
        stock.add(number, {"t": b"%d" % number, "same": b"same"})
    known = load_known(place, "shop")
    assert set(known) == identities(b"3", b"4", b"5", b"same")
    assert known[hashlib.sha256(b"5").hexdigest()] == named(b"5")
    assert set(load_known(place, "shop", backups=1)) == identities(b"5", b"same")


def test_nothing_is_known_at_an_empty_destination_or_of_another_server(place: MemoryDestination) -> None:
    assert load_known(place, "shop") == {}
    Stock(place, "zoo").add(1, {"t": b"1"})
    Stock(place, "shop2").add(1, {"t": b"1"})
    assert load_known(place, "shop") == {}


def test_an_uncommitted_backup_is_not_known(place: MemoryDestination) -> None:
    Stock(place).add(1, {"t": b"1"}, commit=False)
    assert load_known(place, "shop") == {}


def test_a_marked_backup_is_not_known_until_it_is_undeleted(place: MemoryDestination) -> None:
    stock = Stock(place)
    stock.add(1, {"t": b"1"})
    stock.add(2, {"t": b"2"})
    mark(place, "shop", backup_id(2), START)
    assert set(load_known(place, "shop")) == identities(b"1")
    unmark(place, "shop", backup_id(2), now=START, grace=datetime.resolution)
    assert set(load_known(place, "shop")) == identities(b"1", b"2")


def test_tombstoned_and_quarantined_objects_are_not_known(place: MemoryDestination) -> None:
    Stock(place).add(1, {"a": b"1", "b": b"2", "c": b"3"})
    put(place, layout.tombstone_key(named(b"1").name), b"{}")
    quarantine(place, named(b"2").name, "rotten", datetime.now(UTC))
    assert set(load_known(place, "shop")) == identities(b"3")
    release(place, named(b"2").name)
    assert set(load_known(place, "shop")) == identities(b"2", b"3")


def test_a_damaged_manifest_is_passed_over(place: MemoryDestination) -> None:
    stock = Stock(place)
    stock.add(1, {"t": b"1"})
    stock.add(2, {"t": b"2"})
    put(place, layout.manifest_key("shop", backup_id(2)), b"{}")
    assert set(load_known(place, "shop", backups=1)) == identities(b"1")


def test_confirm_names_what_is_gone_altered_or_on_its_way_out(place: MemoryDestination) -> None:
    contents = [b"good", b"gone", b"cut", b"tomb", b"rotten"]
    Stock(place).add(1, {str(index): content for index, content in enumerate(contents)})
    items = [named(content) for content in contents]
    assert confirm(place, items) == []
    place.delete(layout.object_key(items[1].name))
    put(place, layout.object_key(items[2].name), b"c")
    put(place, layout.tombstone_key(items[3].name), b"{}")
    quarantine(place, items[4].name, "rotten", datetime.now(UTC))
    assert confirm(place, items) == [item.name for item in items[1:]]
    assert confirm(place, []) == []


def test_the_inventory_lists_manifests_and_says_which_are_damaged(place: MemoryDestination) -> None:
    stock = Stock(place)
    header = stock.add(1, {"t": b"1"})
    stock.add(2, {"t": b"2"}, commit=False)
    stock.add(3, {"t": b"3"})
    stock.add(4, {"t": b"4"})
    with place.get(layout.manifest_key("shop", backup_id(1))) as stream:
        put(place, layout.manifest_key("shop", backup_id(3)), stream.read())
    put(place, layout.manifest_key("shop", backup_id(4)), b"\x00")
    found = list(committed(place))
    assert backup_ids(place) == [("shop", backup_id(1)), ("shop", backup_id(3)), ("shop", backup_id(4))]
    assert found[0] == ("shop", backup_id(1), header)
    assert "belongs to" in str(found[1].header)
    assert layout.manifest_key("shop", backup_id(4)) in str(found[2].header)


def test_a_manifest_with_a_hostile_object_name_is_damaged(place: MemoryDestination) -> None:
    from backupd.model.manifest import StoredObject, encode_header

    header = Stock(place).header(1, (StoredObject("../../etc/shadow", 1, "0" * 64),))
    put(place, layout.manifest_key("shop", backup_id(1)), encode_header(header))
    [found] = committed(place)
    assert "../../etc/shadow" in str(found.header)


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


# Real inodes


def disk_usage(root: Path) -> int:
    seen: dict[int, int] = {}
    for path in root.rglob("*"):
        status = path.lstat()
        if path.is_file():
            seen[status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def restored(place: FilesystemDestination, number: int) -> dict[str, bytes]:
    """What somebody with cp alone gets out of a backup's tree."""
    top = place.root / layout.tree_name("shop", backup_id(number)) / "files"
    return {
        str(path.relative_to(top)).removesuffix(layout.SEALED): path.read_bytes()
        for path in top.rglob("*")
        if path.is_file()
    }


def test_unchanged_tables_share_inodes_and_deleting_the_older_backup_leaves_the_newer(tmp_path: Path) -> None:
    clock = FakeClock()
    place = FilesystemDestination("local", tmp_path / "b")
    place.initialise(clock())
    size = 64 * 1024
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    first = {f"shop/t{index:03d}.ibd": dice.randbytes(size) for index in range(100)}
    second = first | {f"shop/t{index:03d}.ibd": dice.randbytes(size) for index in (3, 50, 99)}
    stock = Stock(place)
    stock.add(1, first)
    before = disk_usage(place.root)
    stock.add(2, second)
    grown = disk_usage(place.root) - before
    assert 3 * size <= grown < 4 * size

    def inodes(number: int) -> dict[str, tuple[int, int]]:
        return dict(place.tree_files(layout.tree_name("shop", backup_id(number))))

    older, newer = inodes(1), inodes(2)
    assert sum(older[path] == newer[path] for path in older) == 97
    shared = place.root / layout.tree_name("shop", backup_id(2)) / "files" / "shop" / "t000.ibd.zst.gpg"
    assert shared.stat().st_nlink == 3, "the pool and two trees"

    mark(place, "shop", backup_id(1), clock())
    clock.move(days=2)
    done = sweep(place, clock=clock, grace=timedelta(hours=24), sightings=believed)
    assert (done.backups, done.objects) == ([backup_id(1)], 3)
    assert restored(place, 2) == {path: sealed(content) for path, content in second.items()}
    assert shared.stat().st_nlink == 2
    assert disk_usage(place.root) < before + size
    assert examine(place, None, clock=clock, read_body=stock.body) == []
    for content in second.values():
        assert objects.fetch(place, named(content)) == sealed(content)
    assert not (place.root / layout.tree_name("shop", backup_id(1))).exists()
    stock.add(3, {"t": b"3"})
    mark(place, "shop", backup_id(2), clock())
    clock.move(days=2)
    sweep(place, clock=clock, grace=timedelta(hours=24), sightings=believed)
    assert pool(place) == {named(b"3").name}


def test_a_backup_in_work_has_its_links_before_it_ends(tmp_path: Path) -> None:
    place = FilesystemDestination("local", tmp_path / "b")
    place.initialise(START)
    stock = Stock(place)
    stock.add(1, {"t": b"1"})
    stock.add(2, {"t": b"1"}, commit=False)
    partial = place.root / (layout.tree_name("shop", backup_id(2)) + ".partial") / "t.zst.gpg"
    assert partial.stat().st_ino == place.identity(layout.object_key(named(b"1").name))[1]
    assert {path.name for path in (place.root / "servers" / "shop").iterdir()} == {
        backup_id(1),
        backup_id(2),
        backup_id(2) + ".partial",
    }

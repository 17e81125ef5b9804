from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.model.errors import DamagedError
from backupd.model.manifest import Body, Header
from backupd.transfer.deletion import mark
from backupd.transfer.fsck import Finding, Invariant, examine, repair
from backupd.transfer.leases import Intent, Lease, Owner, Pin
from backupd.transfer.records.manifests import backup_ids
from storage import layout, objects
from storage.destination import TreeDestination, as_tree
from storage.filesystem import FilesystemDestination
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import START, FakeClock, Stock, backup_id, everything, named, put, sealed

FIRST, SECOND = backup_id(1), backup_id(2)
CATALOG = [("shop", FIRST), ("shop", SECOND)]
FILES = {"shop/a.ibd": b"a", "shop/b.ibd": b"b", "ibdata1": b"system"}


class House:
    """Two good backups at one destination, and the catalog that knows them."""

    def __init__(self, place: MemoryDestination | FilesystemDestination, clock: FakeClock) -> None:
        self.place = place
        self.clock = clock
        self.stock = Stock(place)
        self.header = self.stock.add(1, FILES)
        self.stock.add(2, FILES | {"shop/b.ibd": b"b changed"})
        found = as_tree(place)
        assert found is not None
        self.tree: TreeDestination = found
        clock.move(days=1)

    def examine(self, *, key: bool = False) -> list[Finding]:
        return examine(self.place, CATALOG, clock=self.clock, read_body=self.stock.body if key else None)

    def broken(self, *, key: bool = False) -> list[tuple[str, str, bool]]:
        return [(str(item.invariant), item.subject, item.repairable) for item in self.examine(key=key)]

    def repair(self, *, key: bool = False) -> list[Finding]:
        """What is left after a repair, which must never take a committed backup."""
        before = set(backup_ids(self.place))
        done = repair(self.place, CATALOG, clock=self.clock, read_body=self.stock.body if key else None)
        assert set(backup_ids(self.place)) == before
        assert list(done.left) == self.examine(key=key)
        return list(done.left)


@pytest.fixture(params=["memory", "filesystem"])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> House:
    clock = FakeClock()
    if request.param == "memory":
        return House(MemoryDestination("a", clock=clock), clock)
    place = FilesystemDestination("a", tmp_path / "b")
    place.initialise(START)
    return House(place, clock)


def dead(key: str, backups: tuple[tuple[str, str], ...]) -> bytes:
    owner = dataclasses.replace(Owner.current(), pid=2**22 + 5)
    return Lease(key, backups, owner, START, START).encode()


def test_good_backups_break_nothing(house: House) -> None:
    assert house.examine() == []
    assert house.examine(key=True) == []
    before = everything(house.place)
    assert house.repair(key=True) == []
    assert everything(house.place) == before


def test_an_empty_destination_breaks_nothing() -> None:
    assert examine(MemoryDestination("a"), [], clock=FakeClock()) == []


# Each invariant, broken on purpose


def test_manifest_intact(house: House) -> None:
    key = layout.manifest_key("shop", FIRST)
    with house.place.get(key) as stream:
        good = stream.read()
    put(house.place, key, good.replace(b'"size":8', b'"size":9'))
    [found] = [item for item in house.examine() if item.invariant is Invariant.MANIFEST_INTACT]
    assert (found.subject, found.repairable) == (FIRST, False)
    assert key in found.message
    house.repair()
    with house.place.get(key) as stream:
        assert stream.read() != good
    put(house.place, key, good)
    assert house.examine(key=True) == [], "a repair beside a damaged manifest takes none of its objects"


@pytest.mark.parametrize("key", [layout.body_key, layout.unpack_key, layout.runbook_key])
def test_body_present(house: House, key: Callable[[str, str], str]) -> None:
    put(house.place, key("shop", FIRST), b"shorter or longer than it was")
    assert house.broken() == [("body-present", key("shop", FIRST), False)]
    house.place.delete(key("shop", FIRST))
    assert house.broken() == [("body-present", key("shop", FIRST), False)]
    assert [item.invariant for item in house.repair()] == [Invariant.BODY_PRESENT]


def test_objects_present(house: House) -> None:
    shared, own = named(b"a").name, named(b"b").name
    house.place.delete(layout.object_key(own))
    put(house.place, layout.object_key(shared), b"cut")
    found = [item for item in house.examine() if item.invariant is Invariant.OBJECTS_PRESENT]
    assert sorted((item.subject, item.message.split()[3]) for item in found) == sorted(
        [(own, FIRST), (shared, FIRST), (shared, SECOND)]
    )
    assert not any(item.repairable for item in found)
    assert "missing" in next(item.message for item in found if item.subject == own)
    assert "3 bytes" in next(item.message for item in found if item.subject == shared)


def test_what_an_interrupted_removal_has_left_is_called_that(house: House) -> None:
    mark(house.place, "shop", FIRST, house.clock())
    for name in (FIRST, SECOND):
        house.place.delete(layout.manifest_key("shop", name))
    found = [one for one in examine(house.place, [], clock=house.clock) if one.invariant is Invariant.NO_PARTIAL_TREE]
    said = {FIRST in one.subject: one.message for one in found}
    assert said == {
        True: "belongs to a backup whose removal was interrupted",
        False: "belongs to a backup that was never committed",
    }


def test_no_orphan_object(house: House) -> None:
    item = named(b"nobody's")
    objects.store(house.place, item, sealed(b"nobody's"))
    assert house.broken() == [("no-orphan-object", item.name, True)]
    assert house.repair() == []
    assert item.name not in str(everything(house.place))


@pytest.mark.parametrize(
    "key",
    [
        "objects/ab/stray.txt",
        f"objects/00/{named(b'a').name}.json",
        "tombstones/stray.txt",
        f"tombstones/{named(b'a').name}",
    ],
)
def test_a_file_of_strangers_is_named_by_its_path_and_left_alone(house: House, key: str) -> None:
    if isinstance(house.place, FilesystemDestination):
        (house.place.root / key).parent.mkdir(parents=True, exist_ok=True)
        (house.place.root / key).touch()
    else:
        put(house.place, key, b"")
    assert house.broken() == [("no-orphan-object", key, False)]
    objects.store(house.place, named(b"nobody's"), sealed(b"nobody's"))
    [left] = house.repair()
    assert (left.subject, left.message) == (key, "not a file of backupd; remove it by hand")
    assert key in everything(house.place)


def test_no_orphan_object_knows_tombstones_and_marks_of_nothing(house: House) -> None:
    put(house.place, layout.tombstone_key(named(b"gone").name), b"{}")
    put(house.place, layout.mark_key("shop", backup_id(7)), b"{}")
    assert house.broken() == [("no-orphan-object", named(b"gone").name, True), ("no-orphan-object", backup_id(7), True)]
    assert house.repair() == []


def test_no_stale_intent(house: House) -> None:
    key = layout.intent_key(backup_id(3))
    put(house.place, key, dead(key, (("shop", backup_id(3)),)))
    assert house.broken() == [("no-stale-intent", backup_id(3), True)]
    assert house.repair() == []
    assert key not in everything(house.place)


def test_no_stale_pin(house: House) -> None:
    key = layout.pin_key(backup_id(9))
    put(house.place, key, dead(key, (("shop", FIRST),)))
    assert house.broken() == [("no-stale-pin", backup_id(9), True)]
    assert house.repair() == []
    assert key not in everything(house.place)


def test_no_temporary_file(house: House) -> None:
    if isinstance(house.place, MemoryDestination):
        pytest.skip("memory has no temporary files")
    (house.place.root / ".tmp" / "0123").write_bytes(b"half")
    assert house.broken() == [("no-temporary-file", ".tmp/0123", True)]
    assert house.repair() == []
    assert list((house.place.root / ".tmp").iterdir()) == []


def test_no_partial_tree(house: House) -> None:
    house.stock.add(3, {"t": b"a"}, commit=False)
    name = layout.tree_name("shop", backup_id(3))
    assert set(house.broken()) == {
        ("no-partial-tree", name, True),
        *(("no-partial-tree", f"{name}/{side}", True) for side in (layout.BODY, layout.UNPACK, layout.RUNBOOK)),
    }
    assert house.repair() == []
    assert not any(tree == name for tree, _published in house.tree.trees())


def test_no_partial_tree_knows_published_trees_without_a_manifest(house: House) -> None:
    house.stock.add(3, {"t": b"a"})
    house.place.delete(layout.manifest_key("shop", backup_id(3)))
    name = layout.tree_name("shop", backup_id(3))
    assert ("no-partial-tree", name, True) in house.broken()
    assert house.repair() == []


def test_catalog_has_backup(house: House) -> None:
    house.stock.add(3, FILES)
    assert house.broken() == [("catalog-has-backup", backup_id(3), True)]
    assert examine(house.place, None, clock=house.clock) == []
    mark(house.place, "shop", backup_id(3), START)
    assert house.broken() == [], "on its way out it need not be in the catalog"


def test_backup_has_manifest(house: House) -> None:
    house.place.delete(layout.manifest_key("shop", SECOND))
    assert ("backup-has-manifest", SECOND, False) in house.broken()


# Trees


def damage_tree(house: House, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
    """Show the first backup's tree anew, as ``change`` wants it."""
    for path, content in change(dict(FILES)).items():
        item = named(content)
        house.tree.link(layout.object_key(item.name), layout.tree_name("shop", FIRST), layout.tree_path(path))
    house.tree.publish(layout.tree_name("shop", FIRST))


def without_b(files: dict[str, bytes]) -> dict[str, bytes]:
    del files["shop/b.ibd"]
    return files


def with_a_stranger(files: dict[str, bytes]) -> dict[str, bytes]:
    return files | {"shop/c.ibd": b"b changed"}


def with_the_wrong_b(files: dict[str, bytes]) -> dict[str, bytes]:
    return files | {"shop/b.ibd": b"b changed"}


@pytest.mark.parametrize("change", [without_b, with_a_stranger, with_the_wrong_b])
def test_tree_matches_manifest(house: House, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> None:
    damage_tree(house, change)
    assert house.broken() == [("tree-matches-manifest", FIRST, False)]
    assert house.broken(key=True) == [("tree-matches-manifest", FIRST, True)]
    assert [item.invariant for item in house.repair()] == [Invariant.TREE_MATCHES_MANIFEST]
    assert house.repair(key=True) == []
    assert dict(house.tree.tree_files(layout.tree_name("shop", FIRST))) == {
        layout.tree_path(path): house.tree.identity(layout.object_key(named(content).name))
        for path, content in FILES.items()
    }


def test_swapped_paths_need_the_key_to_be_seen(house: House) -> None:
    damage_tree(house, lambda files: files | {"shop/a.ibd": b"b", "shop/b.ibd": b"a"})
    assert house.broken() == []
    assert house.broken(key=True) == [("tree-matches-manifest", FIRST, True)]
    assert house.repair(key=True) == []


def test_a_tree_that_is_gone_is_made_again(house: House) -> None:
    house.tree.remove_tree(layout.tree_name("shop", FIRST))
    assert house.broken() == [("tree-matches-manifest", FIRST, False)]
    assert house.repair(key=True) == []


def test_a_fresh_copy_in_the_pool_is_no_damage(house: House) -> None:
    """As after the file system's limit of links was met."""
    put(house.place, layout.object_key(named(b"a").name), sealed(b"a"))
    assert house.broken() == []
    assert house.broken(key=True) == []


def test_a_destination_without_trees_needs_none() -> None:
    place = MemoryDestination("a", tree=False)
    Stock(place).add(1, FILES)
    assert examine(place, None, clock=FakeClock()) == []


def test_a_body_that_cannot_be_opened_is_named(house: House) -> None:
    def read_body(header: Header) -> Body:
        if header.backup_id == FIRST:
            raise DamagedError("body damaged", ["the very place"])
        return house.stock.body(header)

    found = examine(house.place, CATALOG, clock=house.clock, read_body=read_body)
    assert [(item.invariant, item.message) for item in found] == [(Invariant.BODY_PRESENT, "the very place")]


# Living runs


def test_a_living_backup_and_restore_are_left_alone(house: House) -> None:
    if isinstance(house.place, FilesystemDestination):
        house.clock.now = datetime.now(UTC)  # the file system has a clock of its own
    with (
        Intent([house.place], "shop", backup_id(3), clock=house.clock),
        Pin(house.place, backup_id(9), [("shop", FIRST)], clock=house.clock),
    ):
        if isinstance(house.place, MemoryDestination):
            house.clock.move(minutes=30)
        house.stock.add(3, {"t": b"in work"}, commit=False)
        before = everything(house.place)
        assert house.examine() == []
        assert house.repair() == []
        assert everything(house.place) == before
        assert (layout.tree_name("shop", backup_id(3)), False) in set(house.tree.trees())


def test_everything_at_once_is_named_and_mended_as_far_as_it_goes(house: House) -> None:
    objects.store(house.place, named(b"x"), sealed(b"x"))
    house.stock.add(3, {"t": b"a"}, commit=False)
    key = layout.intent_key(backup_id(3))
    put(house.place, key, dead(key, (("shop", backup_id(3)),)))
    house.tree.remove_tree(layout.tree_name("shop", SECOND))
    house.place.delete(layout.runbook_key("shop", FIRST))
    done = repair(house.place, CATALOG, clock=house.clock, read_body=house.stock.body)
    assert {str(item.invariant) for item in done.mended} == {
        "no-orphan-object",
        "no-partial-tree",
        "no-stale-intent",
        "tree-matches-manifest",
    }
    assert [(str(item.invariant), item.subject) for item in done.left] == [
        ("body-present", layout.runbook_key("shop", FIRST))
    ]


def test_an_increment_without_its_parent_is_named_and_one_whose_parent_is_marked_too(house: House) -> None:
    third = house.stock.add(3, FILES, parent=2).backup_id
    house.stock.add(4, FILES, parent=3)
    catalog = [*CATALOG, ("shop", third), ("shop", backup_id(4))]

    def found() -> list[tuple[str, str]]:
        return [(str(item.invariant), item.subject) for item in examine(house.place, catalog, clock=house.clock)]

    assert found() == []
    mark(house.place, "shop", third, START)
    assert found() == [("parent-present", backup_id(4))]
    mark(house.place, "shop", backup_id(4), START)
    assert found() == []
    house.place.delete(layout.manifest_key("shop", SECOND))
    [told] = [
        item for item in examine(house.place, catalog, clock=house.clock) if item.invariant is Invariant.PARENT_PRESENT
    ]
    assert (told.subject, told.repairable) == (third, False)
    assert f"an increment on {SECOND}, which is not here" in told.message

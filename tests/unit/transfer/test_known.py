from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import pytest

from backupd.transfer.dedup import confirm, load_known
from backupd.transfer.deletion import mark, unmark
from backupd.transfer.records.manifests import backup_ids, committed
from storage import layout
from storage.memory import MemoryDestination
from storage.objects import quarantine, release
from tests.support.stores.stock import START, Stock, backup_id, named, put


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

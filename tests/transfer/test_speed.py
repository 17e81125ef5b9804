"""Seconds, not minutes, over a hundred thousand objects. Bounds are several times what an idle machine takes."""

from __future__ import annotations

import hashlib
import os
import time

import pytest

from backupd.model.manifest import StoredObject, encode_header
from backupd.transfer.collect import collect
from backupd.transfer.fsck import examine
from backupd.transfer.inventory import committed
from backupd.transfer.known import confirm, load_known
from backupd.transfer.lease import utc_now
from storage import layout
from storage.filesystem import FilesystemDestination
from storage.folder import FILE_MODE
from tests.transfer.stock import START, Stock, backup_id, put

COUNT = 100_000


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[FilesystemDestination, tuple[StoredObject, ...]]:
    """One backup of 100,000 objects. Written without the destination, which would sync each of them."""
    place = FilesystemDestination("big", tmp_path_factory.mktemp("big"))
    place.initialise(START)
    items: list[StoredObject] = []
    tree = layout.tree_name("shop", backup_id(1))
    for index in range(COUNT):
        digest = hashlib.sha256(b"%d" % index).hexdigest()
        item = StoredObject(layout.object_name(digest, digest), 1, digest)
        items.append(item)
        path = place.root / layout.object_key(item.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, FILE_MODE)
        os.write(descriptor, b"x")
        os.close(descriptor)
        place.link(layout.object_key(item.name), tree, f"shop/{index % 100}/{index}")
    place.publish(tree)
    stock = Stock(place)
    header = stock.header(1, tuple(items))
    for side, content in ((layout.body_key, b"body"), (layout.unpack_key, b"unpack"), (layout.runbook_key, b"runbook")):
        put(place, side("shop", backup_id(1)), content)
    put(place, layout.manifest_key("shop", backup_id(1)), encode_header(header))
    return place, tuple(items)


def timed(what: str, started: float, most: float) -> None:
    seconds = time.monotonic() - started
    print(f"{what}: {seconds:.2f} s")
    assert seconds < most, f"{what} took {seconds:.1f} s"


def test_looking_over_a_hundred_thousand_objects_takes_seconds(
        big: tuple[FilesystemDestination, tuple[StoredObject, ...]]) -> None:
    place, items = big
    started = time.monotonic()
    assert sum(1 for _info in place.list(layout.OBJECTS)) == COUNT
    timed("list", started, 10)
    started = time.monotonic()
    assert len(load_known(place, "shop")) == COUNT
    timed("known", started, 20)
    started = time.monotonic()
    assert confirm(place, items) == []
    timed("confirm", started, 20)
    started = time.monotonic()
    assert len(list(committed(place))) == 1
    timed("inventory", started, 20)
    started = time.monotonic()
    assert examine(place, None, clock=utc_now) == []
    timed("fsck", started, 40)
    started = time.monotonic()
    assert collect(place, clock=utc_now).objects == 0
    timed("collect", started, 20)

"""Looking over one destination with very many objects: how long each look takes, as a ratio to listing the pool.

Part of ``make bench``. A backup begins with known, ends with confirm; fsck and collect are the nightly work.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from backupd.model.manifest import StoredObject, encode_header
from backupd.process.run_context import utc_now
from backupd.transfer.collection import collect
from backupd.transfer.dedup import confirm, load_known
from backupd.transfer.fsck import examine
from backupd.transfer.records.manifests import committed
from storage import layout
from storage.filesystem import FilesystemDestination
from storage.folder import FILE_MODE
from tests.support.stores.folders import make_short_directory
from tests.support.stores.stock import START, Stock, backup_id, put


def repository(root: Path, count: int) -> tuple[FilesystemDestination, tuple[StoredObject, ...]]:
    """One backup of ``count`` objects. Written without the destination, which would sync each of them."""
    place = FilesystemDestination("big", root)
    place.initialise(START)
    items: list[StoredObject] = []
    tree = layout.tree_name("shop", backup_id(1))
    for index in range(count):
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
    header = Stock(place).header(1, tuple(items))
    for side, content in ((layout.body_key, b"body"), (layout.unpack_key, b"unpack"), (layout.runbook_key, b"runbook")):
        put(place, side("shop", backup_id(1)), content)
    put(place, layout.manifest_key("shop", backup_id(1)), encode_header(header))
    return place, tuple(items)


def main(count: int = 100_000) -> str:
    base = make_short_directory("bench-")
    try:
        place, items = repository(base / "repository", count)
        looks: dict[str, Callable[[], object]] = {
            "list the pool": lambda: sum(1 for _info in place.list(layout.OBJECTS)),
            "known": lambda: len(load_known(place, "shop")),
            "confirm": lambda: len(confirm(place, items)),
            "inventory": lambda: len(list(committed(place))),
            "fsck": lambda: len(examine(place, None, clock=utc_now)),
            "collect": lambda: collect(place, clock=utc_now).objects,
        }
        seconds: dict[str, float] = {}
        for name, look in looks.items():
            started = time.perf_counter()
            look()
            seconds[name] = time.perf_counter() - started
    finally:
        shutil.rmtree(base, ignore_errors=True)
    lines = [f"| look over {count:,} objects | seconds | ratio to listing |", "|---|---|---|"]
    lines += [f"| {name} | {value:.1f} | {value / seconds['list the pool']:.1f} |" for name, value in seconds.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(main())

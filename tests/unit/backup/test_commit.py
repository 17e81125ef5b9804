"""What a backup reuses and builds on is locked as long as what it stores itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import BinaryIO

import pytest

from backupd.backup.commit import BackupSpec, Captured, Documents, making
from backupd.engine.sql.client import Connection
from backupd.model.backup_record import BackupKind
from backupd.model.errors import DestinationError, RefusedError
from backupd.model.server_facts import Position, Receipts, Tool, Version
from backupd.transfer.parts import Packer
from storage import layout
from storage.destination import Destination, ObjectInfo
from tests.support.keys import Keys
from tests.support.stores.locked import LockedPlace
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import FakeClock, Stock, backup_id, facts

VERSION = Version(10, 11, 6)


def take(
    place: Destination,
    keys: Keys,
    clock: FakeClock,
    number: int,
    files: dict[str, bytes],
    parent: int | None = None,
    fence: Callable[[], None] = lambda: None,
) -> None:
    info = facts(backup_id(1), Stock(MemoryDestination("elsewhere")).header(1, ())).server
    captured = Captured(
        BackupKind.PHYSICAL_FULL,
        Tool("t", "/t", VERSION, "10.11.6"),
        Receipts("full-backuped", 0, 1, 1, Position(), "10.11.6", "10.11.6"),
    )
    spec = BackupSpec(
        backup_id=backup_id(number),
        server="shop",
        connection=Connection(socket="/nowhere", user="nobody"),
        info=info,
        destinations=(place,),
        recipients=(keys.fingerprint,),
        gnupg_home=keys.public_home,
        identity_key=b"k" * 32,
        started_at=clock(),
        documents=lambda _body, _header: Documents(b"run", b"unpack"),
    )
    parents = () if parent is None else (backup_id(parent),)
    with making(spec, parents=parents, clock=clock) as made, Packer(made.fanout, workers=1) as packer:
        for path, content in files.items():
            packer.data(path, 0, memoryview(content))
            packer.end(path)
        made.commit(captured, packer.finish(), fence)


def test_a_backup_lengthens_the_locks_of_all_that_it_counts_on(keys: Keys) -> None:
    clock = FakeClock()
    place = LockedPlace("away", clock)
    large = hashlib.shake_128(b"large").digest(40_000)
    take(place, keys, clock, 1, {"shop/base.ibd": large[::-1]})
    clock.move(days=1)
    take(place, keys, clock, 2, {"shop/same.ibd": large})
    clock.move(days=9)
    begun = clock()
    take(place, keys, clock, 3, {"shop/same.ibd": large, "shop/new.ibd": large[:20_000]}, parent=1)
    assert {layout.backup_of(key) for key in place.sooner_than(begun)} == {("shop", backup_id(2))}


def stored(place: Destination) -> list[str]:
    prefixes = (layout.OBJECTS, layout.SERVERS, layout.INTENTS)
    return sorted(info.key for prefix in prefixes for info in place.list(prefix))


def test_a_job_that_somebody_else_has_taken_commits_nothing_and_leaves_nothing(keys: Keys) -> None:
    place = MemoryDestination("local")
    place.initialise(FakeClock()())
    before = stored(place)

    def taken() -> None:
        assert any(key.startswith(layout.OBJECTS) for key in stored(place))
        raise RefusedError("the job is somebody else's by now")

    with pytest.raises(RefusedError, match="somebody else's"):
        take(place, keys, FakeClock(), 1, {"shop/a.ibd": b"a" * 20_000}, fence=taken)
    assert stored(place) == before


def test_an_object_that_vanished_before_the_commit_keeps_it_from_being_committed(keys: Keys) -> None:
    clock = FakeClock()
    place = Forgetful("local")
    place.initialise(clock())
    take(place, keys, clock, 1, {"shop/a.ibd": b"a" * 20_000})
    place.loses = layout.UNPACK
    with pytest.raises(DestinationError, match="1 objects vanished from destination local while the backup ran"):
        take(place, keys, clock, 2, {"shop/a.ibd": b"a" * 20_000})
    assert [layout.backup_of(key) for key in stored(place) if key.endswith(layout.MANIFEST)] == [("shop", backup_id(1))]


class Forgetful(MemoryDestination):
    """Loses an object as soon as a key that ends with ``loses`` is put."""

    loses = "nothing"

    def put(self, key: str, stream: BinaryIO) -> ObjectInfo:
        if key.endswith(self.loses):
            self.delete(next(info.key for info in list(self.list(layout.OBJECTS))))
        return super().put(key, stream)

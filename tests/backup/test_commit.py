"""What a backup reuses and builds on is locked as long as what it stores itself."""

from __future__ import annotations

import hashlib

from backupd.backup.commit import BackupSpec, Captured, Documents, making
from backupd.engine.client import Connection
from backupd.model.backup import BackupKind
from backupd.model.server import Position, Receipts, Tool, Version
from backupd.transfer.pack import Packer
from storage import layout
from tests.support.keys import Keys
from tests.support.lockedplace import LockedPlace
from tests.transfer.stock import FakeClock, Stock, backup_id, facts

VERSION = Version(10, 11, 6)


def test_a_backup_lengthens_the_locks_of_all_that_it_counts_on(keys: Keys) -> None:
    clock = FakeClock()
    place = LockedPlace("away", clock)
    info = facts(backup_id(1), Stock(place).header(1, ())).server
    captured = Captured(BackupKind.PHYSICAL_FULL, Tool("t", "/t", VERSION, "10.11.6"),
                        Receipts("full-backuped", 0, 1, 1, Position(), "10.11.6", "10.11.6"))

    def take(number: int, files: dict[str, bytes], parent: int | None = None) -> None:
        spec = BackupSpec(
            backup_id=backup_id(number), server="shop", connection=Connection(socket="/nowhere", user="nobody"),
            info=info, destinations=(place,), recipients=(keys.fingerprint,), gnupg_home=keys.public_home,
            identity_key=b"k" * 32, started_at=clock(), documents=lambda _body, _header: Documents(b"run", b"unpack"))
        parents = () if parent is None else (backup_id(parent),)
        with making(spec, parents=parents, clock=clock) as made, Packer(made.fanout, workers=1) as packer:
            for path, content in files.items():
                packer.data(path, 0, memoryview(content))
                packer.end(path)
            made.commit(captured, packer.finish(), lambda: None)

    large = hashlib.shake_128(b"large").digest(40_000)
    take(1, {"shop/base.ibd": large[::-1]})
    clock.move(days=1)
    take(2, {"shop/same.ibd": large})
    clock.move(days=9)
    begun = clock()
    take(3, {"shop/same.ibd": large, "shop/new.ibd": large[:20_000]}, parent=1)
    assert {layout.backup_of(key) for key in place.sooner_than(begun)} == {("shop", backup_id(2))}

"""Holds, and the states of copies, on both databases."""

from __future__ import annotations

import pytest

from backupd.catalog.session import Catalog
from backupd.model.backup_record import BackupState, Copy, Hold, HoldKind
from backupd.model.errors import NotFoundError
from tests.support.catalog import samples


def test_a_hold_comes_back_as_it_was_set_and_a_pause_stands_beside_it(catalog: Catalog) -> None:
    held = catalog.holds.set("shop", HoldKind.HOLD, "audit ☃", "anna", samples.NOON)
    paused = catalog.holds.set("*", HoldKind.PAUSE, "upgrade", "ben", samples.NOON)
    assert held == Hold("shop", HoldKind.HOLD, "audit ☃", "anna", samples.NOON)
    assert set(catalog.holds.all()) == {held, paused}
    assert catalog.holds.of("shop") == (held, paused)
    assert catalog.holds.of("shop", HoldKind.PAUSE) == (paused,)
    assert not catalog.holds.release("shop", HoldKind.PAUSE)
    assert catalog.holds.release("shop", HoldKind.HOLD)
    assert catalog.holds.all() == (paused,)


def test_a_backup_is_deleted_when_every_copy_is_and_comes_back_with_one(catalog: Catalog) -> None:
    record = samples.backup(copies=(Copy("local", "complete", samples.NOON), Copy("offsite", "damaged", samples.NOON)))
    catalog.backups.add(record)
    assert catalog.backups.set_copy_state(record.id, "local", "deleted") is BackupState.DAMAGED
    assert catalog.backups.set_copy_state(record.id, "offsite", "deleted") is BackupState.DELETED
    assert catalog.backups.get(record.id).state is BackupState.DELETED
    catalog.backups.mark_copy_verified(record.id, "local", samples.NOON)
    assert catalog.backups.get(record.id).copies[0] == Copy("local", "deleted", samples.NOON, samples.NOON)
    assert catalog.backups.set_copy_state(record.id, "local", "complete") is BackupState.COMPLETE
    with pytest.raises(NotFoundError):
        catalog.backups.set_copy_state(record.id, "vault", "deleted")

"""Deleting by hand, where backups build on each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backupd.app.deletion import delete, keep, sweep_destination, undelete
from backupd.app.holds import hold
from backupd.model.backup import BackupState
from backupd.model.errors import NotFoundError, RefusedError
from backupd.transfer.intent import Intent
from backupd.transfer.remove import mark
from storage import layout, objects
from tests.retention.shelf import SERVER, Shelf
from tests.transfer.stock import backup_id, named

Make = Callable[..., Shelf]


def chain(one: Shelf, length: int = 3, **where: object) -> list[str]:
    """A full backup (1) with increments (2, 3, ...), and a newer full one (9); ids in this order."""
    ids = [one.add(1, days=9)]
    ids += [one.add(number, days=9 - number * 0.1, parent=number - 1) for number in range(2, length + 1)]
    return [*ids, one.add(9, days=1)]


def test_a_backup_that_others_build_on_is_only_deleted_with_them(shelf: Make) -> None:
    one = shelf()
    full, first, second, other = chain(one)
    with pytest.raises(RefusedError) as refused:
        delete(one.wiring, full, now=True)
    assert f"{first}, {second}" in refused.value.message
    assert "--with-increments" in refused.value.hint
    assert delete(one.wiring, full, now=True, with_increments=True) == []
    assert one.present() == {other}
    assert [record.id for record in one.catalog.backups.list()] == [other]


def test_an_increment_that_nothing_builds_on_goes_alone(shelf: Make) -> None:
    one = shelf()
    full, first, second, other = chain(one)
    assert delete(one.wiring, second, now=True) == []
    assert one.present() == {full, first, other}


def test_undeleting_an_increment_brings_back_what_it_builds_on(shelf: Make) -> None:
    one = shelf("", "local", "offsite")
    full, first, second, _other = chain(one)
    delete(one.wiring, full, now=False, with_increments=True)
    assert one.marked("offsite") == {full, first, second}
    assert undelete(one.wiring, first) == [full, first]
    assert one.marked("local") == one.marked("offsite") == {second}
    assert [one.state(name) for name in (full, first, second)] == [
        BackupState.COMPLETE, BackupState.COMPLETE, BackupState.DELETED]
    one.clock.move(days=2)
    sweep_destination(one.wiring, one.at())
    assert {full, first} <= one.present()
    assert second not in one.present()


def test_an_increment_whose_full_backup_is_gone_cannot_come_back(shelf: Make) -> None:
    one = shelf()
    full, first, second, _other = chain(one)
    delete(one.wiring, full, now=False, with_increments=True)
    one.at().delete(layout.manifest_key(SERVER, full))
    with pytest.raises(NotFoundError) as refused:
        undelete(one.wiring, second)
    assert full in refused.value.message
    assert first in refused.value.message


def test_a_copy_that_was_damaged_comes_back_damaged(shelf: Make) -> None:
    one = shelf()
    older, _newer = one.add(1, days=2, content=b"rotten"), one.add(2, days=1)
    delete(one.wiring, older, now=False)
    objects.quarantine(one.at(), named(b"rotten").name, "other bytes than were stored", one.clock())
    undelete(one.wiring, older)
    assert one.copies(older) == {"local": "damaged"}
    assert one.state(older) is BackupState.DAMAGED


def test_what_was_deleted_is_not_called_complete_by_a_later_look_at_its_bytes(shelf: Make) -> None:
    one = shelf()
    older, _newer = one.add(1, days=2), one.add(2, days=1)
    delete(one.wiring, older, now=False)
    one.catalog.backups.mark_copy_verified(older, "local", one.clock())
    assert one.copies(older) == {"local": "deleted"}
    one.catalog.backups.mark_copy_damaged(older, "local")
    assert one.copies(older) == {"local": "deleted"}


def test_the_last_chain_that_restores_is_not_deleted_though_loose_increments_are_left(shelf: Make) -> None:
    one = shelf()
    last = one.add(1, days=3)
    one.add(3, days=2, parent=2)  # nobody knows what it builds on
    with pytest.raises(RefusedError, match="only restorable backup"):
        delete(one.wiring, last, now=True)


def test_a_chain_is_not_deleted_when_one_of_its_increments_is_kept(shelf: Make) -> None:
    one = shelf()
    full, first, _second, _other = chain(one)
    keep(one.wiring, first, pinned=True)
    with pytest.raises(RefusedError, match="kept on purpose"):
        delete(one.wiring, full, now=False, with_increments=True)
    assert one.marked() == set()


def test_a_kept_increment_keeps_what_it_builds_on_from_stray_marks(shelf: Make) -> None:
    one = shelf()
    full, first, second, _other = chain(one)
    keep(one.wiring, second, pinned=True)
    for name in (full, first, second):
        mark(one.at(), SERVER, name, one.clock())
    one.clock.move(days=2)
    sweep_destination(one.wiring, one.at())
    assert {full, first, second} <= one.present()


def test_an_increment_that_the_catalog_does_not_know_is_found_at_the_destination(shelf: Make) -> None:
    one = shelf()
    full = one.add(1, days=3)
    one.add(2, days=2, parent=1, known=False)
    one.add(9, days=1)
    with pytest.raises(RefusedError, match=backup_id(2)):
        delete(one.wiring, full, now=True)


def test_nothing_is_deleted_that_a_running_backup_builds_on(shelf: Make) -> None:
    one = shelf()
    full, _other = one.add(1, days=3), one.add(9, days=1)
    with Intent([one.at()], SERVER, backup_id(20), parents=[full], clock=one.clock):
        with pytest.raises(RefusedError, match=f"needed by {backup_id(20)}"):
            delete(one.wiring, full, now=True)
    assert delete(one.wiring, full, now=True) == []


def test_nothing_of_a_held_server_is_deleted_by_hand(shelf: Make) -> None:
    one = shelf()
    older, _newer = one.add(1, days=2), one.add(2, days=1)
    other, _another = one.add(3, days=2, server="zoo"), one.add(4, days=1, server="zoo")
    hold(one.wiring, SERVER, "audit", "anna")
    with pytest.raises(RefusedError, match="audit"):
        delete(one.wiring, older, now=True)
    assert delete(one.wiring, other, now=True) == []

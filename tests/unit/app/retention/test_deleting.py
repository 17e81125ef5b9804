"""Deleting by hand, where backups build on each other."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import delete as delete_rows

from backupd.app.backup_records import adopt_unknown
from backupd.app.context.wiring import Wiring
from backupd.app.retention import deletion
from backupd.app.retention.deletion import Deleted, delete, expected_at, keep, sweep_destination, undelete
from backupd.app.retention.holds import hold, listed, release
from backupd.app.service.dispatch import perform
from backupd.app.service.requests import Requests
from backupd.app.verify.verification import fsck
from backupd.catalog.session import Catalog, open_catalog
from backupd.catalog.tables.backups import copies
from backupd.model.access import Actor, Role, Via
from backupd.model.backup_record import BackupState, HoldKind
from backupd.model.errors import CatalogError, DestinationError, NotFoundError, RefusedError
from backupd.model.job import JobKind, JobState
from backupd.transfer.collection import Expected, GarbageCollection, Missing
from backupd.transfer.deletion import mark
from backupd.transfer.holds_and_locks import Backup
from backupd.transfer.leases import Intent, Pin
from storage import layout, objects
from storage.destination import Destination
from tests.support.catalog.installation import SERVER, Installation
from tests.support.stores.stock import backup_id, named

Make = Callable[..., Installation]


def chain(one: Installation, length: int = 3, **where: object) -> list[str]:
    """A full backup (1) with increments (2, 3, ...), and a newer full one (9); ids in this order."""
    ids = [one.add(1, days=9)]
    ids += [one.add(number, days=9 - number * 0.1, parent=number - 1) for number in range(2, length + 1)]
    return [*ids, one.add(9, days=1)]


def due(installation: Make) -> tuple[Installation, tuple[str, str, str], str]:
    """A chain whose grace period is over, and a backup that stays."""
    one = installation()
    full, first, second, other = chain(one)
    delete(one.wiring, full, now=False, with_increments=True)
    one.clock.move(days=2)
    return one, (full, first, second), other


def test_a_backup_that_others_build_on_is_only_deleted_with_them(installation: Make) -> None:
    one = installation()
    full, first, second, other = chain(one)
    with pytest.raises(RefusedError) as refused:
        delete(one.wiring, full, now=True)
    assert f"{first}, {second}" in refused.value.message
    assert "--with-increments" in refused.value.hint
    assert delete(one.wiring, full, now=True, with_increments=True) == Deleted()
    assert one.present() == {other}
    assert [record.id for record in one.catalog.backups.every()] == [other]


def test_what_is_gone_stands_in_the_audit_though_the_catalog_fails_behind_it(
    installation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, (full, first, second), other = due(installation)

    def failing(wiring: Wiring, destination: Destination) -> Expected:
        told = expected_at(wiring, destination)

        def expected(present: Collection[Backup], besides: Collection[str]) -> Missing:
            if not one.present() & {full, first, second}:
                raise CatalogError("the disk of the catalog is full")
            return told(present, besides)

        return expected

    monkeypatch.setattr(deletion, "expected_at", failing)
    held = sweep_destination(one.wiring, one.at())
    assert one.present() == {other}
    assert any("the disk of the catalog is full" in line for line in held)
    removed = one.catalog.audit.list(action="backup-removed")
    assert {(entry.subject, entry.server) for entry in removed} == {(name, SERVER) for name in (full, first, second)}
    assert [record.id for record in one.catalog.backups.every()] == [other]


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), DestinationError("the connection was cut")])
def test_what_is_gone_stands_in_the_audit_whatever_ended_the_removal(
    installation: Make, monkeypatch: pytest.MonkeyPatch, ending: BaseException
) -> None:
    one, (full, first, second), other = due(installation)

    def ended(*_arguments: object) -> None:
        raise ending

    monkeypatch.setattr(GarbageCollection, "run", ended)
    with pytest.raises(type(ending)):
        sweep_destination(one.wiring, one.at())
    assert one.present() == {other}
    removed = one.catalog.audit.list(action="backup-removed")
    found = {(entry.subject, entry.detail) for entry in removed}
    assert found == {(name, "at local") for name in (full, first, second)}
    assert [record.id for record in one.catalog.backups.every()] == [other]


def test_what_a_killed_process_has_removed_stands_in_the_audit_after_the_next_look(
    installation: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, (full, first, second), other = due(installation)

    def killed(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(deletion, "_record_removed", killed)
        with pytest.raises(KeyboardInterrupt):
            sweep_destination(one.wiring, one.at())
    assert one.present() == {full, first, other}, "the rest waits for what is recorded"
    sweep_destination(one.wiring, one.at())
    removed = {entry.subject: entry.detail for entry in one.catalog.audit.list(action="backup-removed")}
    assert removed.keys() == {full, first, second}
    assert removed[second].startswith("at local: found gone")


def test_what_is_to_go_at_once_is_marked_by_who_asks_and_removed_by_a_job(installation: Make) -> None:
    one = installation("", "local", "offsite")
    full, first, second, other = chain(one)
    anna = Actor("anna", Role.ADMIN, Via.API)
    done, job = Requests(one.wiring, anna).remove(full, with_increments=True)
    assert job is not None
    assert (job.kind, job.state, job.requested_by) == (JobKind.REMOVAL, JobState.QUEUED, "anna")
    assert set(done.marked) == one.marked("offsite") == {full, first, second}
    assert one.present() == {full, first, second, other}, "nothing is removed while somebody waits"
    (asked,) = one.catalog.audit.list(actor="anna")
    assert (asked.action, asked.subject, job.id in asked.detail) == ("backup-deleted", full, True)
    assert perform(one.wiring, replace(one.run(), job=job)).problem is None
    assert one.present() == one.present("offsite") == {other}
    assert [record.id for record in one.catalog.backups.every()] == [other]
    removed = one.catalog.audit.list(action="backup-removed")
    assert {(entry.subject, entry.detail) for entry in removed} == {
        (name, f"at {place}, without its grace period")
        for name in (full, first, second)
        for place in ("local", "offsite")
    }
    assert perform(one.wiring, replace(one.run(), job=job)).problem is None, "it may be done again"


def test_what_was_undeleted_before_the_job_came_to_it_is_not_removed(installation: Make) -> None:
    one = installation()
    full, first, second, other = chain(one)
    _done, job = Requests(one.wiring, Actor("anna", Role.ADMIN, Via.API)).remove(full, with_increments=True)
    assert job is not None
    undelete(one.wiring, first)
    assert perform(one.wiring, replace(one.run(), job=job)).problem is None
    assert one.present() == {full, first, other}
    assert second not in {record.id for record in one.catalog.backups.every()}
    with pytest.raises(RefusedError, match="needed by"):
        Requests(one.wiring, Actor("anna", Role.ADMIN, Via.API)).remove(full)


def test_what_keeps_something_from_going_at_once_is_told_by_the_job(installation: Make) -> None:
    one = installation()
    _full, _first, second, _other = chain(one)
    with Pin(one.at(), "20261121T040000Z-0000000a", [(SERVER, second)], clock=one.clock):
        _done, job = Requests(one.wiring, Actor("anna", Role.ADMIN, Via.API)).remove(second)
        assert job is not None
        problem = perform(one.wiring, replace(one.run(), job=job)).problem
    assert problem is not None
    assert second in problem.detail
    assert second in one.present()


def test_an_increment_that_nothing_builds_on_goes_alone(installation: Make) -> None:
    one = installation()
    full, first, second, other = chain(one)
    assert delete(one.wiring, second, now=True) == Deleted()
    assert one.present() == {full, first, other}


def test_undeleting_an_increment_brings_back_what_it_builds_on(installation: Make) -> None:
    one = installation("", "local", "offsite")
    full, first, second, _other = chain(one)
    delete(one.wiring, full, now=False, with_increments=True)
    assert one.marked("offsite") == {full, first, second}
    assert undelete(one.wiring, first) == [full, first]
    assert one.marked("local") == one.marked("offsite") == {second}
    assert [one.state(name) for name in (full, first, second)] == [
        BackupState.COMPLETE,
        BackupState.COMPLETE,
        BackupState.DELETED,
    ]
    one.clock.move(days=2)
    sweep_destination(one.wiring, one.at())
    assert {full, first} <= one.present()
    assert second not in one.present()


def test_an_increment_whose_full_backup_is_gone_cannot_come_back(installation: Make) -> None:
    one = installation()
    full, first, second, _other = chain(one)
    delete(one.wiring, full, now=False, with_increments=True)
    one.at().delete(layout.manifest_key(SERVER, full))
    with pytest.raises(NotFoundError) as refused:
        undelete(one.wiring, second)
    assert full in refused.value.message
    assert first in refused.value.message


def test_a_copy_that_was_damaged_comes_back_damaged(installation: Make) -> None:
    one = installation()
    older, _newer = one.add(1, days=2, content=b"rotten"), one.add(2, days=1)
    delete(one.wiring, older, now=False)
    objects.quarantine(one.at(), named(b"rotten").name, "other bytes than were stored", one.clock())
    undelete(one.wiring, older)
    assert one.copies(older) == {"local": "damaged"}
    assert one.state(older) is BackupState.DAMAGED


def test_what_was_deleted_is_not_called_complete_by_a_later_look_at_its_bytes(installation: Make) -> None:
    one = installation()
    older, _newer = one.add(1, days=2), one.add(2, days=1)
    delete(one.wiring, older, now=False)
    one.catalog.backups.mark_copy_verified(older, "local", one.clock())
    assert one.copies(older) == {"local": "deleted"}
    one.catalog.backups.mark_copy_damaged(older, "local")
    assert one.copies(older) == {"local": "deleted"}


def test_the_last_chain_that_restores_is_not_deleted_though_loose_increments_are_left(installation: Make) -> None:
    one = installation()
    last = one.add(1, days=3)
    one.add(3, days=2, parent=2)  # nobody knows what it builds on
    with pytest.raises(RefusedError, match="only restorable backup"):
        delete(one.wiring, last, now=True)


def test_a_dump_stands_in_for_dumps_of_its_own_tables_only(installation: Make) -> None:
    one = installation()
    full = one.add(1, days=9)
    money, rest = one.add(2, days=3, dump="money"), one.add(3, days=2, dump="")
    with pytest.raises(RefusedError, match="only restorable backup of"):
        delete(one.wiring, full, now=False)
    delete(one.wiring, money, now=False)  # the physical one holds these tables, too
    delete(one.wiring, rest, now=False)
    money, rest = (one.add(number, days=number, dump=name, server="crm") for number, name in ((12, "money"), (13, "")))
    partial = one.add(14, days=1, dump="money", missing=1, server="crm")
    for name in (rest, money):  # a dump without a table does not stand in for one with it
        with pytest.raises(RefusedError, match="only restorable dump of its tables"):
            delete(one.wiring, name, now=False)
    delete(one.wiring, partial, now=False)


def test_a_chain_is_not_deleted_when_one_of_its_increments_is_kept(installation: Make) -> None:
    one = installation()
    full, first, _second, _other = chain(one)
    keep(one.wiring, first, pinned=True)
    with pytest.raises(RefusedError, match="is kept"):
        delete(one.wiring, full, now=False, with_increments=True)
    assert one.marked() == set()


def test_a_kept_increment_keeps_what_it_builds_on_from_stray_marks(installation: Make) -> None:
    one = installation()
    full, first, second, _other = chain(one)
    keep(one.wiring, second, pinned=True)
    for name in (full, first, second):
        mark(one.at(), SERVER, name, one.clock())
    one.clock.move(days=2)
    sweep_destination(one.wiring, one.at())
    assert {full, first, second} <= one.present()


def test_an_increment_that_the_catalog_does_not_know_is_found_at_the_destination(installation: Make) -> None:
    one = installation()
    full = one.add(1, days=3)
    one.add(2, days=2, parent=1, known=False)
    one.add(9, days=1)
    with pytest.raises(RefusedError, match=backup_id(2)):
        delete(one.wiring, full, now=True)


def test_nothing_is_deleted_that_a_running_backup_builds_on(installation: Make) -> None:
    one = installation()
    full, _other = one.add(1, days=3), one.add(9, days=1)
    with Intent([one.at()], SERVER, backup_id(20), parents=[full], clock=one.clock):
        with pytest.raises(RefusedError, match=f"needed by {backup_id(20)}"):
            delete(one.wiring, full, now=True)
    assert delete(one.wiring, full, now=True) == Deleted()


def test_nothing_of_a_held_server_is_deleted_by_hand(installation: Make) -> None:
    one = installation()
    older, _newer = one.add(1, days=2), one.add(2, days=1)
    other, _another = one.add(3, days=2, server="zoo"), one.add(4, days=1, server="zoo")
    hold(one.wiring, SERVER, "audit", "anna")
    with pytest.raises(RefusedError, match="audit"):
        delete(one.wiring, older, now=True)
    assert delete(one.wiring, other, now=True) == Deleted()


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Catalog]:
    """A catalog that knows nothing: the old one was lost, or this is another installation."""
    with open_catalog(f"sqlite:///{tmp_path}/another.db") as opened:
        yield opened


def rot(one: Installation, content: bytes) -> None:
    """As verify finds an object whose bytes changed."""
    objects.quarantine(one.at(), named(content).name, "other bytes than were stored", one.clock())


def test_the_last_good_backup_is_not_deleted_while_the_newer_one_is_known_to_be_damaged(installation: Make) -> None:
    one = installation()
    good, _bad = one.add(1, days=2), one.add(2, days=1, content=b"rotten")
    one.add(3, days=0.5, parent=2)
    rot(one, b"rotten")
    with pytest.raises(RefusedError, match="only restorable backup"):
        delete(one.wiring, good, now=True)


def test_a_lost_catalog_does_not_make_known_damage_good(installation: Make, empty: Catalog) -> None:
    one = installation()
    good, bad = one.add(1, days=2), one.add(2, days=1, content=b"rotten")
    rot(one, b"rotten")
    other = dataclasses.replace(one.wiring, catalog=empty)
    assert set(adopt_unknown(other, one.at())) == {good, bad}
    states = {record.id: (record.state, record.copies[0].state) for record in empty.backups.every(foreign=True)}
    assert states == {good: (BackupState.COMPLETE, "complete"), bad: (BackupState.DAMAGED, "damaged")}


def test_a_copy_that_is_taken_in_makes_its_backup_complete_again_where_the_others_are_damaged(
    installation: Make,
) -> None:
    one = installation("", "local", "offsite")
    name = one.add(1, days=2)
    one.catalog.backups.set_copy_state(name, "local", "damaged")
    one.catalog.backups.remove_copy(name, "offsite")
    one.catalog.backups.set_copy_state(name, "local", "damaged")
    adopt_unknown(one.wiring, one.at("offsite"))
    assert one.copies(name) == {"local": "damaged", "offsite": "complete"}
    assert one.state(name) is BackupState.COMPLETE


@pytest.mark.parametrize("whom", [SERVER, "*"])
def test_a_hold_covers_what_a_lost_catalog_does_not_know_and_what_others_would_sweep(
    installation: Make, empty: Catalog, whom: str
) -> None:
    one = installation()
    full, first, _second, _other = chain(one)
    delete(one.wiring, full, now=False, with_increments=True)
    one.clock.move(days=2)
    lost = dataclasses.replace(one.wiring, catalog=empty)
    assert hold(lost, whom, "disaster: delete nothing", "anna").problems == ()
    for sweeper in (lost, one.wiring):  # the second has no row of the hold: it reads it at the destination
        fsck(sweeper, mend=True)
        assert {full, first} <= one.present()
        assert [found.reason for found in listed(sweeper)] == ["disaster: delete nothing"]
    assert release(one.wiring, whom, HoldKind.HOLD, "ben") == ()
    with pytest.raises(RefusedError, match="not held"):
        release(one.wiring, whom, HoldKind.HOLD, "ben")
    fsck(one.wiring, mend=True)
    assert full not in one.present()


def test_a_hold_of_a_lost_catalog_counts_though_nothing_was_written_at_the_destination(
    installation: Make, empty: Catalog
) -> None:
    one = installation()
    full, *_others = chain(one)
    delete(one.wiring, full, now=False, with_increments=True)
    one.clock.move(days=2)
    lost = dataclasses.replace(one.wiring, catalog=empty)
    empty.holds.set("*", HoldKind.HOLD, "disaster", "anna", one.clock())
    sweep_destination(lost, one.at())
    assert full in one.present()


def test_what_is_kept_is_kept_for_every_installation_until_it_is_released(installation: Make, empty: Catalog) -> None:
    one = installation()
    older, _newer = one.add(1, days=2), one.add(2, days=1)
    assert keep(one.wiring, older, pinned=True) == ()
    other = dataclasses.replace(one.wiring, catalog=empty)
    mark(one.at(), SERVER, older, one.clock())
    one.clock.move(days=2)
    sweep_destination(other, one.at())
    assert older in one.present()
    adopt_unknown(other, one.at())
    assert empty.backups.get(older).pinned
    with pytest.raises(RefusedError, match="is kept"):
        delete(other, older, now=True)
    keep(other, older, pinned=False)
    keep(one.wiring, older, pinned=False)
    assert delete(one.wiring, older, now=True) == Deleted()


def test_a_destination_that_cannot_be_told_of_a_hold_is_named(installation: Make) -> None:
    one = installation("", "local", "offsite")
    name = one.add(1, days=1)
    shutil.rmtree(one.base / "offsite")
    for problems in (hold(one.wiring, SERVER, "audit", "anna").problems, keep(one.wiring, name, pinned=True)):
        assert [problem.partition(":")[0] for problem in problems] == ["offsite"]
    assert release(one.wiring, SERVER, HoldKind.HOLD, "anna") != ()


def test_a_copy_at_a_destination_that_is_not_configured_any_more_is_forgotten_with_a_word(installation: Make) -> None:
    one = installation("", "local", "offsite")
    older, only, _newer = one.add(1, days=3), one.add(2, days=2, destinations=["offsite"]), one.add(3, days=1)
    one.destinations = ("local",)
    one.write("")
    done = delete(one.wiring, older, now=False)
    assert "offsite is no longer configured" in done.forgotten[0]
    assert one.copies(older) == {"local": "deleted"}
    assert one.state(older) is BackupState.DELETED
    assert undelete(one.wiring, older) == [older]
    assert delete(one.wiring, only, now=True).held == ()
    assert only not in {record.id for record in one.catalog.backups.every()}


def test_a_row_that_a_killed_process_left_without_copies_is_removed_by_hand(installation: Make) -> None:
    one = installation()
    full, *_increments, other = chain(one, 1)
    with one.catalog.backups._database.write() as connection:
        connection.execute(delete_rows(copies).where(copies.c.backup_id == full))
    assert one.catalog.backups.get(full).copies == ()
    assert delete(one.wiring, full, now=False) == Deleted()
    assert [record.id for record in one.catalog.backups.every()] == [other]


def test_what_is_deleted_comes_back_though_a_destination_of_it_is_not_configured_any_more(installation: Make) -> None:
    one = installation("", "local", "offsite")
    older, _newer = one.add(1, days=3), one.add(3, days=1)
    delete(one.wiring, older, now=False)
    one.destinations = ("local",)
    one.write("")
    assert undelete(one.wiring, older) == [older]
    assert one.state(older) is BackupState.COMPLETE

"""The rules carried out, at real destinations and in a real catalog."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest

from backupd.app.retention.deletion import keep, sweep_destination, undelete
from backupd.app.retention.holds import hold
from backupd.app.retention.preview import preview
from backupd.app.retention.rules import Stored
from backupd.model.backup_record import BackupKind, BackupState, Hold, HoldKind
from backupd.model.errors import CancelledError, NotFoundError, RefusedError
from backupd.transfer.deletion import marked
from backupd.transfer.holds_and_locks import put_hold, put_keep, remove_hold
from backupd.transfer.leases import Intent, Pin
from tests.support.catalog.installation import SERVER, Installation
from tests.support.service.shop import apply

Make = Callable[..., Installation]


def test_a_preview_changes_nothing(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 3}}")
    ids = one.daily(5)
    (decisions,) = preview(one.wiring, SERVER, now=one.clock())
    assert [decision.backup.id for decision in decisions.expired] == ids[3:]
    assert (one.marked(), one.events("retention-refused")) == (set(), ())


def test_a_preview_of_what_is_to_come_counts_backups_that_do_not_exist_yet(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 2}}")
    ids = one.daily(2)
    later = one.clock() + timedelta(days=1)
    coming = Stored("coming", BackupKind.PHYSICAL_FULL, None, later, later)
    (decisions,) = preview(one.wiring, SERVER, now=later, future=[coming])
    assert [decision.backup.id for decision in decisions.kept] == ["coming", ids[0]]


def test_what_expired_is_marked_with_its_reasons_and_goes_after_the_grace_period(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 3}}")
    ids = one.daily(5)
    applied = apply(one.wiring, SERVER, one.run())
    assert applied.marked == {"local": tuple(ids[3:])}
    assert one.marked() == set(ids[3:])
    assert marked(one.at())[SERVER, ids[4]].reason == "retention: keep_fulls 3: there are 3 newer full ones"
    assert [one.state(name) for name in ids] == [*[BackupState.COMPLETE] * 3, *[BackupState.DELETED] * 2]
    assert one.agrees()
    assert apply(one.wiring, SERVER, one.run()).marked == {"local": ()}, "nothing expires twice"
    one.clock.move(days=2)
    apply(one.wiring, SERVER, one.run())
    assert one.present() == set(ids[:3])
    assert {record.id for record in one.catalog.backups.every()} == set(ids[:3])


def test_what_the_rules_mark_and_what_is_removed_stands_in_the_audit(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 3}}")
    ids = one.daily(5)
    apply(one.wiring, SERVER, one.run())
    one.clock.move(days=2)
    apply(one.wiring, SERVER, one.run())
    told = one.catalog.audit.list()
    assert {(entry.actor, entry.via, entry.server) for entry in told} == {("backupd", "service", SERVER)}
    assert {(entry.action, entry.subject) for entry in told} == {
        (action, name) for action in ("backup-expired", "backup-removed") for name in ids[3:]
    }
    assert len(told) == 4, "each once"
    (expired,) = one.catalog.audit.list(action="backup-expired", subject=ids[4])
    assert expired.detail == (
        f"marked at local by retention {one.run().job.id}: keep_fulls 3: there are 3 newer full ones"
    )
    (removed,) = one.catalog.audit.list(action="backup-removed", subject=ids[4])
    assert removed.detail == "at local"


def test_what_expired_can_be_brought_back_within_the_grace_period_and_kept(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 3}}")
    ids = one.daily(5)
    apply(one.wiring, SERVER, one.run())
    assert undelete(one.wiring, ids[4]) == [ids[4]]
    keep(one.wiring, ids[4], pinned=True)
    apply(one.wiring, SERVER, one.run())
    one.clock.move(days=2)
    apply(one.wiring, SERVER, one.run())
    assert one.present() == {*ids[:3], ids[4]}


def test_each_destination_follows_its_own_rules_and_a_backup_is_deleted_when_no_copy_is_left(
    installation: Make,
) -> None:
    one = installation("{local: {keep_fulls: 3}, offsite: {keep_fulls: 4}}", "local", "offsite", "vault")
    ids = one.daily(5, destinations=("local", "offsite"))
    one.clock.move(minutes=1)
    vaulted = one.add(20, days=0.01)
    apply(one.wiring, SERVER, one.run())
    assert one.copies(ids[2]) == {"local": "deleted", "offsite": "complete"}
    assert one.state(ids[2]) is BackupState.COMPLETE
    assert one.state(ids[3]) is BackupState.DELETED
    assert one.copies(vaulted)["vault"] == "complete", "a destination without rules keeps everything"
    one.clock.move(days=2)
    apply(one.wiring, SERVER, one.run())
    assert one.copies(ids[2]) == {"offsite": "complete"}
    assert one.present("local") == {vaulted, *ids[:2]}
    assert one.present("offsite") == {vaulted, *ids[:3]}
    assert one.agrees()


def test_more_than_half_at_once_is_refused_with_an_event_unless_confirmed(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 2}}")
    ids = one.daily(9)
    with pytest.raises(RefusedError) as refused:
        apply(one.wiring, SERVER, one.run())
    assert "7 of 9 backups of shop at destination local" in refused.value.detail
    assert "--really" in refused.value.hint
    (event,) = one.events("retention-refused")
    assert ids[8] in event.detail
    assert one.marked() == set()
    with pytest.raises(RefusedError):
        apply(one.wiring, SERVER, one.run())
    assert len(one.events("retention-refused")) == 1, "the same refusal is told once a day"
    apply(one.wiring, SERVER, one.run(), really=True)
    assert one.marked() == set(ids[2:])


def test_three_old_backups_may_go_even_where_that_is_more_than_half(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 1}}")
    ids = one.daily(4)
    apply(one.wiring, SERVER, one.run())
    assert one.marked() == set(ids[1:])


def test_a_hold_stops_rules_deletion_and_sweeps_and_is_told(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 3}}")
    ids = one.daily(5)
    apply(one.wiring, SERVER, one.run())
    hold(one.wiring, SERVER, "audit until March", "anna")
    one.clock.move(days=9)
    sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids), "not even what was marked before"
    added = [one.add(10 + number, days=0.01 * number) for number in range(2)]
    apply(one.wiring, SERVER, one.run())
    assert one.marked() == set(ids[3:])
    (event,) = one.events("retention-refused")
    assert "audit until March" in event.detail
    assert set(added) | set(ids) == one.present()


def test_the_newest_proved_chain_outlives_its_rules_and_that_is_told(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 2}}")
    ids = one.daily(4)
    one.prove(ids[3])
    apply(one.wiring, SERVER, one.run())
    assert one.marked() == {ids[2]}
    (event,) = one.events("retention-refused")
    assert event.detail == ids[3]
    assert "test-restore" in event.hint
    one.prove(ids[0])
    apply(one.wiring, SERVER, one.run())
    assert one.marked() == {ids[2], ids[3]}


def test_a_proof_that_was_taken_back_by_a_later_failure_protects_nothing(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 2}}")
    ids = one.daily(3)
    one.prove(ids[2])
    one.clock.move(hours=2)
    one.prove(ids[2], "failed")
    apply(one.wiring, SERVER, one.run())
    assert one.marked() == {ids[2]}


def test_a_test_that_came_to_no_verdict_takes_no_proof_back(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 1}}")
    ids = one.daily(3)
    one.prove(ids[2])
    one.clock.move(hours=2)
    one.prove(ids[2], "undecided")
    apply(one.wiring, SERVER, one.run())
    assert one.marked() == {ids[1]}


def test_a_restored_backup_never_displaces_a_proved_one_and_serves_where_none_is(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 1}}")
    ids = one.daily(4)
    one.prove(ids[3])
    one.clock.move(hours=2)
    one.prove(ids[3], "restored")
    one.prove(ids[1], "restored")
    (decisions,) = preview(one.wiring, SERVER, now=one.clock())
    assert [decision.backup.id for decision in decisions.kept] == [ids[0], ids[3]]
    one.clock.move(hours=2)
    one.prove(ids[3], "failed")
    (decisions,) = preview(one.wiring, SERVER, now=one.clock())
    assert [decision.backup.id for decision in decisions.kept] == [ids[0], ids[1]]


def test_a_destination_that_is_not_configured_any_more_keeps_nothing_from_the_rules_of_the_others(
    installation: Make,
) -> None:
    one = installation("{local: {keep_fulls: 1}}", "local", "offsite")
    ids = one.daily(3)
    one.destinations = ("local",)
    one.write("{local: {keep_fulls: 1}}")
    applied = apply(one.wiring, SERVER, one.run())
    assert applied.marked == {"local": (ids[1], ids[2])}
    assert any("offsite" in sentence and "no longer configured" in sentence for sentence in applied.held)


def test_a_hold_of_another_installation_stops_the_rules_here(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 1}}")
    ids = one.daily(3)
    put_hold(one.at(), Hold(SERVER, HoldKind.HOLD, "audit elsewhere", "anna", one.clock()))
    assert apply(one.wiring, SERVER, one.run()).marked == {"local": ()}
    put_keep(one.at(), SERVER, ids[2], one.clock())
    remove_hold(one.at(), SERVER)
    assert apply(one.wiring, SERVER, one.run()).marked == {"local": (ids[1],)}


def test_what_a_restore_reads_stays_until_it_has_ended(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 2}}")
    ids = one.daily(3)
    with Pin(one.at(), "20261121T040000Z-0000000a", [(SERVER, ids[2])], clock=one.clock):
        assert apply(one.wiring, SERVER, one.run()).marked == {"local": ()}
    assert apply(one.wiring, SERVER, one.run()).marked == {"local": (ids[2],)}


def test_what_a_running_backup_builds_on_stays(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 1}}")
    full = one.add(1, days=3)
    one.add(2, days=2)
    with Intent([one.at()], SERVER, "20261121T040000Z-0000000b", parents=[full], clock=one.clock):
        assert apply(one.wiring, SERVER, one.run()).marked == {"local": ()}


def test_a_backup_that_the_catalog_does_not_know_counts_too(installation: Make) -> None:
    """Its manifest was put by a process that died before it wrote the row; it builds on what the rules would expire."""
    one = installation("{local: {keep_fulls: 1}}")
    full = one.add(1, days=300)
    one.add(2, days=299, parent=1, known=False)
    newest = one.add(5, days=1)
    keep(one.wiring, newest, pinned=True)
    apply(one.wiring, SERVER, one.run())
    assert full in one.present()
    assert "20261121T000002Z-00000002" in {record.id for record in one.catalog.backups.every(foreign=True)}


def test_a_server_that_is_no_longer_configured_keeps_what_it_has(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 1}}")
    one.daily(4)
    one.write("{local: {keep_fulls: 1}}", servers=["zoo"])
    (decisions,) = preview(one.wiring, SERVER, now=one.clock())
    assert decisions.expired == ()
    assert "no longer configured" in decisions.backups[0].reasons[-1]
    assert apply(one.wiring, SERVER, one.run()).marked == {"local": ()}
    with pytest.raises(NotFoundError):
        preview(one.wiring, "nobody", now=one.clock())


def test_one_destination_out_of_reach_does_not_keep_the_others_from_their_rules(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 2}, offsite: {keep_fulls: 2}}", "local", "offsite")
    ids = one.daily(3)
    shutil.rmtree(one.base / "offsite")
    with pytest.raises(NotFoundError, match="offsite is no repository"):
        apply(one.wiring, SERVER, one.run())
    assert one.marked("local") == {ids[2]}
    assert one.copies(ids[2]) == {"local": "deleted", "offsite": "complete"}


def test_a_deletion_that_died_before_its_mark_is_finished_with_a_grace_period_of_its_own(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 2}}")
    ids = one.daily(3)
    one.catalog.backups.set_copy_state(ids[0], "local", "deleted")
    apply(one.wiring, SERVER, one.run())
    assert one.marked() == {ids[0]}
    one.clock.move(hours=1)
    sweep_destination(one.wiring, one.at())
    assert one.present() == set(ids)


def test_a_cancelled_run_marks_nothing_more(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 1}}")
    one.daily(3)
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(CancelledError):
        apply(one.wiring, SERVER, one.run(cancel=cancel))
    assert one.marked() == set()


def test_a_run_that_lost_its_job_marks_nothing(installation: Make) -> None:
    one = installation("{local: {keep_fulls: 1}}")
    one.daily(3)

    def taken() -> None:
        raise RefusedError("somebody else has this job")

    with pytest.raises(RefusedError, match="somebody else"):
        apply(one.wiring, SERVER, one.run(fence=taken))
    assert one.marked() == set()

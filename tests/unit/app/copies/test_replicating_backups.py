"""Backups are copied to the others as they are stored, each after what it builds on, and only good bytes arrive."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest

from backupd.alerts.rules import LOST, REPLICATION
from backupd.app.copies.replication import LONGEST_PAUSE, pause_after
from backupd.app.retention.deletion import keep, sweep_destination
from backupd.app.retention.holds import hold
from backupd.model.errors import BusyError, RefusedError
from backupd.model.text import format_time
from backupd.transfer.deletion import mark
from backupd.transfer.fsck import examine
from backupd.transfer.holds_and_locks import kept_at
from backupd.transfer.leases import Intent, intents, pins
from backupd.transfer.scrub_and_repair import put_right
from storage import layout, objects
from tests.support.catalog.installation import SERVER
from tests.support.service.shop import Shop, apply
from tests.support.stores.stock import backup_id, named, pool, put
from tests.support.stores.strict import UndeletableDestination

Make = Callable[..., Shop]


def test_everything_arrives_byte_for_byte_parents_first_and_nothing_is_left_behind(shop: Make) -> None:
    one = shop()
    full = one.add(1, days=2)
    first = one.add(2, days=1.5, parent=1)
    second = one.add(3, days=1, parent=2)
    done = one.replicate()
    assert [copied.header.backup_id for copied in done.copied] == [full, first, second]
    assert done.ok, done.trouble
    assert one.whole() == one.whole("local")
    assert one.copies(second) == {"local": "complete", "offsite": "complete"}
    assert not one.catalog.replications.list()
    assert (intents(one.at("offsite")), pins(one.at())) == ([], [])
    assert examine(one.at("offsite"), None, clock=one.clock) == []
    assert one.verified(second) == {"offsite"}
    again = one.replicate()
    assert (again.copied, again.examined.verified, again.ok) == ((), (), True)


def test_what_two_backups_share_is_sent_once(shop: Make) -> None:
    one = shop()
    one.add(1, days=2, content=b"same")
    one.add(2, days=1, content=b"same")
    done = one.replicate()
    assert sum(copied.objects for copied in done.copied) == 1 + 2 * 3, "side files are each backup's own"
    assert [copied.present for copied in done.copied] == [0, 1]


def test_what_a_killed_copy_has_left_is_not_sent_again(shop: Make) -> None:
    one = shop()
    name = one.add(1, days=1, content=b"there already")
    one.at("offsite").initialise(one.clock())
    item = named(b"there already")
    put(one.at("offsite"), layout.object_key(item.name), b"sealed there already")
    done = one.replicate()
    assert (done.copied[0].header.backup_id, done.copied[0].present, done.copied[0].objects) == (name, 1, 3)


def test_an_object_of_another_size_that_a_killed_copy_left_is_replaced(shop: Make) -> None:
    one = shop()
    one.add(1, days=1, content=b"long enough")
    one.at("offsite").initialise(one.clock())
    put(one.at("offsite"), layout.object_key(named(b"long enough").name), b"sealed lo")
    assert one.replicate().ok
    assert one.whole() == one.whole("local")


def test_a_backup_that_the_targets_own_rules_would_not_keep_is_not_copied_and_that_is_said(shop: Make) -> None:
    one = shop("{offsite: {keep_fulls: 2}}")
    ids = one.daily(4, destinations=("local",))
    done = one.replicate()
    assert one.present("offsite") == set(ids[:2])
    assert [name for name, _why in done.declined] == ids[2:]
    assert "keep_fulls 2" in dict(done.declined)[ids[3]]
    apply(one.wiring, SERVER, one.run())
    assert one.marked("offsite") == set()
    assert one.replicate().copied == ()


def test_what_a_kept_one_builds_on_is_copied_though_no_rule_asks_for_it(shop: Make) -> None:
    one = shop("{offsite: {daily: 1}}")
    full = one.add(1, days=3, destinations=("local",))
    child = one.add(2, days=0.1, parent=1, destinations=("local",))
    one.replicate()
    assert one.present("offsite") == {full, child}


def test_what_is_marked_deleted_is_not_copied(shop: Make) -> None:
    one = shop()
    name = one.add(1, days=2)
    other = one.add(2, days=1)
    mark(one.at(), SERVER, name, one.clock())
    done = one.replicate()
    assert one.present("offsite") == {other}
    assert "marked deleted" in done.waiting[name]


def test_what_is_marked_deleted_at_the_target_alone_does_not_come_back(shop: Make) -> None:
    one = shop()
    name = one.add(1, days=2)
    one.add(2, days=1)
    one.replicate()
    mark(one.at("offsite"), SERVER, name, one.clock())
    one.replicate()
    assert one.copies(name) == {"local": "complete", "offsite": "deleted"}


def test_damage_at_one_source_is_read_from_the_next_and_told(shop: Make) -> None:
    one = shop(destinations=("local", "second"))
    one.add(1, days=1, content=b"precious")
    key = layout.object_key(named(b"precious").name)
    put(one.at(), key, b"sealed prEcious")
    done = one.replicate()
    assert done.ok, done.trouble
    assert one.whole() == one.whole("second")
    assert any("local" in text and "SHA-256" in text for text in done.copied[0].remarks)


def test_damage_at_every_source_is_told_and_all_else_goes_on(shop: Make) -> None:
    one = shop()
    bad = one.add(1, days=2, content=b"precious")
    child = one.add(2, days=1.5, parent=1)
    good = one.add(3, days=1)
    put(one.at(), layout.object_key(named(b"precious").name), b"sealed prEcious")
    done = one.replicate()
    assert one.present("offsite") == {good}
    assert "SHA-256" in done.waiting[bad]
    assert bad in done.waiting[child]
    rows = {row.backup_id: row for row in one.catalog.replications.list()}
    assert rows[bad].state == "failing"
    assert rows[bad].attempts == 1
    put(one.at(), layout.object_key(named(b"precious").name), b"sealed precious")
    assert one.replicate().ok
    assert one.whole() == one.whole("local")
    assert not one.catalog.replications.list()


def test_objects_that_the_target_is_about_to_remove_are_not_counted_on(shop: Make) -> None:
    one = shop()
    one.add(1, days=1, content=b"x")
    target = one.at("offsite")
    target.initialise(one.clock())
    item = named(b"x")
    put(target, layout.object_key(item.name), b"sealed x")
    one.clock.move(days=3)
    put(target, layout.tombstone_key(item.name), json.dumps({"at": format_time(one.clock())}).encode())
    with Intent([target], "zoo", backup_id(7), clock=lambda: one.clock() - timedelta(days=9)):
        done = one.replicate()
        assert "removing 1 objects" in next(iter(done.waiting.values())), "the older one may count on the tombstone"
    done = one.replicate()
    assert done.ok, done.trouble
    assert (done.copied[0].objects, pool(target)) == (4, {item.name})
    assert not list(target.list(layout.TOMBSTONES))


def test_an_object_in_quarantine_at_the_target_is_sent_anew(shop: Make) -> None:
    one = shop()
    one.add(1, days=1, content=b"x")
    target = one.at("offsite")
    target.initialise(one.clock())
    put(target, layout.object_key(named(b"x").name), b"sealed y")
    put(target, layout.quarantine_key(named(b"x").name), b"{}")
    assert one.replicate().ok
    assert one.whole() == one.whole("local")
    assert not list(target.list(layout.QUARANTINE))


def test_keeps_and_holds_are_written_there_too(shop: Make) -> None:
    one = shop()
    name = one.add(1, days=1)
    keep(one.wiring, name, pinned=True)
    hold(one.wiring, SERVER, "audit", "anna")
    one.replicate()
    kept = kept_at(one.at("offsite"))
    assert kept.backups == {(SERVER, name)}
    assert kept.holds[SERVER].reason == "audit"


def test_a_target_that_is_gone_is_told_once_tried_with_growing_pauses_and_caught_up(shop: Make) -> None:
    one = shop()
    one.add(1, days=1)
    one.replicate()
    name = one.add(2, days=0.5, destinations=("local",))
    marker = one.base / "offsite" / "repository.json"
    marker.rename(one.base / "away")
    waits = []
    for _ in range(3):
        done = one.replicate()
        assert isinstance(done.problem, RefusedError)
        (row,) = one.catalog.replications.list("offsite")
        assert (row.backup_id, row.state) == (name, "failing")
        assert row.not_before is not None
        waits.append(row.not_before - one.clock())
    assert waits == [timedelta(minutes=1), timedelta(minutes=2), timedelta(minutes=4)]
    assert len(one.events(REPLICATION.broken)) == 1
    (one.base / "away").rename(marker)
    assert one.replicate().ok
    one.replicate()
    assert len(one.events(REPLICATION.mended)) == 1
    assert one.copies(name)["offsite"] == "complete"


def test_pauses_grow_to_an_hour_and_no_further() -> None:
    assert [pause_after(count) for count in (0, 1, 5, 6, 7, 1000)] == [
        timedelta(minutes=1),
        timedelta(minutes=2),
        timedelta(minutes=32),
        LONGEST_PAUSE,
        LONGEST_PAUSE,
        LONGEST_PAUSE,
    ]


def test_two_processes_do_not_bring_the_same_place_up_to_date(shop: Make) -> None:
    one = shop()
    one.add(1, days=1)
    with one.wiring.locked(f"replicate-{SERVER}-offsite", "busy"), pytest.raises(BusyError):
        one.replicate()


def test_a_destination_that_the_policy_does_not_name_is_refused(shop: Make) -> None:
    one = shop()
    with pytest.raises(Exception, match="does not name destination"):
        one.replicate("elsewhere")


def test_copies_at_a_required_destination_are_only_verified(shop: Make) -> None:
    one = shop()
    name = one.add(1, days=1)
    done = one.replicate("local")
    assert (done.copied, done.examined.verified) == ((), (name,))
    assert one.verified(name) == {"local"}


def test_a_copy_that_was_swept_at_the_target_by_its_rules_is_not_copied_again(shop: Make) -> None:
    one = shop("{offsite: {keep_fulls: 1}}")
    one.add(1, days=2, destinations=("local",))
    one.replicate()
    newer = one.add(2, days=0.5, destinations=("local",))
    one.replicate()
    apply(one.wiring, SERVER, one.run())
    one.clock.move(days=2)
    sweep_destination(one.wiring, one.at("offsite"))
    one.replicate()
    assert one.present("offsite") == {newer}


def test_copies_that_vanished_though_nobody_marked_them_are_told_and_copied_again(shop: Make) -> None:
    one = shop()
    full = one.add(1, days=2, destinations=("local",))
    child = one.add(2, days=1, parent=1, destinations=("local",))
    one.replicate()
    target = one.at("offsite")
    for info in [*target.list(layout.SERVERS), *target.list(layout.OBJECTS)]:
        target.delete(info.key)
    (one.base / "local" / "repository.json").rename(one.base / "away")
    done = one.replicate()
    assert not done.ok
    assert (done.lost, set(done.waiting)) == ((full, child), {full, child})
    assert one.copies(child) == {"local": "complete", "offsite": "damaged"}
    assert [event.detail for event in one.events(LOST.broken)] == [f"{full}\n{child}"]
    (one.base / "away").rename(one.base / "local" / "repository.json")
    done = one.replicate()
    assert done.ok, done.trouble
    assert [copied.header.backup_id for copied in done.copied] == [full, child]
    assert one.whole() == one.whole("local")
    assert one.verified(child) == {"offsite"}
    assert (len(one.events(LOST.broken)), len(one.events(LOST.mended))) == (1, 1)
    assert one.replicate().lost == ()


def test_a_lost_copy_at_a_required_place_comes_back_too(shop: Make) -> None:
    one = shop()
    name = one.add(1, days=1, destinations=("local",))
    one.replicate()
    one.at().delete(layout.manifest_key(SERVER, name))
    done = one.replicate("local")
    assert (done.ok, done.lost) == (True, (name,))
    assert one.whole() == one.whole("local")
    assert one.copies(name) == {"local": "complete", "offsite": "complete"}


def test_where_nothing_may_be_deleted_an_object_in_quarantine_is_sent_anew_all_the_same(shop: Make) -> None:
    one = shop()
    target = UndeletableDestination("offsite", tree=False)
    one.swap(target)
    name = one.add(1, days=1, content=b"x", destinations=("local",))
    put(target, layout.object_key(named(b"x").name), b"sealed y")
    objects.quarantine(target, named(b"x").name, "rot", one.clock())
    assert one.replicate().ok
    assert one.verified(name) == {"offsite"}
    put(target, layout.object_key(named(b"x").name), b"sealed z")
    assert put_right(target, layout.object_key(named(b"x").name), named(b"x"), [one.at()]) == "local"
    assert objects.quarantined(target) == frozenset()

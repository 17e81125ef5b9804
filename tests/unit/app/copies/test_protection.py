"""A backup is protected when enough copies of it, and of what it builds on, were read again at enough places."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO

from backupd.alerts.rules import PROTECTION, REPLICATION
from backupd.app.context.incidents import Incidents
from backupd.app.copies.protection import (
    ProtectionOfBatches,
    is_protected,
    look,
    protection_of,
    sites_of,
    verified,
    with_protection,
)
from backupd.model.backup_record import BackupKind, BackupState, Copy
from backupd.model.manifest import StoredObject
from backupd.transfer.relay import found_wrong
from storage import layout, objects
from storage.destination import Capability
from tests.support.catalog import samples
from tests.support.catalog.installation import SERVER
from tests.support.dice import thrown
from tests.support.service.shop import Shop
from tests.support.stores.memory import MemoryDestination
from tests.support.stores.stock import named, put

Make = Callable[..., Shop]
STATES = (*["complete"] * 19, "damaged")
TIMES = (None, *[samples.NOON] * 19)


class Checked(MemoryDestination):
    """Says by itself what it holds; counts what is read."""

    def __init__(self, name: str) -> None:
        super().__init__(name, tree=False, initialised=False)
        self.claims: dict[str, str] = {}
        self.reads = 0
        self.audited = True

    @property
    def capabilities(self) -> Capability:
        return Capability.CHECKSUMS | (Capability.AUDITED if self.audited else Capability.NONE)

    def get(self, key: str, *, offset: int = 0, length: int | None = None) -> BinaryIO:
        self.reads += key.startswith(layout.OBJECTS)
        return super().get(key, offset=offset, length=length)

    def checksum(self, key: str) -> str | None:
        with super().get(key) as stream:
            return self.claims.get(key, hashlib.sha256(stream.read()).hexdigest())


def protected(one: Shop) -> dict[str, bool]:
    return {
        record.id: record.as_json()["protected"]
        for record in with_protection(one.wiring, one.catalog.backups.list(SERVER))
    }


def test_a_backup_is_protected_once_both_copies_were_read_again(shop: Make) -> None:
    one = shop()
    name = one.add(1, days=1, destinations=("local",))
    assert protected(one) == {name: False}
    one.replicate()
    assert one.verified(name) == {"offsite"}
    assert protected(one) == {name: False}
    one.replicate("local")
    assert protected(one) == {name: True}


def test_copies_on_the_site_alone_do_not_protect(shop: Make) -> None:
    one = shop(off_site=())
    name = one.add(1, days=1, destinations=("local",))
    one.replicate()
    one.replicate("local")
    assert protected(one) == {name: False}


def test_an_increment_is_as_protected_as_what_it_builds_on(shop: Make) -> None:
    one = shop()
    full = one.add(1, days=2, destinations=("local",))
    child = one.add(2, days=1, parent=1, destinations=("local",))
    one.replicate()
    one.replicate("local")
    assert protected(one) == {full: True, child: True}
    one.catalog.backups.mark_copy_damaged(full, "offsite")
    assert protected(one) == {full: False, child: False}


def test_lists_in_batches_say_of_each_backup_what_a_look_at_all_says(shop: Make) -> None:
    one, rng = shop(), thrown("protection")
    for number in range(1, 120):
        parent = rng.choice([*(samples.backup(number - back).id for back in (1, 1, 1, 1, 2, 2, 3, 0, -4)), "gone"])
        copies = [Copy(place, rng.choice(STATES), samples.NOON, rng.choice(TIMES)) for place in ("local", "offsite")]
        taken = samples.backup(number, server=SERVER if number % 9 else "another", copies=tuple(copies))
        kind = BackupKind.PHYSICAL_INCREMENTAL if number % 5 else BackupKind.PHYSICAL_FULL
        increment = {"parent": parent, "kind": kind} if number % 5 else {"parent": None, "kind": kind}
        state = BackupState.DELETED if number % 17 == 0 else BackupState.COMPLETE
        one.catalog.backups.add(replace(taken, state=state, foreign=number % 13 == 0, **increment))
    everything = tuple(one.catalog.backups.every(foreign=True))
    sites, wanted = sites_of(one.wiring), dict[str, bool]()
    for server in (SERVER, "another"):
        known = [record for record in everything if record.server == server and not record.foreign]
        policy = protection_of(one.wiring, server)
        for record in everything:
            if record.server == server:
                good = record.state is BackupState.COMPLETE and is_protected(
                    record, verified(known, sites), policy, sites
                )
                wanted[record.id] = good
    assert 9 < sum(wanted.values()) < 110, "some are, some are not"
    for size in (1, 2, 7, 120):
        batches, told = ProtectionOfBatches(one.wiring), dict[str, bool]()
        for start in range(0, len(everything), size):
            told |= {record.id: record.protected for record in batches.of(everything[start : start + size])}
        assert told == wanted


def test_a_copy_that_is_not_what_was_stored_is_damaged_and_its_object_is_not_used_again(shop: Make) -> None:
    one = shop()
    name = one.add(1, days=1, content=b"gold", destinations=("local",))
    put(one.at(), layout.object_key(named(b"gold").name), b"sealed lead")
    done = one.replicate("local")
    assert [damage.backups for damage in done.examined.damages] == [(name,)]
    assert one.copies(name) == {"local": "damaged"}
    assert objects.quarantined(one.at()) == {named(b"gold").name}
    assert not done.ok
    again = one.replicate("local")
    assert (again.ok, again.examined.damages, again.damaged) == (False, (), (name,)), "it is damaged still"
    assert "its copy is damaged" in str(again.trouble)
    assert (len(one.events(REPLICATION.broken)), one.events(REPLICATION.mended)) == (1, ())
    put(one.at(), layout.object_key(named(b"gold").name), b"sealed gold")
    one.catalog.backups.mark_copy_verified(name, "local", one.clock())
    one.replicate("local")
    assert len(one.events(REPLICATION.mended)) == 1


def test_what_was_read_lately_for_another_backup_is_not_read_again_and_counts_since_then(shop: Make) -> None:
    one = shop()
    first = one.add(1, days=1, content=b"same", destinations=("local",))
    one.replicate("local")
    at = one.clock()
    one.clock.move(days=2)
    second = one.add(2, days=1, content=b"same", destinations=("local",))
    done = one.replicate("local")
    assert done.examined.bytes == len(b"body") + len(b"unpack") + len(b"runbook")
    assert {copy.verified_at for copy in one.catalog.backups.get(second).copies} == {at}
    one.clock.move(days=6)
    third = one.add(3, days=1, content=b"same", destinations=("local",))
    assert one.replicate("local").examined.bytes > len(b"body") + len(b"unpack") + len(b"runbook"), "too long ago"
    assert {copy.verified_at for copy in one.catalog.backups.get(third).copies} == {one.clock()}
    assert first


def test_where_the_place_audits_itself_nothing_is_read_again(shop: Make) -> None:
    one = shop()
    place = Checked("offsite")
    one.swap(place)
    name = one.add(1, days=1, content=b"gold", destinations=("local",))
    one.replicate()
    assert place.reads == 0
    assert one.verified(name) == {"offsite"}
    key = layout.object_key(named(b"gold").name)
    place.claims[key] = "0" * 64
    assert "destination's SHA-256" in found_wrong(place, key, named(b"gold"))
    assert found_wrong(place, key, StoredObject("x", 1, "0" * 64)).startswith("holds")


def test_a_checksum_from_when_it_was_stored_counts_for_what_was_just_sent_and_for_nothing_else(shop: Make) -> None:
    one = shop()
    place = Checked("offsite")
    place.audited = False
    one.swap(place)
    first = one.add(1, days=2, content=b"gold", destinations=("local",))
    one.replicate()
    assert (place.reads, one.verified(first)) == (0, {"offsite"})
    key = layout.object_key(named(b"gold").name)
    place.claims[key] = named(b"gold").sha256
    put(place, key, b"sealed lead")
    one.clock.move(days=8)
    second = one.add(2, days=0.1, content=b"gold", destinations=("local",))
    done = one.replicate()
    assert place.reads > 0
    assert [damage.key for damage in done.examined.damages] == [key], "it was there already, and had rotted since"
    assert one.verified(second) == {"offsite"}, "put right, and read"
    with place.get(key) as stream:
        assert stream.read() == b"sealed gold"


def test_damage_reaches_every_backup_there_that_shares_the_object(shop: Make) -> None:
    one = shop()
    old = one.add(1, days=30, content=b"shared", destinations=("local",))
    assert one.replicate("local").ok
    one.clock.move(days=8)
    young = one.add(2, days=1, content=b"shared", destinations=("local",))
    put(one.at(), layout.object_key(named(b"shared").name), b"sealed SHARED")
    done = one.replicate("local")
    assert [damage.backups for damage in done.examined.damages] == [(old, young)]
    assert (one.copies(old), one.copies(young)) == ({"local": "damaged"}, {"local": "damaged"})
    assert protected(one) == {old: False, young: False}


def test_a_copy_that_was_found_damaged_is_put_right_once_another_place_has_it_and_read_again(shop: Make) -> None:
    one = shop()
    names = [one.add(number, days=9 - number, content=b"shared", destinations=("local",)) for number in (1, 2)]
    assert one.replicate().ok
    key = layout.object_key(named(b"shared").name)
    put(one.at("offsite"), key, b"sealed SHARED")
    for name in names:
        one.catalog.backups.mark_copy_damaged(name, "offsite")
    objects.quarantine(one.at("offsite"), named(b"shared").name, "rot", one.clock())
    one.clock.move(days=1)
    done = one.replicate()
    assert done.ok, done.trouble
    assert set(done.examined.verified) == set(names)
    assert one.whole() == one.whole("local")
    assert objects.quarantined(one.at("offsite")) == frozenset()


def test_backups_that_do_not_become_protected_in_time_are_told_once_and_when_they_are_again(shop: Make) -> None:
    one = shop(policy="protection: {within: 6h}\n")
    incidents = Incidents(one.catalog)
    name = one.add(1, days=0.1, destinations=("local",))
    look(one.wiring, incidents, SERVER, one.clock())
    assert one.events(PROTECTION.broken) == ()
    one.clock.move(hours=6)
    for _ in range(2):
        look(one.wiring, incidents, SERVER, one.clock())
    (event,) = one.events(PROTECTION.broken)
    assert name in event.message
    assert "0 of 2 destinations" in event.message
    assert "local: complete, not verified yet" in event.detail
    one.replicate()
    one.replicate("local")
    look(one.wiring, incidents, SERVER, one.clock())
    look(one.wiring, incidents, SERVER, one.clock())
    assert len(one.events(PROTECTION.mended)) == 1


def test_a_damaged_copy_is_put_right_from_the_other_place_and_counts_as_verified(shop: Make) -> None:
    one = shop()
    name = one.add(1, days=1, content=b"gold", destinations=("local",))
    one.replicate()
    put(one.at(), layout.object_key(named(b"gold").name), b"sealed lead")
    put(one.at(), layout.runbook_key(SERVER, name), b"scribble")
    done = one.replicate("local")
    assert {damage.repaired_from for damage in done.examined.damages} == {"offsite"}
    assert len(done.examined.damages) == 2
    assert (done.ok, done.examined.verified) == (True, (name,))
    assert one.copies(name) == {"local": "complete", "offsite": "complete"}
    assert objects.quarantined(one.at()) == set()
    assert protected(one) == {name: True}

"""What another destination keeps by its rules, and has not got yet, is not deleted before it is there."""

from __future__ import annotations

from collections.abc import Callable

from backupd.app.context.destination_identity import findings, identities
from backupd.app.copies.protection import with_protection
from backupd.app.retention.deletion import delete, sweep_destination
from tests.support.catalog.installation import SERVER
from tests.support.service.shop import Shop, apply

Make = Callable[..., Shop]
RULES = "{local: {keep_fulls: 1}, offsite: {keep_fulls: 2}}"


def test_rules_hold_what_has_not_arrived_where_it_is_kept_and_nothing_else(shop: Make) -> None:
    one = shop(RULES)
    old, middle, new = one.daily(3, destinations=("local",))[::-1]
    applied = apply(one.wiring, SERVER, one.run())
    assert applied.marked["local"] == (old,), "offsite would not keep the oldest either"
    said = {decision.backup.id: decision for decision in applied.decisions[0].backups}
    assert said[middle].reasons == ("it is not yet at offsite, which keeps it",)
    assert one.replicate().ok
    assert apply(one.wiring, SERVER, one.run()).marked["local"] == (middle,)
    assert one.copies(new) == {"local": "complete", "offsite": "complete"}


def test_what_waits_goes_when_somebody_says_so_or_the_place_is_taken_out_of_the_policy(shop: Make) -> None:
    one = shop(RULES)
    _old, middle, _new = one.daily(3, destinations=("local",))[::-1]
    assert middle in apply(one.wiring, SERVER, one.run(), really=True).marked["local"]
    other = one.add(9, days=0.01, destinations=("local",))
    one.others = ()
    one.write("{local: {keep_fulls: 1}}")
    assert _new in apply(one.wiring, SERVER, one.run()).marked["local"]
    assert one.copies(other) == {"local": "complete"}


def test_what_waits_brings_what_it_builds_on(shop: Make) -> None:
    one = shop("{local: {keep_fulls: 1}, offsite: {recovery_window: 30d}}")
    full = one.add(1, days=3, destinations=("local",))
    child = one.add(2, days=2, parent=1, destinations=("local",))
    one.add(3, days=1, destinations=("local",))
    applied = apply(one.wiring, SERVER, one.run())
    assert applied.marked["local"] == ()
    said = {decision.backup.id: decision for decision in applied.decisions[0].backups}
    assert said[child].grounds[0].rule == "awaited"
    assert said[full].keep


def test_a_backup_that_is_deleted_by_hand_while_it_waits_is_told(shop: Make) -> None:
    one = shop(RULES)
    old, _new = one.add(1, days=2, destinations=("local",)), one.add(2, days=1, destinations=("local",))
    one.catalog.replications.expect("offsite", {old: 1}, one.clock())
    delete(one.wiring, old, now=False)
    one.replicate()
    (event,) = one.events("replication-lost")
    assert (event.detail, event.subject) == (old, "offsite")
    one.replicate()
    assert len(one.events("replication-lost")) == 1


# One place under two names


def test_a_place_under_two_names_is_refused_and_counts_once(shop: Make) -> None:
    one = shop("{local: {keep_fulls: 1}, offsite: {keep_fulls: 9}}", roots={})
    (one.base / "offsite").symlink_to(one.base / "local")
    name = one.add(1, days=1, destinations=("local",))
    (found,) = findings(one.wiring)
    assert found.message.startswith("local and offsite are the same repository")
    done = one.replicate()
    assert done.problem is not None
    assert "destinations offsite and local are the same repository" in done.problem.message
    one.clock.move(days=2)
    (held,) = sweep_destination(one.wiring, one.at())
    assert "destinations local and offsite are the same repository" in held
    assert len(set(identities(one.wiring).values())) == 1
    for place in ("local", "offsite"):
        record = one.catalog.backups.get(name)
        if place not in {copy.destination for copy in record.copies}:
            one.catalog.backups.add_copy(name, record.copies[0].__class__(place, "complete", one.clock()))
        one.catalog.backups.mark_copy_verified(name, place, one.clock())
    (record,) = with_protection(one.wiring, [one.catalog.backups.get(name)])
    assert not record.protected


def test_places_are_looked_at_again_once_the_configuration_leads_elsewhere(shop: Make) -> None:
    one = shop()
    (one.base / "offsite").symlink_to(one.base / "local")
    assert findings(one.wiring)
    one.roots["offsite"] = one.base / "elsewhere"
    one.write("")
    assert identities(one.wiring)["offsite"] == "offsite"
    assert findings(one.wiring) == []
    one.add(1, days=1, destinations=("local",))
    assert one.replicate().ok


def test_copies_at_destinations_that_are_not_configured_any_more_protect_nothing(shop: Make) -> None:
    one = shop()
    name = one.add(1, days=1, destinations=("local",))
    one.replicate()
    one.replicate("local")
    (record,) = with_protection(one.wiring, [one.catalog.backups.get(name)])
    assert record.protected
    one.others = ("cloud",)
    one.off_site = ("cloud",)
    one.write("")
    (record,) = with_protection(one.wiring, [one.catalog.backups.get(name)])
    assert not record.protected

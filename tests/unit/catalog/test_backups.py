"""What is asked of backups in SQL is what reading all of them would tell; and rows of backups that are not where they
belong yet."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest

from backupd.catalog import backups as rows_of_backups
from backupd.catalog.backups import Owner
from backupd.catalog.destinations import FAILING, WAITING
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.backup_record import Ancestor, BackupKind, BackupRecord, BackupState, Copy
from tests.support.catalog import samples
from tests.support.dice import thrown

PLACES = ("local", "offsite", "vault")
NOW = datetime(2026, 11, 21, 4, tzinfo=UTC)
SERVERS = ("crm", "shop", "zoo")


def _fill(catalog: Catalog, rng: Random) -> list[BackupRecord]:
    """Backups with chains (also of another server, broken or in a circle), and rows of what waits; newest first."""
    ids = [samples.backup(number).id for number in range(60)]
    for number in range(60):
        states = [(place, rng.choice(("complete", "complete", "damaged", "deleted"))) for place in PLACES[:2]]
        stored = samples.NOON + timedelta(minutes=number)
        copies = tuple(
            Copy(place, state, stored, verified_at=rng.choice((None, samples.NOON)))
            for place, state in states
            if rng.random() < 0.7
        )
        kind = rng.choice((BackupKind.PHYSICAL_FULL, BackupKind.PHYSICAL_INCREMENTAL))
        catalog.backups.add(
            replace(
                samples.backup(number, server=rng.choice(SERVERS), kind=kind, copies=copies),
                state=rng.choice((BackupState.COMPLETE, BackupState.DAMAGED, BackupState.DELETED)),
                parent=rng.choice([*ids, "gone"]) if kind is BackupKind.PHYSICAL_INCREMENTAL else None,
                finished_at=samples.NOON if number % 7 == 0 else samples.backup(number).finished_at,
                foreign=rng.random() < 0.2,
                pinned=rng.random() < 0.2,
            )
        )
    for place in PLACES:
        catalog.replications.expect(place, dict.fromkeys(rng.sample([*ids, "gone"], 20), 1), samples.NOON)
    everything = [catalog.backups.get(name) for name in ids]
    return sorted(everything, key=lambda one: (one.finished_at, one.id), reverse=True)


def _line(record: BackupRecord, by_id: dict[str, BackupRecord]) -> set[str]:
    found: set[str] = set()
    one: BackupRecord | None = record
    while one is not None and one.id not in found:
        found.add(one.id)
        one = by_id.get(one.parent or "")
    return found


def test_whole_lists_come_in_the_same_order_with_the_same_rows(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_of_backups, "_BATCH", 5)
    everything = _fill(catalog, thrown("lists"))
    assert list(catalog.backups.every(foreign=True)) == everything
    ours = [one for one in everything if not one.foreign]
    assert list(catalog.backups.every()) == ours
    paged, after = list[BackupRecord](), None
    while page := catalog.backups.page(limit=7, after=after):
        paged += page.items
        if (after := page.next) is None:
            break
    assert paged == everything
    assert catalog.backups.foreign() == tuple(one for one in everything if one.foreign)
    for server in SERVERS:
        assert catalog.backups.list(server) == tuple(one for one in ours if one.server == server)
        batches = tuple(catalog.backups.batches([server, "crm"], foreign=True))
        assert sum(batches, ()) == tuple(one for one in everything if one.server in {server, "crm"})
        assert {len(batch) for batch in batches[:-1]} == {5}
        assert catalog.backups.pinned(server) == {one.id for one in everything if one.pinned and one.server == server}
        assert catalog.backups.foreign(server) == tuple(
            one for one in everything if one.foreign and one.server == server
        )


def test_chosen_backups_and_what_they_build_on(catalog: Catalog) -> None:
    rng = thrown("lines")
    everything = _fill(catalog, rng)
    by_id = {one.id: one for one in everything}
    for count in (0, 1, 5, 60):
        chosen = rng.sample(everything, count)
        ids = [one.id for one in chosen]
        assert {one.id: one for one in catalog.backups.by_ids([*ids, "gone"])} == {one.id: one for one in chosen}
        lines = set().union(*(_line(one, by_id) for one in chosen))
        assert {one.id: one for one in catalog.backups.lines(ids)} == {name: by_id[name] for name in lines}
        ancestors = {one.id: one for one in catalog.backups.lineage(ids)}
        assert ancestors == {name: Ancestor.of(by_id[name]) for name in lines if not by_id[name].foreign}


def _assert_absent(
    catalog: Catalog, place: str, alive: set[Owner], present: set[Owner], here: dict[str, BackupRecord]
) -> None:
    servers = {server for server, _id in present}
    left = alive - present
    since = samples.NOON + timedelta(minutes=30)
    stored = {
        (one.server, one.id): copy.stored_at
        for one in here.values()
        for copy in one.copies
        if copy.destination == place
    }
    found = catalog.inventory.absent(place, present, servers)
    others = sorted((one for one in left if one[0] not in servers), key=lambda one: one[1])
    assert {one.owner for one in found.missing} == {one for one in left if one[0] in servers}
    assert found.others == len(others)
    old = [one for one in others if stored[one] < since]
    assert [one.owner for one in catalog.inventory.others(place, servers, before=since, limit=3)] == old[:3]
    assert [one.owner for one in catalog.inventory.others(place, servers, limit=3)] == others[:3]
    if len(others) > 1:
        assert [one.owner for one in catalog.inventory.others(place, servers, after=others[0][1], limit=9)] == others[
            1:10
        ]


def test_what_lies_at_a_destination(catalog: Catalog) -> None:
    rng = thrown("places")
    everything = _fill(catalog, rng)
    backups = catalog.backups
    for place in PLACES:
        here = {one.id: one for one in everything if one.state_at(place)}
        gone = {one.id for one in here.values() if "deleted" in (one.state, one.state_at(place))}
        assert backups.any_at(place) == bool(here)
        assert [(one.id, one.server, one.state, one.copy) for one in backups.at(place)] == [
            (name, one.server, one.state, one.state_at(place)) for name, one in sorted(here.items())
        ]
        assert [one.id for one in backups.at(place, "shop")] == sorted(
            one.id for one in here.values() if one.server == "shop"
        )
        assert {one.id for one in backups.deleted_at(place)} == gone
        assert all(one.is_deleted for one in backups.deleted_at(place))
        assert {one.id for one in backups.deleted_at(place, "shop")} == {
            name for name in gone if here[name].server == "shop"
        }
        assert catalog.inventory.servers(place) == {one.server for one in here.values()}
        assert backups.newest_at(place) == next(
            (one for one in everything if one.state_at(place) == "complete" and not one.foreign), None
        )
        some = [one.id for one in rng.sample(everything, 30)]
        assert {one.id for one in backups.placed(place, some)} == here.keys() & set(some)
        assert {one.id for one in backups.placed(place, some, offered=True)} == {
            name for name in here.keys() & set(some) if here[name].state_at(place) != "deleted"
        }
        alive = {(one.server, one.id) for one in here.values() if one.id not in gone}
        for present in (set(), alive, {*alive, ("zoo", "gone")}, {("of nobody", name) for name in here}):
            _assert_absent(catalog, place, alive, present, here)
        half = set(rng.sample(sorted(alive), len(alive) // 2))
        _assert_absent(catalog, place, alive, half, here)
        _assert_absent(catalog, place, alive, {one for one in half if one[0] == "shop"}, here)
    for server in (None, *SERVERS):
        assert backups.destinations_of(server) == tuple(
            sorted(
                {
                    copy.destination
                    for one in everything
                    if server in (None, one.server) and not one.foreign
                    for copy in one.copies
                }
            )
        )


def test_what_waits_to_be_copied(catalog: Catalog) -> None:
    everything = _fill(catalog, thrown("waiting"))
    rows = catalog.replications
    for server in SERVERS:
        own = {one.id for one in everything if one.server == server and not one.foreign}
        others = {one.id for one in everything if one.server != server and not one.foreign}
        assert rows.of(server) == tuple(row for row in rows.list() if row.backup_id in own)
        for place in PLACES:
            assert rows.of(server, place) == tuple(row for row in rows.list(place) if row.backup_id in own)
            assert rows.not_of_others(server, place) == tuple(
                row.backup_id for row in rows.list(place) if row.backup_id not in others
            )
    for name in ("gone", everything[0].id):
        assert rows.of_backup(name) == tuple(row for row in rows.list() if row.backup_id == name)


def test_what_is_expected_waits_fails_with_a_count_and_is_forgotten_when_it_has_arrived(tmp_path: Path) -> None:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        rows = catalog.replications
        rows.expect("away", {"b1": 10, "b2": 20}, NOW)
        rows.expect("vault", {"b1": 10}, NOW)
        assert [(row.backup_id, row.state, row.bytes_total) for row in rows.list("away")] == [
            ("b2", WAITING, 20),
            ("b1", WAITING, 10),
        ]
        rows.copying("b1", "away", 4, 12, NOW)
        later = NOW + timedelta(minutes=1)
        for number in (1, 2):
            rows.failing("b1", "away", NOW, not_before=later, message="gone")
            assert rows.list("away")[1].attempts == number
        rows.expect("away", {"b1": 10, "b3": 30}, later)
        row = rows.list("away")[2]
        assert (row.state, row.message, row.since, row.not_before, row.bytes_done) == (FAILING, "gone", NOW, later, 4)
        assert row.as_json()["not_before"] == "2026-11-21T04:01:00Z"
        rows.forget("away", ["b1", "b2"])
        assert [(row.destination, row.backup_id) for row in rows.list()] == [("away", "b3"), ("vault", "b1")]

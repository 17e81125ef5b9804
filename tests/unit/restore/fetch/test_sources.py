from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from backupd.model.errors import DamagedError, NotFoundError, RefusedError
from backupd.model.manifest import Body, Header
from backupd.model.server_facts import Position, Receipts, Version
from backupd.process.run_context import RunContext, utc_now
from backupd.transfer.deletion import mark
from backupd.transfer.records.encryption import Unsealer
from restore.fetch.sources import Sources, load_chain, pinned
from storage import layout
from storage.destination import Destination
from tests.support.catalog.samples import server_info
from tests.support.keys import Keys
from tests.support.restores.builder import Builder
from tests.support.stores.memory import MemoryDestination

FULL, FIRST, SECOND = (f"20261121T0{hour}0000Z-7f3a9c0{hour}" for hour in (2, 3, 4))
CHAIN = (FULL, FIRST, SECOND)


def receipts(since: int, until: int, last: int | None = None) -> Receipts:
    kind = "incremental" if since else "full-backuped"
    return Receipts(kind, since, until, last or until, Position("bin.000001", until), "10.11.19", "10.11.19")


class House:
    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.place = MemoryDestination("local")
        for backup, parent, lsns in (
            (FULL, None, receipts(0, 100)),
            (FIRST, FULL, receipts(100, 100, 150)),
            (SECOND, FIRST, receipts(100, 200)),
        ):
            self.put(backup, parent, lsns)

    def put(
        self,
        backup: str,
        parent: str | None,
        lsns: Receipts,
        change: Callable[[Header], Header] = lambda header: header,
        **server: object,
    ) -> None:
        """Put a backup in the place of the one that is called so; ``change``: its clear manifest alone."""
        builder = Builder(self.keys)
        uid = str(server.pop("server_uuid", "uid-1"))
        info = server_info(server_uuid=uid, **server)
        header, body = builder.manifest(
            builder.entries({"ibdata1": b"system"}), info=info, receipts=lsns, backup_id=backup, parent=parent
        )
        builder.put(self.place, change(builder.sealed_for(replace(header, server_uuid=uid), body)))

    def sources(self, *others: Destination) -> Sources:
        return Sources((self.place, *others), Unsealer(self.keys.secret_home))

    def load(self, *chain: str) -> list[Body]:
        loaded, _warnings = load_chain("shop", chain or CHAIN, self.sources())
        return [one.body for one in loaded]

    def broken(self, *chain: str) -> list[str]:
        with pytest.raises(DamagedError, match=r"is incomplete: nothing was fetched") as damaged:
            self.load(*chain)
        assert "restore a backup before the break" in damaged.value.hint
        return list(damaged.value.damages)


@pytest.fixture
def house(keys: Keys) -> House:
    return House(keys)


def test_a_whole_chain_is_loaded_in_order_also_where_log_sequence_numbers_stand_still(house: House) -> None:
    assert [body.facts.backup_id for body in house.load()] == list(CHAIN)
    assert [body.facts.parent for body in house.load()] == [None, FULL, FIRST]


def test_every_missing_member_is_named_at_once(house: House) -> None:
    for backup in (FULL, FIRST):
        house.place.delete(layout.manifest_key("shop", backup))
    told = house.broken()
    assert len(told) == 2
    assert FULL in told[0]
    assert FIRST in told[1]
    with pytest.raises(NotFoundError, match=FULL):
        house.load(FULL)


def test_members_in_another_order_are_no_chain(house: House) -> None:
    assert f"{SECOND} builds on {FIRST}, not on {FULL}" in house.broken(FULL, SECOND, FIRST)
    assert house.broken(FIRST, SECOND)[0].startswith(f"{FIRST} is a physical-incremental backup where a physical-full")
    assert f"{SECOND} builds on {FIRST}, not on {FULL}" in house.broken(FULL, SECOND)


def test_an_increment_on_another_parent_or_from_another_place_is_refused(house: House) -> None:
    house.put(SECOND, FULL, receipts(100, 200))
    assert house.broken() == [f"{SECOND} builds on {FULL}, not on {FIRST}"]
    house.put(SECOND, FIRST, receipts(120, 200))
    assert house.broken() == [f"{SECOND} begins at 120, {FIRST} ends at 100"]
    house.put(SECOND, FIRST, receipts(100, 120))
    assert house.broken() == [f"{SECOND} ends before {FIRST} does"]


def test_an_increment_of_another_server_or_series_is_refused(house: House) -> None:
    house.put(SECOND, FIRST, receipts(100, 200), server_uuid="uid-2")
    assert house.broken() == [f"{SECOND} is of server uid-2, {FIRST} of uid-1"]
    house.put(SECOND, FIRST, receipts(100, 200), server_uuid="")  # a server that did not tell it
    assert len(house.load()) == 3
    house.put(SECOND, FIRST, receipts(100, 200), version=Version(11, 4, 2))
    assert house.broken() == [f"{SECOND} is of mariadb 11.4, {FIRST} of mariadb 10.11"]


def test_a_clear_manifest_that_was_made_to_fit_is_not_believed(house: House) -> None:
    house.put(SECOND, FULL, receipts(100, 200), lambda header: replace(header, parent=FIRST))
    with pytest.raises(DamagedError, match=f"no good copy of the manifest of backup {SECOND}") as damaged:
        house.load()
    assert "the clear manifest is not the one that was sealed with it" in damaged.value.damages[0]


def test_a_chain_of_which_each_destination_has_a_part_is_pinned_where_its_parts_are(house: House) -> None:
    away = MemoryDestination("away")
    for info in list(house.place.list("servers/")):
        if SECOND in info.key:
            with house.place.get(info.key) as stream:
                away.put(info.key, stream)
            house.place.delete(info.key)
    with pinned(house.sources(away), FULL, "shop", CHAIN, RunContext()) as said:
        assert [len(list(place.list(layout.PINS))) for place in (house.place, away)] == [1, 1]
        assert sorted(line.split("has no backup ")[1].split()[0] for line in said) == sorted(CHAIN)
    assert not list(away.list(layout.PINS))


def test_a_member_that_is_nowhere_or_marked_everywhere_is_refused_and_no_pin_stays(house: House) -> None:
    away = MemoryDestination("away")
    mark(house.place, "shop", FIRST, utc_now())
    with (
        pytest.raises(RefusedError, match=f"{FIRST} of shop at destination local is marked deleted"),
        pinned(house.sources(away), FULL, "shop", CHAIN, RunContext()),
    ):
        pytest.fail("it is nowhere")
    assert not list(house.place.list(layout.PINS))

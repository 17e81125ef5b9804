"""Attack 6: somebody who has the public key replaces the manifest of a backup, and all that is sealed with it, by
another one in which everything fits together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from backupd.alerts.rules import TAMPERED
from backupd.model.manifest import Body, Header
from tests.support.e2e.archived import Archive, wired
from tests.support.e2e.house import SERVER, House
from tests.support.hostile.forging import edited, forged
from tests.support.keys import Keys
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


@pytest.fixture
def house(shared_server: PrivateServer, keys: Keys) -> Iterator[House]:
    """With a second place that has the same backups."""
    with short_directory() as base:
        house = House(base, shared_server, keys)
        place = f"  local: {{type: filesystem, path: {house.repository}}}\n"
        house.config.write_text(
            house.config.read_text().replace(place, f"{place}  second: {{type: filesystem, path: {base}/second}}\n")
        )
        policy = base / "policies/gold.yaml"
        policy.write_text(policy.read_text().replace("required: [local]", "required: [local, second]"))
        yield house


def without_tables(header: Header, body: Body) -> tuple[Header, Body]:
    """A backup that holds nothing of the table ``shop.orders``, and says that it is whole."""
    entries = tuple(entry for entry in body.entries if not entry.path.startswith("shop/orders."))
    assert len(entries) < len(body.entries)
    return replace(header, stats=replace(header.stats, files=len(entries))), replace(body, entries=entries)


def open_incidents(house: House) -> list[tuple[str, str]]:
    """(server, place) of those that are open."""
    with wired(house) as wiring:
        events = [one for one in wiring.catalog.events.list() if one.kind in (TAMPERED.broken, TAMPERED.mended)]
    last = {(one.server, one.subject): one.kind for one in reversed(events)}
    return [where for where, kind in last.items() if kind == TAMPERED.broken]


def test_another_manifest_is_not_believed_another_copy_is_used_and_verify_puts_it_right(
    house: House, shared_server: PrivateServer
) -> None:
    taken = house.backup()["id"]
    true = house.manifest(taken).read_bytes()
    forged(house, SERVER, taken, without_tables)
    assert house.manifest(taken).read_bytes() != true
    assert open_incidents(house) == []
    datadir = house.base / "new"
    told = house.restore(datadir)
    assert any("is not what was stored" in line for line in told["warnings"]), told
    with shared_server.connect() as connection:
        wanted = checksum_everything(connection)
    with PrivateServer(datadir=datadir) as restored, restored.connect() as connection:
        assert checksum_everything(connection) == wanted
    assert open_incidents(house) == [(SERVER, "local")]
    assert {copy["destination"]: copy["state"] for copy in house.backups()[0]["copies"]} == {
        "local": "damaged",
        "second": "complete",
    }
    verified = house.ok("verify")
    assert [damage["repaired_from"] for damage in verified["damages"] if damage["key"].endswith("manifest.json")] == [
        "second"
    ]
    assert house.manifest(taken).read_bytes() == true
    house.ok("verify")
    assert open_incidents(house) == []


def test_where_no_other_copy_is_nothing_of_it_is_restored_proved_or_removed(house: House) -> None:
    taken = house.backup()["id"]
    for place in (house.repository, house.base / "second"):
        house.repository = place
        forged(house, SERVER, taken, without_tables)
    house.repository = house.base / "repository"
    assert (
        "is not what was stored"
        in house.fails("restore", SERVER, "--to", "latest", "--datadir", str(house.base / "new")).all
    )
    house.fails("test-restore", SERVER)
    house.fails("verify")
    assert open_incidents(house) == [(SERVER, "local"), (SERVER, "second")]
    objects = house.objects()
    house.run("fsck", "--repair")
    assert house.objects() == objects, "nobody knows what the true one named"


def test_another_description_of_a_binary_log_is_not_believed(house: House, shared_server: PrivateServer) -> None:
    house.backup()
    Archive(house, shared_server, destinations=("local", "second")).take()
    document = next((house.repository / "binlogs").rglob("segment.json"))
    true = document.read_bytes()
    edited(document, sha256="0" * 64)
    verified = house.ok("verify")
    assert [
        (damage["repaired_from"], "not what was stored" in damage["problem"])
        for damage in verified["damages"]
        if damage["key"].endswith("segment.json")
    ] == [("second", True)]
    assert document.read_bytes() == true
    with wired(house) as wiring:
        assert [
            one.kind
            for one in wiring.catalog.events.list()
            if one.subject == "local" and one.kind in (TAMPERED.broken, TAMPERED.mended)
        ] == [TAMPERED.mended, TAMPERED.broken]

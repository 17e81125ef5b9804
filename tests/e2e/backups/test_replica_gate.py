"""A replica as the source of backups: compared with its own source, table by table and GTID by GTID."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from backupd.app.context.settings import load_settings
from backupd.catalog.session import open_catalog
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.replica import catch_up, replica_of
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(
    shutil.which("pt-table-checksum") is None, reason="no pt-table-checksum: scripts/setup --test was not run"
)

SOURCE = "shop-source"
CHECKED = "consistency: {checksum: {schedule: 'every 24h', max_age: 7d, action: %s}}\nwitness: {enabled: true}\n"


class Pair:
    """A house for a replica, whose source is configured, too."""

    def __init__(self, base: Any, keys: Keys, source: PrivateServer, replica: PrivateServer) -> None:
        self.source, self.replica = source, replica
        self.house = House(base, replica, keys)
        self.write("flag")

    def write(self, action: str) -> None:
        house = self.house
        house.policy_extra = CHECKED % action
        house.write()
        text = house.config.read_text()
        roots = {one: one.client_file("root", "") for one in (self.source, self.replica)}
        ours = f"defaults_file: {self.replica.client_file('backupd', 'Service-s3cret-90ab')}, policy: gold}}"
        assert ours in text
        restoring = ours.replace("policy: gold", f"restore_defaults_file: {roots[self.replica]}, policy: gold")
        other = f"  {SOURCE}: {{socket: {self.source.socket}, defaults_file: {roots[self.source]}, policy: gold}}\n"
        house.config.write_text(text.replace(ours, restoring).replace("destinations:\n", other + "destinations:\n", 1))

    def check(self, *, clean: bool) -> dict[str, Any]:
        done = self.house.run("consistency", SERVER, "--check", "--json")
        assert done.code == (0 if clean else 1), done.all
        found: dict[str, Any] = done.json
        return found

    def kinds(self, *wanted: str) -> list[str]:
        """Events of these kinds, oldest first."""
        with open_catalog(load_settings(self.house.config).catalog) as catalog:
            return [one.kind for one in reversed(catalog.events.list(limit=200)) if one.kind in wanted]

    def unlogged(self, *statements: str) -> None:
        with self.replica.connect() as session, session.cursor() as cursor:
            for statement in ("SET SESSION sql_log_bin = 0", *statements):
                cursor.execute(statement)

    def own_writes(self) -> list[str]:
        """What the replica itself has put into its log."""
        state = str(self.replica.scalar("SELECT @@GLOBAL.gtid_binlog_state"))
        return [one for one in state.split(",") if one.split("-")[1:2] == [str(self.replica.server_id)]]


@pytest.fixture
def pair(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with short_directory() as base, PrivateServer(tcp=True) as source:
        source.create_backup_users()
        source.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.orders (id INT PRIMARY KEY, v VARCHAR(50)) ENGINE=InnoDB",
            "INSERT INTO shop.orders VALUES (1, 'a'), (2, 'b'), (3, 'c')",
            "CREATE TABLE shop.quiet (id INT PRIMARY KEY) ENGINE=InnoDB",
        )
        with replica_of(source) as replica:
            monkeypatch.setenv("BACKUPD_RUNTIME", str(base / "run"))
            yield Pair(base, keys, source, replica)


def test_a_row_that_differs_and_an_errant_transaction_are_flagged_or_refused_and_reported_once(pair: Pair) -> None:
    house = pair.house
    first = house.backup()
    assert first["flags"] == []
    assert f"{SERVER} is unchecked: it was never compared with its source" in first["warnings"]
    clean = pair.check(clean=True)
    assert (clean["clean"], clean["checks"][0]["tables"], clean["checks"][0]["source"]) == (True, 2, SOURCE)
    assert pair.own_writes() == [], "a check, a backup and its witness leave no transaction of the replica's own"

    pair.unlogged("UPDATE shop.orders SET v = 'other' WHERE id = 2")
    for _twice in range(2):
        found = pair.check(clean=False)
        assert list(found["replicas"][0]["different"]) == ["`shop`.`orders`"]
    pair.replica.execute("INSERT INTO shop.quiet VALUES (99)")
    record = house.backup()
    assert record["flags"] == ["errant-transactions", "inconsistent-source"]
    assert any("INSERT INTO shop.quiet VALUES (99)" in text for text in record["warnings"]), record["warnings"]
    assert [one["flags"] for one in house.backups() if one["id"] == record["id"]] == [record["flags"]]
    (manifest,) = house.repository.glob(f"servers/{SERVER}/{record['id']}/manifest.json")
    assert json.loads(manifest.read_text())["flags"] == record["flags"]
    planned = house.ok("plan", SERVER, "--to", f"backup:{record['id']}")
    assert sum("(inconsistent-source)" in text for text in planned["warnings"]) == 1
    proof = house.ok("test-restore", SERVER, "--to", f"backup:{record['id']}")
    assert proof["flags"] == record["flags"]
    assert pair.kinds("replica-inconsistent", "replica-consistent") == ["replica-inconsistent"]
    assert pair.kinds("errant-transactions") == ["errant-transactions"]

    pair.write("refuse")
    refused = house.fails("backup", SERVER, "--kind", "full")
    assert "no backup of shop-db1 is taken: 1 table differs" in refused.all
    pair.unlogged("UPDATE shop.orders SET v = 'b' WHERE id = 2", "DELETE FROM shop.quiet WHERE id = 99")
    pair.replica.execute("STOP SLAVE", "RESET MASTER", "START SLAVE")
    catch_up(pair.source, pair.replica)
    pair.check(clean=True)
    assert pair.kinds("replica-inconsistent", "replica-consistent", "errant-transactions-gone") == [
        "replica-inconsistent",
        "errant-transactions-gone",
        "replica-consistent",
    ]
    assert house.backup()["flags"] == []

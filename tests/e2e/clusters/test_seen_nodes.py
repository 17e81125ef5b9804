"""Backups of the nodes of a real Galera cluster: what they record of it, what is foretold of a restored node, and a
stream that goes on with another node."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from backupd.app.backups import rotation_hooks
from backupd.app.backups.rotation_hooks import AFTER, bring_back, presence
from backupd.catalog.backups import Absence
from backupd.engine.server.probe import probe
from backupd.engine.sql.client import Connection
from backupd.model.server_facts import Role
from tests.support import sample
from tests.support.e2e.archived import wired
from tests.support.e2e.house import House
from tests.support.keys import Keys
from tests.support.sample import checksum_everything
from tests.support.servers.galera import Cluster, Node
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, query

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

POLICY = (
    "binlog: {stream: true, checkpoint: 1s}\nhooks: {}\nwitness: {enabled: false}\n"
    "limits: {recv_queue: 5000, flow_control: 90%}\n"
)
NAMES = ("shop-db1", "shop-db2", "shop-db3")
MEMBERS = ("n1", "n2", "n3")


def client(node: Node) -> Connection:
    return Connection(socket=str(node.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)


def configure(house: House, sockets: dict[str, Node]) -> None:
    """The configuration, with these servers in place of the one of a house."""
    house.write()
    lines = house.config.read_text().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if line.startswith("servers:"))
    lines[at + 1 : at + 2] = [
        f"  {name}: {{socket: {node.socket}, "
        f"defaults_file: {node.client_file(SERVICE_USER, SERVICE_PASSWORD)}, policy: gold}}\n"
        for name, node in sockets.items()
    ]
    house.config.write_text("".join(lines))


@contextmanager
def writing(node: Node) -> Iterator[None]:
    stop = threading.Event()

    def write() -> None:
        with node.connect() as session:
            while not stop.wait(0.005):
                query(session, "INSERT INTO shop.order_log (order_id, what) VALUES (1, 'meanwhile')")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    def prepare(node: Node) -> None:
        node.create_backup_users()
        sample.create(node)

    made = Cluster()
    try:
        yield made.start(prepare)
    finally:
        made.remove()


def branches(house: House, server: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = house.ok("timeline", server)["branches"]
    return found


def test_a_backup_of_a_node_knows_its_place_in_the_cluster_and_what_becomes_of_a_restored_node(
    cluster: Cluster, short_tmp: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = cluster.nodes
    house = House(short_tmp, second, keys, policy_extra=POLICY)
    configure(house, dict(zip(NAMES, cluster.nodes, strict=True)))
    info = probe(client(second))
    assert info.role is Role.NODE

    found = [one["message"] for one in house.run("check", "--json").json if "cluster" in one["subject"]]
    assert any(text.startswith("lab (") and "has 3 nodes" in text for text in found), found
    assert not any("is desynced while it is backed up" in text for text in found), "its policy has hooks"

    # -- what it records, under load
    with writing(first):
        assert house.run("run-stream", "shop-db2", "--once").code == 0
        full = house.ok("backup", "shop-db2", "--kind", "full")
        assert house.run("run-stream", "shop-db2", "--once").code == 0
    mark = full["galera"]
    assert (mark["cluster"], mark["node"], mark["evidence"]) == ("lab", "node2", "lock")
    assert mark["uuid"] == first.status("wsrep_cluster_state_uuid")
    assert mark["load"]["samples"] > 0
    assert full["position"]["gtid"].startswith("10-100-"), full["position"]
    datadir = short_tmp / "restored"
    house.ok("restore", "shop-db2", "--to", f"backup:{full['id']}", "--datadir", str(datadir))
    restored = Node(4, lambda: "", settings={}, gcache="8M")
    restored.datadir = datadir
    uuid, seqno = restored.recovered()
    assert f"{uuid}:{seqno.partition(',')[0]}" == f"{mark['uuid']}:{mark['seqno']}"

    with wired(house) as wiring:  # as if it could not be asked under the lock
        (record,) = wiring.catalog.backups.list("shop-db2")
        assert record.node is not None
        wiring.catalog.backups.set_node(record.id, replace(record.node, seqno=-1, evidence=""))
        assert house.ok("backups", "shop-db2")[0]["galera"]["seqno"] == -1
    for said in (f"{uuid}:{mark['seqno']}, which the backup did not record", f"{uuid}:{mark['seqno']}"):
        proof = house.ok("test-restore", "shop-db2", "--to", f"backup:{full['id']}")
        assert {check["name"]: check["detail"] for check in proof["checks"]}["position in the Galera cluster"] == said
    assert house.ok("backups", "shop-db2")[0]["galera"]["evidence"] == "proof"

    # -- what is foretold of a node that is restored from it
    seen = house.ok("cluster", "shop-db1")
    assert [one["server"] for one in seen["donors"]] == list(NAMES)
    (one,) = seen["backups"]
    assert (one["backup"], one["forecast"]["outcome"]) == (full["id"], "ist")

    # -- back in rotation only when it is Synced
    monkeypatch.setattr(rotation_hooks, "SYNCING", timedelta(0))
    with wired(house) as wiring:
        absence = Absence("shop-db2", "20261128T000000Z-00000001", wiring.clock(), "")
        wiring.catalog.absences.begin(absence)
        second.execute("SET GLOBAL wsrep_desync = ON")
        assert not bring_back(wiring, absence, AFTER, timedelta(seconds=5))
        assert presence(wiring, "shop-db2")[0] is False
        second.execute("SET GLOBAL wsrep_desync = OFF")
        second.wait(lambda: second.status("wsrep_local_state_comment") == "Synced", "it is synced")
        assert bring_back(wiring, absence, AFTER, timedelta(seconds=5))
        assert presence(wiring, "shop-db2") == (True, "")

    # -- another node takes over its name: one history
    cluster.settle()
    configure(house, {"shop-db2": third})
    third.execute("INSERT INTO shop.order_log (order_id, what) VALUES (1, 'on the other node')")
    assert house.run("run-stream", "shop-db2", "--once").code == 0
    born, other = branches(house, "shop-db2")
    assert (born["reason"], other["reason"]) == ("first", "node-changed")
    assert other["fork"] is not None, "both have the same GTIDs"
    with writing(first):
        time.sleep(0.5)
    cluster.settle()
    assert house.run("run-stream", "shop-db2", "--once").code == 0
    latest = short_tmp / "latest"
    house.ok("restore", "shop-db2", "--to", "latest", "--datadir", str(latest))
    with PrivateServer(datadir=latest) as copy, copy.connect() as here, third.connect() as there:
        assert checksum_everything(here) == checksum_everything(there)

    # -- the nodes as members of a group
    configure(house, dict(zip(MEMBERS, cluster.nodes, strict=True)))
    text = house.config.read_text().replace(", policy: gold}", "}")
    group = f"servers:\n  shop: {{members: [{', '.join(MEMBERS)}], policy: gold}}\n"
    house.config.write_text(text.replace("servers:\n", group, 1))
    assert house.run("run-stream", "shop", "--once").code == 0
    second.execute("SET GLOBAL wsrep_desync = ON")
    assert "n2 is left: its node is Donor/Desynced, not Synced" in house.run("check", "shop").all
    record = house.ok("backup", "shop", "--kind", "logical")
    assert record["member"]["name"] == "n1"
    assert record["member"]["reason"].startswith(
        "a node that is Synced, 2 other nodes stay in service; n2: its node is"
    )
    second.execute("SET GLOBAL wsrep_desync = OFF")
    first.kill()
    second.wait(lambda: second.status("wsrep_cluster_size") == "2", "it knows that one is gone")
    second.wait(lambda: second.status("wsrep_local_state_comment") == "Synced", "it is synced")
    record = house.ok("backup", "shop", "--kind", "logical")
    assert record["member"]["name"] == "n2"
    assert "n1: it cannot be asked" in record["member"]["reason"]

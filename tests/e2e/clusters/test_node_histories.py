"""What happens to a node besides: backupd dies while the node is desynced, another node goes on with GTIDs of its own,
and random histories of a cluster, held against nodes that were never down."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import httpx
import pymysql
import pytest

from tests.e2e.clusters.test_seen_nodes import NAMES, branches, configure
from tests.support.dice import SOAK, rounds, thrown
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.lab import Lab, burst, die, fill, forget_cache, laboratory, writing
from tests.support.e2e.service import ONCE_A_YEAR, serving, until
from tests.support.keys import Keys
from tests.support.sample import checksum_everything
from tests.support.servers.galera import Cluster, Node, state_of
from tests.support.servers.mariadb import PrivateServer
from tests.support.service.serving import held_port

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


@SOAK
def test_a_node_is_back_in_rotation_only_when_it_is_synced_also_after_a_kill(keys: Keys) -> None:
    with laboratory(keys, gtid_mode=True) as lab, held_port() as port:
        lab.config_extra = f"api: {{listen: '127.0.0.1:{port}'}}\n"
        lab.write()
        (lab.base / "policies" / "gold.yaml").write_text(f"{ONCE_A_YEAR}hooks: {{}}\n")
        node, second, _third = lab.cluster.nodes

        def health() -> int:
            try:
                return httpx.get(f"http://127.0.0.1:{port}/healthz/servers/{SERVER}", timeout=30).status_code
            except httpx.TransportError:
                return 0

        def is_desynced() -> bool:
            if node.status("wsrep_local_state_comment") != "Donor/Desynced":
                return False
            node.execute("SET GLOBAL wsrep_desync = ON")  # and stays so
            return True

        with serving(lab), writing(second):
            until(lambda: health() == 200, lambda: "an answer of the service")
            lab.kill_when(is_desynced, "backup", SERVER, "--kind", "full")
            for _second in range(20):
                assert health() == 503
                assert node.status("wsrep_local_state_comment") == "Donor/Desynced"
                time.sleep(0.25)
            node.execute("SET GLOBAL wsrep_desync = OFF")
            until(lambda: health() == 200, lambda: "the node's return")
            assert node.status("wsrep_local_state_comment") == "Synced"


@SOAK
@pytest.mark.parametrize("own_domains", [True, False])
def test_another_node_goes_on_behind_the_xid_although_its_gtids_are_its_own(
    short_tmp: Path, keys: Keys, own_domains: bool
) -> None:
    """With domains of their own, and with the same one, where a GTID of one node is another transaction on another."""
    settings = {} if own_domains else {"gtid_domain_id": 0}
    cluster = Cluster(gtid_mode=False, settings=settings)
    try:
        cluster.start(fill)
        first, second, third = cluster.nodes
        house = House(
            short_tmp, second, keys, policy_extra="binlog: {stream: true, checkpoint: 1s}\nwitness: {enabled: false}\n"
        )
        configure(house, dict(zip(NAMES, cluster.nodes, strict=True)))
        with writing(first, second):
            assert house.run("run-stream", NAMES[1], "--once").code == 0
            house.ok("backup", NAMES[1], "--kind", "full")
            time.sleep(0.5)
        second.execute("CREATE TABLE shop.trailing (i INT PRIMARY KEY)", "ALTER TABLE shop.orders ADD INDEX (client)")
        cluster.settle()
        assert house.run("run-stream", NAMES[1], "--once").code == 0
        with writing(first):
            time.sleep(0.3)
        cluster.settle()

        configure(house, {NAMES[1]: third})
        assert house.run("run-stream", NAMES[1], "--once").code == 0
        _born, other = branches(house, NAMES[1])
        assert (other["reason"], bool(other["fork"])) == ("node-changed", True), other
        with writing(first, third):
            time.sleep(0.5)
        third.execute("ALTER TABLE shop.trailing ADD j INT")
        cluster.settle()
        assert house.run("run-stream", NAMES[1], "--once").code == 0
        latest = short_tmp / "latest"
        outcome = house.ok("restore", NAMES[1], "--to", "latest", "--datadir", str(latest))
        assert outcome["replay"]["transactions"] > 0
        with PrivateServer(datadir=latest) as copy, copy.connect() as here, third.connect() as there:
            assert checksum_everything(here) == checksum_everything(there)
            keys_of = "SELECT COUNT(*) FROM information_schema.STATISTICS WHERE TABLE_SCHEMA = 'shop'"
            assert copy.scalar(keys_of) == third.scalar(keys_of), "no index is there twice"
    finally:
        cluster.remove()


def happen(lab: Lab, dice: random.Random, number: int) -> None:
    """One thing of what uses up seqnos of a cluster."""
    node, second, third = lab.cluster.nodes
    kind = dice.choice(("rows", "rows", "definition", "conflict", "view"))
    one = dice.choice((node, second, third))
    if kind == "rows":
        for _row in range(dice.randint(1, 20)):
            one.execute("INSERT INTO shop.orders (client, note) VALUES (1, 'at random')")
    elif kind == "definition":
        one.execute(
            dice.choice(
                (
                    f"CREATE TABLE shop.t{number} (i INT PRIMARY KEY)",
                    f"ALTER TABLE shop.orders ADD INDEX i{number} (client)",
                    f"ALTER TABLE shop.stock ADD c{number} INT",
                )
            )
        )
    elif kind == "conflict":
        clash(second, third)
    else:
        third.stop()
        third.start()


def clash(one: Node, other: Node) -> None:
    """Both change the same row, so that certifications fail."""

    def change(node: Node) -> None:
        with node.connect() as connection, connection.cursor() as cursor:
            for _time in range(40):
                try:
                    cursor.execute("UPDATE shop.stock SET count = count + 1 WHERE id = 1")
                except pymysql.err.OperationalError:
                    continue  # the other one was first

    threads = [threading.Thread(target=change, args=(node,)) for node in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@SOAK
def test_after_random_histories_a_node_is_what_it_would_have_been(keys: Keys) -> None:
    dice = thrown("random histories of a cluster")
    for _round in range(rounds(1)):
        with laboratory(keys, gtid_mode=dice.random() < 0.5) as lab:
            node, second, third = lab.cluster.nodes
            lab.backup()
            for number in range(dice.randint(3, 10)):
                happen(lab, dice, number)
            lab.cluster.settle()
            burst(node, 400)
            for other in (second, third):
                forget_cache(other)
            burst(node, 60)
            for number in range(100, 100 + dice.randint(3, 10)):
                happen(lab, dice, number)
            lab.cluster.settle()
            Archive(lab, node).take()
            happen(lab, dice, 200)
            with writing(second):
                die(node)
                outcome = lab.rejoin("--to", "latest")
            assert outcome["join"]["outcome"] == "ist", outcome
            lab.cluster.settle()
            node.execute("INSERT INTO shop.orders (client, note) VALUES (1, 'afterwards')")
            lab.cluster.settle()
            assert state_of(node, "shop") == state_of(second, "shop") == state_of(third, "shop")

"""A node of a Galera cluster is killed and its data directory deleted while clients write to the others: it comes back
out of its backups by IST, and is equal to nodes that were never down."""

from __future__ import annotations

import os

import pytest

from tests.support.dice import SOAK
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER
from tests.support.e2e.lab import burst, die, forget_cache, laboratory, writing
from tests.support.keys import Keys
from tests.support.servers.galera import Cluster, Node, state_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")


def assert_equal(cluster: Cluster) -> None:
    """All nodes have the same, and what is written on each arrives on each other."""
    cluster.settle()
    first, second, third = cluster.nodes
    assert first.status("wsrep_cluster_size") == "3"
    assert state_of(first, "shop") == state_of(second, "shop") == state_of(third, "shop")
    for number, node in enumerate(cluster.nodes):
        node.execute(f"INSERT INTO shop.orders (client, note) VALUES ({number}, 'after it on {node.name}')")
        cluster.settle()
    found = [state_of(node, "shop") for node in cluster.nodes]
    assert found[0] == found[1] == found[2]
    assert first.scalar("SELECT COUNT(*) FROM shop.orders WHERE note LIKE 'after it on%'") % 3 == 0


@pytest.mark.parametrize("gtid_mode", [True, pytest.param(False, marks=SOAK)], ids=["gtid", "no-gtid"])
def test_a_lost_node_comes_back_by_ist_from_increments_and_from_a_replay(keys: Keys, gtid_mode: bool) -> None:
    with laboratory(keys, gtid_mode=gtid_mode) as lab:
        node, second, third = lab.cluster.nodes
        full = lab.backup()["id"]
        if gtid_mode:
            with writing(second, third):
                for _number in range(2):
                    last = lab.ok("backup", SERVER, "--kind", "incremental")["id"]
                die(node)
                outcome = lab.rejoin("--to", f"backup:{last}")
            assert outcome["join"]["outcome"] == "ist", outcome
            assert outcome["join"]["first"] == outcome["node"]["seqno"] + 1
            assert outcome["join"]["compared"]["differing"] == []
            assert_equal(lab.cluster)
            full = lab.backup()["id"]

        burst(node, 400)
        for other in (second, third):
            forget_cache(other)
        archive = Archive(lab, node)
        with writing(node, second, third):
            node.wait(lambda: node.last_committed > second_start(second) + 50, "transactions of rows")
        node.execute(
            f"CREATE TABLE shop.late{int(gtid_mode)} (i INT PRIMARY KEY)", "ALTER TABLE shop.orders ADD INDEX (client)"
        )
        archive.take()
        with writing(second, third):
            die(node)
            outcome = lab.rejoin("--to", "latest")
        assert outcome["backup"] == full
        assert outcome["join"]["outcome"] == "ist", outcome
        assert outcome["replay"]["transactions"] > 0
        assert any("statements at the end of the binary logs were not replayed" in one for one in outcome["warnings"])
        assert_equal(lab.cluster)


def second_start(node: Node) -> int:
    return int(node.status("wsrep_local_cached_downto"))

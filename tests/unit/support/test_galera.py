"""The cluster that other tests are about."""

from __future__ import annotations

import os

import pytest

from tests.support.servers.galera import Cluster, state_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="servers of another user are started")


def test_what_is_written_on_each_node_arrives_on_all_and_a_killed_one_comes_back_by_ist() -> None:
    with Cluster() as cluster:
        first, second, third = cluster.nodes
        first.execute("CREATE DATABASE shop", "CREATE TABLE shop.t (i INT PRIMARY KEY, v VARCHAR(20))")
        for number, node in enumerate(cluster.nodes):
            cluster.settle()
            node.execute(f"INSERT INTO shop.t VALUES ({number}, 'of {node.name}')")
        third.kill()
        position = third.recovered()
        first.execute("INSERT INTO shop.t VALUES (7, 'while it was dead')")
        third.start(extra=[f"--wsrep-start-position={':'.join(position)}"])
        cluster.settle()
        assert first.status("wsrep_cluster_size") == "3"
        assert "SST completed on joiner" not in third.log_text()
        assert state_of(first, "shop") == state_of(second, "shop") == state_of(third, "shop")
        assert first.scalar("SELECT COUNT(*) FROM shop.t") == 4

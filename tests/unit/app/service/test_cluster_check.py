"""What is said of the settings of a cluster's nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backupd.backup.cluster_checks import NodeLook, examine_cluster
from backupd.engine.server.wsrep import wsrep_state
from tests.unit.engine.test_wsrep import STATUS, VARIABLES

SETTINGS = {
    "log_bin": "ON",
    "log_slave_updates": "ON",
    "gtid_strict_mode": "OFF",
    "binlog_format": "ROW",
    "server_id": "100",
}


def node(number: int, *, wsrep: dict[str, str] | None = None, **settings: str) -> NodeLook:
    state = wsrep_state({**VARIABLES, "wsrep_node_name": f"node{number}", **(wsrep or {})}, STATUS)
    return NodeLook(
        f"db{number}",
        replace(state, state="Synced"),
        {**SETTINGS, "gtid_domain_id": f"2{number}", **settings},
        archive="/var/log/sst",
        hooks=True,
    )


def said(*nodes: NodeLook) -> list[str]:
    return [one.message for one in examine_cluster(nodes) if one.severity != "ok"]


def test_a_cluster_in_order_has_nothing_said_of_it_but_what_it_is() -> None:
    (found,) = examine_cluster([node(1), node(2), node(3)])
    assert found.message.startswith("lab (5c3a1f2e")
    assert found.message.endswith("has 3 nodes; configured are db1 Synced, db2 Synced, db3 Synced")


@pytest.mark.parametrize(
    ("third", "words"),
    [
        (node(3, binlog_format="MIXED"), "binlog_format is MIXED on db3"),
        (node(3, gtid_strict_mode="ON"), "gtid_strict_mode differs between nodes"),
        (node(3, server_id="101"), "server_id differs between nodes"),
        (node(3, gtid_domain_id="22"), "gtid_domain_id is the same on db2, db3"),
        (node(3, wsrep={"wsrep_gtid_mode": "OFF"}), "wsrep_gtid_mode is OFF on db3 only"),
        (node(3, wsrep={"wsrep_gtid_domain_id": "11"}), "wsrep_gtid_domain_id differs between nodes (10, 11)"),
        (node(3, wsrep={"wsrep_sst_method": "rsync"}), "wsrep_sst_method is rsync on db3"),
        (replace(node(3), archive=""), "db3: an SST keeps its logs in a folder under /tmp"),
        (replace(node(3), hooks=False), "db3 is desynced while it is backed up"),
    ],
)
def test_one_setting_that_is_otherwise_is_named_with_its_node(third: NodeLook, words: str) -> None:
    (message,) = said(node(1), node(2), third)
    assert message.startswith(words)


def test_fewer_than_two_members_that_log_cannot_take_over_the_log() -> None:
    (message,) = said(node(1), node(2, log_slave_updates="OFF"), node(3, log_bin="OFF"))
    assert message.startswith("only db1 writes a binary log of all that the cluster commits")
    (message,) = said(*(node(number, log_bin="OFF") for number in (1, 2, 3)))
    assert message.startswith("no node writes")


def test_members_that_are_not_configured_or_apart_are_missed() -> None:
    (message,) = said(node(1), node(2))
    assert message.startswith("2 of the cluster's 3 nodes are configured")
    apart = node(3)
    (message,) = said(node(1), node(2), replace(apart, state=replace(apart.state, status="non-Primary")))
    assert message.startswith("db3 is not in the part of the cluster that goes on")


def test_two_clusters_of_one_uuid_are_told() -> None:
    copied = node(3, wsrep={"wsrep_node_name": "copy1"})
    copied = replace(copied, state=replace(copied.state, incoming=("10.9.0.1:3306",)))
    (message,) = said(node(1), node(2), copied)
    assert message.startswith("db1 and db3 are of two clusters that have the same uuid")


def test_gtids_of_each_node_s_own_and_strict_order_stop_replicas() -> None:
    off = [
        node(number, wsrep={"wsrep_gtid_mode": "OFF"}, gtid_domain_id="0", gtid_strict_mode="ON")
        for number in (1, 2, 3)
    ]
    modes, shared, strict = said(*off)
    assert modes.startswith("wsrep_gtid_mode is OFF: each node gives GTIDs of its own")
    assert shared.startswith("gtid_domain_id is the same on db1, db2, db3")
    assert strict.startswith("gtid_strict_mode is ON, wsrep_gtid_mode is OFF")

"""A node of a Galera cluster, by the variables and status that MariaDB 10.11.19 with Galera 26.4.23 reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backupd.engine.server.wsrep import (
    cluster_position,
    is_node,
    provider_options,
    recovered_positions,
    size_of,
    wsrep_state,
)
from backupd.model.server_facts import ClusterPosition

UUID = "5c3a1f2e-c0de-11f0-8000-0242ac110002"
VARIABLES = {
    "wsrep_on": "ON",
    "wsrep_provider": "/usr/lib/galera/libgalera_smm.so",
    "wsrep_provider_options": "base_host = 127.0.0.1; gcache.size = 512M; gcache.recover = yes; gmcast.segment = 0; ",
    "wsrep_cluster_name": "lab",
    "wsrep_node_name": "node2",
    "wsrep_gtid_mode": "ON",
    "wsrep_gtid_domain_id": "10",
    "wsrep_sst_method": "mariabackup",
}
STATUS = {
    "wsrep_cluster_state_uuid": UUID,
    "wsrep_last_committed": "1192",
    "wsrep_cluster_size": "3",
    "wsrep_cluster_status": "Primary",
    "wsrep_local_state_comment": "Donor/Desynced",
    "wsrep_local_cached_downto": "386",
    "wsrep_replicated_bytes": "1000",
    "wsrep_received_bytes": "234",
    "wsrep_desync_count": "1",
    "wsrep_local_recv_queue": "238",
    "wsrep_local_send_queue": "0",
    "wsrep_flow_control_paused_ns": "12",
    "wsrep_flow_control_sent": "3",
    "wsrep_incoming_addresses": "127.0.0.1:43062,127.0.0.1:43061,",
    "wsrep_provider_version": "26.4.23(r6bd4e2c)",
}


def test_a_node_says_where_its_cluster_is_and_how_far_its_cache_reaches_back() -> None:
    state = wsrep_state(VARIABLES, STATUS)
    assert state.position == ClusterPosition(UUID, 1192)
    assert (state.name, state.node, state.size, state.cached_downto) == ("lab", "node2", 3, 386)
    assert (state.gcache_bytes, state.written_bytes) == (512 * 2**20, 1234)
    assert (state.gtid_mode, state.gtid_domain) == (True, 10)
    assert (state.desync_count, state.recv_queue, state.flow_sent) == (1, 238, 3)
    assert state.incoming == ("127.0.0.1:43061", "127.0.0.1:43062")
    assert state.words == "node2 of lab is Donor/Desynced (Primary, 3 nodes)"
    assert type(state).from_json(state.as_json()) == state


def test_a_node_is_in_rotation_only_when_synced_in_the_part_that_goes_on() -> None:
    donor = wsrep_state(VARIABLES, STATUS)
    assert not donor.is_synced
    assert replace(donor, state="Synced").is_synced
    assert not replace(donor, state="Synced", status="non-Primary").is_synced


def test_an_empty_cache_and_no_position_are_not_taken_for_numbers() -> None:
    for minus_one in ("-1", "18446744073709551615"):
        state = wsrep_state(
            VARIABLES, STATUS | {"wsrep_local_cached_downto": minus_one, "wsrep_last_committed": minus_one}
        )
        assert state.cached_downto is None
        assert state.position.seqno == -1


@pytest.mark.parametrize(
    ("changed", "node"),
    [
        ({}, True),
        ({"wsrep_on": "OFF"}, False),
        ({"wsrep_provider": "none"}, False),
        ({"wsrep_provider": ""}, False),
    ],
)
def test_a_server_without_a_provider_is_no_node(changed: dict[str, str], node: bool) -> None:
    assert is_node({**VARIABLES, **changed}) is node
    assert not is_node({})


@pytest.mark.parametrize(
    ("text", "seqno"),
    [
        (f"{UUID}:1192 10", 1192),  # of the tool
        (f"{UUID}:1192 0", 1192),  # of a prepare, without a line end
        (f"{UUID}:1192\n", 1192),
        (f"{UUID.upper()}:8203,10-100-8200", 8203),  # of a server's recovery
        (f"{UUID}:0", 0),
        (f"{UUID}:-1", None),
        ("00000000-0000-0000-0000-000000000000:5", None),
        (UUID, None),
        ("", None),
        (f"{UUID}:12x", None),
    ],
)
def test_a_position_is_read_without_its_domain(text: str, seqno: int | None) -> None:
    found = cluster_position(text)
    assert found == (None if seqno is None else ClusterPosition(UUID, seqno))


def test_a_prepare_says_once_per_step_what_it_recovered() -> None:
    log = f"""
mariabackup: Recovered WSREP position: {UUID}:1192 domain_id: 0
[00] 2026-11-28 10:00:00 completed OK!
mariabackup: Recovered WSREP position: {UUID}:6343 domain_id: 0
"""
    assert [one.seqno for one in recovered_positions(log)] == [1192, 6343]
    assert recovered_positions("completed OK!") == ()


def test_options_of_the_provider_are_pairs_and_sizes_have_units() -> None:
    options = provider_options(VARIABLES["wsrep_provider_options"])
    assert options["gcache.recover"] == "yes"
    assert [size_of(text) for text in ("512M", "1G", "134217728", "16k", "", "much")] == [
        512 * 2**20,
        2**30,
        134217728,
        16384,
        0,
        0,
    ]

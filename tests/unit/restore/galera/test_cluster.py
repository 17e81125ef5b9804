"""Which members can send what a node lacks, and when a node has what they lack."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backupd.engine.sql.client import Connection
from backupd.model.errors import ConfigurationError, RefusedError
from backupd.model.server_facts import ClusterPosition, WsrepState
from restore.galera import cluster as module
from restore.galera.cluster import Cluster, look, refuse_clones
from restore.galera.node import refuse_no_node
from restore.galera.position import prepared_position, refuse_unlike_record

UUID = "0b9cbe35-cd8b-11f0-bb2f-6e4ab2a3b9c1"
OTHER = "1b9cbe35-cd8b-11f0-bb2f-6e4ab2a3b9c1"
STATE = WsrepState(
    ClusterPosition(UUID, 60800), "lab", "node1", 2, "Primary", "Synced", 60698, 0, 0, True, 10, 0, 0, 0, 0, 0
)  # fmt: skip


def cluster(*downto: int | None) -> Cluster:
    members = {f"node{number}": replace(STATE, cached_downto=value) for number, value in enumerate(downto, start=1)}
    return Cluster("lab", members, {})


@pytest.mark.parametrize(("seqno", "donors"), [(60697, ("node1",)), (60696, ()), (60800, ("node1", "node2"))])
def test_a_member_can_send_what_is_behind_its_oldest_seqno_exactly(seqno: int, donors: tuple[str, ...]) -> None:
    assert cluster(60698, 60790, None).donors(seqno) == donors


def test_a_member_that_is_no_synced_one_sends_nothing() -> None:
    assert Cluster("lab", {"node1": replace(STATE, state="Joined")}, {}).donors(60790) == ()


def test_a_node_with_more_than_the_cluster_is_refused_with_the_number() -> None:
    cluster(1).refuse_ahead(ClusterPosition(UUID, 60800), "the node")
    with pytest.raises(RefusedError, match="the node has 17 transactions that the cluster lacks"):
        cluster(1).refuse_ahead(ClusterPosition(UUID, 60817), "the node")


def test_a_cluster_of_which_nobody_answers_is_refused_by_name() -> None:
    with pytest.raises(RefusedError) as caught:
        look("lab", {"node2": Connection(socket="/nowhere/s.sock", user="x")})
    assert "no member of the cluster lab" in caught.value.message
    assert "node2" in caught.value.detail


def test_members_of_a_copy_of_the_cluster_are_refused() -> None:
    mine = replace(STATE, incoming=("10.0.0.1:3306", "10.0.0.2:3306"))
    joined = replace(STATE, incoming=("10.0.0.2:3306", "10.0.0.3:3306"))  # before and after a node came
    copied = replace(STATE, incoming=("10.9.0.1:3306",))
    silent = replace(STATE, incoming=())
    refuse_clones("lab", {"node1": mine, "node2": joined, "node3": silent})
    with pytest.raises(RefusedError, match="two clusters that have the same uuid") as caught:
        refuse_clones("lab", {"node1": mine, "node2": joined, "copy": copied})
    assert "copy: with 10.9.0.1:3306, at seqno 60800" in caught.value.detail
    assert not mine.is_apart_from(replace(copied, status="non-Primary"))
    assert not mine.is_apart_from(replace(copied, position=ClusterPosition(OTHER, 60800)))


def prepared(folder: Path, *lines: str) -> ClusterPosition:
    for number, line in enumerate(lines, start=1):
        (folder / f"prepare-{number}.log").write_text(line)
    return prepared_position(folder, UUID)


def step(seqno: int, uuid: str = UUID) -> str:
    return f"mariabackup: Recovered WSREP position: {uuid}:{seqno} domain_id: 0\n"


def test_the_last_step_of_a_prepare_says_where_the_copy_is(short_tmp: Path) -> None:
    assert prepared(short_tmp, step(1192), step(6343), step(6343)) == ClusterPosition(UUID, 6343)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([step(6343), step(1192)], "do not follow each other"),
        ([step(1192), step(6343, OTHER)], f"{UUID}:1192, then {OTHER}:6343"),
        ([step(1192, OTHER)], "of another cluster"),
        (["completed OK!"], "not a backup of a Galera node"),
    ],
)
def test_steps_that_do_not_fit_are_refused_with_both_positions(lines: list[str], words: str, short_tmp: Path) -> None:
    with pytest.raises(RefusedError, match=words):
        prepared(short_tmp, *lines)


def test_a_copy_that_is_not_where_the_backups_record_says_is_refused_or_told() -> None:
    at = ClusterPosition(UUID, 500)
    assert refuse_unlike_record(at, None) == refuse_unlike_record(at, at) == ""
    assert "sends from 501 on" in refuse_unlike_record(at, ClusterPosition(UUID, 501))
    for recorded in (ClusterPosition(UUID, 499), ClusterPosition(OTHER, 500)):
        with pytest.raises(RefusedError, match=f"{UUID}:500.*{recorded}"):
            refuse_unlike_record(at, recorded)


def test_a_backup_of_no_node_is_refused_with_what_to_do_instead(short_tmp: Path) -> None:
    with pytest.raises(RefusedError, match="not a backup of a Galera node") as caught:
        prepared(short_tmp, "completed OK!\n")
    assert "--mode new-server" in caught.value.hint


@pytest.mark.parametrize("text", ["[mysqld]\n", "[mysqld]\nwsrep_on=OFF\nwsrep_cluster_address=gcomm://a\n"])
def test_an_option_file_of_no_node_is_named(short_tmp: Path, text: str) -> None:
    file = short_tmp / "my.cnf"
    file.write_text(text)
    with pytest.raises(RefusedError, match=f"{file} does not make a server a node") as caught:
        refuse_no_node(file)
    assert "server_defaults_file" in caught.value.hint
    file.write_text("[galera]\nwsrep-on=ON\nwsrep_cluster_address=gcomm://a,b\n")
    refuse_no_node(file)


def test_an_option_file_that_cannot_be_read_is_named(short_tmp: Path) -> None:
    file = short_tmp / "my.cnf"
    file.write_text("[mysqld]\nwsrep_on=ON\n!include /nowhere/else.cnf\n")
    with pytest.raises(ConfigurationError) as caught:
        refuse_no_node(file)
    assert "/nowhere/else.cnf" in str(caught.value)


def test_members_of_two_clusters_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"node2": STATE, "node3": replace(STATE, position=ClusterPosition(OTHER, 7))}

    class Played(Connection):
        def connect(self) -> Any:
            return nullcontext(states[self.user])

    monkeypatch.setattr(module, "probe_wsrep", lambda session: session)
    with pytest.raises(RefusedError, match="the members of lab are of different clusters") as caught:
        look("lab", {name: Played(socket="/s", user=name) for name in states})
    assert f"node3: {OTHER}:7" in caught.value.detail

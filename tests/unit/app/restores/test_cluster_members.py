"""Which configured servers a node comes back to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backupd.app.context.settings import ServerSettings, load_settings
from backupd.app.restores import cluster_members
from backupd.app.restores.cluster_members import galera_spec
from backupd.app.restores.request import RestoreRequest
from backupd.model.errors import RefusedError, UnknownNameError
from restore.galera.rejoin import GaleraSpec

SINGLE = """
  shop-db1: {socket: /run/1.sock, user: b, policy: gold, server_defaults_file: /etc/node1.cnf}
  shop-db2: {socket: /run/2.sock, user: b, policy: gold}
  other: {socket: /run/3.sock, user: b, policy: gold}
"""
GROUP = """
  shop: {members: [shop-db1, shop-db2, shop-db3], policy: gold}
  shop-db1: {socket: /run/1.sock, user: b, server_defaults_file: /etc/node1.cnf}
  shop-db2: {socket: /run/2.sock, user: b}
  shop-db3: {socket: /run/3.sock, user: b}
"""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The specification for a request, with these servers and the clusters that they run in."""

    def spec(servers: str, clusters: Mapping[str, str], **request: str) -> GaleraSpec:
        policies = tmp_path / "policies"
        policies.mkdir(exist_ok=True)
        (policies / "gold.yaml").write_text('physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n')
        file = tmp_path / "backupd.yaml"
        file.write_text(
            f"catalog: sqlite:///{tmp_path}/catalog.db\nspool: {tmp_path}/spool\npolicies: {policies}\n"
            f"servers:{servers}destinations:\n  local: {{type: filesystem, path: {tmp_path}/repository}}\n"
            f"encryption: {{gnupg_home: {tmp_path}, recipients: [ops@example.com]}}\n"
        )

        def asked(server: ServerSettings) -> Any:
            cluster = clusters.get(server.member or server.name)
            return cluster_members._Way(server, cluster or "", None if cluster is None else server.connection())

        monkeypatch.setattr(cluster_members, "_asked", asked)
        wiring: Any = SimpleNamespace(settings=load_settings(file))
        values: dict[str, Any] = {"server": "shop-db1", "cluster": "lab", **request}
        return galera_spec(wiring, RestoreRequest(target="latest", mode="galera", **values))

    return spec


def test_the_members_are_servers_that_run_in_the_cluster_of_that_name(found: Any) -> None:
    spec = found(SINGLE, {"shop-db2": "lab", "other": "another"})
    assert list(spec.members) == ["shop-db2"]
    assert (spec.node.socket, spec.option_file) == ("/run/1.sock", Path("/etc/node1.cnf"))


def test_the_node_of_a_group_is_its_only_member_that_does_not_run(found: Any) -> None:
    spec = found(GROUP, {"shop-db2": "lab", "shop-db3": "lab"}, server="shop", cluster="shop")
    assert sorted(spec.members) == ["shop-db2", "shop-db3"]
    assert (spec.node.socket, spec.option_file) == ("/run/1.sock", Path("/etc/node1.cnf"))


def test_where_several_members_are_down_the_one_that_comes_back_is_named(found: Any) -> None:
    spec = found(GROUP, {"shop-db2": "lab"}, server="shop", cluster="shop", node="shop-db3")
    assert list(spec.members) == ["shop-db2"]
    assert spec.node.socket == "/run/3.sock"


@pytest.mark.parametrize(
    ("servers", "clusters", "request_", "words"),
    [
        (SINGLE, {"shop-db2": "lap"}, {}, "no configured server besides shop-db1 is a running node of the cluster lab"),
        (GROUP, {"shop-db2": "lab"}, {"server": "shop", "cluster": "shop"}, "2 of them are no running nodes"),
        (GROUP, dict.fromkeys(("shop-db1", "shop-db2", "shop-db3"), "lab"), {"server": "shop", "cluster": "shop"},
         "0 of them"),
        (GROUP, {"shop-db2": "lab", "shop-db3": "lab"}, {"server": "shop", "cluster": "shop", "node": "shop-db2"},
         "shop-db2 is a running node of lab"),
        (GROUP, {"shop-db2": "lab"}, {"server": "shop", "cluster": "shop", "node": "shop-db4"},
         "'shop-db4' is no member of shop"),
        (SINGLE, {"shop-db2": "lab"}, {"node": "shop-db2"}, "'shop-db2' is no member of shop-db1"),
    ],
)  # fmt: skip
def test_what_is_not_clear_is_refused(
    found: Any, servers: str, clusters: Mapping[str, str], request_: dict[str, str], words: str
) -> None:
    with pytest.raises((RefusedError, UnknownNameError), match=words):
        found(servers, clusters, **request_)

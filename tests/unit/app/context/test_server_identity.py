"""When the stream of another server shows that it took over from the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backupd.app.context.server_identity import _is_of_a_copy, _is_same_cluster, _is_shown, took_over
from backupd.app.context.settings import Settings, load_settings
from backupd.app.context.wiring import Wiring
from backupd.catalog.session import open_catalog
from backupd.engine.server import wsrep
from backupd.model.binlog import Branch, BranchReason
from backupd.model.errors import ServerError
from backupd.model.server_facts import PRIMARY, Identity, Position, Verdict, WsrepState
from backupd.recovery.ist import NodeSample
from tests.unit.restore.galera.test_cluster import STATE

FORK = Position("binlog.000001", 1477, "0-1-8")


@pytest.mark.parametrize(
    ("reason", "fork", "uuid", "is_at_home", "expected"),
    [
        (BranchReason.FAILOVER, FORK, "B", False, True),
        (BranchReason.FAILOVER, None, "B", True, False),
        (BranchReason.FAILOVER, FORK, "A", True, False),
        # Two servers of one image, with one server_id: their logs are equal up to the place where they part.
        (BranchReason.LOST_TAIL, FORK, "B", False, False),
        # It crashed, and calls itself something else since.
        (BranchReason.LOST_TAIL, FORK, "B", True, True),
    ],
)
def test_only_a_failover_from_a_known_place_takes_over(
    reason: BranchReason, fork: Position | None, uuid: str, *, is_at_home: bool, expected: bool
) -> None:
    branch = Branch(
        server="shop",
        id="b",
        noticed_at=datetime(2026, 11, 22, tzinfo=UTC),
        reason=reason,
        server_uuid="B",
        flavour="mariadb",
        basename="binlog",
        first_number=1,
        parent="a",
        fork=fork,
    )
    assert took_over(branch, uuid, is_at_home=is_at_home) is expected


OURS = ("10.0.0.1:3306", "10.0.0.2:3306")
NODE = replace(STATE, node="node2", incoming=OURS)
COPY = replace(STATE, node="node9", incoming=("10.9.0.1:3306",))


def wiring(**nodes: WsrepState | None) -> Any:
    """Of which these nodes are known; None: it does not answer. ``me`` is reached by that name, but is not known."""

    def connected(state: WsrepState | None) -> Any:
        @contextmanager
        def connect() -> Iterator[WsrepState]:
            if state is None:
                raise ServerError("cannot connect")
            yield state

        return SimpleNamespace(connection=lambda: SimpleNamespace(connect=connect))

    known = [name for name in nodes if name != "me"]
    return SimpleNamespace(
        catalog=SimpleNamespace(nodes=SimpleNamespace(servers=lambda: known)),
        settings=SimpleNamespace(reached=lambda name: connected(nodes[name])),
    )


def test_a_cluster_made_of_a_copy_has_the_uuid_and_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wsrep, "probe_wsrep", lambda session: session)
    first = replace(NODE, node="node1")
    assert _is_of_a_copy(wiring(db1=first, db2=None), COPY)
    assert not _is_of_a_copy(wiring(db1=first, db2=None), NODE)
    assert not _is_of_a_copy(wiring(db1=first, copy=COPY), NODE), "who is configured besides is no evidence"
    assert not _is_of_a_copy(wiring(db1=None), COPY), "nobody can say so"
    assert not _is_of_a_copy(wiring(db1=COPY), COPY), "itself"
    for fork, me, shown in ((FORK, COPY, True), (None, COPY, False), (None, NODE, True), (None, None, True)):
        branch = Branch("shop", "b", datetime.now(UTC), BranchReason.NODE_CHANGED, "", "mariadb", "bin", 1, fork=fork)
        assert _is_shown(wiring(db1=first, me=me), "me", branch) is shown


CLUSTER, OTHER = "5cd9f4ed-c0de-11f0-9b1c-0242ac110002", "11111111-c0de-11f0-8000-0242ac110002"


def test_without_a_backup_of_a_node_the_other_members_that_are_known_say_which_cluster_it_is(tmp_path: Path) -> None:
    servers = {name: f"/run/{name}.sock" for name in ("n1", "n2", "n3")}
    settings = grouped(tmp_path, servers)
    now = datetime.now(UTC)
    known = [
        Identity("shop", "u1", Verdict.OWN, since=now, seen_at=now, address=servers["n1"]),
        Identity("shop", "u3", Verdict.STRANGER, since=now, seen_at=now, address=servers["n3"]),
    ]
    with open_catalog(settings.catalog) as catalog:
        made = Wiring(settings, catalog)
        for name, uuid in (("n1", CLUSTER), ("n2", OTHER), ("n3", OTHER)):
            catalog.nodes.add(NodeSample(name, now, uuid, "lab", name, PRIMARY, "Synced", 3, 9, 1, 0, 0))
        assert is_of(made, CLUSTER, known, servers["n2"])
        assert not is_of(made, OTHER, known, servers["n2"]), "what it is itself, and strangers, show nothing"
        assert not is_of(made, CLUSTER, known, servers["n1"]), "nobody else is known"
        assert not is_of(made, CLUSTER, known, servers["n2"], "non-Primary")


def is_of(made: Wiring, uuid: str, known: list[Identity], address: str, status: str = PRIMARY) -> bool:
    node: Any = SimpleNamespace(status=status, position=SimpleNamespace(uuid=uuid, seqno=9))
    return _is_same_cluster(made, "shop", node, known, address)


def grouped(folder: Path, sockets: Mapping[str, str]) -> Settings:
    """A group of servers at these sockets."""
    policies = folder / "policies"
    policies.mkdir()
    (policies / "gold.yaml").write_text('physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n')
    members = "".join(f"  {name}: {{socket: {socket}, user: b}}\n" for name, socket in sockets.items())
    file = folder / "backupd.yaml"
    file.write_text(
        f"catalog: sqlite:///{folder}/catalog.db\nspool: {folder}/spool\npolicies: {policies}\n"
        f"servers:\n  shop: {{members: [{', '.join(sockets)}], policy: gold}}\n{members}"
        f"destinations:\n  local: {{type: filesystem, path: {folder}/repository}}\n"
        f"encryption: {{gnupg_home: {folder}, recipients: [ops@example.com]}}\n"
    )
    return load_settings(file)

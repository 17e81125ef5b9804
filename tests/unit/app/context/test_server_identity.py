"""When the stream of another server shows that it took over from the one before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from backupd.app.context.server_identity import _is_of_a_copy, _is_shown, took_over
from backupd.engine.server import wsrep
from backupd.model.binlog import Branch, BranchReason
from backupd.model.errors import ServerError
from backupd.model.server_facts import Position, WsrepState
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

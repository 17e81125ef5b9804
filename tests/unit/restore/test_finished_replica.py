"""The same command again, of a restore that was finished: a replica's position is set once, and never again."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backupd.engine.server.replication import Source
from backupd.engine.sql.client import Connection
from backupd.model.errors import RefusedError
from backupd.model.proof import Check, Phase
from backupd.model.server_facts import Flavour, Position
from backupd.process.run_context import RunContext
from restore import whole_server
from restore.datadir.staging import State, read_marker, write_marker
from restore.replica.setup import ReplicaSpec, ReplicaState, state_of
from restore.replica.source import ReplicaStart, Restored
from restore.whole_server import RestoreOutcome, RestoreSpec, WholeRestore
from tests.support.catalog.samples import server_info

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
FOLLOWED = ReplicaSpec(
    Source("db1", 3306, "repl", "secret"),
    Connection(),
    Connection(),
    Restored("backup B", Flavour.MARIADB, Position(), is_own=True),
    12,
)
SET_UP = ReplicaState(12, "db1:3306", ReplicaStart(Position(gtid="0-1-7"), by_gtid=True, reason=""), "on")
DONE = State("R-0123abcd", "shop", "backup:B", ("B",), "finished", phases=(Phase("started", 1.0),))


def restore_of(folder: Path, marker: State) -> WholeRestore:
    """``--start`` of a restore that is finished in ``folder``, as a replica."""
    write_marker(folder, marker)
    owner = pwd.getpwuid(os.getuid()).pw_name
    spec = RestoreSpec("R-2", "shop", "backup:B", ("B",), NOW, folder, owner, start=True, follow=FOLLOWED)
    return WholeRestore(spec, cast(Any, None), RunContext())


def test_a_replica_that_was_not_started_is_let_loose_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = restore_of(tmp_path, replace(DONE, replica=SET_UP.as_json()))
    assert restore.is_finished()
    seen: list[ReplicaState] = []

    def followed(*arguments: Any) -> tuple[None, SimpleNamespace, Check]:
        seen.append(arguments[3])
        marker = read_marker(tmp_path)
        assert marker is not None
        remembered = state_of(marker.replica)
        assert remembered is not None
        assert remembered.following, "before it begins"
        why = "there are no GTIDs"
        return None, SimpleNamespace(as_json=dict, not_compared=why), Check("compared", "skipped", why)

    monkeypatch.setattr(whole_server, "set_up", lambda *_arguments: pytest.fail("its position was set again"))
    monkeypatch.setattr(whole_server, "follow", followed)
    monkeypatch.setattr(whole_server, "replica_config", lambda *_arguments: None)
    monkeypatch.setattr(WholeRestore, "_config", lambda *_arguments: None)
    outcome = RestoreOutcome("R-0123abcd", "shop", "B", "backup:B", tmp_path, Position(), ())
    chain = cast(Any, [SimpleNamespace(body=SimpleNamespace(facts=SimpleNamespace(server=server_info())))])
    done = restore._replicate(outcome, chain, cast(Any, None), FOLLOWED)
    assert done.checks == (Check("compared", "skipped", "there are no GTIDs"),)
    assert done.warnings == ("the replica was not, or not wholly, compared: there are no GTIDs",)
    assert seen == [replace(SET_UP, following=True)]


def test_what_was_restored_as_another_server_does_not_become_a_replica(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="is not empty") as caught:
        restore_of(tmp_path, DONE).is_finished()
    assert caught.value.hint.endswith("it was not restored as a replica")

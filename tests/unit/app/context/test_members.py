"""What is found of a member besides its own answers: whose data directory is on this host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backupd.app.context import members
from backupd.app.context.members import _elsewhere
from backupd.model.errors import ServerError
from backupd.model.server_facts import Position, Role
from backupd.recovery.members import Candidate, Identity

OURS, OTHER = "0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a", "0b0b0b0b-0b0b-0b0b-0b0b-0b0b0b0b0b0b"
SESSION: Any = SimpleNamespace(connection=SimpleNamespace(socket="/run/mysqld/mysqld.sock"))


def found(datadir: Path, uuid: str = OURS) -> list[str]:
    return list(_elsewhere(SESSION, Candidate("db1", identity=Identity(uuid, 1, "db", str(datadir)))))


def test_the_data_directory_of_another_server_is_not_that_of_a_member(tmp_path: Path) -> None:
    assert found(tmp_path) == [], "it does not say whose it is"
    (tmp_path / "auto.cnf").write_text(f"[auto]\nserver-uuid={OURS.upper()}\n")
    assert found(tmp_path) == []
    (tmp_path / "auto.cnf").write_text(f"[auto]\nserver-uuid={OTHER}\n")
    assert found(tmp_path) == [f"{tmp_path} on this host is the data directory of another server"]
    assert found(tmp_path, "kD8w+uB5cWJ0V3qPzY1sRk2mLhE=") == [], "MariaDB's has a file that MySQL left"


def test_a_data_directory_that_is_not_here_is_said_to_be_elsewhere(tmp_path: Path) -> None:
    assert found(tmp_path / "gone") == [f"its data directory {tmp_path / 'gone'} cannot be reached from this host"]


SOURCE = Candidate("db1", identity=Identity(OTHER, 1, "db", "/1"), role=Role.SOURCE)
REPLICA = Candidate("db2", identity=Identity(OURS, 2, "db", "/2"), role=Role.REPLICA, follows=frozenset({1}))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the servers say: ``received``, ``silent``."""
    said: dict[str, Any] = {"received": True, "silent": 0.0}

    @contextmanager
    def briefly(_server: object, name: str) -> Iterator[str]:
        if name == said.get("down"):
            raise ServerError("refused")
        yield name

    monkeypatch.setattr(members, "_briefly", briefly)
    monkeypatch.setattr(members, "_ARRIVES", 0.0)
    monkeypatch.setattr(members, "log_end", lambda _session: Position("bin.000007", 900, "0-1-5"))
    monkeypatch.setattr(members, "has_received", lambda _session, _number, _end: said["received"])
    monkeypatch.setattr(members, "silence_of", lambda _session, *, expected: 0.0 if expected else said["silent"])
    return said


def heard(*others: Candidate) -> Candidate:
    return members._heard(SimpleNamespace(), [REPLICA, *others], REPLICA)  # type: ignore[arg-type]  # nothing of it is used


def test_a_replica_that_does_not_receive_what_its_source_has_does_not_know_its_lag(asked: dict[str, Any]) -> None:
    assert heard(SOURCE) == REPLICA
    asked["received"] = False
    assert heard(SOURCE).stopped == (
        "the lag of db2 is unknown: it has not received bin.000007:900, where the log of db1 was 0 s ago"
    )
    twin = replace(SOURCE, name="db9")
    assert heard(SOURCE, twin) == REPLICA, "the nodes of a cluster have one server_id, and logs of their own"


def test_where_the_source_cannot_be_asked_a_lag_is_true_up_to_the_silence_only(asked: dict[str, Any]) -> None:
    lost = Candidate("db1", trouble="it cannot be asked: refused")
    asked["silent"] = 60.0
    found = heard(lost)
    assert (found.silent, found.unheard) == (60.0, "its source may be db1, which cannot be asked")
    assert heard() == REPLICA, "of a source that is no member only a silence that is too long says something"
    asked["down"] = "db2"
    assert "it cannot be asked" in heard(SOURCE).trouble

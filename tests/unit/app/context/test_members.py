"""What is found of a member besides its own answers: whose data directory is on this host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from backupd.app.context.members import _elsewhere
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

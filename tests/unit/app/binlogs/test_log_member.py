"""What the member that is streamed confirms of a group, and when nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from backupd.app.binlogs import log_member
from backupd.app.binlogs.log_member import MemberWatch
from backupd.app.context.settings import ServerSettings
from backupd.binlog.spool_files import Spool
from backupd.model.server_facts import Role
from backupd.recovery.members import Candidate, Identity

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
FORMER = Candidate("db1", identity=Identity("uuid-1", 1, "a", "/data"), logs=True)
PROMOTED = Candidate("db2", identity=Identity("uuid-2", 2, "b", "/data"), role=Role.SOURCE, logs=True)
REPLICA = replace(PROMOTED, name="db3", identity=Identity("uuid-3", 3, "c", "/data"), role=Role.REPLICA)


@dataclass
class Answering:
    """A connection on which the member is asked."""

    connect_timeout: float = 0.0
    answer_timeout: float = 0.0

    @contextmanager
    def connect(self) -> Iterator[None]:
        yield


def watch(monkeypatch: pytest.MonkeyPatch, found: Callable[[], tuple[Candidate, ...]]) -> MemberWatch:
    """Of a stream through ``db1``, which answers that it is behind nobody."""
    monkeypatch.setattr(log_member, "_ASKED", 0.01)
    monkeypatch.setattr(log_member, "_EVERY", 0.01)
    monkeypatch.setattr(log_member, "lag_of_member", lambda _session: 0.0)
    monkeypatch.setattr(log_member, "candidates", lambda _group: found())
    member = SimpleNamespace(name="shop", member="db1", connection=Answering)
    group: Any = SimpleNamespace(name="shop")
    return MemberWatch(group, cast("ServerSettings", member), cast("Spool", None), lambda: NOW)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_former_source_that_answers_confirms_nothing_of_what_the_group_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = [FORMER, replace(REPLICA, follows=frozenset({1})), replace(REPLICA, name="db2", follows=frozenset({1}))]
    with watch(monkeypatch, lambda: tuple(members)) as member:
        until(lambda: member.sure_until(NOW) == NOW and not member.trouble)
        members[1:] = [PROMOTED, replace(REPLICA, follows=frozenset({2}))]
        until(lambda: member.sure_until(NOW) is None)
        assert member.trouble == (
            "what the group commits may not be in the log of db1: it is no replica, and the replicas of the group "
            "follow db2"
        )
        members[0] = replace(FORMER, role=Role.REPLICA, follows=frozenset({2}))
        until(lambda: member.sure_until(NOW) == NOW and not member.trouble)

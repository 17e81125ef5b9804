"""Waiting for a replica: what ends it, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from backupd.engine.server.replication import Receiving, ReplicaStatus, Source, ThreadError
from backupd.engine.sql.client import Connection
from backupd.engine.sql.dialect import dialect_of
from backupd.model.errors import BackupdError, RefusedError, ServerError
from backupd.model.job import Progress
from backupd.model.server_facts import Flavour, Position, Version
from backupd.process.run_context import RunContext
from restore.replica import follow
from restore.replica.setup import ReplicaSpec, ReplicaState
from restore.replica.source import ReplicaStart, Restored

MARIADB = dialect_of(Flavour.MARIADB, Version(10, 11))
BEHIND = ReplicaStatus(
    connection="",
    source_host="db1",
    source_port=3306,
    source_id=7,
    source_uuid="",
    receiving=Receiving.YES,
    applying=True,
    lag=120.0,
    delay=0,
    received=Position("bin.000007", 900),
    applied=Position("bin.000006", 300),
    gtids="0-7-10",
    retrieved="0-7-12",
    by_gtid=True,
)
THERE = replace(BEHIND, gtids="0-7-12", lag=0.0)
GOAL = Position("bin.000007", 900, "0-7-12")


class Watched:
    """A wait of which each look at the replica is given and takes a second, and what it reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.notes = 0.0, list[str]()
        self._patch = monkeypatch

    def sleep(self, _seconds: float) -> None:
        self.now += 1

    def report(self, progress: Progress) -> None:
        self.notes.append(progress.note)

    def wait(
        self, looks: Iterator[ReplicaStatus | None], *, goal: Position | None = GOAL, by_gtid: bool = True
    ) -> tuple[ReplicaStatus, float]:
        self._patch.setattr("time.monotonic", lambda: self.now)
        self._patch.setattr("time.sleep", self.sleep)
        self._patch.setattr(follow, "read_replica", lambda _session, _dialect: next(looks))
        spec = ReplicaSpec(
            Source("db1", 3306, "repl", "secret"),
            Connection(),
            Connection(),
            Restored("backup B", Flavour.MARIADB, Position(), is_own=True),
            12,
        )
        state = ReplicaState(12, "db1:3306", ReplicaStart(Position(gtid="0-7-1"), by_gtid, ""), "on")
        waiting = follow._Wait(cast(Any, None), MARIADB, spec, state, RunContext(report=self.report))
        self._patch.setattr(waiting, "_goal", lambda now: None if goal is None else (goal, now))
        return waiting.run()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def forever(status: ReplicaStatus) -> Iterator[ReplicaStatus]:
    while True:
        yield status


def moving() -> Iterator[ReplicaStatus]:
    """A second of its lag less with each look, until it is there."""
    for number in range(30):
        yield replace(BEHIND, lag=30.0 - number, applied=Position("bin.000006", number))
    yield from forever(THERE)


def test_it_ends_when_what_the_source_had_seconds_ago_is_applied(watched: Watched) -> None:
    status, lag = watched.wait(moving())
    assert (status, lag <= follow.CLOSE_SECONDS) == (THERE, True)
    assert watched.notes[0] == "lag 30.0s"
    assert watched.notes[10] == "lag 20.0s, caught up in about 20.0s"


def test_a_delayed_replica_has_caught_up_once_it_has_received_all(watched: Watched) -> None:
    late = replace(BEHIND, delay=3600, lag=3599.0)
    assert watched.wait(forever(late))[0] == late


def test_without_gtids_the_place_in_the_log_counts(watched: Watched) -> None:
    at = replace(BEHIND, by_gtid=False, applied=Position("bin.000007", 900))
    assert watched.wait(forever(at), by_gtid=False)[0] == at
    blind = replace(at, lag=0.0)  # who may not ask where the source is goes by what the replica says
    assert watched.wait(forever(blind), goal=Position(), by_gtid=False)[0] == blind


def failed(watched: Watched, status: ReplicaStatus | None, kind: type[BackupdError]) -> BackupdError:
    with pytest.raises(kind) as caught:
        watched.wait(iter([status] * 5000))
    return caught.value


def test_a_row_that_cannot_be_applied_ends_it(watched: Watched) -> None:
    broken = replace(BEHIND, apply_error=ThreadError(1032, "Can't find record"))
    error = failed(watched, broken, ServerError)
    assert "replication stopped at bin.000006:300 (error 1032)" in error.message


@pytest.mark.parametrize(
    ("code", "text"),
    [(1236, "purged"), (13114, "Got fatal error 1236 from source when reading data from binary log: 'purged'")],
)
def test_a_source_that_purged_meanwhile_is_a_refusal_with_the_place(watched: Watched, code: int, text: str) -> None:
    error = failed(watched, replace(BEHIND, receive_error=ThreadError(code, text)), RefusedError)
    assert "does not send what follows 0-7-1" in error.message


def test_an_account_that_is_not_let_in_ends_it(watched: Watched) -> None:
    denied = replace(BEHIND, receiving=Receiving.CONNECTING, receive_error=ThreadError(1045, "Access denied"))
    assert "cannot connect to its source" in failed(watched, denied, ServerError).message
    assert watched.now == 0


def test_a_source_that_died_is_waited_for_a_while(watched: Watched) -> None:
    gone = replace(BEHIND, receiving=Receiving.CONNECTING, receive_error=ThreadError(2003, "no answer"))
    error = failed(watched, gone, ServerError)
    assert "has not answered for 90 s" in error.message
    assert "repeat the command" in error.hint
    assert 90 < watched.now < 93


def test_a_replica_that_stands_still_ends_it(watched: Watched) -> None:
    assert "has not moved for 15m" in failed(watched, BEHIND, ServerError).message
    assert "no replication connection" in failed(watched, None, ServerError).message

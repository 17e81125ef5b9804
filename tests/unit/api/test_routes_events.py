"""The stream of events: what one may see, as it happens, each thing once, and from where one left off."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api import events
from backupd.app.context.access import command_line, create_token, log_in, log_out, revoke_token
from backupd.model.access import Role
from backupd.model.event import Event, Severity
from backupd.model.job import JobState
from tests.support.catalog import samples
from tests.support.service.rig import Rig, rig
from tests.support.service.state import BEGUN, fill, number, two_servers

JOB = number("20261101T020000Z", list(JobState).index(JobState.RUNNING))


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Rig]:
    with rig(two_servers(tmp_path), prepared=fill) as running:
        yield running


class Heard:
    """One who listens: pieces as (id, name, document)."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._lines = answer.iter_lines()

    def piece(self) -> tuple[str, str, dict[str, Any]]:
        """The next one that is no comment. Raises StopIteration at the end of the stream."""
        found: dict[str, str] = {}
        while True:
            line = next(self._lines)
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                found[name] = value
            elif not line and "data" in found:
                return found.get("id", ""), found["event"], json.loads(found["data"])

    def pieces(self, count: int) -> list[tuple[str, str, dict[str, Any]]]:
        return [self.piece() for _ in range(count)]


@contextmanager
def listening(client: httpx.Client, last: int | None = None, **query: str) -> Iterator[Heard]:
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    with client.stream("GET", "/v1/events", params=query, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Heard(answer)


def happen(running: Rig, kind: str, server: str = "db1") -> int:
    running.catalog.events.add(Event(BEGUN, kind, Severity.INFO, "line\nbreak", server=server))
    return running.catalog.events.newest()


def test_all_who_listen_are_told_by_one_thread_and_a_stream_goes_on_where_it_left_off(filled: Rig) -> None:
    first = filled.catalog.events.newest()
    with ExitStack() as stack:
        heard = [stack.enter_context(listening(filled.client("viewer"))) for _ in range(20)]
        numbers = [happen(filled, f"kind-{count}") for count in range(3)]
        for one in heard:
            found = one.pieces(3)
            assert [(int(piece[0]), piece[1], piece[2]["kind"]) for piece in found] == [
                (number, "event", f"kind-{count}") for count, number in enumerate(numbers)
            ]
            assert found[0][2]["message"] == "line\nbreak"
        assert filled.app.state.broadcaster.listeners == 20
    with listening(filled.client("viewer"), last=numbers[0]) as again:
        later = happen(filled, "later")
        assert [int(piece[0]) for piece in again.pieces(3)] == [*numbers[1:], later]
    with listening(filled.client("viewer"), last=0) as everything:
        assert [int(piece[0]) for piece in everything.pieces(first + 4)] == list(range(1, later + 1))


def test_a_job_is_told_as_it_is_and_whenever_it_moves_on(filled: Rig) -> None:
    with listening(filled.client("viewer"), job=JOB) as heard:
        _id, name, now = heard.piece()
        assert (name, now["id"], now["state"]) == ("job", JOB, "running")
        filled.catalog.jobs.heartbeat(JOB, 1, BEGUN, {"phase": "prepare"})
        assert heard.piece()[2]["progress"] == {"phase": "prepare"}
        filled.catalog.jobs.finish(
            JOB,
            JobState.SUCCEEDED,
            BEGUN,
            token=1,
            events=[Event(BEGUN, "done", Severity.INFO, "done", server="db1", job_id=JOB)],
        )
        found = heard.pieces(2)
        assert {
            (name, document.get("kind") if name == "event" else document["state"]) for _, name, document in found
        } == {("event", "done"), ("job", "succeeded")}


def test_nobody_hears_of_servers_that_are_not_theirs(filled: Rig) -> None:
    some = filled.client("viewer", servers=["db2"])
    with listening(some, last=0) as heard, listening(filled.client("viewer"), server="db2", last=0) as chosen:
        happen(filled, "theirs", "db1")
        happen(filled, "of-nobody", "")
        filled.catalog.jobs.add(samples.job(1, server="db1"))
        happen(filled, "ours", "db2")
        for one in (heard, chosen):
            assert [piece[2]["kind"] for piece in one.pieces(2)] == ["job-failed", "ours"]
    assert some.get("/v1/events", params={"job": JOB}).status_code == 404


def test_what_was_asked_wrongly_is_a_problem_and_no_stream(filled: Rig) -> None:
    client = filled.client("viewer")
    assert client.get("/v1/events?job=none").status_code == 404
    assert client.get("/v1/events", headers={"Last-Event-ID": "first"}).status_code == 422
    assert client.get("/v1/events?sever=db1").status_code == 422


def test_streams_end_when_the_service_stops_and_its_thread_when_nobody_listens(filled: Rig) -> None:
    broadcaster = filled.app.state.broadcaster
    with listening(filled.client("viewer")):
        assert broadcaster.listeners == 1
    deadline = time.monotonic() + 240
    while broadcaster.listeners or broadcaster._thread is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with listening(filled.client("viewer")) as heard:
        broadcaster.close()
        with pytest.raises(StopIteration):
            heard.piece()
    assert filled.client("viewer").get("/v1/events").status_code == 409


def test_who_is_let_in_no_more_is_told_nothing_more_however_much_happens(
    filled: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert events.stream.__kwdefaults__ is not None
    monkeypatch.setitem(events.stream.__kwdefaults__, "again", 0.0)
    token, secret = create_token(filled.wiring, command_line(), "gone", Role.VIEWER)
    session, cookie, actor = log_in(filled.wiring, filled.secret(Role.VIEWER), "127.0.0.1")
    for headers, leave in (
        ({"Authorization": f"Bearer {secret}"}, lambda: revoke_token(filled.wiring, command_line(), token.id)),
        ({"Cookie": f"backupd={cookie}"}, lambda: log_out(filled.wiring, session, actor)),
    ):
        client = filled.client()
        client.headers.update(headers)
        with listening(client, server="db1") as heard:
            happen(filled, "before")
            assert heard.piece()[2]["kind"] == "before"
            leave()
            happen(filled, "after")
            with pytest.raises(StopIteration):
                heard.piece()

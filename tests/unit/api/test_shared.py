"""One answer for many who ask the same, and never one from before a change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from api import caching
from api.caching import SharedAnswers
from backupd.catalog.session import open_catalog
from backupd.model.access import Actor, Role, Via
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import new_id
from tests.support.service.rig import Rig, rig

NOW = datetime(2026, 11, 21, 4, 25, tzinfo=UTC)


class Application:
    """Counts what it is asked; answers when ``go`` is set."""

    def __init__(self, status: int = 200, **headers: str) -> None:
        self.asked = 0
        self.go = asyncio.Event()
        self.go.set()
        self._status = status
        self._headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        number = self.asked
        await self.go.wait()
        await send({"type": "http.response.start", "status": self._status, "headers": list(self._headers)})
        await send({"type": "http.response.body", "body": str(number).encode()})


async def ask(layer: SharedAnswers, path: str = "/v1/backups", token: str = "t1", method: str = "GET") -> str:
    found: list[Message] = []

    async def send(message: Message) -> None:
        found.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    actor = Actor("anna", Role.VIEWER, Via.API, token_id=token)
    await layer(
        {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [], "state": {"actor": actor}},
        receive,
        send,
    )
    return b"".join(message.get("body", b"") for message in found[1:]).decode()


def test_many_who_ask_at_once_are_answered_by_one_piece_of_work() -> None:
    async def play() -> None:
        application = Application()
        application.go.clear()
        layer = SharedAnswers(application, lambda: 1)
        crowd = [asyncio.create_task(ask(layer)) for _ in range(50)]
        await asyncio.sleep(0)
        application.go.set()
        assert set(await asyncio.gather(*crowd)) == {"1"}
        assert application.asked == 1

    asyncio.run(play())


def test_after_a_change_or_a_second_it_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        version, now = [1], [0.0]
        monkeypatch.setattr("api.caching.time.monotonic", lambda: now[0])
        layer = SharedAnswers(Application(), lambda: version[0])
        assert [await ask(layer), await ask(layer)] == ["1", "1"]
        version[0] = 2
        assert [await ask(layer), await ask(layer)] == ["2", "2"]
        now[0] += caching.FRESH
        assert await ask(layer) == "3"

    asyncio.run(play())


def test_an_answer_that_was_begun_before_a_change_is_not_given_to_who_asks_after_it() -> None:
    async def play() -> None:
        version, application = [1], Application()
        application.go.clear()
        layer = SharedAnswers(application, lambda: version[0])
        before = asyncio.create_task(ask(layer))
        await asyncio.sleep(0)
        version[0] = 2
        after = asyncio.create_task(ask(layer))
        await asyncio.sleep(0)
        application.go.set()
        assert (await before, await after) == ("1", "2")

    asyncio.run(play())


@pytest.mark.parametrize(
    ("application", "other"),
    [
        (Application(404), {}),
        (Application(503), {}),
        (Application(cache_control="no-store"), {}),
        (Application(), {"method": "POST"}),
        (Application(), {"path": "/v1/events"}),
        (Application(), {"path": "/jobs"}),
        (Application(), {"token": ""}),
    ],
)
def test_what_is_not_shared(application: Application, other: dict[str, Any]) -> None:
    async def play() -> None:
        layer = SharedAnswers(application, lambda: 1)
        assert [await ask(layer, **other), await ask(layer, **other)] == ["1", "2"]

    asyncio.run(play())


def test_nobody_gets_the_answer_of_another_token_and_without_a_version_nothing_is_shared() -> None:
    async def play() -> None:
        layer = SharedAnswers(Application(), lambda: 1)
        assert [await ask(layer, token="t1"), await ask(layer, token="t2")] == ["1", "2"]
        layer = SharedAnswers(Application(), lambda: None)
        assert [await ask(layer), await ask(layer)] == ["1", "2"]

    asyncio.run(play())


def test_work_that_fails_is_done_again_by_who_waited_for_it() -> None:
    async def play() -> None:
        application = Application()
        application.go.clear()
        calls = [0]

        async def failing(scope: Scope, receive: Receive, send: Send) -> None:
            calls[0] += 1
            if calls[0] == 1:
                await application.go.wait()
                raise RuntimeError("it failed")
            await application(scope, receive, send)

        layer = SharedAnswers(failing, lambda: 1)
        first, second = asyncio.create_task(ask(layer)), asyncio.create_task(ask(layer))
        await asyncio.sleep(0)
        application.go.set()
        done = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(done[0], RuntimeError)
        assert done[1] == "1"

    asyncio.run(play())


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("shared")) as found:
        yield found


def test_what_anybody_wrote_is_in_the_very_next_answer(house: Rig) -> None:
    """By a request, and by another process, whose connection is its own."""
    client = house.client(Role.ADMIN)
    with open_catalog(house.settings.catalog) as elsewhere:
        for number in range(10):
            client.get("/v1/holds")
            reason = f"reason {number}"
            assert client.post("/v1/holds", json={"server": "db1", "reason": reason}).status_code in (200, 201)
            assert [hold["reason"] for hold in client.get("/v1/holds").json()] == [reason]
            assert len(client.get("/v1/jobs").json()) == number
            elsewhere.jobs.enqueue(JobRecord(new_id(NOW), JobKind.FULL, "db1", JobState.QUEUED, NOW))
            assert len(client.get("/v1/jobs").json()) == number + 1


def test_a_catalog_that_is_gone_is_not_hidden_by_what_was_answered(tmp_path: Path) -> None:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        changes = catalog.changes()
        first = changes.version()
        catalog.events.add(Event(NOW, "clock-jump", Severity.WARNING, "x"))
        assert first is not None
        assert changes.version() not in (None, first)
        changes.close()
        (tmp_path / "catalog.db").rename(tmp_path / "away")
        assert changes.version() is None

"""Whoever asks for so much that nobody else is answered."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

import pytest

from api.events import MOST_OF_ONE
from api.server import Http
from backupd.model.access import Role
from policies.yaml_tree import read_text
from tests.support.service.rig import Rig, rig
from tests.unit.api.test_routes_events import listening


def test_one_token_cannot_take_every_stream_of_events(tmp_path: Path) -> None:
    with rig(tmp_path) as house, contextlib.ExitStack() as stack:
        for _ in range(MOST_OF_ONE):
            stack.enter_context(listening(house.client(Role.VIEWER)))
        refused = house.client(Role.VIEWER).get("/v1/events")
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert f"{MOST_OF_ONE} listen to events with this token" in refused.json()["message"]
        stack.enter_context(listening(house.client(Role.OPERATOR)))


def _asking(house: Rig, source: str, path: str = "/healthz") -> socket.socket:
    """A connection from ``source``, an address of this host's loopback, with all of a request but its end."""
    connection = socket.create_connection(
        ("127.0.0.1", int(house.url.rpartition(":")[2])), timeout=60, source_address=(source, 0)
    )
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode())
    return connection


def _answer(connection: socket.socket, rest: bytes = b"\r\n") -> bytes:
    """The first line of the answer. Who is refused is answered before he has sent all: sending the rest may fail then,
    and the answer can be read all the same."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(rest)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(64).split(b"\r\n")[0]
    return b""


def test_strangers_that_flood_leave_room_for_who_is_known_and_for_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Http, "most_of_strangers", 8)
    monkeypatch.setattr(Http, "head_seconds", 240.0)  # the flood lasts until it is answered, on a slow machine, too
    # 127.0.0.1 is this host; other addresses of the loopback stand for hosts elsewhere.
    monkeypatch.setattr("api.server.is_loopback", lambda host: host == "127.0.0.1")
    with rig(tmp_path) as house, contextlib.ExitStack() as stack:
        token = f"Authorization: Bearer {house.secret(Role.VIEWER)}\r\n\r\n".encode()
        with _asking(house, "127.0.0.9", path="/v1/whoami") as first:
            assert b"200" in _answer(first, token)
        flood = [stack.enter_context(_asking(house, f"127.0.1.{number % 4 + 1}")) for number in range(8)]
        assert b"503" in _answer(stack.enter_context(_asking(house, "127.0.2.1")))
        assert b"200" in _answer(stack.enter_context(_asking(house, "127.0.0.9"))), "a right token came from there"
        assert b"200" in _answer(stack.enter_context(_asking(house, "127.0.0.1")))
        assert b"200" in _answer(flood[0])


@pytest.mark.parametrize("text", ["[" * 50_000, "a: {" + "x: [" * 20_000, "{" * 50_000])
def test_brackets_without_end_cost_no_time(text: str) -> None:
    begun = time.process_time()
    node, problems = read_text(text, "policy.yaml")
    assert node is None
    assert "nested deeper than 32 levels" in problems[0].message
    assert time.process_time() - begun < 0.1


def test_brackets_in_texts_are_no_depth() -> None:
    node, problems = read_text(f"a: '{'[' * 900}'\n", "policy.yaml")
    assert (problems, node is not None) == ([], True)

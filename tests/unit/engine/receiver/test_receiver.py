"""The connection of a dump, as far as no server is needed for it."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import pytest

from backupd.engine.receiver import receiver
from backupd.engine.receiver.connection import Request
from backupd.engine.receiver.receiver import Receiver
from backupd.engine.sql.client import Connection
from tests.unit.engine.receiver.test_log_bytes import NAME, Memory, description, rotate


def packet(event: bytes) -> bytes:
    return (len(event) + 1).to_bytes(3, "little") + b"\0\0" + event


class Slow(Memory):
    """A disk that takes its time."""

    def put(self, data: bytes | memoryview) -> None:
        time.sleep(0.5)
        super().put(data)


def test_a_slow_disk_is_no_silence_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    session = SimpleNamespace(break_off=lambda: None, close=lambda: None)
    monkeypatch.setattr(receiver, "begin", lambda _connection, _request: (session, ours))
    with ours, theirs, Receiver(Connection(), Request(NAME, 4, 5, 1.0), Slow()) as dump:
        theirs.sendall(packet(rotate()) + packet(description()))
        dump.receive(0.05)
        assert dump.silent_for < 0.3
        dump.receive(0.4)
        assert dump.silent_for > 0.3

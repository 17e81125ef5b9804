"""What a source answers to a dump that is asked for on trial."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from backupd.engine.receiver import dump_trial
from backupd.engine.receiver.dump_trial import Trial, try_dump
from backupd.engine.sql.client import Connection
from backupd.model.errors import ServerError
from backupd.model.server_facts import Position
from tests.unit.engine.receiver.test_log_bytes import NAME, description, event, rotate

WHEN = 1_780_000_000
PURGED = b"\xff" + (1236).to_bytes(2, "little") + b"#HY000" + b"Could not find first log file name in binary log index"


def packets(*payloads: bytes) -> bytes:
    return b"".join(len(one).to_bytes(3, "little") + b"\0" + one for one in payloads)


def tried(monkeypatch: pytest.MonkeyPatch, payloads: Sequence[bytes]) -> Trial:
    """Of a source that sends ``payloads`` and says no more."""
    ours, theirs = socket.socketpair()
    session = SimpleNamespace(break_off=lambda: None, close=lambda: None)
    monkeypatch.setattr(dump_trial, "begin", lambda _connection, _request: (session, ours))
    monkeypatch.setattr(dump_trial, "_SECONDS", 0.5)
    with ours, theirs:
        theirs.sendall(packets(*payloads))
        return try_dump(Connection(), Position(NAME, 400), 9, by_gtid=False)


def test_the_first_event_shows_that_it_sends_and_the_file_s_own_when_that_was_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = [b"\0" + one for one in (rotate(position=400), description(following=0), event(2, 400))]
    assert tried(monkeypatch, events) == Trial("", WHEN)


def test_an_end_or_an_error_behind_the_first_events_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [b"\0" + rotate(position=400), b"\0" + description(following=0)]
    assert tried(monkeypatch, [*first, b"\xfe"]) == Trial("", WHEN)
    said = tried(monkeypatch, [*first, PURGED])
    assert said.refused.startswith("Could not find first log file")
    assert tried(monkeypatch, [PURGED]) == Trial(said.refused)


def test_a_source_that_sends_nothing_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError, match="sent no event of its binary log"):
        tried(monkeypatch, [b"\0" + rotate(position=400), b"\0" + description(following=0)])

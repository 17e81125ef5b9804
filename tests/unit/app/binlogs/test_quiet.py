"""When a stream's process rests, and what ends it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from backupd.app.binlogs import quiet
from backupd.app.binlogs.quiet import (
    HEAVY,
    HEAVY_BYTES,
    HEAVY_LASTS,
    HEAVY_SECONDS,
    QUIET,
    SELDOM,
    STILL,
    USUAL,
    Activity,
    Rest,
    seldom,
)
from backupd.binlog.archiver import Behind
from backupd.binlog.stream_status import StreamState, StreamStatus
from policies.policy import Policy

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
STATUS = replace(StreamStatus(StreamState.STREAMING, NOW), branch="b", file="binlog.000001", pos=400)
ALL = {"local": Behind(0, None)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(quiet, "time", clock)
    return clock


def resting(clock: SimpleNamespace) -> Rest:
    rest = Rest(SELDOM)
    for _ in range(int(QUIET)):
        assert rest.is_due(STATUS, ALL, {})
        clock.now += 1
    assert not rest.is_due(STATUS, ALL, {})
    return rest


def test_a_quiet_stream_is_looked_at_seldom(clock: SimpleNamespace) -> None:
    rest = resting(clock)
    looks = []
    for _ in range(60):
        clock.now += 1
        looks.append(rest.is_due(STATUS, ALL, {}))
    assert sum(looks) == 60 / SELDOM


@pytest.mark.parametrize(
    ("status", "behind", "troubles"),
    [
        (replace(STATUS, pos=401), ALL, {}),
        (replace(STATUS, file="binlog.000002"), ALL, {}),
        (replace(STATUS, state=StreamState.WAITING), ALL, {}),
        (replace(STATUS, error="no route to host"), ALL, {}),
        (STATUS, {"local": Behind(1, NOW)}, {}),
        (STATUS, ALL, {"local": "it is full"}),
    ],
)
def test_whatever_happens_ends_the_rest_at_once(
    clock: SimpleNamespace, status: StreamStatus, behind: dict[str, Behind], troubles: dict[str, str]
) -> None:
    rest = resting(clock)
    for _ in range(int(QUIET)):
        assert rest.is_due(status, behind, troubles)
        clock.now += 0.9


def test_a_stream_that_does_not_stream_never_rests(clock: SimpleNamespace) -> None:
    rest = Rest(SELDOM)
    for _ in range(300):
        clock.now += 1
        assert rest.is_due(replace(STATUS, state=StreamState.WAITING), ALL, {})


def test_an_objective_makes_the_looks_as_frequent_as_it_needs_them() -> None:
    words = {"physical": {"full": "0 0 1 1 *"}, "destinations": {"required": ["local"]}}
    words["retention"] = {"local": {"keep_fulls": 2}}
    assert seldom(Policy.model_validate(words)) == SELDOM
    assert seldom(Policy.model_validate({**words, "objectives": {"rpo": "60s"}})) == 10.0
    assert seldom(Policy.model_validate({**words, "objectives": {"rpo": "1h"}})) == SELDOM
    assert seldom(Policy.model_validate({**words, "binlog": {"stream": True}})) == SELDOM
    assert seldom(Policy.model_validate({**words, "binlog": {"stream": True, "acknowledge": "spool"}})) == 0.0


def test_a_stream_is_still_after_a_minute_without_a_byte_and_the_first_one_ends_that(clock: SimpleNamespace) -> None:
    activity = Activity()
    assert activity.look(STATUS) == USUAL
    clock.now += QUIET - 1
    assert activity.look(STATUS) == USUAL
    clock.now += 1
    assert activity.look(STATUS) == STILL
    assert activity.look(replace(STATUS, pos=401)) == USUAL
    clock.now += QUIET
    assert activity.look(replace(STATUS, pos=401)) == STILL
    assert activity.look(replace(STATUS, pos=401, state=StreamState.WAITING)) == USUAL
    assert activity.look(replace(STATUS, pos=401)) == USUAL, "it may have missed something meanwhile"


@pytest.mark.parametrize(("rate", "found"), [(HEAVY_BYTES / 2, USUAL), (HEAVY_BYTES * 2, HEAVY)])
def test_a_stream_is_heavy_by_its_bytes_a_second(clock: SimpleNamespace, rate: float, found: str) -> None:
    activity, status = Activity(), STATUS
    activity.look(status)
    for _ in range(int(HEAVY_SECONDS) * 3):
        clock.now += 1
        status = replace(status, pos=status.pos + int(rate))
        last = activity.look(status)
    assert last == found
    for _ in range(3):  # each file of a busy server begins at 4
        clock.now += 1
        status = replace(status, file="binlog.000002", pos=4)
        assert activity.look(status) == found
    clock.now += HEAVY_LASTS
    assert activity.look(status) == USUAL


def test_what_is_caught_up_with_at_once_is_no_heavy_stream(clock: SimpleNamespace) -> None:
    activity = Activity()
    activity.look(STATUS)
    clock.now += 1
    assert activity.look(replace(STATUS, pos=HEAVY_BYTES)) == USUAL


def test_the_words_are_of_one_length() -> None:
    assert len({len(word) for word in (USUAL, STILL, HEAVY)}) == 1

"""An archive with two destinations that can be made to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.logs.archived import Clock, Faulty, House


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def one(clock: Clock) -> Faulty:
    return Faulty("one", clock)


@pytest.fixture
def two(clock: Clock) -> Faulty:
    return Faulty("two", clock)


@pytest.fixture
def house(tmp_path: Path, clock: Clock, one: Faulty, two: Faulty) -> House:
    return House(tmp_path / "spool", [one, two], clock)

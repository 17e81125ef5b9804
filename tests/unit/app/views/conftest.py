"""Desks of one server, with and without a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service.desk import NOW, STREAMED, Desk, desk_of
from tests.support.service.house import GOLD


@pytest.fixture
def desk(short_tmp: Path) -> Iterator[Desk]:
    with desk_of(short_tmp, GOLD + "protection: {copies: 1, off_site: 0}\n") as found:
        yield found


@pytest.fixture
def streamed(short_tmp: Path) -> Iterator[Desk]:
    with desk_of(short_tmp, STREAMED) as found:
        found.backup()
        found.logs(NOW)
        found.stream()
        yield found

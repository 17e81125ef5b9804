"""Each test that asks for ``url`` or ``catalog`` runs on SQLite and on PostgreSQL."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.catalog.session import Catalog, open_catalog
from tests.support.catalog.postgresql import PostgreSQL, private_postgresql

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    with private_postgresql() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a catalog that does not exist yet."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/catalog.db"
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.create(f"catalog{next(_numbers)}")


@pytest.fixture
def catalog(url: str) -> Iterator[Catalog]:
    with open_catalog(url) as opened:
        yield opened

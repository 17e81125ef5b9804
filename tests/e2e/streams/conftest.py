from __future__ import annotations

from collections.abc import Iterator

import pytest

from backupd.catalog.session import Catalog
from tests.support.e2e.house import House
from tests.support.e2e.service import catalog_of


@pytest.fixture
def catalog(house: House) -> Iterator[Catalog]:
    """The catalog of the test's installation."""
    with catalog_of(house) as opened:
        yield opened

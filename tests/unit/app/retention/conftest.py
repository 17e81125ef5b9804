from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backupd.catalog.session import Catalog, open_catalog
from tests.support.catalog.installation import Installation


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


@pytest.fixture
def installation(tmp_path: Path, catalog: Catalog) -> Callable[..., Installation]:
    """Makes an Installation: ``installation("{local: {daily: 7}}")``."""

    def make(rules: str = "", *places: str, **changes: object) -> Installation:
        return Installation(tmp_path, catalog, rules, places or ("local",), **changes)  # type: ignore[arg-type]  # as named there

    return make

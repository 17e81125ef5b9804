from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backupd.catalog.session import Catalog, open_catalog
from tests.support.catalog.shelf import Shelf


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


@pytest.fixture
def shelf(tmp_path: Path, catalog: Catalog) -> Callable[..., Shelf]:
    """Makes a Shelf: ``shelf("{local: {daily: 7}}")``."""

    def make(rules: str = "", *places: str, **changes: object) -> Shelf:
        return Shelf(tmp_path, catalog, rules, places or ("local",), **changes)  # type: ignore[arg-type]  # as named there

    return make

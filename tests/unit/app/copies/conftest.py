from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backupd.catalog.session import Catalog, open_catalog
from tests.support.service.shop import Shop


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


@pytest.fixture
def shop(tmp_path: Path, catalog: Catalog) -> Callable[..., Shop]:
    """Makes a Shop: ``shop("{offsite: {keep_fulls: 7}}")``."""

    def make(rules: str = "", **changes: object) -> Shop:
        return Shop(tmp_path, catalog, rules, **changes)  # type: ignore[arg-type]  # as named there

    return make

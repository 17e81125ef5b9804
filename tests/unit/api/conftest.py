from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service.rig import Rig, rig


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An interface over a fresh installation, shared by the tests of one file."""
    base: Path = tmp_path_factory.mktemp("api")
    with rig(base) as running:
        yield running

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.keys import make_home, stop_agent
from tests.support.stores.folders import short_directory
from tests.support.stores.homes import Homes, build


@pytest.fixture(scope="session")
def homes() -> Iterator[Homes]:
    """Two GnuPG homes with secret keys; only read them."""
    with short_directory("bt-homes-") as base:
        made = build(base)
        yield made
        stop_agent(made.both)
        stop_agent(made.stranger)


@pytest.fixture
def new_home(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes an empty GnuPG home of the given name; whatever agents gpg starts for them are ended."""
    made: list[Path] = []

    def make(name: str) -> Path:
        made.append(make_home(tmp_path / name))
        return made[-1]

    yield make
    for home in made:
        stop_agent(home)

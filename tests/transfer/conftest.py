from __future__ import annotations

from collections.abc import Iterator

import pytest

from backupd.transfer.gpg import stop_agent
from tests.support.places import short_directory
from tests.transfer.homes import Homes, build


@pytest.fixture(scope="session")
def homes() -> Iterator[Homes]:
    """Two GnuPG homes with secret keys; only read them."""
    with short_directory("bt-homes-") as base:
        made = build(base)
        yield made
        stop_agent(made.both)
        stop_agent(made.stranger)

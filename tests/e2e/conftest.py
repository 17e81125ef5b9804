"""Houses for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import sample
from tests.support.e2e.house import House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer


@pytest.fixture
def house(short_tmp: Path, shared_server: PrivateServer, keys: Keys) -> House:
    """A house for the session's server, which holds the small sample: its data must not be changed."""
    return House(short_tmp, shared_server, keys)


@pytest.fixture
def own_house(short_tmp: Path, keys: Keys) -> Iterator[House]:
    """A house with a server of its own, holding the small sample, free to be damaged. It listens on TCP too, so
    that a replica can follow it."""
    with PrivateServer(tcp=True) as server:
        server.create_backup_users()
        sample.create(server)
        yield House(short_tmp, server, keys)

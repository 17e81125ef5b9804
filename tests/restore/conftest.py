from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.restore.taken import Taken, take_backup
from tests.support.keys import Keys
from tests.support.mariadb import PrivateServer
from tests.support.places import short_directory


@pytest.fixture(scope="session")
def taken(shared_server: PrivateServer, keys: Keys) -> Iterator[Taken]:
    """A backup of the shared sample; its repository is only read."""
    with short_directory("bt-repo-") as folder:
        yield take_backup(shared_server, keys, folder / "repository")

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.keys import Keys
from tests.support.restores.rolling import MARIADB, MYSQL, Kind, Quiet
from tests.support.restores.taken import Taken, take_backup
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import short_directory


@pytest.fixture(scope="session")
def taken(shared_server: PrivateServer, keys: Keys) -> Iterator[Taken]:
    """A backup of the shared sample; its repository is only read."""
    with short_directory("bt-repo-") as folder:
        yield take_backup(shared_server, keys, folder / "repository")


@pytest.fixture(scope="package")
def quiet_mariadb() -> Iterator[Quiet]:
    """A source that writes no more, its logs and a backup from before them: do not change it."""
    with short_directory() as folder, MARIADB.make() as source:
        yield Quiet(MARIADB, source, folder)


@pytest.fixture(scope="package")
def quiet_mysql() -> Iterator[Quiet]:
    with short_directory() as folder, MYSQL.make(options={"binlog_rows_query_log_events": "ON"}) as source:
        yield Quiet(MYSQL, source, folder)


@pytest.fixture
def quiet(request: pytest.FixtureRequest, kind: Kind) -> Quiet:
    """The one of the test's ``kind``."""
    found = request.getfixturevalue(f"quiet_{kind}")
    assert isinstance(found, Quiet)
    return found

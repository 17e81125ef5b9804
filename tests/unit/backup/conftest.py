"""A server of one module, which its tests may change, and a repository for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.keys import Keys
from tests.support.restores.dumped import DumpRepository
from tests.support.servers.mariadb import PrivateServer


@pytest.fixture(scope="module")
def own_server() -> Iterator[PrivateServer]:
    with PrivateServer() as private:
        private.create_backup_users()
        yield private


@pytest.fixture
def repository(short_tmp: Path, own_server: PrivateServer, keys: Keys) -> Iterator[DumpRepository]:
    """With an empty server: whatever schemas and accounts a test made are gone afterwards."""
    yield DumpRepository(short_tmp, own_server, keys)
    for (name,) in own_server.query(
        "SELECT SCHEMA_NAME FROM information_schema.SCHEMATA WHERE SCHEMA_NAME NOT IN "
        "('mysql', 'sys', 'information_schema', 'performance_schema')"
    ):
        own_server.execute(f"DROP DATABASE `{name}`")
    for user, host, role in own_server.query(
        "SELECT user, host, is_role FROM mysql.user WHERE user NOT IN ('root', 'mariadb.sys', 'backup', 'backupd')"
    ):
        own_server.execute(f"DROP ROLE `{user}`" if role == "Y" else f"DROP USER `{user}`@`{host}`")

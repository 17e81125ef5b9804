"""One test for both flavours: a server of each for a module of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backupd.engine.sql.client import Connection
from backupd.model.server_facts import Flavour
from tests.support.servers import mysql
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server

BOTH = (Flavour.MARIADB, Flavour.MYSQL)


@contextmanager
def server_of(flavour: Flavour, **options: str | int | None) -> Iterator[Server]:
    """With the service's account. Skips where there is no server of the flavour."""
    if flavour is Flavour.MYSQL and mysql.why_not():
        pytest.skip(mysql.why_not())
    quick: dict[str, str | int | None] = {"innodb_flush_log_at_trx_commit": 0, "sync_binlog": 0, **options}
    with PrivateServer(options=quick) if flavour is Flavour.MARIADB else MySQLServer(options=quick) as server:
        server.create_backup_users()
        yield server


def as_service(server: Server) -> Connection:
    return Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)


def as_root(server: Server) -> Connection:
    return Connection(socket=str(server.socket), user="root")

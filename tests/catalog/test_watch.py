"""Of all services of a catalog one is on watch."""

from __future__ import annotations

import psycopg
import pytest

from backupd.catalog.session import Catalog, open_catalog
from tests.catalog.postgresql import PostgreSQL


def test_one_holds_it_until_it_leaves(url: str, catalog: Catalog) -> None:
    with open_catalog(url) as other:
        assert catalog.watch.take("process 1 on db1")
        assert catalog.watch.held()
        assert not other.watch.take("process 2 on db2")
        assert not other.watch.held()
        assert other.watch.holder()
        catalog.watch.leave()
        assert not catalog.watch.held()
        assert other.watch.take("process 2 on db2")
        other.watch.leave()
        other.watch.leave()


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_the_holder_is_named(catalog: Catalog) -> None:
    assert catalog.watch.take("process 1 on db1")
    assert catalog.watch.holder() == "process 1 on db1"
    catalog.watch.leave()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_session_that_was_cut_is_noticed_and_can_be_taken_again(
        url: str, catalog: Catalog, postgresql: PostgreSQL) -> None:
    assert catalog.watch.take("process 1 on db1")
    with psycopg.connect(postgresql.url("postgres"), autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
    assert not catalog.watch.held()
    assert catalog.watch.take("process 1 on db1")
    assert catalog.watch.held()
    catalog.watch.leave()

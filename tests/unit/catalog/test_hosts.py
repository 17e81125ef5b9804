"""Of all services of a catalog one is on watch; hosts agree on their names."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest
from sqlalchemy import Engine, event

from backupd.catalog.database import Database
from backupd.catalog.hosts import SERVED
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.errors import RefusedError, UnknownNameError
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.catalog.postgresql import PostgreSQL
from tests.support.catalog.samples import NOON
from tests.support.stores.gate import until


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
    url: str, catalog: Catalog, postgresql: PostgreSQL
) -> None:
    assert catalog.watch.take("process 1 on db1")
    with psycopg.connect(postgresql.url("postgres"), autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'")
        # A session that is told to end says so first, and lets go of its lock afterwards.
        until(lambda: admin.execute("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'").fetchone() is None)
    assert not catalog.watch.held()
    assert catalog.watch.take("process 1 on db1")
    assert catalog.watch.held()
    catalog.watch.leave()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_session_of_its_own_whose_death_the_server_has_not_noticed_is_in_nobodys_way(
    url: str, catalog: Catalog
) -> None:
    made: list[psycopg.Connection[tuple[object, ...]]] = []

    def remember(connection: psycopg.Connection[tuple[object, ...]], _record: object) -> None:
        made.append(connection)

    event.listen(Engine, "connect", remember)
    try:
        ours_end, dead = socket.socketpair()
        ours_end.close()
        with open_catalog(url) as ours, closing(dead):
            assert ours.watch.take("process 1 on db1")
            kept = [os.dup(one.fileno()) for one in made]  # to the server they live
            for one in made:
                os.dup2(dead.fileno(), one.fileno())
            try:
                assert not ours.watch.held()
                assert not catalog.watch.take("process 2 on db2")
                assert ours.watch.take("process 1 on db1")
                assert ours.watch.held()
                assert not catalog.watch.take("process 2 on db2")
            finally:
                for descriptor in kept:
                    os.close(descriptor)
            ours.watch.leave()
    finally:
        event.remove(Engine, "connect", remember)


def test_threads_that_record_one_host_at_once_agree_on_its_name(url: str) -> None:
    with open_catalog(url) as catalog, ThreadPoolExecutor(8) as pool:
        start = threading.Barrier(8)

        def join(number: int) -> str:
            start.wait()
            return catalog.hosts.join("shop1", "0" * 32, NOON, named=True, leads=number % 2 == 0)

        assert set(pool.map(join, range(8))) == {"shop1"}
        assert [one.name for one in catalog.hosts.all(NOON)] == ["shop1"]


def test_hosts_are_listed_with_their_jobs_and_one_that_is_no_more_can_be_forgotten(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Database, "clock", lambda _database, _connection, now: now)
    with open_catalog(url) as catalog:
        hosts, later = catalog.hosts, NOON + SERVED
        for number, name in enumerate(("old", "main", "busy")):
            hosts.join(name, f"{number}" * 32, NOON, named=True)
        hosts.serves("main", later)
        hosts.serves("old", NOON)
        for number, (state, name) in enumerate((("queued", "busy"), ("queued", "main"), ("missed", "main"))):
            job = JobRecord(f"20261121T040000Z-{number:08x}", JobKind.VERIFY, "db1", JobState(state), NOON)
            catalog.jobs.add(replace(job, runs_on=f"host:{name}"))
        assert [(one.name, one.served, one.served_at, one.jobs) for one in hosts.all(later)] == [
            ("busy", False, None, 1),
            ("main", True, later, 1),
            ("old", False, NOON, 0),
        ]
        assert sorted(hosts.all(later)[0].as_json()) == ["jobs", "name", "served", "served_at", "since"]
        for name, error, why in (
            ("main", RefusedError, "a service runs on host main"),
            ("busy", RefusedError, "1 jobs wait for host busy"),
            ("nobody", UnknownNameError, "there is no host nobody"),
        ):
            with pytest.raises(error, match=why):
                hosts.forget(name, later)
        hosts.forget("old", later)
        assert [one.name for one in hosts.all(later)] == ["busy", "main"]

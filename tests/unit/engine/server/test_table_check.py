"""Tables that crashes or bad disks have damaged, on real servers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.engine.sql.client import Session
from backupd.engine.sql.tables import Table, check, list_tables
from backupd.model.errors import CancelledError
from tests.support.servers.flavours import BOTH, as_root, as_service, server_of
from tests.support.servers.server import Server, query

SICK = ("cut", "scribbled", "mended")


@pytest.fixture(scope="module", params=BOTH)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    # A server that repairs by itself would do so when a table that was found damaged is opened next.
    with server_of(request.param, myisam_recover_options="OFF") as found:
        found.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.inno (id INT PRIMARY KEY)",
            "CREATE TABLE shop.well (id INT PRIMARY KEY, v VARCHAR(200)) ENGINE=MyISAM",
            "INSERT INTO shop.well VALUES (1, 'aaa'), (2, 'bbb'), (3, REPEAT('x', 180))",
            "CREATE TABLE shop.csv (id INT NOT NULL) ENGINE=CSV",
        )
        for name in SICK:
            found.execute(
                f"CREATE TABLE shop.{name} LIKE shop.well", f"INSERT INTO shop.{name} SELECT * FROM shop.well"
            )
        found.execute("FLUSH TABLES")
        folder = found.datadir / "shop"
        for name in ("cut", "mended"):
            _cut(folder / f"{name}.MYD")
        index = folder / "scribbled.MYI"
        index.write_bytes(b"\x00" * 200 + index.read_bytes()[200:])
        yield found


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _tables(session: Session, *names: str) -> list[Table]:
    return [
        table
        for table in list_tables(session)
        if table.name.schema == "shop" and (not names or table.name.table in names)
    ]


def test_damaged_tables_are_named_with_the_server_s_words_and_sound_ones_are_not(server: Server) -> None:
    with as_service(server).connect() as session:
        found = check(session, _tables(session, "inno", "well", "csv", "cut", "scribbled"))
    words = {name.table: text for name, text in found.items()}
    assert set(words) == {"cut", "scribbled"}
    assert "Size of datafile" in words["cut"]
    assert "scribbled" in words["scribbled"]


def test_a_table_is_repaired_only_where_that_is_asked_for_and_what_it_cost_is_told(server: Server) -> None:
    told: list[str] = []
    with as_service(server).connect() as session:
        (refused,) = check(session, _tables(session, "mended"), repair=True, report=told.append).values()
    assert "it cannot be repaired: " in refused
    assert "denied" in refused
    assert not told
    with as_root(server).connect() as session:
        assert check(session, _tables(session, "mended"), repair=True, report=told.append) == {}
        assert check(session, _tables(session, "mended")) == {}
        lost = check(session, _tables(session, "scribbled"), repair=True, report=told.append)
    assert len(told) == 1
    assert told[0].startswith("shop.mended was damaged (")
    assert "Size of datafile" in told[0]
    assert "Number of rows changed from 3 to 2" in told[0]
    assert "it cannot be repaired" in next(iter(lost.values()))
    assert server.scalar("SELECT COUNT(*) FROM shop.mended") == 2


def test_no_limit_of_the_server_makes_a_sound_table_look_damaged(server: Server) -> None:
    limits = {"max_statement_time": "0.000001", "max_execution_time": "1"}
    (name,) = (name for name in limits if server.query(f"SHOW GLOBAL VARIABLES LIKE '{name}'"))
    with as_service(server).connect() as session:
        tables = _tables(session, "well")
        server.execute(f"SET GLOBAL {name} = {limits[name]}")
        try:
            assert check(session, tables) == {}
        finally:
            with server.connect() as connection:
                query(connection, f"SET SESSION {name} = 0")
                query(connection, f"SET GLOBAL {name} = 0")


def test_checking_can_be_cancelled(server: Server) -> None:
    stop = threading.Event()
    stop.set()
    with as_service(server).connect() as session, pytest.raises(CancelledError):
        check(session, _tables(session), cancel=stop)

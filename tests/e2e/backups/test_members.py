"""A group of servers: a backup is taken from the best member, the next one stands in where that fails, and both are one
history with one binary log."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pymysql
import pytest

from backupd.engine.member_probe import compared_server, has_received, log_end, silence_of
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Connection, Session
from tests.support.dice import size
from tests.support.e2e.forked import TABLES, Source, frozen
from tests.support.e2e.group import GroupHouse
from tests.support.e2e.house import SERVER
from tests.support.keys import Keys
from tests.support.servers import mysql
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.replica import catch_up, follow, part, replica_of
from tests.support.servers.server import Server

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

POLICY = "binlog: {stream: true, checkpoint: 1s}\n"


@contextmanager
def group(base: Path, keys: Keys, settings: str) -> Iterator[tuple[Source, Server]]:
    """``db1``, the source, and ``db2``, its replica, which is given."""
    with PrivateServer(tcp=True) as source:
        source.create_backup_users()
        source.execute(*TABLES)
        with replica_of(source) as replica:
            house = GroupHouse(
                base, source, keys, policy_extra=POLICY, members={"db1": source, "db2": replica}, settings=settings
            )
            yield Source(house), replica


def taken(house: GroupHouse, kind: str = "full") -> tuple[str, str, dict[str, Any]]:
    """Which member a backup was taken from, why, and its record."""
    record: dict[str, Any] = house.ok("backup", SERVER, "--kind", kind)
    return record["member"]["name"], record["member"]["reason"], record


def test_the_best_member_is_backed_up_and_its_chain_is_rolled_forward_by_the_log_of_the_source(
    short_tmp: Path, keys: Keys
) -> None:
    with group(short_tmp, keys, ", max_lag: 5s") as (source, replica):
        house, server = source.house, source.server
        assert isinstance(house, GroupHouse)
        checked = house.run("check", SERVER)
        assert "db2 can be taken: a replica" in checked.all, checked.all
        source.stream()
        source.write("first")
        catch_up(server, replica)
        source.stream()
        name, why, full = taken(house)
        assert (name, why.partition(",")[0]) == ("db2", "a replica")
        assert full["member"]["log"]["gtid"] == full["position"]["gtid"], "its place in the log of the source is known"
        name, _why, increment = taken(house, "incremental")
        assert (name, increment["parent"]) == ("db2", full["id"])
        source.write("later")
        source.stream()
        source.is_restored("latest", "later")

        replica.execute("STOP SLAVE SQL_THREAD")
        name, why, record = taken(house, "incremental")
        assert (name, record["kind"]) == ("db1", "physical-full"), "a chain is of one server"
        assert "though the group prefers replicas" in why
        assert "db2: the lag of db2 is unknown: replication is stopped" in why
        assert "this is another server" in record["reason"]
        replica.execute("START SLAVE SQL_THREAD")
        catch_up(server, replica)
        assert taken(house, "logical")[0] == "db2"
        with frozen(replica.pid):
            name, why, _record = taken(house, "logical")
        assert name == "db1"
        assert "db2: it cannot be asked" in why
        with frozen(server.pid):
            none = house.fails("backup", SERVER, "--kind", "logical").all
        assert "db2: its lag is not known: its source may be db1, which cannot be asked" in none, (
            "its threads run, and it says that it is not behind"
        )
        replica.execute("SET GLOBAL read_only = 0")
        source.write("last")
        catch_up(server, replica)
        source.stream()
        source.is_restored("latest", "last")
        unknown = house.fails("backup", "db2", code=2)
        assert "db2 is a member of the group shop-db1" in unknown.all


ROTATIONS = size(few=2, many=67)
"""Of each of three reigns: 200 in all."""


def rotations(source: Source, count: int) -> None:
    """The binary log begins anew so often, with rows in each."""
    for number in range(count):
        source.server.execute(
            f"UPDATE shop.stock SET amount = amount + {number} WHERE id = 1",
            "FLUSH BINARY LOGS",
            f"UPDATE shop.stock SET amount = amount - {number} WHERE id = 2",
        )
        if number % 20 == 0:
            source.stream()


def rotated_empty(source: Source) -> None:
    """A new binary log with nothing in it, and every earlier one has left the spool."""
    source.server.execute("FLUSH BINARY LOGS")
    for _twice in range(2):
        source.stream()
    spool = source.house.base / "spool" / "binlogs" / SERVER / "branches"
    newest = max(spool.iterdir(), key=lambda folder: folder.name)
    assert len(list(newest.iterdir())) == 1


@pytest.mark.campaign
def test_two_switches_of_the_member_whose_log_is_streamed_stay_one_history(short_tmp: Path, keys: Keys) -> None:
    with group(short_tmp, keys, ", prefer: any, failover_after: 2s") as (source, replica):
        house, first = source.house, source.server
        source.stream()
        source.write("early")
        catch_up(first, replica)
        house.backup()
        source.write("shared")
        rotations(source, ROTATIONS)
        catch_up(first, replica)
        rotated_empty(source)

        first.stop()
        part(replica)
        replica.execute("SET GLOBAL read_only = 0")
        time.sleep(2.5)
        house.server = replica
        source.write("on the second")
        source.stream()

        first.start()
        follow(replica, first)
        source.write("both")
        rotations(source, ROTATIONS)
        catch_up(replica, first)
        rotated_empty(source)
        replica.stop()
        part(first)
        time.sleep(2.5)
        house.server = first
        rotations(source, ROTATIONS)
        source.write("on the first again")
        source.stream()
        branches = source.branches()
        assert [one["reason"] for one in branches] == ["first", "failover", "failover"]
        assert all(one["fork"] for one in branches[1:]), "also right behind a rotation"
        source.is_restored("latest", "on the first again")
        source.is_restored(source.moments["on the second"].time, "on the second")


def test_behind_a_rotation_the_fork_is_known_though_what_both_share_has_left_the_spool(
    short_tmp: Path, keys: Keys
) -> None:
    with group(short_tmp, keys, ", prefer: any, failover_after: 1s") as (source, replica):
        first = source.server
        source.stream()
        shared = source.write("shared")
        catch_up(first, replica)
        replica.execute("STOP SLAVE")
        source.write("lost")
        rotated_empty(source)
        first.stop()
        part(replica)
        replica.execute("SET GLOBAL read_only = 0")
        source.house.server = replica
        source.write("new")
        time.sleep(1.5)
        source.stream()
        _first, now = source.branches()
        assert (now["reason"], (now["fork"] or {}).get("gtid")) == ("failover", shared.executed), now


@pytest.mark.skipif(bool(mysql.why_not()), reason=mysql.why_not() or "there is one")
def test_on_mysql_the_next_member_is_taken_where_the_replica_lags_is_paused_is_promoted_or_dies(
    short_tmp: Path, keys: Keys
) -> None:
    with MySQLServer(tcp=True) as first:
        first.create_backup_users()
        first.execute(*TABLES)
        with replica_of(first) as second:
            house = GroupHouse(short_tmp, first, keys, members={"db1": first, "db2": second}, settings=", max_lag: 1s")
            assert taken(house, "logical")[:2] == ("db2", "a replica, 0.0s behind")
            with rooted(first) as there, rooted(second) as here:
                end = log_end(there)
                assert end is not None
                assert has_received(here, first.server_id, end)
                assert has_received(here, first.server_id, replace(end, file="other.000001")), "by its GTIDs"
                after = replace(end, pos=end.pos + 1, gtid=f"{uuid.uuid4()}:1")
                assert not has_received(here, first.server_id, after)
                assert silence_of(here, expected=True) == 0.0
                assert 0.0 < silence_of(here, expected=False) < 60.0, "it says when it heard of its source last"
                assert compared_server(here, read_dialect(here)).uuid == second.scalar("SELECT @@server_uuid")
            with locked(second):
                first.execute("UPDATE shop.stock SET amount = 7")
                until(lambda: lag(second) > 2)
                name, why, _record = taken(house, "logical")
            assert name == "db1"
            assert re.search(
                r"though the group prefers replicas; db2: it is [\d.]+s behind its source, more than max_lag", why
            )
            catch_up(first, second)
            second.execute("STOP REPLICA SQL_THREAD")
            name, why, record = taken(house, "logical")
            assert (name, record["member"]["name"]) == ("db1", "db1")
            assert "db2: the lag of db2 is unknown: replication is stopped" in why
            shown = house.ok("backups", "show", record["id"])
            assert shown["member"] == record["member"], "the record says which, and why"

            second.execute("START REPLICA SQL_THREAD")
            catch_up(first, second)
            assert "db2 can be taken: a replica" in house.run("check", SERVER).all
            part(second)
            second.execute("SET GLOBAL read_only = 0")
            first.execute("SET GLOBAL read_only = 1")
            follow(second, first)
            name, why, _record = taken(house, "logical")
            assert (name, why) == ("db1", "a replica, 0.0s behind"), "what counts is what each is when the backup runs"
            second.kill()
            none = house.fails("backup", SERVER, "--kind", "logical").all
            assert "db2: it cannot be asked" in none
            assert "db1: " in none


def rooted(server: Server) -> AbstractContextManager[Session]:
    return Connection(socket=str(server.socket), user="root").connect()


@contextmanager
def locked(server: Server) -> Iterator[None]:
    """Nothing is applied to a table."""
    with server.connect() as session, session.cursor() as cursor:
        cursor.execute("LOCK TABLES shop.stock READ")
        yield


def lag(replica: Server) -> int:
    with replica.connect() as session, session.cursor(pymysql.cursors.DictCursor) as cursor:
        cursor.execute("SHOW REPLICA STATUS")
        row = cursor.fetchone()
    assert row is not None
    return int(row["Seconds_Behind_Source"] or 0)


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.1)

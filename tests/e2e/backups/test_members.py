"""A group of servers: a backup is taken from the best member, the next one stands in where that fails, and both are one
history with one binary log."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e.forked import TABLES, Source, frozen
from tests.support.e2e.group import GroupHouse
from tests.support.e2e.house import SERVER
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
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
        replica.execute("SET GLOBAL read_only = 0")
        source.write("last")
        catch_up(server, replica)
        source.stream()
        source.is_restored("latest", "last")
        unknown = house.fails("backup", "db2", code=2)
        assert "db2 is a member of the group shop-db1" in unknown.all


def test_two_switches_of_the_member_whose_log_is_streamed_stay_one_history(short_tmp: Path, keys: Keys) -> None:
    with group(short_tmp, keys, ", prefer: any, failover_after: 2s") as (source, replica):
        house, first = source.house, source.server
        source.stream()
        source.write("early")
        catch_up(first, replica)
        house.backup()
        source.write("shared")
        catch_up(first, replica)
        source.stream()

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
        catch_up(replica, first)
        source.stream()
        replica.stop()
        part(first)
        time.sleep(2.5)
        house.server = first
        source.write("on the first again")
        source.stream()
        branches = source.branches()
        assert [one["reason"] for one in branches] == ["first", "failover", "failover"]
        assert all(one["fork"] for one in branches[1:])
        source.is_restored("latest", "on the first again")
        source.is_restored(source.moments["on the second"].time, "on the second")

"""A new replica out of a backup: it catches up with a source under load, and nobody hears of it before it may."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from restore.datadir.staging import read_marker
from tests.support.dice import SOAK
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.new_replica import PASSWORD, equal, filled, load, replicate, with_account
from tests.support.ending import end
from tests.support.keys import Keys
from tests.support.servers.datadir import Options
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.replica import replica_of
from tests.support.servers.server import Server, connect, query
from tests.support.servers.stacks import MYSQL, MYSQL_CLONE, Stack, stacks

POLICY = "binlog: {stream: true, checkpoint: 1s}\n"


@pytest.fixture(scope="module")
def shop() -> Iterator[Server]:
    with PrivateServer(tcp=True, options={"event_scheduler": "ON"}) as server:
        filled(server)
        yield server


def test_a_replica_is_made_of_a_primary_under_load(short_tmp: Path, shop: Server, keys: Keys) -> None:
    house = with_account(House(short_tmp, shop, keys, policy_extra=POLICY))
    taken = house.backup()
    shop.execute("INSERT INTO shop.orders (what) VALUES ('after the backup')")
    datadir = short_tmp / "replica"
    planned = house.ok("plan", *replicate(datadir, SERVER)[1:])
    assert (planned["replica"]["by_gtid"], planned["replay"]) == (True, None), "the source has all of it"
    with load(shop):
        # Killed while it replicates, the same command goes on.
        def is_loose() -> bool:
            marker = read_marker(datadir)
            return marker is not None and bool(marker.replica.get("following"))

        house.kill_when(is_loose, *replicate(datadir, SERVER, "--start"))
        outcome: dict[str, Any] = house.ok(*replicate(datadir, SERVER, "--start"))
    replica, started = outcome["replica"], outcome["started"]
    try:
        assert outcome["backup"] == taken["id"]
        assert (replica["caught_up"], replica["events"]) == (True, ["shop.tick"])
        assert replica["server_id"] == planned["replica"]["server_id"]
        assert replica["options"]["read_only"] == "ON"
        equal(shop, started["socket"])
        with connect(started["socket"]) as connection:
            assert query(connection, "SELECT @@server_id, @@read_only, @@event_scheduler, @@skip_networking") == [
                (replica["server_id"], 1, "OFF", 1)
            ]
            assert query(connection, "SELECT status FROM mysql.event") == [("SLAVESIDE_DISABLED",)]
            assert query(connection, "SELECT COUNT(*) FROM mysql.user WHERE user = 'backupd_private'") == [(0,)]
        kept = [(datadir / ".backupd-restore.json").read_text(), json.dumps(outcome), json.dumps(planned)]
        kept += [path.read_bytes().decode("latin-1") for path in short_tmp.glob("catalog.db*")]
        assert not [text for text in kept if PASSWORD in text], "the password is kept where it does not belong"
    finally:
        end(started["pid"])


def test_what_cannot_become_a_replica_is_refused_before_a_byte_moves(short_tmp: Path, shop: Server, keys: Keys) -> None:
    house = with_account(House(short_tmp, shop, keys), "wrong")
    taken = house.backup()
    datadir = short_tmp / "replica"

    def refused(words: str, *options: str, source: str = SERVER, to: str = "latest") -> None:
        done = house.fails(*replicate(datadir, source, *options, to=to))
        assert words in done.all, done.all
        assert not datadir.exists()
        assert not datadir.with_name("replica.restoring").exists()

    refused("cannot replicate from")  # wrong password
    with_account(house)
    refused("is taken", "--server-id", str(shop.server_id))
    with PrivateServer(tcp=True) as other:
        other.execute(
            f"CREATE USER repl@'127.0.0.1' IDENTIFIED BY '{PASSWORD}'",
            "GRANT REPLICATION SLAVE ON *.* TO repl@'127.0.0.1'",
        )
        refused("another history", source=f"127.0.0.1:{other.port}", to=f"backup:{taken['id']}")
    for wrong in (("--delay", "-1h"), ("--source", "a b"), ("--mode", "new-server")):
        done = house.fails(*replicate(datadir, SERVER, *wrong), code=2)
        assert "Traceback" not in done.all
    shop.execute("FLUSH BINARY LOGS", "INSERT INTO shop.orders (what) VALUES ('later')", "FLUSH BINARY LOGS")
    last = shop.query("SHOW BINARY LOGS")[-1][0]
    shop.execute(f"PURGE BINARY LOGS TO '{last}'")
    refused("was purged")
    oldest = shop.query("SHOW BINARY LOGS")[0][0]  # a log that a dump still reads is kept
    assert f"its oldest binary log is {oldest}" in house.fails(*replicate(datadir, SERVER)).all


def test_a_replica_follows_the_source_of_the_replica_that_was_backed_up(short_tmp: Path, keys: Keys) -> None:
    with PrivateServer(tcp=True) as source:
        filled(source)
        with replica_of(source) as replica:
            house = with_account(House(short_tmp, replica, keys))
            house.backup()
            source.execute("INSERT INTO shop.orders (what) VALUES ('after the backup')")
            datadir = short_tmp / "replica"
            outcome = house.ok(*replicate(datadir, f"127.0.0.1:{source.port}", "--start", "--delay", "1s"))
            try:
                assert outcome["replica"]["delay"] == 1
                equal(source, outcome["started"]["socket"])
            finally:
                end(outcome["started"]["pid"])


@pytest.mark.parametrize("stack", stacks(*MYSQL))
@pytest.mark.parametrize("gtid_mode", ["ON", pytest.param("OFF", marks=SOAK)])
def test_a_replica_of_mysql_follows_by_gtid_or_by_position(
    short_tmp: Path, keys: Keys, stack: Stack, gtid_mode: str
) -> None:
    options = {"gtid_mode": gtid_mode, "enforce_gtid_consistency": gtid_mode}
    with stack.make(tcp=True, options=options) as source:
        if stack.refused():
            pytest.skip("left to a soak")
        filled(source)
        house = with_account(House(short_tmp, source, keys, programs=stack.all_programs()))
        house.backup()
        source.execute("INSERT INTO shop.orders (what) VALUES ('after the backup')")
        datadir = short_tmp / "replica"
        outcome = house.ok(*replicate(datadir, SERVER, "--start"))
        replica, started = outcome["replica"], outcome["started"]
        try:
            assert (replica["by_gtid"], replica["caught_up"]) == (gtid_mode == "ON", True)
            assert replica["uuid"] != source.scalar("SELECT @@server_uuid")
            assert replica["events"] == ["shop.tick"]
            equal(source, started["socket"])
            with connect(started["socket"]) as connection:
                assert query(connection, "SELECT @@super_read_only, @@server_id") == [(1, replica["server_id"])]
                if gtid_mode == "ON":
                    source.execute("INSERT INTO shop.orders (what) VALUES ('now')")
                    executed = source.scalar("SELECT @@GLOBAL.gtid_executed")
                    assert query(connection, "SELECT WAIT_FOR_EXECUTED_GTID_SET(%s, 60)", (executed,)) == [(0,)]
                    assert query(connection, "SELECT @@GLOBAL.gtid_executed") == [(executed,)], "errant transactions"
        finally:
            end(started["pid"])


@pytest.mark.parametrize("stack", stacks(MYSQL_CLONE, soak=(MYSQL_CLONE,)))
def test_a_copy_of_a_member_of_a_group_is_a_replica_and_no_member(short_tmp: Path, keys: Keys, stack: Stack) -> None:
    options: Options = {"gtid_mode": "ON", "enforce_gtid_consistency": "ON", "disabled_storage_engines": "MyISAM"}
    with stack.make(tcp=True, options=options) as source, socket.socket() as free:
        filled(source)
        free.bind(("127.0.0.1", 0))
        source.execute(
            "INSTALL PLUGIN group_replication SONAME 'group_replication.so'",
            "SET GLOBAL group_replication_group_name = 'aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa'",
            f"SET GLOBAL group_replication_local_address = '127.0.0.1:{free.getsockname()[1]}'",
            "SET GLOBAL group_replication_bootstrap_group = ON",
            "SET PERSIST group_replication_start_on_boot = ON",
            f"CHANGE REPLICATION SOURCE TO SOURCE_USER='repl', SOURCE_PASSWORD='{PASSWORD}'"
            " FOR CHANNEL 'group_replication_recovery'",
            "CREATE SCHEMA mysql_innodb_cluster_metadata",
        )
        free.close()
        source.execute("START GROUP_REPLICATION")
        house = with_account(House(short_tmp, source, keys, programs=stack.all_programs()))
        house.backup()
        source.execute("INSERT INTO shop.orders (what) VALUES ('after the backup')")
        outcome = house.ok(*replicate(short_tmp / "replica", SERVER, "--start"))
        try:
            assert [text for text in outcome["warnings"] if "of a member of a group" in text], outcome["warnings"]
            with connect(outcome["started"]["socket"]) as connection:
                assert query(connection, "SELECT Channel_name FROM mysql.slave_master_info") == [("",)]
                assert query(connection, "SHOW SCHEMAS LIKE 'mysql\\_innodb%'") == []
                assert query(connection, "SELECT COUNT(*) FROM shop.orders") == [(21,)]
        finally:
            end(outcome["started"]["pid"])

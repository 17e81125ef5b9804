"""New replicas without GTIDs: by a place in the source's log, which is one of this server's history or of none; and
what of them is compared before they are handed over."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from backupd.engine.sql.client import Connection
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Position
from restore.replica.source import ReplicaStart, read_source, refuse_not_sent
from tests.support.dice import SOAK
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.new_replica import PASSWORD, SOURCE, equal, filled, load, replicate, with_account, with_source
from tests.support.ending import end
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.replica import follow_by_position, replica_of
from tests.support.servers.server import Server, connect, query
from tests.support.servers.stacks import MYSQL, Stack, stacks

COMPARED = "compared with its source before it was handed over"


def compared(outcome: dict[str, Any]) -> dict[str, Any]:
    """What the outcome says of the comparison with the source."""
    found: dict[str, Any] = next(one for one in outcome["checks"] if one["name"] == COMPARED)
    return found


def test_a_replica_of_mariadb_follows_by_the_place_that_its_backup_recorded(short_tmp: Path, keys: Keys) -> None:
    with PrivateServer(tcp=True) as source, source.another(options={"read_only": 1}, tcp=True) as replica:
        filled(source)
        follow_by_position(source, replica)
        house = with_source(with_account(House(short_tmp, replica, keys)), source)
        house.backup()
        source.execute("INSERT INTO shop.orders (what) VALUES ('after the backup')")
        datadir = short_tmp / "replica"

        # Another server has a file of this name, too.
        with PrivateServer(tcp=True) as other:
            filled(other)
            done = house.fails(*replicate(datadir, f"127.0.0.1:{other.port}"))
            assert "is not the server that the backed-up one followed" in done.all, done.all
            assert not datadir.exists()
            assert not datadir.with_name("replica.restoring").exists()

        # The account of replication may not read tables: nothing would be compared, and that is said.
        blind = house.ok("plan", *replicate(datadir, f"127.0.0.1:{source.port}")[1:])
        assert blind["replica"]["compared_by"] == "nothing"
        assert any("will not be compared with its source" in text for text in blind["warnings"]), blind["warnings"]

        # The file of this name may have been begun only after the backup was taken: by a RESET MASTER.
        file, pos, *_rest = source.query("SHOW MASTER STATUS")[0]
        account = Connection(host="127.0.0.1", port=source.port or 0, user="repl", password=PASSWORD)
        start, facts = ReplicaStart(Position(str(file), int(pos)), False, ""), read_source(account)
        refuse_not_sent(account, start, facts, 4_000_000, datetime.now(UTC))
        with pytest.raises(RefusedError, match="is of another history than"):
            refuse_not_sent(account, start, facts, 4_000_000, datetime.now(UTC) - timedelta(days=1))

        planned = house.ok("plan", *replicate(datadir, SOURCE)[1:])
        assert (planned["replica"]["by_gtid"], planned["replica"]["compared_by"]) == (False, "checksums")
        with load(source):
            outcome = house.ok(*replicate(datadir, SOURCE, "--start"))
        try:
            made = outcome["replica"]
            assert (made["by_gtid"], made["caught_up"], made["compared_by"]) == (False, True, "checksums")
            assert (made["not_compared"], compared(outcome)["outcome"]) == ("", "passed"), compared(outcome)
            equal(source, outcome["started"]["socket"])
        finally:
            end(outcome["started"]["pid"])


@SOAK
@pytest.mark.parametrize("stack", stacks(*MYSQL))
@pytest.mark.parametrize("by_gtid", [True, False])
def test_a_backup_of_a_replica_of_mysql_makes_a_replica_of_either(
    short_tmp: Path, keys: Keys, stack: Stack, by_gtid: bool
) -> None:
    """Both places are recorded: the replica's own, and that in its source's log."""
    mode = "ON" if by_gtid else "OFF"
    options: dict[str, str | int | None] = {"gtid_mode": mode, "enforce_gtid_consistency": mode}
    with stack.make(tcp=True, options=options) as source:
        if stack.refused():
            pytest.skip("left to a soak")
        filled(source)
        with source.another(options=options, tcp=True) as replica:
            follow_by_position(source, replica)
            house = with_source(with_account(House(short_tmp, replica, keys, programs=stack.all_programs())), source)
            house.backup()
            source.execute("INSERT INTO shop.orders (what) VALUES ('after the backup')")
            servers = {SOURCE: source, SERVER: replica}
            if stack.tool == "clone" and not by_gtid:  # CLONE tells no place in the log of the source
                done = house.fails(*replicate(short_tmp / "replica", SOURCE))
                assert "holds no position in the binary log of" in done.all
                del servers[SOURCE]
            follow_each(house, servers, "gtids" if by_gtid else "checksums")


def follow_each(house: House, servers: Mapping[str, Server], by: str) -> None:
    """New replicas of each of ``servers``, out of the one backup."""
    for name, server in servers.items():
        datadir = house.base / f"of-{name}"
        outcome = house.ok(*replicate(datadir, name, "--start"))
        try:
            assert outcome["replica"]["compared_by"] == by, outcome["replica"]
            assert compared(outcome)["outcome"] == "passed", compared(outcome)
            equal(server, outcome["started"]["socket"])
        finally:
            end(outcome["started"]["pid"])


@SOAK
def test_a_backup_of_a_replica_of_mariadb_makes_a_replica_of_either(short_tmp: Path, keys: Keys) -> None:
    with PrivateServer(tcp=True) as source:
        filled(source)
        with replica_of(source, options={"log_slave_updates": 1}) as replica:
            house = with_source(with_account(House(short_tmp, replica, keys)), source)
            house.backup()
            source.execute("INSERT INTO shop.orders (what) VALUES ('after the backup')")
            follow_each(house, {SOURCE: source, SERVER: replica}, "received-gtids")


@SOAK
@pytest.mark.parametrize("stack", stacks(*MYSQL))
def test_a_row_that_is_not_the_source_s_keeps_a_replica_by_position_from_being_handed_over(
    short_tmp: Path, keys: Keys, stack: Stack
) -> None:
    options: dict[str, str | int | None] = {"gtid_mode": "OFF", "enforce_gtid_consistency": "OFF"}
    with stack.make(tcp=True, options=options) as source:
        if stack.refused():
            pytest.skip("left to a soak")
        filled(source)
        house = with_account(House(short_tmp, source, keys, programs=stack.all_programs()))
        house.backup()
        with source.connect() as connection:
            query(connection, "SET SESSION sql_log_bin = 0")
            query(connection, "UPDATE shop.orders SET what = 'unseen' WHERE id = 3")
        datadir = short_tmp / "replica"
        done = house.fails(*replicate(datadir, SERVER, "--start"))
        assert "1 tables of the replica are not as at its source: it is not handed over" in done.all
        assert "`shop`.`orders`" in done.all
        with source.connect() as connection:
            query(connection, "SET SESSION sql_log_bin = 0")
            query(connection, "UPDATE shop.orders SET what = 'order 2' WHERE id = 3")
        outcome = house.ok(*replicate(datadir, SERVER, "--start"))
        try:
            assert compared(outcome)["outcome"] == "passed"
            with connect(outcome["started"]["socket"]) as connection:
                assert query(connection, "SELECT what FROM shop.orders WHERE id = 3") == [("order 2",)]
        finally:
            end(outcome["started"]["pid"])

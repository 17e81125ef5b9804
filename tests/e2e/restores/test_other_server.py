"""Another database server under a known name: a wrong port, a name that resolves elsewhere. Its data is kept apart
until somebody says that it is the right one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backupd.catalog.session import open_catalog
from tests.support.e2e.forked import frozen
from tests.support.e2e.house import SERVER, House
from tests.support.ending import end
from tests.support.keys import Keys
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.replica import catch_up, replica_of
from tests.support.servers.server import Server, connect

POLICY = "binlog: {stream: true, checkpoint: 1s}\nretention: {local: {keep_fulls: 1}}\nlogical: {schedule: every 24h}\n"


def filled(server: Server, what: str) -> None:
    server.create_backup_users()
    server.execute(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.orders (id INT PRIMARY KEY, what VARCHAR(20))",
        *(f"INSERT INTO shop.orders VALUES ({number}, '{what} {number}')" for number in range(20)),
    )


@pytest.fixture
def two(short_tmp: Path, keys: Keys) -> Iterator[tuple[House, Server, Server]]:
    """A house whose server is the shop, the shop, and another server: both have the same tables and the server_id that
    every server has by default."""
    options = {"server_id": 1}
    with PrivateServer(tcp=True, options=options) as shop, PrivateServer(tcp=True, options=options) as other:
        filled(shop, "shop")
        filled(other, "other")
        other.execute(*(f"INSERT INTO shop.orders VALUES ({number}, 'more')" for number in range(100, 150)))
        yield House(short_tmp, shop, keys, policy_extra=POLICY), shop, other


def points_to(house: House, server: Server) -> None:
    house.server = server
    house.write()


def told(house: House) -> list[str]:
    """What was said of who answers, oldest first."""
    with open_catalog(house.catalog) as catalog:
        return [
            event.kind
            for event in sorted(catalog.events.list(server=SERVER, limit=1000), key=lambda e: e.number)
            if event.kind in ("server-changed", "server-known", "server-failover")
        ]


def restored(house: House, *options: str) -> tuple[list[str], dict[str, int]]:
    """Of which backups the latest moment is made, and what is in it, by a server that was started on it."""
    chain: list[str] = house.ok("plan", SERVER, "--to", "latest", *options)["chain"]
    datadir = house.base / "restored"
    outcome: dict[str, Any] = house.ok(
        "restore", SERVER, "--to", "latest", "--datadir", str(datadir), "--start", *options
    )
    try:
        with connect(outcome["started"]["socket"]) as connection:
            return chain, checksum_everything(connection)
    finally:
        end(outcome["started"]["pid"])
        house.remove_datadir(datadir)


def sums(server: Server) -> dict[str, int]:
    with server.connect() as connection:
        return checksum_everything(connection)


def test_a_stranger_is_kept_apart_until_it_is_accepted(two: tuple[House, Server, Server]) -> None:
    house, shop, other = two
    first = house.backup()
    shop.execute("INSERT INTO shop.orders VALUES (50, 'after the backup')")
    assert house.run("run-stream", SERVER, "--once").code == 0
    window = house.ok("timeline", SERVER)["windows"][-1]

    points_to(house, other)
    checked = house.fails("check", SERVER)
    assert "another server answers under this name" in checked.all
    assert f"backupd server accept {SERVER}" in checked.all
    for kind in ("full", "incremental", "logical"):
        taken = house.fails("backup", SERVER, "--kind", kind)
        assert "another server answers under this name" in taken.all, taken.all
    before = sums(other)
    for command in (
        (
            "restore",
            SERVER,
            "--to",
            f"backup:{first['id']}",
            "--tables",
            "shop.orders",
            "--into",
            SERVER,
            "--confirm",
            SERVER,
        ),
        ("leftovers", SERVER),
    ):
        refused = house.fails(*command)
        assert "another server answers under this name" in refused.all, refused.all
        assert f"backupd server accept {SERVER}" in refused.all
    assert sums(other) == before
    assert told(house) == ["server-changed"]
    assert house.run("run-stream", SERVER, "--once").code == 0
    assert [one["apart"] for one in house.backups()] == [True, True, True, False]

    line = house.ok("timeline", SERVER)
    assert len(line["branches"]) == 1
    assert [one["base"] for one in line["windows"]] == [first["id"]]
    assert line["latest"] == window["to"]
    assert any("kept separate" in warning for warning in line["warnings"])
    decided = house.ok("retention", SERVER)["destinations"][0]
    assert [one["id"] for one in decided["backups"] if not one["keep"]] == []
    house.ok("retention", SERVER, "--apply")
    assert "answers under this name since 20" in house.fails("plan", SERVER, "--to", "latest").all, "it goes on unseen"
    chain, found = restored(house, "--accept-older")
    assert chain == [first["id"]]
    assert found == sums(shop)
    proof = house.fails("test-restore", SERVER, "--json").json
    assert (proof["outcome"], proof["older"]) == ("restored", True), "what is shown is not what answers now"

    points_to(house, shop)
    assert house.run("check", SERVER).code == 0
    assert told(house) == ["server-changed", "server-known"]
    increment = house.ok("backup", SERVER, "--kind", "incremental")
    assert increment["parent"] == first["id"], increment

    points_to(house, other)
    house.fails("check", SERVER)
    accepted = house.ok("server", "accept", SERVER)
    assert accepted["verdict"] == "own"
    assert told(house) == ["server-changed", "server-known"] * 2
    house.fails("server", "accept", SERVER)
    house.backup()
    assert not any(one["apart"] for one in house.backups())
    chain, found = restored(house)
    assert not {first["id"], increment["id"]} & set(chain)
    assert found == sums(other)
    assert [one["action"] for one in house.ok("audit")].count("server-accepted") == 2


def test_once_a_wrong_entry_is_put_right_the_stream_goes_on_where_it_was(two: tuple[House, Server, Server]) -> None:
    house, shop, other = two
    first = house.backup()
    shop.execute("INSERT INTO shop.orders VALUES (50, 'before')")
    assert house.run("run-stream", SERVER, "--once").code == 0
    points_to(house, other)
    wrong = shop.scalar("SELECT UTC_TIMESTAMP(6)")
    for number in range(2):
        assert house.run("run-stream", SERVER, "--once").code == 0
        other.execute("FLUSH BINARY LOGS", f"CREATE DATABASE elsewhere{number}")
    shop.execute(
        "INSERT INTO shop.orders VALUES (51, 'nobody looked')",
        "FLUSH BINARY LOGS",
        "INSERT INTO shop.orders VALUES (52, 'nor here')",
    )

    points_to(house, shop)
    assert house.run("run-stream", SERVER, "--once").code == 0
    assert told(house) == ["server-changed", "server-known"]
    line = house.ok("timeline", SERVER)
    before, now = line["branches"]
    assert (now["parent"], now["fork"] is not None) == (before["id"], True)
    windows = line["windows"]
    assert [(one["branch"], one["base"]) for one in windows] == [(before["id"], first["id"]), (now["id"], first["id"])]
    assert windows[1]["from"] < wrong.isoformat() < windows[1]["to"], "every moment while nobody looked is in one"
    chain, found = restored(house)
    assert chain == [first["id"]]
    assert found == sums(shop)


def test_a_replica_of_another_shop_with_the_same_gtids_has_not_taken_over(two: tuple[House, Server, Server]) -> None:
    """Both shops began with server_id 1 in domain 0: the replica of the other one has all of our GTIDs, and more."""
    house, shop, other = two
    house.backup()
    time.sleep(3)  # both began within the same seconds; the number of this has another time there
    shop.execute("INSERT INTO shop.orders VALUES (50, 'after the backup')")
    assert house.run("run-stream", SERVER, "--once").code == 0
    with replica_of(other) as stranger:
        stranger.create_backup_users()
        points_to(house, stranger)
        checked = house.fails("check", SERVER)
        assert "which any MariaDB server may have given" in checked.all
        assert house.run("run-stream", SERVER, "--once").code == 0
        assert "which any MariaDB server may have given" in house.fails("check", SERVER).all
        assert told(house) == ["server-changed"]
        assert len(house.ok("timeline", SERVER)["branches"]) == 1


def test_a_copy_of_the_data_directory_that_answers_elsewhere_is_a_stranger(two: tuple[House, Server, Server]) -> None:
    """Its binary log is the server's own up to where both part, and holds what was right before the backup."""
    house, shop, _other = two
    house.backup()
    image = house.base / "image"
    with frozen(shop.pid):
        subprocess.run(["cp", "-a", "--sparse=always", str(shop.datadir), str(image)], check=True)
    shop.execute("INSERT INTO shop.orders VALUES (50, 'after the image')")
    assert house.run("run-stream", SERVER, "--once").code == 0
    with PrivateServer(datadir=image, tcp=True, options={"server_id": 1}) as copy:
        copy.execute("INSERT INTO shop.orders VALUES (50, 'in the copy')")
        points_to(house, copy)
        assert "another server answers under this name" in house.fails("check", SERVER).all
        assert house.run("run-stream", SERVER, "--once").code == 0
        assert "another server answers under this name" in house.fails("check", SERVER).all
        assert told(house) == ["server-changed"]
    house.remove_datadir(image)


def test_a_restart_that_changes_what_mariadb_calls_itself_is_no_change_of_the_server(
    two: tuple[House, Server, Server],
) -> None:
    house, shop, _other = two
    assert house.run("run-stream", SERVER, "--once").code == 0
    before = shop.scalar("SELECT @@server_uid")
    shop.stop()
    shop.start()  # with another port
    assert shop.scalar("SELECT @@server_uid") != before
    assert house.run("check", SERVER).code == 0
    shop.execute("INSERT INTO shop.orders VALUES (50, 'after the restart')")
    assert not house.backup()["apart"]
    assert house.run("run-stream", SERVER, "--once").code == 0
    assert len(house.ok("timeline", SERVER)["branches"]) == 1
    assert told(house) == []


def test_a_replica_that_takes_over_is_no_stranger_nor_is_the_server_after_a_restore(own_house: House) -> None:
    house, server = own_house, own_house.server
    house.policy_extra = POLICY
    house.write()
    with replica_of(server) as replica:
        house.backup()
        server.execute("CREATE DATABASE later")
        assert house.run("run-stream", SERVER, "--once").code == 0
        catch_up(server, replica)
        replica.execute("STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL read_only = 0", "CREATE DATABASE new")
        points_to(house, replica)
        assert house.run("check", SERVER).code == 0
        assert told(house) == ["server-failover"]
        taken = house.backup()
        assert not taken["apart"]
        assert house.ok("plan", SERVER, "--to", "latest")["chain"] == [taken["id"]]
        points_to(house, server)
        assert house.run("check", SERVER).code == 0
    server.stop()
    house.remove_datadir(server.datadir)
    house.restore(server.datadir)
    server.start()
    assert house.run("check", SERVER).code == 0
    assert not house.backup()["apart"]
    assert told(house) == ["server-failover"]

"""Logical backups from the command line: taken, looked after, partial, killed."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest

from backupd.alerts.rules import Act, rule_of
from tests.support.dice import SOAK
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import catalog_of
from tests.support.keys import Keys
from tests.support.servers import new_mydumper as newmydumper
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import SERVICE_USER, query

POLICY = """\
logical:
  schedule: "0 4 * * *"
  sets:
    money: {schedule: every 1h, tables: {include: ["bank.*"]}}
    small: {schedule: every 1h, tables: {include: ["shop.*"], max_size: 64KiB}}
retry: {attempts: 2, pause: 1s}
"""


@pytest.fixture
def house(short_tmp: Path, shared_server: PrivateServer, keys: Keys) -> House:
    return House(short_tmp, shared_server, keys, policy_extra=POLICY)


def dump(house: House, *args: str) -> dict[str, Any]:
    record: dict[str, Any] = house.ok("backup", SERVER, "--kind", "logical", *args)
    return record


@SOAK
def test_dumps_of_different_sets_are_taken_and_looked_after(house: House) -> None:
    everything, again = dump(house), dump(house)
    money = dump(house, "--set", "money")
    orders = dump(house, "--tables", "shop.orders")
    assert (everything["kind"], everything["set"], everything["tables_missing"]) == ("logical", "", 0)
    assert again["bytes_new"] == 0
    assert (money["set"], orders["set"]) == ("money", "by hand")
    assert money["bytes_new"] == 0, "the same files as in the dump of everything"
    assert house.fsck() == []
    assert house.ok("verify", SERVER)["damages"] == []
    assert {job["state"] for job in house.ok("jobs", "list", SERVER)} == {"succeeded"}

    house.ok("backups", "delete", everything["id"], "--now")
    assert house.ok("verify", SERVER)["damages"] == []
    (house.base / "catalog.db").unlink()
    house.ok("catalog", "upgrade")
    house.fails("fsck")
    house.ok("fsck", "--repair")
    known = {record["id"]: record for record in house.backups()}
    assert {name: known[name]["set"] for name in known} == {
        again["id"]: "",
        money["id"]: "money",
        orders["id"]: "by hand",
    }
    assert house.fsck() == []
    book = house.run("runbook", money["id"]).out
    assert "logical backup" in book
    assert "bank" not in book


def test_what_cannot_be_taken_is_refused(house: House) -> None:
    assert "it has: money, small" in house.fails("backup", SERVER, "--kind", "logical", "--set", "nix", code=2).all
    assert "--kind logical" in house.fails("backup", SERVER, "--tables", "shop.orders", code=2).all
    mistyped = house.fails("backup", SERVER, "--kind", "logical", "--tables", "shop.ordres", code=2)
    assert "no table to dump: none matches shop.ordres; did you mean `shop.orders`?" in mistyped.all
    (job,) = house.ok("jobs", SERVER)
    assert job["state"] == "cancelled", "whoever mistyped it was told, and nothing is broken"
    with catalog_of(house) as catalog:
        assert [(one.kind, rule_of(one).act) for one in catalog.events.list(server=SERVER)] == [
            ("job-cancelled", Act.SILENT)
        ]
    house.fails("backup", SERVER, "--kind", "logical", "--tables", "nonsense", code=2)
    assert house.fsck() == []


def test_tables_over_the_size_of_their_set_are_skipped_and_do_not_fail_it(house: House) -> None:
    small = dump(house, "--set", "small")
    paths = {path.relative_to(house.manifest(small["id"]).parent).as_posix() for path in house.tree(small["id"])}
    assert small["tables_missing"] == 0
    (told,) = (warning for warning in small["warnings"] if warning.startswith("shop.order_lines was skipped: "))
    assert "larger than max_size" in told
    assert told in house.run("backups", "show", small["id"]).all
    assert not any("order_lines" in path for path in paths)


def test_without_mydumper_our_own_reader_takes_its_place(house: House) -> None:
    house.programs = {"mydumper": "/nonexistent/mydumper"}
    house.write()
    record = dump(house, "--tables", "shop.*")
    assert any("mydumper" in warning for warning in record["warnings"])
    assert record["tables_missing"] == 0


@SOAK
def test_what_a_new_mydumper_wrote_comes_back_as_it_was(short_tmp: Path, keys: Keys) -> None:
    program = newmydumper.make(short_tmp / "tool")
    with PrivateServer() as server:
        server.create_backup_users()
        server.execute(
            f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost",
            "CREATE DATABASE shop",
            "CREATE TABLE shop.orders (id INT PRIMARY KEY, v LONGTEXT, n DECIMAL(9,2), j JSON, t TIMESTAMP NULL)",
            """INSERT INTO shop.orders SELECT seq, CONCAT('"\\\'', CHAR(10), '(', seq, '\r;\n,('), -seq / 3,"""
            """ '{"a": "b"}', '2026-01-01' FROM shop.seq_1_to_50""",
            "INSERT INTO shop.orders VALUES (0, NULL, NULL, NULL, NULL), (-1, REPEAT('x\n', 600000), 0, NULL, NULL)",
            "CREATE TABLE shop.isam ENGINE=MyISAM SELECT id, n FROM shop.orders",
            "CREATE TABLE shop.empty (id INT)",
        )
        house = House(short_tmp, server, keys, policy_extra=POLICY, programs={"mydumper": str(program)})
        taken = dump(house, "--tables", "shop.*")
        assert not any("again" in warning or "mydumper" in warning for warning in taken["warnings"]), taken["warnings"]
        house.ok(
            "restore", SERVER, "--to", f"backup:{taken['id']}", "--tables", "shop.*", "--as", "back.*", "--into", SERVER
        )
        for name in ("orders", "isam", "empty"):
            (before, after) = server.query(f"CHECKSUM TABLE shop.{name}, back.{name}")
            assert before[1] == after[1], name


def test_a_crashed_table_makes_the_job_partial_and_the_others_are_kept(short_tmp: Path, keys: Keys) -> None:
    with PrivateServer() as server:
        server.create_backup_users()
        server.execute("CREATE DATABASE shop")
        for number in range(9):
            server.execute(
                f"CREATE TABLE shop.t{number} (id INT PRIMARY KEY)",
                f"INSERT INTO shop.t{number} SELECT seq FROM shop.seq_1_to_100",
            )
        server.execute(
            "CREATE TABLE shop.ledger (id INT PRIMARY KEY, v CHAR(40)) ENGINE=MyISAM",
            "INSERT INTO shop.ledger SELECT seq, 'x' FROM shop.seq_1_to_500",
            "FLUSH TABLES",
        )
        data = server.datadir / "shop/ledger.MYD"
        data.write_bytes(data.read_bytes()[:1000])
        house = House(short_tmp, server, keys, policy_extra=POLICY)
        done = house.fails("backup", SERVER, "--kind", "logical", "--json")
        record = done.json
        assert record["tables_missing"] == 1
        assert any(warning.startswith("shop.ledger is missing: ") for warning in record["warnings"])
        job = house.ok("jobs", "list", SERVER)[0]
        assert (job["state"], job["result"]) == ("partial", record["id"])
        assert "shop.ledger" in job["detail"]
        assert house.fsck() == []
        assert house.ok("verify", SERVER)["damages"] == []


def test_a_killed_dump_leaves_nothing_that_the_next_one_does_not_remove(house: House) -> None:
    spool = house.base / "spool/dump" / SERVER
    house.kill_when(lambda: spool.is_dir() and any(spool.iterdir()), "backup", SERVER, "--kind", "logical")
    assert house.backups() == []
    record = dump(house)
    assert not spool.exists()
    assert [one["id"] for one in house.backups()] == [record["id"]]
    assert house.fsck() == []


def test_two_backups_of_a_server_do_not_run_at_once(house: House) -> None:
    locks = house.base / "spool/locks"
    locks.mkdir(parents=True)
    with (locks / f"backup-{SERVER}").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "is running already" in house.fails("backup", SERVER, "--kind", "logical").all


def test_a_wrong_password_says_so(house: House) -> None:
    client = house.base / "wrong.cnf"
    shutil.copy(house.server.client_file("backupd", "not it"), client)
    house.server.client_file("backupd", "Service-s3cret-90ab")
    house.config.write_text(
        house.config.read_text().replace(str(house.server.base / "client-backupd.cnf"), str(client))
    )
    assert "Access denied" in house.fails("backup", SERVER, "--kind", "logical").all


def test_a_dump_with_a_prepared_transaction_is_no_base_of_a_replay(short_tmp: Path, keys: Keys) -> None:
    with PrivateServer() as server:
        server.create_backup_users()
        server.execute("CREATE DATABASE shop", "CREATE TABLE shop.a (id INT PRIMARY KEY)")
        house = House(short_tmp, server, keys, policy_extra=POLICY)
        with server.connect() as other:
            for statement in ("XA START 'g1'", "INSERT INTO shop.a VALUES (100)", "XA END 'g1'", "XA PREPARE 'g1'"):
                query(other, statement)
            record = dump(house, "--tables", "shop.*")
            query(other, "XA COMMIT 'g1'")
        server.execute("FLUSH BINARY LOGS")
        Archive(house, server).take()
        assert any("XA transactions were prepared" in text for text in record["warnings"])
        error = house.fails("plan", SERVER, "--to", "latest", "--tables", "shop.a", "--from", "logical")
        assert f"backup {record['id']} cannot be rolled forward: XA transactions were prepared" in str(error)
        assert "--from physical" in str(error)

"""Chains: one full backup and seven increments, taken under write load and changes of definitions; each member comes
back as the source was at that member's place, and a chain that is not whole is refused before a byte moves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backupd.model.server_facts import Version
from tests.support.dice import thrown
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.oracle import WITH_MARIADB, WITH_XTRABACKUP, oracle
from tests.support.keys import Keys
from tests.support.oracle import stored
from tests.support.sample import checksum_everything
from tests.support.servers.stacks import MARIADB, MYSQL_XTRABACKUP, Stack, stacks
from tests.support.stores.folders import give_to_database, short_directory
from tests.support.ticker import Ticker

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a restore gives files to the server's user")
pytestmark = needs_root


@dataclass(frozen=True)
class Stock:
    """``members``: records of the chain, full first. ``sums``: what a replica held at each one's GTID. ``other``: a
    full backup and an increment of the same server that came later. ``outside``: where its DATA DIRECTORY tables
    lie; None before MySQL 8.0, which opens no such table while the source's lies there, too: test_stacks.py."""

    stack: Stack
    house: House
    members: tuple[dict[str, Any], ...]
    sums: Mapping[str, Mapping[str, int]]
    other: tuple[dict[str, Any], ...]
    outside: Path | None

    def folder(self, number: int) -> Path:
        return self.house.manifest(self.members[number]["id"]).parent

    def id(self, number: int) -> str:
        return str(self.members[number]["id"])

    def sums_of(self, datadir: Path) -> dict[str, int]:
        with self.stack.make(datadir=datadir) as restored:
            assert "[ERROR]" not in restored.log_text()
            with restored.connect() as connection:
                return checksum_everything(connection)

    def far(self) -> dict[str, str]:
        """The files outside."""
        return hashes(self.outside) if self.outside is not None else {}


def definitions(stack: Stack, outside: Path | None) -> tuple[tuple[str, ...], ...]:
    """What happens before each backup, beside the writer. No replica could have the tables in ``outside``, too."""

    def far(*statements: str) -> tuple[str, ...]:
        return ("SET sql_log_bin = 0", *statements, "SET sql_log_bin = 1") if outside is not None else ()

    aria = "Aria" if stack.mariadb else "InnoDB"
    instant = ", ALGORITHM=INSTANT" if stack.version() >= Version(8, 0, 12) else ""
    return (
        ("CREATE DATABASE shop", "CREATE DATABASE closing",
         "CREATE TABLE shop.ticks (id BIGINT PRIMARY KEY AUTO_INCREMENT, t VARCHAR(200)) ENGINE=InnoDB",
         f"CREATE TABLE shop.aria (id INT PRIMARY KEY, t VARCHAR(50)) ENGINE={aria}",
         "CREATE TABLE shop.myisam (id INT PRIMARY KEY, t VARCHAR(50)) ENGINE=MyISAM",
         "CREATE TABLE shop.doomed (id INT PRIMARY KEY) ENGINE=InnoDB", "INSERT INTO shop.doomed VALUES (1), (2)",
         "CREATE TABLE shop.doomed_too (id INT PRIMARY KEY) ENGINE=MyISAM",
         "CREATE TABLE shop.emptied (id INT PRIMARY KEY) ENGINE=InnoDB", "INSERT INTO shop.emptied VALUES (1)",
         "CREATE TABLE shop.before_name (id INT PRIMARY KEY) ENGINE=InnoDB", "INSERT INTO shop.before_name VALUES (7)",
         "CREATE TABLE closing.t (id INT PRIMARY KEY) ENGINE=InnoDB",
         *far(f"CREATE TABLE shop.far (id INT PRIMARY KEY) ENGINE=InnoDB DATA DIRECTORY='{outside}'",
              f"INSERT INTO shop.far VALUES {rows(500)}")),
        ("CREATE TABLE shop.fresh (id INT PRIMARY KEY, t VARCHAR(32)) ENGINE=InnoDB",
         f"INSERT INTO shop.fresh (id) VALUES {rows(300)}", "UPDATE shop.fresh SET t = MD5(id)",
         "DROP TABLE shop.doomed", *far("UPDATE shop.far SET id = id + 1000")),
        (f"ALTER TABLE shop.fresh ADD COLUMN more INT DEFAULT 5{instant}", "DROP TABLE shop.doomed_too",
         "ALTER TABLE shop.aria ADD COLUMN x INT DEFAULT 1", "INSERT INTO shop.myisam VALUES (1, 'one')"),
        ("TRUNCATE TABLE shop.emptied", "INSERT INTO shop.emptied VALUES (100), (101)",
         "RENAME TABLE shop.before_name TO shop.after_name", "UPDATE shop.after_name SET id = 8"),
        ("DROP DATABASE closing", "ALTER TABLE shop.fresh DROP COLUMN t, ALGORITHM=COPY",
         *far(f"CREATE TABLE shop.far_too (id INT PRIMARY KEY) ENGINE=InnoDB DATA DIRECTORY='{outside}'",
              "INSERT INTO shop.far_too VALUES (1)")),
        (),
        ("CREATE TABLE shop.parts (id INT PRIMARY KEY) ENGINE=InnoDB PARTITION BY HASH (id) PARTITIONS 3",
         f"INSERT INTO shop.parts VALUES {rows(50)}", "CREATE INDEX t ON shop.ticks (t(100))",
         *far("DROP TABLE shop.far_too")),
        ("ALTER TABLE shop.parts COALESCE PARTITION 1", "DROP TABLE shop.emptied",
         "CREATE TABLE shop.emptied (name VARCHAR(9)) ENGINE=InnoDB", "INSERT INTO shop.emptied VALUES ('again')",
         "OPTIMIZE TABLE shop.ticks"),
    )  # fmt: skip


def rows(count: int) -> str:
    """The numbers from 1 to ``count`` as rows of one column."""
    return ", ".join(f"({number})" for number in range(1, count + 1))


@pytest.fixture(scope="module", params=stacks(MARIADB, MYSQL_XTRABACKUP))
def stock(request: pytest.FixtureRequest, keys: Keys) -> Iterator[Stock]:
    stack: Stack = request.param
    with short_directory() as base, stack.make(tcp=True) as server:
        outside = None
        if stack.mariadb or stack.version() >= Version(8, 0):
            outside = base / "outside"
            outside.mkdir()
            give_to_database(outside)
        server.create_backup_users()
        house = House(base, server, keys, programs=stack.all_programs())
        with oracle(WITH_MARIADB if stack.mariadb else WITH_XTRABACKUP, server) as right:
            members, far = [], {}
            for number, statements in enumerate(definitions(stack, outside)):
                server.execute(*statements)
                with Ticker(server, "shop.ticks") as ticker:
                    members.append(house.ok("backup", SERVER, "--kind", "incremental" if number else "full"))
                    assert ticker.count > 0
                with server.connect() as connection:
                    far[members[-1]["id"]] = {
                        name: value for name, value in checksum_everything(connection).items() if "far" in name
                    }
            sums = {record["id"]: right.after(record["position"]["gtid"]) | far[record["id"]] for record in members}
        other = (house.backup(), house.ok("backup", SERVER, "--kind", "incremental"))
        assert server.port is not None
        server.restart(port=server.port)  # MariaDB takes its name from it; from here on the source's files stay
        yield Stock(stack, house, tuple(members), sums, other, outside)


def hashes(folder: Path) -> dict[str, str]:
    return stored(folder, besides={"pins"})


@contextmanager
def changed(*folders: Path) -> Iterator[None]:
    """What lies in ``folders`` afterwards is what lay there before."""
    with short_directory() as aside:
        for number, folder in enumerate(folders):
            shutil.copytree(folder, aside / str(number), symlinks=True)
        try:
            yield
        finally:
            for number, folder in enumerate(folders):
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(aside / str(number), folder, symlinks=True)


def test_the_chain_is_one_full_backup_and_seven_increments_each_on_the_one_before(stock: Stock) -> None:
    kinds = [record["kind"] for record in stock.members]
    assert kinds == ["physical-full", *["physical-incremental"] * 7]
    for before, record in zip(stock.members, stock.members[1:], strict=False):
        assert record["parent"] == before["id"]
        assert record["from_lsn"] == before["to_lsn"]
        assert record["reason"] == ""
    assert len({tuple(sums.items()) for sums in stock.sums.values()}) == 8
    shown = stock.house.ok("backups", "show", stock.id(3))
    assert shown["parent"] == stock.id(2)
    assert stock.house.fsck() == []


@pytest.mark.parametrize("number", range(8))
def test_each_member_is_restored_as_the_source_was_at_its_gtid(stock: Stock, short_tmp: Path, number: int) -> None:
    before = stock.far()
    assert ("shop/far.ibd" in before) is (stock.outside is not None)
    outcome = stock.house.restore(short_tmp / "mysql", to=f"backup:{stock.id(number)}")
    assert outcome["position"] == stock.members[number]["position"]
    assert stock.sums_of(short_tmp / "mysql") == stock.sums[stock.id(number)]
    assert stock.far() == before, "a restore touched the living source's files"


def test_the_newest_member_is_proved_by_its_witness_and_the_repository_is_what_it_was(stock: Stock) -> None:
    before = hashes(stock.house.repository)
    target = f"backup:{stock.id(7)}"
    plan = stock.house.ok("plan", SERVER, "--to", target)
    assert plan["chain"] == [record["id"] for record in stock.members]
    assert plan["bytes_stored"] == sum(record["bytes_stored"] for record in stock.members)
    proof = stock.house.ok("test-restore", SERVER, "--to", target)
    assert proof["outcome"] == "proved", proof
    after = hashes(stock.house.repository)
    assert {name.partition("/")[0] for name in after.keys() - before.keys()} <= {"proofs", "catalog"}
    changed_since = {name for name, digest in before.items() if after.get(name) != digest}
    assert changed_since <= {"RECOVER.md"}


def test_latest_is_an_increment_with_its_chain(stock: Stock) -> None:
    plan = stock.house.ok("plan", SERVER, "--to", "latest")
    assert plan["chain"] == [record["id"] for record in stock.other]
    assert "of 2 backups" in plan["steps"][0]["title"]


@pytest.mark.parametrize("damage", ["removed", "swapped", "foreign", "body"])
def test_a_removed_swapped_or_foreign_increment_is_refused_with_names_before_a_byte_moves(
    stock: Stock, short_tmp: Path, damage: str
) -> None:
    third, fourth, foreign = stock.folder(3), stock.folder(4), stock.house.manifest(stock.other[1]["id"]).parent
    with changed(third, fourth):
        if damage == "removed":
            shutil.rmtree(third)
        elif damage == "swapped":
            for name in ("manifest.json", "body.jsonl.zst.gpg"):
                (third / name).rename(short_tmp / name)
                (fourth / name).rename(third / name)
                (short_tmp / name).rename(fourth / name)
        elif damage == "foreign":
            for name in ("manifest.json", "body.jsonl.zst.gpg"):
                shutil.copy(foreign / name, third / name)
        else:
            (third / "body.jsonl.zst.gpg").unlink()
        target = f"backup:{stock.id(7)}"
        done = stock.house.fails("restore", SERVER, "--to", target, "--datadir", str(short_tmp / "mysql"))
        assert stock.id(3) in done.err, done.err
        if damage == "swapped":
            assert "manifest.json: it is not what was stored" in done.err, done.err
        assert list(short_tmp.iterdir()) == []
        findings = stock.house.fsck()
        if damage == "removed":
            assert ("parent-present", stock.id(4)) in {(one["invariant"], one["subject"]) for one in findings}
        assert findings
    assert stock.house.fsck() == []


@pytest.mark.campaign
def test_after_a_kill_between_or_in_increments_the_same_restore_ends_with_the_same_data(
    stock: Stock, short_tmp: Path
) -> None:
    log = thrown("kill in a chain").choice(("prepare-1.log", "prepare-2.log", "prepare-3.log"))
    datadir = short_tmp / "mysql"
    target = f"backup:{stock.id(3)}"
    path = short_tmp / "mysql.restoring/logs" / log
    stock.house.kill_when(path.exists, "restore", SERVER, "--to", target, "--datadir", str(datadir))
    assert not datadir.exists()
    stock.house.restore(datadir, to=target)
    beside = [] if stock.outside is None else ["mysql.external"]
    assert sorted(p.name for p in short_tmp.iterdir()) == ["mysql", *beside]
    assert stock.sums_of(datadir) == stock.sums[stock.id(3)]


def test_the_runbook_of_an_increment_followed_word_for_word_gives_the_same_data(stock: Stock, short_tmp: Path) -> None:
    before = hashes(stock.house.repository), stock.far()
    runbook = (stock.folder(2) / "RUNBOOK.md").read_text()
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```$", runbook, re.MULTILINE | re.DOTALL))
    for record in stock.members[:3]:
        assert record["id"] in runbook
    done = subprocess.run(
        ["sh", "-c", script],
        cwd="/",
        text=True,
        check=False,
        capture_output=True,
        env={
            "PATH": stock.stack.path(),
            "HOME": "/nonexistent",
            "LC_ALL": "C.UTF-8",
            "REPOSITORY": str(stock.house.repository),
            "DATADIR": str(short_tmp / "mysql"),
            "GNUPGHOME": str(stock.house.keys.secret_home),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert stock.sums_of(short_tmp / "mysql") == stock.sums[stock.id(2)]
    assert (hashes(stock.house.repository), stock.far()) == before


def test_an_increment_that_was_killed_leaves_nothing_and_the_next_one_builds_on_the_same_parent(stock: Stock) -> None:
    house = stock.house
    parent = house.backups()[0]
    house.kill_when(lambda: any((house.repository / "intents").glob("*")), "backup", SERVER, "--kind", "incremental")
    record = house.ok("backup", SERVER, "--kind", "incremental")
    assert (record["kind"], record["parent"]) == ("physical-incremental", parent["id"])
    assert house.fsck() == []


def test_a_parent_that_is_gone_makes_the_next_increment_a_full_backup_that_says_why(stock: Stock) -> None:
    house = stock.house
    newest = house.backups()[0]["id"]
    shutil.rmtree(house.manifest(newest).parent)
    done = house.run("backup", SERVER, "--kind", "incremental")
    assert done.code == 0, done.all
    assert newest in done.all
    assert "is missing" in done.all
    record = house.backups()[0]
    assert (record["kind"], record["parent"]) == ("physical-full", None)
    assert newest in record["reason"]

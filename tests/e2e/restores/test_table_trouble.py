"""Restores of tables that are killed, disturbed, or asked for nonsense: every name means the old table or the new one,
whole; the same command finishes; what cannot be done is said in words and leaves nothing half done."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backupd.app.restores.request import TableOptions
from backupd.model.errors import UsageError
from tests.support.dice import SOAK, rounds, thrown
from tests.support.e2e.house import LONGEST as PATIENCE
from tests.support.e2e.house import SERVER, Done, House
from tests.support.e2e.service import alive, descendants, until
from tests.support.keys import Keys
from tests.support.oracle import Total
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import SERVICE_USER, Server, query
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

ORDERS, LINES = "shop.orders", "shop.order_lines"
ROWS = 3000
LONGEST = 5.0
"""Seconds: a restore takes two to four of them."""


@dataclass
class Shop:
    """Two tables with a foreign key and a trigger; ``new``: what they were when the backups in ``ids`` were taken,
    ``old``: what they are now."""

    house: House
    server: Server
    ids: dict[str, str]
    new: tuple[int, int]
    old: tuple[int, int]

    def command(self, source: str = "logical", *more: str) -> tuple[str, ...]:
        return (
            "restore",
            SERVER,
            "--to",
            f"backup:{self.ids[source]}",
            "--into",
            SERVER,
            "--from",
            source,
            *(more or ("--tables", ORDERS, "--tables", LINES, "--confirm", SERVER)),
        )

    def sums(self) -> tuple[int, int]:
        first, second = (Total(row[1]) for row in self.server.query(f"CHECKSUM TABLE {ORDERS}, {LINES}"))
        return first, second

    def sessions(self) -> list[str]:
        """What restores are at on the server."""
        return [
            str(row)
            for row in self.server.query(
                "SELECT ID, STATE, INFO FROM information_schema.PROCESSLIST WHERE USER = %s", (SERVICE_USER,)
            )
        ]

    def asides(self) -> list[str]:
        return [str(row[0]) for row in self.server.query("SHOW TABLES IN shop LIKE '%\\_\\_before\\_%'")]

    def spoil(self) -> None:
        """The live tables become the ``old`` ones again, and nothing lies beside them."""
        for name in self.asides():
            self.server.execute("SET foreign_key_checks = 0", f"DROP TABLE shop.`{name}`")
        self.server.execute(
            "USE shop",
            f"DELETE FROM {LINES}",
            f"DELETE FROM {ORDERS}",
            f"INSERT INTO {ORDERS} (id, note) SELECT seq, 'now' FROM seq_1_to_500",
            f"INSERT INTO {LINES} SELECT seq, 1, 'now' FROM seq_1_to_500",
        )
        assert self.sums() == self.old

    def is_whole(self) -> None:
        """Foreign key and trigger are those of the tables that have the names."""
        server = self.server
        assert (
            server.scalar(
                "SELECT COUNT(*) FROM information_schema.REFERENTIAL_CONSTRAINTS WHERE "
                "CONSTRAINT_SCHEMA = 'shop' AND TABLE_NAME = 'order_lines' AND "
                "REFERENCED_TABLE_NAME = 'orders'"
            )
            == 1
        )
        assert server.query(
            "SELECT EVENT_OBJECT_TABLE FROM information_schema.TRIGGERS WHERE TRIGGER_SCHEMA = 'shop'"
        ) == [("orders",)]

    def is_clean(self) -> None:
        assert self.server.query("SHOW DATABASES LIKE 'backupd\\_%'") == []
        assert list((self.house.base / "scratch").glob("*")) == []


@pytest.fixture(scope="module")
def made(keys: Keys) -> Iterator[Shop]:
    with short_directory() as base, PrivateServer() as server:
        server.create_backup_users()
        server.execute(
            f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost",
            "CREATE DATABASE shop CHARACTER SET utf8mb4",
            "USE shop",
            f"CREATE TABLE {ORDERS} (id INT AUTO_INCREMENT PRIMARY KEY, note VARCHAR(200))",
            f"CREATE TABLE {LINES} (order_id INT, line INT, what VARCHAR(200), PRIMARY KEY (order_id, line), "
            f"FOREIGN KEY (order_id) REFERENCES {ORDERS} (id) ON DELETE CASCADE)",
            "CREATE TABLE shop.seen (n INT)",
            f"INSERT INTO {ORDERS} SELECT seq, REPEAT(MD5(seq), 5) FROM seq_1_to_{ROWS}",
            f"INSERT INTO {LINES} SELECT seq, 1, REPEAT(MD5(seq), 5) FROM seq_1_to_{ROWS}",
            f"CREATE TRIGGER shop.on_order AFTER INSERT ON {ORDERS} FOR EACH ROW INSERT INTO shop.seen VALUES (NEW.id)",
        )
        house = House(base, server, keys)
        ids = {"logical": house.ok("backup", SERVER, "--kind", "logical")["id"], "physical": house.backup()["id"]}
        shop = Shop(house, server, ids, (0, 0), (0, 0))
        shop.new = shop.sums()
        server.execute(
            f"DELETE FROM {LINES}",
            f"DELETE FROM {ORDERS}",
            f"INSERT INTO {ORDERS} (id, note) SELECT seq, 'now' FROM seq_1_to_500",
            f"INSERT INTO {LINES} SELECT seq, 1, 'now' FROM seq_1_to_500",
        )
        shop.old = shop.sums()
        yield shop


@pytest.fixture
def shop(made: Shop) -> Iterator[Shop]:
    yield made
    made.spoil()
    leftover = [str(row[0]) for row in made.server.query("SHOW DATABASES LIKE 'backupd\\_%'")]
    made.server.execute(*(f"DROP DATABASE `{name}`" for name in leftover))
    for path in (made.house.base / "scratch").glob("*"):
        shutil.rmtree(path)


ANCHORS = {
    "loading": "SELECT COUNT(*) FROM information_schema.SCHEMATA WHERE SCHEMA_NAME LIKE 'backupd\\_restore\\_%'",
    "handing over": "SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_NAME = 'backupd_handover'",
}
"""What shows on the server that an act has begun."""


def killed_within(shop: Shop, command: tuple[str, ...], anchor: str, seconds: float) -> bool:
    """So long after its act ``anchor`` began. False: it was done before. What it had started is gone afterwards, its
    sessions too: the server ends a statement whose client is gone, or takes a moment to notice."""
    with shop.house.popen(*command) as process:
        if anchor in ANCHORS:
            until(lambda: process.poll() is not None or bool(shop.server.scalar(ANCHORS[anchor])), lambda: anchor)
        try:
            process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            family = descendants(process.pid)
            process.kill()
            process.communicate()
            until(lambda: not alive(family), lambda: f"the end of {alive(family)}")
            until(lambda: not shop.sessions(), lambda: f"the end of {shop.sessions()}")
            return True
    assert process.returncode == 0
    return False


def one_round_beside(shop: Shop, dice: random.Random) -> str:
    """As below, under other names, which are there in the end, once."""
    command = shop.command("logical", "--tables", ORDERS, "--tables", LINES, "--as", "*_again")
    anchor = dice.choice(("loading", "handing over", "handing over"))
    killed = killed_within(shop, command, anchor, dice.uniform(0, 0.4))
    there = {str(row[0]) for row in shop.server.query("SHOW TABLES IN shop LIKE '%\\_again'")}
    assert there in (set(), {"orders_again", "order_lines_again"})
    if killed:
        again = shop.house.run(*command)
        assert again.code == 0 or "taken" in again.err, again.all
    sums = tuple(int(row[1]) for row in shop.server.query(f"CHECKSUM TABLE {ORDERS}_again, {LINES}_again"))
    assert sums == shop.new
    assert shop.sums() == shop.old
    shop.server.execute(f"DROP TABLE {LINES}_again, {ORDERS}_again")
    shop.is_clean()
    return f"after {anchor} beside, {len(there)} there"


def one_round(shop: Shop, dice: random.Random, source: str) -> str:
    """Kill it once or twice, then let it finish; gives what it was killed in, by what was there."""
    command, story = shop.command(source), []
    for _ in range(dice.choice((1, 1, 2))):
        anchor = dice.choice(("the start", "loading", "handing over", "handing over"))
        if not killed_within(shop, command, anchor, dice.uniform(0, LONGEST if anchor == "the start" else 0.4)):
            break
        sums = shop.sums()
        assert sums in (shop.old, shop.new), "one table is not that of the other"
        story.append(f"after {anchor}, the {'old' if sums == shop.old else 'new'} ones there")
    again = shop.house.ok(*command)
    story.append("finished by the next" if any("interrupted" in line for line in again["warnings"]) else "done again")
    assert shop.sums() == shop.new
    shop.is_whole()
    kept = {int(shop.server.query(f"CHECKSUM TABLE shop.`{name}`")[0][1]) for name in shop.asides()}
    assert set(shop.old) <= kept <= {*shop.old, *shop.new}
    shop.is_clean()
    return ", ".join(story)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_a_restore_that_was_killed_leaves_the_old_or_the_new_tables_and_the_same_command_finishes(shop: Shop) -> None:
    dice, killed = thrown("table kills"), Counter[str]()
    for number in range(rounds(2)):
        source = dice.choice(("logical", "logical", "physical"))
        beside = source == "logical" and dice.random() < 0.4
        told = one_round_beside(shop, dice) if beside else one_round(shop, dice, source)
        print(f"round {number + 1}: {source}, killed {told}")
        killed[told] += 1
        shop.spoil()
    print(dict(killed))


def test_what_a_restore_left_that_was_killed_after_its_last_act_goes_although_the_next_one_is_refused(
    shop: Shop,
) -> None:
    command = shop.command("logical", "--tables", ORDERS, "--as", "*_again")
    done = shop.house.ok(*command)
    left = shop.house.base / "scratch" / f"tables-{done['id']}"
    left.mkdir()
    (left / "rows").write_text("1\n")
    assert "taken" in shop.house.fails(*command).err
    shop.server.execute(f"DROP TABLE {ORDERS}_again")
    shop.is_clean()


def test_two_at_once_give_the_whole_tables_of_one_of_them(shop: Shop) -> None:
    first, second = shop.house.popen(*shop.command()), shop.house.popen(*shop.command())
    with first, second:
        told = [process.communicate(timeout=PATIENCE) for process in (first, second)]
    assert "Traceback" not in str(told)
    assert 0 in (first.returncode, second.returncode), told
    assert shop.sums() == shop.new
    shop.is_whole()
    if first.returncode or second.returncode:
        shop.house.ok(*shop.command())
    shop.is_clean()


@contextmanager
def small_disk(point: Path, options: str) -> Iterator[None]:
    point.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(point)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("logical", "size=256k", "not enough space"),
        pytest.param("physical", "size=256k", "not enough space", marks=SOAK),
        pytest.param("logical", "size=4g,nr_inodes=7", "make room there", marks=SOAK),
    ],
)
def test_a_full_disk_where_rows_are_kept_meanwhile_is_said_and_changes_nothing(
    shop: Shop, source: str, options: str, words: str
) -> None:
    with small_disk(shop.house.base / "scratch", options):
        assert words in shop.house.fails(*shop.command(source)).err
    assert shop.sums() == shop.old
    assert shop.server.query("SHOW DATABASES LIKE 'backupd\\_%'") == []


def test_a_server_that_is_killed_in_the_middle_gets_its_tables_by_the_same_command(shop: Shop) -> None:
    server = shop.server
    with closing(server.connect(autocommit=False)) as reader, shop.house.popen(*shop.command()) as process:
        query(reader, f"SELECT COUNT(*) FROM {ORDERS}")  # while this is open no table can change places
        until(
            lambda: process.poll() is not None or bool(server.query("SHOW DATABASES LIKE 'backupd\\_%'")),
            lambda: "a staging schema",
        )
        server.kill()
        out, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    assert process.returncode != 0, out + err
    server.start()
    assert shop.sums() == shop.old
    shop.house.ok(*shop.command())
    assert shop.sums() == shop.new
    shop.is_whole()
    shop.is_clean()


def fails(shop: Shop, *args: str, code: int = 1) -> Done:
    return shop.house.fails("restore", SERVER, *args, code=code)


def test_nonsense_is_refused_in_words_before_anything_is_done(shop: Shop) -> None:
    to = ("--to", f"backup:{shop.ids['logical']}")
    one, into = ("--tables", ORDERS), ("--into", SERVER, "--as", "x")
    assert "backup:nix" in fails(shop, "--to", "backup:nix", *one, *into, code=2).err
    assert "yesterday" in fails(shop, "--to", "yesterday", *one, *into, code=2).err
    assert "nix" in fails(shop, *to, *one, "--into", "nix", "--as", "x", code=2).err
    assert "--as" in fails(shop, *to, *one, "--into", SERVER, "--as", "*.*.*", code=2).err
    unknown = fails(shop, *to, "--tables", "shop.nix", "--tables", ORDERS, *into)
    assert "shop.nix" in unknown.err
    assert "x" * 65 in fails(shop, *to, *one, "--into", SERVER, "--as", "x" * 65).err
    assert "--as" in fails(shop, *to, "--tables", "shop.*", *into).err
    for bad in ("", ".", "a.b.c", "*.*.*", "a*b*", "shop.", "`a`"):
        with pytest.raises(UsageError, match="these tables cannot be restored"):
            TableOptions.of([ORDERS], bad)
    for bad in ("", "orders", "shop.", ".orders", "`shop`orders", "a.b.c"):
        with pytest.raises(UsageError, match="these tables cannot be restored"):
            TableOptions.of([bad], None)
    assert "mysql" in fails(shop, *to, "--tables", "mysql.user", *into).err
    assert shop.sums() == shop.old
    shop.is_clean()


@SOAK
def test_a_server_that_takes_small_packets_only_names_the_row_and_keeps_the_rest(shop: Shop) -> None:
    server, house = shop.server, shop.house
    server.execute(
        "CREATE DATABASE wide",
        "CREATE TABLE wide.big (id INT PRIMARY KEY, b LONGTEXT)",
        "CREATE TABLE wide.small (id INT PRIMARY KEY)",
        "INSERT INTO wide.small VALUES (1)",
        "INSERT INTO wide.big VALUES (1, REPEAT('x', 3000000))",
    )
    taken = house.ok("backup", SERVER, "--kind", "logical", "--tables", "wide.*")
    limit = server.scalar("SELECT @@GLOBAL.max_allowed_packet")
    args = ("restore", SERVER, "--to", f"backup:{taken['id']}", "--into", SERVER)
    try:
        server.execute("SET GLOBAL max_allowed_packet = 1048576")
        refused = house.fails(*args, "--tables", "wide.big", "--confirm", SERVER)
        assert "SET GLOBAL max_allowed_packet = 4194304" in refused.all
        assert server.scalar("SELECT LENGTH(b) FROM wide.big") == 3000000
        assert [row[0] for row in server.query("SHOW TABLES IN wide")] == ["big", "small"]
        part = house.run(*args, "--tables", "wide.*", "--as", "*_again", "--json")
        assert part.code == 1
        trouble: dict[str, Any] = {one["source"]: one["trouble"] for one in part.json["tables"]}
        assert trouble["wide.small"] is None
        assert "max_allowed_packet" in trouble["wide.big"]
        assert [row[0] for row in server.query("SHOW TABLES IN wide")] == ["big", "small", "small_again"]
    finally:
        server.execute(f"SET GLOBAL max_allowed_packet = {limit}")
    house.ok(*args, "--tables", "wide.big", "--as", "*_again")
    first, second = (row[1] for row in server.query("CHECKSUM TABLE wide.big, wide.big_again"))
    assert first == second
    server.execute("DROP DATABASE wide")
    shop.is_clean()

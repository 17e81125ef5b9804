"""The names of schemas and tables are chosen by whoever may create one, and travel through files, statements, sealed
documents, tools, terminals, pages and mails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pymysql
import pytest

from tests.support.e2e.house import SERVER, Done, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import SERVICE_USER, quote_name
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

LINE = "line\nSet-Cookie: a=b"
SCHEMAS = (LINE, "../x", "-rf", "\u202egnp.exe", 'it\'s "quoted"')
TABLES = (
    "two\r\nBcc: eve@example.com",
    "\u202elmth.evil",
    "\u2066isolate",
    "\u2028separator",
    "\x1b[2J\x1b]0;title\x07",
    "../../../../PWNED",
    "..",
    ".",
    "--help",
    "-rf",
    "'; DROP TABLE x; --",
    "a'b\"c",
    "$(touch PWNED)",
    "|touch PWNED",
    "<script>alert(1)</script>",
    "*",
    "%s%n{0}",
    "END_OF_THE_LIST_OF_FILES",
    "\\!id",
    "-" * 49,
)
FORBIDDEN = ("\r", "\x1b", "\x07", "\u202e", "\u2066", "\u2028")
"""What no terminal may be given."""
BEGINNINGS = ("Set-Cookie", "Bcc")
"""No line begins with what stands behind a line end in a name."""


@pytest.fixture(scope="module")
def house(keys: Keys) -> Iterator[House]:
    with short_directory() as base, PrivateServer() as server:
        server.create_backup_users()
        server.execute(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost")
        for schema in SCHEMAS:
            server.execute(f"CREATE DATABASE {quote_name(schema)}")
            server.execute(f"CREATE TABLE {quote_name(schema, 'plain')} (i INT PRIMARY KEY)")
        for number, table in enumerate(TABLES):
            name = quote_name(LINE, table)
            server.execute(f"CREATE TABLE {name} (i INT PRIMARY KEY)", f"INSERT INTO {name} VALUES ({number})")
        made = House(base, server, keys)
        taken = made.run("backup", SERVER, "--kind", "logical")
        assert taken.code == 0, taken.all
        asserted_clean(made, taken)
        yield made


def asserted_clean(house: House, *done: Done) -> None:
    for one in done:
        for line in one.all.split("\n"):
            assert not line.startswith(BEGINNINGS), line
            assert not [char for char in FORBIDDEN if char in line], repr(line)
    assert list(Path.cwd().glob("*PWNED*")) == []
    assert [path for path in house.base.rglob("*PWNED*") if "files" not in path.parts] == []


def test_a_server_takes_no_name_of_64_letters_of_four_bytes(house: House) -> None:
    """So it need not be stored; a manifest that tells of one is refused
    (tests/unit/restore/fetch/test_path_names.py)."""
    with pytest.raises(pymysql.err.MySQLError, match=r"too long|Invalid|Incorrect"):
        house.server.execute(f"CREATE TABLE {quote_name('-rf', '💥' * 64)} (i INT)")


def test_they_are_backed_up_and_proved_and_every_output_stays_whole(house: House) -> None:
    done = [
        house.run(*words)
        for words in (
            ("backup", SERVER, "--kind", "full"),
            ("backups", "show", house.backups()[0]["id"]),
            ("test-restore", SERVER),
        )
    ]
    assert [one.code for one in done] == [0, 0, 0], [one.all for one in done if one.code]
    assert "proved" in done[-1].all
    asserted_clean(house, *done)


@pytest.mark.parametrize("schema", SCHEMAS, ids=ascii)
def test_a_table_of_theirs_comes_back(house: House, schema: str, tmp_path: Path) -> None:
    out = house.run(
        "restore", SERVER, "--to", "latest", "--tables", f"{quote_name(schema)}.*", "--sql", str(tmp_path / "sql")
    )
    assert out.code == 0, out.all
    refused = house.run(
        "restore", SERVER, "--to", "latest", "--tables", f"{quote_name(schema)}.none", "--sql", str(tmp_path / "none")
    )
    assert refused.code != 0
    asserted_clean(house, out, refused)
    assert {path.resolve().is_relative_to(tmp_path / "sql") for path in (tmp_path / "sql").rglob("*")} == {True}

"""A server that writes statements into its binary log: what only a session knew is not made up; and a stream that
failed is no reason to restore something old without a word."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.forked import POLICY_EXTRA
from tests.e2e.house import SERVER, House
from tests.support.ending import end
from tests.support.keys import Keys
from tests.support.mariadb import SERVICE_USER, PrivateServer
from tests.support.server import connect, query

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")
MADE = "CREATE TEMPORARY TABLE IF NOT EXISTS shop.passing (word VARCHAR(20))"
KEPT = "INSERT INTO shop.kept (word) SELECT word FROM shop.passing"


def test_statements_over_a_temporary_table_from_before_the_backup_are_refused_in_the_plan_and_never_proved(
        short_tmp: Path, keys: Keys) -> None:
    with PrivateServer(options={"binlog_format": "STATEMENT"}) as server, server.connect() as session:
        server.create_backup_users()
        server.execute("CREATE DATABASE shop", "CREATE TABLE shop.kept (id INT PRIMARY KEY AUTO_INCREMENT, "
                       "word VARCHAR(20))", "INSERT INTO shop.kept (word) VALUES ('old')")
        house = House(short_tmp, server, keys, policy_extra=POLICY_EXTRA)
        with session.cursor() as cursor:
            for statement in (MADE, "INSERT INTO shop.passing VALUES ('one'), ('two')", "COMMIT"):
                cursor.execute(statement)
            house.backup()
            for statement in (MADE, KEPT, "COMMIT"):
                cursor.execute(statement)
        _stream(house)

        for command in (("plan",), ("restore", "--datadir", str(short_tmp / "d"))):
            said = house.fails(command[0], SERVER, "--to", "latest", *command[1:]).all
            assert "error: this replay may give other rows than the source had" in said
            assert "uses the temporary table passing, which was open at the position of backup 20" in said
            assert "--accept-inexact" in said
        assert not (short_tmp / "d").exists()

        outcome = house.ok("restore", SERVER, "--to", "latest", "--accept-inexact", "--datadir", str(short_tmp / "d"),
                           "--start")
        assert (outcome["outcome"], outcome["warnings"][0][:28]) == ("inexact", "the restored data is inexact")
        with connect(outcome["started"]["socket"]) as copy:
            words = [row[0] for row in query(copy, "SELECT word FROM shop.kept ORDER BY id")]
        end(outcome["started"]["pid"])
        live = [row[0] for row in server.query("SELECT word FROM shop.kept ORDER BY id")]
        assert (live, words) == (["old", "one", "two"], ["old"]), "which is why it is refused"
        proof = json.loads(house.fails("test-restore", SERVER, "--json").out)
        assert proof["outcome"] == "inexact"

        house.backup()  # behind it nothing depends on what the session had
        server.execute("XA START 'x'", "INSERT INTO shop.kept (word) VALUES ('xa')", "XA END 'x'", "XA PREPARE 'x'",
                       "XA COMMIT 'x'")
        _stream(house)
        assert house.ok("plan", SERVER, "--to", "latest")["inexact"] == ""
        said = house.fails("restore", SERVER, "--to", "latest", "--replay-with", "pipe", "--datadir",
                           str(short_tmp / "p")).all
        assert "cannot go through the pipe: the logs hold XA transactions" in said
        assert not (short_tmp / "p").exists()

        server.execute(f"REVOKE ALL PRIVILEGES, GRANT OPTION FROM {SERVICE_USER}@localhost",
                       "INSERT INTO shop.kept (word) VALUES ('not archived')")
        house.fails("run-stream", SERVER, "--once")
        said = house.fails("plan", SERVER, "--to", "latest").all
        assert "and something later may exist, up to 20" in said
        assert "it had failed: " in said
        assert house.ok("plan", SERVER, "--to", "latest", "--accept-older")["older"]["certain"] is False


def _stream(house: House) -> None:
    done = house.run("run-stream", SERVER, "--once")
    assert done.code == 0, done.all

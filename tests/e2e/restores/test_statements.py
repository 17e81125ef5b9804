"""A server that writes statements into its binary log: what only a session knew is not made up; and a stream that
failed is no reason to restore something old without a word."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from backupd.app.context.settings import load_settings
from backupd.model.job import JobState
from backupd.process.run_context import utc_now
from tests.support.e2e.forked import POLICY_EXTRA
from tests.support.e2e.house import SERVER, House
from tests.support.ending import end
from tests.support.keys import Keys
from tests.support.servers.mariadb import SERVICE_USER, PrivateServer
from tests.support.servers.server import connect, query
from tests.support.servers.stacks import MYSQL, Stack, stacks, whole
from tests.support.service.rig import rig

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")
MADE = "CREATE TEMPORARY TABLE IF NOT EXISTS shop.passing (word VARCHAR(20))"
KEPT = "INSERT INTO shop.kept (word) SELECT word FROM shop.passing"


def test_statements_over_a_temporary_table_from_before_the_backup_are_refused_in_the_plan_and_never_proved(
    short_tmp: Path, keys: Keys
) -> None:
    with PrivateServer(options={"binlog_format": "STATEMENT"}) as server, server.connect() as session:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE shop",
            "CREATE TABLE shop.kept (id INT PRIMARY KEY AUTO_INCREMENT, word VARCHAR(20))",
            "INSERT INTO shop.kept (word) VALUES ('old')",
        )
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
            assert "error: inexact replay: the restored rows may differ from the source" in said
            assert "uses the temporary table passing, which was open at the position of backup 20" in said
            assert "--accept-inexact" in said
        assert not (short_tmp / "d").exists()

        outcome = house.ok(
            "restore", SERVER, "--to", "latest", "--accept-inexact", "--datadir", str(short_tmp / "d"), "--start"
        )
        assert (outcome["outcome"], outcome["warnings"][0][:28]) == ("inexact", "the restored data is inexact")
        with connect(outcome["started"]["socket"]) as copy:
            words = [row[0] for row in query(copy, "SELECT word FROM shop.kept ORDER BY id")]
        end(outcome["started"]["pid"])
        inexact = _asked_by_rest(house, short_tmp / "rest", "accept_inexact", refused="inexact")
        assert "uses the temporary table passing" in inexact["problem"]["detail"]
        assert inexact["plan"]["inexact"]
        assert inexact["outcome"]["outcome"] == "inexact"
        live = [row[0] for row in server.query("SELECT word FROM shop.kept ORDER BY id")]
        assert (live, words) == (["old", "one", "two"], ["old"]), "which is why it is refused"
        proof = json.loads(house.fails("test-restore", SERVER, "--json").out)
        assert proof["outcome"] == "inexact"

        house.backup()  # behind it nothing depends on what the session had
        server.execute(
            "XA START 'x'",
            "INSERT INTO shop.kept (word) VALUES ('xa')",
            "XA END 'x'",
            "XA PREPARE 'x'",
            "XA COMMIT 'x'",
        )
        _stream(house)
        assert house.ok("plan", SERVER, "--to", "latest")["inexact"] == ""
        said = house.fails(
            "restore", SERVER, "--to", "latest", "--replay-with", "pipe", "--datadir", str(short_tmp / "p")
        ).all
        assert "cannot go through the pipe: the logs hold XA transactions" in said
        assert not (short_tmp / "p").exists()

        server.execute(
            f"REVOKE ALL PRIVILEGES, GRANT OPTION FROM {SERVICE_USER}@localhost",
            "INSERT INTO shop.kept (word) VALUES ('not archived')",
        )
        house.fails("run-stream", SERVER, "--once")
        said = house.fails("plan", SERVER, "--to", "latest").all
        assert "but later transactions may exist, up to 20" in said
        assert "last error: " in said
        assert house.ok("plan", SERVER, "--to", "latest", "--accept-older")["older"]["certain"] is False
        told = _asked_by_rest(house, short_tmp / "older", "accept_older", refused="older")
        older = told["plan"]["older"]
        assert older["ends"] < older["known"]
        assert (
            f"would end at {older['ends']}, but later transactions may exist, up to {older['known'][:17]}"
            in told["problem"]["message"]
        )
        assert told["outcome"]["warnings"][0].startswith("not the newest data: the restore ends at ")


@pytest.mark.parametrize("stack", stacks(*whole(*MYSQL)))
def test_mysqls_statements_over_a_temporary_table_from_before_the_backup_are_refused_in_the_plan(
    stack: Stack, short_tmp: Path, keys: Keys
) -> None:
    with stack.make(options={"binlog_format": "STATEMENT"}) as server, server.connect() as session:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE shop", "CREATE TABLE shop.kept (id INT PRIMARY KEY AUTO_INCREMENT, word VARCHAR(20))"
        )
        house = House(short_tmp, server, keys, policy_extra=POLICY_EXTRA, programs=stack.all_programs())
        with session.cursor() as cursor:
            cursor.execute(MADE)
            cursor.execute("INSERT INTO shop.passing VALUES ('one'), ('two')")
            house.backup()
            cursor.execute(KEPT)
        _stream(house)
        for command in (("plan",), ("restore", "--datadir", str(short_tmp / "d"))):
            said = house.fails(command[0], SERVER, "--to", "latest", *command[1:]).all
            assert "uses the temporary table passing, which was open at the position of backup 20" in said
        assert not (short_tmp / "d").exists()


def _asked_by_rest(house: House, datadir: Path, option: str, *, refused: str) -> dict[str, Any]:
    """Refused in the plan and at once, and done in both ways once ``option`` says so. Gives the problem, the plan and
    what the restore came to."""
    asked = {"server": SERVER, "target": "latest", "datadir": str(datadir)}
    with rig(load_settings(house.config)) as api:
        client = api.client("admin")
        for path in ("/v1/restores/plan", "/v1/restores"):
            answer = client.post(path, json=asked)
            problem = answer.json()
            assert (answer.status_code, problem["type"]) == (409, f"urn:backupd:problem:{refused}"), problem
        assert api.catalog.jobs.list(state=JobState.QUEUED) == ()
        made = client.post("/v1/restores/plan", json={**asked, option: True})
        assert made.status_code == 201, made.text
        started = client.post("/v1/restores", json={"plan": made.json()["id"]})
        assert started.status_code == 202, started.text
        claimed = api.catalog.jobs.claim("a worker", utc_now(), runs_on=started.json()["job"]["runs_on"])
        assert claimed is not None
        assert claimed.id == started.json()["job"]["id"]
        house.run("run-job", claimed.id, "--token", str(claimed.token))
        restore = client.get(f"/v1/restores/{started.json()['restore']['id']}").json()
        assert restore["request"][option] is True
        house.remove_datadir(datadir)
        again = client.post("/v1/restores", json={**asked, option: True})
        assert again.status_code == 202, again.text
        assert client.post(f"/v1/jobs/{again.json()['job']['id']}/cancel").status_code == 200
    return {"problem": problem, "plan": made.json(), "outcome": restore["outcome"]}


def test_a_replay_that_would_make_files_beside_the_data_directory_is_refused_in_the_plan(
    short_tmp: Path, keys: Keys
) -> None:
    far = short_tmp / "far"
    far.mkdir(mode=0o777)
    far.chmod(0o777)
    with PrivateServer() as server:
        server.create_backup_users()
        server.execute("CREATE DATABASE shop", "CREATE TABLE shop.near (id INT PRIMARY KEY, note VARCHAR(99))")
        house = House(short_tmp, server, keys, policy_extra=POLICY_EXTRA)
        house.backup()
        server.execute("INSERT INTO shop.near VALUES (1, 'CREATE TABLE x (n INT) DATA DIRECTORY=''/srv''')")
        _stream(house)
        assert house.ok("plan", SERVER, "--to", "latest")["replay"]["transactions"] == 1
        server.execute(
            f"CREATE TABLE shop.far (id INT PRIMARY KEY) DATA DIRECTORY='{far}'",
            "INSERT INTO shop.far VALUES (1)",
            "INSERT INTO shop.near VALUES (2, '')",
        )
        _stream(house)
        before = sorted(far.rglob("*"))
        for command in (("plan",), ("restore", "--datadir", str(short_tmp / "d"))):
            said = house.fails(command[0], SERVER, "--to", "latest", *command[1:]).all
            assert "error: this replay would stop at a statement that creates files outside the data directory" in said
            assert "CREATE TABLE shop.far (id INT PRIMARY KEY) DATA DIRECTORY=" in said
        assert not (short_tmp / "d").exists()
        assert house.ok("plan", SERVER, "--to", "latest", "--tables", "shop.near")
        taken = house.backup()["id"]
        _stream(house)
        assert house.ok("plan", SERVER, "--to", "latest")["backup"] == taken
        assert sorted(far.rglob("*")) == before


def _stream(house: House) -> None:
    done = house.run("run-stream", SERVER, "--once")
    assert done.code == 0, done.all

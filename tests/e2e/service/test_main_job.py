"""Back up, lose data on purpose, restore, compare by checksum."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

from tests.support.e2e.house import BACKUPD, SERVER, House
from tests.support.load import Writers
from tests.support.sample import checksum_everything, describe_everything
from tests.support.servers.mariadb import PrivateServer, connect
from tests.support.servers.replica import replica_of
from tests.support.servers.server import Server


def everything(server: Server) -> tuple[dict[str, int], dict[str, list[str]]]:
    with server.connect() as connection:
        return checksum_everything(connection), describe_everything(connection)


def test_lost_tables_rows_views_triggers_routines_events_users_and_grants_come_back(own_house: House) -> None:
    house, server = own_house, own_house.server
    before = everything(server)
    record = house.backup()
    server.execute(
        "SET GLOBAL event_scheduler = OFF",
        "DROP TABLE shop.order_lines",
        "DELETE FROM bank.accounts",
        "DROP USER app@'%'",
        "DROP PROCEDURE bank.move",
        "DROP DATABASE archive",
    )
    assert everything(server) != before

    outcome = house.restore(house.base / "restored")
    assert outcome["backup"] == record["id"]
    assert [phase["name"] for phase in outcome["phases"]][:3] == ["fetched", "prepared", "restored"]
    with PrivateServer(datadir=house.base / "restored") as restored:
        assert everything(restored) == before
        assert "[ERROR]" not in restored.log_text()


def test_a_backup_under_four_writers_equals_the_source_at_its_recorded_gtid(short_tmp: Path, own_house: House) -> None:
    house, server = own_house, own_house.server
    with replica_of(server) as replica:
        replica.execute("STOP SLAVE")
        with Writers(server, 4) as writers:
            record = house.backup()
            assert writers.transactions > 0
        gtid = record["position"]["gtid"]
        assert gtid
        replica.execute(f"START SLAVE UNTIL master_gtid_pos='{gtid}'")
        assert replica.scalar("SELECT MASTER_GTID_WAIT(%s, 300)", (gtid,)) == 0
        replica.execute("STOP SLAVE")
        assert replica.scalar("SELECT @@gtid_slave_pos") == gtid
        with replica.connect() as connection:
            expected = checksum_everything(connection)
    house.restore(house.base / "restored")
    with PrivateServer(datadir=house.base / "restored") as restored, restored.connect() as connection:
        assert checksum_everything(connection) == expected


def test_a_started_restore_answers_on_its_socket_and_connects_nowhere(own_house: House) -> None:
    house = own_house
    house.backup()
    outcome = house.ok("restore", SERVER, "--to", "latest", "--datadir", str(house.base / "restored"), "--start")
    started = outcome["started"]
    try:
        with connect(started["socket"]) as connection:
            sums = checksum_everything(connection)
            with connection.cursor() as cursor:
                cursor.execute("SELECT @@event_scheduler, @@skip_networking")
                assert cursor.fetchone() == ("OFF", 1)
        with house.server.connect() as connection:
            assert sums == checksum_everything(connection)
    finally:
        os.kill(started["pid"], signal.SIGKILL)


def test_a_test_restore_proves_the_backup_against_its_witness(own_house: House) -> None:
    own_house.policy_extra = "test_restore:\n  checks:\n    - sql: 'SELECT COUNT(*) = 1000 FROM shop.customers'\n"
    own_house.write()
    house = own_house
    record = house.backup()
    proof = house.ok("test-restore", SERVER)
    assert proof["outcome"] == "proved", proof
    assert proof["backup"] == record["id"]
    assert proof["tables_compared"] >= 10
    assert [phase["name"] for phase in proof["phases"]] == ["fetched", "prepared", "restored", "started", "verified"]
    assert all(phase["seconds"] >= 0 for phase in proof["phases"])
    assert not list((house.base / "scratch").glob("*/")), "the scratch copy was not removed"


def test_a_test_restore_of_silently_changed_data_fails_and_names_the_table(own_house: House) -> None:
    own_house.policy_extra = "test_restore:\n  checks:\n    - sql: 'SELECT COUNT(*) = 999 FROM shop.customers'\n"
    own_house.write()
    own_house.backup()
    done = own_house.fails("test-restore", SERVER, "--json")
    proof = json.loads(done.out)
    assert proof["outcome"] == "failed"
    failed = [check for check in proof["checks"] if check["outcome"] == "failed"]
    assert len(failed) == 1
    assert "shop.customers" in failed[0]["name"]


def test_a_plan_moves_no_byte_and_says_steps_bytes_and_time(house: House) -> None:
    house.backup()
    target = house.base / "never"
    plan = house.ok("plan", SERVER, "--to", "latest")
    assert not target.exists()
    titles = " ".join(step["title"].lower() for step in plan["steps"])
    assert "fetch" in titles
    assert "prepare" in titles
    assert plan["bytes"] > 0
    assert plan["seconds"] > 0
    dumped = house.fails("plan", SERVER, "--to", "latest", "--tables", "shop.orders", "--from", "logical")
    assert f"server {SERVER} has no logical backup" in dumped.err
    assert f"take one: backupd backup {SERVER} --kind logical" in dumped.err


def test_checks_of_a_healthy_house_pass_and_a_broken_one_is_told_everything_at_once(house: House) -> None:
    assert house.run("check", SERVER).code == 0
    house.write(encryption_home=house.base / "empty-home", repository=Path("/proc/nowhere"))
    house.env["PATH"] = "/nonexistent"
    done = house.fails("check", SERVER)
    for word in ("mariadb-backup", "empty-home", "/proc/nowhere"):
        assert word in done.all, done.all


def test_a_backup_that_could_not_be_signed_ends_before_a_byte_is_copied(own_house: House) -> None:
    """The secret half of the named key is not there: that is found before the hours of copying, not behind them."""
    house = own_house
    house.config.write_text(
        house.config.read_text().replace("recipients: [", f"signing_key: {house.keys.fingerprint}, recipients: [")
    )
    for kind in ("full", "logical"):
        said = house.fails("backup", SERVER, "--kind", kind).all
        assert "cannot sign: its secret half is not there" in said, kind
        assert "rotate-signing" in said
    assert not house.repository.exists() or house.objects() == []


def test_check_notices_that_another_repository_is_in_a_destination_s_place(own_house: House) -> None:
    """As when another disk is mounted there: it answers, it is a repository, and what was stored is not in it."""
    house = own_house
    taken = house.backup()
    (house.base / "other").mkdir()
    other = House(house.base / "other", house.server, house.keys)
    other.backup()
    house.repository.rename(house.base / "aside")
    other.repository.rename(house.repository)
    said = house.fails("check").all
    assert f"backup {taken['id']} of {SERVER} is missing: by the catalog it is the newest one there" in said
    house.repository.rename(other.repository)
    (house.base / "aside").rename(house.repository)
    house.ok("check")


def test_progress_is_plain_lines_when_piped_and_bars_on_a_terminal(house: House) -> None:
    done = house.run("backup", SERVER, "--kind", "full")
    assert done.code == 0
    assert "\x1b[" not in done.all
    assert "copy" in done.err

    leader, follower = pty.openpty()
    with subprocess.Popen(
        [BACKUPD, "backup", SERVER, "--kind", "full"],
        stderr=follower,
        stdout=follower,
        stdin=follower,
        env={**house.environment(), "TERM": "xterm-256color"},
    ) as process:
        os.close(follower)
        shown = b""
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:
                break
            if not piece:
                break
            shown += piece
        assert process.wait() == 0
    os.close(leader)
    assert b"\x1b[" in shown

"""Places that are caught up later: they protect, they follow the binary log, and a restore goes on from them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.catalog.session import Catalog
from backupd.model.job import JobKind
from storage import layout
from tests.support.dice import SOAK
from tests.support.e2e.house import LONGEST, SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR, catalog_of, enqueue, serving, stop, until
from tests.support.oracle import same
from tests.support.sample import MARKER, checksum_everything
from tests.support.servers.mariadb import SERVICE_PASSWORD, PrivateServer
from tests.support.stores.s3_server import S3Server


def with_other(house: House, described: dict[str, object], policy: str) -> None:
    """Give the house a destination ``away`` that copies go to, and another policy."""
    told = json.dumps({name: str(value) if isinstance(value, Path) else value for name, value in described.items()})
    house.config.write_text(house.config.read_text().replace("destinations:\n", f"destinations:\n  away: {told}\n"))
    (house.base / "policies" / "gold.yaml").write_text(
        policy.replace("required: [local]", "required: [local], others: [away]")
    )


def equal_to_source(house: House, datadir: Path) -> None:
    with PrivateServer(datadir=datadir) as restored, restored.connect() as connection:
        sums = checksum_everything(connection)
    with house.server.connect() as connection:
        same(sums, checksum_everything(connection))


CLEAR = ("/manifest.json", "/RUNBOOK.md", "/segment.json", "/branch.json", "repository.json", "RECOVER.md")
"""What is readable without a key at a destination: it names ids, servers, sizes and digests, nothing from within."""


def assert_all_is_sealed(bucket: Path) -> None:
    """Every object is an OpenPGP message (RFC 4880, 4.2: a session key's packet comes first), or one of ``CLEAR``."""
    found = [path for path in bucket.rglob("*") if path.is_file()]
    sealed = [path for path in found if not path.as_posix().endswith(CLEAR)]
    assert len(sealed) > 5
    for path in found:
        content = path.read_bytes()
        assert path not in sealed or content[0] in (0x84, 0x85, 0xC1), path
        assert MARKER.encode() not in content, path
        assert SERVICE_PASSWORD.encode() not in content, path
        assert b"letters" not in content, f"{path} names a table"


def restoring(house: House, datadir: Path) -> subprocess.Popen[str]:
    return house.popen("restore", SERVER, "--to", "latest", "--datadir", str(datadir), "--json")


def stopped_while_it_fetches(house: House, process: subprocess.Popen[str]) -> bool:
    """It stands still, and some tables are there, and others are not. False: it was faster, and is undone."""
    staging = house.base / "restored.restoring"

    def has_tables() -> bool:
        with suppress(FileNotFoundError):  # the folder has got its final name meanwhile
            return any(staging.glob("data/*/*.ibd"))
        return True

    until(lambda: process.poll() is not None or has_tables(), lambda: "the first table")
    if process.poll() is None:
        stop(process)
        state = staging / "restore.json"
        if state.is_file() and json.loads(state.read_text())["stage"] == "fetching":
            return True
        os.killpg(process.pid, signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), out + err
    for left in (staging, house.base / "restored"):
        shutil.rmtree(left, ignore_errors=True)
    return False


def test_what_a_place_says_of_itself_follows_each_replication_and_verify_tells_what_is_stale(house: House) -> None:
    away = house.base / "away"
    with_other(
        house,
        {"type": "filesystem", "path": away},
        "physical: {full: '0 2 * * *'}\ndestinations: {required: [local]}\n",
    )
    texts = []
    for _ in range(2):
        record = house.backup()
        house.ok("replicate", SERVER, "--to", "away")
        texts.append((away / "RECOVER.md").read_text())
        assert layout.runbook_key(SERVER, record["id"]) in texts[-1]
        assert house.run("verify", SERVER).code == 0
        if len(texts) == 1:  # the catalog itself is copied once an hour
            assert copied_catalog(house, away) == [(record["id"], "away"), (record["id"], "local")]

    (away / "RECOVER.md").write_text(texts[0])
    told = house.run("verify", SERVER)
    assert told.code == 0
    assert (
        "away: RECOVER.md: holds other bytes than were written, or lists other backups than are stored there"
        in told.out
    )
    assert "1 damaged, 1 of them repaired" in told.out
    assert (away / "RECOVER.md").read_text() == texts[1], "it is put right"
    assert "RECOVER.md" not in house.run("verify", SERVER).out


def copied_catalog(house: House, place: Path) -> list[tuple[str, str]]:
    """The copies of backups, as the newest copy of the catalog at ``place`` knows them."""
    newest = max((place / layout.CATALOGS).iterdir())
    plain = house.base / "copy.db"
    plain.write_bytes(
        subprocess.run(
            f"gpg --homedir {house.keys.secret_home} --batch -qd {newest} | zstd -dc",
            shell=True,
            check=True,
            capture_output=True,
        ).stdout
    )
    with sqlite3.connect(plain) as copy:
        return copy.execute("SELECT backup_id, destination FROM copies ORDER BY backup_id, destination").fetchall()


def test_a_backup_on_s3_goes_on_with_a_restore_whose_first_place_dies_in_the_middle_of_it(
    house: House, s3_server: S3Server
) -> None:
    with_other(house, s3_server.bucket("others"), 'physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\n')
    record = house.backup()
    assert (record["protected"], len(record["copies"])) == (False, 1)
    (local, away) = house.ok("replicate", SERVER)
    assert local["verified"] == away["verified"] == [record["id"]]
    assert away["copied"][0]["objects"] >= len(house.objects())
    (listed,) = house.backups()
    assert listed["protected"]
    assert {copy["destination"] for copy in listed["copies"] if copy["verified_at"]} == {"local", "away"}
    assert "+protected" in house.run("backups", SERVER).out
    house.ok("catalog", "copy")
    assert_all_is_sealed(s3_server.folder / "others")
    assert house.fsck() == []
    assert house.ok("replicate", SERVER, "--to", "away")[0]["copied"] == []

    datadir = house.base / "restored"
    while not stopped_while_it_fetches(house, process := restoring(house, datadir)):
        pass  # it was not seen early enough
    with process:
        house.repository.rename(house.base / "burnt")
        os.killpg(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, out + err
    assert any("local" in text for text in json.loads(out)["warnings"]), out
    equal_to_source(house, datadir)
    assert house.restore(datadir)["backup"] == record["id"]
    equal_to_source(house, datadir)


FOLLOWED = ONCE_A_YEAR + "binlog: {stream: true, checkpoint: 1s}\nobjectives: {rpo: 60s}\n"


@pytest.fixture
def followed(own_house: House) -> House:
    with_other(own_house, {"type": "filesystem", "path": own_house.base / "away", "off_site": True}, FOLLOWED)
    return own_house


def is_protected(house: House) -> list[bool]:
    return [one["protected"] for one in house.backups()]


def reached(catalog: Catalog, moment: datetime) -> bool:
    """Is everything that was committed by then at the other place?"""
    return any(
        run.confirmed_at is not None and run.confirmed_at >= moment for run in catalog.binlogs.runs(SERVER, "away")
    )


def wait_for(catalog: Catalog, moment: datetime) -> None:
    until(lambda: reached(catalog, moment), lambda: str(catalog.binlogs.runs(SERVER, "away")))


@SOAK
def test_the_service_copies_verifies_and_follows_by_itself(followed: House) -> None:
    house = followed
    with catalog_of(house) as catalog, serving(house):
        enqueue(catalog, JobKind.FULL)
        until(lambda: is_protected(house) == [True], lambda: str(house.backups()))
        house.server.execute("CREATE DATABASE logs", "CREATE TABLE logs.t (v INT)", "INSERT INTO logs.t VALUES (1)")
        wait_for(catalog, datetime.now(UTC))
        told = {one["name"]: one for one in house.ok("timeline", SERVER)["destinations"]}
        assert told["away"]["rpo_seconds"] < 60
    assert house.fsck() == []
    house.repository.rename(house.base / "burnt")
    datadir = house.base / "restored"
    house.ok("restore", SERVER, "--to", "latest", "--datadir", str(datadir))
    equal_to_source(house, datadir)


@SOAK
def test_a_place_that_was_gone_is_told_of_once_and_caught_up(followed: House) -> None:
    house, away = followed, followed.base / "away"
    with catalog_of(house) as catalog, serving(house):
        enqueue(catalog, JobKind.FULL)
        until(lambda: is_protected(house) == [True], lambda: str(house.backups()))
        away.rename(house.base / "elsewhere")
        enqueue(catalog, JobKind.FULL)
        until(lambda: bool(catalog.events.list(kind="replication-failing")), lambda: str(house.backups()))
        house.server.execute("CREATE DATABASE logs", "CREATE TABLE logs.t (v INT)", "INSERT INTO logs.t VALUES (1)")
        moment = datetime.now(UTC)
        assert len(catalog.backups.list(SERVER)) == 2, "the backup counts all the same"
        (house.base / "elsewhere").rename(away)
        until(lambda: is_protected(house) == [True, True], lambda: str(catalog.replications.list()))
        wait_for(catalog, moment)
        until(lambda: bool(catalog.events.list(kind="replication-caught-up")), lambda: "it was caught up")
        assert len(catalog.events.list(kind="replication-failing")) == 1

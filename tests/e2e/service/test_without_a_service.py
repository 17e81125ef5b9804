"""Backups from the command line alone, with no service at all: rules are applied and what is due goes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.app.context.wiring import GRACE
from backupd.model.manifest import Header, decode_header
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.moved_clock import MovedClock
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer

BACKUPS = 30
RULES = "retention: {local: {keep_fulls: 2}}\nwitness: {enabled: false}\n"
REDO = 4 << 20
"""A physical backup holds the redo log since the last checkpoint, up to all of it. Where it is large and new, the
backups themselves grow until it has gone round."""


@pytest.fixture
def small_house(short_tmp: Path, keys: Keys) -> Iterator[House]:
    """A house with a server of its own, without any data."""
    with PrivateServer(options={"innodb_log_file_size": REDO}) as server:
        server.create_backup_users()
        server.execute("CREATE DATABASE shop")
        yield House(short_tmp, server, keys)


def test_the_disk_does_not_grow(small_house: House) -> None:
    house = small_house
    house.policy_extra = RULES
    house.write()
    clock = MovedClock(house)
    sizes: list[int] = []
    for number in range(BACKUPS):
        house.server.execute("USE shop")
        house.server.execute(
            "CREATE OR REPLACE TABLE shop.churn AS SELECT seq, RANDOM_BYTES(900) AS noise FROM seq_1_to_2000"
        )
        if number == 2:
            killed = house.popen("backup", SERVER, "--kind", "full")
            _until_objects_grow(house, len(house.objects()))
            os.killpg(killed.pid, signal.SIGKILL)
            killed.communicate()
            clock.wait(3600)  # its intent is dead by then
        process = house.popen("backup", SERVER, "--kind", "full", "--json")
        out, err = process.communicate()
        assert process.returncode == 0, out + err
        assert json.loads(out)["server"] == SERVER  # one document, before what follows
        assert err.count("warning") == 0, err
        kept = _kept(house)
        assert len(kept) == min(number + 1, 3), "two that the rules keep, and one until the end of its grace period"
        named = {one.name for header in kept for one in header.objects}
        assert {path.name for path in house.objects()} == named, "objects go in the sweep that removes their backup"
        sizes.append(sum(path.stat().st_size for path in house.objects()))
        clock.wait(GRACE.total_seconds() + 60)
    assert max(sizes) <= sizes[2] + 3 * REDO, "as much as three backups, however many were taken"
    for folder in ("tombstones", "intents", "sweeps", "pins"):
        assert _files(house, folder) == []
    jobs = house.ok("jobs", "list", "--limit", "1000")
    assert [job["state"] for job in jobs].count("abandoned") == 1, "the one that was killed"
    assert {job["state"] for job in jobs if job["kind"] != "physical-full"} == {"succeeded"}
    assert {job["kind"] for job in jobs} == {"physical-full", "retention", "sweep"}
    assert house.fsck() == []


def _kept(house: House) -> list[Header]:
    return [decode_header(path.read_bytes()) for path in _files(house, "servers") if path.name == "manifest.json"]


def _files(house: House, folder: str) -> list[Path]:
    return [path for path in (house.repository / folder).rglob("*") if path.is_file()]


def _until_objects_grow(house: House, before: int) -> None:
    while len(house.objects()) <= before:
        pass

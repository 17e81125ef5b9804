"""Backups from the command line alone, with no service at all: rules are applied and what is due goes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from backupd.app.context.wiring import GRACE
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.moved_clock import MovedClock

BACKUPS = 8
RULES = "retention: {local: {keep_fulls: 2}}\nwitness: {enabled: false}\n"


def test_the_disk_does_not_grow(own_house: House) -> None:
    house = own_house
    house.policy_extra = RULES
    house.write()
    clock = MovedClock(house)
    sizes: list[int] = []
    for number in range(BACKUPS):
        house.server.execute(
            "CREATE OR REPLACE TABLE shop.churn AS SELECT seq, RANDOM_BYTES(900) AS noise FROM shop.seq_1_to_2000"
        )
        if number == 2:
            killed = house.popen("backup", SERVER, "--kind", "full")
            _until_objects_grow(house, len(_files(house, "objects")))
            os.killpg(killed.pid, signal.SIGKILL)
            killed.communicate()
            clock.wait(3600)  # its intent is dead by then
        process = house.popen("backup", SERVER, "--kind", "full", "--json")
        out, err = process.communicate()
        assert process.returncode == 0, out + err
        assert json.loads(out)["server"] == SERVER  # one document, before what follows
        assert err.count("warning") == 0, err
        clock.wait(GRACE.total_seconds() + 60)
        sizes.append(sum(path.stat().st_size for path in _files(house, "objects")))
    manifests = [path for path in _files(house, "servers") if path.name == "manifest.json"]
    assert len(manifests) == 3, "two that the rules keep, and one that waits for the end of its grace period"
    assert sizes[-1] < sizes[3], "twice as many backups were taken, and what they stored is gone"
    for folder in ("tombstones", "intents", "sweeps", "pins"):
        assert _files(house, folder) == []
    jobs = house.ok("jobs")
    assert {job["state"] for job in jobs if job["kind"] != "physical-full"} == {"succeeded"}
    assert {job["kind"] for job in jobs} == {"physical-full", "retention", "sweep"}
    assert [job["state"] for job in jobs].count("abandoned") == 1
    assert house.fsck() == []


def _files(house: House, folder: str) -> list[Path]:
    return [path for path in (house.repository / folder).rglob("*") if path.is_file()]


def _until_objects_grow(house: House, before: int) -> None:
    while len(_files(house, "objects")) <= before:
        pass

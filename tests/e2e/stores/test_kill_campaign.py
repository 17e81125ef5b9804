"""kill -9 of the service at random moments of backups, retention and test restores. Nothing may be left that the next
start, and `backupd fsck --repair`, do not put in order; and nothing may outlive the service."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.app.context.wiring import owner_is_alive
from backupd.catalog.session import Catalog
from backupd.model.job import JobKind, JobState
from tests.support.dice import rounds, thrown
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import (
    ONCE_A_YEAR,
    alive,
    catalog_of,
    descendants,
    enqueue,
    naming,
    parent,
    serving,
    until,
)
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer

POLICY = ONCE_A_YEAR.replace("keep_fulls: 2", "keep_fulls: 1")
LONGEST = 4.0
"""Seconds: a backup takes about two of them, a test restore more."""
WORK = (JobKind.FULL, JobKind.FULL, JobKind.INCREMENTAL, JobKind.RETENTION, JobKind.TEST_RESTORE, JobKind.VERIFY)


@pytest.fixture
def killing_house(short_tmp: Path, shared_server: PrivateServer, keys: Keys) -> House:
    """A house where several jobs of one server may run beside each other."""
    house = House(short_tmp, shared_server, keys)
    (house.base / "policies" / "gold.yaml").write_text(POLICY)
    house.config.write_text(house.config.read_text() + "concurrency: {jobs: 4, per_server: 3, per_destination: 4}\n")
    return house


@pytest.fixture
def catalog(killing_house: House) -> Iterator[Catalog]:
    with catalog_of(killing_house) as opened:
        yield opened


def twice(house: House) -> set[str]:
    """Jobs that more than one living process says it does, at two looks: one that ended during the first, while its
    child had not yet become its program, is not there any more at the second."""
    found = _twice(house)
    return found and found & _twice(house)


def _twice(house: House) -> set[str]:
    doing = {
        pid: line.split(" run-job ")[1].split()[0]
        for pid, line in naming(str(house.base), set()).items()
        if " run-job " in line
    }
    # A child that has not yet become its program shows the words of its parent: it is no second one.
    counted = Counter(job for pid, job in doing.items() if doing.get(parent(pid)) != job)
    return {job for job, number in counted.items() if number > 1}


def abandoned(catalog: Catalog) -> list[str]:
    """Jobs that run, it is said, and whose process is not there. One may have ended between the two questions."""
    dead = [job.id for job in catalog.jobs.list(state=JobState.RUNNING) if not owner_is_alive(job.owner)]
    return [one for one in dead if catalog.jobs.get(one).state is JobState.RUNNING]


def unfinished(house: House) -> list[str]:
    """Files of a half-done step, anywhere in the destination and the spool."""
    return [
        str(path)
        for folder in (house.repository, house.base / "spool")
        for path in folder.rglob("*")
        if path.is_file() and (".tmp" in path.parts or path.name.endswith((".tmp", ".part", ".partial")))
    ]


def one_round(house: House, catalog: Catalog, dice: random.Random) -> str:
    """Start the service, give it work, kill it some time later; gives what it was killed in."""
    with serving(house) as service:
        assert abandoned(catalog) == []
        waiting = {job.kind for job in catalog.jobs.list(state=JobState.QUEUED)}
        for kind in dice.sample(WORK, dice.randint(1, 3)):
            if kind not in waiting:
                enqueue(catalog, kind)
        until(lambda: bool(catalog.jobs.list(state=JobState.RUNNING)), lambda: "anything running")
        deadline = time.monotonic() + dice.uniform(0, LONGEST)
        while time.monotonic() < deadline:
            assert not twice(house)
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
        running = sorted(f"{job.kind}" for job in catalog.jobs.list(state=JobState.RUNNING))
        family = descendants(service.process.pid)
        service.kill()
    besides = {house.server.pid}
    until(
        lambda: not alive(family) and not naming(str(house.base), besides),
        lambda: f"the end of {alive(family)} {naming(str(house.base), besides)}",
    )
    return "+".join(running) or "nothing"


def in_order(house: House, catalog: Catalog) -> None:
    """One command repairs; afterwards everything agrees."""
    house.run("fsck", "--repair")
    assert house.fsck() == []
    assert unfinished(house) == []
    listed = {backup["id"] for backup in house.backups()}  # those within their grace period too
    stored = {path.parent.name for path in (house.repository / "servers").glob("*/*/manifest.json")}
    assert listed == stored
    tokens = [(job.id, job.token) for job in catalog.jobs.list()]
    assert len(tokens) == len(set(tokens))


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_nothing_is_left_after_the_service_was_killed(killing_house: House, catalog: Catalog) -> None:
    house, dice = killing_house, thrown("kill campaign")
    house.backup()
    killed: Counter[str] = Counter()
    for number in range(rounds(2)):
        moment = one_round(house, catalog, dice)
        killed[moment] += 1
        print(f"round {number + 1}: killed during {moment}")
        in_order(house, catalog)
    print(dict(killed))
    with serving(house) as service:  # the next start takes up what is queued, and all comes to an end
        until(
            lambda: not catalog.jobs.list(state=(JobState.QUEUED, JobState.RUNNING)),
            lambda: f"the end of {catalog.jobs.list(state=(JobState.QUEUED, JobState.RUNNING))}",
            600,
        )
        assert service.stop() == 0
    house.backup()
    proof = house.ok("test-restore", SERVER)
    assert proof["outcome"] == "proved"
    assert list((house.base / "scratch").iterdir()) == []
    assert [path for path in (house.base / "run").iterdir() if path.name != ".lock"] == []
    in_order(house, catalog)

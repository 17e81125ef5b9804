"""Workers, with real processes and backups: what is cancelled, killed or taken over leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from backupd.app.context import logging_setup as logs
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring, owner_state
from backupd.app.jobs.admission import Admission
from backupd.app.jobs.jobs import DAEMON_STOP, abandon_dead
from backupd.app.runtime.fork_server import ForkServer
from backupd.app.service.worker import Worker
from backupd.catalog.session import open_catalog
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import new_id
from backupd.process.run_context import utc_now
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.service.house import GOLD, Office
from tests.support.stores.gate import Gate, freeze, is_frozen, processes, until

HASH = "*2470C0C06DEE42FD1618BBB99005ADCA2EC9D1E1"
COPYING = 20_000_000
"""Bytes of the tool's output in the middle of the sample's copy."""


@dataclass
class Site:
    """A house, its catalog, and workers that run in this process."""

    house: House
    wiring: Wiring

    def enqueue(self, kind: JobKind = JobKind.FULL, *, leg: str = "", **arguments: object) -> str:
        now = self.wiring.clock()
        job = JobRecord(
            id=new_id(now),
            kind=kind,
            server=SERVER,
            state=JobState.QUEUED,
            queued_at=now,
            leg=leg,
            requested_by="" if leg else "ops",
            arguments=arguments,
        )
        self.wiring.catalog.jobs.enqueue(job)
        return job.id

    def job(self, name: str) -> JobRecord:
        return self.wiring.catalog.jobs.get(name)

    def over(self, name: str) -> bool:
        return self.job(name).state not in (JobState.QUEUED, JobState.RUNNING)

    def child(self, name: str) -> int:
        """The process that runs this job, once it has adopted it."""
        return int(self.job(name).owner.split(" ")[3])

    def adopted(self, name: str) -> bool:
        job = self.job(name)
        return job.token > 1 and self.child(name) != os.getpid()

    def freeze(self, name: str) -> int:
        """SIGSTOP for this job's process, in a moment in which it writes nothing: whoever stands still in the middle of
        a transaction keeps everybody from the catalog. Gives its id."""
        child = self.child(name)
        while True:
            os.kill(child, signal.SIGSTOP)
            until(lambda: is_frozen(child))
            with closing(sqlite3.connect(self.house.base / "catalog.db", timeout=0, isolation_level=None)) as file:
                try:
                    file.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError:  # locked, by it or by somebody else
                    os.kill(child, signal.SIGCONT)
                    time.sleep(0.01)
                else:
                    file.execute("ROLLBACK")
                    return child

    def only(self, state: JobState, *, previous: str) -> JobRecord:
        (job,) = self.wiring.catalog.jobs.list(previous=previous)
        assert job.state is state
        return job

    def gate(self, monkeypatch: pytest.MonkeyPatch, *, only: str = "--backup", limit: int = COPYING) -> Gate:
        gate = Gate(self.house.base / "gate", "mariadb-backup", only, limit)
        monkeypatch.setenv("PATH", gate.path)
        return gate

    def is_clean(self) -> None:
        """No process, lease, partial tree or temporary file is left, here or at the destination."""
        until(lambda: not processes(str(self.house.base)))
        left = [
            str(path.relative_to(self.house.repository))
            for folder in ("intents", "pins")
            for path in (self.house.repository / folder).rglob("*")
            if path.is_file()
        ]
        left += [
            str(path)
            for path in self.house.repository.rglob("*")
            if path.name.endswith(".partial") or path.parent.name == ".tmp"
        ]
        assert left == []
        manifests = {path.parent.name for path in self.house.repository.rglob("manifest.json")}
        assert manifests == {record.id for record in self.wiring.catalog.backups.every()}
        named = {
            name
            for path in self.house.repository.rglob("manifest.json")
            for name in _objects(json.loads(path.read_text()))
        }
        assert {path.name for path in self.house.objects()} == named
        assert not [path for path in (self.house.base / "scratch").glob("*") if path.is_dir()]


def _objects(header: dict[str, object]) -> list[str]:
    objects = header["objects"]
    assert isinstance(objects, list)
    return [item["name"] if isinstance(item, dict) else item[0] for item in objects]


@pytest.fixture
def site(short_tmp: Path, shared_server: PrivateServer, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    house = House(short_tmp, shared_server, keys, policy_extra="retry: {attempts: 2, pause: 1s}\n")
    house.env["PATH"] = os.environ["PATH"]  # gates that tests put up are for jobs, not for what looks at them
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    settings = load_settings(house.config)
    with open_catalog(settings.catalog) as catalog:
        yield Site(house, Wiring(settings, catalog))


@contextmanager
def working(site: Site, *, grace: float = 120.0) -> Iterator[Worker]:
    """As in the service: jobs are forked. ``grace``: what is told to end may take its time; only what does not hear is
    killed."""
    with ForkServer() as forks, Worker(site.wiring, grace=grace, starter=forks.start) as worker:
        yield worker


# -- the common way


def test_a_queued_backup_is_taken_in_a_process_of_its_own(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = site.gate(monkeypatch)
    name = site.enqueue(leg="physical.full")
    with working(site):
        until(gate.waiting)
        until(lambda: (site.job(name).progress or {}).get("phase") == "copy")
        assert site.child(name) != os.getpid()
        gate.open()
        until(lambda: site.over(name))
    job = site.job(name)
    assert job.state is JobState.SUCCEEDED, job
    record = site.wiring.catalog.backups.get(job.result)
    assert job.bytes == record.stats.bytes_source > 0
    assert [phase.name for phase in job.phases] == ["backup"]
    assert site.wiring.catalog.rates.of(SERVER)["backup"].bytes_per_second
    assert "completed OK!" in logs.read_log(site.wiring.settings, name)
    site.is_clean()


def test_two_workers_on_one_catalog_run_each_job_once(site: Site) -> None:
    names = [site.enqueue(JobKind.VERIFY) for _ in range(4)]
    with working(site), working(site):
        until(lambda: all(site.over(name) for name in names))
    for name in names:
        assert site.job(name).state is JobState.SUCCEEDED
        assert logs.read_log(site.wiring.settings, name).count("job-started") == 1
    spans = sorted(
        (job.started_at, job.finished_at)
        for job in map(site.job, names)
        if job.started_at is not None and job.finished_at is not None
    )
    assert all(before[1] <= after[0] for before, after in pairwise(spans)), "one server, one job"


def test_a_damage_that_verify_finds_fails_its_job(site: Site) -> None:
    site.house.backup()
    site.house.objects()[0].write_bytes(b"not what was stored")
    name = site.enqueue(JobKind.VERIFY, leg="verify")
    with working(site):
        until(lambda: site.over(name))
    job = site.job(name)
    assert job.state is JobState.FAILED
    assert "damage" in job.message
    assert [event.kind for event in site.wiring.catalog.events.list(kind="job-failed")] == ["job-failed"]
    assert site.wiring.catalog.jobs.list(previous=name) == ()


# -- cancelling


def _stop_at(site: Site, monkeypatch: pytest.MonkeyPatch, moment: str) -> tuple[str, Callable[[], object]]:
    """A queued job, and a condition that comes true when it can go no further than ``moment``."""
    if moment.startswith("a test restore"):
        site.house.backup()
        if moment.endswith("fetch"):
            gate = Gate(site.house.base / "gate", "gpg", "--decrypt", 0)
            monkeypatch.setenv("PATH", gate.path)
            return site.enqueue(JobKind.TEST_RESTORE), gate.waiting
        program = {"prepare": "mariadb-backup", "server": "mariadbd"}[moment.rsplit(maxsplit=1)[-1]]
        return site.enqueue(JobKind.TEST_RESTORE), lambda: freeze(program, str(site.house.base))
    limit = {"the tool's first byte": 0, "the middle of the copy": COPYING, "the tool's last bytes": 45_000_000}[moment]
    return site.enqueue(), site.gate(monkeypatch, limit=limit).waiting


@pytest.mark.parametrize(
    "moment",
    [
        "the tool's first byte",
        "the middle of the copy",
        "the tool's last bytes",
        "a test restore's fetch",
        "a test restore's prepare",
        "a test restore's server",
    ],
)
def test_a_cancelled_job_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    name, stuck = _stop_at(site, monkeypatch, moment)
    with working(site):
        until(stuck)
        done = site.house.ok("jobs", "cancel", name)
        assert done["state"] == "running"
        until(lambda: site.over(name))
        job = site.job(name)
        assert job.state is JobState.CANCELLED, job
        assert "cancelled by root" in job.message
        assert "did not end" not in job.message
        site.is_clean()
    assert [event.kind for event in site.wiring.catalog.events.list()] == ["job-cancelled"]
    assert site.house.fsck() == []


def test_a_job_that_does_not_hear_is_killed_with_all_its_processes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = site.gate(monkeypatch)
    name = site.enqueue()
    with working(site, grace=0.5):
        until(gate.waiting)
        site.freeze(name)
        site.house.ok("jobs", "cancel", name)
        until(lambda: site.over(name))
        job = site.job(name)
        assert job.state is JobState.CANCELLED
        assert "did not end within 0.5 s" in job.message
        until(lambda: not processes(str(site.house.base)))
    site.house.backup()
    assert site.house.fsck() == []


def test_a_backup_in_the_foreground_is_cancelled_from_elsewhere(site: Site) -> None:
    gate = Gate(site.house.base / "gate", "mariadb-backup", "--backup", COPYING)
    site.house.env["PATH"] = gate.path
    with site.house.popen("backup", SERVER) as process:
        until(gate.waiting)
        (job,) = site.wiring.catalog.jobs.list(state=JobState.RUNNING)
        site.house.ok("jobs", "cancel", job.id)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 1, out + err
    assert "was cancelled by root" in err
    assert site.job(job.id).state is JobState.CANCELLED
    site.is_clean()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_backup_stopped_by_a_signal_is_cancelled(site: Site, number: signal.Signals) -> None:
    gate = Gate(site.house.base / "gate", "mariadb-backup", "--backup", COPYING)
    site.house.env["PATH"] = gate.path
    with site.house.popen("backup", SERVER) as process:
        until(gate.waiting)
        os.kill(process.pid, number)
        process.communicate(timeout=240)
    assert process.returncode == 128 + number
    (job,) = site.wiring.catalog.jobs.list(SERVER)
    assert (job.state, job.message) == (JobState.CANCELLED, f"stopped by {number.name}")
    site.is_clean()


# -- dying


def test_a_killed_process_is_abandoned_with_its_signal_and_tried_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = site.gate(monkeypatch)
    name = site.enqueue(leg="physical.full")
    with working(site):
        until(gate.waiting)
        os.kill(site.child(name), signal.SIGKILL)
        until(lambda: site.over(name))
        job = site.job(name)
        assert job.state is JobState.ABANDONED
        assert "SIGKILL" in job.message
        gate.open()
        (again,) = site.wiring.catalog.jobs.list(previous=name)
        until(lambda: site.over(again.id))
    assert site.job(again.id).state is JobState.SUCCEEDED
    assert [event.kind for event in site.wiring.catalog.events.list()] == ["job-recovered", "job-abandoned"]
    site.is_clean()
    assert site.house.fsck() == []


_WORKER = """
import sys, time
from pathlib import Path
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.runtime.fork_server import ForkServer
from backupd.app.service.worker import Worker
from backupd.catalog.session import open_catalog
settings = load_settings(Path(sys.argv[1]))
with open_catalog(settings.catalog) as catalog, Worker(Wiring(settings, catalog)):
    time.sleep(600)
"""


def test_a_killed_worker_takes_its_jobs_with_it_and_the_next_one_takes_them_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = site.gate(monkeypatch)
    name = site.enqueue(leg="physical.full")
    with subprocess.Popen([sys.executable, "-c", _WORKER, str(site.house.config)]) as worker:
        until(gate.waiting)
        worker.kill()
    until(lambda: owner_state(site.job(name).owner) is False)
    gate.open()
    until(lambda: not processes(str(site.house.base)))
    with working(site):
        until(lambda: site.over(name))
        assert site.job(name).state is JobState.ABANDONED
        again = site.wiring.catalog.jobs.list(previous=name)[0]
        until(lambda: site.over(again.id))
    assert site.job(again.id).state is JobState.SUCCEEDED
    site.is_clean()
    assert site.house.fsck() == []


def test_a_sleeping_process_is_not_abandoned_and_one_that_was_taken_over_commits_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = site.gate(monkeypatch)
    name = site.enqueue()
    with working(site) as worker:
        until(gate.waiting)
        child = site.freeze(name)
        gate.open()
        assert abandon_dead(site.wiring) == ()
        job = site.job(name)
        site.wiring.catalog.jobs.finish(name, JobState.ABANDONED, site.wiring.clock(), token=job.token)
        os.kill(child, signal.SIGCONT)
        until(lambda: worker.running() == 0)
    assert site.job(name).state is JobState.ABANDONED
    assert tuple(site.wiring.catalog.backups.every()) == ()
    site.is_clean()


def test_a_process_that_cannot_begin_says_why(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    held = site.house.base / "held.json"
    held.write_text("nothing")
    monkeypatch.setattr("backupd.app.context.settings.Settings.hold", lambda _settings, _folder: held)
    name = site.enqueue()
    with working(site):
        until(lambda: site.over(name))
    job = site.job(name)
    assert job.state is JobState.ABANDONED
    assert "exited with 2" in job.message
    assert "held.json" in job.detail
    assert site.house.base.joinpath("jobs", f"{name}.log").read_text().count("held.json") >= 1


# -- ending


def test_what_a_stopped_worker_had_to_end_is_done_by_the_next(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = site.gate(monkeypatch)
    name = site.enqueue(leg="physical.full")
    with working(site) as worker:
        until(gate.waiting)
        worker.hold(True)
        worker.stop()
        assert worker.running() == 0
    job = site.job(name)
    assert (job.state, job.cancel_by) == (JobState.CANCELLED, DAEMON_STOP)
    again = site.only(JobState.QUEUED, previous=name)
    assert (again.attempt, again.leg) == (1, "physical.full")
    site.is_clean()
    gate.open()
    with working(site):
        until(lambda: site.over(again.id))
    assert site.job(again.id).state is JobState.SUCCEEDED


def test_secrets_on_a_tools_stderr_reach_neither_row_nor_event_nor_log(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = site.house.base / "bin"
    folder.mkdir()
    (folder / "mariadb-backup").write_text(
        '#!/bin/bash\ncase " $* " in *--version*) exec /usr/bin/mariadb-backup --version ;; esac\n'
        f"echo \"GRANT RELOAD ON *.* TO b@l IDENTIFIED BY PASSWORD '{HASH}'\" >&2\n"
        "echo \"INSERT INTO shop.customers VALUES (1,'Ada Lovelace')\" >&2\nexit 1\n"
    )
    (folder / "mariadb-backup").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    name = site.enqueue()
    with working(site):
        until(lambda: site.over(name))
    assert site.job(name).state is JobState.FAILED
    told = "".join(
        [
            site.house.run("jobs", "show", name, "--json").out,
            site.house.run("jobs", "log", name).out,
            *(json.dumps(event.as_json()) for event in site.wiring.catalog.events.list()),
        ]
    )
    assert "GRANT RELOAD" in told
    for secret in (HASH[1:], "Lovelace"):
        assert secret not in told


# -- what may start beside what


def _job(server: str, kind: JobKind = JobKind.FULL, leg: str = "") -> JobRecord:
    now = utc_now()
    return JobRecord(id=new_id(now), kind=kind, server=server, state=JobState.QUEUED, queued_at=now, leg=leg)


@pytest.mark.parametrize(
    ("concurrency", "running", "job", "expected"),
    [
        ("{jobs: 2}", ["db1"], _job("db2"), True),
        ("{jobs: 2, per_destination: 9}", ["db1", "db2"], _job("db3"), False),
        ("{jobs: 9, per_destination: 9}", ["db1"], _job("db1", JobKind.VERIFY), False),
        ("{jobs: 9, per_destination: 9, per_server: 2}", ["db1"], _job("db1", JobKind.VERIFY), True),
        ("{jobs: 9, per_destination: 9, per_server: 2}", ["db1"], _job("db1", JobKind.INCREMENTAL), False),
        ("{jobs: 9, per_destination: 2}", ["db1", "db2"], _job("db3"), False),
        ("{jobs: 9, per_destination: 2}", ["db1", "db2"], _job("", JobKind.CHALLENGE), True),
        ("{jobs: 9, per_destination: 2}", ["db1", "gone"], _job("db3"), True),
    ],
)
def test_the_limits_decide_what_starts_beside_what(
    tmp_path: Path, concurrency: str, running: list[str], job: JobRecord, expected: bool
) -> None:
    office = Office(tmp_path, servers=dict.fromkeys(("db1", "db2", "db3"), "gold"))
    settings = office.write(extra=f"concurrency: {concurrency}\n", gold=GOLD)
    assert Admission(settings, ()).allows(job, [_job(server) for server in running]) is expected


@pytest.mark.parametrize("paused", [{"db1"}, {"*"}])
def test_a_pause_holds_back_schedules_but_not_people(tmp_path: Path, paused: set[str]) -> None:
    allowed = Admission(Office(tmp_path).write(gold=GOLD), paused).allows
    assert not allowed(_job("db1", leg="physical.full"), [])
    assert allowed(_job("db1"), [])
    assert allowed(_job("", JobKind.CHALLENGE, leg="challenge"), []) is ("*" not in paused)

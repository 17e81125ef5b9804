"""Restores as jobs: planned under an id, done by a process of their own, gone on with after kill -9."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.restores.jobs import PlanChangedError, UnconfirmedError
from backupd.app.restores.progress import RestoreView
from backupd.app.restores.request import RestoreRequest
from backupd.app.service.facade import Service
from backupd.app.service.worker import Worker
from backupd.catalog.session import open_catalog
from backupd.model.access import Actor, Role, Via
from backupd.model.errors import BusyError, NotFoundError, RefusedError
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.proof import Phase
from tests.support.catalog import samples
from tests.support.dice import size, thrown
from tests.support.e2e.house import SERVER, House
from tests.support.ending import end
from tests.support.keys import Keys
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.gate import until

ANN = Actor("ann", Role.ADMIN, Via.API)


@dataclass
class Desk:
    """A house with one backup, its catalog, and what people may ask for there."""

    house: House
    wiring: Wiring
    service: Service
    path: str

    @property
    def place(self) -> Path:
        return self.house.base / "restored"

    def request(self, **other: Any) -> RestoreRequest:
        return replace(RestoreRequest(SERVER, "latest", datadir=str(self.place)), **other)

    def view(self, restore_id: str) -> RestoreView:
        return self.service.requests.restore_view(restore_id)

    def running(self, restore_id: str) -> str:
        return next((phase.name for phase in self.view(restore_id).phases if phase.state == "running"), "")

    def halt(self, monkeypatch: pytest.MonkeyPatch, program: str, only: str) -> None:
        """Let ``program`` stand still when it is called with ``only``. It may run in a sandbox, so it can leave no sign
        of that."""
        folder = self.house.base / f"halt-{program}"
        folder.mkdir()
        (folder / program).write_text(f"""#!/bin/bash
case " $* " in *" {only} "*) exec sleep 1000 ;; esac
exec {shutil.which(program, path=self.path)} "$@"
""")
        (folder / program).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{self.path}")

    def halt_in(self, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
        """Let processes of jobs stand still when they begin a phase in which no program of others runs."""
        folder = self.house.base / f"halt-{phase}"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(f"""
import contextlib, sys, time
if "run-job" in sys.orig_argv:
    from backupd.process.run_context import Stopwatch
    real = Stopwatch.phase
    @contextlib.contextmanager
    def halting(self, name, size=0):
        if name == {phase!r}:
            time.sleep(1000)
        with real(self, name, size):
            yield
    Stopwatch.phase = halting
""")
        self.let_go(monkeypatch)
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    def let_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What begins from now on is not halted."""
        monkeypatch.setenv("PATH", self.path)
        halts = f"{self.house.base}/halt-"
        monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.startswith(halts)])

    def reach(self, restore_id: str, phase: str) -> None:
        until(lambda: self.running(restore_id) == phase)

    def end(self, job_id: str) -> JobState:
        until(lambda: self.wiring.catalog.jobs.get(job_id).state not in (JobState.QUEUED, JobState.RUNNING))
        return self.wiring.catalog.jobs.get(job_id).state


@pytest.fixture
def desk(short_tmp: Path, shared_server: PrivateServer, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    house = House(short_tmp, shared_server, keys)
    house.env["PATH"] = os.environ["PATH"]
    house.config.write_text(
        house.config.read_text().replace(
            "policy: gold", f"restore_defaults_file: {shared_server.client_file()}, policy: gold"
        )
    )
    house.backup()
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    settings = load_settings(house.config)
    with open_catalog(settings.catalog) as catalog:
        wiring = Wiring(settings, catalog)
        yield Desk(house, wiring, Service(wiring, "").acting(ANN), os.environ["PATH"])


@contextmanager
def served(datadir: Path) -> Iterator[dict[str, int]]:
    with PrivateServer(datadir=datadir) as server, server.connect() as connection:
        yield checksum_everything(connection)


def test_kill_9_in_a_phase_and_the_same_request_again_end_with_equal_checksums(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = desk.request(start=True)
    plan = desk.service.requests.plan(request)
    assert plan.document["backup"] == next(desk.wiring.catalog.backups.every()).id
    assert plan.made_by == "ann"
    restore_id = ""
    programs = {"fetched": ("gpg", "--decrypt"), "prepared": ("mariadb-backup", "--prepare")}
    later = ("restored", "started", "verified")
    some = thrown("phases").sample(later, size(1, len(later)))
    phases = (*programs, *sorted(some, key=later.index))
    for phase in phases:
        if phase in programs:
            desk.halt(monkeypatch, *programs[phase])
        else:
            desk.halt_in(monkeypatch, phase)
        with Worker(desk.wiring):
            record, job = desk.service.requests.restore(plan.id)
            assert record.id == restore_id or not restore_id
            restore_id = record.id
            desk.reach(restore_id, phase)
            with pytest.raises(BusyError, match=record.id):
                desk.service.requests.restore(desk.request())
            os.kill(int(desk.wiring.catalog.jobs.get(job.id).owner.split(" ")[3]), signal.SIGKILL)
            assert desk.end(job.id) is JobState.ABANDONED
        found = desk.view(restore_id)
        assert (found.state, found.resumable) == (JobState.ABANDONED, True)
        assert [one.state for one in found.phases if one.name == phase] == ["failed"]
    desk.let_go(monkeypatch)
    book = desk.service.requests.runbook_of_restore(restore_id)
    assert f"restore {SERVER} --to latest --datadir {desk.place} --start" in book
    assert "continues where the restore stopped" in book
    assert "gpg" in book
    with Worker(desk.wiring):
        record, job = desk.service.requests.restore(request)
        assert record.id == restore_id
        desk.end(job.id)
    done = desk.view(restore_id)
    assert done.state is JobState.SUCCEEDED, (done.record.error, desk.service.jobs.log(job.id))
    end((done.record.request or {})["outcome"]["started"]["pid"])
    assert [(one.name, one.state) for one in done.phases] == [
        ("fetched", "done"),
        ("prepared", "done"),
        ("restored", "done"),
        ("rolled_forward", "skipped"),
        ("started", "done"),
        ("verified", "done"),
    ]
    assert desk.wiring.catalog.jobs.get(job.id).result == restore_id
    assert (done.record.request or {})["outcome"]["backup"] == plan.document["backup"]
    assert [one.record.id for one in desk.service.listings.restores(SERVER).items] == [restore_id]
    with pytest.raises(RefusedError, match="not empty"):
        desk.service.requests.restore(desk.request())
    assert [entry.outcome for entry in desk.wiring.catalog.audit.list(action="restore-requested")] == [
        "refused",
        "done",
    ] * (len(phases) + 1)
    with desk.house.server.connect() as connection, served(desk.place) as sums:
        assert sums == checksum_everything(connection)


def test_a_restore_that_waits_or_runs_is_cancelled_with_its_job_and_gone_on_with(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = desk.service.requests
    record, job = requests.restore(desk.request())
    assert [one.state for one in requests.restore_view(record.id).phases] == [
        "waiting",
        "waiting",
        "waiting",
        "skipped",
        "skipped",
    ]
    desk.service.jobs.cancel(job.id)
    assert requests.restore_view(record.id).state is JobState.CANCELLED
    desk.halt(monkeypatch, "mariadb-backup", "--prepare")
    again, second = requests.restore(desk.request())
    assert again.id == record.id
    with Worker(desk.wiring):
        desk.reach(record.id, "prepared")
        desk.service.jobs.cancel(second.id)
        assert desk.end(second.id) is JobState.CANCELLED
        assert requests.restore_view(record.id).state is JobState.CANCELLED
        third, job = requests.restore(desk.request())
        assert third.id == record.id
        monkeypatch.setenv("PATH", desk.path)
        desk.end(job.id)
    assert desk.wiring.catalog.jobs.get(job.id).state is JobState.SUCCEEDED
    assert desk.wiring.catalog.restores.get(record.id).state is JobState.SUCCEEDED


def test_a_service_that_stops_queues_its_restores_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.halt(monkeypatch, "mariadb-backup", "--prepare")
    record, job = desk.service.requests.restore(desk.request())
    with Worker(desk.wiring):
        desk.reach(record.id, "prepared")
    (follower,) = desk.wiring.catalog.jobs.list(previous=job.id)
    row = desk.wiring.catalog.restores.get(record.id)
    assert (follower.state, row.state, row.job_id) == (JobState.QUEUED, JobState.QUEUED, follower.id)
    monkeypatch.setenv("PATH", desk.path)
    with Worker(desk.wiring):
        desk.end(follower.id)
    assert desk.view(record.id).state is JobState.SUCCEEDED


def test_a_plan_that_would_be_another_one_by_now_is_not_started_and_the_new_one_can_be(desk: Desk) -> None:
    requests = desk.service.requests
    old = requests.plan(desk.request())
    newer = desk.house.backup()
    with pytest.raises(PlanChangedError, match="has changed") as refused:
        requests.restore(old.id)
    assert "chain" in refused.value.detail
    assert refused.value.plan.document["backup"] == newer["id"]
    record, _job = requests.restore(refused.value.plan.id)
    assert record.backup_id == newer["id"]
    with pytest.raises(NotFoundError, match="expired"):
        requests.restore("20261121T000000Z-00000000")


def test_tables_go_into_a_running_server_only_when_its_name_was_repeated(desk: Desk) -> None:
    request = RestoreRequest(SERVER, "latest", mode="tables", tables=("shop.customers",), into=SERVER)
    for confirm in (None, "another"):
        with pytest.raises(UnconfirmedError) as refused:
            desk.service.requests.restore(request, confirm)
        assert refused.value.confirm == SERVER
    compare = replace(request, compare=True)
    plan = desk.service.requests.plan(compare)
    assert plan.document["way"] == "physical"
    record, job = desk.service.requests.restore(plan.id)
    with Worker(desk.wiring):
        desk.end(job.id)
    done = desk.view(record.id)
    assert done.state is JobState.SUCCEEDED, done.record.error
    assert {"fetched", "prepared", "loaded"} <= {one.name for one in done.phases if one.state == "done"}
    (table,) = (done.record.request or {})["outcome"]["tables"]
    assert table["difference"]["same"]
    assert "samples" not in table["difference"]  # what stands in rows stays out of the catalog


def test_a_restore_on_the_command_line_is_a_job_too(desk: Desk) -> None:
    outcome = desk.house.restore(desk.place)
    (job,) = desk.wiring.catalog.jobs.list(SERVER, kind=JobKind.RESTORE)
    assert (job.state, job.result) == (JobState.SUCCEEDED, outcome["id"])
    found = desk.view(outcome["id"])
    assert (found.state, found.job) == (JobState.SUCCEEDED, job)
    kept = found.record.request or {}
    assert (kept["request"], kept["outcome"]["id"]) == (job.arguments["request"], outcome["id"])
    assert RestoreRequest.from_json(kept["request"]).datadir == str(desk.place)
    (entry,) = desk.wiring.catalog.audit.list(action="restore-started")
    assert (entry.via, entry.role, entry.subject, entry.server) == ("cli", "admin", job.id, SERVER)


@pytest.mark.parametrize(
    ("state", "reported", "phases", "shown"),
    [
        (JobState.QUEUED, "", (), "waiting waiting waiting skipped waiting waiting"),
        (JobState.RUNNING, "", (), "running waiting waiting skipped waiting waiting"),
        (JobState.RUNNING, "prepare", ("fetched",), "done running waiting skipped waiting waiting"),
        (
            JobState.RUNNING,
            "verify",
            ("fetched", "prepared", "restored", "started"),
            "done done done skipped done running",
        ),
        (JobState.RUNNING, "place", ("fetched", "prepared"), "done done running skipped waiting waiting"),
        (JobState.RUNNING, "start", ("fetched", "prepared", "restored"), "done done done skipped running waiting"),
        (JobState.FAILED, "prepare", ("fetched",), "done failed waiting skipped waiting waiting"),
        (
            JobState.SUCCEEDED,
            "verify",
            ("fetched", "prepared", "restored", "started", "verified"),
            "done done done skipped done done",
        ),
    ],
)
def test_phases_are_told_in_words_that_say_where_it_is(
    state: JobState, reported: str, phases: tuple[str, ...], shown: str
) -> None:
    steps = [
        {"name": name, "seconds": 1.0, "bytes": 1}
        for name in ("fetched", "prepared", "restored", "started", "verified")
    ]
    record = replace(
        samples.restore(),
        state=state,
        job_id="job-1",
        phases=tuple(Phase(name, 1.0, 5) for name in phases),
        request={"request": {"server": SERVER, "target": "latest", "start": True}, "steps": steps},
    )
    started = None if state is JobState.QUEUED else samples.NOON
    job = JobRecord(
        "job-1",
        "restore",
        SERVER,
        state,
        samples.NOON,
        started_at=started,
        progress={"phase": reported} if reported else None,
    )
    document = RestoreView.of(record, job).as_json()
    assert " ".join(one["state"] for one in document["phases"]) == shown
    assert [one["name"] for one in document["phases"]] == [
        "fetched",
        "prepared",
        "restored",
        "rolled_forward",
        "started",
        "verified",
    ]
    assert document["resumable"] == (state is JobState.FAILED)

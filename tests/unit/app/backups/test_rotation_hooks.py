"""Programs around a backup that take a server out of rotation and bring it back, whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.alerts.rules import HOOK
from backupd.app.backups import rotation_hooks as absence
from backupd.app.backups.rotation_hooks import AFTER, AbsenceWatch, away
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import JobRun, Wiring, owner
from backupd.app.service.worker import Worker
from backupd.app.views.listing import Listings
from backupd.catalog.backups import Absence
from backupd.catalog.session import open_catalog
from backupd.model.access import Actor, Role, Via
from backupd.model.errors import CancelledError, ToolError, ToolMissingError
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import new_id
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.service.house import GOLD, Office
from tests.support.stores.gate import Gate, until

ADMIN = Actor("ann", Role.ADMIN, Via.API)
TELLING = """#!/bin/sh
echo "$BACKUPD_MOMENT $BACKUPD_SERVER $BACKUPD_JOB $BACKUPD_KIND ${{BACKUPD_SECRET:-none}} $#" >> {base}/told
"""


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def hooks(base: Path, *, before: str = "", after: str = "", timeout: str = "20s") -> str:
    """A policy with real scripts: each tells its environment, then does what it is given."""
    files = {
        name: script(base / f"{name} it.sh", TELLING.format(base=base) + text)
        for name, text in (("before", before), ("after", after))
    }
    return f'hooks: {{before: "{files["before"]}", after: "{files["after"]}", timeout: {timeout}}}\n'


def told(base: Path) -> list[str]:
    return (base / "told").read_text().splitlines() if (base / "told").exists() else []


class Post:
    """An installation without a database server, one job that runs, and its hooks."""

    def __init__(self, base: Path, wiring: Wiring, job: JobRecord) -> None:
        self.base, self.wiring, self.job = base, wiring, job
        self.run = JobRun(job)

    def rewrite(self, policy: str) -> None:
        self.wiring = Wiring(Office(self.base).write(gold=GOLD + policy), self.wiring.catalog)

    def away(self) -> object:
        return away(self.wiring, self.wiring.settings.server("db1"), self.run)

    def present(self) -> tuple[bool, str]:
        return Listings(self.wiring, ADMIN).server_is_present("db1")

    def kinds(self) -> list[str]:
        return [event.kind for event in reversed(self.wiring.catalog.events.list())]

    def die(self) -> None:
        """The job's process is gone, and that was noticed."""
        self.wiring.catalog.jobs.finish(self.job.id, JobState.ABANDONED, self.wiring.clock(), token=1)


@pytest.fixture
def post(tmp_path: Path) -> Iterator[Post]:
    settings = Office(tmp_path).write(gold=GOLD + hooks(tmp_path))
    with open_catalog(settings.catalog) as catalog:
        wiring = Wiring(settings, catalog)
        now = wiring.clock()
        job = JobRecord(
            id=new_id(now),
            kind=JobKind.FULL,
            server="db1",
            state=JobState.RUNNING,
            queued_at=now,
            started_at=now,
            owner=owner(),
            token=1,
        )
        catalog.jobs.add(job)
        yield Post(tmp_path, wiring, job)


def test_both_programs_are_run_and_in_between_the_server_is_not_in_rotation(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKUPD_SECRET", "sesame")
    assert post.present() == (True, "")
    with away(post.wiring, post.wiring.settings.server("db1"), post.run):
        assert told(post.base) == [f"before db1 {post.job.id} physical-full none 0"]
        present, why = post.present()
        assert not present
        assert post.job.id in why
        AbsenceWatch().look(post.wiring)  # its job runs: nobody else brings it back
    assert told(post.base)[1:] == [f"after db1 {post.job.id} physical-full none 0"]
    assert post.present() == (True, "")
    assert post.kinds() == []


def test_without_hooks_nothing_is_run_and_the_server_stays(post: Post) -> None:
    post.rewrite("")
    with away(post.wiring, post.wiring.settings.server("db1"), post.run):
        assert post.present() == (True, "")


def test_without_programs_load_balancers_are_answered_that_it_is_away_also_after_a_kill(post: Post) -> None:
    post.rewrite("hooks: {}\n")
    with away(post.wiring, post.wiring.settings.server("db1"), post.run):
        assert not post.present()[0]
    assert post.present() == (True, "")
    post.wiring.catalog.absences.begin(Absence("db1", post.job.id, post.wiring.clock(), ""))
    post.die()
    watch = AbsenceWatch()
    watch.look(post.wiring)
    watch.join(240)
    assert post.present() == (True, "")
    assert told(post.base) == []


@pytest.mark.parametrize(("before", "timeout"), [("echo no room >&2; exit 3", "20s"), ("exec sleep 60", "4s")])
def test_without_before_there_is_no_backup_and_after_is_run_nevertheless(post: Post, before: str, timeout: str) -> None:
    post.rewrite(hooks(post.base, before=before, timeout=timeout))
    with (
        pytest.raises(ToolError, match="`before` of db1 failed") as failed,
        away(post.wiring, post.wiring.settings.server("db1"), post.run),
    ):
        pytest.fail("a backup was taken")
    assert ("no room" in failed.value.detail) == ("room" in before)
    assert [line.split()[0] for line in told(post.base)] == ["before", "after"]
    assert post.present() == (True, "")


def test_a_program_that_is_not_there_is_told(post: Post) -> None:
    post.rewrite("hooks: {before: /nowhere/drain}\n")
    with (
        pytest.raises((ToolMissingError, ToolError), match="drain"),
        away(post.wiring, post.wiring.settings.server("db1"), post.run),
    ):
        pytest.fail("a backup was taken")
    assert post.present() == (True, "")


def test_the_server_comes_back_when_the_backup_fails_or_is_cancelled(post: Post) -> None:
    with pytest.raises(ToolError, match="full"), away(post.wiring, post.wiring.settings.server("db1"), post.run):
        raise ToolError("the disk is full")
    with pytest.raises(KeyboardInterrupt), away(post.wiring, post.wiring.settings.server("db1"), post.run):
        raise KeyboardInterrupt
    post.rewrite(hooks(post.base, before="exec sleep 600", timeout="10m"))

    def cancel() -> None:
        until(lambda: len(told(post.base)) == 5)  # the program is at work
        post.run.cancel.set()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    with pytest.raises(CancelledError), away(post.wiring, post.wiring.settings.server("db1"), post.run):
        pytest.fail("a backup was taken")
    canceller.join()
    assert [line.split()[0] for line in told(post.base)] == ["before", "after"] * 3
    assert post.present() == (True, "")


def test_a_server_that_does_not_come_back_is_told_once_and_tried_again_until_it_does(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absence, "FIRST_PAUSE", timedelta(0))
    fails = f"test -e {post.base}/mended || {{ echo the balancer is away >&2; exit 1; }}"
    post.rewrite(hooks(post.base, after=fails))
    with away(post.wiring, post.wiring.settings.server("db1"), post.run):
        pass  # the backup is well, and stays so
    post.wiring.catalog.jobs.finish(post.job.id, JobState.SUCCEEDED, post.wiring.clock(), token=1)
    assert not post.present()[0]
    watch = AbsenceWatch()
    watch._tries["db1", post.job.id] = absence._Try(pause=timedelta(0))
    for _ in range(3):
        watch.look(post.wiring)
        watch.join(240)
    assert len(told(post.base)) == 5
    assert post.kinds() == [HOOK.broken]
    event = post.wiring.catalog.events.last("db1", (HOOK.broken,), AFTER)
    assert event is not None
    assert "the balancer is away" in event.detail
    (post.base / "mended").touch()
    watch.look(post.wiring)
    watch.join(240)
    assert post.present() == (True, "")
    assert post.kinds() == [HOOK.broken, HOOK.mended]


def test_a_server_is_brought_back_though_its_policy_is_gone_and_its_job_forgotten(post: Post) -> None:
    post.wiring.catalog.absences.begin(Absence("db7", "forgotten", post.wiring.clock(), f"{post.base}/after it.sh"))
    watch = AbsenceWatch()
    watch.look(post.wiring)
    watch.join(240)
    assert told(post.base) == ["after db7 forgotten  none 0"]
    assert post.wiring.catalog.absences.all() == ()


def test_pauses_between_tries_grow(post: Post) -> None:
    post.rewrite(hooks(post.base, after="exit 1"))
    post.wiring.catalog.absences.begin(Absence("db1", post.job.id, post.wiring.clock(), f"{post.base}/after it.sh"))
    post.die()
    watch = AbsenceWatch()
    for _ in range(3):
        watch.look(post.wiring)
        watch.join(240)
    assert len(told(post.base)) == 1  # the first pause is not over
    assert watch._tries["db1", post.job.id].pause == 2 * absence.FIRST_PAUSE


def test_kill_9_of_a_real_backup_brings_its_server_back(
    short_tmp: Path, shared_server: PrivateServer, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(short_tmp, shared_server, keys, policy_extra=hooks(short_tmp))
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    gate = Gate(short_tmp / "gate", "mariadb-backup", "--backup", 1_000_000)
    monkeypatch.setenv("PATH", gate.path)
    settings = load_settings(house.config)
    with open_catalog(settings.catalog) as catalog:
        wiring = Wiring(settings, catalog)
        now = wiring.clock()
        job = JobRecord(id=new_id(now), kind=JobKind.FULL, server=SERVER, state=JobState.QUEUED, queued_at=now)
        catalog.jobs.enqueue(job)
        listings, watch = Listings(wiring, ADMIN), AbsenceWatch()
        with Worker(wiring):
            until(gate.waiting)
            assert not listings.server_is_present(SERVER)[0]
            os.kill(int(catalog.jobs.get(job.id).owner.split(" ")[3]), signal.SIGKILL)
            until(lambda: catalog.jobs.get(job.id).state is JobState.ABANDONED)
            assert not listings.server_is_present(SERVER)[0]
            watch.look(wiring)
            until(lambda: listings.server_is_present(SERVER)[0])
        watch.join(240)
    assert told(short_tmp) == [f"{moment} {SERVER} {job.id} physical-full none 0" for moment in ("before", "after")]

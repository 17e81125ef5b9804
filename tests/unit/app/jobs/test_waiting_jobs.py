"""Jobs that wait for others say why."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from backupd.app.context.wiring import Wiring
from backupd.app.jobs.admission import QueueWatch, findings
from backupd.app.retention.holds import findings as held
from backupd.app.views.policies import explain_here
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import HoldKind
from backupd.model.event import Severity
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import new_id
from tests.support.service.house import Clock, Office, at

NOON = at("2026-11-21T12:00Z")


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


@pytest.fixture
def wiring(tmp_path: Path, clock: Clock) -> Iterator[Wiring]:
    settings = Office(tmp_path, servers={"db1": "gold", "db2": "gold", "db3": "gold"}).write()
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog, clock)


def queued(
    wiring: Wiring,
    server: str = "db1",
    kind: JobKind = JobKind.FULL,
    *,
    leg: str = "physical.full",
    not_before: timedelta | None = None,
) -> JobRecord:
    now = wiring.clock()
    job = JobRecord(
        id=new_id(now),
        kind=kind,
        server=server,
        state=JobState.QUEUED,
        queued_at=now,
        leg=leg,
        not_before=now + not_before if not_before is not None else None,
    )
    wiring.catalog.jobs.add(job)
    return job


def running(wiring: Wiring, server: str) -> JobRecord:
    job = queued(wiring, server, JobKind.VERIFY, leg="")
    assert wiring.catalog.jobs.claim("worker", wiring.clock()) is not None
    return job


def test_a_job_that_waits_for_another_says_so_in_its_row_and_after_an_hour_loudly_once(
    wiring: Wiring, clock: Clock
) -> None:
    other, watch = running(wiring, "db1"), QueueWatch()
    job = queued(wiring)
    watch.look(wiring, clock())
    assert wiring.catalog.jobs.get(job.id).message == ""
    clock.sleep(timedelta(minutes=2))
    watch.look(wiring, clock())
    reason = f"waits: of db1 runs already verify {other.id} (concurrency.per_server: 1)"
    assert wiring.catalog.jobs.get(job.id).message == reason
    assert wiring.catalog.events.list() == ()
    assert findings(wiring) == []
    clock.sleep(timedelta(hours=1))
    for _ in range(2):
        watch.look(wiring, clock())
    (said,) = wiring.catalog.events.list(kind="job-waiting")
    assert (said.severity, said.job_id) == (Severity.WARNING, job.id)
    assert said.message == f"physical.full of db1 (job {job.id}) has not started for 1h 2m: {reason}"
    (finding,) = findings(wiring)
    assert finding.message == said.message
    wiring.catalog.jobs.finish(other.id, JobState.SUCCEEDED, clock(), token=1)
    taken = wiring.catalog.jobs.claim("worker", clock())
    assert taken is not None
    assert (taken.id, taken.message) == (job.id, "")


def test_the_reasons_of_a_long_queue_are_written_in_one_transaction(wiring: Wiring, clock: Clock) -> None:
    """They name the jobs that run, so they change all the time; a disk takes a hundred transactions in a second."""
    running(wiring, "db1")
    waiting = [queued(wiring) for _ in range(40)]
    clock.sleep(timedelta(minutes=2))
    written: list[object] = []
    event.listen(wiring.catalog.database.engine, "commit", written.append)
    watch = QueueWatch()
    watch.look(wiring, clock())
    assert len(written) < 10, "those that only read count, too"
    written.clear()
    clock.sleep(timedelta(hours=1))
    watch.look(wiring, clock())
    assert len(written) < 10
    assert len(wiring.catalog.events.list(kind="job-waiting")) == len(waiting)
    assert all(wiring.catalog.jobs.get(job.id).message.startswith("waits: ") for job in waiting)


def test_a_destination_or_a_pause_can_be_the_reason_and_a_repetition_whose_time_has_not_come_waits_for_nothing(
    wiring: Wiring, clock: Clock
) -> None:
    users = [running(wiring, server) for server in ("db1", "db2")]
    crowded, later = queued(wiring, "db3"), queued(wiring, "db3", not_before=timedelta(hours=3))
    clock.sleep(timedelta(hours=2))
    watch = QueueWatch()
    watch.look(wiring, clock())
    said = wiring.catalog.jobs.get(crowded.id).message
    assert said.startswith("waits: destination local is used by verify ")
    assert all(user.id in said for user in users)
    assert wiring.catalog.jobs.get(later.id).message == ""
    wiring.catalog.holds.set("*", HoldKind.PAUSE, "moving", "anna", clock())
    watch.look(wiring, clock())
    assert wiring.catalog.jobs.get(crowded.id).message == "waits: a pause (`backupd hold` lists it)"


def test_a_pause_is_told_by_the_check_and_beside_every_outlook(wiring: Wiring, clock: Clock, tmp_path: Path) -> None:
    wiring.catalog.holds.set("db1", HoldKind.PAUSE, "moving", "anna", clock())
    clock.sleep(timedelta(days=9))
    (finding,) = held(wiring, ["db1"])
    assert (finding.subject, finding.hint) == ("pause", "backupd resume db1")
    assert finding.message.startswith(
        "server db1 has been paused for 9d, scheduled jobs are suspended: moving (paused by"
    )
    assert held(wiring, ["db2"]) == []
    policy = tmp_path / "policies" / "gold.yaml"
    assert f"pause: {finding.message}" in explain_here(wiring, policy, "db1").warnings
    assert not any("paused" in text for text in explain_here(wiring, policy, "db2").warnings)

"""Sweeps are jobs of their own: what queues one, that one waits at a time, and who does it where no service runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.alerting.notifier import why_unwatched
from backupd.app.context.wiring import JobRun, Wiring, owner
from backupd.app.jobs.admission import Admission, obstacle
from backupd.app.jobs.jobs import DAEMON_STOP, abandon_dead, close, queued, sweep_leg, sweep_of
from backupd.app.retention import deletion
from backupd.app.service.dispatch import perform
from backupd.app.service.facade import Service
from backupd.catalog.database import WANTED
from backupd.catalog.session import open_catalog
from backupd.catalog.tables.jobs import jobs
from backupd.model.backup_record import Copy, HoldKind
from backupd.model.errors import BusyError, DestinationError
from backupd.model.event import Event, Incident, Severity
from backupd.model.job import HOST, JobKind, JobRecord, JobState, Progress
from backupd.model.text import new_id
from backupd.transfer.collection import Collected
from storage.destination import Destination
from tests.support.catalog import samples
from tests.support.service.house import GOLD, Clock, Office, at
from tests.support.stores.stock import Stock

NOON = at("2026-11-21T12:00Z")
RULES = "retention: {local: {keep_fulls: 2}}\n"


@pytest.fixture
def wiring(tmp_path: Path) -> Iterator[Wiring]:
    settings = Office(tmp_path).write(gold=GOLD + RULES)
    with open_catalog(settings.catalog) as catalog:
        found = Wiring(settings, catalog, Clock(NOON))
        found.destination("local").initialise(NOON)
        yield found


def without_rules(wiring: Wiring) -> Wiring:
    return replace(wiring, settings=Office(wiring.settings.file.parent).write(gold=GOLD))


def ended(wiring: Wiring, kind: JobKind, state: JobState, **changes: object) -> JobRecord:
    job = JobRecord(new_id(wiring.clock()), kind, "db1", JobState.RUNNING, wiring.clock(), owner=owner())
    job = replace(job, **changes)  # type: ignore[arg-type]  # of any field
    wiring.catalog.jobs.add(job)
    return close(wiring, job, state)


def waiting(wiring: Wiring) -> list[str]:
    return sorted(job.leg for job in wiring.catalog.jobs.list(state=JobState.QUEUED))


def follow_up(wiring: Wiring, *servers: str) -> list[tuple[str, str]]:
    """What went wrong: the leg of each job, and why."""
    return [(job.leg, error.message) for job, error in Service(wiring, WANTED).follow_ups.run(servers)]


AT = {"destination": "local"}
GOOD, BAD = JobState.SUCCEEDED, JobState.FAILED


@pytest.mark.parametrize(
    ("kind", "state", "rules", "follows"),
    [
        (JobKind.FULL, GOOD, True, ["retention"]),
        (JobKind.FULL, GOOD, False, ["sweep/local"]),
        (JobKind.LOGICAL, JobState.PARTIAL, False, ["sweep/local"]),
        (JobKind.FULL, BAD, True, ["sweep/local"]),
        (JobKind.INCREMENTAL, JobState.ABANDONED, True, ["sweep/local"]),
        (JobKind.FULL, JobState.CANCELLED, True, ["sweep/local"]),
        (JobKind.RETENTION, GOOD, True, ["sweep/local"]),
        (JobKind.RETENTION, BAD, True, ["sweep/local"]),
        (JobKind.REPLICATE, GOOD, True, ["sweep/local"]),
        (JobKind.REPLICATE, BAD, True, []),
        (JobKind.VERIFY, GOOD, True, []),
        (JobKind.SWEEP, GOOD, True, []),
        (JobKind.SWEEP, BAD, True, []),
        (JobKind.SWEEP, JobState.ABANDONED, True, ["sweep/local"]),
    ],
)
def test_what_a_sweep_follows(wiring: Wiring, kind: JobKind, state: JobState, rules: bool, follows: list[str]) -> None:
    wiring = wiring if rules else without_rules(wiring)
    arguments = AT if kind in (JobKind.REPLICATE, JobKind.SWEEP) else {}
    whose = {"server": "", "leg": "sweep/local"} if kind is JobKind.SWEEP else {}
    ended(wiring, kind, state, arguments=arguments, **whose)
    assert waiting(wiring) == follows


def test_sweeps_take_a_tenth_of_the_time_where_a_service_runs(wiring: Wiring) -> None:
    minute = timedelta(minutes=1)
    leg = sweep_of(wiring, "local").leg

    def sweep(began: timedelta, lasted: timedelta | None, number: int) -> None:
        job = replace(sweep_of(wiring, "local"), id=f"s{number}", queued_at=NOON + began, not_before=None)
        end = NOON + began + lasted if lasted is not None else None
        state = JobState.RUNNING if lasted is None else GOOD
        wiring.catalog.jobs.add(replace(job, state=JobState.RUNNING, started_at=NOON + began, token=1))
        if end is not None:
            wiring.catalog.jobs.finish(job.id, state, end, token=1)

    assert leg == "sweep/local"
    sweep(-30 * minute, 2 * minute, 1)
    assert sweep_of(wiring, "local").not_before is None, "a command does it at its end"
    wiring.catalog.hosts.serves(wiring.here.removeprefix(HOST), NOON)
    assert sweep_of(wiring, "local").not_before == NOON - 10 * minute, "which is over"
    sweep(-2 * minute, None, 2)
    assert sweep_of(wiring, "local").not_before == NOON + 18 * minute, "from when the one that runs has begun"
    sweep(-minute, 60 * minute, 3)
    assert sweep_of(wiring, "local").not_before == NOON + 59 * minute, "an hour at most"
    sweep(timedelta(0), timedelta(seconds=4), 4)
    assert sweep_of(wiring, "local").not_before is None, "a short one takes nothing away"


def test_a_sweep_that_is_killed_each_time_is_not_begun_for_ever(wiring: Wiring) -> None:
    wiring.catalog.jobs.enqueue(sweep_of(wiring, "local"))
    attempts = []
    while (job := wiring.catalog.jobs.claim("somebody", wiring.clock(), runs_on=wiring.here)) is not None:
        attempts.append(job.attempt)
        close(wiring, job, JobState.ABANDONED)
    assert attempts == [1, 2, 3]


def test_a_sweep_reports_what_it_has_read_and_removed(wiring: Wiring) -> None:
    seen: list[Progress] = []
    destination = wiring.destination("local")
    for number in (1, 2):
        Stock(destination, "db1").add(number, {"t": str(number).encode()})
    run = replace(JobRun(sweep_of(wiring, "local")), report=seen.append)
    assert perform(wiring, run).problem is None
    assert {one.phase for one in seen} == {"sweep"}
    assert [one.files_done for one in seen] == [1, 2]


def test_a_destination_that_is_not_configured_any_more_is_not_swept(wiring: Wiring) -> None:
    ended(wiring, JobKind.REPLICATE, GOOD, arguments={"destination": "gone"})
    assert waiting(wiring) == []
    assert perform(wiring, JobRun(sweep_of(wiring, "gone"))).problem is None


def test_a_sweep_of_a_destination_with_a_long_name_fits_into_the_catalog(wiring: Wiring) -> None:
    """PostgreSQL refuses what is too long, with the end of the job that the sweep follows."""
    names = ["d" * 57, *("d" * 62 + last for last in "de")]
    legs = [sweep_of(wiring, name).leg for name in names]
    assert max(map(len, legs)) <= vars(jobs.c.leg.type)["length"]
    assert len(set(legs)) == 3
    assert legs[0] == f"sweep/{names[0]}"


def test_nobody_looks_after_a_failed_sweep_of_a_destination_that_is_not_configured_any_more(wiring: Wiring) -> None:
    def failed(destination: str) -> Incident:
        return Incident(
            "i1", "job-failed", "", sweep_leg(destination), Severity.ERROR, "no", "", "", NOON, NOON, job_id="j1"
        )

    assert why_unwatched(wiring, failed("local")) == ""
    assert why_unwatched(wiring, failed("gone")) == "the destination of sweep/gone is no longer configured"


def test_one_sweep_waits_for_each_destination_and_host_and_one_beside_one_that_runs(wiring: Wiring) -> None:
    for _ in range(3):
        ended(wiring, JobKind.RETENTION, GOOD)
    (first,) = wiring.catalog.jobs.list(kind=JobKind.SWEEP)
    taken = wiring.catalog.jobs.claim("somebody", wiring.clock(), runs_on=wiring.here)
    assert taken is not None
    assert taken.id == first.id
    for _ in range(2):
        ended(wiring, JobKind.RETENTION, GOOD)  # what it marked the running one may not have seen
    assert waiting(wiring) == ["sweep/local"]
    wiring.catalog.jobs.add(replace(sweep_of(wiring, "local"), runs_on=f"{HOST}other"))
    wiring.catalog.jobs.add(replace(sweep_of(wiring, "local"), runs_on=f"{HOST}other"))
    assert waiting(wiring) == ["sweep/local", "sweep/local"]
    stopped = close(wiring, replace(taken, cancel_by=DAEMON_STOP), JobState.CANCELLED)
    assert stopped.state is JobState.CANCELLED
    assert waiting(wiring) == ["sweep/local", "sweep/local"], "its repetition is the one that waits"


def test_a_command_does_what_follows_where_no_service_runs(wiring: Wiring) -> None:
    ended(wiring, JobKind.FULL, GOOD)
    assert follow_up(wiring, "db2") == []
    assert waiting(wiring) == ["retention"], "that is another server's"
    assert follow_up(wiring, "db1") == []
    assert waiting(wiring) == []
    done = {job.kind: job.state for job in wiring.catalog.jobs.list()}
    assert done == dict.fromkeys((JobKind.FULL, JobKind.RETENTION, JobKind.SWEEP), GOOD)


def test_the_rules_that_wait_for_a_host_that_nobody_serves_keep_no_others_from_being_applied(wiring: Wiring) -> None:
    """Of a machine that is no more, or of the one whose catalog was restored here."""
    gone = queued(wiring, JobKind.RETENTION, "db1", runs_on=f"{HOST}gone")
    wiring.catalog.jobs.add(replace(gone, leg="retention"))
    for _ in range(2):
        ended(wiring, JobKind.FULL, GOOD)
    assert waiting(wiring) == ["retention", "retention"], "one for each host"
    assert follow_up(wiring, "db1") == []
    assert [(job.leg, job.runs_on) for job in wiring.catalog.jobs.list(state=JobState.QUEUED)] == [
        ("retention", f"{HOST}gone")
    ]
    assert [job.state for job in wiring.catalog.jobs.list(kind=JobKind.RETENTION, state=GOOD)] == [GOOD]


def test_backups_of_other_servers_by_other_commands_keep_no_rules_waiting(wiring: Wiring) -> None:
    """Each night the commands of cron begin together, and the quickest ends while all others run."""
    servers = ("db1", "db2", "db3", "db4", "db5")
    office = Office(wiring.settings.file.parent, servers=dict.fromkeys(servers, "gold"))
    wiring = replace(wiring, settings=office.write(gold=GOLD + RULES))
    for name in servers[1:]:
        job = JobRecord(new_id(NOON), JobKind.FULL, name, JobState.RUNNING, NOON, heartbeat_at=NOON, owner=owner())
        wiring.catalog.jobs.add(job)
    ended(wiring, JobKind.FULL, GOOD)
    assert follow_up(wiring, "db1") == []
    assert waiting(wiring) == []
    assert [job.state for job in wiring.catalog.jobs.list("db1", kind=JobKind.RETENTION)] == [GOOD]


def test_a_service_of_this_host_does_it(wiring: Wiring) -> None:
    ended(wiring, JobKind.FULL, GOOD)
    wiring.catalog.hosts.serves(wiring.here.removeprefix(HOST), wiring.clock())
    assert follow_up(wiring, "db1") == []
    assert waiting(wiring) == ["retention"]


def test_a_pause_holds_the_rules_back_and_not_the_removal_of_what_is_due(wiring: Wiring) -> None:
    ended(wiring, JobKind.FULL, GOOD)
    ended(wiring, JobKind.FULL, BAD)
    wiring.catalog.holds.set("*", HoldKind.PAUSE, "storage move", "anna", NOON)
    assert waiting(wiring) == ["retention", "sweep/local"]
    assert follow_up(wiring, "db1") == []
    assert waiting(wiring) == ["retention"]


def test_what_goes_wrong_is_given_and_the_rest_is_done(wiring: Wiring, monkeypatch: pytest.MonkeyPatch) -> None:
    ended(wiring, JobKind.FULL, GOOD)

    def busy(*_arguments: object, **_more: object) -> Collected:
        raise BusyError("somebody has held the removal lock for an hour")

    monkeypatch.setattr(deletion, "sweep_locked", busy)
    assert follow_up(wiring, "db1") == [("sweep/local", "somebody has held the removal lock for an hour")]
    assert waiting(wiring) == []
    monkeypatch.undo()
    (event,) = wiring.catalog.events.list()
    assert (event.kind, event.server, event.subject) == ("job-failed", "", "sweep/local")
    ended(wiring, JobKind.FULL, BAD)
    assert follow_up(wiring) == []
    assert [event.kind for event in wiring.catalog.events.list(limit=1)] == ["job-recovered"]


def test_a_sweep_of_another_host_keeps_none_of_this_one_waiting(wiring: Wiring) -> None:
    """No lock is shared; nobody else would do this one where no service runs."""
    theirs = sweep_of(wiring, "local", f"{HOST}other")
    wiring.catalog.jobs.add(replace(theirs, state=JobState.RUNNING, heartbeat_at=NOON, owner=owner()))
    ended(wiring, JobKind.FULL, BAD)
    assert follow_up(wiring) == []
    assert waiting(wiring) == []


def test_rules_take_no_place_of_a_backup_while_a_sweep_holds_the_lock(wiring: Wiring) -> None:
    """Both wait for the same lock, and four that waited there would let no backup start."""
    rules = replace(queued(wiring, JobKind.RETENTION, "db1"), leg="retention")
    sweep = replace(sweep_of(wiring, "local"), state=JobState.RUNNING)
    admission = Admission(wiring.settings, ())
    assert obstacle(wiring.settings, (), rules, [sweep]) == f"sweep {sweep.id} holds the lock of removals"
    assert not admission.allows(rules, [sweep])
    assert admission.allows(rules, [replace(sweep, runs_on=f"{HOST}other")]), "that is another lock"
    assert admission.allows(queued(wiring, JobKind.FULL, "db1"), [sweep])
    assert admission.allows(rules, [])


def test_a_sweep_that_was_killed_keeps_no_other_one_waiting(wiring: Wiring) -> None:
    wiring.catalog.jobs.enqueue(sweep_of(wiring, "local"))
    assert wiring.catalog.jobs.claim("localhost boot ns 4194305 1", wiring.clock(), runs_on=wiring.here) is not None
    wiring.catalog.jobs.enqueue(sweep_of(wiring, "local"))
    assert follow_up(wiring) == []
    assert waiting(wiring) == ["sweep/local"], "the dead one still counts as one that runs"
    wiring = replace(wiring, clock=Clock(NOON + timedelta(minutes=6)))
    assert [job.state for job in abandon_dead(wiring)] == [JobState.ABANDONED]
    assert follow_up(wiring) == []
    assert waiting(wiring) == []


def test_a_destination_out_of_sight_is_left_alone(wiring: Wiring, tmp_path: Path) -> None:
    root = next(tmp_path.rglob("repository.json")).parent
    root.rename(tmp_path / "away")
    root.mkdir()
    assert perform(wiring, JobRun(sweep_of(wiring, "local"))).problem is None
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("emptied", [False, True])
def test_a_sweep_that_saw_nothing_succeeds_in_nothing(
    wiring: Wiring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emptied: bool
) -> None:
    """An incident tells of the destination, so no event does; nor is what went wrong before well again."""

    def unreachable(_destination: Destination) -> bool:
        raise DestinationError("destination local cannot be reached")

    before = ended(wiring, JobKind.SWEEP, BAD, server="", leg="sweep/local")
    wiring.catalog.events.add(Event(NOON, "job-failed", Severity.ERROR, "no", subject="sweep/local"))
    wiring.catalog.backups.add(samples.backup(1, server="db1", copies=(Copy("local", "complete", NOON),)))
    if emptied:
        root = next(tmp_path.rglob("repository.json")).parent
        root.rename(tmp_path / "away")
        root.mkdir()
    else:
        monkeypatch.setattr(type(wiring.destination("local")), "is_initialised", unreachable)
    ended(wiring, JobKind.FULL, BAD)
    assert follow_up(wiring) == []
    (sweep,) = (job for job in wiring.catalog.jobs.list(kind=JobKind.SWEEP) if job.id != before.id)
    assert sweep.state is BAD
    assert "destination local" in sweep.message
    assert [event.kind for event in wiring.catalog.events.list()] == ["job-failed"]

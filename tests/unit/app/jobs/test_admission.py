"""Which jobs may start: what keeps most of a long queue from being read says the same as asking about each job; and
hosts, on which jobs run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.context.settings import Settings, load_settings
from backupd.app.context.wiring import Wiring, host_identity
from backupd.app.jobs.admission import Admission
from backupd.app.jobs.jobs import abandon_dead, queued
from backupd.catalog.hosts import SERVED
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.errors import ConfigurationError, RefusedError
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.catalog.samples import NOON
from tests.support.dice import rounds, thrown
from tests.support.service.house import GOLD, Clock, Office

LATER = NOON + timedelta(hours=1)
KINDS = (
    JobKind.FULL,
    JobKind.LOGICAL,
    JobKind.VERIFY,
    JobKind.REPLICATE,
    JobKind.RESTORE,
    JobKind.REMOVAL,
    JobKind.SWEEP,
)
PLACED = (JobKind.REPLICATE, JobKind.SWEEP)


def settings_of(folder: Path, limits: str) -> Settings:
    office = Office(folder, {"a1": "gold", "a2": "gold", "b1": "second", "c1": "both", "d1": "gold", "x1": "bad"})
    office.policies |= {
        "second": GOLD.replace("[local]", "[second]"),
        "both": GOLD.replace("[local]", "[local, second]"),
    }
    office.policies["bad"] = GOLD
    try:
        office.write()
    except ConfigurationError:  # the other destination follows
        text = office.file.read_text().replace(
            "destinations:\n", f"destinations:\n  second: {{type: filesystem, path: {folder}/second}}\n"
        )
        office.file.write_text(f"{text}concurrency: {limits}\n")
    (folder / "policies/bad.yaml").write_text("physical: 7\n")
    return load_settings(office.file, strict=False)


class Asked(Admission):
    """Counts the jobs that it was asked about."""

    count = 0

    def allows(self, job: JobRecord, running: Sequence[JobRecord]) -> bool:
        self.count += 1
        return super().allows(job, running)


def test_what_is_barred_would_not_have_been_allowed(tmp_path: Path) -> None:
    """The same jobs are claimed, in the same order, whether the queue is narrowed first or each job is asked about."""
    random = thrown("admission")
    barred = 0
    for number in range(rounds(3)):
        limits = ", ".join(
            f"{name}: {random.randint(1, 3)}"
            for name in ("jobs", "per_server", "per_destination")
            if random.random() < 0.8
        )
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = settings_of(folder, f"{{{limits or 'jobs: 2'}}}")
        paused = random.choice([set(), {"a1"}, {"*"}, {"b1", "c1"}])
        claimed = []
        jobs = [
            JobRecord(
                f"j{one:03}",
                (kind := random.choice(KINDS)),
                random.choice([*settings.servers, ""]) if kind not in PLACED else "" if kind is JobKind.SWEEP else "a1",
                JobState.QUEUED,
                NOON + timedelta(seconds=random.randint(0, 60)),
                leg=random.choice(["", "full"]),
                arguments={"destination": random.choice(["local", "second"])} if kind in PLACED else {},
            )
            for one in range(70)
        ]
        for narrowed in (False, True):
            with open_catalog(f"sqlite:///{folder}/{narrowed}.db") as catalog:
                for job in jobs:
                    catalog.jobs.enqueue(job)
                admission, order = Asked(settings, paused), []
                bars = admission.bars if narrowed else lambda _running: ()
                while found := catalog.jobs.claim("me", LATER, allowed=admission.allows, bars=bars):
                    order.append(found.id)
                claimed.append(order)
                barred += admission.count * (-1 if narrowed else 1)
        assert claimed[0] == claimed[1]
    assert barred > 0  # it asked about fewer


def test_a_queue_for_a_full_destination_keeps_one_slot_at_another_and_its_first_job_starts_next(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "{jobs: 9, per_destination: 2}")
    admission = Admission(settings, set())

    def job(number: int, server: str, kind: JobKind = JobKind.FULL, destination: str = "") -> JobRecord:
        arguments = {"destination": destination} if destination else {}
        moment = NOON + timedelta(seconds=number)
        return JobRecord(f"j{number}", kind, server, JobState.QUEUED, moment, arguments=arguments)

    running = [job(1, "a1"), job(2, "a2")]  # both at local
    queue = [job(number, "c1") for number in range(3, 9)]  # at local and second
    first, second = (job(number, "a1", JobKind.REPLICATE, "second") for number in (10, 11))
    assert [admission.allows(one, running) for one in queue] == [False] * 6
    assert admission.allows(first, running), "the others of the queue cannot start before its first one"
    assert not admission.allows(second, [*running, first]), "the first one's slot"
    assert not admission.allows(job(12, "d1"), running[:1]), "nor does a younger one take what it waits for"
    assert any("c1" in (bar.servers or ()) for bar in admission.bars([*running, first])), "the queue is not read"
    assert admission.allows(queue[0], [running[0], first])


# -- hosts


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


def host(catalog: Catalog, clock: Clock, folder: Path, name: str) -> Wiring:
    """One more machine with this catalog: a spool, and so an identity, of its own."""
    folder.mkdir(exist_ok=True)
    office = Office(folder, {"db1": "gold"}, catalog=f"sqlite:///{folder.parent}/catalog.db")
    return Wiring(office.write(extra=f"host: {name}\n" if name else "", gold=GOLD), catalog, clock)


def serve(one: Wiring) -> None:
    """What its service does when it begins, and each time it looks around."""
    name = one.join(leads=True)
    one.catalog.hosts.serves(name, one.clock())
    one.catalog.hosts.take_over(name, one.clock())


def test_a_container_keeps_its_name_and_a_machine_called_like_another_gets_one_of_its_own(
    catalog: Catalog, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "4f2a.example.com")
    first = host(catalog, clock, tmp_path / "a", "")
    assert first.here == "host:4f2a"
    serve(first)
    twin = host(catalog, clock, tmp_path / "b", "")
    assert twin.here.startswith("host:4f2a-")
    monkeypatch.setattr("socket.gethostname", lambda: "9c01")
    assert replace(first).here == "host:4f2a"  # the same spool, in the next container
    assert replace(twin).here == twin.here


def test_the_second_of_a_pair_takes_the_name_and_the_jobs_at_once(
    catalog: Catalog, clock: Clock, tmp_path: Path
) -> None:
    first, second = (host(catalog, clock, tmp_path / name, "backup1") for name in "ab")
    serve(first)
    catalog.jobs.enqueue(queued(first, JobKind.FULL, "db1"))
    # By hand on the host that stands by, a restore say: it neither takes the name nor is it refused.
    assert second.here == "host:backup1"
    assert [one.identity for one in catalog.hosts.all(clock())] == [host_identity(first.settings.spool)]
    serve(second)  # the first one was killed, and has reported a moment ago
    assert [one.identity for one in catalog.hosts.all(clock())] == [host_identity(second.settings.spool)]
    claimed = catalog.jobs.claim("me", clock(), runs_on=second.here)
    assert claimed is not None


def test_jobs_of_a_host_that_no_service_serves_any_more_go_to_the_one_that_acts(
    catalog: Catalog, clock: Clock, tmp_path: Path
) -> None:
    gone, here = host(catalog, clock, tmp_path / "a", "old"), host(catalog, clock, tmp_path / "b", "new")
    serve(gone)
    catalog.jobs.enqueue(queued(gone, JobKind.FULL, "db1"))
    serve(here)
    assert [job.runs_on for job in catalog.jobs.list()] == ["host:old"]  # its service reported a moment ago
    clock.sleep(SERVED)
    serve(here)
    assert [job.runs_on for job in catalog.jobs.list()] == ["host:new"]
    clock.sleep(-SERVED * 9)  # by a clock that was ahead
    assert catalog.hosts.served(clock()) == frozenset()


def test_a_job_that_is_repeated_waits_for_the_host_of_the_job_before(
    catalog: Catalog, clock: Clock, tmp_path: Path
) -> None:
    gone, here = host(catalog, clock, tmp_path / "a", "shop1"), host(catalog, clock, tmp_path / "b", "backup1")
    serve(gone)
    elsewhere = "shop1 b00t 1 77 1"
    catalog.jobs.enqueue(replace(queued(gone, JobKind.FULL, "db1"), leg="physical.full"))
    died = catalog.jobs.claim(elsewhere, clock(), runs_on=gone.here)
    assert died is not None
    clock.sleep(SERVED)
    serve(gone)  # by another process: the one that ran the job is gone
    assert here.here == "host:backup1"  # a command there, which looks after dead jobs as every command does
    assert [job.id for job in abandon_dead(here)] == [died.id]
    again, sweep = sorted(catalog.jobs.list(state=JobState.QUEUED), key=lambda job: job.kind)
    assert (again.previous, again.runs_on) == (died.id, "host:shop1")
    assert (sweep.kind, sweep.runs_on) == (JobKind.SWEEP, "host:shop1"), "what it left is there"


def test_a_command_renames_no_host_under_its_service(catalog: Catalog, clock: Clock, tmp_path: Path) -> None:
    service = host(catalog, clock, tmp_path / "a", "old")
    serve(service)
    catalog.jobs.enqueue(queued(service, JobKind.FULL, "db1"))
    edited = host(catalog, clock, tmp_path / "a", "main")
    assert edited.here == "host:old"
    serve(edited)  # the service has read its configuration again
    assert edited.here == "host:main"
    assert edited.join(leads=False) == "main"
    assert [job.runs_on for job in catalog.jobs.list()] == ["host:main"]
    assert [one.name for one in catalog.hosts.all(clock())] == ["main"]


def test_an_identity_that_is_damaged_or_cannot_be_written_is_said(tmp_path: Path) -> None:
    assert host_identity(tmp_path / "spool") == host_identity(tmp_path / "spool")
    (tmp_path / "spool/host.id").write_text("x")
    with pytest.raises(RefusedError, match="1 characters where 32 were expected"):
        host_identity(tmp_path / "spool")
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="cannot be read or made"):
        host_identity(tmp_path / "file")

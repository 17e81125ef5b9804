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
from backupd.app.jobs.admission import LONG, Admission, waiting
from backupd.app.jobs.jobs import queued, require_served
from backupd.app.service.dispatch import run_here
from backupd.catalog.hosts import SERVED
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.errors import ConfigurationError, RefusedError
from backupd.model.job import JobKind, JobRecord, JobState, silent
from tests.support.catalog.samples import NOON
from tests.support.dice import rounds, thrown
from tests.support.service.house import GOLD, Clock, Office

LATER = NOON + timedelta(hours=1)
KINDS = (JobKind.FULL, JobKind.LOGICAL, JobKind.VERIFY, JobKind.REPLICATE, JobKind.RESTORE, JobKind.REMOVAL)


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
                random.choice([*settings.servers, ""]) if kind is not JobKind.REPLICATE else "a1",
                JobState.QUEUED,
                NOON + timedelta(seconds=random.randint(0, 60)),
                leg=random.choice(["", "full"]),
                arguments={"destination": random.choice(["local", "second"])} if kind is JobKind.REPLICATE else {},
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


# -- hosts


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


def host(catalog: Catalog, clock: Clock, folder: Path, name: str, more: str = "") -> Wiring:
    """One more machine with this catalog: a spool, and so an identity, of its own."""
    folder.mkdir()
    office = Office(folder, {"db1": "gold", "db2": "gold"}, catalog=f"sqlite:///{folder.parent}/catalog.db")
    office.write(extra=f"host: {name}\n" if name else "", gold=GOLD)
    office.file.write_text(office.file.read_text().replace("  db2: {", f"  db2: {{{more}"))
    return Wiring(load_settings(office.file), catalog, clock)


def test_jobs_are_addressed_to_the_host_that_the_configuration_names(
    catalog: Catalog, clock: Clock, tmp_path: Path
) -> None:
    here = host(catalog, clock, tmp_path / "a", "shop1", "runs_on: shop2, ")
    there = host(catalog, clock, tmp_path / "b", "shop2")
    assert (here.here, here.runs_on("db1"), here.runs_on("db2")) == ("host:shop1", "host:shop1", "host:shop2")
    catalog.jobs.enqueue(queued(here, JobKind.FULL, "db2"))
    assert catalog.jobs.claim("me", clock(), runs_on=here.here) is None
    claimed = catalog.jobs.claim("me", clock(), runs_on=there.here)
    assert claimed is not None
    assert claimed.server == "db2"


def test_a_command_that_would_wait_for_a_host_without_a_service_is_refused(
    catalog: Catalog, clock: Clock, tmp_path: Path
) -> None:
    here = host(catalog, clock, tmp_path / "a", "shop1", "runs_on: shop2, ")
    job = queued(here, JobKind.FULL, "db2")
    with pytest.raises(RefusedError, match="run on host shop2, and no backupd service runs there") as refused:
        require_served(here, job)
    assert "start the service on shop2" in refused.value.hint
    with pytest.raises(RefusedError, match="run on another host: host:shop2, and this is host:shop1"):
        run_here(here, JobKind.FULL, "db2", lambda _run: pytest.fail("it ran here"), report=silent)
    there = host(catalog, clock, tmp_path / "b", "shop2")
    catalog.hosts.serves(there.here.removeprefix("host:"), clock())
    require_served(here, job)
    clock.sleep(SERVED)
    with pytest.raises(RefusedError):
        require_served(here, job)
    # What waits there all the same is told with the reason.
    catalog.jobs.enqueue(job)
    clock.sleep(LONG)
    assert [why for _job, why in waiting(here, clock(), LONG)] == [
        "waits: it runs on host:shop2, where no backupd service runs"
    ]


def test_a_container_keeps_its_name_and_a_lost_machine_gives_it_to_its_successor(
    catalog: Catalog, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "4f2a.example.com")
    first = host(catalog, clock, tmp_path / "a", "")
    assert first.here == "host:4f2a"
    catalog.jobs.enqueue(queued(first, JobKind.FULL, "db1"))
    monkeypatch.setattr("socket.gethostname", lambda: "9c01")
    assert replace(first).here == "host:4f2a"  # the same spool, in the next container
    named = host(catalog, clock, tmp_path / "b", "backup1")
    catalog.jobs.enqueue(queued(named, JobKind.LOGICAL, "db1"))
    catalog.hosts.serves("backup1", clock())
    with pytest.raises(RefusedError, match="another host is called backup1") as refused:
        _ = host(catalog, clock, tmp_path / "c", "backup1").here
    assert "`host: NAME`" in refused.value.hint
    clock.sleep(SERVED)
    successor = host(catalog, clock, tmp_path / "d", "backup1")
    claimed = catalog.jobs.claim("me", clock(), runs_on=successor.here)
    assert claimed is not None
    assert claimed.kind == JobKind.LOGICAL
    renamed = Wiring(load_settings(tmp_path / "a/backupd.yaml"), catalog, clock)
    file = renamed.settings.file
    file.write_text(f"{file.read_text()}host: main\n")
    renamed = Wiring(load_settings(file), catalog, clock)
    assert renamed.here == "host:main"
    assert [job.runs_on for job in catalog.jobs.list(state=JobState.QUEUED)] == ["host:main"]
    assert [one.name for one in catalog.hosts.all()] == ["backup1", "main"]


def test_an_identity_that_is_damaged_or_cannot_be_written_is_said(tmp_path: Path) -> None:
    assert host_identity(tmp_path / "spool") == host_identity(tmp_path / "spool")
    (tmp_path / "spool/host.id").write_text("x")
    with pytest.raises(RefusedError, match="1 characters where 32 were expected"):
        host_identity(tmp_path / "spool")
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="cannot be read or made"):
        host_identity(tmp_path / "file")

"""The service on a real server: what the policy says happens without a hand."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.catalog.session import Catalog
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR, alive, catalog_of, descendants, enqueue, make_due, serving, until

OVER = (JobState.SUCCEEDED, JobState.FAILED, JobState.ABANDONED, JobState.CANCELLED)


@pytest.fixture
def quiet(house: House) -> House:
    """A house whose policy asks for everything once a year."""
    (house.base / "policies" / "gold.yaml").write_text(ONCE_A_YEAR)
    return house


@pytest.fixture
def gate(quiet: House) -> Path:
    """As long as this file is there, a backup waits at its beginning."""
    gate, stand = quiet.base / "gate", quiet.base / "mariadb-backup"
    stand.write_text(
        f'#!/bin/sh\ncase "$*" in *--backup*) while [ -e {gate} ]; do sleep 0.1; done;; esac\n'
        f'exec {shutil.which("mariadb-backup")} "$@"\n'
    )
    stand.chmod(0o755)
    gate.touch()
    quiet.programs = {"mariadb-backup": str(stand)}
    quiet.write()
    (quiet.base / "policies" / "gold.yaml").write_text(ONCE_A_YEAR)
    return gate


@pytest.fixture
def catalog(quiet: House) -> Iterator[Catalog]:
    with catalog_of(quiet) as opened:
        yield opened


def ended(catalog: Catalog, kind: JobKind) -> JobRecord:
    """The first job of ``kind`` that ended, which must have gone well."""
    until(lambda: bool(catalog.jobs.list(kind=kind, state=OVER)), lambda: f"the end of {kind}")
    job = catalog.jobs.list(kind=kind, state=OVER)[-1]
    assert job.state is JobState.SUCCEEDED, f"{job.message}\n{job.detail}\n{job.hint}"
    return job


def test_full_retention_increment_and_test_restore_happen_by_themselves(quiet: House, catalog: Catalog) -> None:
    with serving(quiet) as service:
        until(lambda: len(catalog.schedules.all()) == 6, lambda: "the schedules' rows")
        make_due(catalog, "physical.full")
        service.reload()
        full = ended(catalog, JobKind.FULL)
        assert (full.leg, full.due_at is not None, full.requested_by) == ("physical.full", True, "schedule")
        assert catalog.jobs.get(full.previous).state is JobState.MISSED
        assert ended(catalog, JobKind.RETENTION).server == SERVER
        for leg, kind in (
            ("physical.incremental", JobKind.INCREMENTAL),
            ("test_restore", JobKind.TEST_RESTORE),
            ("verify", JobKind.VERIFY),
        ):
            make_due(catalog, leg)
            service.reload()
            assert ended(catalog, kind).leg == leg
        assert service.stop() == 0
    first, second = reversed(quiet.backups())
    assert (first["id"], first["kind"], second["kind"], second["parent"]) == (
        full.result,
        "physical-full",
        "physical-incremental",
        first["id"],
    )
    (proof,) = catalog.proofs.list()
    assert (proof.backup_id, proof.outcome) == (second["id"], "proved")
    assert quiet.fsck() == []
    assert [event.kind for event in catalog.events.list() if event.severity == "error"] == []


def test_a_stop_lets_a_running_backup_end(quiet: House, catalog: Catalog, gate: Path) -> None:
    with serving(quiet, "--grace", "240") as service:
        job = enqueue(catalog, JobKind.FULL)
        until(lambda: catalog.jobs.get(job.id).state is JobState.RUNNING, lambda: "its beginning")
        late = enqueue(catalog, JobKind.FULL)
        service.process.send_signal(signal.SIGTERM)
        until(lambda: b"daemon-stopping" in service.log.read_bytes(), service.log.read_text)
        gate.unlink()
        assert service.process.wait(300) == 0
    assert catalog.jobs.get(job.id).state is JobState.SUCCEEDED
    assert catalog.jobs.get(late.id).state is JobState.QUEUED
    assert len(quiet.backups()) == 1


@pytest.mark.parametrize(("grace", "signals"), [("0", 1), ("3600", 2)])
def test_after_the_grace_or_asked_twice_a_running_backup_is_stopped_and_queued_again(
    quiet: House, catalog: Catalog, grace: str, signals: int
) -> None:
    (quiet.base / "policies" / "gold.yaml").write_text(ONCE_A_YEAR + "limits: {read: 64KiB}\n")  # it would take minutes
    with serving(quiet, "--grace", grace) as service:
        job = enqueue(catalog, JobKind.FULL)
        until(lambda: catalog.jobs.get(job.id).state is JobState.RUNNING, lambda: "its beginning")
        family = descendants(service.process.pid)
        if signals == 2:
            service.process.send_signal(signal.SIGTERM)
            until(lambda: b"daemon-stopping" in service.log.read_bytes(), service.log.read_text)
        assert service.stop() == 0
        assert alive(family) == set()
    ended_job = catalog.jobs.get(job.id)
    assert ended_job.state in (JobState.CANCELLED, JobState.ABANDONED)
    (again,) = catalog.jobs.list(state=JobState.QUEUED)
    assert again.previous == job.id
    assert quiet.fsck() == []


def test_a_reload_leaves_a_running_backup_alone(quiet: House, catalog: Catalog, gate: Path) -> None:
    with serving(quiet) as service:
        job = enqueue(catalog, JobKind.FULL)
        until(lambda: catalog.jobs.get(job.id).state is JobState.RUNNING, lambda: "its beginning")
        (quiet.base / "policies" / "gold.yaml").write_text(ONCE_A_YEAR.replace("0 0 1 1 *", "0 0 1 2 *"))
        service.reload()
        until(lambda: b"config-reloaded" in service.log.read_bytes(), service.log.read_text)
        gate.unlink()
        until(lambda: catalog.jobs.get(job.id).state in OVER, lambda: "its end")
        assert catalog.jobs.get(job.id).state is JobState.SUCCEEDED

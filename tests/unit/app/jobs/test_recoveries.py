"""A job that is well again is told once, and only when the last that was heard of it was bad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.app.context.wiring import Wiring
from backupd.app.jobs.jobs import RECOVERED, close
from backupd.catalog.session import open_catalog
from backupd.model.errors import BackupdError
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import new_id
from tests.support.service.house import Clock, Office

NOW = datetime(2026, 11, 21, 4, 0, tzinfo=UTC)


@pytest.fixture
def wiring(tmp_path: Path) -> Iterator[Wiring]:
    settings = Office(tmp_path).write()
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog, Clock(NOW))


def run(
    wiring: Wiring,
    state: JobState = JobState.SUCCEEDED,
    *,
    kind: JobKind = JobKind.FULL,
    leg: str = "",
    arguments: Mapping[str, str] | None = None,
) -> list[str]:
    """Let a job end; the legs and kinds that it made good."""
    before = wiring.catalog.events.newest()
    job = JobRecord(
        new_id(NOW), kind, "db1", JobState.RUNNING, NOW, started_at=NOW, leg=leg, token=1, arguments=arguments or {}
    )
    wiring.catalog.jobs.add(job)
    close(wiring, job, state, error=None if state is JobState.SUCCEEDED else BackupdError("no"))
    return [event.subject for event in wiring.catalog.events.since(before) if event.kind == RECOVERED]


def test_what_failed_is_told_once_when_it_went_well(wiring: Wiring) -> None:
    assert run(wiring, leg="physical.full") == []
    run(wiring, JobState.FAILED, leg="physical.full")
    run(wiring, JobState.ABANDONED, leg="physical.full")
    assert run(wiring, kind=JobKind.INCREMENTAL, leg="physical.incremental") == []
    assert run(wiring, leg="physical.full") == ["physical.full"]
    assert run(wiring, leg="physical.full") == []


def test_a_run_by_hand_counts_for_the_schedule_of_the_same_and_a_run_of_the_schedule_for_one_by_hand(
    wiring: Wiring,
) -> None:
    run(wiring, JobState.FAILED, leg="physical.full")
    assert run(wiring) == ["physical.full"]
    run(wiring, JobState.FAILED)
    assert run(wiring, leg="physical.full") == ["physical-full"]


def test_one_set_of_tables_counts_for_itself_alone(wiring: Wiring) -> None:
    run(wiring, JobState.FAILED, kind=JobKind.LOGICAL, leg="logical/money", arguments={"set": "money"})
    assert run(wiring, kind=JobKind.LOGICAL, leg="logical", arguments={"set": ""}) == []
    assert run(wiring, kind=JobKind.LOGICAL, arguments={"tables": "shop.*"}) == []
    assert run(wiring, kind=JobKind.LOGICAL, arguments={"set": "money"}) == ["logical/money"]


def test_a_run_that_was_routinely_left_out_is_nothing_to_recover_from(wiring: Wiring) -> None:
    wiring.catalog.events.add(
        Event(NOW, "job-skipped", Severity.INFO, "a full is taken", server="db1", subject="physical.incremental")
    )
    assert run(wiring, kind=JobKind.INCREMENTAL, leg="physical.incremental") == []

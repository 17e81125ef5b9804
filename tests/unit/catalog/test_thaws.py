"""Thaws and jobs that wait, on both databases."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from backupd.catalog.session import Catalog
from backupd.model.errors import CatalogError, RefusedError
from backupd.model.job import JobRecord, JobState
from backupd.model.thaw import LOGS, ThawItem, ThawState
from tests.support.catalog import samples

JOB = JobRecord(
    "thaw-1", "thaw", "shop-db1", JobState.WAITING, samples.NOON, not_before=samples.NOON, arguments={"tier": "bulk"}
)


def item(number: int, part: str = "b1", **changes: object) -> ThawItem:
    plain = ThawItem("thaw-1", "vault", f"objects/aa/{number}", part, 5_000_000_000, "DEEP_ARCHIVE", "bulk")
    return replace(plain, **changes)  # type: ignore[arg-type]  # the fields are named by each test


def test_a_thaw_and_its_job_are_recorded_together_or_not_at_all(catalog: Catalog) -> None:
    catalog.thaws.begin(JOB, [item(number) for number in range(1500)])
    assert catalog.thaws.count("thaw-1").total() == (1500, 1500 * 5_000_000_000)
    assert catalog.jobs.get("thaw-1").state is JobState.WAITING
    with pytest.raises(CatalogError):
        catalog.thaws.begin(replace(JOB, id="thaw-2"), [item(1, thaw_id="thaw-2"), item(1, thaw_id="thaw-2")])
    assert catalog.jobs.list() == (catalog.jobs.get("thaw-1"),)


def test_items_come_back_as_they_were_recorded_and_are_counted_by_part(catalog: Catalog) -> None:
    catalog.thaws.begin(JOB, [item(1), item(2), item(3, LOGS)])
    later, until = samples.NOON + timedelta(hours=48), samples.NOON + timedelta(days=9)
    thawing = item(1, state=ThawState.THAWING, requested_at=samples.NOON, expected_at=later)
    ready = item(3, LOGS, state=ThawState.READY, ready_until=until)
    catalog.thaws.record([thawing, ready])
    catalog.thaws.record([])
    assert catalog.thaws.of("thaw-1", state=ThawState.THAWING) == (thawing,)
    assert catalog.thaws.of("thaw-1", state=ThawState.READY) == (ready,)
    assert catalog.thaws.of("thaw-1", limit=1) == (thawing,)
    found = catalog.thaws.count("thaw-1")
    assert (found.open, found.expected_at, found.ready_until) == (2, later, until)
    assert found.waits_for("b1")
    assert not found.waits_for(LOGS)
    assert found.as_json()["not_asked_yet"] == 1


def test_a_raised_tier_is_that_of_what_is_asked_for_from_then_on(catalog: Catalog) -> None:
    catalog.thaws.begin(JOB, [item(1), item(2, state=ThawState.THAWING), item(3, state=ThawState.READY)])
    assert catalog.thaws.raise_tier("thaw-1", "standard", {"tier": "standard"}) == 2
    assert catalog.jobs.get("thaw-1").arguments == {"tier": "standard"}
    assert [(one.tier, one.state) for one in catalog.thaws.of("thaw-1")] == [
        ("standard", ThawState.WANTED),
        ("bulk", ThawState.RAISED),
        ("bulk", ThawState.READY),
    ]


def test_a_waiting_job_is_due_when_its_time_has_come_or_was_set_by_a_clock_that_was_ahead(catalog: Catalog) -> None:
    catalog.thaws.begin(JOB, [item(1)])
    hour = timedelta(hours=1)
    assert [job.id for job in catalog.jobs.waiting(samples.NOON, hour)] == ["thaw-1"]
    catalog.jobs.go_on_waiting(
        "thaw-1", samples.NOON + hour / 2, "waits", hint="faster", progress={"files": 1}, arguments={"tier": "standard"}
    )
    assert catalog.jobs.waiting(samples.NOON, hour) == ()
    assert [job.id for job in catalog.jobs.waiting(samples.NOON - hour, hour)] == ["thaw-1"]
    job = catalog.jobs.get("thaw-1")
    assert (job.message, job.hint, job.progress, job.arguments) == (
        "waits",
        "faster",
        {"files": 1},
        {"tier": "standard"},
    )
    assert catalog.jobs.dead(lambda _owner: False, samples.NOON) == ()
    assert catalog.jobs.claim("me", samples.NOON) is None


def test_a_waiting_job_ends_once_and_its_items_go_with_it(catalog: Catalog) -> None:
    catalog.thaws.begin(JOB, [item(1)])
    assert catalog.jobs.prune(samples.NOON + timedelta(days=400)) == ()
    assert catalog.jobs.finish("thaw-1", JobState.SUCCEEDED, samples.NOON, token=0).state is JobState.SUCCEEDED
    with pytest.raises(RefusedError):
        catalog.jobs.finish("thaw-1", JobState.FAILED, samples.NOON, token=0)
    with pytest.raises(RefusedError):
        catalog.jobs.request_cancel("thaw-1", "anna", samples.NOON)
    catalog.jobs.go_on_waiting("thaw-1", samples.NOON, "too late")
    assert catalog.jobs.get("thaw-1").message == ""
    assert catalog.thaws.forget() == 0
    second = replace(JOB, id="thaw-2", queued_at=samples.NOON + timedelta(days=1))
    catalog.thaws.begin(second, [item(1, thaw_id="thaw-2")])
    assert "while it waited" in catalog.jobs.request_cancel("thaw-2", "anna", samples.NOON).message

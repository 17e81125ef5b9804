"""What has changed since the last look: everything once, whatever the order in which it became visible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import insert

from backupd.app.context.wiring import Wiring
from backupd.app.views.listing import CatalogChanges
from backupd.catalog.alerts import events
from backupd.catalog.session import open_catalog
from backupd.model.event import Event, Severity
from backupd.model.job import JobState
from tests.support.catalog import samples
from tests.support.service.house import Clock, Office


@pytest.fixture
def clock() -> Clock:
    return Clock(samples.NOON + timedelta(hours=5))


@pytest.fixture
def wiring(tmp_path: Path, clock: Clock) -> Iterator[Wiring]:
    settings = Office(tmp_path).write()
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog, clock)


def event(kind: str) -> Event:
    return Event(datetime(2026, 11, 21, tzinfo=UTC), kind, Severity.INFO, "something")


def kinds(news: CatalogChanges) -> list[str]:
    return [one.kind for one in news.look().events]


def test_what_was_there_is_no_news_and_what_comes_is_told_once(wiring: Wiring) -> None:
    wiring.catalog.events.add(event("old"))
    wiring.catalog.jobs.add(samples.job(1))
    news = CatalogChanges(wiring)
    assert news.look() == news.look()
    wiring.catalog.events.add(event("new"))
    assert kinds(news) == ["new"]
    assert kinds(news) == []


def visible(wiring: Wiring, number: int) -> None:
    with wiring.catalog.events._database.write() as connection:
        connection.execute(
            insert(events).values(
                number=number,
                at=datetime(2026, 11, 21, tzinfo=UTC),
                kind=f"e{number}",
                severity="info",
                server="",
                subject="",
                message="",
                detail="",
                hint="",
                job_id="",
            )
        )


def test_an_event_that_becomes_visible_after_a_later_one_is_told_too(wiring: Wiring) -> None:
    visible(wiring, 1)
    news = CatalogChanges(wiring)
    for number in (4, 2, 5, 3):
        visible(wiring, number)
        assert kinds(news) == [f"e{number}"]
    assert kinds(news) == []


def test_a_number_that_never_comes_is_not_waited_for_for_ever(wiring: Wiring, clock: Clock) -> None:
    visible(wiring, 1)
    news = CatalogChanges(wiring)
    visible(wiring, 4)
    assert kinds(news) == ["e4"]
    clock.sleep(timedelta(minutes=1))
    assert kinds(news) == []
    visible(wiring, 2)
    visible(wiring, 5)
    assert kinds(news) == ["e5"]


def test_a_job_is_told_whenever_something_of_it_changed_and_its_end_too(wiring: Wiring) -> None:
    news = CatalogChanges(wiring)
    wiring.catalog.jobs.add(samples.job(1))
    (job,) = news.look().jobs
    assert job.state is JobState.RUNNING
    assert news.look().jobs == ()
    wiring.catalog.jobs.heartbeat("job-1", 1, samples.NOON)
    assert news.look().jobs == (), "a heartbeat alone is no news"
    wiring.catalog.jobs.heartbeat("job-1", 1, samples.NOON, {"phase": "copy"})
    (job,) = news.look().jobs
    assert job.progress == {"phase": "copy"}
    wiring.catalog.jobs.finish("job-1", JobState.SUCCEEDED, samples.NOON, token=1)
    (job,) = news.look().jobs
    assert job.state is JobState.SUCCEEDED
    assert news.look().jobs == ()


def test_a_job_that_began_and_ended_between_two_looks_is_told(wiring: Wiring) -> None:
    news = CatalogChanges(wiring)
    wiring.catalog.jobs.add(replace(samples.job(1), queued_at=wiring.clock()))
    wiring.catalog.jobs.finish("job-1", JobState.FAILED, samples.NOON, token=1)
    assert [job.state for job in news.look().jobs] == [JobState.FAILED]

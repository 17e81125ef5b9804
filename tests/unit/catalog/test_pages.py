"""Pages of long lists, plans, absences, and restores that wait for jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from backupd.catalog import row_mapping
from backupd.catalog.backups import Absence
from backupd.catalog.restores import StoredPlan
from backupd.catalog.row_mapping import Listed, page_by_page
from backupd.catalog.session import Catalog
from backupd.model.errors import BackupdError, BusyError, NotFoundError, RefusedError, UsageError
from backupd.model.event import Event, Severity
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.catalog import samples

LATER = samples.NOON + timedelta(days=1)


def through(page: Callable[[str | None], Listed[Any]]) -> list[str]:
    """Every page, the ids in order."""
    found: list[str] = []
    after: str | None = None
    while True:
        listed = page(after)
        assert 0 < len(listed.items) <= 2
        found += [getattr(item, "id", None) or str(item.number) for item in listed.items]
        after = listed.next
        if after is None:
            return found


def test_lists_are_read_page_by_page_and_nothing_is_given_twice_or_passed_over(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 6):
        catalog.backups.add(samples.backup(number))
        catalog.jobs.add(replace(samples.job(number), queued_at=samples.NOON))  # the id alone tells them apart
        catalog.proofs.add(samples.proof(number))
        catalog.restores.start(samples.restore(number))
        catalog.events.add(Event(samples.NOON, "kind", Severity.INFO, "it happened", server="shop-db1"))
    assert through(lambda after: catalog.backups.page(limit=2, after=after)) == [
        f"20261121T120000Z-{number:08x}" for number in (5, 4, 3, 2, 1)
    ]
    assert through(lambda after: catalog.jobs.page(limit=2, after=after)) == [f"job-{n}" for n in (5, 4, 3, 2, 1)]
    assert through(lambda after: catalog.proofs.page(limit=2, after=after)) == [f"proof-{n}" for n in (5, 4, 3, 2, 1)]
    assert through(lambda after: catalog.restores.page(limit=2, after=after)) == [
        f"restore-{n}" for n in (5, 4, 3, 2, 1)
    ]
    every = [f"job-{number}" for number in (5, 4, 3, 2, 1)]
    monkeypatch.setattr(row_mapping, "_AT_A_TIME", 2)
    for limit, count in ((None, 5), (5, 5), (4, 4), (3, 3), (1, 1), (9, 5)):
        read = page_by_page(lambda most, after: catalog.jobs.page(limit=most, after=after), limit)
        assert [job.id for job in read] == every[:count]
    numbers = through(lambda after: catalog.events.page(limit=2, after=after))
    assert numbers == sorted(numbers, key=int, reverse=True)
    assert [str(event.number) for event in catalog.events.since(int(numbers[2]))] == [numbers[1], numbers[0]]
    assert catalog.events.newest() == int(numbers[0])


def test_a_page_begins_behind_its_cursor_though_that_row_is_gone_and_newer_ones_came(catalog: Catalog) -> None:
    for number in (1, 2, 3, 4):
        catalog.backups.add(samples.backup(number))
    first = catalog.backups.page(limit=2)
    catalog.backups.remove(first.items[-1].id)
    catalog.backups.add(samples.backup(9))
    assert [one.id[-1] for one in catalog.backups.page(limit=2, after=first.next).items] == ["2", "1"]


def test_a_page_has_only_rows_of_the_servers_that_are_asked_for(catalog: Catalog) -> None:
    for number, server in enumerate(("a", "b", "c"), 1):
        catalog.jobs.add(samples.job(number, server=server))
        catalog.events.add(Event(samples.NOON, "kind", Severity.INFO, "it happened", server=server))
    assert [job.server for job in catalog.jobs.page(("a", "c")).items] == ["c", "a"]
    assert catalog.jobs.page(()).items == ()
    assert {event.server for event in catalog.events.page(("b",)).items} == {"b"}


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "x",
        "2026-11-21~a",
        "2026-11-21T12:00:00Z",
        "2026-11-21T12:00:00Z~",
        "~a",
        "2026-11-21T12:00:00Z~\0",
        "9" * 400,
    ],
)
def test_what_is_no_cursor_is_refused(catalog: Catalog, cursor: str) -> None:
    for look in (
        catalog.backups.page,
        catalog.jobs.page,
        catalog.proofs.page,
        catalog.restores.page,
        catalog.events.page,
    ):
        with pytest.raises(UsageError, match="is not a cursor"):
            look(after=cursor)


def test_a_plan_is_there_until_it_expires(catalog: Catalog) -> None:
    made = StoredPlan(
        "p1",
        "shop-db1",
        samples.NOON,
        "ops",
        samples.NOON + timedelta(hours=1),
        {"server": "shop-db1", "target": "latest"},
        {"chain": ["b"], "seconds": 2.5},
    )
    catalog.plans.add(made, samples.NOON)
    assert catalog.plans.get("p1", samples.NOON + timedelta(minutes=59)) == made
    assert made.as_json()["chain"] == ["b"]
    with pytest.raises(NotFoundError, match="expired"):
        catalog.plans.get("p1", samples.NOON + timedelta(hours=1))
    catalog.plans.add(replace(made, id="p2", made_at=LATER, expires_at=LATER + timedelta(hours=1)), LATER)
    with pytest.raises(NotFoundError):
        catalog.plans.get("p1", samples.NOON)  # it went when the next one came


def test_a_server_is_away_under_the_name_of_the_last_backup_that_took_it_out(catalog: Catalog) -> None:
    first = Absence("db1", "job-1", samples.NOON, "/usr/local/bin/undrain")
    catalog.absences.begin(first)
    assert (catalog.absences.of("db1"), catalog.absences.of("db2")) == (first, None)
    second = replace(first, job_id="job-2")
    catalog.absences.begin(second)
    assert not catalog.absences.end("db1", "job-1")
    assert catalog.absences.all() == (second,)
    assert catalog.absences.end("db1", "job-2")
    assert catalog.absences.all() == ()


def queued(number: int) -> JobRecord:
    return replace(
        samples.job(number),
        kind=str(JobKind.RESTORE),
        state=JobState.QUEUED,
        started_at=None,
        token=0,
        arguments={"restore": "restore-1"},
    )


def test_a_restore_waits_for_its_job_and_ends_with_it_however_that_ends(catalog: Catalog) -> None:
    waits = replace(samples.restore(), state=JobState.QUEUED, job_id="job-1", request={"request": {"a": 1}})
    assert catalog.restores.queue(waits, queued(1)) == waits
    with pytest.raises(BusyError, match="restore-1"):
        catalog.restores.queue(replace(waits, id="restore-2", job_id="job-2"), queued(2))
    assert catalog.restores.settle(LATER) == ()
    catalog.jobs.request_cancel("job-1", "ops", LATER)
    (ended,) = catalog.restores.settle(LATER)
    assert (ended.state, ended.finished_at) == (JobState.CANCELLED, LATER)
    assert "cancelled by ops" in ended.error
    again = catalog.restores.queue(replace(waits, job_id="job-3"), queued(3))
    assert (again.state, again.job_id, again.finished_at, again.error) == (JobState.QUEUED, "job-3", None, "")
    assert catalog.restores.take_up("restore-1", "job-3", "me").state is JobState.RUNNING
    claimed = catalog.jobs.claim("me", LATER)
    assert claimed is not None
    catalog.jobs.finish("job-3", JobState.ABANDONED, LATER, token=claimed.token, error=BackupdError("killed"))
    assert [(one.state, one.error) for one in catalog.restores.settle(LATER)] == [(JobState.ABANDONED, "killed")]
    assert catalog.restores.requeue("restore-1", "job-4").state is JobState.QUEUED
    with pytest.raises(RefusedError):
        catalog.restores.requeue("restore-1", "job-5")
    assert [one.state for one in catalog.restores.settle(LATER)] == [JobState.ABANDONED]  # there is no such job
    catalog.restores.keep_outcome("restore-1", {"done": True})
    assert catalog.restores.get("restore-1").request == {"request": {"a": 1}, "outcome": {"done": True}}

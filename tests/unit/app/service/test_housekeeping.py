"""What the service does for itself once a day."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from backupd.app.context.wiring import Wiring
from backupd.app.service import daemon
from backupd.app.service.daemon import Housekeeper, keep_house
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import HoldKind
from backupd.model.event import Event, Severity
from backupd.model.job import JobRecord, JobState
from tests.support.service.house import Clock, Office, at

NOON = at("2026-11-21T12:00Z")


@pytest.fixture
def wiring(tmp_path: Path) -> Iterator[Wiring]:
    settings = Office(tmp_path).write()
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog, Clock(NOON))


def test_old_events_and_jobs_go_and_a_destination_that_is_not_there_stops_nothing(wiring: Wiring) -> None:
    wiring.destination("local").initialise(NOON)
    (Path(str(wiring.settings.spool.parent)) / "repository" / "repository.json").write_text("broken")
    for number, age in enumerate((500, 300)):
        moment = NOON - timedelta(days=age)
        wiring.catalog.events.add(Event(moment, "job-failed", Severity.ERROR, "x"))
        wiring.catalog.jobs.add(
            JobRecord(
                id=f"2026010{number}T000000Z-00000000",
                kind="verify",
                server="db1",
                state=JobState.SKIPPED,
                queued_at=moment,
                finished_at=moment,
            )
        )
    keep_house(wiring)
    assert [event.at for event in wiring.catalog.events.list()] == [NOON - timedelta(days=300)]
    assert [job.id[:8] for job in wiring.catalog.jobs.list(kind="verify")] == ["20260101"]
    keep_house(wiring)
    (sweep,) = wiring.catalog.jobs.list(kind="sweep", state=JobState.QUEUED)
    assert (sweep.leg, sweep.arguments, sweep.runs_on) == ("sweep/local", {"destination": "local"}, wiring.here)


def test_whoever_paused_or_held_something_is_reminded_every_day(wiring: Wiring) -> None:
    wiring.catalog.holds.set("*", HoldKind.PAUSE, "storage move", "anna", NOON - timedelta(days=3))
    wiring.catalog.holds.set("db1", HoldKind.HOLD, "audit", "bert", NOON - timedelta(hours=1))
    keep_house(wiring)
    (event,) = wiring.catalog.events.list()
    assert (event.kind, event.severity, event.hint) == ("paused", Severity.WARNING, "backupd resume --all")
    assert event.message.startswith(
        "every server has been paused for 3d, scheduled jobs are suspended: storage move (every server is paused by "
        "anna"
    )


def test_it_is_done_once_a_day_at_its_time_and_a_clock_once_far_ahead_does_not_delay_it(
    wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Semaphore(0)
    monkeypatch.setattr(daemon, "keep_house", lambda _wiring: done.release())
    keeper = Housekeeper(at("2030-01-01T00:00Z"), "UTC")
    looked = at("2026-11-21T04:29Z")
    keeper.look(wiring, looked)
    assert not done.acquire(blocking=False)
    for _ in range(3):
        looked += timedelta(minutes=1)
        keeper.look(replace(wiring), looked)
    assert done.acquire(timeout=240)
    assert not done.acquire(timeout=0.05)

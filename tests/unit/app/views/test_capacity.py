"""A place that fills up: one event, more with growing pauses, one when it is over; whoever restarts meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.alerts.rules import FILLING
from backupd.app.context.wiring import Wiring
from backupd.app.views.capacity import FillingWatch
from backupd.catalog.session import open_catalog, upgrade
from backupd.model.backup_record import Copy, Stats
from backupd.model.errors import DestinationError
from backupd.model.event import Event, Severity
from storage.destination import Space
from tests.support.catalog.samples import backup
from tests.support.service.house import Clock, Office
from tests.support.stores.memory import MemoryDestination

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
GB = 10**9
DAY = timedelta(days=1)


class SizedDestination(MemoryDestination):
    free: int | None = 0
    total = 50 * GB

    def space(self) -> Space | None:
        if self.free is None:
            raise DestinationError("destination local does not answer")
        return Space(self.total, self.free)


class House:
    """A server whose 8 GB have grown by a quarter each day for two weeks, all of it kept: 7 GB are stored."""

    def __init__(self, wiring: Wiring, destination: SizedDestination) -> None:
        self.wiring, self.destination = wiring, destination
        self.watch = FillingWatch()
        for number in range(14):
            start = NOW - (number + 1) * DAY
            wiring.catalog.backups.add(
                replace(
                    backup(number, server="shop-db1"),
                    id=f"20261121T120000Z-{number:08x}",
                    started_at=start,
                    finished_at=start + timedelta(minutes=30),
                    stats=Stats(round(8 * GB * 1.25**-number), 4 * GB, GB // 2, 10, 0),
                    copies=(Copy("local", "complete", start),),
                )
            )

    def look(self, day: float, free: int | None) -> list[Event]:
        """The events that a look after ``day`` days adds, with so many bytes free."""
        self.destination.free = free
        last = max((event.number for event in self.wiring.catalog.events.list()), default=0)
        self.watch.step(self.wiring, NOW + day * DAY)
        return list(self.wiring.catalog.events.list(after=last))


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    settings = Office(tmp_path, {"shop-db1": "gold"}).write(
        gold='physical: {full: "0 2 * * *"}\ndestinations: {required: [local]}\nretention: {local: {keep_fulls: 20}}\n'
    )
    upgrade(settings.catalog)
    destination = SizedDestination("local")
    monkeypatch.setattr(Wiring, "destination", lambda _self, _name: destination)
    with open_catalog(settings.catalog) as catalog:
        yield House(Wiring(settings, catalog, Clock(NOW)), destination)


def test_a_place_that_will_be_full_is_told_once_with_the_day_and_then_with_growing_pauses(house: House) -> None:
    (event,) = house.look(0, 49 * GB)
    assert (event.kind, event.subject, event.severity) == (FILLING.broken, "local", Severity.WARNING)
    assert event.message == (
        "destination local fills up: the repository is full on day 10 (2026-12-01): 45.6 GiB are "
        "free (shop-db1 x1.25 a day, seen in 14 full backups over 13 days)"
    )
    assert "policy explain" in event.hint
    told = [hour / 2 for hour in range(1, 80) if house.look(hour / 2, 49 * GB)]
    assert told == [1, 3, 7, 15, 23, 31, 39]


def test_a_restart_neither_repeats_nor_forgets(house: House) -> None:
    assert house.look(0, 49 * GB)
    house.watch = FillingWatch()
    assert house.look(0.5, 49 * GB) == []
    assert house.look(1, 49 * GB)
    house.watch = FillingWatch()
    assert house.look(2.5, 49 * GB) == []
    assert house.look(3, 49 * GB)


def test_what_becomes_urgent_is_told_at_once(house: House) -> None:
    assert [event.severity for event in house.look(0, 49 * GB)] == [Severity.WARNING]
    assert [event.severity for event in house.look(0.1, 10 * GB)] == [Severity.ERROR]
    assert house.look(0.2, 9 * GB) == []


def test_room_again_is_told_once_and_the_next_time_begins_anew(house: House) -> None:
    assert house.look(0, 10**13) == [], "nothing was wrong"
    assert house.look(0, 49 * GB)
    # 7 GB x 1.25^32 = 8,835 GB more: beyond the 30 days, but only just.
    assert house.look(0.1, 8900 * GB) == []
    (over,) = house.look(0.2, 10**14)
    assert (over.kind, over.subject, over.severity) == (FILLING.mended, "local", Severity.INFO)
    assert over.message.startswith("destination local has room again: ")
    assert house.look(0.3, 10**14) == []
    assert house.look(0.4, 49 * GB)
    assert house.look(1.3, 49 * GB) == []
    assert house.look(1.4, 49 * GB)


def test_a_place_that_something_else_fills_is_told_without_any_growth(house: House) -> None:
    for record in tuple(house.wiring.catalog.backups.every())[1:]:
        house.wiring.catalog.backups.remove(record.id)
    house.destination.total = 1000 * GB
    assert house.look(0, 100 * GB) == []
    (event,) = house.look(0.1, 30 * GB)
    assert (event.kind, event.severity) == (FILLING.broken, Severity.ERROR)
    assert event.message == "destination local is nearly full: 27.9 GiB of 931.3 GiB are free"
    assert house.look(0.2, 60 * GB) == [], "hardly room again"
    assert [event.kind for event in house.look(0.3, 100 * GB)] == [FILLING.mended]


def test_a_place_that_does_not_answer_is_no_full_one(house: House, capfd: pytest.CaptureFixture[str]) -> None:
    assert house.look(0, 49 * GB)
    assert house.look(5, None) == []
    assert house.look(6, None) == []
    assert house.look(7, 49 * GB)


def test_the_service_looks_each_hour(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[datetime] = []
    monkeypatch.setattr(FillingWatch, "step", lambda _self, _wiring, now: looks.append(now))
    for minutes in (0, 30, 59, 60, 61, -600):
        house.watch.look(house.wiring, NOW + timedelta(minutes=minutes))
        thread = house.watch._thread
        assert thread is not None
        thread.join()
    assert looks == [NOW, NOW + timedelta(hours=1), NOW - timedelta(hours=10)]

"""A destination that cannot keep up with the backups that it gets copies of is told, once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.copies.replication import needed_rate, report_speed
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import BackupRecord
from tests.support.catalog import samples
from tests.support.service.house import Office

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
DAY, GIB = timedelta(days=1), 1 << 30


def taken(*sizes: int, apart: timedelta = DAY) -> list[BackupRecord]:
    """A backup each, with so many new bytes, the last one now."""
    found = []
    for number, size in enumerate(reversed(sizes)):
        one, at = samples.backup(number, server="db1"), NOW - number * apart
        found.append(replace(one, started_at=at, finished_at=at, stats=replace(one.stats, bytes_new=size)))
    return found


@pytest.fixture
def wiring(short_tmp: Path) -> Iterator[Wiring]:
    settings = Office(short_tmp).write()
    with open_catalog(settings.catalog) as catalog:
        yield Wiring(settings, catalog)


def told(wiring: Wiring) -> list[str]:
    return [event.kind for event in reversed(wiring.catalog.events.list())]


def test_what_is_needed_is_what_the_last_two_weeks_brought() -> None:
    assert needed_rate([]) is None
    assert needed_rate(taken(GIB)) is None
    assert needed_rate(taken(GIB, GIB, apart=timedelta(minutes=2))) is None
    assert needed_rate(taken(500 * GIB, 86_400, 2 * 86_400)) == 1.5, "what the first one brought came before"
    assert needed_rate(taken(*[GIB] * 20, *[86_400] * 15)) == 1.0


def test_one_event_when_it_falls_behind_and_one_when_it_keeps_up(wiring: Wiring) -> None:
    report_speed(wiring, "db1", "far", GIB, 40 * 3600.0)
    assert told(wiring) == [], "with one backup nothing is known"
    for record in taken(GIB, GIB, GIB):
        wiring.catalog.backups.add(record)
    report_speed(wiring, "db1", "far", GIB, 3600.0)
    report_speed(wiring, "db1", "far", 100, 59.0)
    report_speed(wiring, "db1", "far", 0, 40 * 3600.0)
    assert told(wiring) == []
    report_speed(wiring, "db1", "far", GIB, 25 * 3600.0)
    report_speed(wiring, "db1", "far", GIB, 30 * 3600.0)
    assert told(wiring) == ["destination-slow"]
    (event,) = wiring.catalog.events.list()
    assert "far is too slow for db1: the last copies took 1.0 GiB in 1d 1h (11.7 KiB/s)" in event.message
    assert "the backups of the last two weeks brought 12.1 KiB/s" in event.message
    report_speed(wiring, "db1", "far", GIB, 23 * 3600.0)
    assert told(wiring) == ["destination-slow", "destination-keeps-up"]


def test_our_own_limit_is_named_as_what_holds_copies_back(short_tmp: Path) -> None:
    office = Office(short_tmp)
    office.write()
    text = office.file.read_text()
    office.file.write_text(
        text.replace("destinations:\n", "destinations:\n  far: {type: filesystem, path: /far, max_upload: 12KB}\n")
    )
    with open_catalog(load_settings(office.file).catalog) as catalog:
        wiring = Wiring(load_settings(office.file), catalog)
        for record in taken(GIB, GIB, GIB):
            catalog.backups.add(record)
        report_speed(wiring, "db1", "far", GIB, 25 * 3600.0)
        (event,) = catalog.events.list()
        assert event.message.startswith("max_upload of far (")
        assert "is too low for the copies of db1" in event.message
        assert "raise max_upload of far" in event.hint

"""One event when something breaks and one when it is well again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import RPO, STREAM
from backupd.app.context.incidents import Incidents
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.event import Severity

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
KEY = Key(STREAM, "db1", "stream")


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


def broken(incidents: Incidents, *, minute: int = 0, key: Key = KEY) -> bool:
    """Did that open one?"""
    at = NOW + timedelta(minutes=minute)
    return bool(incidents.settle(at, Condition(key, Severity.ERROR, f"{key.kind.broken} at {minute}")).opened)


def mended(incidents: Incidents, *, minute: int = 0) -> bool:
    """Did that close one?"""
    at = NOW + timedelta(minutes=minute)
    return bool(incidents.settle(at, looked={KEY: f"stream-recovered at {minute}"}).closed)


def told(catalog: Catalog) -> list[str]:
    return [one.message for one in reversed(catalog.events.list())]


def test_an_incident_is_told_once_when_it_begins_and_once_when_it_is_over(catalog: Catalog) -> None:
    incidents = Incidents(catalog)
    assert not mended(incidents)
    assert broken(incidents, minute=1)
    assert [broken(incidents, minute=minute) for minute in (2, 3)] == [False, False]
    assert mended(incidents, minute=4)
    assert not mended(incidents, minute=5)
    assert broken(incidents, minute=6)
    assert told(catalog) == ["stream-failed at 1", "stream-recovered at 4", "stream-failed at 6"]


def test_a_process_that_comes_after_knows_what_is_open(catalog: Catalog) -> None:
    broken(Incidents(catalog))
    later = Incidents(catalog)
    assert not broken(later, minute=1)
    assert mended(later, minute=2)
    assert not mended(Incidents(catalog), minute=3)


def test_servers_subjects_and_sorts_have_incidents_of_their_own(catalog: Catalog) -> None:
    incidents = Incidents(catalog)
    broken(incidents)
    assert broken(incidents, key=replace(KEY, subject="process"))
    assert broken(incidents, key=replace(KEY, server="db2"))
    assert not incidents.is_open(Key(RPO, "db1", "stream"))
    assert broken(incidents, key=Key(RPO, "db1", "stream"))

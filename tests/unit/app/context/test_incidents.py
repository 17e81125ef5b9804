"""One event when something breaks and one when it is well again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.alerts.conditions import Key
from backupd.alerts.rules import RPO, STREAM
from backupd.app.context.incidents import Incidents
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.event import Event, Severity

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


def event(kind: str, *, minute: int = 0, server: str = "db1", subject: str = "stream") -> Event:
    return Event(
        NOW + timedelta(minutes=minute), kind, Severity.ERROR, f"{kind} at {minute}", server=server, subject=subject
    )


def told(catalog: Catalog) -> list[str]:
    return [one.message for one in reversed(catalog.events.list())]


def test_an_incident_is_told_once_when_it_begins_and_once_when_it_is_over(catalog: Catalog) -> None:
    incidents = Incidents(catalog)
    assert not incidents.mended(STREAM, event("stream-recovered"))
    assert incidents.broken(STREAM, event("stream-failed", minute=1))
    assert [incidents.broken(STREAM, event("stream-failed", minute=minute)) for minute in (2, 3)] == [False, False]
    assert incidents.mended(STREAM, event("stream-recovered", minute=4))
    assert not incidents.mended(STREAM, event("stream-recovered", minute=5))
    assert incidents.broken(STREAM, event("stream-failed", minute=6))
    assert told(catalog) == ["stream-failed at 1", "stream-recovered at 4", "stream-failed at 6"]


def test_a_process_that_comes_after_knows_what_is_open(catalog: Catalog) -> None:
    Incidents(catalog).broken(STREAM, event("stream-failed"))
    later = Incidents(catalog)
    assert not later.broken(STREAM, event("stream-failed", minute=1))
    assert later.mended(STREAM, event("stream-recovered", minute=2))
    assert not Incidents(catalog).mended(STREAM, event("stream-recovered", minute=3))


def test_servers_subjects_and_sorts_have_incidents_of_their_own(catalog: Catalog) -> None:
    incidents = Incidents(catalog)
    incidents.broken(STREAM, event("stream-failed"))
    assert incidents.broken(STREAM, event("stream-failed", subject="process"))
    assert incidents.broken(STREAM, event("stream-failed", server="db2"))
    assert not incidents.is_open(Key(RPO, "db1", "stream"))
    assert incidents.broken(RPO, event("rpo-broken"))

"""Rows of backups that are not where they belong yet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from backupd.catalog.destinations import FAILING, WAITING
from backupd.catalog.session import open_catalog

NOW = datetime(2026, 11, 21, 4, tzinfo=UTC)


def test_what_is_expected_waits_fails_with_a_count_and_is_forgotten_when_it_has_arrived(tmp_path: Path) -> None:
    with open_catalog(f"sqlite:///{tmp_path}/catalog.db") as catalog:
        rows = catalog.replications
        rows.expect("away", {"b1": 10, "b2": 20}, NOW)
        rows.expect("vault", {"b1": 10}, NOW)
        assert [(row.backup_id, row.state, row.bytes_total) for row in rows.list("away")] == [
            ("b2", WAITING, 20),
            ("b1", WAITING, 10),
        ]
        rows.copying("b1", "away", 4, 12, NOW)
        later = NOW + timedelta(minutes=1)
        for number in (1, 2):
            rows.failing("b1", "away", NOW, not_before=later, message="gone")
            assert rows.list("away")[1].attempts == number
        rows.expect("away", {"b1": 10, "b3": 30}, later)
        row = rows.list("away")[2]
        assert (row.state, row.message, row.since, row.not_before, row.bytes_done) == (FAILING, "gone", NOW, later, 4)
        assert row.as_json()["not_before"] == "2026-11-21T04:01:00Z"
        rows.forget("away", ["b1", "b2"])
        assert [(row.destination, row.backup_id) for row in rows.list()] == [("away", "b3"), ("vault", "b1")]

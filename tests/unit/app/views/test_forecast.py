"""When a bucket will be full, which cannot be asked."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.views.capacity import forecast, room
from backupd.catalog.session import open_catalog
from backupd.model.backup_record import Copy
from tests.support.catalog import samples
from tests.support.service.house import Office

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("capacity", "says"),
    [
        ("", "no limit is known"),
        ("capacity: 30GiB, ", "the repository is full on day 10 (2026-12-01): 10.0 GiB are free"),
        ("capacity: 19GiB, ", "the repository is full on day 1 (2026-11-22): 0 B are free"),
        ("capacity: 1PiB, ", "enough for a year of growth at the recent rate"),
    ],
)
def test_a_bucket_is_full_when_what_was_granted_is_used_up(short_tmp: Path, capacity: str, says: str) -> None:
    office = Office(short_tmp)
    office.write()
    office.file.write_text(
        office.file.read_text().replace(
            f"local: {{type: filesystem, path: {short_tmp}/repository}}",
            f'local: {{type: s3, bucket: bbb, {capacity}endpoint_url: "http://127.0.0.1:9"}}',
        )
    )
    settings = load_settings(office.file)
    with open_catalog(settings.catalog) as catalog:
        wiring = Wiring(settings, catalog, clock=lambda: NOW)
        for number in range(20):
            one, at = samples.backup(number, server="db1"), NOW - timedelta(days=19 - number)
            catalog.backups.add(
                replace(
                    one,
                    started_at=at,
                    finished_at=at,
                    stats=replace(one.stats, bytes_new=GIB, bytes_stored=GIB),
                    copies=(Copy("local", "complete", at),),
                )
            )
        found = forecast(wiring, "local")
        assert found is not None
        assert says in found.text, found.text
        assert bool(room(wiring, "local")) == ("on day" in says)

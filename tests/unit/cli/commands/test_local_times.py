"""Times without an offset on the command line: resolved in the configured zone, shown beside UTC, UTC in JSON."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.restores.request import RestoreRequest
from backupd.app.service.facade import Service
from backupd.catalog.session import open_catalog
from backupd.cli import session
from backupd.cli.main import main
from backupd.model.errors import UsageError
from backupd.model.local_time import read_local
from restore.planning.plan import Plan
from tests.support.catalog.configuration_files import POLICY, write
from tests.support.service.fake import FakeService
from tests.support.service.house import Clock

NOW = datetime(2026, 11, 22, 20, 15, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")


class InBerlin(FakeService):
    @property
    def installation(self):  # type: ignore[no-untyped-def]  # as that of the one above
        found = super().installation
        found.zone = lambda: BERLIN
        found.moment = lambda text: read_local(text, BERLIN, NOW)
        return found

    def plan(self, request: RestoreRequest) -> Plan:
        return dataclasses.replace(super().plan(request), target=request.target)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> InBerlin:
    fake = InBerlin()
    monkeypatch.setattr(session, "open_service", fake.open)
    return fake


@pytest.mark.parametrize(
    ("written", "target"),
    [
        ("20:30", "2026-11-22T19:30:00Z"),
        ("yesterday 14:00", "2026-11-21T13:00:00Z"),
        ("20:30@other", "2026-11-22T19:30:00Z@other"),
        ("2026-11-22T19:30:00Z", "2026-11-22T19:30:00Z"),
        ("2026-11-22 20:30+01:00", "2026-11-22 20:30+01:00"),
        ("latest", "latest"),
        ("binlog.000042:1230", "binlog.000042:1230"),
    ],
)
def test_a_target_is_one_in_utc(
    written: str, target: str, service: InBerlin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "shop-db1", "--to", written, "--json"]) == 0
    assert f'"target": "{target}"' in capsys.readouterr().out
    assert main(["restore", "shop-db1", "--to", written, "--datadir", "/x"]) == 0
    assert main(["test-restore", "shop-db1", "--to", written]) == 0
    assert [call[2] for call in service.calls if call[0] in ("plan", "restore", "test_restore")] == [target] * 3


def test_a_plan_shows_both_times(service: InBerlin, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "shop-db1", "--to", "20:30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(maxsplit=1) == ["target", "2026-11-22T19:30:00Z (2026-11-22 20:30:00 CET)"]
    assert main(["plan", "shop-db1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["target", "latest"]
    assert lines[1].endswith("2026-11-21T04:26:16Z (2026-11-21 05:26:16 CET)")


def test_a_time_with_two_meanings_is_refused_before_anything_is_done(
    service: InBerlin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["restore", "shop-db1", "--to", "2026-10-25 02:30", "--datadir", "/x"]) == 2
    assert "2026-10-25T00:30:00Z or 2026-10-25T01:30:00Z" in capsys.readouterr().err
    assert not [call for call in service.calls if call[0] == "restore"]


@pytest.mark.parametrize("zone", ["Europe/Berlin", "UTC", ""])
def test_the_configuration_names_the_zone(tmp_path: Path, zone: str) -> None:
    text = (
        f"catalog: sqlite:///{tmp_path}/catalog.db\nservers: {{db1: {{policy: gold, socket: /s}}}}\n"
        "destinations: {local: {type: filesystem, path: /srv/backups}}\n"
        "encryption: {gnupg_home: gnupg, recipients: [ops@example.com]}\n"
    ) + (f"timezone: {zone}\n" if zone else "")
    settings = load_settings(write(tmp_path, text, gold=POLICY))
    with open_catalog(settings.catalog) as catalog:
        installation = Service(Wiring(settings, catalog, Clock(NOW)), "").installation
        if not zone:
            assert installation.zone() is None
            with pytest.raises(UsageError, match="has no offset, and the configuration names no time zone"):
                installation.moment("20:30")
            return
        assert installation.zone() == ZoneInfo(zone)
        shown = installation.moment("yesterday 20:30").astimezone(ZoneInfo(zone))
        assert f"{shown:%Y-%m-%d %H:%M}" == "2026-11-21 20:30"

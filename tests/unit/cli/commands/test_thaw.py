from __future__ import annotations

import dataclasses
import json
from datetime import UTC, date, datetime
from typing import Any

import pytest

from backupd.app.restores.jobs import Thawed
from backupd.app.restores.request import RestoreRequest
from backupd.cli.main import main
from backupd.model.job import JobRecord, JobState
from backupd.model.thaw import ColdObject, Price, Prices, ThawCount, Thawing, ThawPlan, ThawState
from restore.planning.plan import Plan
from tests.support.service.fake import FakeService

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
PRICES = Prices("EUR", date(2026, 1, 31), {"GLACIER": {"bulk": Price(12, 0.5, 0), "standard": Price(5, 1, 0)}})
PLAN = ThawPlan((ColdObject("vault", "objects/aa/x", 2**30, "GLACIER", "b1"),), 7, "standard", PRICES)
JOB = JobRecord(
    "thaw-1",
    "thaw",
    "shop-db1",
    JobState.WAITING,
    NOON,
    message="waits for the archive: 1 of 3",
    arguments={"target": "latest", "tier": "bulk"},
)
STANDS = Thawing(
    "thaw-1",
    (
        ThawCount("b1", "vault", ThawState.READY, 1, 10, None, NOON),
        ThawCount("b1", "vault", ThawState.THAWING, 2, 20, NOON, None),
    ),
)


@pytest.fixture
def thawing(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the service; the plan has something to thaw."""
    asked: list[Any] = []

    def cold(plan: Plan) -> Plan:
        return dataclasses.replace(plan, thaw=PLAN)

    plain = FakeService.plan

    def plan(self: FakeService, request: RestoreRequest) -> Plan:
        asked.append(request.thaw)
        return cold(plain(self, request))

    def thaw(_self: FakeService, server: str, target: str, **more: Any) -> Thawed:
        asked.append((server, target, more))
        return Thawed(cold(plain(service, RestoreRequest(server, target))), JOB, STANDS)

    monkeypatch.setattr(FakeService, "plan", plan)
    monkeypatch.setattr(FakeService, "thaw", thaw, raising=False)

    def thaws(_self: FakeService, server: str | None) -> list[tuple[JobRecord, Thawing]]:
        asked.append(server)
        return [(JOB, STANDS)]

    def raise_thaw(_self: FakeService, job: str, tier: str) -> tuple[JobRecord, Thawing]:
        asked.append((job, tier))
        return JOB, STANDS

    monkeypatch.setattr(FakeService, "thaws", thaws, raising=False)
    monkeypatch.setattr(FakeService, "raise_thaw", raise_thaw, raising=False)
    return asked


def test_a_plan_shows_what_is_cold_and_what_each_tier_takes(
    thawing: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "shop-db1", "--to", "latest", "--thaw", "bulk"]) == 0
    shown = capsys.readouterr().out
    assert thawing == ["bulk"]
    for words in ("GLACIER", "1.0 GiB", "bulk", "12 h", "0.50 EUR", "1.00 EUR", "prices of 2026-01-31", "7 days"):
        assert words in shown


def test_a_thaw_says_what_it_costs_what_it_waits_for_and_how_to_make_it_faster(
    thawing: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["thaw", "shop-db1", "--to", "latest", "--tier", "bulk", "--days", "3", "--tables", "shop.*"]) == 0
    shown = capsys.readouterr().out
    assert thawing == [("shop-db1", "latest", {"tier": "bulk", "days": 3, "tables": ["shop.*"]})]
    assert "waits for the archive" in shown
    assert "--raise thaw-1" in " ".join(shown.split())


def test_thaws_are_listed_and_made_faster(thawing: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["thaw", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["thaw"]["objects"] == 3
    assert listed["job"]["state"] == "waiting"
    assert main(["thaw"]) == 0
    assert "1/3" in capsys.readouterr().out
    assert main(["thaw", "--raise", "thaw-1", "--tier", "expedited"]) == 0
    assert thawing == [None, None, ("thaw-1", "expedited")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--to", "latest"],
        ["--tier", "bulk"],
        ["shop-db1", "--days", "3"],
        ["--raise", "x"],
        ["shop-db1", "--raise", "x", "--tier", "bulk"],
        ["--raise", "x", "--tier", "bulk", "--to", "latest"],
        ["shop-db1", "--to", "latest", "--tier", "slow"],
    ],
)
def test_options_that_do_not_belong_together_are_wrong_usage(thawing: list[Any], arguments: list[str]) -> None:
    assert main(["thaw", *arguments]) == 2
    assert thawing == []

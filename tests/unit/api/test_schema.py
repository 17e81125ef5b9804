"""Requests made up from the reference, good ones and bad ones, against an installation with a real backup and some
weeks of history: what the reference promises holds, and nothing that is sent makes it stumble."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from schemathesis.config import SchemathesisConfig
from schemathesis.core.failures import Failure
from schemathesis.engine import Status, events, from_schema

from api.site import Throttle
from backupd.app.context.settings import load_settings
from tests.support.dice import size, thrown
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.servers.mariadb import PrivateServer
from tests.support.service.rig import Rig, rig
from tests.support.service.state import fill_work, number
from tests.support.stores.folders import short_directory

SECONDS = size(7, 300)
"""Of each of the two runs."""
_KNOWN = {
    "restores": number("20261102T020000Z", 1),
    "jobs": number("20261101T020000Z", 3),
    "proofs": number("20261103T020000Z", 1),
    "alerts": number("20261104T020000Z", 0),
}


class Patient(Throttle):
    """Wrong tokens are part of this test."""

    def wait(self, address: str) -> float:
        del address
        return 0.0


def patient(app: FastAPI) -> None:
    app.state.site.throttle = Patient()


@pytest.fixture(scope="module")
def lived_in(keys: Keys, shared_server: PrivateServer) -> Iterator[tuple[Rig, str]]:
    """With the id of its real backup."""
    with short_directory() as base:
        house = House(base, shared_server, keys)
        backup = str(house.backup()["id"])
        Archive(house, shared_server).take()
        settings = load_settings(house.config)
        with rig(settings, prepared=lambda wiring: fill_work(wiring, SERVER), app=patient) as running:
            yield running, backup


def configured(running: Rig, seconds: int, **more: Any) -> SchemathesisConfig:
    seed = thrown("test_schema").randrange(2**31)
    return SchemathesisConfig.from_dict(
        {
            "suppress-health-check": ["all"],
            "request-timeout": 240,  # a slow machine is no trouble of what is asked
            "base-url": running.url,
            "seed": seed,
            "max-time": seconds,
            "continue-on-failure": True,
            "headers": {"Authorization": f"Bearer {running.secret('admin')}", "Accept": "application/json"},
            "generation": {"max-examples": size(3, 100), "database": "none"},
            "phases": {"stateful": {"enabled": False}},
            # What a schema cannot say (a day that there is not, options that exclude each other) is 422, too.
            "checks": {
                "positive_data_acceptance": {
                    "expected-statuses": ["2xx", "304", "401", "403", "404", "409", "422", "429"]
                }
            },
            **more,
        }
    )


def problems(running: Rig, config: SchemathesisConfig) -> tuple[list[str], int, set[str]]:
    """What was found, how many requests were made, of which operations."""
    document = running.client("viewer").get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(
        {**document, "paths": {path: item for path, item in document["paths"].items() if path.startswith("/v1/")}},
        config=config,
    )
    found: dict[str, None] = {}
    cases, seen = 0, set()
    for event in from_schema(schema).execute():
        if isinstance(event, events.NonFatalError | events.FatalError):
            found[f"{event}"] = None
        if isinstance(event, events.ScenarioFinished):
            cases += len(event.recorder.cases)
            seen.add(str(event.label))
            if event.status in (Status.FAILURE, Status.ERROR):
                for case_id, checks in event.recorder.checks.items():
                    for check in checks:
                        if check.failure_info is not None:
                            found[told(event, case_id, check.failure_info.failure)] = None
    return list(found), cases, seen


def told(event: events.ScenarioFinished, case_id: str, failure: Failure) -> str:
    case = event.recorder.cases[case_id].value
    return f"{event.label}: {failure.title}: {failure.message[:400]}\n    {case.as_curl_command()[:600]}"


@pytest.mark.parametrize("known", [True, False], ids=["of what is there", "of anything"])
def test_every_operation_keeps_to_the_reference_whatever_is_sent(
    lived_in: tuple[Rig, str], known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    running, backup = lived_in
    caplog.set_level(logging.ERROR)
    ids = {**_KNOWN, "backups": backup}
    operations = [
        {"include-path-regex": f"^/v1/{kind}/{{id}}", "parameters": {"path.id": value}} for kind, value in ids.items()
    ]
    more = {"parameters": {"path.server": SERVER, "path.name": "gold"}, "operations": operations} if known else {}
    found, cases, seen = problems(running, configured(running, SECONDS, **more))
    print(f"{cases} requests of {len(seen)} operations")
    assert not found, "\n".join(found)
    assert [record.message for record in caplog.records if "api-trouble" in record.message] == []

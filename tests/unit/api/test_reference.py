"""/openapi.json: whoever reads it alone knows how to ask, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema_rs import validator_for

from backupd.app.context.wiring import Wiring
from backupd.catalog.session import open_catalog
from tests.support.service.house import Office
from tests.support.service.rig import rig
from tests.support.service.state import documented, reference, two_servers

PROMISED = """
GET /servers, GET /servers/{server}, GET /servers/{server}/timeline, GET /servers/{server}/retention,
POST /servers/{server}/retention, POST /servers/{server}/accept, GET /clusters/{server},
GET /servers/{server}/consistency, POST /servers/{server}/consistency,
GET /servers/{server}/binlog/search, POST /backups, GET /backups, GET /backups/{id},
DELETE /backups/{id}, POST /backups/{id}/keep, POST /backups/{id}/unkeep, POST /backups/{id}/undelete,
GET /backups/{id}/runbook, POST /restores/plan, GET /restores/plan/{id}, POST /restores, GET /restores,
GET /restores/{id}, GET /restores/{id}/runbook, POST /test-restores, POST /verifications, POST /replications,
POST /thaws, GET /thaws, GET /jobs, GET /jobs/{id}, GET /jobs/{id}/log, POST /jobs/{id}/cancel, GET /policies,
GET /policies/{name}, GET /policies/schema, POST /policies/validate, POST /policies/reload, GET /proofs,
GET /proofs/{id}, GET /destinations, GET /events, GET /alerts, POST /alerts/{id}/acknowledge, POST /alerts/test,
GET /messages, GET /holds, POST /holds, DELETE /holds, GET /pauses, POST /pauses, DELETE /pauses, GET /tokens,
POST /tokens, DELETE /tokens/{id}, GET /audit, GET /keys, GET /whoami"""


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    base: Path = tmp_path_factory.mktemp("reference")
    settings = two_servers(base)
    with open_catalog(settings.catalog) as catalog:
        yield reference(Wiring(settings, catalog))


def test_it_has_every_operation_that_was_promised_and_no_other(document: dict[str, Any]) -> None:
    promised = {tuple(one.strip().split(" ")) for one in PROMISED.split(",")}
    assert {(method.upper(), path.removeprefix("/v1")) for path, method, _ in documented(document)} == promised


def test_every_operation_says_what_it_does_and_has_a_name_of_its_own(document: dict[str, Any]) -> None:
    found = [operation for _path, _method, operation in documented(document)]
    assert all(operation["description"] for operation in found)
    names = [operation["operationId"] for operation in found]
    assert len(set(names)) == len(names)


def test_every_operation_shows_an_example_of_what_is_sent_and_of_what_comes_back(document: dict[str, Any]) -> None:
    for path, method, operation in documented(document):
        where = f"{method} {path}"
        good = [response for status, response in operation["responses"].items() if status.startswith("2")]
        assert len(good) == 1, where
        for kind, media in good[0]["content"].items():
            assert "example" in media or kind == "text/markdown" or path == "/v1/policies/schema", f"{where}: {kind}"
        for kind, media in operation.get("requestBody", {}).get("content", {}).items():
            assert media.get("examples") or media.get("example"), f"{where}: {kind}"
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path":
                assert parameter.get("example") or parameter.get("schema", {}).get("examples"), f"{where}: {parameter}"


def test_every_example_is_what_it_is_an_example_of(document: dict[str, Any]) -> None:
    checked = 0
    for path, method, operation in documented(document):
        contents = [response.get("content", {}) for response in operation["responses"].values()]
        for content in (*contents, operation.get("requestBody", {}).get("content", {})):
            for media in content.values():
                values = [media["example"]] if "example" in media else []
                for value in (*values, *(one["value"] for one in media.get("examples", {}).values())):
                    validator = validator_for({**media["schema"], "components": document["components"]})
                    assert [error.message for error in validator.iter_errors(value)] == [], (path, method)
                    checked += 1
        assert checked, (path, method)
    assert checked > 300


def test_every_example_of_a_field_is_one_that_the_field_takes(document: dict[str, Any]) -> None:
    parameters = [one for _, _, operation in documented(document) for one in operation.get("parameters", ())]
    shapes = document["components"]["schemas"].values()
    fields = [field for shape in shapes for field in shape.get("properties", {}).values()]
    checked = 0
    for field in (*fields, *(one["schema"] for one in parameters)):
        for value in field.get("examples", ()):
            validator = validator_for({**field, "components": document["components"]})
            assert [error.message for error in validator.iter_errors(value)] == [], field
            checked += 1
    assert checked > 20


def test_every_example_of_a_request_is_understood(document: dict[str, Any], tmp_path: Path) -> None:
    """Not only of its shape: what it asks for is something that there is."""
    sent = 0
    restores = f"restore: {{gnupg_home: {tmp_path}, folders: [/srv/restored]}}\n"
    with rig(Office(tmp_path, servers={"shop-db1": "gold"}).write(extra=restores)) as running:
        admin = running.client("admin")
        for path, method, operation in documented(document):
            media = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            for one in media.get("examples", {}).values():
                address = path.format(server="shop-db1", id="20261121T020000Z-7f3a9c01")
                answer = admin.request(method, address, json=one["value"])
                assert answer.status_code != 422, (path, one, answer.text)
                sent += 1
    assert sent > 15


def test_problems_are_problems_and_nothing_of_the_framework(document: dict[str, Any]) -> None:
    for path, method, operation in documented(document):
        for status, response in operation["responses"].items():
            if int(status) >= 400:
                assert list(response["content"]) == ["application/problem+json"], (path, method, status)
    assert "HTTPValidationError" not in json.dumps(document)


def test_whatever_is_referred_to_is_there(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    names = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert names <= set(document["components"]["schemas"])

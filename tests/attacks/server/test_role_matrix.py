"""Every operation of the OpenAPI document, asked by everybody: nobody, the three roles, and the three roles of a token
that is for another server. What they ask about are things of ``db1`` that are really there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.openapi import operations
from backupd.model.access import Role
from tests.support.service.rig import Rig, rig
from tests.support.service.state import fill, number, two_servers
from tests.unit.api.test_roles import ADMIN, OPERATOR

IDS = {
    "backups": number("20261121T120000Z", 0),
    "jobs": number("20261101T020000Z", 0),
    "proofs": number("20261103T020000Z", 1),
    "restores": number("20261102T020000Z", 1),
    "alerts": number("20261104T020000Z", 0),
}
LASTS = "/v1/events"
ABOUT_NO_SERVER = {"/v1/whoami", "/v1/policies/schema", "/v1/policies/validate"}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    base: Path = tmp_path_factory.mktemp("matrix")
    with rig(two_servers(base), prepared=fill) as running:
        yield running


def asked(house: Rig) -> Iterator[tuple[str, str, str, dict[str, Any] | None]]:
    """Method, path, the address of something of ``db1``, and a body that names it."""
    document = house.client().get("/openapi.json").json()
    for path, method, operation in operations(document):
        if not path.startswith("/v1/") or path == LASTS:
            continue
        address = path.replace("{server}", "db1").replace("{name}", "gold")
        address = address.replace("{id}", IDS.get(path.split("/")[2], number("20261109T020000Z", 1)))
        body = next(
            (
                one["value"]
                for one in operation.get("requestBody", {})
                .get("content", {})
                .get("application/json", {})
                .get("examples", {})
                .values()
            ),
            None,
        )
        if method == "delete" and "{id}" not in path:
            address += "?server=db1"
        yield method.upper(), path, address, body and {**body, **({"server": "db1"} if "server" in body else {})}


def needed(method: str, path: str) -> Role:
    key = (method, path)
    return Role.OPERATOR if key in OPERATOR else Role.ADMIN if key in ADMIN else Role.VIEWER


def state(house: Rig) -> tuple[object, ...]:
    catalog = house.catalog
    return (
        catalog.jobs.list(),
        catalog.holds.all(),
        catalog.restores.list(),
        [(one.id, one.revoked_at) for one in catalog.tokens.list()],
        tuple(catalog.backups.every()),
        catalog.incidents.list(),
        len(house.reloads),
    )


def test_no_lower_role_does_anything_and_no_token_of_another_server_sees_anything(house: Rig) -> None:
    everybody: dict[str, tuple[Role | None, bool, httpx.Client]] = {"nobody": (None, False, house.client())}
    for one in Role:
        everybody[one] = one, False, house.client(one)
        everybody[f"{one} of db2"] = one, True, house.client(one, servers={"db2"})
    before = state(house)
    told: dict[str, set[int]] = {name: set() for name in everybody}
    for method, path, address, body in asked(house):
        for name, (role, elsewhere, client) in everybody.items():
            low = role is not None and role.rank < needed(method, path).rank
            if role is not None and not low and not elsewhere and method != "GET":
                continue  # it would be done; the routes' own tests do it
            answer = client.request(method, address, json=body)
            where = (name, method, address, answer.status_code, answer.text[:300])
            told[name].add(answer.status_code)
            if role is None:
                assert answer.status_code == 401, where
            elif low:
                assert answer.status_code in ((403, 404) if elsewhere else (403,)), where
            elif not elsewhere:
                assert answer.status_code not in (401, 403, 405, 500), where
            elif path not in ABOUT_NO_SERVER:
                assert answer.status_code in (403, 404) or (
                    method == "GET" and answer.status_code == 200 and '"db1"' not in answer.text
                ), where
    assert state(house) == before
    assert told["nobody"] == {401}
    assert told["admin of db2"] >= {200, 403, 404}

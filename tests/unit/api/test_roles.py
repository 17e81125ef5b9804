"""Every role and every operation: who may not is told so, and nothing happens."""

from __future__ import annotations

import re

import httpx
import pytest
from fastapi import APIRouter

from api.auth import operations_of, require_stated_roles
from backupd.model.access import Role
from tests.support.service.rig import Rig

OPERATOR = {
    ("POST", "/v1/backups"),
    ("POST", "/v1/restores"),
    ("POST", "/v1/servers/{server}/consistency"),
    ("POST", "/v1/test-restores"),
    ("POST", "/v1/verifications"),
    ("POST", "/v1/replications"),
    ("POST", "/v1/thaws"),
    ("POST", "/v1/jobs/{id}/cancel"),
    ("POST", "/v1/alerts/{id}/acknowledge"),
}
ADMIN = {
    ("POST", "/v1/servers/{server}/retention"),
    ("POST", "/v1/servers/{server}/accept"),
    ("DELETE", "/v1/backups/{id}"),
    ("POST", "/v1/backups/{id}/keep"),
    ("POST", "/v1/backups/{id}/unkeep"),
    ("POST", "/v1/backups/{id}/undelete"),
    ("POST", "/v1/holds"),
    ("DELETE", "/v1/holds"),
    ("POST", "/v1/pauses"),
    ("DELETE", "/v1/pauses"),
    ("GET", "/v1/tokens"),
    ("POST", "/v1/tokens"),
    ("DELETE", "/v1/tokens/{id}"),
    ("GET", "/v1/audit"),
    ("POST", "/v1/policies/reload"),
    ("POST", "/v1/alerts/test"),
}
VIEWER_MAY_POST = {("POST", "/v1/restores/plan"), ("POST", "/v1/policies/validate")}
_LASTS = "/v1/events"
_NOBODYS = "20261121T042512Z-0badcafe"


def _address(path: str) -> str:
    """Of one that is not there."""
    return re.sub(r"{[^}]*}", lambda found: "db1" if found[0] in ("{server}", "{name}") else _NOBODYS, path)


def _v1(house: Rig) -> list[tuple[str, str, Role | None]]:
    return [one for one in operations_of(house.app) if one[1].startswith("/v1/")]


def test_each_operation_asks_for_the_role_that_it_should(house: Rig) -> None:
    found = {(method, path): role for method, path, role in _v1(house)}
    assert {key for key, role in found.items() if role is None} == set()
    assert {key for key, role in found.items() if role is Role.OPERATOR} == OPERATOR
    wanted = {
        (method, re.sub(r"/{[^}]*}$", "", path) if path.startswith(("/v1/holds", "/v1/pauses")) else path)
        for (method, path), role in found.items()
        if role is Role.ADMIN
    }
    assert wanted == ADMIN
    rest = {key for key, role in found.items() if role is Role.VIEWER}
    assert {key for key in rest if key[0] != "GET"} == VIEWER_MAY_POST


def test_every_role_at_every_operation(house: Rig) -> None:
    clients: dict[Role | None, httpx.Client] = {role: house.client(role) for role in (None, *Role)}
    for method, path, wanted in _v1(house):
        if path == _LASTS:
            continue
        for role, client in clients.items():
            if role is not None and wanted is not None and role.rank >= wanted.rank and method != "GET":
                continue  # it would be done; the routes' own tests do it
            status = client.request(method, _address(path)).status_code
            if role is None:
                assert status == 401, (method, path)
            elif wanted is not None and role.rank < wanted.rank:
                assert status == 403, (method, path, role)
            else:
                assert status not in (401, 403, 405), (method, path, role)
                assert status < 500, (method, path, role, status)


def test_operations_that_a_role_may_not_do_leave_no_trace_but_in_the_audit(house: Rig) -> None:
    jobs, holds = house.catalog.jobs.list(), house.catalog.holds.all()
    for role in (Role.VIEWER, Role.OPERATOR):
        client = house.client(role)
        for method, path, wanted in _v1(house):
            if wanted is not None and role.rank < wanted.rank and method != "GET":
                assert client.request(method, _address(path), json={}).status_code == 403
    assert house.catalog.jobs.list() == jobs
    assert house.catalog.holds.all() == holds


def test_pages_let_nobody_in_who_is_not_known(house: Rig) -> None:
    browser = house.client()
    for method, path, role in operations_of(house.app):
        if not path.startswith("/v1/") and role is not None:
            answer = browser.request(method, _address(path), headers={"Accept": "text/html"})
            assert (answer.status_code, answer.headers.get("location", "")[:6]) == (303, "/login"), (method, path)


def test_only_these_are_for_anybody(house: Rig) -> None:
    found = {path for _method, path, role in operations_of(house.app) if role is None}
    assert found == {
        "/docs",
        "/openapi.json",
        "/static/{name}",
        "/login",
        "/healthz",
        "/readyz",
        "/healthz/servers/{server}",
        "/metrics",
    }


def test_a_route_that_says_nothing_of_who_may_use_it_keeps_the_program_from_starting() -> None:
    router = APIRouter()

    @router.get("/v1/forgotten")
    def forgotten() -> None:
        """Nobody thought of who may."""

    with pytest.raises(TypeError, match="/v1/forgotten"):
        require_stated_roles(router.routes)

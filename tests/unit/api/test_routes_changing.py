"""What can be asked for: done or queued as it says, refused in words, and in the audit."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.middleware import SEARCHES
from backupd.model.job import JobState
from tests.support.service.house import GOLD
from tests.support.service.rig import Rig, rig
from tests.support.service.state import fill, number, shapes, two_servers

QUEUED = number("20261101T020000Z", 0)
OVER = number("20261101T020000Z", 3)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    base: Path = tmp_path_factory.mktemp("changing")
    with rig(two_servers(base), prepared=fill) as running:
        yield running


@pytest.fixture(scope="module")
def operator(filled: Rig) -> httpx.Client:
    return filled.client("operator")


@pytest.fixture(scope="module")
def admin(filled: Rig) -> httpx.Client:
    return filled.client("admin")


def told(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The problem, which has words for a person."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = answer.json()
    assert found["message"]
    assert found["status"] == status
    return found


@pytest.mark.parametrize(
    ("path", "body", "kind", "arguments"),
    [
        ("/v1/backups", {"server": "db1", "kind": "full"}, "physical-full", {}),
        ("/v1/backups", {"server": "db1", "kind": "incremental"}, "physical-incremental", {}),
        ("/v1/verifications", {"server": "db2", "subset": 0.25}, "verify", {"subset": 0.25}),
        ("/v1/verifications", {"subset": 1}, "verify", {"subset": 1.0}),
    ],
)
def test_long_work_becomes_a_job_that_is_told_where_to_follow(
    filled: Rig,
    operator: httpx.Client,
    path: str,
    body: dict[str, Any],
    kind: str,
    arguments: dict[str, Any],
) -> None:
    answer = operator.post(path, json=body)
    assert answer.status_code == 202, answer.text
    job = answer.json()["job"]
    assert (job["kind"], job["state"], job["server"], job["arguments"]) == (
        kind,
        "queued",
        body.get("server", ""),
        arguments,
    )
    assert operator.get(answer.headers["location"]).json() == job
    (entry, *_) = filled.catalog.audit.list(limit=1)
    assert (entry.actor, entry.role, entry.subject) == (job["requested_by"], "operator", job["id"])


def test_copies_are_a_job_for_each_destination(operator: httpx.Client) -> None:
    answer = operator.post("/v1/replications", json={"server": "db1"})
    assert answer.status_code == 202
    shapes()["request_replication"].validate_python(answer.json())
    assert [job["arguments"] for job in answer.json()["jobs"]] == [{"destination": "local"}]


def test_retention_is_applied_by_a_job(admin: httpx.Client) -> None:
    assert admin.post("/v1/servers/db1/retention").json()["job"]["arguments"] == {}
    answer = admin.post("/v1/servers/db1/retention", json={"really": True})
    assert answer.json()["job"]["arguments"] == {"really": True}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/backups", {"server": "nobody", "kind": "full"}, 404),
        ("/v1/backups", {"server": "db1", "kind": "full", "tables": ["shop.*"]}, 422),
        ("/v1/backups", {"server": "db1", "kind": "logical", "set": "nothing"}, 404),
        ("/v1/replications", {"server": "db1", "destination": "moon"}, 404),
        ("/v1/thaws", {"server": "db1", "target": "yesterday"}, 422),
        ("/v1/restores", {"plan": "20261121T094300Z-5e6f7a8b"}, 404),
        ("/v1/restores/plan", {"server": "db1", "target": "tomorrow"}, 422),
        ("/v1/restores/plan", {"server": "db1", "target": "latest", "tables": ["a.b"]}, 422),
        ("/v1/restores", {"server": "db1", "target": "latest"}, 422),
        ("/v1/holds", {"server": "nobody", "reason": "x"}, 404),
        ("/v1/tokens", {"name": "x", "role": "viewer", "servers": ["nobody"]}, 404),
        ("/v1/tokens", {"name": "x", "role": "viewer", "expires_at": "2020-01-01T00:00:00Z"}, 422),
    ],
)
def test_what_cannot_be_done_is_told_at_once(admin: httpx.Client, path: str, body: dict[str, Any], status: int) -> None:
    before = admin.get("/v1/jobs").json()
    told(admin.post(path, json=body), status)
    assert admin.get("/v1/jobs").json() == before


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "7",
        "null",
        '"plan"',
        "{",
        "",
        '{"server": "db1", "kind": "full", "kinds": 1}',
        '{"server": 1, "kind": 1}',
        '{"server": "db1\\u0000", "kind": "full"}',
        '{"server": "\\ud800", "kind": "full"}',
        '{"kind": NaN}',
    ],
)
def test_a_body_of_another_shape_is_a_problem_of_the_request(admin: httpx.Client, body: str) -> None:
    for path in ("/v1/backups", "/v1/restores", "/v1/restores/plan", "/v1/tokens", "/v1/holds"):
        told(admin.post(path, content=body, headers={"Content-Type": "application/json"}), 422)


def test_everything_that_is_wrong_with_a_request_is_told_at_once(admin: httpx.Client) -> None:
    found = told(admin.post("/v1/backups", json={"kind": "fullest", "tables": "shop.*", "sets": 1}), 422)
    assert {error["field"] for error in found["errors"]} == {"server", "kind", "tables", "sets"}
    found = told(
        admin.post(
            "/v1/restores/plan",
            json={"server": "db1", "target": "tomorrow", "mode": "tables", "datadir": "/srv/x", "start": True},
        ),
        422,
    )
    assert all(word in found["detail"] for word in ("tomorrow", "datadir", "start", "no table"))


def test_a_job_that_waits_is_cancelled_and_one_that_is_over_is_not(filled: Rig, operator: httpx.Client) -> None:
    answer = operator.post(f"/v1/jobs/{QUEUED}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    assert filled.catalog.jobs.get(QUEUED).state is JobState.CANCELLED
    assert "it cannot be cancelled" in told(operator.post(f"/v1/jobs/{OVER}/cancel"), 409)["message"]
    told(operator.post("/v1/jobs/20991101T020000Z-00000000/cancel"), 404)


@pytest.mark.parametrize("what", ["holds", "pauses"])
def test_holds_and_pauses_are_set_listed_and_released(admin: httpx.Client, what: str) -> None:
    made = admin.post(f"/v1/{what}", json={"server": "db2", "reason": "audit until March"})
    assert made.status_code == 201, made.text
    shapes()[f"set_{what[:-1]}"].validate_python(made.json())
    assert "db2" in [hold["server"] for hold in admin.get(f"/v1/{what}").json()]
    gone = admin.delete(f"/v1/{what}", params={"server": "db2"})
    shapes()[f"release_{what[:-1]}"].validate_python(gone.json())
    assert "db2" not in [hold["server"] for hold in admin.get(f"/v1/{what}").json()]
    told(admin.post(f"/v1/{what}", json={"server": "db2", "reason": "two\nlines"}), 422)


def test_a_token_that_was_made_lets_in_until_it_is_revoked(filled: Rig, admin: httpx.Client) -> None:
    answer = admin.post(
        "/v1/tokens",
        json={"name": "grafana", "role": "viewer", "servers": ["db1"], "expires_at": "2099-01-01T00:00:00+01:00"},
    )
    assert answer.status_code == 201
    assert answer.headers["cache-control"] == "no-store"
    shapes()["make_token"].validate_python(answer.json())
    token, secret = answer.json(), answer.json()["token"]
    assert token["expires_at"] == "2098-12-31T23:00:00Z"
    theirs = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=filled.url, headers=theirs) as client:
        found = client.get("/v1/whoami").json()
        assert (found["name"], found["role"], found["servers"], found["token"]) == (
            "grafana",
            "viewer",
            ["db1"],
            token["id"],
        )
        assert admin.delete(f"/v1/tokens/{token['id']}").json()["revoked_at"]
        told(client.get("/v1/whoami"), 401)
    assert secret not in admin.get("/v1/audit").text + admin.get("/v1/tokens").text


def test_the_text_of_a_policy_is_validated_by_line_and_nothing_is_kept(filled: Rig) -> None:
    viewer = filled.client("viewer")

    def validated(**sent: Any) -> dict[str, Any]:
        answer = viewer.post("/v1/policies/validate", **sent)
        assert answer.status_code == 200, answer.text
        return dict(shapes()["validate_policy"].validate_python(answer.json()).model_dump())

    assert validated(json={"text": GOLD, "name": "gold"})["valid"]
    assert validated(content=GOLD, headers={"Content-Type": "text/yaml; charset=utf-8"})["valid"]
    found = validated(
        content="physical: {ful: 1}\ndestinations: {required: [moon]}\n", headers={"Content-Type": "text/yaml"}
    )
    assert not found["valid"]
    assert {problem["line"] for problem in found["problems"]} == {1, 2}
    told(viewer.post("/v1/policies/validate", content=b"\xff", headers={"Content-Type": "text/yaml"}), 422)
    told(viewer.post("/v1/policies/validate", json={"name": "gold"}), 422)
    assert [policy["name"] for policy in viewer.get("/v1/policies").json()] == ["gold"]


def test_a_reload_is_asked_for_and_stands_in_the_audit(filled: Rig, admin: httpx.Client) -> None:
    before = len(filled.reloads)
    assert admin.post("/v1/policies/reload").status_code == 202
    assert len(filled.reloads) == before + 1
    assert filled.catalog.audit.list(action="policies-reloaded", limit=1)


def test_an_alert_is_acknowledged_by_who_is_at_it(filled: Rig, operator: httpx.Client) -> None:
    incident = number("20261104T020000Z", 0)
    answer = operator.post(f"/v1/alerts/{incident}/acknowledge")
    shapes()["acknowledge_alert"].validate_python(answer.json())
    assert answer.json()["acknowledged_by"].startswith("operator")
    told(operator.post("/v1/alerts/20991104T020000Z-00000000/acknowledge"), 404)


def test_no_request_waits_for_a_mail_server(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        rig(
            tmp_path,
            extra=(
                f"alerts: {{email: {{smtp: 'smtp://127.0.0.1:{silent.getsockname()[1]}', from: a@example.com, "
                "to: [b@example.com]}}\n"
            ),
        ) as running,
    ):
        answer = running.client("admin").post("/v1/alerts/test")
        assert answer.status_code == 202
        assert [(one["state"], one["attempts"]) for one in answer.json()] == [("queued", 0)]
        silent.settimeout(0)
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_a_search_is_refused_while_others_take_all_the_turns(filled: Rig) -> None:
    viewer = filled.client("viewer")
    with SEARCHES.one("x"), SEARCHES.one("x"):
        found = told(viewer.get("/v1/servers/db1/binlog/search"), 429)
        assert "binary logs are searched" in found["message"]
    told(viewer.get("/v1/servers/db1/binlog/search"), 404)


def test_who_keeps_deletes_or_reads_a_backup_that_is_nowhere_is_told(admin: httpx.Client) -> None:
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/keep"),
        ("POST", "/unkeep"),
        ("POST", "/undelete"),
        ("GET", "/runbook"),
    ):
        told(admin.request(method, f"/v1/backups/20991104T020000Z-00000000{path}"), 404)

"""Everything that can be looked at: in the shape that the reference promises, page by page, and of one's own servers
alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

from api.routes.answers import part
from api.schemas.base import Moment, Whole
from backupd.app.views import overview
from tests.support.service.rig import Rig, rig
from tests.support.service.state import documented, fill, number, shapes, two_servers

JOB = number("20261101T020000Z", 2)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    base: Path = tmp_path_factory.mktemp("reading")
    with rig(two_servers(base), prepared=fill) as running:
        yield running


@pytest.fixture(scope="module")
def viewer(filled: Rig) -> httpx.Client:
    return filled.client("viewer")


def pages(client: httpx.Client, path: str, **query: Any) -> list[Any]:
    """All pages of a list, of one item each unless ``limit`` says otherwise, by the links alone."""
    found: list[Any] = []
    address: str | None = str(httpx.URL(path, params={"limit": 1, **query}))
    while address is not None:
        answer = client.get(address, headers={"Accept": "application/json"})
        assert answer.status_code == 200, answer.text
        found += answer.json()
        assert len(found) < 1000
        address = answer.links["next"]["url"] if "next" in answer.links else None
    return found


LISTS = {
    "/v1/jobs": 11,
    "/v1/backups": 6,
    "/v1/proofs": 3,
    "/v1/restores": 3,
    "/v1/events": 6,
    "/v1/alerts": 2,
    "/v1/messages": 3,
    "/v1/servers": 2,
    "/v1/destinations": 1,
    "/v1/thaws": 1,
    "/v1/policies": 1,
    "/v1/holds": 3,
    "/v1/pauses": 1,
}
OF_SERVERS = {
    "/v1/servers": "name",
    **dict.fromkeys(("/v1/jobs", "/v1/backups", "/v1/proofs", "/v1/restores", "/v1/events", "/v1/alerts"), "server"),
    "/v1/thaws": "job",
}
"""Lists that take labels, and by which key their items name a server."""
DATED = {
    "/v1/jobs": "queued_at",
    "/v1/backups": "finished_at",
    "/v1/proofs": "finished_at",
    "/v1/restores": "started_at",
    "/v1/events": "at",
    "/v1/alerts": "opened_at",
    "/v1/messages": "created_at",
    "/v1/audit": "at",
}


def lasting(found: list[Any]) -> list[Any]:
    """What does not change between two looks: of servers and destinations their names."""
    return [one.get("name", one) for one in found]


@pytest.fixture(scope="module", autouse=True)
def held(filled: Rig) -> None:
    admin = filled.client("admin")
    for path, server in (("holds", "*"), ("holds", "db1"), ("holds", "db2"), ("pauses", "db2")):
        assert admin.post(f"/v1/{path}", json={"server": server, "reason": "audit"}).status_code == 201


@pytest.mark.parametrize("path", LISTS)
def test_a_long_list_comes_in_pages_that_together_are_the_whole(viewer: httpx.Client, path: str) -> None:
    whole = viewer.get(path, params={"limit": 1000}, headers={"Accept": "application/json"})
    assert "link" not in whole.headers
    assert lasting(pages(viewer, path)) == lasting(whole.json()) == lasting(pages(viewer, path, limit=2))
    assert len(whole.json()) >= LISTS[path]


def test_what_is_called_as_somebody_liked_comes_in_pages_too() -> None:
    """Keys that no fingerprint is known of, and files that cannot be the name of a policy."""
    names = ["ops@example.com", "Ops Team", "", "x\u00e9 \udce9", "gold", "my policy"]
    found: list[str] = []
    asked = Whole(limit=1, after=None)
    for _ in names:
        scope = {"type": "http", "method": "GET", "path": "/v1/keys", "query_string": b"limit=1", "headers": []}
        answer = part(Request(scope), [_Named(name) for name in names], asked, lambda one: str(one.name))
        found += [name.encode().decode("unicode_escape") for name in json.loads(bytes(answer.body))]
        if "link" in answer.headers:
            query = httpx.URL(answer.headers["link"].partition(">")[0].removeprefix("<")).params
            asked = Whole(limit=1, after=query["after"])
    assert found == names


@dataclass
class _Named:
    name: str

    def as_json(self) -> str:
        return self.name.encode("unicode_escape").decode()


@pytest.mark.parametrize("value", ["0.5", "1700000000", " -3 ", "1e9", 0.5, 7, "2026-11-21T10:00:00", "x"])
def test_what_is_no_time_with_an_offset_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Moment).validate_python(value)


def test_a_time_in_any_zone_is_the_same_moment() -> None:
    found = TypeAdapter(Moment).validate_python("2026-11-21T10:00:00+01:00")
    assert found.isoformat() == "2026-11-21T09:00:00+00:00"


def test_the_lists_of_admins_come_in_pages_too(filled: Rig) -> None:
    admin = filled.client("admin")
    for name in ("one", "two", "three"):
        assert admin.post("/v1/tokens", json={"name": name, "role": "viewer"}).status_code == 201
    for path, name in (("/v1/tokens", "id"), ("/v1/audit", "number")):
        whole = [one[name] for one in admin.get(path, params={"limit": 1000}).json()]
        assert [one[name] for one in pages(admin, path)] == whole
        assert len(whole) >= 3


def test_what_filters_a_list_stands_in_the_address_of_the_next_page(viewer: httpx.Client) -> None:
    found = pages(viewer, "/v1/jobs", server="db1", kind="physical-full")
    assert len(found) > 1
    assert {(job["server"], job["kind"]) for job in found} == {("db1", "physical-full")}


@pytest.mark.parametrize("path", sorted(LISTS.keys() & OF_SERVERS.keys()))
def test_a_list_is_of_the_servers_with_all_labels_that_are_asked_for(viewer: httpx.Client, path: str) -> None:
    key, once = OF_SERVERS[path], {"Accept": "application/json"}  # events come as a stream that never ends, else

    def names(*labels: str) -> set[str]:
        found = [one[key] for one in pages(viewer, path, label=labels, limit=2)]
        return {one if isinstance(one, str) else one["server"] for one in found}

    of_each = {name for name in ("db1", "db2") if viewer.get(path, params={"server": name}, headers=once).json()}
    of_each = of_each if path != "/v1/servers" else {"db1", "db2"}
    assert names("env=prod") == of_each & {"db1"}
    assert names("env=test", "site=a") == of_each & {"db2"}
    assert names("site=a") == of_each, "nothing of no server, either"
    assert names("env=test", "env=prod") == set()
    answer = viewer.get(path, params={"label": "env=prd"}, headers=once)
    assert answer.status_code == 404
    assert "did you mean `env=prod`" in answer.json()["message"]
    assert viewer.get(path, params={"label": "env"}, headers=once).status_code == 422
    if path != "/v1/servers":
        assert viewer.get(path, params={"label": "env=prod", "server": "db1"}, headers=once).status_code == 422


def test_a_server_tells_its_labels(viewer: httpx.Client) -> None:
    assert viewer.get("/v1/servers/db1").json()["labels"] == {"env": "prod", "site": "a"}


def test_labels_of_servers_that_one_may_not_see_are_not_there(filled: Rig) -> None:
    some = filled.client("viewer", servers=["db2"])
    answer = some.get("/v1/servers", params={"label": "env=prod"})
    assert answer.status_code == 404
    assert "env=prod" not in answer.json()["message"].partition("known")[2]
    assert [one["name"] for one in some.get("/v1/servers", params={"label": "site=a"}).json()] == ["db2"]


def test_servers_of_one_status_are_found_some_at_a_time(viewer: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "FEW", 1)
    found = []
    for status in ("good", "warning", "bad"):
        names = [one["name"] for one in viewer.get("/v1/servers", params={"status": status}).json()]
        assert [one["name"] for one in pages(viewer, "/v1/servers", status=status)] == names
        found += names
    assert sorted(found) == ["db1", "db2"]
    assert viewer.get("/v1/servers?after=nobody").status_code == 422


def test_everything_that_can_be_read_looks_as_the_reference_says(filled: Rig) -> None:
    admin, known = filled.client("admin"), shapes()
    ids = {
        "/v1/jobs/{id}": JOB,
        "/v1/proofs/{id}": number("20261103T020000Z", 1),
        "/v1/restores/{id}": number("20261102T020000Z", 1),
    }
    # These need what lies at a destination:
    elsewhere = (
        "/v1/backups/{id}",
        "/v1/backups/{id}/runbook",
        "/v1/restores/{id}/runbook",
        "/v1/keys",
        "/v1/restores/plan/{id}",
        "/v1/jobs/{id}/log",
        "/v1/servers/{server}/binlog/search",
        "/v1/clusters/{server}",  # and this the nodes themselves
    )
    for path, method, operation in documented(filled.app.openapi()):
        if method == "get" and path not in elsewhere:
            address = path.format(server="db1", name="gold", id=ids.get(path, ""))
            answer = admin.get(address, headers={"Accept": "application/json"})
            assert answer.status_code == 200, f"{address}: {answer.text}"
            known[operation["operationId"]].validate_python(answer.json())


def test_who_sees_one_server_finds_nothing_of_another(filled: Rig) -> None:
    some = filled.client("viewer", servers=["db2"])
    assert some.get("/v1/messages").status_code == 403
    for path in (
        *(LISTS.keys() - {"/v1/messages", "/v1/policies"}),
        "/v1/servers",
        "/v1/holds",
        "/v1/destinations",
        "/v1/keys",
        "/v1/thaws",
    ):
        answer = some.get(path, headers={"Accept": "application/json"})
        assert answer.status_code == 200, f"{path}: {answer.text}"
        for one in answer.json():
            assert one.get("server", "db2") in ("db2", "*"), (path, one)
            assert one.get("name", "db2") == "db2", (path, one)
    assert [one["id"] for one in some.get("/v1/backups").json()] == [number("20261121T120000Z", 5)]
    for path in (
        "/v1/servers/db1",
        "/v1/servers/db1/timeline",
        "/v1/jobs?server=db1",
        "/v1/events?server=db1",
        f"/v1/jobs/{JOB}",
        f"/v1/jobs/{JOB}/log",
        f"/v1/backups/{number('20261121T120000Z', 0)}",
        f"/v1/events?job={JOB}",
        f"/v1/proofs/{number('20261103T020000Z', 1)}",
        f"/v1/restores/{number('20261102T020000Z', 1)}",
    ):
        answer = some.get(path)
        assert answer.status_code == 404, path
        assert answer.headers["content-type"] == "application/problem+json"


def test_an_admin_of_some_servers_is_none_of_the_others(filled: Rig) -> None:
    """Else a token for one server could make itself one for all."""
    some = filled.client("admin", servers=["db2"])
    assert some.post("/v1/tokens", json={"name": "more", "role": "admin"}).status_code == 403
    assert some.get("/v1/tokens").status_code == some.get("/v1/audit").status_code == 403
    assert some.post("/v1/policies/reload").status_code == 403
    assert some.post("/v1/holds", json={"server": "*", "reason": "x"}).status_code in (403, 404)
    assert some.post("/v1/holds", json={"server": "db1", "reason": "x"}).status_code == 404


@pytest.mark.parametrize(("path", "moment"), DATED.items())
def test_a_list_is_cut_to_a_span_of_time(filled: Rig, path: str, moment: str) -> None:
    admin = filled.client("admin")

    def told(**query: str) -> list[str]:
        answer = admin.get(path, params={"limit": 1000, **query}, headers={"Accept": "application/json"})
        assert answer.status_code == 200, answer.text
        return [one[moment] for one in answer.json()]

    times = sorted(set(told()))
    first, last = times[0], times[-1]
    assert told(since=first, until=last) == told()
    assert set(told(until=first)) == {first}
    assert set(told(since=last)) == {last}
    assert told(since="2999-01-01T00:00:00Z") == told(until="1999-01-01T00:00:00Z") == []
    assert admin.get(path, params={"since": "yesterday"}).status_code == 422


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/proofs", "outcome", "failed"),
        ("/v1/audit", "outcome", "refused"),
        ("/v1/audit", "outcome", "done"),
        ("/v1/events", "severity", "error"),
        ("/v1/events", "severity", "info"),
        ("/v1/alerts", "severity", "error"),
        ("/v1/servers", "status", "bad"),
    ],
)
def test_a_list_is_cut_to_what_ended_or_stands_so(filled: Rig, path: str, name: str, value: str) -> None:
    admin = filled.client("admin")
    assert filled.client("viewer").post("/v1/holds", json={}).status_code == 403  # something that was refused

    def told(**query: str) -> list[Any]:
        answer = admin.get(path, params={"limit": 1000, **query}, headers={"Accept": "application/json"})
        assert answer.status_code == 200, answer.text
        return [one[name] for one in answer.json()]

    expected = told().count(value)
    assert expected
    assert told(**{name: value}) == [value] * expected
    assert admin.get(path, params={name: "odd"}).status_code == 422


def test_no_address_passes_over_what_it_has_no_name_for(filled: Rig) -> None:
    admin, told = filled.client("admin"), 0
    for path, method, _operation in documented(filled.app.openapi()):
        if ("{" not in path and method == "get") or path == "/v1/servers/{server}/timeline":
            answer = admin.request(method, path.format(server="db1"), params={"nonsense": 1})
            assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "query.nonsense"), path
            told += 1
    assert told > 15
    assert filled.client("viewer").get("/v1/tokens?nonsense=1").status_code == 403  # who may is asked first
    assert admin.post("/v1/policies/reload?nonsense=1").status_code == 422
    assert filled.reloads == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=ten", "after=%00", "after=nothing", "servr=db1", "state=odd", "kind=odd"]
)
def test_a_filter_that_means_nothing_is_told_and_not_ignored(viewer: httpx.Client, query: str) -> None:
    answer = viewer.get(f"/v1/jobs?{query}")
    assert answer.status_code == 422
    assert answer.json()["type"].startswith("urn:backupd:problem:")


def test_the_end_of_a_job_s_log_can_be_had_alone(filled: Rig, viewer: httpx.Client) -> None:
    folder = filled.settings.spool / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    from backupd.app.context.logging_setup import job_log, say

    with job_log(filled.settings, JOB):
        for word in ("one", "two", "three"):
            say("told", word, job=JOB)
    whole = viewer.get(f"/v1/jobs/{JOB}/log").json()["log"]
    last = viewer.get(f"/v1/jobs/{JOB}/log", params={"tail": 1}).json()["log"]
    assert "one" in whole
    assert "three" in last
    assert "two" not in last


def test_what_is_done_at_an_address_is_told_whole(viewer: httpx.Client) -> None:
    for path, methods in (
        ("/v1/pauses", "DELETE, GET, POST"),
        ("/v1/policies/reload", "POST"),
        (f"/v1/backups/{number('20261121T120000Z', 0)}", "DELETE, GET"),
    ):
        answer = viewer.put(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)

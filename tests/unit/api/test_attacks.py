"""What somebody who means ill sends, by every door that the reference names."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from urllib.parse import quote

import httpx
import pytest

from api import middleware
from api.auth import operations_of
from backupd.app.context.logging_setup import JsonFormatter
from backupd.model.access import Role
from backupd.model.backup_record import HoldKind
from tests.support.service.rig import Rig

TRAVERSALS = (
    "../../../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "/etc/passwd",
    "....//....//etc/passwd",
    "..\\..\\etc",
    "%2e%2e%2f",
    "x\x00y",
    "\n",
    " ",
    "." * 300,
    "a" * 5000,
    "\udcff",
    "💥",
    "{}",
    "'; DROP TABLE audit; --",
    "<script>alert(1)</script>",
    "%00",
    "20261121T042512Z-0badcafe/../..",
    "-1",
    "*",
)
PASSWD = "root:"


def _clean(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    assert PASSWD not in answer.text
    assert "Traceback" not in answer.text
    assert "<script>alert" not in answer.text or answer.headers["content-type"].endswith("json")


def _filled(path: str, value: str) -> str:
    written = quote(value.encode("utf-8", "surrogateescape"), safe="")
    head, _, rest = path.partition("{")
    while rest:
        _name, _, rest = rest.partition("}")
        head += written
        more, _, rest = rest.partition("{")
        head += more
    return head


def _with_a_place(house: Rig) -> Iterator[tuple[str, str]]:
    for method, path, _role in operations_of(house.app):
        if "{" in path:
            yield method, path


def test_no_id_or_name_leads_out_of_its_place(house: Rig) -> None:
    client = house.client(Role.ADMIN)
    for number, (method, path) in enumerate(_with_a_place(house)):
        for value in (TRAVERSALS * 2)[number * 3 % len(TRAVERSALS) :][:3]:  # each route some, each of them somewhere
            answer = client.request(method, _filled(path, value))
            _clean(answer)
            assert answer.status_code in (303, 400, 403, 404, 405, 409, 422), (method, path, value, answer.status_code)


def test_no_question_leads_anywhere_either(house: Rig) -> None:
    client = house.client(Role.ADMIN)
    names = ("server", "after", "limit", "kind", "state", "q", "page", "next")
    for path in (
        "/v1/backups",
        "/v1/jobs",
        "/v1/proofs",
        "/v1/restores",
        "/v1/audit",
        "/v1/tokens",
        "/v1/alerts",
        "/v1/messages",
        "/jobs",
        "/proofs",
        "/",
        "/audit",
    ):
        for value in ("../../etc/passwd", "x\x00y", "9" * 400, "-1", "' OR 1=1 --", "<script>alert(1)</script>"):
            for asked in (
                {name: value for name in names if name not in ("limit", "page")},
                {"after": value},
                {"limit": value, "page": value},
            ):
                _clean(client.get(path, params=asked, headers={"Accept": "text/html, application/json"}))


def test_targets_of_restores_stay_within_the_folders_that_the_configuration_names(house: Rig) -> None:
    client = house.client(Role.OPERATOR)
    for datadir in ("/etc", "../../etc", "/", "relative", "/proc/self/root/etc", "x\x00y"):
        answer = client.post(
            "/v1/restores", json={"server": "db1", "target": "latest", "mode": "new-server", "datadir": datadir}
        )
        _clean(answer)
        assert answer.status_code in (403, 404, 409, 422), (datadir, answer.text)
    assert house.catalog.restores.list() == ()


def test_bodies_that_are_no_requests_are_422(house: Rig) -> None:
    client = house.client(Role.ADMIN)
    bodies = (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"server": {"a": 1}}',
        b"[" * 50000,
        b'{"a":' * 50000,
        b'{"server": ' + b"9" * 5000 + b"}",
        b'{"server": "db1", "unknown": 1}',
        b'{"server": "\\ud800"}',
    )
    for number, (method, path, _role) in enumerate(operations_of(house.app)):
        if method == "POST" and path.startswith("/v1/") and "reload" not in path and "/alerts/test" not in path:
            for body in (bodies * 2)[number * 3 % len(bodies) :][:4]:
                answer = client.post(
                    _filled(path, "20261121T042512Z-0badcafe"),
                    content=body,
                    headers={"Content-Type": "application/json"},
                )
                _clean(answer)


def test_a_yaml_bomb_is_a_problem_and_no_more(house: Rig) -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, name in zip("abcdefghi", "bcdefghij", strict=True)
    )
    client = house.client(Role.VIEWER)
    for text in (
        bomb,
        "{" * 100_000,
        "- " * 300_000,
        "a: !!python/object/apply:os.system ['true']\n",
        "&a [*a]\n",
        "x: \x00\n",
    ):
        answer = client.post("/v1/policies/validate", content=text.encode(), headers={"Content-Type": "text/yaml"})
        _clean(answer)
        assert answer.status_code in (200, 422)
        if answer.status_code == 200:
            assert answer.json()["valid"] is False


def test_a_request_that_is_nested_too_deeply_says_so(house: Rig) -> None:
    told = (
        house.client(Role.ADMIN)
        .post("/v1/holds", content=b"[" * 50000, headers={"Content-Type": "application/json"})
        .json()
    )
    assert (told["status"], told["detail"], "/docs" in told["hint"]) == (400, "it is nested too deeply", True)


@pytest.mark.parametrize("query", [{"since": "0001-01-01T00:00:00+14:00"}, {"until": "9999-12-31T23:59:59-14:00"}])
def test_a_moment_outside_of_the_calendar_is_refused(house: Rig, query: dict[str, str]) -> None:
    answer = house.client(Role.VIEWER).get("/v1/servers/db1/binlog/search", params=query)
    assert (answer.status_code, "outside" in answer.text) == (422, True)
    ((name, moment),) = query.items()
    inside = house.client(Role.VIEWER).get("/v1/servers/db1/binlog/search", params={name: moment[:19] + "Z"})
    assert inside.status_code == 404, "of this server nothing is archived"


def test_a_text_that_keeps_a_processor_busy_is_cut_short_and_few_are_looked_at_at_a_time(house: Rig) -> None:
    client = house.client(Role.VIEWER)

    def validated(text: str) -> httpx.Response:
        return client.post("/v1/policies/validate", content=text.encode(), headers={"Content-Type": "text/yaml"})

    problems = validated("".join(f"k{number}: 1\n" for number in range(90_000))).json()["problems"]
    assert ["64 KiB" in one["message"] for one in problems] == [True]
    for text in ("".join(f"k{number}: 1\n" for number in range(5000)), "<<: 1\n" * 5000):
        assert len(validated(text).json()["problems"]) < 250
    with middleware.CHECKS.one("this"), middleware.CHECKS.one("that"):
        refused = validated("a: 1\n")
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert client.get("/healthz").status_code == 200
    assert validated("a: 1\n").status_code == 200


def test_what_people_write_stays_one_line_of_the_log_and_of_the_audit(house: Rig) -> None:
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(JsonFormatter().format(record))

    handler = Kept()
    logging.getLogger("backupd").addHandler(handler)
    try:
        forged = 'why\n{"time": "x", "event": "audit", "message": "forged"}\r\n\x1b[2Jok'
        house.client(Role.ADMIN).post("/v1/holds", json={"server": "db1", "reason": forged})
        house.client(Role.VIEWER).post(f"/v1/backups/{quote(forged, safe='')}/keep")
    finally:
        logging.getLogger("backupd").removeHandler(handler)
    if house.catalog.holds.all():
        house.service.retention.release("db1", HoldKind.HOLD)
    assert lines
    for line in lines:
        assert len(line.splitlines()) == 1
        json.loads(line)
        assert "\x1b" not in line
    assert not any(json.loads(line)["message"] == "forged" for line in lines)
    assert house.catalog.audit.verify().problems == ()


def test_no_header_of_an_answer_can_be_written_by_who_asks(house: Rig) -> None:
    client = house.client(Role.VIEWER)
    for path in (
        "/jobs?next=%0d%0aSet-Cookie:%20a=b",
        "/v1/backups?limit=1&after=%0d%0aX-Evil:%201",
        "/login?next=https://evil.example",
        "/login?next=//evil.example",
        "/login?next=%0d%0aX-Evil:1",
    ):
        for answer in (client.get(path), house.client().get(path, headers={"Accept": "text/html"})):
            assert "x-evil" not in answer.headers
            assert "set-cookie" not in answer.headers
            assert not answer.headers.get("location", "/").startswith(("//", "http"))


@pytest.mark.parametrize("role", [Role.VIEWER, Role.OPERATOR, Role.ADMIN])
def test_nobody_makes_the_service_connect_somewhere_by_a_policy_or_a_request(house: Rig, role: Role) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.3)
        address = f"http://127.0.0.1:{trap.getsockname()[1]}/"
        client = house.client(role)
        policy = (
            f"physical: {{full: '0 2 * * *'}}\ndestinations: {{required: [{{type: s3, endpoint_url: '{address}', "
            f"bucket: b}}]}}\nalerts: {{channels: ['json://127.0.0.1:{trap.getsockname()[1]}'], "
            f"heartbeat: {{url: '{address}'}}}}\nhooks: {{before: [curl, '{address}']}}\n"
        )
        assert client.post(
            "/v1/policies/validate", content=policy, headers={"Content-Type": "text/yaml"}
        ).status_code in (200, 422)
        for path in ("/v1/backups", "/v1/restores", "/v1/restores/plan", "/v1/thaws", "/v1/replications"):
            client.post(
                path,
                json={
                    "server": address,
                    "target": address,
                    "place": address,
                    "source": address,
                    "into": address,
                    "destination": address,
                },
            )
        with pytest.raises(TimeoutError):
            trap.accept()


def test_methods_and_ways_of_asking_that_nobody_offers_are_refused(house: Rig) -> None:
    client = house.client(Role.ADMIN)
    for method in ("PUT", "PATCH", "TRACE", "CONNECT", "PROPFIND", "OPTIONS"):
        answer = client.request(method, "/v1/backups")
        assert answer.status_code in (400, 405, 501), method
    assert "access-control-allow-origin" not in client.get("/v1/backups", headers={"Origin": "https://evil"}).headers
    assert client.post("/v1/backups", json={}, headers={"X-HTTP-Method-Override": "GET"}).status_code == 422

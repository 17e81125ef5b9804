"""What load balancers, supervisors and Prometheus ask."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.site import WriteTrial
from backupd.catalog.backups import Absence, Absences
from backupd.model.access import Role
from backupd.model.errors import CatalogError
from tests.support.service.house import Office
from tests.support.service.rig import Rig, rig


def test_the_process_says_that_it_lives(house: Rig) -> None:
    answer = house.client().get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/healthz/servers/db1", "/healthz/servers/nobody"])
def test_load_balancers_ask_by_whatever_method_they_are_set_to(house: Rig, path: str) -> None:
    client = house.client()
    asked = client.get(path)
    options, head = client.options(path), client.head(path)
    assert (options.status_code, options.json()) == (asked.status_code, asked.json())
    assert (head.status_code, head.content) == (asked.status_code, b"")
    assert head.headers["content-length"] == str(len(asked.content))
    with socket.create_connection(("127.0.0.1", int(house.url.rpartition(":")[2]))) as haproxy:
        haproxy.sendall(f"OPTIONS {path} HTTP/1.0\r\n\r\n".encode())  # as `option httpchk` has it
        assert haproxy.makefile("rb").readline().split()[1] == str(asked.status_code).encode()
    refused = client.post(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, OPTIONS")


def test_it_is_ready_while_a_service_is_on_watch(house: Rig) -> None:
    answer = house.client().get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == [
        "no backupd service is running: scheduled jobs do not start (check `backupd serve`)"
    ]
    assert house.catalog.watch.take("a test")
    try:
        assert (house.client().get("/readyz").status_code, house.client().get("/readyz").json()) == (
            200,
            {"ready": True, "reasons": []},
        )
    finally:
        house.catalog.watch.leave()
    assert house.client().get("/readyz").status_code == 503


def test_a_catalog_that_does_not_answer_is_a_reason_and_the_process_still_lives(tmp_path: Path) -> None:
    with rig(tmp_path) as here:
        catalog = tmp_path / "catalog.db"
        here.catalog.close()
        catalog.rename(tmp_path / "away.db")
        catalog.mkdir()
        answer = here.client().get("/readyz")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert any("catalog" in reason for reason in answer.json()["reasons"])
        assert str(tmp_path) not in answer.text
        assert here.client().get("/healthz").status_code == 200
        catalog.rmdir()
        (tmp_path / "away.db").rename(catalog)


def test_a_catalog_that_can_only_be_read_is_not_ready(tmp_path: Path) -> None:
    with rig(tmp_path) as here:
        with contextlib.closing(sqlite3.connect(tmp_path / "catalog.db")) as beside:
            beside.execute("CREATE TRIGGER no BEFORE INSERT ON cursors BEGIN SELECT RAISE(ABORT, 'full'); END")
            reasons = here.client().get("/readyz").json()["reasons"]
            assert any("cannot be written" in reason for reason in reasons)
            beside.execute("DROP TRIGGER no")
        assert here.client().get("/readyz").json()["reasons"] == reasons, "it is not tried for each who asks"
        here.app.state.site.trial = WriteTrial()
        assert len(here.client().get("/readyz").json()["reasons"]) == len(reasons) - 1


def test_a_server_that_a_backup_took_out_of_rotation_is_told_to_the_load_balancer(house: Rig) -> None:
    client = house.client()
    assert client.get("/healthz/servers/db1").json() == {"server": "db1", "present": True, "reason": ""}
    house.catalog.absences.begin(Absence("db1", "20261121T120000Z-00000001", house.wiring.clock()))
    answer = client.get("/healthz/servers/db1")
    assert (answer.status_code, answer.json()["present"]) == (503, False)
    assert answer.json()["reason"]
    house.catalog.absences.end("db1", "20261121T120000Z-00000001")
    assert client.get("/healthz/servers/db1").status_code == 200
    assert client.get("/healthz/servers/nobody").status_code == 404
    assert client.get("/healthz/servers/a%20b").status_code == 422


def test_an_outage_of_the_catalog_takes_no_server_out_of_rotation_and_brings_none_back(
    house: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_self: object, _server: str) -> None:
        raise CatalogError("cannot reach postgresql://backupd@catalog/backupd")

    for away in (False, True):
        if away:
            house.catalog.absences.begin(Absence("db1", "20261121T120000Z-00000001", house.wiring.clock()))
            assert house.client().get("/healthz/servers/db1").status_code == 503
        with monkeypatch.context() as out:
            out.setattr(Absences, "of", fails)
            answer = house.client().get("/healthz/servers/db1")
            assert (answer.status_code, answer.json()["present"]) == ((503, False) if away else (200, True))
            assert "postgresql" not in answer.text
    unknown = house.client().get("/healthz/servers/nobody")
    assert unknown.status_code == 404
    assert "db1" not in unknown.text
    assert str(house.settings.file) not in unknown.text


def test_metrics_are_those_of_the_catalog(house: Rig) -> None:
    answer = house.client().get("/metrics")
    assert answer.status_code == 200, "only this host can connect"
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert [sample.labels for sample in found["backupd_server_recoverable"].samples] == [{"server": "db1"}]


@pytest.mark.parametrize(("metrics", "status"), [("auto", 200), ("open", 200), ("token", 401)])
def test_the_configuration_says_who_may_measure(tmp_path: Path, metrics: str, status: int) -> None:
    office = Office(tmp_path, {"db1": "gold", "db2": "gold"})
    with rig(office.write(extra=f"api: {{metrics: {metrics}}}\n")) as here:
        assert here.client().get("/metrics").status_code == status
        assert here.client(Role.VIEWER).get("/metrics").status_code == 200
        narrow = here.client(Role.VIEWER, servers={"db2"}).get("/metrics").text
        assert "db1" not in narrow
        assert "backupd_destination" not in narrow
        assert 'backupd_server_recoverable{server="db2"} 0.0' in narrow


def test_where_others_can_connect_metrics_need_a_token_by_default(tmp_path: Path) -> None:
    with rig(tmp_path, extra="api: {listen: '0.0.0.0:8642'}\n") as here:
        answer = here.client().get("/metrics")
        assert (answer.status_code, answer.headers["content-type"]) == (401, "application/problem+json")
        assert here.client(Role.VIEWER).get("/metrics").status_code == 200

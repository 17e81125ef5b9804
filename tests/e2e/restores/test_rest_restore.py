"""A night at the REST interface alone, beside a real service: a backup, a bad statement, the search for it, and the way
back: everything, everything right before it, one table beside the live one and one in its place.

The service is confined as its unit says, so all of this is done in a tree that is read-only but for the unit's folders.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from backupd.app.context.settings import load_settings
from backupd.model.job import JobState
from tests.e2e.restores.test_point_in_time import did, on, sums
from tests.support import sample
from tests.support.dice import SOAK
from tests.support.e2e.archived import Archive
from tests.support.e2e.house import BACKUPD, SERVER, House
from tests.support.e2e.installed import RESTORES, STATE, homes, install
from tests.support.e2e.service import ONCE_A_YEAR, serving, until
from tests.support.keys import Keys, stop_agent
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.server import SERVICE_USER, Server
from tests.support.service.rig import Rig, rig
from tests.support.service.serving import held_port
from tests.support.service.state import shapes
from tests.support.stores.folders import short_directory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

_OPEN = (JobState.QUEUED, JobState.WAITING, JobState.RUNNING)
LINES, ORDERS = "`shop`.`order_lines`", "`shop`.`orders`"


@dataclass
class Night:
    """``backup``: its id; ``then``: checksums when it was taken, ``before``: right before the bad statement, whose GTID
    is ``gtid``; ``under``: the words that the service is confined with."""

    house: House
    server: Server
    api: Rig
    backup: str
    then: dict[str, int]
    before: dict[str, int]
    gtid: str
    under: list[str]

    @property
    def folder(self) -> Path:
        return self.house.base / RESTORES

    def restored(self, client: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
        """Start it, follow it to its good end, and give it."""
        begun = client.post("/v1/restores", json=body)
        assert begun.status_code == 202, begun.text
        shapes()["start_restore"].validate_python(begun.json())
        told = follow(client, begun.json()["job"]["id"])
        assert told[-1]["state"] == "succeeded", told[-1]
        found: dict[str, Any] = read(client, f"/v1/restores/{begun.json()['restore']['id']}", "show_restore")
        return found


def follow(client: httpx.Client, job_id: str) -> list[dict[str, Any]]:
    """Everything that the events tell of a job until it is over."""
    found = []
    with client.stream(
        "GET", "/v1/events", params={"job": job_id}, headers={"Accept": "text/event-stream"}, timeout=120
    ) as answer:
        assert answer.status_code == 200
        name = ""
        for line in answer.iter_lines():
            name = line.removeprefix("event: ") if line.startswith("event: ") else name
            if name == "job" and line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                shapes()["show_job"].validate_python(found[-1])
                if found[-1]["state"] not in _OPEN:
                    return found
    raise AssertionError(f"the stream ended before the job did: {found}")


def read(client: httpx.Client, path: str, operation: str, **query: Any) -> Any:
    """What is there, in the shape that the reference promises."""
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    shapes()[operation].validate_python(answer.json())
    return answer.json()


def is_answered(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def night(keys: Keys) -> Iterator[Night]:
    with ExitStack() as stack:
        base = stack.enter_context(short_directory())
        server = stack.enter_context(PrivateServer())
        server.create_backup_users()
        server.execute(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost")
        sample.create(server)
        server.execute("SET GLOBAL event_scheduler = OFF", "DROP EVENT shop.forget_logs")
        port = stack.enter_context(held_port())
        house = House(base, server, keys, config_extra=f"api: {{listen: '127.0.0.1:{port}'}}\n")
        under = install(house, keys)
        stack.callback(stop_agent, homes(house)[0])  # what the archive below signs with, outside of the service
        (base / "policies" / "gold.yaml").write_text(f"{ONCE_A_YEAR}signed: true\n")
        api = stack.enter_context(rig(load_settings(house.config)))
        stack.enter_context(serving(house, under=under))
        api.url = f"http://127.0.0.1:{port}"  # that of the service; ours only makes tokens
        until(lambda: is_answered(api.url), lambda: "an answer of the service")
        client = api.client("operator")
        begun = client.post("/v1/backups", json={"server": SERVER, "kind": "full"})
        assert begun.status_code == 202, begun.text
        told = follow(client, begun.json()["job"]["id"])
        assert told[-1]["state"] == "succeeded", told[-1]
        then = sums(server)
        server.execute("UPDATE shop.order_lines SET amount = amount + 1")
        before = sums(server)
        gtid = did(server, "DELETE FROM shop.order_lines")
        Archive(house, server).take()
        yield Night(house, server, api, told[-1]["result"], then, before, gtid, under)


def test_what_was_backed_up_can_be_read_everywhere(night: Night) -> None:
    client = night.api.client("viewer")
    found = read(client, f"/v1/backups/{night.backup}", "show_backup")
    assert found["objects"] > 0
    assert [one["id"] for one in read(client, "/v1/backups", "list_backups")] == [night.backup]
    assert "gpg" in read(client, f"/v1/backups/{night.backup}/runbook", "show_runbook")["runbook"]
    timeline = read(client, f"/v1/servers/{SERVER}/timeline", "show_timeline")
    assert timeline["windows"][-1]["base"] == night.backup
    read(client, f"/v1/servers/{SERVER}/retention", "preview_retention")
    read(client, "/v1/servers", "list_servers")
    read(client, "/v1/keys", "list_keys")
    (job,) = read(client, "/v1/jobs", "list_jobs", kind="physical-full")
    assert "job-succeeded" in read(client, f"/v1/jobs/{job['id']}/log", "show_job_log")["log"]
    markdown = client.get(f"/v1/backups/{night.backup}/runbook", headers={"Accept": "text/markdown"})
    assert markdown.headers["content-type"].startswith("text/markdown")


def test_a_planned_restore_of_everything_ends_with_equal_checksums(night: Night) -> None:
    client = night.api.client("operator")
    wanted = {"server": SERVER, "target": f"backup:{night.backup}", "datadir": str(night.folder / "whole")}
    made = client.post("/v1/restores/plan", json=wanted)
    assert made.status_code == 201, made.text
    plan = made.json()
    shapes()["make_plan"].validate_python(plan)
    assert read(client, made.headers["location"], "show_plan") == plan
    assert (plan["backup"], plan["replay"]) == (night.backup, None)
    assert plan["bytes"] > 0 < plan["seconds"]
    restore = night.restored(client, {"plan": plan["id"]})
    assert (restore["state"], restore["backup"], restore["datadir"]) == ("succeeded", night.backup, wanted["datadir"])
    done = {phase["name"]: phase["state"] for phase in restore["phases"]}
    assert done["fetched"] == done["prepared"] == done["restored"] == "done"
    book = read(client, f"/v1/restores/{restore['id']}/runbook", "show_runbook_of_restore")["runbook"]
    assert night.backup in book
    with on(night.folder / "whole") as copy:
        assert sums(copy) == night.then


def test_the_bad_statement_is_found_and_everything_before_it_comes_back(night: Night) -> None:
    client = night.api.client("operator")
    (bad,) = read(
        client, f"/v1/servers/{SERVER}/binlog/search", "search_binlogs", table="shop.order_lines", kind="delete"
    )
    assert bad["gtid"] == night.gtid
    assert bad["changes"][0]["rows"] > 0
    restore = night.restored(
        client, {"server": SERVER, "target": bad["restore_before"], "datadir": str(night.folder / "before")}
    )
    done = {phase["name"]: phase["state"] for phase in restore["phases"]}
    assert done["rolled_forward"] == "done"
    with on(night.folder / "before") as copy:
        assert sums(copy) == night.before


@pytest.fixture
def wanted(night: Night) -> dict[str, Any]:
    return {
        "server": SERVER,
        "target": f"before-gtid:{night.gtid}",
        "mode": "tables",
        "tables": ["shop.order_lines"],
        "into": SERVER,
    }


def test_a_table_takes_the_place_of_the_live_one_when_its_server_is_named(night: Night, wanted: dict[str, Any]) -> None:
    client = night.api.client("operator")
    live = sums(night.server)
    plan = client.post("/v1/restores/plan", json=wanted).json()
    assert [goal["source"] for goal in plan["tables"]] == ["shop.order_lines"]
    for confirm in ({}, {"confirm": "another"}):
        refused = client.post("/v1/restores", json={"plan": plan["id"], **confirm})
        assert refused.status_code == 409, refused.text
        assert refused.json()["confirm"] == SERVER
    assert sums(night.server) == live
    night.restored(client, {"plan": plan["id"], "confirm": SERVER})
    replaced = sums(night.server)
    assert replaced[LINES] == night.before[LINES]
    assert replaced[ORDERS] == live[ORDERS]


@SOAK
def test_a_table_comes_back_beside_the_live_one(night: Night, wanted: dict[str, Any]) -> None:
    client = night.api.client("operator")
    live = sums(night.server)
    night.restored(client, {**wanted, "as": "*_found", "confirm": SERVER})
    after = sums(night.server)
    assert after.pop("`shop`.`order_lines_found`") == night.before[LINES]
    assert after == live
    night.server.execute("DROP TABLE shop.order_lines_found")


def test_operators_restore_beneath_the_configured_folders_only_and_never_over_data(night: Night) -> None:
    client = night.api.client("operator")
    wanted = {"server": SERVER, "target": "latest"}
    elsewhere = client.post("/v1/restores", json={**wanted, "datadir": str(night.house.base / "elsewhere")})
    assert elsewhere.status_code in (403, 409), elsewhere.text
    if night.under:
        admin = night.api.client("admin")
        (night.house.base / "etc").chmod(0o755)  # as /etc is: the server's user gets there, and the unit writes nothing
        wanted_there = {**wanted, "datadir": str(night.house.base / "etc" / "restored")}
        answered = admin.post("/v1/restores", json=wanted_there)
        assert (answered.status_code, "ReadWritePaths" in answered.json()["hint"]) == (409, True), answered.text
    full = night.folder / "full"
    full.mkdir(parents=True)
    (full / "precious").write_text("x")
    assert client.post("/v1/restores", json={**wanted, "datadir": str(full)}).status_code == 409
    link = night.folder / "link"
    link.symlink_to(night.house.base / STATE / "spool")
    assert client.post("/v1/restores", json={**wanted, "datadir": str(link / "x")}).status_code in (403, 409)
    assert (full / "precious").read_text() == "x"


def test_a_plan_that_would_come_out_differently_now_is_refused_with_the_new_one(night: Night) -> None:
    client = night.api.client("operator")
    plan = client.post(
        "/v1/restores/plan", json={"server": SERVER, "target": "latest", "datadir": str(night.folder / "later")}
    ).json()
    job = client.post("/v1/backups", json={"server": SERVER, "kind": "full"}).json()["job"]
    assert follow(client, job["id"])[-1]["state"] == "succeeded"
    refused = client.post("/v1/restores", json={"plan": plan["id"]})
    assert refused.status_code == 409, refused.text
    assert refused.json()["plan"]["chain"] != plan["chain"]
    assert not (night.folder / "later").exists()


def test_keys_that_nobody_can_write_to_sign_and_open_what_is_stored(night: Night) -> None:
    if not night.under:
        pytest.skip("bubblewrap cannot be used on this machine: the service was not confined")
    public, secret = homes(night.house)
    stop_agent(public)
    done = subprocess.run(
        [*night.under, BACKUPD, "keys", "challenge"],
        env=night.house.environment(),
        text=True,
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert "proved" in done.stdout, done.stdout + done.stderr
    assert list(night.house.repository.rglob("manifest.json.sig"))
    assert [path for home in (public, secret) for path in home.glob("S.*")] == []


@SOAK
def test_a_test_restore_that_was_asked_for_gives_a_proof(night: Night) -> None:
    client = night.api.client("operator")
    job = client.post("/v1/test-restores", json={"server": SERVER, "target": f"backup:{night.backup}"}).json()["job"]
    told = follow(client, job["id"])[-1]
    assert told["state"] == "succeeded", told
    proof = read(client, f"/v1/proofs/{told['result']}", "show_proof")
    assert (proof["outcome"], proof["backup"]) == ("proved", night.backup)
    assert [one["id"] for one in read(client, "/v1/proofs", "list_proofs", backup=night.backup)] == [proof["id"]]

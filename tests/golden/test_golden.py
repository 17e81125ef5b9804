"""Documents that others rely on, word for word: every `--json` of the command line, every answer of the REST interface,
its OpenAPI document, and the tree of `--help`.

They change on purpose only: BACKUPD_GOLDEN=write python -m pytest tests/golden writes them anew, and the difference
belongs to what is reviewed.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from api.openapi import operations
from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.app.service.facade import Service
from backupd.catalog.session import open_catalog
from backupd.cli import session
from backupd.cli.main import app, main
from tests.golden.scene import NOW, countable, frozen, pretty, staged, told
from tests.support.service.fake import FakeService
from tests.support.service.house import Clock
from tests.support.service.rig import rig
from tests.support.service.stage import CRM, LEGACY, SHOP, Stage, settings_of
from tests.support.service.state import fill_work, number, reference

FOLDER = Path(__file__).with_name("documents")
_PROGRESS = re.compile(r"^[a-z -]+: (\d+ %|binary logs of ).*\n", re.MULTILINE)
"""How much of it is told depends on the machine."""
WRITES = os.environ.get("BACKUPD_GOLDEN") == "write"


def compare(name: str, found: Mapping[str, str]) -> None:
    """``found``: text by the name of its file below the folder ``name``."""
    folder = FOLDER / name
    if WRITES:
        for old in folder.glob("*"):
            old.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in found.items():
            (folder / file).write_text(text.rstrip("\n") + "\n")
    kept = {path.name: path.read_text() for path in folder.iterdir()}
    differences = [
        line
        for file in sorted({*kept, *found})
        for line in difflib.unified_diff(
            kept.get(file, "").splitlines(),
            found.get(file, "").rstrip("\n").splitlines(),
            f"{name}/{file}",
            f"{name}/{file} now",
            lineterm="",
            n=1,
        )
    ]
    assert not differences, "\n".join(differences[:200])


# The command line over a real catalog; what reads stored data or a server is answered by the stand-in below.
COMMANDS = (
    "backups",
    f"backups list {CRM}",
    "backups show {shop}",
    "backups show nothing",
    "status",
    f"status {CRM}",
    "proofs",
    f"proofs {SHOP} --outcome proved --limit 1",
    "proofs show {proof}",
    f"timeline {SHOP}",
    f"timeline {LEGACY}",
    f"retention {SHOP}",
    f"retention {CRM}",
    "jobs",
    "jobs list --state failed",
    "jobs show {failed}",
    "jobs show {running}",
    "jobs show {queued}",
    "jobs log {failed}",
    "hosts",
    "binlog status",
    f"binlog status {SHOP}",
    "alerts",
    "alerts list --all",
    "alerts messages",
    "audit",
    "audit --verify",
    "token list",
    "policy validate policies/gold.yaml policies/silver.yaml",
    "policy schema",
    "policy example",
    "fsck",
    "verify",
    f"replicate {SHOP}",
    "thaw",
    "runbook {shop}",
    "catalog upgrade",
    "hold nothing",
    "token create --role viewer --name grafana",
    "token revoke grafana",
    "backups keep {crm}",
    "backups keep {crm} --release",
    "backups delete {legacy}",
    "backups delete {crm}",
    "backups undelete {crm}",
    f"hold {CRM} --reason audit",
    f"hold {CRM} --release",
    f"pause {CRM} --reason moving",
    f"resume {CRM}",
    "jobs cancel {queued}",
    "jobs cancel {running}",
    "jobs cancel {failed}",
    "alerts acknowledge {incident}",
    "alerts test",
)
STORED = (
    "catalog rebuild --from local --into-existing",
    "backups",
    "backups show {full}",
    "backups show {increment}",
    "backups show {logical}",
    "backups config {full}",
    "runbook {increment}",
    f"timeline {SHOP}",
    "fsck",
    "verify",
    f"plan {SHOP} --to backup:{{increment}}",
    f"plan {SHOP} --to latest --accept-older",
    f"plan {SHOP} --to {{moment}}",
    f"plan {SHOP} --to backup:{{full}} --tables shop.*",
    f"binlog search {SHOP} --table shop.*",
    "binlog status",
    f"retention {SHOP}",
    "keys list",
    "thaw",
    "bring-back local --since 2026-11-01T00:00:00Z",
)
IMAGINED = (
    f"backup {SHOP}",
    f"plan {SHOP} --to latest",
    f"test-restore {SHOP}",
    f"check {SHOP}",
    f"restore {SHOP} --to latest --datadir /srv/restored --start",
)


def called(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(words)
    out, err = capsys.readouterr()
    document = json.loads(out) if out.strip() else None
    return {"command": " ".join(words), "exit": code, "document": document, "stderr": _PROGRESS.sub("", err)}


def file_of(command: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", command.lower()).strip("-") + ".json"


def at(service: Service, monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    """Let commands find that one, in the folder of its configuration."""

    @contextmanager
    def opened(
        _path: Path, _held: Path | None = None, _opening: str = "", *, new_catalog: bool = False
    ) -> Iterator[Service]:
        del new_catalog
        yield service

    monkeypatch.setattr(session, "open_service", opened)
    monkeypatch.setenv("BACKUPD_CONFIG", str(base / "backupd.yaml"))
    monkeypatch.chdir(base)


def test_the_documents_of_the_command_line_are_those_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    countable(monkeypatch)
    found: dict[str, str] = {}
    with staged(tmp_path) as (_settings, service, stage):
        at(service, monkeypatch, tmp_path)
        for command in COMMANDS:
            words = [word.format(**stage.ids) for word in command.split()]
            found[file_of(command)] = told(pretty(called([*words, "--json"], capsys)), tmp_path)
    compare("cli", found)


def test_the_documents_of_stored_data_are_those_that_are_kept(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    countable(monkeypatch)
    found: dict[str, str] = {}
    with frozen(short_tmp) as (settings, service, facts, after):
        at(service, monkeypatch, short_tmp)
        for command in STORED:
            words = command.format(**facts).split()
            found[file_of(command)] = told(pretty(called([*words, "--json"], capsys)), short_tmp)
        with rig(settings, clock=Clock(after)) as running:
            client = running.client("admin")
            for name, (path, body) in {
                "backup": (f"/v1/backups/{facts['increment']}", None),
                "runbook": (f"/v1/backups/{facts['increment']}/runbook", None),
                "search": (f"/v1/servers/{SHOP}/binlog/search?table=shop.*", None),
                "keys": ("/v1/keys", None),
                "plan": (
                    "/v1/restores/plan",
                    {"server": SHOP, "target": facts["moment"], "datadir": str(short_tmp / "restored")},
                ),
                "restore": (
                    "/v1/restores",
                    {"server": SHOP, "target": f"backup:{facts['full']}", "datadir": str(short_tmp / "restored")},
                ),
            }.items():
                answer = client.get(path) if body is None else client.post(path, json=body)
                found[f"rest-{name}.json"] = answered(answer, short_tmp)
    compare("stored", found)


def test_the_documents_of_work_on_a_server_are_those_that_are_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "open_service", FakeService().open)
    compare(
        "work",
        {file_of(command): told(pretty(called([*command.split(), "--json"], capsys)), FOLDER) for command in IMAGINED},
    )


def test_the_answers_of_the_rest_interface_are_those_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    countable(monkeypatch)
    stages: list[Stage] = []
    found: dict[str, str] = {}

    def filled(wiring: Wiring) -> None:
        stages.append(Stage(wiring).set().mount())
        fill_work(wiring, CRM)

    with rig(settings_of(tmp_path), clock=Clock(NOW), prepared=filled) as running:
        client, ids = running.client("admin"), stages[0].ids
        looked_at(client)
        document = client.get("/openapi.json").json()
        for path, method, operation in operations(document):
            if method == "get" and path.startswith("/v1/"):
                address, query = addressed(path, ids)
                answer = client.get(address, params=query, headers={"Accept": "application/json"})
                found[f"{operation['operationId']}.json"] = answered(answer, tmp_path)
        for name, method, path, body in changes(ids):
            found[f"{name}.json"] = answered(client.request(method, path, json=body), tmp_path)
    compare("rest", found)


def looked_at(client: httpx.Client) -> None:
    """Wait until every destination was looked at."""
    deadline = time.monotonic() + 300
    while any(one["reachable"] is None for one in client.get("/v1/destinations").json()):
        assert time.monotonic() < deadline, "a destination was never looked at"
        time.sleep(0.05)


def addressed(path: str, ids: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """A GET of something that is there."""
    kind = path.split("/")[2]
    known = {"backups": "shop", "jobs": "failed", "proofs": "proof", "restores": "archived"}
    one = number("20261102T020000Z", 0) if kind == "restores" and "plan" not in path else ids[known.get(kind, "shop")]
    address = path.format(server=SHOP, name="gold", id=one)
    return address, {"table": "shop.orders"} if path.endswith("/search") else {}


def changes(ids: Mapping[str, str]) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Name, method, path and body of what is asked for, in this order."""
    whole = {"server": SHOP, "target": "latest", "datadir": "/srv/restored"}
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/v1/backups", {"server": SHOP, "kind": "full"}),
        ("POST", "/v1/backups", {"server": "nobody", "kind": "full"}),
        ("POST", "/v1/verifications", {"server": SHOP}),
        ("POST", "/v1/replications", {"server": SHOP, "destination": "offsite"}),
        ("POST", "/v1/test-restores", {"server": CRM, "target": "latest"}),
        ("POST", "/v1/restores/plan", whole),
        ("POST", "/v1/restores", whole),
        ("POST", "/v1/restores", {"plan": ids["nowhere"]}),
        ("POST", "/v1/restores", {**whole, "mode": "tables", "tables": ["shop.orders"], "into": SHOP}),
        ("POST", "/v1/thaws", {"server": SHOP, "target": "latest"}),
        ("POST", f"/v1/backups/{ids['crm']}/keep", {}),
        ("POST", f"/v1/backups/{ids['crm']}/unkeep", {}),
        ("DELETE", f"/v1/backups/{ids['legacy']}", {}),
        ("POST", f"/v1/backups/{ids['crm']}/undelete", {}),
        ("POST", f"/v1/servers/{CRM}/retention", {}),
        ("POST", f"/v1/servers/{CRM}/accept", {}),
        ("POST", f"/v1/jobs/{ids['queued']}/cancel", {}),
        ("POST", f"/v1/jobs/{ids['failed']}/cancel", {}),
        ("POST", "/v1/policies/validate", {"text": "physical: {full: '0 25 * * *'}"}),
        ("POST", "/v1/policies/reload", {}),
        ("POST", f"/v1/alerts/{ids['incident']}/acknowledge", {}),
        ("POST", "/v1/alerts/test", {}),
        ("POST", "/v1/holds", {"server": CRM, "reason": "audit"}),
        ("DELETE", f"/v1/holds?server={CRM}", {}),
        ("POST", "/v1/pauses", {"server": CRM, "reason": "moving"}),
        ("DELETE", f"/v1/pauses?server={CRM}", {}),
        ("POST", "/v1/tokens", {"name": "grafana", "role": "viewer"}),
        ("DELETE", "/v1/tokens/nothing", {}),
    ]
    names = {value: f"<{name}>" for name, value in ids.items()}
    found = []
    for count, (method, path, body) in enumerate(asked, 1):
        plain = path.removeprefix("/v1/")
        for value, name in names.items():
            plain = plain.replace(value, name)
        words = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
        found.append((f"{count:02}-{method.lower()}-{words}", method, path, body))
    return found


def answered(answer: httpx.Response, base: Path) -> str:
    body = answer.json() if "json" in answer.headers["content-type"] else answer.text
    return told(
        pretty(
            {
                "request": f"{answer.request.method} {answer.request.url.raw_path.decode()}",
                "sent": json.loads(answer.request.content or b"null"),
                "status": answer.status_code,
                "location": answer.headers.get("location"),
                "body": body,
            }
        ),
        base,
    )


def test_the_openapi_document_is_the_one_that_is_kept(tmp_path: Path) -> None:
    with open_catalog(settings_of(tmp_path).catalog) as catalog:
        wiring = Wiring(load_settings(tmp_path / "backupd.yaml"), catalog)
        compare("openapi", {"openapi.json": pretty(reference(wiring))})


def test_the_help_of_every_command_is_the_one_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    compare("help", {"help.txt": "\n".join(helps(typer.main.get_command(app), "backupd", None))})


def helps(command: Any, name: str, above: typer.Context | None) -> Iterator[str]:
    """Of the command and all below it, hidden ones, too."""
    context = typer.Context(command, info_name=name, parent=above, terminal_width=100, max_content_width=100)
    yield f"==== {context.command_path}\n{command.get_help(context)}\n"
    for below, one in getattr(command, "commands", {}).items():
        yield from helps(one, below, context)

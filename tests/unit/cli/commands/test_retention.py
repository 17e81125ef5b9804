"""What retention, hold, pause and resume say, and when they refuse to be understood."""

from __future__ import annotations

import json
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import pytest

from backupd.app.retention.decisions import solve
from backupd.app.retention.holds import Held, Paused
from backupd.app.retention.retention import Applied
from backupd.app.retention.rules import Decisions
from backupd.catalog.session import open_catalog
from backupd.cli.main import main
from backupd.model.backup_record import Hold, HoldKind
from backupd.model.job import Report
from tests.support.catalog.histories import NOW, rules, stored, view
from tests.support.service.fake import FakeService
from tests.support.service.house import Office

HOLD = Hold("shop-db1", HoldKind.HOLD, "audit until March", "anna", NOW)


def decided() -> Decisions:
    backups = [stored(f"b{number}", NOW - timedelta(days=number + 1)) for number in range(3)]
    return solve(view(backups), rules(keep_fulls=2), now=NOW, zone=UTC)


@pytest.fixture
def asked(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the commands asked of the service, which answers from memory."""
    calls: list[Any] = []

    def apply_retention(server: str, report: Report, *, really: bool) -> Applied:
        calls.append(("apply", server, really))
        return Applied((decided(),), marked={"local": ("b2",)}, held=("b1 of shop-db1: a restore is reading it",))

    def pause(server: str, reason: str, *, stop_running: bool) -> Paused:
        calls.append(("pause", server, reason, stop_running))
        return Paused(HOLD, ("job-1",), ("job-2: the catalog is locked",) if reason == "trouble" else ())

    def hold(server: str, reason: str) -> Held:
        calls.append(("hold", server, reason))
        return Held(HOLD, ("offsite: it is not mounted",) if server == "*" else ())

    def release(server: str, kind: HoldKind) -> tuple[str, ...]:
        calls.append(("release", server, str(kind)))
        return ()

    for name, method in {
        "preview": lambda server: (decided(),),
        "apply_retention": apply_retention,
        "pause": pause,
        "hold": hold,
        "holds": lambda: (HOLD,),
        "release": release,
    }.items():
        monkeypatch.setattr(service, name, method, raising=False)
    return calls


def test_a_dry_run_is_the_default_and_says_how_to_go_on(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retention", "shop-db1"]) == 0
    shown = capsys.readouterr().out
    assert "2 stay, 1 would expire" in shown
    assert "keep_fulls 2: there are 2 newer full ones" in shown
    assert "backupd retention shop-db1 --apply" in shown
    assert asked == []


def test_applying_tells_what_was_held_back(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retention", "shop-db1", "--apply", "--really"]) == 0
    assert "not removed yet: b1 of shop-db1: a restore is reading it" in capsys.readouterr().out
    assert asked == [("apply", "shop-db1", True)]


def test_the_document_has_what_is_promised(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retention", "shop-db1", "--apply", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"server", "applied", "destinations", "marked", "held", "binlogs"}
    (one,) = document["destinations"]
    assert set(one) == {
        "server",
        "destination",
        "at",
        "hold",
        "keep",
        "expire",
        "bytes_expire",
        "note",
        "backups",
        "binlogs",
        "recoverable",
        "stopped",
        "warnings",
    }
    assert set(one["backups"][0]) == {
        "id",
        "kind",
        "parent",
        "finished_at",
        "bytes",
        "marked",
        "keep",
        "rules",
        "reasons",
    }


def test_a_hold_is_set_released_and_listed(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hold", "shop-db1", "--reason", "audit"]) == 0
    assert main(["hold", "--all", "--release"]) == 0
    assert main(["hold"]) == 0
    assert asked == [("hold", "shop-db1", "audit"), ("release", "*", "hold")]
    shown = capsys.readouterr().out
    assert "every server is released" in shown
    assert "audit until March" in shown
    assert main(["hold", "--all", "--reason", "fire"]) == 0
    assert "NOT recorded at offsite" in capsys.readouterr().out


def test_the_kill_switch_names_each_job_and_fails_where_one_was_not_reached(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pause", "--all", "--reason", "fire", "--stop-running"]) == 0
    assert asked == [("pause", "*", "fire", True)]
    assert "asked to stop: job job-1" in capsys.readouterr().out
    assert main(["pause", "shop-db1", "--reason", "trouble", "--stop-running"]) == 1
    assert "NOT asked to stop: job job-2" in capsys.readouterr().out
    assert main(["resume", "shop-db1"]) == 0
    assert asked[-1] == ("release", "shop-db1", "pause")


@pytest.mark.parametrize(
    "argv",
    [
        ["pause", "--reason", "x"],
        ["resume"],
        ["resume", "shop-db1", "--all"],
        ["hold", "--release"],
        ["hold", "--reason", "x"],
        ["retention", "shop-db1", "--really"],
        ["retention"],
    ],
)
def test_what_is_not_clear_is_wrong_usage(asked: list[Any], argv: list[str]) -> None:
    assert main(argv) == 2
    assert asked == []


def test_a_server_that_nobody_knows_is_wrong_usage_and_makes_no_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    office = Office(tmp_path)
    settings = office.write()
    open_catalog(settings.catalog).close()
    for words in (
        ["retention", "db11"],
        ["retention", "db11", "--apply"],
        ["jobs", "list", "db11"],
        ["thaw", "db11"],
        ["backup", "db11"],
        ["timeline", "db11"],
        ["server", "accept", "db11"],
        ["replicate", "db11"],
    ):
        assert main([*words, "--config", str(office.file)]) == 2, words
        assert "did you mean `db1`?" in capsys.readouterr().err
    with open_catalog(settings.catalog) as catalog:
        assert catalog.jobs.list() == ()

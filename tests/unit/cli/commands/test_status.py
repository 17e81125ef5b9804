"""``status``, ``proofs``, ``reload`` and ``backup --all``: what people see, over a real catalog or a stand-in."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from backupd.app.context.wiring import Wiring, owner
from backupd.app.service.facade import Service
from backupd.app.service.reload import reload
from backupd.app.views.server_status import LastProof, Reason, ServerOverview, Status
from backupd.catalog.session import open_catalog
from backupd.cli import session
from backupd.cli.commands.status import show_status
from backupd.cli.main import main
from backupd.cli.output import Screen
from backupd.model.backup_record import BackupKind
from backupd.model.errors import BackupdError, RefusedError
from backupd.model.event import Event, Severity
from tests.support.service.fake import FakeService, record
from tests.support.service.house import Clock
from tests.support.service.stage import CRM, LEGACY, SHOP, Stage, settings_of

NOW = datetime(2026, 11, 21, 14, 30, tzinfo=UTC)


@pytest.fixture
def wiring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wiring]:
    settings = settings_of(tmp_path)
    monkeypatch.setattr("backupd.app.views.standings.BUDGET", 3600.0)  # a slow machine looks at every server, too
    with open_catalog(settings.catalog) as catalog:
        found = Wiring(settings, catalog, Clock(NOW))

        @contextmanager
        def opened(*_: object, **__: object) -> Iterator[Service]:
            yield Service(found, "")

        monkeypatch.setattr(session, "open_service", opened)
        yield found


def test_every_server_has_one_line_and_the_worst_is_first(
    wiring: Wiring, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Stage(wiring).set()
    monkeypatch.setenv("COLUMNS", "120")
    code = main(["status", "--json"])
    servers = json.loads(capsys.readouterr().out)
    ranks = [["good", "warning", "bad"].index(one["status"]) for one in servers]
    assert ranks == sorted(ranks, reverse=True)
    assert code == int(ranks[0] == 2)
    assert main(["status"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 servers: ")
    assert [line.split()[1] for line in lines[2:5]] == [one["name"] for one in servers]
    assert {one["name"] for one in servers} == {SHOP, CRM, LEGACY}
    assert max(map(len, lines)) <= 120


def test_of_one_server_every_reason_is_shown_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    now = datetime(2026, 11, 22, 3, tzinfo=UTC)
    proof = LastProof("p", "b", "proved", now, 3, proved_at=now - timedelta(hours=30))
    reasons = (Reason(Status.BAD, "nothing can be recovered", "backupd backup s"), Reason(Status.WARNING, "a gap"))
    one = ServerOverview("s", "gold", Status.BAD, reasons, last_proof=proof)
    show_status(Screen(as_json=False), [one], now)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["1", "server:", "1", "bad"],
        ["STATUS", "SERVER", "RECOVERABLE", "TO", "LAST", "BACKUP", "PROVED", "JOBS", "WHY"],
        ["BAD", "s", "nothing", "never", "30h", "ago", "nothing", "can", "be", "recovered", "(+1)"],
        ["BAD:", "nothing", "can", "be", "recovered"],
        ["->", "backupd", "backup", "s"],
        ["warn:", "a", "gap"],
    ]


def test_forty_servers_are_forty_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = (Reason(Status.WARNING, "no protected backup for two days: too few verified copies at the destinations"),)
    show_status(
        Screen(as_json=False), [ServerOverview(f"shop-db{n}", "gold", Status.WARNING, long) for n in range(40)], NOW
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 43
    assert lines[-2].endswith("…")


def test_proofs_are_listed_and_shown(wiring: Wiring, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["proofs"]) == 0
    assert capsys.readouterr().out == "no proofs: nothing was restored as a test yet\n"
    Stage(wiring).set()
    assert main(["proofs", SHOP, "--outcome", "proved", "--json"]) == 0
    proofs = json.loads(capsys.readouterr().out)
    assert {(one["server"], one["outcome"]) for one in proofs} == {(SHOP, "proved")}
    assert main(["proofs", "--backup", proofs[0]["backup"], "--limit", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:3] == [proofs[0]["id"], SHOP, "proved"]
    assert "--limit" in err or len([one for one in proofs if one["backup"] == proofs[0]["backup"]]) == 1
    assert main(["proofs", "show", proofs[0]["id"]]) == 0
    assert f"{proofs[0]['backup']}: proved" in capsys.readouterr().out


@contextmanager
def serving(wiring: Wiring, answer: Event) -> Iterator[None]:
    """As if this process were the service, which answers a SIGHUP so."""
    (wiring.settings.spool / "locks").mkdir(parents=True, exist_ok=True)
    (wiring.settings.spool / "locks" / "service").write_text(f"process {os.getpid()}\n{owner()}\n")

    def asked(process: int, number: int) -> None:
        assert (process, number) == (os.getpid(), signal.SIGHUP)
        wiring.catalog.events.add(answer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("backupd.app.service.reload.os.kill", asked)
        yield


def test_the_service_reads_its_configuration_and_its_answer_is_shown(
    wiring: Wiring, capsys: pytest.CaptureFixture[str]
) -> None:
    wiring.catalog.events.add(Event(NOW, "config-refused", Severity.ERROR, "of yesterday", subject="service"))
    with serving(wiring, Event(NOW, "config-reloaded", Severity.INFO, "2 servers more", subject="service")):
        assert main(["reload"]) == 0
        assert capsys.readouterr().out == "2 servers more\n"
        assert main(["reload", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"reloaded": True, "message": "2 servers more"}
    refused = Event(
        NOW, "config-refused", Severity.ERROR, "the spool cannot be moved", hint="restart", subject="service"
    )
    with serving(wiring, refused):
        assert main(["reload"]) == 1
    assert capsys.readouterr().err == "error: the spool cannot be moved\nhint: restart\n"


def test_without_a_service_nothing_is_reloaded(wiring: Wiring) -> None:
    with pytest.raises(RefusedError, match="no service is running on this host"):
        reload(wiring)
    with serving(wiring, Event(NOW, "something-else", Severity.INFO, "x")), pytest.raises(BackupdError, match="0 s"):
        reload(wiring, patience=0.0)


class Several(FakeService):
    """Three servers, the second of which cannot be backed up."""

    @property
    def listings(self):  # type: ignore[no-untyped-def]  # as the one above
        found = super().listings
        found.servers = lambda: ("a", "b", "c")
        return found

    def usual_kind(self, server: str) -> BackupKind:
        return BackupKind.LOGICAL if server == "c" else BackupKind.PHYSICAL_FULL

    def backup(self, server, kind, report, *, table_set="", tables=()):  # type: ignore[no-untyped-def]
        super().backup(server, kind, report, table_set=table_set, tables=tables)
        if server == "b":
            raise RefusedError("no room", hint="make some")
        return record(server=server, kind=kind)


def test_all_servers_are_backed_up_whichever_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Several()
    monkeypatch.setattr(session, "open_service", fake.open)
    assert main(["backup", "--all", "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [(one["server"], one["ok"]) for one in found] == [("a", True), ("b", False), ("c", True)]
    assert found[1]["error"]["message"] == "no room"
    assert found[2]["backup"]["kind"] == "logical"
    assert "error: b: no room\nhint: make some\n" in err
    assert [call[1:3] for call in fake.calls if call[0] == "backup"] == [
        ("a", BackupKind.PHYSICAL_FULL),
        ("b", BackupKind.PHYSICAL_FULL),
        ("c", BackupKind.LOGICAL),
    ]
    assert fake.followed == [("a", "b", "c")]
    assert main(["backup", "--all"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 3 servers were backed up"


@pytest.mark.parametrize("words", [["x", "--all"], ["x", "--label", "a=b"], []])
def test_a_backup_is_of_one_server_or_of_several(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backup", *words]) == 2
    assert "name a server, or give --all or --label" in capsys.readouterr().err


def test_quiet_shows_nothing_but_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeService()
    monkeypatch.setattr(session, "open_service", fake.open)
    for words in (["backup", "x"], ["check"], ["verify"], ["fsck"], ["test-restore", "x"]):
        assert main([*words, "--quiet"]) == 0
        assert capsys.readouterr() == ("", "")
    assert main(["backup", "x", "--quiet", "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["server"], err) == ("shop-db1", "")
    fake.failure = RefusedError("no room")
    assert main(["backup", "x", "--quiet"]) == 1
    assert capsys.readouterr().err == "error: no room\n"

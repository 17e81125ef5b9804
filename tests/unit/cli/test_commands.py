from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from backupd.cli.main import main
from backupd.cli.session import StoppedError
from backupd.model.backup_record import BackupKind
from backupd.model.errors import (
    ConfigurationError,
    DamagedError,
    NotFoundError,
    Problem,
    RefusedError,
    ToolError,
    UsageError,
)
from tests.support.service.fake import FakeFinding, FakeService, record

ID = record().id

COMMANDS: list[tuple[list[str], tuple[Any, ...]]] = [
    (["check"], ("check", None)),
    (["check", "shop-db1"], ("check", "shop-db1")),
    (["check", "--label", "env=prod", "--label", "a=b"], ("check", None, "env=prod", "a=b")),
    (["backup", "shop-db1"], ("backup", "shop-db1", BackupKind.PHYSICAL_FULL)),
    (
        ["backup", "shop-db1", "--kind", "incremental"],
        ("backup", "shop-db1", BackupKind.PHYSICAL_INCREMENTAL),
    ),
    (["backup", "shop-db1", "--kind", "logical"], ("backup", "shop-db1", BackupKind.LOGICAL)),
    (["backups"], ("backups", None)),
    (["backups", "shop-db1"], ("backups", "shop-db1")),
    (["backups", "list", "show"], ("backups", "show")),
    (["backups", "show", ID], ("show", ID)),
    (["backups", "keep", ID], ("keep", ID, True)),
    (["backups", "keep", ID, "--release"], ("keep", ID, False)),
    (["backups", "delete", ID], ("delete", ID, False)),
    (["backups", "delete", ID, "--now"], ("delete", ID, True)),
    (["backups", "undelete", ID], ("undelete", ID)),
    (["plan", "shop-db1", "--to", "latest"], ("plan", "shop-db1", "latest", None)),
    (["plan", "shop-db1", "--to", "latest", "--datadir", "/x"], ("plan", "shop-db1", "latest", Path("/x"))),
    (
        ["restore", "shop-db1", "--to", f"backup:{ID}", "--datadir", "/x", "--start"],
        ("restore", "shop-db1", f"backup:{ID}", Path("/x"), True, "new-server"),
    ),
    (
        ["restore", "shop-db1", "--to", "latest", "--datadir", "/x", "--mode", "replica"],
        ("restore", "shop-db1", "latest", Path("/x"), False, "replica"),
    ),
    (["test-restore", "shop-db1"], ("test_restore", "shop-db1", "latest")),
    (["test-restore", "shop-db1", "--to", "random"], ("test_restore", "shop-db1", "random")),
    (["verify"], ("verify", None, None)),
    (["verify", "shop-db1", "--subset", "10%"], ("verify", "shop-db1", 0.1)),
    (["verify", "--label", "env=prod"], ("verify", None, None, "env=prod")),
    (["runbook", ID], ("runbook", ID)),
    (["fsck"], ("fsck", False)),
    (["fsck", "--repair"], ("fsck", True)),
    (["catalog", "upgrade"], ("upgrade_catalog",)),
]


@pytest.mark.parametrize(("argv", "call"), COMMANDS, ids=lambda value: " ".join(map(str, value)))
def test_a_command_asks_the_service_one_thing_and_closes_it(
    argv: list[str], call: tuple[Any, ...], service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 0
    assert service.calls == [("open", Path("/etc/backupd/backupd.yaml")), call, ("close",)]
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("argv", "call"), COMMANDS, ids=lambda value: " ".join(map(str, value)))
def test_json_is_one_document_on_stdout_for_every_command(
    argv: list[str], call: tuple[Any, ...], service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert main(["--json", *argv]) == 0
    assert json.loads(capsys.readouterr().out) == after


def test_lists_are_arrays_and_a_backup_has_the_promised_fields(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["backups", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["id"] > second["id"]
    assert set(first) >= {
        "id",
        "server",
        "kind",
        "state",
        "parent",
        "started_at",
        "finished_at",
        "bytes_source",
        "bytes_stored",
        "bytes_new",
        "files",
        "files_linked",
        "position",
        "copies",
    }


@pytest.mark.parametrize(
    "argv",
    [
        ["--config", "/a.yaml", "backups", "x"],
        ["backups", "--config", "/a.yaml", "x"],
        ["backups", "x", "--config", "/a.yaml"],
        ["--config=/b.yaml", "backups", "x", "--config=/a.yaml"],
    ],
)
def test_the_configuration_may_be_named_before_and_after_the_command(
    argv: list[str], service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKUPD_CONFIG", "/env.yaml")
    assert main(argv) == 0
    assert service.calls[:2] == [("open", Path("/a.yaml")), ("backups", "x")]


def test_the_environment_names_the_configuration(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKUPD_CONFIG", "/env.yaml")
    assert main(["backups"]) == 0
    assert service.calls[0] == ("open", Path("/env.yaml"))


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["backup"],
        ["backup", "x", "--kind", "sideways"],
        ["restore", "x", "--to", "latest"],
        ["restore", "x", "--datadir", "/x"],
        ["restore", "x", "--to", "latest", "--datadir", ""],
        ["plan", "x", "--to", "latest", "--datadir", ""],
        ["verify", "--subset", "ten"],
        ["verify", "--subset", "0%"],
        ["verify", "--subset", "101%"],
        ["backups", "--nonsense"],
        ["runbook"],
        ["policy", "validate"],
        ["backups", "show"],
        ["restore", "x", "--to", "latest", "--datadir", "/x", "--mode", "sideways"],
    ],
)
def test_wrong_usage_exits_with_2_and_asks_nothing(
    argv: list[str], service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert service.calls == []
    assert "Error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RefusedError("the folder is not empty", hint="choose another"), 1),
        (ToolError("gpg exited with 2"), 1),
        (NotFoundError("no backup x"), 1),
        (UsageError("not a target"), 2),
        (ConfigurationError([Problem("a.yaml", 3, "servers", "missing")]), 2),
        (DamagedError("damaged", ["a", "b"]), 1),
    ],
)
def test_an_error_is_shown_without_a_traceback_and_becomes_the_exit_code(
    error: Exception, code: int, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.failure = error
    assert main(["backup", "x"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"error: {error.args[0]}" in captured.err
    assert "Traceback" not in captured.err


def test_an_error_shows_evidence_and_the_next_step(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    service.failure = ToolError("mariadb-backup exited with 1", detail="line one\nline two", hint="raise the limit")
    assert main(["backup", "x", "--json"]) == 1
    captured = capsys.readouterr()
    assert "  line one\n  line two\nhint: raise the limit\n" in captured.err
    assert json.loads(captured.out) == {
        "error": {
            "message": "mariadb-backup exited with 1",
            "detail": "line one\nline two",
            "hint": "raise the limit",
            "type": "tool-failed",
        }
    }


def test_every_problem_of_a_configuration_is_in_the_json(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.failure = ConfigurationError(
        [Problem("a.yaml", 3, "servers.x", "bad"), Problem("b.yaml", None, "", "worse")]
    )
    assert main(["check", "--json"]) == 2
    captured = capsys.readouterr()
    assert [problem["line"] for problem in json.loads(captured.out)["error"]["problems"]] == [3, None]
    assert "a.yaml:3: servers.x: bad" in captured.err


def test_text_in_brackets_is_shown_as_it_is(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    service.failure = ToolError("[bold]failed[/bold] :smile:", detail="[ERROR] InnoDB: [/x]")
    assert main(["check"]) == 1
    captured = capsys.readouterr()
    assert "[bold]failed[/bold] :smile:" in captured.err
    assert "[ERROR] InnoDB: [/x]" in captured.err


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt(), 130), (StoppedError(signal.SIGTERM), 143)])
def test_an_interrupt_closes_the_service_and_exits_with_its_signal(
    interrupt: BaseException, code: int, service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.failure = interrupt
    assert main(["backup", "x"]) == code
    assert service.calls[-1] == ("close",)
    assert capsys.readouterr().err.endswith("interrupted\n")


def test_check_fails_when_one_finding_is_an_error(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    service.findings = [
        FakeFinding("error", "privileges", "RELOAD is missing", "GRANT RELOAD ..."),
        FakeFinding("warning", "disk", "12 % free"),
        FakeFinding("ok", "tool", "found"),
    ]
    assert main(["check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  privileges: RELOAD is missing",
        "      -> GRANT RELOAD ...",
        "warn  disk: 12 % free",
        "ok    tool: found",
    ]
    service.findings.pop(0)
    assert main(["check", "--json"]) == 0


def test_damage_inconsistency_and_a_failed_proof_exit_with_1(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.sound, service.outcome = False, "failed"
    for argv, said in (
        (["verify"], "its SHA-256 differs"),
        (["fsck"], "local: no-orphan-object: objects/ab/abcd: no manifest names it"),
        (["test-restore", "x"], "shop.orders differs"),
    ):
        assert main(argv) == 1
        assert said in capsys.readouterr().out
        assert main([*argv, "--json"]) == 1
        json.loads(capsys.readouterr().out)


def test_tables_fit_80_columns_and_lose_nothing_when_piped(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["backups"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ID", "SERVER", "KIND", "STATE", "DATA", "NEW", "AT"]
    assert max(map(len, lines)) <= 80
    service.records = [record(server="s" * 63)]
    assert main(["backups"]) == 0
    assert "s" * 63 in capsys.readouterr().out


def test_a_dump_is_listed_with_its_set_and_what_is_missing(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.records = [
        record(kind=BackupKind.LOGICAL, table_set="money", tables_missing=2, pinned=True),
        record(2, kind=BackupKind.LOGICAL),
    ]
    assert main(["backups"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("logical/money 2 missing +kept" in " ".join(line.split()) for line in lines)
    assert any("logical complete" in " ".join(line.split()) for line in lines)
    assert max(map(len, lines)) <= 90
    assert main(["backups", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {(one["set"], one["tables_missing"]) for one in told} == {("money", 2), ("", 0)}


def test_no_backups_are_an_empty_array_and_a_plain_word(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.records = []
    assert main(["backups", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["backups"]) == 0
    assert capsys.readouterr().out == "no backups\n"


def test_a_runbook_is_printed_word_for_word(service: FakeService, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runbook", ID]) == 0
    assert capsys.readouterr().out == "# Restore by hand\n\n1. gpg -d ...\n"


@pytest.mark.parametrize(
    ("failure", "said", "next_step"),
    [
        (
            OSError(28, "No space left on device", "/var/x"),
            "backupd backup failed: /var/x: no space left",
            "free disk space",
        ),
        (PermissionError(13, "Permission denied", "/etc/x"), "/etc/x: Permission denied", "permissions"),
        (MemoryError(), "out of memory", "ulimit -v"),
        (RuntimeError("can't start new thread"), "refused to create a thread", "ulimit"),
    ],
)
def test_what_the_system_refuses_is_said_in_one_sentence(
    failure: Exception,
    said: str,
    next_step: str,
    service: FakeService,
    capsys: pytest.CaptureFixture[str],
) -> None:
    service.failure = failure
    assert main(["backup", "x"]) == 1
    shown = capsys.readouterr().err
    assert said in shown
    assert next_step in shown.partition("hint: ")[2]
    assert "Traceback" not in shown


def test_an_unforeseen_failure_is_one_line_and_a_private_file_with_its_place(
    service: FakeService,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    service.failure = KeyError("password='hunter2'")
    assert main(["check", "--json"]) == 1
    captured = capsys.readouterr()
    [written] = tmp_path.iterdir()
    assert "error: internal error: KeyError" in captured.err
    assert str(written) in captured.err.partition("hint: ")[2]
    assert "Traceback" not in captured.err
    assert written.stat().st_mode & 0o777 == 0o600
    assert "Traceback" in written.read_text()
    assert "hunter2" not in written.read_text() + captured.err + captured.out
    assert json.loads(captured.out)["error"]["type"] == "failure"


def test_without_a_temporary_folder_the_traceback_lies_in_the_runtime_directory(
    service: FakeService, capsys: pytest.CaptureFixture[str], short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", list)  # none of them can be written to
    monkeypatch.setenv("BACKUPD_RUNTIME", str(short_tmp / "run"))
    service.failure = KeyError("x")
    assert main(["check"]) == 1
    [written] = (short_tmp / "run").glob("*.txt")
    assert str(written) in capsys.readouterr().err


def test_a_traceback_that_cannot_be_kept_does_not_hide_the_failure(
    service: FakeService, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    service.failure = KeyError("x")
    assert main(["check"]) == 1
    assert "the traceback could not be saved" in capsys.readouterr().err


def test_what_held_a_deletion_back_is_told_and_is_no_success(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.held = ["a restore still reads it"]
    assert main(["backups", "delete", ID, "--now"]) == 1
    shown = capsys.readouterr().out
    assert "NOT removed yet" in shown
    assert "a restore still reads it" in shown
    assert main(["backups", "delete", ID, "--now", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["held"] == ["a restore still reads it"]


def test_check_of_several_servers_is_a_line_for_each_and_what_they_have_in_common_is_told_once(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.findings = [
        FakeFinding("ok", "a: tool", "found", server="a"),
        FakeFinding("warning", "a: policy", "no test restores", "add test_restore", server="a"),
        FakeFinding("warning", "b: policy", "no test restores", "add test_restore", server="b"),
        FakeFinding("error", "b: server", "cannot be reached: [Errno 111]", "start it", server="b"),
        FakeFinding("ok", "c: tool", "found", server="c"),
        FakeFinding("ok", "key", "is good"),
    ]
    assert main(["check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  b: server: cannot be reached: [Errno 111]",
        "      -> start it",
        "warn  policy: no test restores (2 servers: a, b)",
        "      -> add test_restore",
        "warn  a: 1 warning, 1 ok",
        "FAIL  b: 1 error, 1 warning",
        "ok    c: 1 ok",
        "ok    all servers together: 1 ok",
    ]

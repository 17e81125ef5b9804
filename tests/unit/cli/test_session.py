"""What a command does after its own job has ended and was told: see ``Run.follow_up``."""

from __future__ import annotations

import json

import pytest

from backupd.cli.main import main
from backupd.model.errors import BackupdError, RefusedError, ToolError, UsageError
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.service.fake import START, FakeService

SWEEP = JobRecord("job-7", JobKind.SWEEP, "", JobState.FAILED, START, leg="sweep/local")


def test_a_backup_is_followed_by_its_rules_and_the_removal_of_what_is_due(service: FakeService) -> None:
    assert main(["backup", "shop-db1"]) == 0
    assert service.followed == [("shop-db1",)]
    assert service.calls[-1] == ("close",)


@pytest.mark.parametrize("argv", [["verify"], ["backups"], ["plan", "shop-db1", "--to", "latest"], ["check"]])
def test_nothing_follows_from_what_stores_and_marks_nothing(service: FakeService, argv: list[str]) -> None:
    assert main(argv) == 0
    assert service.followed == []


def test_what_follows_is_told_on_stderr_and_changes_neither_result_nor_exit_code(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.following = [(SWEEP, RefusedError("local is another repository", hint="mount it"))]
    assert main(["backup", "shop-db1", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["server"] == "shop-db1"
    assert "warning: sweep/local did not succeed (job job-7): local is another repository" in shown.err


def test_a_backup_that_failed_is_told_first_and_what_it_left_is_removed(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    service.failure = ToolError("mariadb-backup exited with 1")
    service.following = [(SWEEP, BackupdError("no room"))]
    assert main(["backup", "shop-db1"]) == 1
    error, warning = (line for line in capsys.readouterr().err.splitlines() if line.startswith(("error", "warning")))
    assert error == "error: mariadb-backup exited with 1"
    assert warning == "warning: sweep/local did not succeed (job job-7): no room"
    assert service.followed == [("shop-db1",)]


@pytest.mark.parametrize("failure", [UsageError("no such server"), KeyboardInterrupt()])
def test_nothing_follows_wrong_usage_and_an_interrupt(service: FakeService, failure: BaseException) -> None:
    service.failure = failure
    assert main(["backup", "shop-db1"]) in (2, 130)
    assert service.followed == []


@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), ToolError("the catalog is gone"), ZeroDivisionError("x")])
def test_whatever_stops_what_follows_a_good_backup_was_taken(
    service: FakeService, trouble: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    service.following = [trouble]
    assert main(["backup", "shop-db1"]) == 0
    assert "warning: " in capsys.readouterr().err

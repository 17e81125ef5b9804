"""`backupd jobs` and the command that a worker starts."""

from __future__ import annotations

import json
import signal
from collections.abc import MutableSequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pytest

from backupd.cli import session
from backupd.cli.main import main
from backupd.model.errors import NotFoundError
from backupd.model.job import JobKind, JobRecord, JobState
from tests.support.service.fake import START

ID = "20261121T042512Z-7f3a9c01"
RUNNING = JobRecord(
    id=ID,
    kind=JobKind.FULL,
    server="shop-db1",
    state=JobState.RUNNING,
    queued_at=START,
    started_at=START,
    owner="host boot 1 2 3",
    progress={
        "phase": "copy",
        "bytes": 2**20,
        "bytes_total": 2**21,
        "files": 3,
        "files_total": None,
        "note": "",
        "seconds_left": 12.5,
    },
)


@dataclass
class Jobs:
    """The part of the service that knows jobs."""

    calls: MutableSequence[tuple[Any, ...]] = field(default_factory=list)
    found: JobRecord = RUNNING
    rows: int = 1

    def open(
        self, _path: Path, _held: Path | None = None, _opening: str = "reads", *, new_catalog: bool = False
    ) -> Self:
        assert not new_catalog
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def jobs(self) -> Self:
        return self

    def list(self, server: str | None, **wanted: Any) -> tuple[JobRecord, ...]:
        self.calls.append(("jobs", server, wanted))
        return (self.found,) * self.rows

    def get(self, job_id: str) -> JobRecord:
        if job_id != ID:
            raise NotFoundError(f"there is no job {job_id}")
        return self.found

    def log(self, job_id: str) -> str:
        return f"the log of {job_id}\n"

    def cancel(self, job_id: str) -> JobRecord:
        self.calls.append(("cancel", job_id))
        return self.found

    def run(self, job_id: str, token: int) -> None:
        self.calls.append(("run", job_id, token))
        signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    fake = Jobs()
    monkeypatch.setattr(session, "open_service", fake.open)
    return fake


def test_jobs_are_listed_with_progress_or_reason(service: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "shop-db1", "--state", "running", "--kind", "physical-full", "--limit", "5"]) == 0
    assert service.calls == [("jobs", "shop-db1", {"state": JobState.RUNNING, "kind": JobKind.FULL, "limit": 6})]
    shown = capsys.readouterr().out
    assert ID in shown
    assert "copy: 1.0 MiB of 2.0 MiB, 3 files, 12.5s left" in shown
    service.found = replace(RUNNING, state=JobState.FAILED, finished_at=START, message="gpg exited with 2")
    assert main(["jobs"]) == 0
    assert "gpg exited with 2" in capsys.readouterr().out


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_list_that_is_longer_than_what_is_shown_says_so(
    form: tuple[str, ...], service: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    service.rows = 3
    assert main(["jobs", "--limit", "2", *form]) == 0
    shown = capsys.readouterr()
    assert shown.out.count(ID) == 2
    assert "only the newest 2 are listed; for more: --limit NUMBER" in shown.err
    assert main(["jobs", "--limit", "3", *form]) == 0
    shown = capsys.readouterr()
    assert (shown.out.count(ID), shown.err) == (3, "")


def test_answers_in_json_do_not_name_processes(service: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["jobs"], ["jobs", "show", ID], ["jobs", "cancel", ID]):
        assert main([*argv, "--json"]) == 0
        answer = capsys.readouterr().out
        found = json.loads(answer)
        assert (found[0] if isinstance(found, list) else found)["id"] == ID
        assert "boot" not in answer


def test_one_job_is_shown_and_its_log_printed(service: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs", "show", ID]) == 0
    assert "running" in capsys.readouterr().out
    assert main(["jobs", "log", ID]) == 0
    assert capsys.readouterr().out == f"the log of {ID}\n"
    assert main(["jobs", "show", "nix"]) == 1
    assert "there is no job nix" in capsys.readouterr().err


def test_cancelling_says_whether_it_is_over_or_only_asked_for(
    service: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["jobs", "cancel", ID]) == 0
    assert "stop requested for" in capsys.readouterr().out
    service.found = replace(RUNNING, state=JobState.CANCELLED)
    assert main(["jobs", "cancel", ID]) == 0
    assert "is cancelled" in capsys.readouterr().out
    assert service.calls == [("cancel", ID)] * 2


def test_a_worker_s_command_is_hidden_and_ends_by_its_signal(service: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "run-job" not in capsys.readouterr().out
    assert main(["run-job", ID, "--token", "3"]) == 143
    assert service.calls == [("run", ID, 3)]


def test_a_second_signal_does_not_disturb_the_cleaning_up(
    service: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []

    def run_job(_job_id: str, _token: int) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned.append(True)

    monkeypatch.setattr(service, "run", run_job)
    assert main(["run-job", ID, "--token", "3"]) == 143
    assert cleaned == [True]
    capsys.readouterr()

"""Commands whose stdout or stderr is closed, full or left by its reader; the service is a fake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service.fake import record

ROOT = Path(__file__).parents[4]
PROGRAM = """
import sys
from backupd.cli import session
from backupd.cli.main import main
from tests.support.service.fake import FakeService
session.open_service = FakeService().open
sys.exit(main())
"""
ID = record().id
DOING = [
    ("backup x", f"the backup {ID} was taken"),
    ("restore x --to latest --datadir /x", "the restore into /x was made"),
    (f"backups delete {ID}", f"{ID} was marked as deleted"),
    (f"backups delete {ID} --now", f"{ID} was deleted"),
]


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run ``line``, in which ``backupd`` is the program with the fake service."""
    return subprocess.run(
        ["bash", "-c", f'backupd() {{ "$PYTHON" -c "$PROGRAM" "$@"; }}; {line}'],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "PROGRAM": PROGRAM},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("to", [">&-", ">/dev/full"])
@pytest.mark.parametrize("option", ["", " --json"])
@pytest.mark.parametrize(("command", "done"), DOING)
def test_a_result_that_cannot_be_written_does_not_look_like_failed_work(
    command: str, done: str, option: str, to: str
) -> None:
    ended = shell(f"backupd {command}{option} {to}")
    assert ended.returncode == 1
    assert f"error: {done}, but its result could not be written to stdout" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Exception" not in ended.stderr


@pytest.mark.parametrize("to", [">&-", ">/dev/full"])
@pytest.mark.parametrize("command", ["backups", "backups --json", "policy schema", f"runbook {ID}"])
def test_an_answer_that_cannot_be_written_is_one_line(command: str, to: str) -> None:
    ended = shell(f"backupd {command} {to}")
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: the result could not be written to stdout")


def test_help_on_a_full_stdout_shows_no_traceback() -> None:
    ended = shell("backupd --help >/dev/full")
    assert ended.returncode == 1
    assert "no space left" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("option", ["", " --json"])
def test_a_reader_that_went_away_ends_the_command_quietly(option: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, "backups", *option.split()],
            cwd=ROOT,
            stdout=pipe,
            stderr=subprocess.PIPE,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize("to", ["2>&-", "2>/dev/full", "2> >(exec true)"])
@pytest.mark.parametrize(("command", "done"), DOING[:2])
def test_work_goes_on_when_nobody_can_be_told_of_its_progress(command: str, done: str, to: str) -> None:
    del done
    ended = shell(f"backupd {command} {to}")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip()


@pytest.mark.parametrize("to", ["2>&-", "2>/dev/full"])
def test_an_error_that_nobody_can_be_told_of_keeps_its_exit_code(to: str) -> None:
    assert shell(f"backupd policy validate /nowhere.yaml {to}").returncode == 2

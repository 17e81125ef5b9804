from __future__ import annotations

import threading
import time

import pytest

from backupd.model.errors import CancelledError, ToolError, ToolMissingError
from backupd.process.command import Command
from backupd.process.pipeline import run


def sh(script: str) -> Command:
    return Command(("sh", "-c", script))


def test_output_and_stderr_come_back() -> None:
    done = run(sh(r"printf '\000\377bytes'; echo note >&2"))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\x00\xffbytes", "note")


def test_a_bad_exit_names_program_code_and_last_lines() -> None:
    with pytest.raises(ToolError) as caught:
        run(sh("seq 1000 >&2; exit 9"))
    assert caught.value.message == "sh exited with 9"
    assert caught.value.detail.splitlines() == [str(n) for n in range(981, 1001)]


def test_a_signal_is_named() -> None:
    with pytest.raises(ToolError, match="sh was killed by SIGABRT"):
        run(sh("kill -ABRT $$"))


def test_a_bad_exit_can_be_looked_at_instead() -> None:
    done = run(sh("printf partial; exit 3"), check=False)
    assert (done.returncode, done.stdout) == (3, b"partial")
    assert run(sh("kill -9 $$"), check=False).returncode == -9


def test_taking_too_long_is_an_error_even_unchecked() -> None:
    started = time.monotonic()
    with pytest.raises(ToolError, match=r"sh did not finish within 0\.3 s"):
        run(sh("sleep 600"), timeout=0.3, check=False)
    assert time.monotonic() - started < 300


def test_it_can_be_cancelled() -> None:
    cancel = threading.Event()
    timer = threading.Timer(0.2, cancel.set)
    timer.start()
    with pytest.raises(CancelledError):
        run(sh("sleep 600"), cancel=cancel)
    timer.join()


@pytest.mark.parametrize(
    ("program", "hint"),
    [
        ("pt-table-checksum-not-there", "PATH"),
        ("/no/such/mariadb-backup", "apt-get install mariadb-backup"),
        ("/no/such/xtrabackup", "Percona"),
    ],
)
def test_a_missing_program_comes_with_a_hint(program: str, hint: str) -> None:
    with pytest.raises(ToolMissingError) as caught:
        run(Command((program,)))
    assert hint in caught.value.hint

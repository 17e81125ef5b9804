from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import threading

import pytest

from backupd.cli.progress import Phases, plain_line, reporting
from backupd.model.job import Progress

GIB = 2**30


def run(*steps: tuple[float, Progress]) -> str:
    """The plain line after these reports, each at its second."""
    phases = Phases()
    for now, step in steps:
        phases.update(step, now)
    name, state = list(phases.states.items())[-1]
    return plain_line(name, state)


def test_a_line_names_share_bytes_files_rate_and_remaining_time() -> None:
    assert run((0, Progress("copy", 0, 4 * GIB, 0, 100)), (2, Progress("copy", GIB, 4 * GIB, 30, 100))) == (
        "copy: 25 %, 1.0 GiB of 4.0 GiB, 30/100 files, 512.0 MiB/s, 6s left"
    )


def test_unknown_totals_are_left_out() -> None:
    assert run((0, Progress("copy")), (2, Progress("copy", GIB, None, 7))) == "copy: 1.0 GiB, 7 files, 512.0 MiB/s"
    assert run((0, Progress("prepare", note="applying redo"))) == "prepare: applying redo"
    assert run((0, Progress("start"))) == "start"


def test_a_name_cannot_break_or_disguise_a_line() -> None:
    assert run((0, Progress("dump", note="shop.a\nSet-Cookie: x\u202e\x1b[2Jü"))) == (
        "dump: shop.a\\nSet-Cookie: x\\u202e\\x1b[2Jü"
    )


def test_the_rate_is_that_of_the_last_seconds_and_at_the_end_of_the_whole() -> None:
    slow = [(float(second), Progress("copy", second * 1024, 10**9)) for second in range(60)]
    assert "10.0 MiB/s" in run(*slow, (60, Progress("copy", 50 * 1024 + 100 * 2**20, 10**9)))
    assert run((0, Progress("copy", 0, GIB)), (1, Progress("copy", 0, GIB)), (4, Progress("copy", GIB, GIB))) == (
        "copy: 100 %, 1.0 GiB of 1.0 GiB, 256.0 MiB/s"
    )


def test_piped_progress_is_a_few_plain_lines_and_the_last_state_of_each_phase() -> None:
    now = [0.0]
    stream = io.StringIO()
    with reporting(stream, clock=lambda: now[0]) as report:
        for tick in range(1001):
            now[0] = tick / 100
            report(Progress("copy", tick, 1000))
        report(Progress("store", 5, 10))
    lines = stream.getvalue().splitlines()
    assert len([line for line in lines if line.startswith("copy")]) == 5
    assert lines[-2].startswith("store: 50 %")
    assert lines[-1].startswith("copy: 100 %")
    assert "\x1b" not in stream.getvalue()


def test_reports_may_come_from_many_threads() -> None:
    stream = io.StringIO()
    with reporting(stream) as report:
        threads = [
            threading.Thread(target=lambda name=name: [report(Progress(name, n, 500)) for n in range(501)])
            for name in ("a", "b", "c")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {line.split(":")[0] for line in stream.getvalue().splitlines()[-3:]} == {"a", "b", "c"}


def read_all(terminal: io.FileIO) -> str:
    """What was written to a terminal; its end shows as an error once nobody has it open."""
    chunks = []
    with contextlib.suppress(OSError):
        while chunk := terminal.read(65536):
            chunks.append(chunk)
    return b"".join(chunks).decode()


def test_a_terminal_shows_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    leader, follower = pty.openpty()
    with io.FileIO(leader) as screen:
        with os.fdopen(follower, "w", encoding="utf-8") as terminal, reporting(terminal) as report:
            report(Progress("copy", GIB, 4 * GIB, 30, 100))
            report(Progress("store", 5, None))
        shown = read_all(screen)
    assert re.search("copy.*━.*1.0 GiB of 4.0 GiB, 30/100 files", shown)
    assert "store" in shown


class Full(io.StringIO):
    """Fails as a full disk does, and counts how often it is asked."""

    tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise OSError(28, "No space left on device")


def test_a_stream_that_fails_is_asked_no_more_and_fails_nobody() -> None:
    stream = Full()
    with reporting(stream) as report:
        report(Progress("copy", 0, 10))
        report(Progress("store", 0, 10))
        report(Progress("copy", 10, 10))
    assert stream.tries == 1


def test_a_closed_stream_fails_nobody() -> None:
    stream = io.StringIO()
    stream.close()
    with reporting(stream) as report:
        report(Progress("copy", 0, 10))


def test_without_any_stderr_progress_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with reporting() as report:
        report(Progress("copy", 0, 10))


def test_what_was_done_ends_finished_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    leader, follower = pty.openpty()
    with io.FileIO(leader) as screen:
        with os.fdopen(follower, "w", encoding="utf-8") as terminal, reporting(terminal) as report:
            report(Progress("replay", 67 * 1024, 346 * 1024))
            report(Progress("prepare", files_done=0, files_total=1))
        shown = read_all(screen)
    last = re.split(r"\x1b\[\d*A", shown)[-1]
    assert "67.0 KiB of 67.0 KiB" in last
    assert "1/1 files" in last
    assert "left" not in last

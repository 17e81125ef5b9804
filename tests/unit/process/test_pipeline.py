from __future__ import annotations

import gc
import hashlib
import itertools
import os
import secrets
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest

from backupd.model.errors import CancelledError, ToolError, ToolMissingError
from backupd.process.command import Command, stop
from backupd.process.pipeline import Pipeline
from tests.support.service.processes import open_descriptors, until, with_mark


def sh(script: str, *args: str) -> Command:
    return Command(("sh", "-c", script, *args))


def py(script: str, *args: str) -> Command:
    return Command((sys.executable, "-c", textwrap.dedent(script), *args))


def read_all(pipeline: Pipeline) -> bytes:
    return b"".join(bytes(chunk) for chunk in pipeline.chunks())


@pytest.fixture
def mark() -> Iterator[str]:
    """A word to put into command lines; at the end of the test no process may carry it any more: whatever a program
    left in its group has been killed by then, and dies a moment later."""
    word = f"mark-{secrets.token_hex(8)}"
    yield word
    until(lambda: with_mark(word) == [])


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    Pipeline([Command(("true",))]).__enter__().__exit__(None, None, None)  # starts the spawner thread
    gc.collect()
    before, threads = open_descriptors(), threading.enumerate()
    yield
    gc.collect()
    assert open_descriptors() == before
    assert [thread.name for thread in threading.enumerate() if thread not in threads] == []


def test_output_passes_through_every_program() -> None:
    with Pipeline([sh("seq 1 100000"), Command(("gzip", "-1")), Command(("gzip", "-d"))]) as pipeline:
        assert read_all(pipeline) == "".join(f"{n}\n" for n in range(1, 100001)).encode()
        assert pipeline.readinto(bytearray(10)) == 0
        assert pipeline.returncodes == (0, 0, 0)
        assert pipeline.exited


def test_reading_fills_the_buffer_of_the_caller() -> None:
    buffer = bytearray(b"......")
    with Pipeline([sh("printf abc")]) as pipeline:
        assert pipeline.readinto(memoryview(buffer)[1:]) == 3
        assert pipeline.read(10) == b""
    assert buffer == b".abc.."


def test_a_source_that_fails_on_its_last_byte_is_no_end_of_file(tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"until [ -e {go} ]; do sleep 0.01; done"
    with Pipeline([sh(f"printf complete; {wait}; echo so sorry >&2; exit 7"), Command(("cat",))]) as pipeline:
        assert pipeline.read(100) == b"complete"
        go.touch()
        with pytest.raises(ToolError) as caught:
            pipeline.read(100)
        assert caught.value.message == "sh exited with 7"
        assert caught.value.detail == "so sorry"
        with pytest.raises(ToolError, match="exited with 7"):  # and it stays like that
            pipeline.read(100)


def test_a_source_killed_after_its_last_byte_is_no_end_of_file() -> None:
    with Pipeline([sh("printf complete; kill -9 $$")]) as pipeline:
        with pytest.raises(ToolError, match="sh was killed by SIGKILL") as caught:
            read_all(pipeline)
        assert "dmesg" in caught.value.hint


def test_a_decoder_broken_by_a_broken_source_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backupd.process.pipeline._SETTLE_SECONDS", 120.0)  # however long gzip takes to fail by itself
    with Pipeline(
        [
            sh("head -c 100000 /dev/urandom | gzip | head -c 5000; echo lost the server >&2; exit 3"),
            Command(("gzip", "-d")),
        ]
    ) as pipeline:
        with pytest.raises(ToolError) as caught:
            read_all(pipeline)
        assert caught.value.message == "sh exited with 3"
        assert caught.value.detail.splitlines()[0] == "lost the server"
        assert "gzip exited with 1" in caught.value.detail


def test_the_last_program_dying_early_is_named_and_not_the_victim_of_the_pipe() -> None:
    with Pipeline([Command(("cat", "/dev/zero")), sh("head -c 100000 >/dev/null; echo disk full >&2; exit 5")]) as p:
        with pytest.raises(ToolError) as caught:
            read_all(p)
        assert caught.value.message == "sh exited with 5"
        assert caught.value.detail.startswith("disk full")


def test_a_victim_that_only_speaks_of_the_broken_pipe_is_not_blamed() -> None:
    source = py("""
        import os, sys, signal
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            while True:
                os.write(1, bytes(65536))
        except BrokenPipeError:
            print("Error writing file (Errcode: 32 - Broken pipe)", file=sys.stderr)
            sys.exit(1)
        """)
    with Pipeline([source, sh("head -c 100000 >/dev/null; echo no key >&2; exit 2")]) as pipeline:
        with pytest.raises(ToolError, match="sh exited with 2"):
            read_all(pipeline)


def test_a_program_dying_while_its_source_is_idle_is_noticed(mark: str) -> None:
    for position in (1, 2):
        stages = [sh("sleep 300", mark), Command(("cat",)), Command(("cat",))]
        stages[position] = sh("echo gone >&2; exit 4")
        started = time.monotonic()
        with Pipeline(stages) as pipeline:
            with pytest.raises(ToolError, match="sh exited with 4"):
                read_all(pipeline)
        assert time.monotonic() - started < 60


def test_a_program_dying_while_its_reader_ignores_the_end_of_input_is_noticed(mark: str) -> None:
    with Pipeline([sh("exit 6"), sh("sleep 300", mark)]) as pipeline:
        with pytest.raises(ToolError, match="sh exited with 6"):
            read_all(pipeline)


def test_a_missing_program_is_said_before_anything_starts(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    with pytest.raises(ToolMissingError, match="no-such-program-here is missing"):
        with Pipeline([sh(f"touch {trace}"), Command(("no-such-program-here",))]):
            pass
    assert not trace.exists()


def test_a_program_that_cannot_be_executed_is_an_error_of_its_own(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    with Pipeline([Command((str(broken),))]) as pipeline:
        with pytest.raises(ToolError, match=r"broken exited with 12[67]") as caught:
            read_all(pipeline)
        assert "broken" in caught.value.detail


def test_a_consumer_that_stops_early_leaves_no_process(mark: str) -> None:
    with Pipeline([py("import os\nwhile True: os.write(1, bytes(65536))", mark), Command(("cat",))]) as pipeline:
        assert pipeline.read(10) == bytes(10)
        assert len(with_mark(mark)) >= 1
    assert with_mark(mark) == []


def test_an_error_of_the_consumer_leaves_no_process_and_is_passed_on(mark: str) -> None:
    with pytest.raises(ZeroDivisionError):
        with Pipeline([sh("sleep 300 & sleep 300", mark), Command(("cat",))]):
            raise ZeroDivisionError


def test_grandchildren_are_ended_too(mark: str) -> None:
    with Pipeline([sh(f"sh -c 'sleep 300 #{mark}' & sh -c 'sleep 300 #{mark}'", mark)]):
        until(lambda: len(with_mark(mark)) >= 3)


def test_what_a_finished_program_left_running_is_ended(mark: str) -> None:
    with Pipeline([sh(f"sh -c 'sleep 300; : {mark}' >/dev/null 2>&1 & printf done")]) as pipeline:
        assert read_all(pipeline) == b"done"
        until(lambda: with_mark(mark) == [])


def test_a_child_that_ignores_every_polite_signal_is_killed_within_seconds(mark: str) -> None:
    stubborn = py(
        """
        import signal, sys, time
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        sys.stdout.write("ready"); sys.stdout.flush()
        while True: time.sleep(1)
        """,
        mark,
    )
    with Pipeline([stubborn]) as pipeline:
        assert pipeline.read(5) == b"ready"
        started = time.monotonic()
    assert time.monotonic() - started < 60


def test_a_child_that_blocks_sigterm_is_stopped_by_sigint(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backupd.process.pipeline.stop", partial(stop, polite_seconds=60.0))
    blocker = py(
        f"""
        import pathlib, signal, sys, time
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
        try:
            sys.stdout.write("ready"); sys.stdout.flush()
            while True: time.sleep(1)
        except KeyboardInterrupt:
            pathlib.Path({str(tmp_path / "interrupted")!r}).touch()
        """,
        mark,
    )
    with Pipeline([blocker]) as pipeline:
        assert pipeline.read(5) == b"ready"
    assert (tmp_path / "interrupted").exists(), "it was killed, not interrupted"


def test_kill_from_another_thread_ends_a_blocked_read(mark: str) -> None:
    with Pipeline([sh("sleep 300", mark), Command(("cat",))]) as pipeline:
        timer = threading.Timer(0.3, pipeline.kill)
        timer.start()
        started = time.monotonic()
        with pytest.raises(CancelledError):
            pipeline.read(1)
        assert time.monotonic() - started < 60
        timer.join()


def test_a_set_event_cancels_although_output_keeps_flowing(mark: str) -> None:
    cancel = threading.Event()
    with Pipeline([py("import os\nwhile True: os.write(1, bytes(65536))", mark)], cancel=cancel) as pipeline:
        pipeline.read(10)
        cancel.set()
        with pytest.raises(CancelledError):
            pipeline.read(10)
    assert with_mark(mark) == []


def test_killing_what_has_ended_changes_nothing() -> None:
    with Pipeline([Command(("true",))]) as pipeline:
        assert pipeline.read(1) == b""
        pipeline.kill()
        assert pipeline.read(1) == b""


_MEMORY = """
import resource, sys
from backupd.process.command import Command
from backupd.process.pipeline import Pipeline
from backupd.process.command import stop
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
buffer, count, size = bytearray(1 << 20), 0, 500 << 20
with Pipeline([Command(("head", "-c", str(size), "/dev/zero")), Command(("cat",))]) as pipeline:
    while got := pipeline.readinto(buffer):
        count += got
assert count == size
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_stays_bounded_over_500_megabytes() -> None:
    done = subprocess.run([sys.executable, "-c", _MEMORY], check=True, capture_output=True)
    assert int(done.stdout) < 8 * 1024  # KiB


def test_a_huge_stderr_blocks_nothing_and_keeps_only_its_tail() -> None:
    seen = 0

    def count(_line: str) -> None:
        nonlocal seen
        seen += 1

    script = "i=0; while [ $i -lt 20 ]; do head -c 1000000 /dev/zero | tr '\\0' x >&2; i=$((i+1)); done; seq 300000 >&2"
    with Pipeline([sh(script + "; echo the end >&2; exit 1")], on_stderr=count) as pipeline:
        with pytest.raises(ToolError) as caught:
            read_all(pipeline)
        assert caught.value.detail.splitlines()[-2:] == ["300000", "the end"]
        assert len(pipeline.stderr_tail("sh", 10_000)) < 900_000
    assert seen >= 300_001


def test_a_last_line_without_newline_is_seen() -> None:
    lines: list[str] = []
    with Pipeline([sh("echo one >&2; printf 'Unable to obtain lock.' >&2; exit 1")], on_stderr=lines.append) as p:
        with pytest.raises(ToolError, match="exited with 1") as caught:
            read_all(p)
    assert lines == ["one", "Unable to obtain lock."]
    assert caught.value.detail.endswith("Unable to obtain lock.")


def test_lines_are_passed_on_while_the_program_runs(mark: str) -> None:
    heard = threading.Event()

    def listen(line: str) -> None:
        if "BLOCK_COMMIT" in line:
            heard.set()

    with Pipeline([sh("echo BLOCK_COMMIT >&2; sleep 300", mark)], on_stderr=listen):
        assert heard.wait(120)


def test_a_failing_listener_fails_the_reader_and_not_silently(mark: str) -> None:
    def listen(_line: str) -> None:
        raise LookupError("the listener broke")

    with Pipeline([sh("echo hello >&2; sleep 300", mark)], on_stderr=listen) as pipeline:
        with pytest.raises(LookupError, match="the listener broke"):
            read_all(pipeline)


def test_the_log_is_private_and_free_of_secrets(tmp_path: Path) -> None:
    log = tmp_path / "tool.log"
    said = "GRANT USAGE ON *.* TO `b`@`%` IDENTIFIED BY PASSWORD '*2470C0C06DEE42FD1618BB99005ADCA2EC9D1E19'"
    heard: list[str] = []
    with Pipeline([Command(("sh", "-c", 'echo "$0" >&2; exit 1', said))], log=log, on_stderr=heard.append) as p:
        with pytest.raises(ToolError, match="exited") as caught:
            read_all(p)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "2470C0C0" not in log.read_text() + str(caught.value)
    assert "GRANT USAGE" in log.read_text()
    assert heard == [said]


def test_blank_lines_are_not_in_the_log_so_that_its_last_line_says_how_it_ended(tmp_path: Path) -> None:
    log = tmp_path / "tool.log"
    with Pipeline([Command(("sh", "-c", "printf 'one\\n\\ncompleted OK!\\n\\n \\n' >&2"))], log=log) as p:
        read_all(p)
    assert log.read_text() == "sh: one\nsh: completed OK!\n"


def test_what_feed_writes_is_the_input() -> None:
    data = os.urandom(5_000_000)

    def feed(sink: BinaryIO) -> None:
        sink.writelines(data[start : start + 70_001] for start in range(0, len(data), 70_001))

    with Pipeline([Command(("cat",)), Command(("sha256sum",))], feed=feed) as pipeline:
        assert read_all(pipeline).split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_an_error_of_feed_is_raised_by_reading_and_its_output_never_ends_well() -> None:
    def feed(sink: BinaryIO) -> None:
        sink.write(b"half of it")
        sink.flush()
        raise LookupError("the source broke")

    with Pipeline([Command(("cat",))], feed=feed) as pipeline:
        with pytest.raises(LookupError, match="the source broke"):
            read_all(pipeline)


def test_a_program_that_ends_well_without_reading_all_its_input_is_an_error() -> None:
    def feed(sink: BinaryIO) -> None:
        sink.write(bytes(10_000_000))

    with Pipeline([Command(("head", "-c", "10"))], feed=feed) as pipeline:
        with pytest.raises(ToolError, match="head stopped reading its input before the end"):
            read_all(pipeline)


def test_a_program_that_dies_while_it_is_fed_is_blamed() -> None:
    def feed(sink: BinaryIO) -> None:
        sink.writelines(itertools.repeat(bytes(65536)))

    with Pipeline([sh("head -c 1000000 >/dev/null; kill -SEGV $$")], feed=feed) as pipeline:
        with pytest.raises(ToolError, match="sh was killed by SIGSEGV"):
            read_all(pipeline)


def test_a_first_program_without_feed_reads_nothing() -> None:
    with Pipeline([Command(("cat",))]) as pipeline:
        assert read_all(pipeline) == b""


def test_too_long_altogether_is_an_error(mark: str) -> None:
    with Pipeline([sh("while :; do echo x; sleep 0.05; done", mark)], timeout=0.5) as pipeline:
        with pytest.raises(ToolError, match=r"did not finish within 0\.5 s"):
            read_all(pipeline)


def test_children_get_no_descriptor_and_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "hunter2")
    monkeypatch.setenv("MYSQL_PWD", "hunter2")
    with Path("/etc/hostname").open("rb") as ours:
        os.set_inheritable(ours.fileno(), True)
        with Pipeline([sh("ls -l /proc/self/fd; env")]) as pipeline:
            seen = read_all(pipeline).decode()
    assert "hostname" not in seen
    assert "hunter2" not in seen


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run programs as somebody else")
def test_a_program_runs_as_another_user() -> None:
    with Pipeline(
        [
            Command(
                ("sh", "-c", "id -un; id -gn; echo $HOME; grep CapEff /proc/self/status"), user="nobody", cwd=Path("/")
            )
        ]
    ) as pipeline:
        assert read_all(pipeline).decode().split()[:3] == ["nobody", "nogroup", "/nonexistent"]


_PARENT = """
import sys, threading, time
from backupd.process.command import Command
from backupd.process.pipeline import Pipeline
from backupd.process.command import stop
mark, user = sys.argv[1], sys.argv[2] or None
def start():
    # This thread ends at once: its children must live on, and die only with the process.
    global pipeline
    pipeline = Pipeline([Command(("sh", "-c", "trap '' INT TERM HUP; while :; do sleep 1; done", mark), user=user),
                         Command(("cat", "-", "--", "/dev/null")), Command(("sh", "-c", "cat; sleep 300", mark))])
    pipeline.__enter__()
thread = threading.Thread(target=start); thread.start(); thread.join()
time.sleep(0.5)
print("alive" if pipeline.returncodes == (None, None, None) else pipeline.returncodes, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("user", ["", "nobody"])
def test_a_parent_killed_by_sigkill_leaves_no_children(mark: str, user: str) -> None:
    if user and os.geteuid() != 0:
        pytest.skip("only root can run programs as somebody else")
    with subprocess.Popen([sys.executable, "-c", _PARENT, mark, user], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "alive\n"
        until(lambda: len(with_mark(mark)) >= 3)
        parent.send_signal(signal.SIGKILL)
    until(lambda: with_mark(mark) == [])


def test_many_pipelines_at_once_do_not_hold_each_other_open() -> None:
    def work(results: list[bytes]) -> None:
        for _ in range(10):
            with Pipeline([sh("printf x"), Command(("cat",))]) as pipeline:
                results.append(read_all(pipeline))

    results: list[bytes] = []
    threads = [threading.Thread(target=work, args=(results,)) for _ in range(8)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [b"x"] * 80
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("refused", ["stderr", "feed"])
def test_a_thread_that_the_system_refuses_is_an_error_that_leaves_nothing(
    refused: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    with Pipeline([Command(("true",))]) as warm:  # the thread that starts programs is there from now on
        warm.drain()
    before = open_descriptors()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with (
        pytest.raises(ToolError, match="refused a new thread") as caught,
        Pipeline([sh("sleep 100; :", mark)], feed=lambda sink: None),
    ):
        pass
    assert "ulimit" in caught.value.hint
    until(lambda: with_mark(mark) == [])
    assert open_descriptors() == before

"""What runs on this machine, read from /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def with_mark(mark: str) -> list[int]:
    """Process ids (not ours, no zombies) that carry ``mark`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def streams_of(config: Path) -> list[int]:
    """Process ids of the streams that a service with this configuration has started, whether they have begun yet or
    not."""
    found = []
    for pid in with_mark(str(config)):
        with contextlib.suppress(OSError):
            if b"run-stream" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def end_streams_of(config: Path) -> None:
    """Kill what outlived its service. It must be over: it would start others."""
    while found := streams_of(config):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def until(condition: Callable[[], bool], *, seconds: float = 300.0) -> None:
    """Wait until ``condition`` holds; fail if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)

"""A process and everything below it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def family(pid: int) -> list[int]:
    """``pid`` and all processes below it."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += [int(word) for word in (task / "children").read_text(encoding="ascii").split()]
    return found


def kill_family(pid: int) -> None:
    """SIGKILL for a child of ours, which nobody has reaped yet, and for all below it.

    The child is stopped first, so that it starts nothing while it is being looked at.
    """
    ends: list[int] = []
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    for one in family(pid):
        with contextlib.suppress(ProcessLookupError):
            ends.append(os.pidfd_open(one))
    for end in ends:
        # By descriptor: the number may already belong to somebody else.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(end, signal.SIGKILL)
        os.close(end)

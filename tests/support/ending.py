"""The end of what tests did not start themselves, and are to leave nothing of."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from pathlib import Path


def end(pid: int) -> None:
    """Kill a server that a restore has started, and wait for its end."""
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        assert select.select([process], [], [], 60)[0]
    finally:
        os.close(process)


def unmount(path: Path) -> None:
    """The kernel may hold files of a server for a moment longer than there is a process of it; nobody else may."""
    deadline = time.monotonic() + 300
    while (done := subprocess.run(["umount", str(path)], check=False, capture_output=True, text=True)).returncode:
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.05)

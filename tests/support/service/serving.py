"""Programs that listen on a port of 127.0.0.1 for the length of the tests and never outlive them."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# PR_SET_PDEATHSIG fires when the *thread* that started the child ends, so one thread that lives as long as
# the interpreter starts them all.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="service-starter")


class ServiceDiedError(Exception):
    """It did not come to listen; the message holds the end of its log."""


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody else is given while the block lasts: who asks for it by its number, and for SO_REUSEADDR as
    every server does, may listen on it, and until then connections are refused."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def start_service(
    argv: Sequence[str], log: Path, port: int, *, environment: Mapping[str, str] | None = None, timeout: float = 300.0
) -> subprocess.Popen[bytes]:
    """Start ``argv``, which writes to ``log``, and return when it listens on ``port``. Raises ServiceDiedError."""
    process = _starter.submit(_spawn, ["setpriv", "--pdeathsig", "KILL", "--", *argv], log, environment).result()
    deadline = time.monotonic() + timeout
    while True:
        with socket.socket() as knock:
            if knock.connect_ex(("127.0.0.1", port)) == 0:
                return process
        if process.poll() is not None or time.monotonic() > deadline:
            end_service(process, signal.SIGKILL)
            raise ServiceDiedError(f"{argv[0]} does not listen on {port}:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.02)


def end_service(process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGTERM, timeout: float = 20.0) -> None:
    """Send ``how``, then wait; killed after ``timeout`` seconds."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(how)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _spawn(argv: Sequence[str], log: Path, environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    with log.open("ab") as sink:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            env=None if environment is None else dict(environment),
        )

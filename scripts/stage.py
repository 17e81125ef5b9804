"""How the demo shows what it does: each command as one would type it, each expectation, and what it started stopped."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(sys.executable).with_name("backupd")


class DemoFailedError(Exception):
    """Something is not as it must be."""


def say(text: str = "") -> None:
    print(text, flush=True)


def step(number: int, title: str) -> None:
    say(f"\n== {number}. {title}")


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise DemoFailedError(what)
    say(f"   ok: {what}")


class CommandLine:
    """Runs ``backupd`` and shows each command as one would type it."""

    def __init__(self, config: Path) -> None:
        self._env = os.environ | {"BACKUPD_CONFIG": str(config)}

    def show(self, *words: str) -> None:
        """Run a command for its text."""
        self._run(words, stdout=None)

    def ask(self, *words: str) -> Any:
        """Run a command for its JSON document; progress stays visible."""
        return json.loads(self._run((*words, "--json"), stdout=subprocess.PIPE))

    def quietly(self, *words: str) -> str:
        """Run a command without showing it."""
        return subprocess.run(
            [PROGRAM, *words], env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    def _run(self, words: Sequence[str], stdout: int | None) -> str:
        say(f"\n$ backupd {shlex.join(words)}")
        done = subprocess.run(
            [PROGRAM, *words], env=self._env, stdin=subprocess.DEVNULL, stdout=stdout, text=True, check=False
        )
        if done.returncode != 0:
            raise DemoFailedError(f"`backupd {shlex.join(words)}` exited with {done.returncode}")
        return done.stdout or ""

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command that goes on until it is stopped."""
        say(f"\n$ backupd {shlex.join(words)} &")
        return subprocess.Popen([PROGRAM, *words], env=self._env, stdin=subprocess.DEVNULL, text=True)


def until(answer: Callable[[], Any], what: str, seconds: float = 180) -> Any:
    """Ask until the answer is a true one; gives it."""
    give_up = time.monotonic() + seconds
    while not (found := answer()):
        if time.monotonic() > give_up:
            raise DemoFailedError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.5)
    return found


@contextlib.contextmanager
def service(backupd: CommandLine) -> Iterator[None]:
    """`backupd serve` works while the block does."""
    with backupd.start("serve") as process:
        try:
            yield
            if process.poll() is not None:
                raise DemoFailedError(f"the service ended with {process.returncode}")
        finally:
            process.send_signal(signal.SIGINT)  # the streams end, too
            process.wait()


@contextlib.contextmanager
def stopped_at_the_end(pid: int) -> Iterator[None]:
    """The server with this process id, started by ``restore --start``, does not outlive the block."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            give_up = time.monotonic() + 60
            while Path(f"/proc/{pid}").exists():
                if time.monotonic() > give_up:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)

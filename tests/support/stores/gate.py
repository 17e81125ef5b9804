"""A program in PATH that stands before the real one and stops at a chosen place until it is let on."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = """#!/bin/bash
# Stands before the real {program} in PATH. Passes on {limit} bytes of its output, then waits for {base}/go.
# Who is in a sandbox cannot say that it waits: the gate is for none.
case " $* " in *" --version"*) [ -w {base} ] || exit 3 ;; esac
case " $* " in *" {only}"*) ;; *) exec {real} "$@" ;; esac
exec {python} - "$@" <<'PROGRAM'
import os, subprocess, sys, time
limit, seen = {limit}, 0
child = subprocess.Popen(["{real}", *sys.argv[1:]], stdout=subprocess.PIPE)
while True:
    if seen >= limit and not os.path.exists("{base}/go"):
        open("{base}/waiting", "w").close()
        while not os.path.exists("{base}/go"):
            time.sleep(0.02)
    piece = child.stdout.read1(65536 if seen >= limit else min(65536, limit - seen))
    if not piece:
        break
    seen += len(piece)
    os.write(1, piece)
sys.exit(child.wait())
PROGRAM
"""


@dataclass
class Gate:
    """``limit``: bytes of output that pass before it closes; 0 stops the program before its first."""

    base: Path
    program: str
    only: str
    limit: int

    def __post_init__(self) -> None:
        self.base.mkdir(parents=True, exist_ok=True)
        self.base.chmod(0o777)  # what waits is not root
        real, python = shutil.which(self.program), shutil.which("python3", path="/usr/bin") or shutil.which("python3")
        assert real is not None
        path = self.base / self.program
        path.write_text(
            _SCRIPT.format(
                program=self.program, only=self.only, limit=self.limit, real=real, python=python, base=self.base
            )
        )
        path.chmod(0o755)

    @property
    def path(self) -> str:
        """A PATH with the gate in front."""
        return f"{self.base}:{os.environ['PATH']}"

    def waiting(self) -> bool:
        return (self.base / "waiting").exists()

    def open(self) -> None:
        (self.base / "go").touch()


def until(condition: Callable[[], object], *, seconds: float = 240.0) -> None:
    """Wait for ``condition``; fails when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def processes(word: str) -> list[str]:
    """Command lines of all processes that name ``word``."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if word in line:
                found.append(f"{folder.name}: {line}")
    return found


def freeze(program: str, word: str) -> bool:
    """SIGSTOP for processes of ``program`` that name ``word``; were there any?"""
    frozen = False
    for line in processes(word):
        pid, _, command = line.partition(": ")
        if Path(command.split(" ")[0]).name == program:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(int(pid), signal.SIGSTOP)
                frozen = True
    return frozen


def is_frozen(pid: int) -> bool:
    """Has a SIGSTOP reached every thread of this process?"""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return all(stat.rpartition(")")[2].split()[0] in "Tt" for stat in stats)

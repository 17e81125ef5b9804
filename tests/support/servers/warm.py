"""Commands of backupd without the time to import it; each is a process of its own all the same."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_SCRIPT = Path(__file__).with_name("warm_start.py")


@cache
def _door(under: tuple[str, ...]) -> str:
    """Where this process's warm one listens; started at the first call, gone with this process."""
    folder = tempfile.mkdtemp(prefix="warm-")
    address = f"{folder}/door"
    with socket.socket(socket.AF_UNIX) as door:  # made here: who is confined can perhaps make none
        door.bind(address)
        door.listen(64)
        process = subprocess.Popen(
            [*under, sys.executable, str(_SCRIPT), str(door.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[door.fileno()],
        )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    def close() -> None:
        process.communicate()
        Path(address).unlink()
        Path(folder).rmdir()

    atexit.register(close)
    return address


@dataclass
class Begun:
    """A command that goes on: ``pid``, and how it ended. As subprocess has it."""

    pid: int
    _line: socket.socket
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self.wait(60)
        return self.returncode

    def send_signal(self, how: int) -> None:
        os.kill(self.pid, how)

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            self._line.settimeout(timeout)
            self.returncode = int.from_bytes(_exactly(self._line, 4), "big", signed=True)
            self._line.close()
        return self.returncode


def begin(argv: Sequence[str], env: Mapping[str, str], log: Path) -> Begun:
    """``backupd ARGV``, whose words go to ``log``."""
    request = json.dumps({"argv": list(argv), "env": dict(env), "cwd": str(Path.cwd())}).encode()
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(60)
    line.connect(_door(()))
    with log.open("ab") as out, Path(os.devnull).open("rb") as nothing:
        socket.send_fds(line, [len(request).to_bytes(4, "big")], [nothing.fileno(), out.fileno(), out.fileno()])
    line.sendall(request)
    return Begun(int.from_bytes(_exactly(line, 4), "big"), line)


def run(argv: Sequence[str], env: Mapping[str, str], timeout: float, under: Sequence[str] = ()) -> tuple[int, str, str]:
    """``backupd ARGV``: exit code as subprocess tells it, stdout, stderr. Raises AssertionError when it hangs.
    ``under``: words before the program that the commands are forked from."""
    request = json.dumps({"argv": list(argv), "env": dict(env), "cwd": str(Path.cwd())}).encode()
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        Path(os.devnull).open("rb") as nothing,
        socket.socket(socket.AF_UNIX) as line,
    ):
        line.settimeout(timeout)
        line.connect(_door(tuple(under)))
        socket.send_fds(line, [len(request).to_bytes(4, "big")], [nothing.fileno(), out.fileno(), err.fileno()])
        line.sendall(request)
        process = int.from_bytes(_exactly(line, 4), "big")
        try:
            code = int.from_bytes(_exactly(line, 4), "big", signed=True)
        except TimeoutError:
            os.killpg(process, signal.SIGKILL)
            hung = True
        else:
            hung = False
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
        if hung:
            raise AssertionError(f"{' '.join(argv)} hung:\n" + "\n".join(texts))
        return code, texts[0], texts[1]


def _exactly(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = line.recv(size - len(found))
        assert part, "the warm process is gone"
        found += part
    return found

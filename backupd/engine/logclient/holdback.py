"""Does the program that copies binary logs keep what the server has sent, until it has some more of it?

mysqlbinlog writes through stdio, and before its fflush (5.6; 5.7.13 has none, 5.7.26 has) up to 4 KiB of a copy stay in
the program: the last transactions of a quiet server would reach no archive, and its stream would look like a dead
connection for ever. That is a property of the program, so it is tried once and remembered by its SHA-256.

The trial writes nothing into the server: the copy of its newest log begins where the log ends, so that all that comes
is the head of the file, at once. A program that has not written it after ``PATIENCE`` seconds, while a copy of the very
same bytes that *ends* has brought them, holds them back. It costs the server one connection, which a server that
nobody writes to keeps until it writes its next event: another reason to try only once.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from backupd.engine.instance.sandbox import worker
from backupd.engine.logclient.log_client import BinlogTool
from backupd.engine.logclient.run import log_client, make_intake
from backupd.engine.sql.client import Connection
from backupd.model.errors import CancelledError, ToolError
from backupd.model.server_facts import Position, Tool
from backupd.process.command import Command
from backupd.process.folders import make_passable, write_whole
from backupd.process.output import StderrReader
from backupd.process.supervise import spawn, stop

PATIENCE = 5.0
"""Seconds within which what a server has sent is to be in the file."""
_MEMORY = "programs.json"


class HoldsBackError(ToolError):
    """Binary logs cannot be streamed with this program."""

    def __init__(self, tool: Tool) -> None:
        named = tool.version_text if tool.path in tool.version_text else f"{tool.path} ({tool.version_text})"
        super().__init__(
            f"{named} holds back the end of each binary log, so the last transactions of a quiet server would not be "
            "archived: its binary log is not streamed until the mysqlbinlog of MySQL 5.7.26 or later is installed",
            detail=f"{PATIENCE:.0f} s after the server had sent them the bytes were not in the file, as with MySQL 5.6 "
            "and 5.7 before 5.7.26",
            hint="install the mysqlbinlog of MySQL 5.7.26 or later or of 8.0, which copies the logs of older servers "
            "too, and name it: `programs: {mysqlbinlog: /path/to/mysqlbinlog}`",
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """``holds``: does it hold bytes back? None where that could not be tried, and ``said`` tells why."""

    holds: bool | None
    said: str = ""


def tried(
    tool: BinlogTool,
    connection: Connection,
    position: Position,
    spool: Path,
    connection_id: int,
    *,
    cancel: threading.Event | None = None,
) -> Trial:
    """Try it, or give what was found before. ``position``: where the server writes. ``spool``: where it is remembered,
    and a folder may be made. Raises CancelledError, OSError."""
    memory = spool / _MEMORY
    known = _read(memory)
    name = f"{tool.tool.sha256} {tool.tool.version_text}"
    if isinstance(found := known.get(name), bool):
        return Trial(found)
    spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=spool, prefix="trial-") as folder:
        if worker() is not None:  # who copies comes to its own folder by its path
            for passed in (spool, Path(folder)):
                make_passable(passed)
        trial = _try(tool, connection, position, Path(folder), connection_id, cancel or threading.Event())
    if trial.holds is not None:
        write_whole(memory, json.dumps({**known, name: trial.holds}).encode())
    return trial


def _try(
    tool: BinlogTool,
    connection: Connection,
    position: Position,
    folder: Path,
    connection_id: int,
    cancel: threading.Event,
) -> Trial:
    going, ending = folder / "going", folder / "ending"
    for intake in (going, ending):
        make_intake(intake)
    with (
        log_client(tool, connection) as client,
        _Program(client.stream(going, position.file, connection_id, start=position.pos)) as one,
    ):
        if (said := one.wait(going / position.file, cancel)) is not None:
            return Trial(None, said)
        if _size(going / position.file):
            return Trial(False)
        with _Program(client.fetch(ending, position.file, connection_id + 1, start=position.pos)) as other:
            said = other.wait(None, cancel)
        if said != "" or not _size(ending / position.file):
            return Trial(None, said or f"nothing of {position.file} came from {connection.address}")
        return Trial(True) if not _size(going / position.file) and one.runs() else Trial(None, "it was interrupted")


class _Program:
    """Runs while the block lasts."""

    def __init__(self, command: Command) -> None:
        self._command = command

    def __enter__(self) -> _Program:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._voice = StderrReader([self._command.program], [reader])
        self._voice.start()
        try:
            self._child = spawn(self._command, stdin=nothing, stdout=writer, stderr=writer)
        except BaseException:
            os.close(writer)
            self._voice.finish()
            raise
        else:
            os.close(writer)
        finally:
            os.close(nothing)
        return self

    def __exit__(self, *_error: object) -> None:
        stop([self._child])
        self._voice.finish()

    def runs(self) -> bool:
        return self._child.poll() is None

    def wait(self, path: Path | None, cancel: threading.Event) -> str | None:
        """Until ``path`` holds something (None), the program has ended (its last words, "" where it ended well), or
        PATIENCE is over (None)."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            code = self._child.poll()  # first the program, then its file: it may have written right before its end
            if path is not None and _size(path):
                return None
            if code is not None:
                self._voice.finish()
                said = self._voice.tail(0, 20).strip()
                return "" if code == 0 and path is None else said or f"it ended with {code}"
            if cancel.wait(0.02):
                raise CancelledError("stopped while a program was tried")
        return None


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _read(memory: Path) -> dict[str, object]:
    try:
        found = json.loads(memory.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

"""Processes of jobs and streams, forked from one process that has imported everything: starting one is mostly
importing, half a second of CPU, and what is imported once is shared memory of all.

Where there is no fork server, a process is started as any other program.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from backupd.app.context.logging_setup import say
from backupd.app.context.settings import Settings
from backupd.app.runtime.child_process import ChildProcess, begin, command_of, python, run, watched
from backupd.process.command import Child, Command, adopt, adopting, stop
from backupd.process.forking import GO, LARGEST, READY, TITLE_ROOM

ANSWER = 5.0
"""Seconds that it may take to fork."""
IMPORTING = 60.0
"""Seconds that a fork server may take to begin until processes are started without it."""
PAUSE = 60.0
"""Seconds without a fork server after one that ended unasked, or did not answer."""


class ForkServer:
    """Started when it is first needed, and replaced after it has ended, after files of the program were exchanged, and
    when another kind of destination comes into use. A context manager; threads may share it. ``program``: the command
    of a module of ours."""

    def __init__(self, program: Callable[..., Command] = python) -> None:
        self._program = program
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self._connection: socket.socket | None = None
        self._ready = False
        self._kinds: tuple[str, ...] = ()
        self._began = self._next_start = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._end()
            self._next_start = float("inf")

    @property
    def pid(self) -> int | None:
        """Of the fork server that is ready."""
        process = self._process
        return process.child.pid if process is not None and self._ready else None

    def start(
        self, settings: Settings, held: Path, *arguments: str, log: Path | None = None, outlives: bool = False
    ) -> ChildProcess:
        """As ``child_process.start``, which it does where nothing can be forked."""
        command = command_of(settings, held, *arguments)
        kinds = tuple(sorted({one.type for one in settings.destinations.values()}))
        return begin(
            lambda stderr: (
                self._forked(command, kinds, stderr, outlives=outlives) or run(command, stderr, outlives=outlives)
            ),
            held,
            log,
            outlives=outlives,
        )

    # -- inside

    def _forked(self, command: Command, kinds: tuple[str, ...], stderr: int, *, outlives: bool) -> Child | None:
        """None: it is to be started as any other program."""
        with self._lock:
            try:
                connection = self._connected(kinds)
                return None if connection is None else self._ask(connection, command, stderr, outlives=outlives)
            except (OSError, ValueError, KeyError) as error:
                self._gave_up(str(error))
                return None

    def _connected(self, kinds: tuple[str, ...]) -> socket.socket | None:
        """To the fork server, which is started where there is none; None while it may not be, or is not ready in time.
        Raises OSError where it has ended."""
        if kinds != self._kinds:
            self._end()
        if self._connection is None and time.monotonic() < self._next_start:
            return None
        connection = self._connection or self._begin(kinds)
        if not self._ready:
            connection.settimeout(max(0.0, self._began + IMPORTING - time.monotonic()))
            try:
                self._ready = connection.recv(LARGEST) == READY
            except (TimeoutError, BlockingIOError):
                return None
            if not self._ready:
                raise ConnectionResetError("the fork server ended before it was ready")
            connection.settimeout(ANSWER)
        return connection

    def _begin(self, kinds: tuple[str, ...]) -> socket.socket:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, its:
            command = self._program("backupd.cli.fork_server", str(its.fileno()), *kinds, TITLE_ROOM)
            self._process = watched(lambda stderr: run(command, stderr, pass_fds=(its.fileno(),)), None, None)
            self._connection = ours.dup()
        self._kinds, self._began = kinds, time.monotonic()
        return self._connection

    def _ask(self, connection: socket.socket, command: Command, stderr: int, *, outlives: bool) -> Child | None:
        with ExitStack() as stack:
            permission, go = os.pipe2(os.O_CLOEXEC)
            stack.callback(os.close, go)
            with adopting():
                try:
                    words = command.argv[len(python("backupd").argv) :]
                    request = json.dumps({"words": words, "shown": command.argv, "outlives": outlives})
                    socket.send_fds(connection, [request.encode()], [stderr, permission])
                finally:
                    os.close(permission)
                message = connection.recv(LARGEST)
            if not message:
                raise ConnectionResetError("the fork server has ended")
            answer: dict[str, Any] = json.loads(message)
            if answer.get("outdated"):
                say("fork-server-outdated", "files of backupd were replaced: new jobs run the installed version")
                self._end()
                return None
            if "error" in answer:
                raise OSError(str(answer["error"]))
            child = adopt(command, int(answer["pid"]))
            with suppress(BrokenPipeError):  # it was killed already; whoever watches it sees that
                os.write(go, GO)
            return child

    def _gave_up(self, why: str) -> None:
        process = self._process
        self._end()
        self._next_start = time.monotonic() + PAUSE
        words = process.last_words() if process is not None else ""
        message = f"jobs cannot be forked: {why}; for the next {PAUSE:g} s each starts as a program, which is slower"
        say("fork-server-trouble", f"{message}\n{words}".rstrip(), level=logging.WARNING)

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            stop([self._process.child], polite_seconds=0.0)
            self._process.ended()
        self._process = self._connection = None
        self._ready = False

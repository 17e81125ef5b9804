"""What programs say on stderr: passed on line by line, kept as a bounded tail, written to a log."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from backupd.process.redact import Redactor

TAIL_LINES = 400
TAIL_WIDTH = 2000
"""Characters kept of one line."""
LINE_LIMIT = 256 * 1024
"""Bytes after which a line without an end is taken for one."""
LOG_LIMIT = 64 * 1024 * 1024
"""Bytes after which a log file takes no more."""


@dataclass(slots=True)
class _Voice:
    program: str
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    rest: bytearray = field(default_factory=bytearray)
    redactor: Redactor = field(default_factory=Redactor)


class StderrReader:
    """One thread that reads the stderr of all programs of a pipeline.

    ``on_line`` gets each line as it is (it may hold secrets); tail and log get it redacted. An error raised
    by ``on_line`` is kept in ``failure`` while reading goes on, because a program that nobody listens to would
    block; whoever owns the reader raises it. A log that cannot be written ends, and the work goes on.
    """

    def __init__(
        self,
        programs: Sequence[str],
        descriptors: Sequence[int],
        *,
        log: Path | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        self.failure: BaseException | None = None
        self._voices = [_Voice(program) for program in programs]
        self._descriptors = tuple(descriptors)
        self._on_line = on_line
        self._log = _open_log(log) if log is not None else None
        self._logged = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, name="stderr", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread for us
            if self._log is not None:
                self._log.close()
            raise

    def finish(self, seconds: float = 5.0) -> None:
        """Wait for the last line of every program; they must have exited. Gives up on strangers holding the
        pipe."""
        self._thread.join(seconds)
        self._stopping.set()
        self._thread.join()

    def tail(self, index: int, lines: int = TAIL_LINES) -> str:
        """The last ``lines`` lines of the program at ``index``, redacted."""
        return "\n".join(list(self._voices[index].tail)[-lines:])

    def _read(self) -> None:
        with contextlib.ExitStack() as stack:
            if self._log is not None:
                stack.enter_context(self._log)
            selector = stack.enter_context(selectors.DefaultSelector())
            for voice, descriptor in zip(self._voices, self._descriptors, strict=True):
                stack.callback(os.close, descriptor)
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ, voice)
            while selector.get_map():
                ready = selector.select(0.2)
                for key, _ in ready:
                    if not self._take(key.fd, key.data):
                        selector.unregister(key.fd)
                if not ready and self._stopping.is_set():
                    break
            for voice in self._voices:
                if voice.rest:
                    self._say(voice, bytes(voice.rest))

    def _take(self, descriptor: int, voice: _Voice) -> bool:
        try:
            chunk = os.read(descriptor, 65536)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        voice.rest += chunk
        *lines, rest = bytes(voice.rest).split(b"\n")
        voice.rest = bytearray(rest)
        for line in lines:
            self._say(voice, line)
        if len(voice.rest) > LINE_LIMIT:
            self._say(voice, bytes(voice.rest))
            voice.rest.clear()
        return True

    def _say(self, voice: _Voice, raw: bytes) -> None:
        line = raw.decode("utf-8", "replace").rstrip("\r")
        shown = voice.redactor.line(line)[:TAIL_WIDTH]
        if shown.strip():  # behind "completed OK!" mariadb-backup now and then ends a line that it has not begun
            voice.tail.append(shown)
            self._write(voice, shown)
        try:
            if self._on_line is not None:
                self._on_line(line)
        except BaseException as error:  # noqa: BLE001  not hidden: the pipeline raises it
            self._on_line = None
            self.failure = self.failure or error

    def _write(self, voice: _Voice, shown: str) -> None:
        if self._log is None or self._logged >= LOG_LIMIT:
            return
        try:
            self._logged += self._log.write(f"{voice.program}: {shown}\n".encode())
            if self._logged >= LOG_LIMIT:
                self._log.write(b"(the log is full; the rest is dropped)\n")
        except OSError as error:
            # No room for the log is no reason to end a backup.
            voice.tail.append(f"(the log takes no more: {error.strerror})")
            self._logged = LOG_LIMIT


def _open_log(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return os.fdopen(descriptor, "ab", buffering=0)

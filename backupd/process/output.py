"""What tools print: passed on line by line, kept as a bounded tail, written to a log, without secrets and table data.

Known to leak: mariadb-backup prints SHOW GRANTS with password hashes when a privilege is missing, and the hex and ASCII
dump of a whole page (rows of users) when a checksum is wrong; xtrabackup prints the SQL of long queries; servers print
the running statement when they crash.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

_HIDDEN = "[hidden]"
_QUOTED = r"""(?:'(?:[^'\\]|\\.|'')*'?|"(?:[^"\\]|\\.|"")*"?)"""

# No rule may begin to match at each letter of a word and look to its end from there: lines of a megabyte are printed.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    # Hashes of mysql_native_password, and the $A$ form of caching_sha2_password.
    (re.compile(r"\*[0-9A-Fa-f]{40}\b"), _HIDDEN),
    (re.compile(r"\$A\$\d{3}\$.{20,}?(?='|\"|$)"), _HIDDEN),
    (
        re.compile(
            rf"(\bIDENTIFIED\s+(?:BY|WITH|VIA)(?:\s+PASSWORD)?(?:\s+[`'\"]?\w+[`'\"]?)?"
            rf"(?:\s+(?:USING|AS|BY))?\s*\(?\s*)(?:0x[0-9A-Fa-f]+|{_QUOTED})",
            re.IGNORECASE,
        ),
        rf"\1{_HIDDEN}",
    ),
    (
        re.compile(r"(\b(?:USING|AS)\s+)(?:0x[0-9A-Fa-f]{16,}|'\$[^']*'|'[0-9A-Za-z+/=.]{32,}')", re.IGNORECASE),
        rf"\1{_HIDDEN}",
    ),
    (re.compile(rf"(\bPASSWORD\s*\(\s*){_QUOTED}", re.IGNORECASE), rf"\1{_HIDDEN}"),
    (
        re.compile(
            rf"((?:password|passwd|passphrase|secret|token|mysql_pwd|api_?key)\w{{0,64}}\s{{0,16}}=\s*)"
            rf"(?:{_QUOTED}|(?!\[hidden\])[^\s,;'\"]+)",
            re.IGNORECASE,
        ),
        rf"\1{_HIDDEN}",
    ),
    (re.compile(r"(://[^/@:\s]*:)[^/@\s]+@"), rf"\1{_HIDDEN}@"),
    # What scripts print of the programs that they call: headers, accounts as curl takes them, answers as JSON.
    (
        re.compile(
            r"(\b(?:authorization|x-[\w-]{0,40}?(?:token|key|secret)|(?:private|api)-(?:token|key))\b['\"]?\s{0,4}[:=]"
            r"\s{0,4}['\"]?)(?!Bearer TOKEN\b)[^\s'\";,]+(?:[ \t]{1,4}[^\s'\";,]+)?",
            re.IGNORECASE,
        ),
        rf"\1{_HIDDEN}",
    ),
    (re.compile(r"(\bbearer\s{1,4})[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1{_HIDDEN}"),
    (
        re.compile(
            r"((?:^|(?<=[\s'\"]))(?:-u|--user|--proxy-user)[\s=]{0,4}(['\"])?[^\s:'\"]{1,100}:)(?(2)[^'\"]+|[^\s'\"]+)"
        ),
        rf"\1{_HIDDEN}",
    ),
    (
        re.compile(
            rf"""(["'][\w-]{{0,40}}?(?:password|passwd|passphrase|secret|token|api_?key)\w{{0,40}}["']\s{{0,4}}:\s{{0,4}})"""
            rf"{_QUOTED}",
            re.IGNORECASE,
        ),
        rf"\1{_HIDDEN}",
    ),
    # " len 16384; hex 0f...; asc ...;" is one line of InnoDB's page dump.
    (re.compile(r"(\blen \d+; hex ).*", re.IGNORECASE | re.DOTALL), r"\1[page content hidden]"),
    (re.compile(r"^(\s*(?:InnoDB: )?)(?:[0-9A-Fa-f]{2}[ ]?){24,}.*$", re.DOTALL), r"\1[page content hidden]"),
    (re.compile(r"\b[0-9A-Fa-f]{128,}\b"), "[hex hidden]"),
    # The statement in a crash report, and xtrabackup's list of long queries.
    (re.compile(r"(\bQuery\s*\((?:0x)?[0-9A-Fa-f]+\)\s*:\s*).+", re.DOTALL), r"\1[statement hidden]"),
    (re.compile(r"(\bQuery\s*:\s*).+", re.DOTALL), r"\1[statement hidden]"),
    (re.compile(r"(\bquery \d+ \(duration \d+ sec\)\s*:\s*).+", re.IGNORECASE | re.DOTALL), r"\1[statement hidden]"),
    # Literals of a statement that a tool quotes: names stay readable, values do not.
    (re.compile(r"(\b(?:INSERT|REPLACE)\b.*?\bVALUES?\b\s*).+", re.IGNORECASE | re.DOTALL), r"\1[values hidden]"),
    (re.compile(r"(\bUPDATE\b\s+\S+\s+SET\b\s*).+", re.IGNORECASE | re.DOTALL), r"\1[values hidden]"),
)
_MAYBE = re.compile(
    r"\*[0-9A-Fa-f]{40}|IDENTIFIED|USING|\bAS\b|passw|passphrase|secret|token|://|hex |"
    r"[0-9A-Fa-f]{2}(?: ?[0-9A-Fa-f]{2}){23}|query|VALUE|UPDATE|\$A\$|_pwd|api_?key|authorization|[-](?:token|key)|"
    r"\bx-|bearer|(?:^|[\s'\"])(?:-u|-p\S|--user|--proxy-user)",
    re.IGNORECASE,
)
_CLIENT = re.compile(r"\b(?:mysql|mariadb|mydumper|myloader|xtrabackup|innobackupex|pt-)", re.IGNORECASE)
_CLIENTS_PASSWORD = re.compile(rf"((?:^|(?<=[\s'\"]))-p)(?:{_QUOTED}|[^\s'\"]+)")
"""Where such a program is called. What the same letter is for another one is hidden with it."""


_STATEMENT_HIDDEN = "[statement hidden]"
_OWN_LINE = re.compile(
    r"\.?(?:\d{6} +\d|\d{4}-\d\d-\d\d[ T]|\[\d\d\] |>> log|xtrabackup: |mariabackup: |innobackupex: |InnoDB: |Error: |"
    r"Unable to obtain lock|MySQL binlog position|Connection ID|Status: |Optimizer switch|Some pointers)"
)
"""How a line begins that a tool or server wrote, not a client's statement of several lines."""


class Redactor:
    """``redact`` for the lines of one program in order: a statement keeps its line ends when it is printed, so what
    follows the first line of one is hidden, too, up to the program's next line."""

    def __init__(self) -> None:
        self._inside = False

    def line(self, line: str) -> str:
        """The next line of the output, without what must not be shown."""
        if self._inside and not _OWN_LINE.match(line):
            return _STATEMENT_HIDDEN if line.strip() else line
        shown = redact(line)
        self._inside = shown.endswith(_STATEMENT_HIDDEN)
        return shown


def redact(line: str) -> str:
    """``line`` without secrets and table data. What remains names users, tables, files and errors as
    before."""
    if not _MAYBE.search(line):
        return line
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return _CLIENTS_PASSWORD.sub(rf"\1{_HIDDEN}", line) if _CLIENT.search(line) else line


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
        """Begin to read, in a new thread."""
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

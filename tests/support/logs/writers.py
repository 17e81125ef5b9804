"""Clients that keep their own record of every COMMIT that was answered OK, and what the server's own tool reads of that
in binary logs."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pymysql

from tests.support.oracle import DataDiffersError
from tests.support.servers.server import connect

SCHEMA = (
    "CREATE DATABASE promise",
    """CREATE TABLE promise.kept (id BIGINT AUTO_INCREMENT PRIMARY KEY, token CHAR(16), writer INT, number INT,
    part INT, filler LONGTEXT, KEY (token))""",
)
Key = tuple[int, int]
"""Number of a writer, number of its transaction."""
_SIZES = (10, 10, 200, 200, 2_000, 40_000)
_ROWS = "INSERT INTO `promise`.`kept`"
_VALUE = re.compile(r"###   @(\d)='?(-?\w+)'?")


@dataclass(frozen=True)
class Answered:
    """One COMMIT that was answered OK: rows of it, when, and after how many seconds."""

    rows: int
    at: float
    seconds: float


class Writers:
    """``count`` clients that write transactions of one to three rows, marked ``token``, until the server is gone or the
    block ends; each writes down what was answered OK in a file beneath ``folder``, and goes on with a new connection
    where ``again``."""

    def __init__(
        self, door: Path, folder: Path, token: str, dice: random.Random, *, count: int = 8, again: bool = False
    ) -> None:
        self.token = token
        self._socket, self._folder, self._again = door, folder / token, again
        self._folder.mkdir(parents=True)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number, random.Random(dice.random())), daemon=True)
            for number in range(count)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        self._stop.set()

    def stop(self) -> None:
        """Returns when no client waits for an answer any more."""
        self._stop.set()
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive(), "a client still waits for its answer"

    def answered(self) -> dict[Key, Answered]:
        """By their own record, as it is now."""
        found = {}
        for path in self._folder.iterdir():
            for line in path.read_text().splitlines():
                writer, number, rows, at, seconds = line.split()
                found[int(writer), int(number)] = Answered(int(rows), float(at), float(seconds))
        return found

    def _run(self, writer: int, dice: random.Random) -> None:
        record = os.open(self._folder / str(writer), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        number = 0
        try:
            while not self._stop.is_set():
                with contextlib.suppress(pymysql.err.Error, OSError):
                    with socket.socket(socket.AF_UNIX) as knock:  # PyMySQL leaks its own when nobody listens
                        knock.connect(str(self._socket))
                    connection = connect(self._socket, autocommit=False)
                    with connection, connection.cursor() as cursor:
                        while not self._stop.is_set():
                            number += 1
                            rows = dice.randint(1, 3)
                            for part in range(rows):
                                cursor.execute(
                                    "INSERT INTO promise.kept (token, writer, number, part, filler)"
                                    " VALUES (%s, %s, %s, %s, REPEAT('x', %s))",
                                    (self.token, writer, number, part, dice.choice(_SIZES)),
                                )
                            begun = time.monotonic()
                            connection.commit()
                            seconds = time.monotonic() - begun
                            os.write(record, f"{writer} {number} {rows} {time.time():.6f} {seconds:.6f}\n".encode())
                if not self._again:
                    return
                self._stop.wait(0.05)
        finally:
            os.close(record)


def committed(program: str, logs: Iterable[Path], token: str) -> dict[Key, int]:
    """What the server's own tool reads in ``logs`` of the transactions that are marked ``token``: rows of each. The end
    of a file may be torn."""
    found: dict[Key, int] = {}
    for path in logs:
        with subprocess.Popen(
            [program, "--no-defaults", "-v", "--base64-output=decode-rows", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        ) as tool:
            assert tool.stdout is not None
            open_rows: dict[Key, int] = {}
            values: dict[str, str] = {}
            for line in tool.stdout:
                if line.startswith("###   @") and (value := _VALUE.match(line)):
                    values[value[1]] = value[2]
                    if value[1] == "5" and values.get("2") == token:
                        key = int(values["3"]), int(values["4"])
                        open_rows[key] = open_rows.get(key, 0) + 1
                elif line.startswith("### INSERT"):
                    values = {}
                elif line.startswith(("BEGIN", "START TRANSACTION")):
                    open_rows = {}
                elif line.startswith("COMMIT"):
                    found |= open_rows
                    open_rows = {}
    return found


def lost(answered: Mapping[Key, Answered], stored: Mapping[Key, int]) -> Sequence[Key]:
    """Transactions that were answered OK and are not stored as a whole."""
    return [key for key, one in answered.items() if stored.get(key) != one.rows]


def none_lost(answered: Mapping[Key, Answered], stored: Mapping[Key, int], what: str) -> None:
    """Raises DataDiffersError."""
    if missing := lost(answered, stored):
        late = max(one.at for one in answered.values())
        shown = [f"{key} answered {late - answered[key].at:.3f} s before the last" for key in missing[:20]]
        raise DataDiffersError(f"{len(missing)} of {len(answered)} acknowledged commits are lost, {what}: {shown}")

"""A real service process, without a database server, and what it said."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from backupd.catalog.session import Catalog, open_catalog
from backupd.model.job import JobRecord, JobState
from tests.support.service.house import GOLD, Office

BACKUPD = str(Path(sys.executable).with_name("backupd"))
HOUR = (datetime.now(ZoneInfo("Europe/Berlin")) + timedelta(hours=12)).hour
FAR = GOLD.replace("0 2 ", f"0 {HOUR} ")
"""The clock is a real one: what is due half a day from now is not due in the middle of a test."""


def until(condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


class Service:
    """A running `backupd serve` and what it said."""

    def __init__(self, office: Office, *args: str, config: Path | None = None) -> None:
        self.log = office.base / f"log-{time.monotonic_ns()}"
        self._ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ear.bind(str(office.base / f"n{time.monotonic_ns() % 10**9}"))
        self._ear.setblocking(False)
        environ = {
            **os.environ,
            "BACKUPD_CONFIG": str(config or office.file),
            "NOTIFY_SOCKET": self._ear.getsockname(),
            "BACKUPD_RUNTIME": str(office.base / "run"),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [BACKUPD, "serve", *args], env=environ, stderr=log, stdin=subprocess.DEVNULL
            )
        self.notes: list[str] = []

    def heard(self, word: str, times: int = 1) -> bool:
        try:
            while True:
                self.notes += self._ear.recv(4096).decode().split("\n")
        except BlockingIOError:
            return len([note for note in self.notes if note.startswith(word)]) >= times

    def ready(self, times: int = 1) -> None:
        until(lambda: self.process.poll() is not None or self.heard("READY=1", times), f"ready\n{self.log.read_text()}")
        assert self.process.poll() is None, self.log.read_text()

    def said(self) -> list[dict[str, Any]]:
        """Whole lines: it may be writing one just now."""
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def refused(self) -> str:
        """Why it did not take the newest files."""
        return str([line for line in self.said() if line["event"] == "config-refused"][-1]["message"])

    def ends(self, seconds: float = 240) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._ear.close()
        assert "Traceback" not in self.log.read_text()


@contextmanager
def serving(office: Office, *args: str, config: Path | None = None) -> Iterator[Service]:
    service = Service(office, *args, config=config)
    try:
        yield service
    finally:
        service.close()


@contextmanager
def looking(office: Office) -> Iterator[Catalog]:
    with open_catalog(office.catalog or f"sqlite:///{office.base}/catalog.db") as catalog:
        yield catalog


def is_begun(catalog: Catalog, job: JobRecord) -> bool:
    return catalog.jobs.get(job.id).state is not JobState.QUEUED

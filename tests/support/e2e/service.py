"""A house whose service runs: the real daemon, and what it left in the catalog."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from backupd.catalog.session import Catalog, open_catalog
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import new_id
from tests.support.e2e.house import BACKUPD, LONGEST, SERVER, House
from tests.support.service.processes import end_streams_of

ONCE_A_YEAR = """\
physical: {full: "0 0 1 1 *", incremental: "0 0 2 1 *"}
destinations: {required: [local]}
retention: {local: {keep_fulls: 2}}
test_restore: {schedule: "0 0 3 1 *"}
verify: {schedule: "0 0 4 1 *"}
retry: {attempts: 1}
"""
"""A policy whose legs stay quiet unless a test makes them due."""


def until(condition: Callable[[], bool], what: Callable[[], str], seconds: float = LONGEST) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"this never came: {what()}"
        time.sleep(0.02)


@dataclass
class Serving:
    """One `backupd serve`."""

    house: House
    process: subprocess.Popen[bytes]
    log: Path

    def reload(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def stop(self) -> int:
        """With the streams."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(300)

    def leave(self) -> int:
        """The streams go on."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(300)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@contextmanager
def serving(house: House, *args: str, under: Sequence[str] = (), outlived: bool = False) -> Iterator[Serving]:
    """Start the service and give it when it follows the schedules; killed at the end where it still runs, with the
    streams that it has left unless it may be ``outlived``. ``under``: words before the program."""
    log = house.base / f"service-{time.monotonic_ns()}.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [*under, BACKUPD, "serve", *args],
            env=house.environment(),
            stderr=out,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as process,
    ):
        try:
            until(lambda: b"daemon-started" in log.read_bytes() or process.poll() is not None, log.read_text)
            assert process.poll() is None, log.read_text()
            yield Serving(house, process, log)
        finally:
            process.kill()
            if not outlived:
                end_streams_of(house.config)
    text = log.read_text()
    assert "Traceback" not in text, text


@contextmanager
def catalog_of(house: House) -> Iterator[Catalog]:
    with open_catalog(house.catalog) as catalog:
        yield catalog


def make_due(catalog: Catalog, leg: str, server: str = SERVER) -> None:
    """Let the schedule have been without attention for more than a year. The service sees it when it reloads."""
    rows = catalog.schedules.all()
    past = datetime.now(UTC) - timedelta(days=400)
    catalog.schedules.settle(rows, [replace(rows[server, leg], handled=past)])


def enqueue(catalog: Catalog, kind: JobKind, server: str = SERVER) -> JobRecord:
    now = datetime.now(UTC)
    job = JobRecord(id=new_id(now), kind=kind, server=server, state=JobState.QUEUED, queued_at=now, requested_by="test")
    catalog.jobs.enqueue(job)
    return job


# -- processes


def descendants(pid: int) -> set[tuple[int, str]]:
    """Every process below ``pid``: number and start time."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (fields := _stat(int(path.name))):
            parents.setdefault(int(fields[1]), []).append(int(path.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found |= set(children)
        waiting += children
    return {(one, fields[19]) for one in found if (fields := _stat(one))}


def alive(processes: set[tuple[int, str]]) -> set[int]:
    return {pid for pid, start in processes if (fields := _stat(pid)) and fields[19] == start and fields[0] not in "ZX"}


def parent(pid: int) -> int:
    """0 when there is no such process any more."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def stop(process: subprocess.Popen[str]) -> None:
    """Let it and its children stand still, every thread of it, until they get SIGCONT."""

    def stands() -> bool:
        return all(_stat(pid)[:1] in (["T"], ["Z"], []) for pid in _threads(process.pid))

    def stopped() -> bool:
        """Not where a program stands right before it begins: whoever starts it waits for that."""
        os.killpg(process.pid, signal.SIGSTOP)
        before = time.monotonic() + 5
        while not stands() and time.monotonic() < before:
            time.sleep(0.01)
        if not (done := stands()):
            os.killpg(process.pid, signal.SIGCONT)
        return done

    until(stopped, lambda: "a standstill")


def _threads(pid: int) -> list[str]:
    return [f"{pid}/task/{path.name}" for path in Path(f"/proc/{pid}/task").iterdir()]


def naming(text: str, besides: set[int]) -> dict[int, str]:
    """Command lines of processes that name ``text``."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) not in besides | {os.getpid()}:
            with suppress(OSError):
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if text in line:
                    found[int(path.name)] = line
    return found


def _stat(pid: int | str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []

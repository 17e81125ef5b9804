"""Who runs the queued jobs: each in a process of its own, watched until its end is in the catalog.

A process of its own can be ended for certain, has its own priority and memory, and takes nobody with it. It dies with
the worker (parent-death signal), and its tools die with it. The rows of the catalog are all that the two share.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from backupd.app.jobs import BACKUPS, abandon_dead, close, repetition
from backupd.app.logs import log_path, say
from backupd.app.pulse import DAEMON_STOP, HANG_WATCH
from backupd.app.settings import Settings
from backupd.app.wiring import Wiring, owner
from backupd.catalog.jobs import Allowed
from backupd.model.errors import BackupdError, NotFoundError, RefusedError
from backupd.model.job import JobRecord, JobState
from backupd.process.command import Command
from backupd.process.family import kill_family
from backupd.process.pipeline import describe_exit
from backupd.process.stderr import StderrReader
from backupd.process.supervise import Child, spawn

GRACE = 10.0
"""Seconds that a job has to unwind before its whole process tree is killed."""
TICK = 1.0
"""Seconds between looks at the catalog."""
_ABANDON_SECONDS = 15.0
_TAIL_LINES = 30

_STEP = 0.05
"""Seconds between looks while the worker ends."""


@dataclass(slots=True)
class _Running:
    """``asked``: when it was told to end (monotonic), None before. ``stopping``: by the daemon's own end."""

    job: JobRecord
    child: Child
    stderr: StderrReader
    asked: float | None = None
    killed: bool = False
    stopping: bool = False


def may_start(settings: Settings, paused: Collection[str]) -> Allowed:
    """What the configuration's limits let start beside what runs. ``paused``: servers, ``*`` for all; of those only
    what a person asked for starts."""
    limits = settings.configuration.concurrency

    def allowed(job: JobRecord, running: Sequence[JobRecord]) -> bool:
        if len(running) >= limits.jobs:
            return False
        if not job.server:
            return True
        if job.leg and (job.server in paused or "*" in paused):
            return False
        beside = [other for other in running if other.server == job.server]
        if len(beside) >= limits.per_server:
            return False
        if job.kind in BACKUPS and any(other.kind in BACKUPS for other in beside):
            return False
        used = [name for other in running for name in _destinations(settings, other.server)]
        return all(used.count(name) < limits.per_destination for name in _destinations(settings, job.server))

    return allowed


def _destinations(settings: Settings, server: str) -> frozenset[str]:
    try:
        found = settings.server(server)
    except NotFoundError:  # of no server, or of one that is not configured any more
        return frozenset()
    return frozenset({*found.required, *found.others})


class Worker:
    """A thread that looks after the queue, from entering the block until leaving it, or ``stop``."""

    def __init__(self, wiring: Wiring, *, grace: float = GRACE) -> None:
        self._wiring, self._grace = wiring, grace
        self._running: list[_Running] = []
        self._held = False
        self._awake = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="worker", daemon=True)
        self._next_abandon = 0.0
        self._trouble = ""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()

    def running(self) -> int:
        """How many jobs have a process that has not ended yet."""
        return len(self._running)

    def wake(self) -> None:
        """Look at the queue now."""
        self._awake.set()

    def hold(self, held: bool) -> None:
        """While held nothing is started; what runs goes on."""
        self._held = held

    def reload(self, wiring: Wiring) -> None:
        """Go by these settings from the next job on; what runs goes on."""
        self._wiring = wiring
        self.wake()

    def stop(self) -> None:
        """Start nothing more and end what runs; returns when nothing does. What had to be ended is cancelled, and
        queued again for when a worker is there once more."""
        self._ending.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        for one in self._running:
            one.stopping = True
            self._guarded(partial(self._ask_to_stop, one))
        while self._running:
            self._guarded(self._watch)
            time.sleep(_STEP)

    def step(self) -> None:
        """One look at everything: what ended, what should end, what may start. Raises CatalogError."""
        self._watch()
        if time.monotonic() >= self._next_abandon:
            self._next_abandon = time.monotonic() + _ABANDON_SECONDS
            abandon_dead(self._wiring)
        if self._held:
            return
        paused = {hold.server for hold in self._wiring.catalog.holds.all() if hold.kind == "pause"}
        allowed = may_start(self._wiring.settings, paused)
        while (job := self._wiring.catalog.jobs.claim(owner(), self._wiring.clock(), allowed=allowed)) is not None:
            self._begin(job)

    # -- inside

    def _loop(self) -> None:
        while not self._ending.is_set():
            self._guarded(self.step)
            self._awake.wait(TICK)
            self._awake.clear()

    def _guarded(self, work: Callable[[], None]) -> None:
        """The worker outlives every trouble of one look: the next one may go well."""
        trouble = ""
        try:
            work()
        except BackupdError as error:
            trouble = str(error)
        except Exception as error:  # noqa: BLE001  a worker that died would be missed by nobody; all is told
            trouble = "".join(traceback.format_exception(error))
        if trouble and trouble != self._trouble:
            say("worker-trouble", trouble, level=logging.ERROR)
        self._trouble = trouble

    def _begin(self, job: JobRecord) -> None:
        here = dict(os.environ, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
        command = Command((sys.executable, "-P", "-m", "backupd", "run-job", job.id, "--token", str(job.token),
                           "--config", str(self._wiring.settings.file)), env=here)
        ear, mouth = os.pipe2(os.O_CLOEXEC)
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            child = spawn(command, stdin=nothing, stdout=nothing, stderr=mouth)
        except BackupdError as error:
            os.close(ear)
            self._end_row(job, JobState.FAILED, error)
            return
        finally:
            os.close(mouth)
            os.close(nothing)
        stderr = StderrReader(["backupd"], [ear], log=self._log(job))
        stderr.start()
        self._running.append(_Running(job, child, stderr))
        say("job-process", f"process {child.pid} runs {job.kind}", server=job.server, job=job.id)

    def _log(self, job: JobRecord) -> Path | None:
        """Where its process may complain before it has a log of its own."""
        path = log_path(self._wiring.settings, job.id)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        except OSError:
            return None  # its process finds the same, and says so
        return path

    def _watch(self) -> None:
        for one in list(self._running):
            code = one.child.poll()
            if code is not None:
                self._ended(one, code)
                self._running.remove(one)
        if not self._running:
            return
        rows = {job.id: job for job in self._wiring.catalog.jobs.list(state=JobState.RUNNING)}
        for one in self._running:
            row = rows.get(one.job.id)
            if one.asked is None and row is None:
                one.asked = time.monotonic()  # its job is over: it has the grace to end by itself
            elif one.asked is None and row is not None and row.cancel_by:
                self._ask_to_stop(one)
            elif one.asked is not None and time.monotonic() - one.asked > self._grace:
                one.killed = True
                kill_family(one.child.pid)

    def _ask_to_stop(self, one: _Running) -> None:
        one.asked = time.monotonic()
        try:
            if one.stopping:
                self._wiring.catalog.jobs.request_cancel(one.job.id, DAEMON_STOP, self._wiring.clock())
        except RefusedError:
            return  # it has just ended
        finally:
            one.child.send(signal.SIGTERM)

    def _ended(self, one: _Running, code: int) -> None:
        one.stderr.finish()
        row = self._wiring.catalog.jobs.get(one.job.id)
        if row.state is JobState.RUNNING:
            row = self._end_row(row, *self._verdict(one, row, code))
        ending = one.stopping or self._held
        if ending and row.state is JobState.CANCELLED and not row.cancel_by:
            # Whoever stops the service may signal all its processes at once, before we could ask this one.
            self._wiring.catalog.jobs.enqueue(repetition(row, self._wiring.clock(), attempt=row.attempt))

    def _verdict(self, one: _Running, row: JobRecord, code: int) -> tuple[JobState, BackupdError]:
        """What became of a job whose process ended without a word to the catalog."""
        tail = one.stderr.tail(0, _TAIL_LINES)
        how = describe_exit(code)
        hint = "run it again; whatever it left at a destination is removed by the next run"
        if one.asked is not None and row.cancel_by:
            state = JobState.FAILED if row.cancel_by == HANG_WATCH else JobState.CANCELLED
            if one.killed:
                how = f"did not end within {self._grace:g} s, so it was killed with all that it had started"
            return state, BackupdError(f"stopped by {row.cancel_by}: its process {how}", detail=tail, hint=hint)
        if code == -signal.SIGKILL:
            hint = f"somebody killed it, or the kernel for lack of memory: look into dmesg and the journal; then {hint}"
        return JobState.ABANDONED, BackupdError(f"the process that ran this job {how}", detail=tail, hint=hint)

    def _end_row(self, job: JobRecord, state: JobState, error: BackupdError) -> JobRecord:
        try:
            return close(self._wiring, job, state, error=error, again=state is JobState.FAILED)
        except RefusedError:
            return self._wiring.catalog.jobs.get(job.id)  # somebody was faster

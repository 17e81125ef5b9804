"""Who runs the queued jobs: each in its own process, watched until its end is in the catalog.

A separate process can be ended for certain, has its own priority and memory, and takes nobody with it. It dies with
the worker (parent-death signal), and its tools die with it. The rows of the catalog are all that the two share.
"""

from __future__ import annotations

import itertools
import logging
import signal
import threading
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Self

from backupd.app.context.logging_setup import log_path, say
from backupd.app.context.wiring import Wiring, owner
from backupd.app.jobs.admission import Admission
from backupd.app.jobs.jobs import (
    DAEMON_STOP,
    HANG_WATCH,
    abandon_dead,
    close,
    event_of,
    mark_stopped,
    policy_of,
    repetition,
    say_of,
)
from backupd.app.runtime.child_process import ChildProcess, HeldSettings, Starter, open_log, start
from backupd.app.runtime.periodic import GuardedLoop
from backupd.model.errors import BackupdError, RefusedError, ToolError
from backupd.model.job import JobRecord, JobState
from backupd.model.text import format_duration
from backupd.process.command import kill_family
from backupd.process.pipeline import describe_exit
from backupd.process.runtime import runtime_directory

GRACE = 10.0
"""Seconds that a job has to unwind before its whole process tree is killed."""
TICK = 1.0
"""Seconds between looks at the catalog."""
_ABANDON_SECONDS = 15.0

_STEP = 0.05
"""Seconds between looks while the worker ends."""
_START_PAUSE = 15.0
"""Seconds without another start after one that this machine refused: whatever it lacks, the next one lacks too."""
STILL = timedelta(minutes=2)
"""A process that recorded no heartbeat for longer hangs, whatever the policy's limit: it beats every two seconds."""
_numbers = itertools.count(1)


@dataclass(slots=True)
class _Running:
    """``asked``: when it was asked to end (monotonic), None before. ``stopping``: by the daemon's own end. ``beat``:
    its last heartbeat that was seen; ``still``: for how many watched seconds it has been the last one."""

    job: JobRecord
    process: ChildProcess
    asked: float | None = None
    killed: bool = False
    stopping: bool = False
    beat: datetime | None = None
    still: float = 0.0


class Worker:
    """A thread that looks after the queue, from entering the block until leaving it, or ``stop``. ``starter``: starts
    the process of each job."""

    def __init__(self, wiring: Wiring, *, grace: float = GRACE, starter: Starter = start) -> None:
        self._wiring, self._grace, self._start_process = wiring, grace, starter
        self._running: list[_Running] = []
        self._held = False
        self._starting = 0
        self._awake = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="worker", daemon=True)
        self._held_settings = HeldSettings()
        self._owner = owner(next(_numbers))
        self._next_abandon = 0.0
        self._next_start = 0.0
        self._looked = time.monotonic()
        self._guarded = GuardedLoop("worker-trouble")
        self._left: bool | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def running(self) -> int:
        """How many jobs have a process that has not ended yet, or are about to get one."""
        return len(self._running) + self._starting

    @property
    def well_at(self) -> float:
        """The monotonic time of its last look that went well."""
        return self._guarded.well_at

    def wake(self) -> None:
        """Look at the queue now."""
        self._awake.set()

    def hold(self, held: bool) -> None:
        """While held nothing is started; what runs goes on."""
        self._held = held

    def reload(self, wiring: Wiring) -> None:
        """Go by these settings from the next job on; what runs goes on."""
        self._wiring = wiring
        self._held_settings.changed()
        self.wake()

    def stop(self) -> bool:
        """Start nothing more and end what runs; returns when nothing does. What had to be ended is cancelled, and
        queued again for when a worker is there once more.

        A catalog that does not answer holds this up for twice the grace at most: then what runs is killed, and False
        says that the catalog does not know. The next look at dead jobs, of whatever process, queues it again.
        """
        if self._left is None:
            self._ending.set()
            self.wake()
            self._left = self._thread.is_alive() and not self._wound_down()
        return not self._left

    def _wound_down(self) -> bool:
        self._thread.join(self._grace)
        if self._thread.is_alive():  # the catalog holds it up, or somebody does not hear
            for one in list(self._running):
                one.process.child.send(signal.SIGTERM)
            self._thread.join(max(self._grace, GRACE))
        left = list(self._running)
        if not self._thread.is_alive() or not left:
            return not self._thread.is_alive()
        for one in left:
            mark_stopped(self._wiring, one.job)
            kill_family(one.process.child.pid)
        for one in left:
            one.process.child.wait(self._grace)
        say(
            "worker-trouble",
            f"the catalog does not answer: {len(left)} jobs were killed and are running by its rows; "
            "they are queued again when the service starts",
            level=logging.ERROR,
        )
        return False

    def step(self) -> None:
        """One look at everything: what ended, what should end, what may start. Raises CatalogError."""
        self._watch()
        if time.monotonic() >= self._next_abandon:
            self._next_abandon = time.monotonic() + _ABANDON_SECONDS
            abandon_dead(self._wiring)
        self._starting = 1  # before it is asked whether nothing may start: who holds it, and counts, misses none
        try:
            self._start_what_may()
        finally:
            self._starting = 0

    def _start_what_may(self) -> None:
        if self._held or time.monotonic() < self._next_start:
            return
        paused = {hold.server for hold in self._wiring.catalog.holds.all() if hold.kind == "pause"}
        while not self._held and not self._ending.is_set() and time.monotonic() >= self._next_start:
            admission = Admission(self._wiring.settings, paused)
            job = self._wiring.catalog.jobs.claim(
                self._owner,
                self._wiring.clock(),
                runs_on=self._wiring.here,
                allowed=admission.allows,
                bars=admission.bars,
            )
            if job is None:
                return
            self._begin(job)

    # -- inside

    def _loop(self) -> None:
        # What processes that were killed left in the runtime directory may hold passwords: it goes before any job.
        self._guarded(runtime_directory)
        while not self._ending.is_set():
            self._guarded(self.step)
            self._awake.wait(TICK)
            self._awake.clear()
        for one in self._running:
            one.stopping = True
            self._guarded(partial(self._ask_to_stop, one))
        while self._running and not self._left:
            self._guarded(self._watch)
            time.sleep(_STEP)

    def _begin(self, job: JobRecord) -> None:
        """Start its process. Where that fails the job has failed: a row that runs without a process would stay."""
        try:
            one = self._started(job)
        except Exception as error:  # noqa: BLE001  not hidden: it becomes the job's error, or is reported as trouble
            self._next_start = time.monotonic() + _START_PAUSE
            why = error.strerror if isinstance(error, OSError) else None
            self._end_row(
                job,
                JobState.FAILED,
                error
                if isinstance(error, BackupdError)
                else ToolError(
                    f"the process for this job cannot be started: {why or error}",
                    hint="check the service's limits (open files, processes, memory) and the journal",
                ),
            )
        else:
            self._running.append(one)
            say_of(job, "job-process", f"process {one.process.child.pid} runs {job.kind}")

    def _started(self, job: JobRecord) -> _Running:
        settings = self._wiring.settings
        process = self._start_process(
            settings,
            self._held_settings.file(settings),
            "run-job",
            job.id,
            "--token",
            str(job.token),
            log=open_log(log_path(settings, job.id)),
        )
        return _Running(job, process, beat=job.heartbeat_at)

    def _watch(self) -> None:
        """Raises the first of what went wrong, once every job was looked at."""
        troubles: list[Exception] = []
        for one in list(self._running):
            try:
                code = one.process.ended()
                if code is not None:
                    self._ended(one, code)
                    self._running.remove(one)
            except Exception as error:  # noqa: BLE001  raised below; one job's trouble must not be the others'
                troubles.append(error)
        self._held_settings.let_go(one.process.settings for one in self._running)
        rows = {job.id: job for job in self._wiring.catalog.jobs.list(state=JobState.RUNNING)}
        for one in self._running:
            row = rows.pop(one.job.id, None)
            if one.asked is None and row is None:
                one.asked = time.monotonic()  # its job is over: it has the grace to end
            elif one.asked is None and row is not None and (row.cancel_by or self._stands_still(one, row)):
                self._ask_to_stop(one)
            elif one.asked is not None and time.monotonic() - one.asked > self._grace:
                one.killed = True
                kill_family(one.process.child.pid)
        self._looked = time.monotonic()
        for row in rows.values():
            if row.owner == self._owner:
                self._end_row(row, *_never_begun(row))
        if troubles:
            raise troubles[0]

    def _stands_still(self, one: _Running, row: JobRecord) -> bool:
        """Has its heart stopped? Then the row says who ends it. Only time that this thread has watched counts."""
        if row.heartbeat_at != one.beat:
            one.beat, one.still = row.heartbeat_at, 0.0
            return False
        one.still += min(time.monotonic() - self._looked, 2 * TICK)
        policy = policy_of(self._wiring, row.server, row.kind)
        limit = max(STILL, policy.limits.hang if policy is not None else STILL)
        if one.still < limit.total_seconds():
            return False
        hangs = ToolError(
            f"stopped: its process did not report for {format_duration(one.still)}",
            hint="check whether it was stopped (SIGSTOP, a frozen control group) or waits for a failed disk (dmesg)",
        )
        say_of(row, "job-hanging", hangs.message, level=logging.WARNING)
        now = self._wiring.clock()
        self._wiring.catalog.jobs.request_cancel(row.id, HANG_WATCH, now)
        self._wiring.catalog.events.add(event_of(row, now, "job-hanging", hangs))
        return True

    def _ask_to_stop(self, one: _Running) -> None:
        one.asked = time.monotonic()
        try:
            if one.stopping:
                self._wiring.catalog.jobs.request_cancel(one.job.id, DAEMON_STOP, self._wiring.clock())
        except RefusedError:
            return  # it has just ended
        finally:
            one.process.child.send(signal.SIGTERM)

    def _ended(self, one: _Running, code: int) -> None:
        row = self._wiring.catalog.jobs.get(one.job.id)
        if row.state is JobState.RUNNING:
            if one.stopping and not row.cancel_by:
                row = replace(row, cancel_by=DAEMON_STOP)
            row = self._end_row(row, *self._verdict(one, row, code))
        stopped = (one.stopping or self._held) and row.state is JobState.CANCELLED and not row.cancel_by
        if stopped and not self._wiring.catalog.jobs.list(previous=row.id, limit=1):
            # Whoever stops the service may signal all its processes at once, before we could ask this one.
            self._wiring.catalog.jobs.enqueue(repetition(self._wiring, row, attempt=row.attempt))

    def _verdict(self, one: _Running, row: JobRecord, code: int) -> tuple[JobState, BackupdError]:
        """What became of a job whose process ended without a word to the catalog."""
        tail = one.process.last_words()
        how = describe_exit(code)
        hint = "run it again; whatever it left at a destination is removed by the next run"
        if one.asked is not None and row.cancel_by:
            state = JobState.FAILED if row.cancel_by == HANG_WATCH else JobState.CANCELLED
            if one.killed:
                how = f"did not end within {self._grace:g} s, so it was killed with all that it had started"
            return state, BackupdError(f"stopped by {row.cancel_by}: its process {how}", detail=tail, hint=hint)
        if code == -signal.SIGKILL:
            hint = f"it was killed, possibly by the kernel for lack of memory: check dmesg and the journal; then {hint}"
        return JobState.ABANDONED, BackupdError(f"the process that ran this job {how}", detail=tail, hint=hint)

    def _end_row(self, job: JobRecord, state: JobState, error: BackupdError) -> JobRecord:
        try:
            return close(self._wiring, job, state, error=error, again=state is JobState.FAILED)
        except RefusedError:
            return self._wiring.catalog.jobs.get(job.id)  # somebody was faster


def _never_begun(row: JobRecord) -> tuple[JobState, BackupdError]:
    """What to say of a job that this worker has claimed and has no process for."""
    if row.cancel_by:
        return JobState.CANCELLED, BackupdError(f"stopped by {row.cancel_by} before its process was started")
    return JobState.FAILED, BackupdError(
        "the job process was not started: internal error of the worker",
        hint="see the service's log for the cause, then run it again",
    )

"""The heartbeat of a running job: tells the catalog how far it is, hears from it that somebody wants it to stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from backupd.app.context.logging_setup import redacted, say
from backupd.app.context.wiring import Wiring
from backupd.catalog.restores import Rate
from backupd.model.errors import BackupdError, CatalogError, NotFoundError, RefusedError, ToolError
from backupd.model.event import Event, Severity
from backupd.model.job import JobRecord, Progress, Report
from backupd.model.text import format_duration

BEAT = 2.0
"""Seconds between heartbeats."""
PATIENCE = 60.0
"""Seconds that a catalog which cannot be reached may take to come back before the job gives up on it."""
HANG_WATCH = "the hang watch"
"""Who asked to stop a job that made no progress."""
DAEMON_STOP = "the daemon's stop"
"""Who asked to stop a job that was running when the daemon had to end. It is queued again."""
_OWN_SPEED = 5.0
"""Seconds after which a phase's own speed says more than that of earlier runs."""
_PHASE_RATES = {"copy": "backup", "fetch": "fetched", "prepare": "prepared", "verify": "verified"}
"""Which recorded phase tells how fast the work of a reported one goes."""


@dataclass(slots=True)
class _Pace:
    """The first report of a phase: when, and at how many bytes."""

    at: float
    bytes: int


class Pulse:
    """A context manager around the work of ``job``: a thread beats while it lasts.

    ``cancel`` is set when the work should end; the reason is in ``cancel_by`` (a person), ``problem`` (it hangs) or
    ``lost`` (the job is no longer ours). Where the main thread does the work and handles SIGTERM, it also gets that
    signal, once, because not all work looks at ``cancel``.
    """

    def __init__(
        self, wiring: Wiring, job: JobRecord, report: Report, *, hang: timedelta, rates: Mapping[str, Rate]
    ) -> None:
        self.cancel = threading.Event()
        self.cancel_by = ""
        self.problem: BackupdError | None = None
        self.lost: BackupdError | None = None
        self._wiring, self._job, self._forward = wiring, job, report
        self._hang, self._rates = hang, rates
        self._latest: Progress | None = None
        self._waited = 0.0
        self._paces: dict[str, _Pace] = {}
        self._interrupts = threading.current_thread() is threading.main_thread()
        self._deciding = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"pulse {job.id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    # -- for the work

    def report(self, progress: Progress) -> None:
        """Take a report of the work and pass it on."""
        if progress.phase not in self._paces:
            self._paces[progress.phase] = _Pace(time.monotonic(), progress.bytes_done)
            say("job-phase", progress.phase, server=self._job.server, job=self._job.id)
        self._latest = progress
        if progress.waits:
            self._waited = time.monotonic()
        self._forward(progress)

    def fence(self) -> None:
        """Raises RefusedError when the job is no longer ours, CatalogError when that cannot be asked for a minute."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self._wiring.catalog.jobs.assert_held(self._job.id, self._job.token)
            except CatalogError:
                if time.monotonic() > deadline or self._over.wait(BEAT):
                    raise
            except (RefusedError, NotFoundError) as error:
                with self._deciding:  # raising it is the stop: a signal on top would disturb the cleaning up
                    if not self.cancel.is_set():
                        self.lost = error
                        self.cancel.set()
                raise
            else:
                return

    # -- the thread

    def _beat(self) -> None:
        seen: tuple[Progress | None, float] = (None, 0.0)
        idle, last = 0.0, time.monotonic()
        while not self._over.wait(BEAT):
            now, latest, waited = time.monotonic(), self._latest, self._waited
            # A process that was itself stopped for an hour has not watched anything hang for an hour.
            idle = 0.0 if (latest, waited) != seen else idle + min(now - last, 2 * BEAT)
            seen, last = (latest, waited), now
            self._tell(latest)
            if idle >= self._hang.total_seconds() and not self.cancel.is_set():
                self._stop_hanging(latest)

    def _tell(self, latest: Progress | None) -> None:
        try:
            by = self._wiring.catalog.jobs.heartbeat(
                self._job.id, self._job.token, self._wiring.clock(), self._shown(latest) if latest else None
            )
        except CatalogError as error:
            self._warn("heartbeat-failed", error.message)
        except (RefusedError, NotFoundError) as error:
            with self._deciding:
                if not self.cancel.is_set():
                    self.lost = error
                    self._stop()
        else:
            with self._deciding:
                if by and not self.cancel.is_set():
                    self.cancel_by = by
                    self._stop()

    def _stop_hanging(self, latest: Progress | None) -> None:
        phase = f"phase {latest.phase}" if latest else "its beginning"
        where = (
            ""
            if latest is None
            else (
                f"{latest.bytes_done} bytes and {latest.files_done} files were done; "
                f"the last note: {latest.note or 'none'}"
            )
        )
        limit = format_duration(self._hang.total_seconds())
        self.problem = ToolError(
            f"stopped: no progress for {limit} in {phase}",
            detail=redacted(where),
            hint="see what it waited for (a lock on the server, the disk, the network); "
            "limits.hang in the policy says how long that may take",
        )
        self._warn("job-hanging", self.problem.message)
        try:
            self._wiring.catalog.events.add(
                Event(
                    at=self._wiring.clock(),
                    kind="job-hanging",
                    severity=Severity.ERROR,
                    server=self._job.server,
                    subject=self._job.leg or self._job.kind,
                    message=self.problem.message,
                    detail=self.problem.detail,
                    hint=self.problem.hint,
                    job_id=self._job.id,
                )
            )
            # Should this process not even hear the signal, whoever watches it ends it.
            self._wiring.catalog.jobs.request_cancel(self._job.id, HANG_WATCH, self._wiring.clock())
        except BackupdError as error:
            self._warn("heartbeat-failed", error.message)
        with self._deciding:
            if not self.cancel.is_set():
                self._stop()

    def _stop(self) -> None:
        """Hold the lock. The signal comes first: work that had begun to end by ``cancel`` would meet it while it is
        cleaning up."""
        if self._interrupts and callable(signal.getsignal(signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGTERM)
        self.cancel.set()

    def _warn(self, event: str, message: str) -> None:
        say(event, message, level=logging.WARNING, server=self._job.server, job=self._job.id)

    def _shown(self, latest: Progress) -> dict[str, Any]:
        """A report as the catalog keeps it; ``seconds_left`` None while unknown."""
        return {
            "phase": latest.phase,
            "bytes": latest.bytes_done,
            "bytes_total": latest.bytes_total,
            "files": latest.files_done,
            "files_total": latest.files_total,
            "note": redacted(latest.note)[:200],
            "seconds_left": self._remaining(latest),
        }

    def _remaining(self, latest: Progress) -> float | None:
        """From the phase's own speed, or in its first seconds from that of earlier runs."""
        if latest.bytes_total is None:
            return None
        left = max(latest.bytes_total - latest.bytes_done, 0)
        pace = self._paces[latest.phase]
        elapsed, moved = time.monotonic() - pace.at, latest.bytes_done - pace.bytes
        if elapsed >= _OWN_SPEED and moved > 0:
            return round(left * elapsed / moved, 1)
        rate = self._rates.get(_PHASE_RATES.get(latest.phase, latest.phase))
        return round(rate.estimate(left), 1) if rate is not None and rate.bytes_per_second else None

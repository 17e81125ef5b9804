"""What a policy's limits do to a running backup: it reads no faster than it may, and pauses under pressure.

A pause means that we do not read from the physical tool. Its pipe fills and the tool stops, the thread that
copies the redo log too, since both write to the same pipe: a server that writes much meanwhile can overwrite redo that
was not copied yet, and then the tool itself gives up and says so. That is why pauses are bounded by
``limits.max_pause``, and why a redo log for an hour of writes is worth its room. The same holds for a low
``limits.read``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import JobRun, Wiring
from backupd.engine.cluster_load import FlowGauge, QueueGauge, node_gauges
from backupd.engine.server_load import (
    RESUME,
    Gauge,
    Gauges,
    Judge,
    PressureWatch,
    datadir_of,
    disk_gauges,
    lag_gauges,
    query_gauges,
)
from backupd.engine.sql.client import DEFAULT_PORT, Connection
from backupd.model.errors import ServerError
from backupd.model.event import Severity
from backupd.model.job import Progress
from backupd.model.text import format_duration
from backupd.process.throttle import Throttle, TokenBucket, Unlimited
from policies.policy import Limits

PAUSED = "paused"
"""The phase that progress shows during a pause."""
_TICK_SECONDS = 1.0


class PressureThrottle:
    """The throttle of one run. ``pressure`` gives the reason to wait, or nothing; ``report`` gets the reason of each
    pause. ``warnings``: what the backup's record should say about limits. For one thread."""

    def __init__(
        self,
        limits: Limits,
        run: JobRun,
        *,
        pressure: Callable[[], str],
        report: Callable[[str], None],
        warnings: tuple[str, ...] = (),
        bucket: Throttle | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._run, self._limits = run, limits
        self._max_pause = limits.max_pause.total_seconds()
        self._pressure, self._report, self._clock = pressure, report, clock
        self._wait = wait or run.cancel.wait
        self._bucket: Throttle = bucket or (TokenBucket(limits.read, cancel=run.cancel) if limits.read else Unlimited())
        self._warnings = warnings
        self._first_reason = ""
        self.taken = 0
        self.pauses = 0
        self.paused = 0.0

    def take(self, size: int) -> None:
        """Return when ``size`` more bytes may be read. Raises CancelledError, and ServerError when all pauses together
        are longer than the policy allows."""
        self._run.check()
        reason = self._pressure()
        if reason:
            self._pause(reason)
        self._bucket.take(size)
        self.taken += size

    def send(self) -> Throttle:
        """A throttle for what is written to one destination."""
        return TokenBucket(self._limits.send, cancel=self._run.cancel) if self._limits.send else Unlimited()

    def pressure(self) -> str:
        """Why nothing should be read now; empty when there is no reason."""
        return self._pressure()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for the record of the backup: what could not be measured, and how long it paused."""
        if not self.pauses:
            return self._warnings
        times = "once" if self.pauses == 1 else f"{self.pauses} times"
        text = f"limits: the backup paused {times}, {format_duration(self.paused)} in all, the first time because"
        return (*self._warnings, f"{text} {self._first_reason}")

    def _pause(self, reason: str) -> None:
        began = self._clock()
        before = self.paused
        self.pauses += 1
        self._first_reason = self._first_reason or reason
        self._report(reason)
        while reason:
            self.paused = before + self._clock() - began
            if self.paused > self._max_pause:
                raise ServerError(
                    f"gave up after {format_duration(self.paused)} of pauses: {reason}",
                    detail=f"limits.max_pause is {format_duration(self._max_pause)}; {self.taken:,} bytes were read",
                    hint="find out what loads the server; then run the backup at a quieter time, or raise the limit or "
                    "limits.max_pause in the policy",
                )
            self._run.report(
                Progress(
                    PAUSED,
                    self.taken,
                    note=f"{reason}; {format_duration(self.paused)} of at most {format_duration(self._max_pause)}",
                )
            )
            self._wait(_TICK_SECONDS)
            self._run.check()
            reason = self._pressure()
        self.paused = before + self._clock() - began


@contextmanager
def throttled(
    wiring: Wiring, server: ServerSettings, connection: Connection, run: JobRun
) -> Iterator[PressureThrottle]:
    """The throttle of a run that reads from ``server``, as its policy says. Raises ServerError when a limit needs the
    server and it cannot be asked."""
    limits = server.policy.limits
    watched: list[tuple[Gauge, Judge]] = []
    warnings: list[str] = []

    def add(gauges: Gauges, limit: float, resume: float = RESUME, show: Callable[[float], str] | None = None) -> None:
        watched.extend((gauge, Judge(limit, resume, show)) for gauge in gauges.found)
        warnings.extend(gauges.warnings)

    if limits.replica_lag:
        add(lag_gauges(server.name, connection, _followers(wiring, server)), limits.replica_lag.total_seconds())
    if limits.disk_latency:
        add(disk_gauges(datadir_of(connection)), limits.disk_latency.total_seconds())
    if limits.long_queries:  # the age of a statement does not go up and down: over is when it has ended
        add(query_gauges(connection), limits.long_queries.total_seconds(), resume=1.0)
    if limits.recv_queue:
        add(node_gauges(connection, "recv_queue", QueueGauge), limits.recv_queue, show="{:.0f}".format)
    if limits.flow_control:
        add(node_gauges(connection, "flow_control", FlowGauge), limits.flow_control, show="{:.0%}".format)

    bound = format_duration(limits.max_pause.total_seconds())

    def report(reason: str) -> None:
        wiring.note(
            "limits-paused",
            Severity.WARNING,
            f"the backup of {server.name} pauses: {reason}",
            server=server.name,
            subject=run.job.leg,
            job_id=run.job.id,
            hint=f"it continues when the limit is met, and fails after pauses of {bound} in total",
        )

    with PressureWatch(watched) as watch:
        yield PressureThrottle(limits, run, pressure=lambda: watch.pressure, report=report, warnings=tuple(warnings))


def _followers(wiring: Wiring, server: ServerSettings) -> dict[tuple[str, int], Callable[[], Connection]]:
    """By address, how every other configured server is reached that has one."""
    return {
        (other.config.host, other.config.port or DEFAULT_PORT): other.connection
        for other in wiring.settings.ways()
        if other.config.host and (other.name, other.member) != (server.name, server.member)
    }

"""What becomes of jobs: queued, closed with their event and the jobs that follow, cancelled, abandoned where their
process is gone, forgotten after a while; and the event that one succeeded again, once, after the last one reported was
bad. And the heartbeat of one that runs (``Pulse``): it records how far it is, and learns that somebody
wants it to stop.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

from backupd.app.context.logging_setup import redacted, remove_logs, say
from backupd.app.context.wiring import Result, Wiring, owner_state
from backupd.app.schedule.calendar import KINDS, logical_leg
from backupd.catalog.restores import Rate
from backupd.model.errors import (
    BackupdError,
    CancelledError,
    CatalogError,
    ConfigurationError,
    NotFoundError,
    RefusedError,
    ToolError,
)
from backupd.model.event import Event, Severity
from backupd.model.job import BACKUPS, HOST, JobKind, JobRecord, JobState, Progress, Report
from backupd.model.text import format_duration, new_id
from policies.policy import Policy

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
"""Which recorded phase gives the speed of a reported one."""
RECOVERED = "job-recovered"
BAD = (
    "job-failed",
    "job-partial",
    "job-abandoned",
    "job-missed",
    "job-skipped",
    "job-hanging",
    "job-waiting",
    "job-not-followed",
    "schedule-broken",
)
_MANNER = ("retry", "request", "confirm", "keys")
"""Arguments that do not describe what a job does, or repeat it."""
_REMEMBERED = 1000
_FORGOTTEN = timedelta(days=1)
"""How long a failure of what was asked for by hand counts as trouble."""
_GRAVE = (Severity.WARNING, Severity.ERROR)
KEPT = timedelta(days=90)
"""How long jobs that are over stay in the catalog, with their logs."""
RETENTION_LEG = "retention"
SWEEP_LEG = "sweep/"
"""What the leg of a sweep begins with; the name of the destination follows."""
_REST, _LONGEST_REST = 10, timedelta(hours=1)
"""A sweep of a destination begins this many times the duration of the one before after that one began, at most an hour
after it."""
_SHORT = timedelta(seconds=5)
"""A sweep that takes less may follow another one at once."""
_SWEEPS = 3
"""How often a sweep whose process is killed is begun."""
_LONGEST_LEG = 64
"""Characters that the catalog has room for."""
_REPORT_THEMSELVES = (JobKind.REPLICATE,)
"""Kinds that are tried again as often as it takes, with one event when that begins and one when it is over."""


def event_of(job: JobRecord, at: datetime, kind: str, what: BackupdError, severity: Severity = Severity.ERROR) -> Event:
    """An event about ``job``, in the words of ``what``."""
    return Event(
        at,
        kind,
        severity,
        what.message,
        server=job.server,
        subject=job.leg or job.kind,
        detail=what.detail,
        hint=what.hint,
        job_id=job.id,
    )


def say_of(job: JobRecord, event: str, message: str, *, level: int = logging.INFO) -> None:
    """Log one thing that happened to ``job``."""
    say(event, message, level=level, server=job.server, job=job.id)


def close(
    wiring: Wiring,
    job: JobRecord,
    state: JobState,
    *,
    error: BackupdError | None = None,
    result: Result | None = None,
    again: bool = False,
) -> JobRecord:
    """Record the end of ``job``, the event that reports it, and the jobs that follow from it, all at once.

    ``again``: trying once more may help. Raises RefusedError when the job is over or somebody else's.
    """
    outcome, now = result or Result(), wiring.clock()
    shown = None
    if error is not None:
        shown = BackupdError(redacted(error.message), detail=redacted(error.detail), hint=redacted(error.hint))
    then: list[JobRecord] = []
    trouble = ""
    try:
        then = _follow_ups(wiring, job, state, again=again)
    except BackupdError:
        raise
    except Exception as unforeseen:  # noqa: BLE001  reported as an event: no job may stay open because of what follows
        trouble = f"the jobs that follow this one cannot be determined: {type(unforeseen).__name__}: {unforeseen}"
    severity = Severity.INFO if state is JobState.CANCELLED else Severity.ERROR
    if state is JobState.PARTIAL and outcome.accepted:
        severity = Severity.WARNING
    quiet = state is JobState.FAILED and (job.kind in _REPORT_THEMSELVES or outcome.reported)
    events = [] if shown is None or quiet else [event_of(job, now, f"job-{state}", shown, severity)]
    if state is JobState.SUCCEEDED:
        events += recovered(wiring, job, now)
    if trouble:
        say_of(job, "job-not-followed", trouble, level=logging.ERROR)
        hint = "backupd queued neither a retry nor retention: run the job again by hand, and check the policy"
        events.append(event_of(job, now, "job-not-followed", BackupdError(trouble, hint=hint)))
    ended = wiring.catalog.jobs.finish(
        job.id,
        state,
        now,
        token=job.token,
        error=shown,
        result=outcome.id,
        bytes=outcome.bytes,
        phases=outcome.phases,
        then=then,
        events=events,
    )
    if job.kind == JobKind.RESTORE:
        wiring.catalog.restores.settle(now)
        for follower in then:
            wiring.catalog.restores.requeue(str(follower.arguments["restore"]), follower.id)
    bad = state in (JobState.FAILED, JobState.PARTIAL, JobState.ABANDONED)
    text = str(shown) if shown else f"{outcome.bytes} bytes"
    say_of(job, f"job-{state}", text, level=logging.ERROR if bad else logging.INFO)
    for follower in then:
        unless = ", unless one waits already" if follower.kind == JobKind.SWEEP else ""
        say_of(follower, "job-queued", f"{follower.kind}, attempt {follower.attempt}, follows from {job.id}{unless}")
    return ended


def _follow_ups(wiring: Wiring, job: JobRecord, state: JobState, *, again: bool) -> list[JobRecord]:
    if state is JobState.CANCELLED and job.cancel_by == DAEMON_STOP:
        return [repetition(wiring, job, attempt=job.attempt)]
    if job.kind == JobKind.SWEEP:  # else nobody would queue it before the next rules, of whichever server
        killed = state is JobState.ABANDONED and job.attempt < _SWEEPS
        return [repetition(wiring, job, attempt=job.attempt + 1)] if killed else []
    try:
        policy = policy_of(wiring, job.server, job.kind)
    except ConfigurationError:  # what waits in the queue waits there until the policy is whole
        killed = state is JobState.ABANDONED and bool(job.leg)
        return [repetition(wiring, job, attempt=job.attempt + 1)] if killed else []
    if policy is None:
        return []
    then = [*_expiry(wiring, job, state, policy), *_sweeps(wiring, job, state)]
    wanted = job.leg or job.arguments.get("retry")
    if (again or state is JobState.ABANDONED) and wanted and job.attempt < policy.retry.attempts:
        then.append(repetition(wiring, job, attempt=job.attempt + 1, wait=policy.retry.wait(job.attempt)))
    return then


def _expiry(wiring: Wiring, job: JobRecord, state: JobState, policy: Policy) -> list[JobRecord]:
    if not (_expires(job, state) and policy.retention):
        return []
    waiting = wiring.catalog.jobs.list(job.server, kind=JobKind.RETENTION, state=JobState.QUEUED)
    if any(one.runs_on == (job.runs_on or wiring.here) for one in waiting):
        return []  # one that waits for another host may wait for ever
    return [replace(queued(wiring, JobKind.RETENTION, job.server, runs_on=job.runs_on), leg=RETENTION_LEG)]


def _expires(job: JobRecord, state: JobState) -> bool:
    """Does a backup that is there now make others expire?"""
    return job.kind in BACKUPS and state in (JobState.SUCCEEDED, JobState.PARTIAL)


def _sweeps(wiring: Wiring, job: JobRecord, state: JobState) -> list[JobRecord]:
    """What ``job`` left, or marked, is removed afterwards. A backup that retention follows leaves that to it."""
    server = wiring.settings.server(job.server)
    names: Collection[str] = ()
    if job.kind == JobKind.RETENTION:
        names = {*server.required, *server.others, *wiring.catalog.backups.destinations_of(job.server)}
    elif job.kind in BACKUPS and not (_expires(job, state) and server.policy.retention):
        names = server.required
    elif job.kind == JobKind.REPLICATE and state is not JobState.FAILED:
        names = [str(job.arguments["destination"])]
    return [sweep_of(wiring, name, job.runs_on) for name in sorted(names) if name in wiring.settings.destinations]


def sweep_of(wiring: Wiring, destination: str, runs_on: str = "") -> JobRecord:
    """A new sweep of ``destination`` for the queue, which takes one at a time; ``runs_on``: as of ``queued``."""
    sweep = queued(wiring, JobKind.SWEEP, "", arguments={"destination": destination}, runs_on=runs_on)
    return replace(sweep, leg=sweep_leg(destination), not_before=_rested(wiring, sweep_leg(destination)))


def _rested(wiring: Wiring, leg: str) -> datetime | None:
    """When a sweep of this leg may begin; None: at once. A sweep reads all that is at its destination, and one is asked
    for by the end of nearly every job: of a service they take a tenth of the time. Where none runs, a command does
    the sweep at its end, and does not wait."""
    if wiring.here.removeprefix(HOST) not in wiring.catalog.hosts.served(wiring.clock()):
        return None
    begun = wiring.catalog.jobs.list("", leg=leg, state=(JobState.RUNNING, JobState.SUCCEEDED), limit=2)
    last = next((one for one in begun if one.started_at and one.finished_at), None)
    if last is None or last.started_at is None or last.finished_at is None:
        return None
    took = last.finished_at - last.started_at
    if took < _SHORT:
        return None
    return max(one.started_at for one in begun if one.started_at) + min(took * _REST, _LONGEST_REST)


def sweep_leg(destination: str) -> str:
    """What sweeps of ``destination`` are identified by."""
    leg = SWEEP_LEG + destination
    if len(leg) <= _LONGEST_LEG:
        return leg
    return f"{leg[: _LONGEST_LEG - 9]}~{hashlib.sha256(destination.encode()).hexdigest()[:8]}"


def queued(
    wiring: Wiring,
    kind: JobKind,
    server: str,
    *,
    by: str = "",
    arguments: Mapping[str, Any] | None = None,
    runs_on: str = "",
) -> JobRecord:
    """A new job for the queue, not recorded yet, addressed to this host, or to another one with ``runs_on``. ``by``
    whom it is asked for."""
    now = wiring.clock()
    return JobRecord(
        id=new_id(now),
        kind=kind,
        server=server,
        state=JobState.QUEUED,
        queued_at=now,
        requested_by=by,
        arguments=dict(arguments or {}),
        runs_on=runs_on or wiring.here,
    )


def repetition(wiring: Wiring, job: JobRecord, *, attempt: int, wait: timedelta = timedelta(0)) -> JobRecord:
    """The same job again, as its successor, on the same host: who ends a job that died may be on another one, which
    has other data."""
    again = queued(
        wiring,
        JobKind(job.kind),
        job.server,
        by=job.requested_by,
        arguments=job.arguments,
        runs_on=job.runs_on,
    )
    return replace(
        again,
        due_at=job.due_at,
        not_before=again.queued_at + wait,
        attempt=attempt,
        previous=job.id,
        leg=job.leg,
    )


def abandon_dead(wiring: Wiring) -> tuple[JobRecord, ...]:
    """End jobs whose process is gone, with an event each; those of a schedule are tried again. Gives them.

    Each on its own: one that cannot be ended is reported, and the next one is looked at.
    """
    wiring.catalog.restores.settle(wiring.clock())
    gone = BackupdError(
        "the process that ran this job is gone",
        hint="run it again; whatever it left at a destination is removed by the next run",
    )
    stopped = CancelledError("the process that ran this job was killed because the service had to stop")
    ended = []
    for job in wiring.catalog.jobs.dead(owner_state, wiring.clock()):
        mark = _stop_mark(wiring, job)
        try:
            if mark.exists():
                ended.append(close(wiring, replace(job, cancel_by=DAEMON_STOP), JobState.CANCELLED, error=stopped))
            else:
                ended.append(close(wiring, job, JobState.ABANDONED, error=gone))
            mark.unlink(missing_ok=True)
        except RefusedError:
            continue  # it ended meanwhile, or another process was faster
        except CatalogError:
            raise
        except (BackupdError, OSError) as error:
            say_of(
                job,
                "job-not-ended",
                f"job {job.id} has no process and its state could not be updated: {error}",
                level=logging.ERROR,
            )
    return tuple(ended)


def mark_stopped(wiring: Wiring, job: JobRecord) -> None:
    """Note, where the catalog does not answer, that the service's stop ended this job: ``abandon_dead`` queues it
    again."""
    mark = _stop_mark(wiring, job)
    try:
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600)
    except OSError as error:
        say_of(job, "job-not-ended", f"the marker file {mark} cannot be written: {error.strerror}", level=logging.ERROR)


def _stop_mark(wiring: Wiring, job: JobRecord) -> Path:
    return wiring.settings.spool / "stopped" / job.id


def cancel(wiring: Wiring, job_id: str, by: str) -> JobRecord:
    """Cancel a queued job, or ask whoever runs it to stop. Raises RefusedError when it is over, NotFoundError."""
    job = wiring.catalog.jobs.request_cancel(job_id, by, wiring.clock())
    if job.kind == JobKind.RESTORE:
        wiring.catalog.restores.settle(wiring.clock())
    say_of(job, "job-cancel-requested", f"by {by}")
    return job


def prune(wiring: Wiring) -> tuple[str, ...]:
    """Forget jobs that were over long ago, and their logs; gives their ids."""
    gone = wiring.catalog.jobs.prune(wiring.clock() - KEPT)
    remove_logs(wiring.settings, gone)
    return gone


def policy_of(wiring: Wiring, server: str, kind: str = "") -> Policy | None:
    """None for a server that is not configured (any more). Raises ConfigurationError for a policy that is broken, but
    for a restore: that does without."""
    with suppress(NotFoundError):
        found = wiring.settings.server(server)
        return found.found if kind == JobKind.RESTORE else found.policy
    return None


# -- well again


def recovered(wiring: Wiring, job: JobRecord, now: datetime) -> list[Event]:
    """The events that report that ``job`` has gone well. What a person started counts for the schedule of the same
    thing, too. Raises CatalogError."""
    found = []
    legs = _legs(job)
    for subject in dict.fromkeys([*legs, job.kind]):
        bad = wiring.catalog.events.last(job.server, BAD, subject, severities=_GRAVE)
        well = wiring.catalog.events.last(job.server, (RECOVERED,), subject)
        after = well.number if well is not None else 0
        if bad is not None and after < bad.number and (subject in legs or _is_all_the_same(wiring, job, after, now)):
            whose = f"{subject} of {job.server}" if job.server else subject
            found.append(
                Event(
                    now,
                    RECOVERED,
                    Severity.INFO,
                    f"{whose} succeeded again",
                    server=job.server,
                    subject=subject,
                    job_id=job.id,
                )
            )
    return found


def _is_all_the_same(wiring: Wiring, job: JobRecord, after: int, now: datetime) -> bool:
    """Did everything of this kind that failed since then, and is not forgotten yet, do what ``job`` did? A restore
    into one folder says nothing about one into another."""
    bad = {
        event.job_id
        for event in wiring.catalog.events.list(server=job.server, after=after, limit=_REMEMBERED)
        if event.kind in BAD and event.severity in _GRAVE and event.subject == job.kind and now - event.at < _FORGOTTEN
    }
    failed = [wiring.catalog.jobs.find(job_id) for job_id in bad - {""}]
    return all(one is not None and _task(one) == _task(job) for one in failed)


def _task(job: JobRecord) -> dict[str, object]:
    """What was asked for, however often it is tried and in whatever manner."""
    return {name: value for name, value in job.arguments.items() if name not in _MANNER}


def _legs(job: JobRecord) -> tuple[str, ...]:
    """Those that ``job`` makes good."""
    legs: tuple[str, ...]
    if job.kind == JobKind.LOGICAL:
        legs = () if job.arguments.get("tables") else (logical_leg(str(job.arguments.get("set") or "")),)
    else:
        legs = tuple(leg for leg, kind in KINDS.items() if kind == job.kind)
    return tuple(dict.fromkeys([*([job.leg] if job.leg else []), *legs]))


# -- the heartbeat


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

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    # -- for the work

    def report(self, progress: Progress) -> None:
        """Take a report of the work and pass it on."""
        if progress.phase not in self._paces:
            self._paces[progress.phase] = _Pace(time.monotonic(), progress.bytes_done)
            say_of(self._job, "job-phase", progress.phase)
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
            self._beat_once(latest)
            if idle >= self._hang.total_seconds() and not self.cancel.is_set():
                self._stop_hanging(latest)

    def _beat_once(self, latest: Progress | None) -> None:
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
        phase, where = "its beginning", ""
        if latest is not None:
            phase = f"phase {latest.phase}"
            where = f"{latest.bytes_done} bytes and {latest.files_done} files were done; the last note: "
            where += latest.note or "none"
        limit = format_duration(self._hang.total_seconds())
        self.problem = ToolError(
            f"stopped: no progress for {limit} in {phase}",
            detail=redacted(where),
            hint="check what it waited for (a lock on the server, the disk, the network); limits.hang in the policy "
            "is the limit",
        )
        self._warn("job-hanging", self.problem.message)
        try:
            self._wiring.catalog.events.add(event_of(self._job, self._wiring.clock(), "job-hanging", self.problem))
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
        say_of(self._job, event, message, level=logging.WARNING)

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

"""The one module that runs a job: the table from a row of the catalog to the use case behind it, and the life of a job
in the process that does it: the row before, a pulse meanwhile, the outcome afterwards.

A worker starts a process for a queued job, which claims it here; a command that somebody waits for makes its own row
and goes through the same table. A job ends as ``cancelled`` when somebody wanted that (`backupd jobs cancel`, a signal,
Ctrl-C), as ``failed`` when it went wrong. A repetition is a new job that names this one as ``previous``.

What a job needs it imports itself: a process that takes a backup need not load what restores it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from backupd.app.context.access import REFUSALS, Facade, require_known, require_target
from backupd.app.context.logging_setup import job_log, say
from backupd.app.context.wiring import JobRun, Result, Wiring, emptied, owner, user
from backupd.app.jobs.jobs import BEAT, PATIENCE, Pulse, abandon_dead, close, policy_of, queued
from backupd.model.backup_record import BackupKind, BackupRecord
from backupd.model.errors import (
    BackupdError,
    CancelledError,
    CatalogError,
    DamagedError,
    DestinationError,
    DumpsOnlyError,
    ElsewhereError,
    RefusedError,
    UnknownTableError,
)
from backupd.model.job import JobKind, JobRecord, JobState, Report, silent
from backupd.model.proof import INEXACT, UNDECIDED, Phase, Proof
from policies.policy import Policy

if TYPE_CHECKING:
    from backupd.app.copies.replication import Replicated
    from backupd.app.restores.execution import Outcome
    from backupd.app.restores.request import RestoreRequest
    from backupd.app.retention.retention import Applied
    from backupd.app.verify.verification import VerifyOutcome
    from restore.tables.restore import Confirm

Action = Callable[[Wiring, JobRun], Result]

_SILENT = (JobKind.RETENTION, JobKind.CHALLENGE, JobKind.RESTORE, JobKind.REMOVAL)
"""Kinds that report no progress, or not in every phase, so that nobody can see whether they make any."""

LONGEST_SILENCE = timedelta(hours=6)
"""How long those may take, and jobs of no server be without progress."""


@dataclass(frozen=True, slots=True)
class Caller:
    """``by`` whom a job is done in this process; ``begun`` gets its id once it has a row."""

    by: str
    begun: Callable[[str], None]


# -- what each kind of job does


def perform(wiring: Wiring, run: JobRun) -> Result:
    """Do what ``run.job`` asks for. Raises whatever makes it fail."""
    return _ACTIONS[JobKind(run.job.kind)](wiring, run)


_BACKUP_PHASES = {
    BackupKind.PHYSICAL_FULL: "backup",
    BackupKind.PHYSICAL_INCREMENTAL: "increment",
    BackupKind.LOGICAL: "dump",
}
"""Under which name its speed is remembered: an increment reads much and moves little."""


def _backup(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.backups.logical import accepts_missing
    from backupd.app.backups.physical import take_backup
    from backupd.app.metacopies.catalog_copies import after_job

    begun = time.monotonic()
    made = take_backup(wiring, run.job.server, BackupKind(run.job.kind), run)
    seconds = time.monotonic() - begun
    after_job(wiring)
    record = made.record
    size = record.stats.bytes_source
    # By what was taken: an increment that could not build on anything is a full backup.
    phase = Phase(_BACKUP_PHASES[record.kind], seconds, size)
    # What a physical tool always leaves out it leaves out the next time, too; and who answers is the same one then.
    accepted = record.apart or (
        accepts_missing(wiring.settings.server(record.server)) if record.kind is BackupKind.LOGICAL else made.accepted
    )
    return Result(record.id, size, (phase,), problem=made.problem, partial=made.problem is not None, accepted=accepted)


def _test_restore(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.restores.test_restore import test_restore

    policy = wiring.settings.server(run.job.server).policy.test_restore
    target = str(run.job.arguments.get("target") or (policy.target if policy is not None else "latest"))
    return of_proof(test_restore(wiring, run.job.server, target, run.report))


def of_proof(proof: Proof) -> Result:
    """What the row of a test restore says."""
    problem = None
    subject = f"the test restore of backup {proof.backup_id} to {proof.target} "
    if proof.outcome == INEXACT:
        problem = BackupdError(
            f"{subject}may differ from the source's rows",
            detail="\n".join(proof.warnings),
            hint=f"take a full backup now: backupd backup {proof.server} --kind full",
        )
    elif proof.is_good and proof.older:
        problem = BackupdError(
            f"{subject}does not cover the newest data",
            detail="\n".join(proof.warnings),
            hint=f"to find the cause: backupd timeline {proof.server}",
        )
    elif not proof.is_good:
        failed = [f"{check.name}: {check.detail}" for check in proof.checks if check.outcome == "failed"]
        undecided = proof.outcome == UNDECIDED
        problem = BackupdError(
            subject + ("did not complete; the state of the backup is unknown" if undecided else "failed"),
            detail="\n".join([*([proof.error] if proof.error else []), *failed]),
            hint="correct the cause, then run `backupd test-restore` again"
            if undecided
            else f"to list its damage: backupd verify {proof.server}; and take a new full backup",
        )
    # Without phases: rates count those of the proof itself.
    moved = max((phase.bytes for phase in proof.phases), default=0)
    return Result(proof.id, moved, problem=problem, outcome=proof)


def _verify(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.verify import verification

    begun = time.monotonic()
    subset, seconds = run.job.arguments.get("subset"), run.job.arguments.get("period")
    period = timedelta(seconds=seconds) if seconds else None
    outcome = verification.verify(wiring, run.job.server or None, subset, run.report, period=period)
    return replace(of_verification(outcome), phases=(Phase("verify", time.monotonic() - begun, outcome.bytes),))


def of_verification(outcome: VerifyOutcome) -> Result:
    """What the row of a verification says."""
    left = [damage for damage in outcome.damages if not damage.repaired_from]
    lines = [f"{damage.destination}: {damage.key or 'all of it'}: {damage.problem}" for damage in left]
    problem: BackupdError | None = None
    if outcome.ok:
        pass
    elif not lines:
        problem = BackupdError(
            f"{len(outcome.lacking)} stored backups lack tables, or may not be restorable",
            detail="\n".join(map(str, outcome.lacking)),
            hint="everything else in them is good; take a full backup now and test it: backupd backup SERVER "
            "--kind full, backupd test-restore SERVER",
        )
    elif not any(damage.key for damage in left):
        problem = BackupdError(
            f"{len(lines)} destinations could not be read",
            detail="\n".join(lines),
            hint="the state of these copies is unknown; when the destinations are reachable: backupd verify",
        )
    else:
        problem = DamagedError(
            f"{len(lines)} damaged files were found in stored backups",
            lines,
            hint="take a full backup now: it stores the damaged objects again. A binary log is read from another "
            "destination; without one it is a gap: backupd timeline",
        )
    return Result("", outcome.bytes, problem=problem, outcome=outcome)


def _witness(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.backups.physical import take_witness

    begun = time.monotonic()
    return Result(take_witness(wiring, run), phases=(Phase("witness", time.monotonic() - begun),))


def _consistency(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.verify.consistency import perform_check

    return perform_check(wiring, run)


def _challenge(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.context.keys import issue_due

    issue_due(wiring, run)
    return Result()


def _retention(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.retention.retention import apply

    server = run.job.server
    applied = apply(wiring, server, run, really=bool(run.job.arguments.get("really")))
    if server in wiring.settings.servers or run.watched:  # whoever watches is shown that all stays
        return Result(outcome=applied)
    return Result(
        problem=RefusedError(
            f"{server} is not configured: no retention rule applies, so everything is kept",
            hint="to delete a backup: backupd backups delete ID",
        )
    )


def _remove(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.retention.deletion import remove_marked

    held = remove_marked(wiring, [str(name) for name in run.job.arguments["backups"]])
    return Result(
        problem=RefusedError(
            "immediate deletion is incomplete",
            detail="\n".join(held),
            hint="it stays marked, and a later run removes it; to undo the deletion: backupd backups undelete ID",
        )
        if held
        else None
    )


def _sweep(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.retention.deletion import sweep_destination

    name = str(run.job.arguments["destination"])
    if name not in wiring.settings.destinations:
        return Result(outcome=())  # not any more, so that nothing there is to be removed
    try:
        there = wiring.destination(name).is_initialised()
    except DestinationError as error:
        return _out_of_sight(run, name, error)
    if not there:
        return _out_of_sight(run, name, emptied(name)) if wiring.holds_anything(name) else Result(outcome=())
    run.check()
    held = sweep_destination(wiring, wiring.destination(name), report=run.report)
    for reason in held:
        _say_held(run, name, reason)
    return Result(outcome=tuple(held))


def _out_of_sight(run: JobRun, name: str, why: BackupdError) -> Result:
    """An incident reports it, and whatever is stored there next queues a sweep."""
    _say_held(run, name, why.line)
    return Result(problem=why, reported=True, outcome=(why.line,))


def _say_held(run: JobRun, name: str, reason: str) -> None:
    say("sweep-held", f"{name}: {reason}", job=run.job.id)


def _replicate(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.copies.replication import bring_up_to_date
    from backupd.app.metacopies.catalog_copies import after_job

    done = bring_up_to_date(wiring, run.job.server, str(run.job.arguments["destination"]), run)
    if done.copied:
        after_job(wiring)
    seconds, sent = sum(one.seconds for one in done.copied), sum(one.sent for one in done.copied)
    phases = (Phase("replicate", seconds, sent),) if sent else ()
    # What failed is in the catalog, and is tried again automatically.
    return Result("", done.bytes, phases, problem=done.trouble, outcome=done)


def _restore(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.restores.jobs import perform_restore

    return perform_restore(wiring, run)


_ACTIONS: Mapping[JobKind, Action] = {
    JobKind.FULL: _backup,
    JobKind.INCREMENTAL: _backup,
    JobKind.LOGICAL: _backup,
    JobKind.TEST_RESTORE: _test_restore,
    JobKind.VERIFY: _verify,
    JobKind.RETENTION: _retention,
    JobKind.CHALLENGE: _challenge,
    JobKind.WITNESS: _witness,
    JobKind.CONSISTENCY: _consistency,
    JobKind.REPLICATE: _replicate,
    JobKind.RESTORE: _restore,
    JobKind.REMOVAL: _remove,
    JobKind.SWEEP: _sweep,
}


# -- a job in the process that does it


def run_here(
    wiring: Wiring,
    kind: JobKind,
    server: str,
    work: Callable[[JobRun], Result],
    *,
    report: Report,
    arguments: Mapping[str, Any] | None = None,
    caller: Caller | None = None,
) -> Result:
    """Queue a job, do ``work`` as that job in this process at once, and record how it ended.

    Raises what ``work`` raises, and RefusedError when the job was taken from this process meanwhile.
    """
    policy_of(wiring, server, kind)  # a broken one is reported before there is a row
    abandon_dead(wiring)
    job = queued(wiring, kind, server, by=caller.by if caller else user(), arguments=arguments)
    now = job.queued_at
    # Taken by this process as it is queued: no worker may be faster.
    job = replace(job, state=JobState.RUNNING, started_at=now, heartbeat_at=now, owner=owner(), token=1)
    wiring.catalog.jobs.add(job)
    if caller is not None:
        caller.begun(job.id)
    return live(wiring, job, work, report, watched=True)


def run_claimed(wiring: Wiring, job_id: str, token: int, report: Report = silent) -> Result:
    """Do a job that a worker claimed under ``token`` for this process.

    Raises RefusedError when the job is somebody else's by now, NotFoundError, and what makes the job fail.
    """
    job = wiring.catalog.jobs.adopt(job_id, token, owner(), wiring.clock())
    return live(wiring, job, partial(perform, wiring), report)


def live(
    wiring: Wiring, job: JobRecord, work: Callable[[JobRun], Result], report: Report, *, watched: bool = False
) -> Result:
    """Do ``work`` as ``job``, which runs and is this process's, to its recorded end; see ``run_here``. ``watched``:
    whoever asked for it sees how it ends."""
    policy = policy_of(wiring, job.server, job.kind)
    if job.kind != JobKind.RESTORE:  # for which everybody else waits
        _yield_to_others(policy.limits.nice if policy is not None else None)
    pulse = Pulse(wiring, job, report, hang=_patience(policy, job), rates=wiring.catalog.rates.of(job.server))
    with job_log(wiring.settings, job.id) as log:
        say("job-started", f"{job.kind}, attempt {job.attempt}", server=job.server, job=job.id)
        done: list[Result] = []
        try:
            with pulse:
                done.append(work(JobRun(job, pulse.report, pulse.cancel, pulse.fence, log, watched)))
        except BaseException as error:
            # A signal after the last step came too late: what was committed is not cancelled.
            if not done or not isinstance(error, KeyboardInterrupt):
                with _undisturbed():
                    shown = _ended_badly(wiring, job, pulse, error, watched=watched)
                if shown is error:
                    raise
                raise shown from error
        with _undisturbed():
            _ended_well(wiring, job, done[0])
        return done[0]


def _patience(policy: Policy | None, job: JobRecord) -> timedelta:
    """How long it may be without progress."""
    if policy is None or job.kind in _SILENT:
        return max(LONGEST_SILENCE, policy.limits.hang if policy is not None else LONGEST_SILENCE)
    return policy.limits.hang


def _ended_well(wiring: Wiring, job: JobRecord, result: Result) -> None:
    state = JobState.SUCCEEDED
    if result.problem is not None:
        state = JobState.PARTIAL if result.partial else JobState.FAILED
    again = state is JobState.PARTIAL and not result.accepted
    _patiently(partial(close, wiring, job, state, error=result.problem, result=result, again=again))


def _ended_badly(wiring: Wiring, job: JobRecord, pulse: Pulse, error: BaseException, *, watched: bool) -> BaseException:
    """Record it; gives the error that the caller should see: the reason for a stop rather than the stop."""
    if pulse.lost is not None:
        say("job-lost", pulse.lost.message, level=logging.ERROR, server=job.server, job=job.id)
        return pulse.lost
    reason: BaseException = error
    by = pulse.cancel_by or (_canceller(wiring, job) if isinstance(error, KeyboardInterrupt) else "")
    if pulse.problem is not None:
        reason = pulse.problem
        ending = partial(close, wiring, job, JobState.FAILED, error=pulse.problem, again=True)
    elif by:
        reason = CancelledError(f"job {job.id} was cancelled by {by}")
        ending = partial(close, wiring, replace(job, cancel_by=by), JobState.CANCELLED, error=reason)
    elif isinstance(error, KeyboardInterrupt):
        name = signal.Signals(getattr(error, "number", signal.SIGINT)).name
        ending = partial(close, wiring, job, JobState.CANCELLED, error=CancelledError(f"stopped by {name}"))
    elif isinstance(error, (ElsewhereError, DumpsOnlyError, UnknownTableError)) or (
        watched and job.kind == JobKind.RESTORE and isinstance(error, REFUSALS)
    ):
        # Somebody forgot --confirm, mistyped a table, or asked for what no policy plans, and was refused: nothing was
        # done, and nothing is broken.
        ending = partial(close, wiring, job, JobState.CANCELLED, error=error)
    else:
        shown = error if isinstance(error, BackupdError) else _internal(job, error)
        # A lease at a destination that was lost is a cancellation that nobody asked for.
        again = shown.retryable or isinstance(shown, CancelledError)
        ending = partial(close, wiring, job, JobState.FAILED, error=shown, again=again)
    _patiently(ending)
    return reason


def _canceller(wiring: Wiring, job: JobRecord) -> str:
    """Who asked to stop this job: the signal may have come before the heartbeat that would have reported it."""
    with suppress(BackupdError):
        return wiring.catalog.jobs.get(job.id).cancel_by
    return ""


def _patiently(ending: Callable[[], JobRecord]) -> None:
    """A catalog that cannot be reached for a moment must not make a good run look lost."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            ending()
        except CatalogError:
            if time.monotonic() > deadline:
                raise
            time.sleep(BEAT)
        else:
            return


def _internal(job: JobRecord, error: BaseException) -> BackupdError:
    """An error that is none of ours, in a sentence; its traceback goes to the job's log."""
    say("job-traceback", "".join(traceback.format_exception(error)), level=logging.ERROR, server=job.server, job=job.id)
    hint = f"`backupd jobs log {job.id}` says where it happened"
    if isinstance(error, OSError):
        path = f"{error.filename}: " if error.filename else ""
        return BackupdError(f"{job.kind} failed: {path}{error.strerror or error}", hint=hint)
    first = (str(error).splitlines() or [""])[0]
    return BackupdError(f"internal error: {type(error).__name__}: {first}", hint=hint)


def _yield_to_others(nice: int | None) -> None:
    """Lower the priority of this process and of all that it starts. Linux derives the I/O priority from it."""
    if nice is not None and os.getpriority(os.PRIO_PROCESS, 0) < nice:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No signal keeps the outcome from being recorded: those that ask to stop come too late."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def too_late(_number: int, _frame: FrameType | None) -> None:
        """The work is over already."""

    before = {number: signal.signal(number, too_late) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- what a command does itself


class Foreground(Facade):
    """Work that this process does itself, as a job that whoever asked for it waits for and watches."""

    def backup(
        self, server: str, kind: BackupKind, report: Report, *, table_set: str = "", tables: Sequence[str] = ()
    ) -> BackupRecord:
        """``table_set`` of the policy, or patterns of ``tables``: what a logical backup takes, without them what the
        policy says. Raises whatever keeps it from being taken; a backup with tables missing is taken."""
        from backupd.app.backups.logical import backup_arguments
        from backupd.app.copies.protection import with_protection

        arguments = backup_arguments(self._wiring.settings.server(server), kind, table_set, tables)
        done = self._do("backup-requested", str(kind), JobKind(kind), server, report, arguments)
        return with_protection(self._wiring, [self._wiring.catalog.backups.get(done.id)])[0]

    def test_restore(self, server: str, target: str, report: Report) -> Proof:
        """``target``: any of a restore, or ``random``. Raises what keeps the test from beginning; a restore that
        failed is a proof, too."""
        from backupd.app.restores.test_restore import RANDOM

        self._wiring.settings.server(server)
        if target != RANDOM:
            require_target(self._wiring, server, target)
        done = self._do("test-restore-requested", target, JobKind.TEST_RESTORE, server, report, {"target": target})
        proof: Proof = done.outcome
        return proof

    def check_consistency(self, server: str, report: Report) -> None:
        """Compare a replica, or those of a group, with the source. Raises what keeps them from being compared."""
        self._wiring.settings.server(server)
        self._do("consistency-requested", "", JobKind.CONSISTENCY, server, report, {})

    def verify(
        self, server: str | None, subset: float | None, report: Report, labels: Collection[str] = ()
    ) -> VerifyOutcome:
        """Read stored objects of ``server``, of those with ``labels`` one after the other, or of all, again.
        ``subset``: the share of them to read, more than 0 and at most 1; None for all. Raises NotFoundError,
        CancelledError, CatalogError."""
        from backupd.app.verify.verification import together

        if server is not None:
            self._wiring.settings.server(server)
        arguments = {"subset": subset} if subset else {}
        return together(
            self._do("verify-requested", "", JobKind.VERIFY, one or "", report, arguments).outcome
            for one in (self._wiring.settings.labelled(labels, server) if labels else (server,))
        )

    def replicate(
        self, server: str | None, destination: str | None, report: Report, labels: Collection[str] = ()
    ) -> tuple[Replicated, ...]:
        """Bring destinations up to date, for one server, those with ``labels``, or all of them: ``destination``, or
        all that their policies name."""
        from backupd.app.copies.missing_copies import destinations_of

        some = self._wiring.settings.labelled(labels, server) if labels else None
        return tuple(
            self._do("replicate-requested", one, JobKind.REPLICATE, name, report, {"destination": one}).outcome
            for name, one in destinations_of(self._wiring, server, destination, some)
        )

    def apply_retention(self, server: str, report: Report, *, really: bool = False) -> Applied:
        """Mark what the rules expire; ``really``: also what the deletion limit holds back. Raises RefusedError where it
        is too much at once, NotFoundError."""
        require_known(self._wiring, server)
        arguments = {"really": True} if really else {}
        applied: Applied = self._do(
            "retention-applied", "really" if really else "", JobKind.RETENTION, server, report, arguments
        ).outcome
        return applied

    def restore(
        self,
        request: RestoreRequest,
        report: Report,
        *,
        confirm: str | None = None,
        ask: Confirm | None = None,
        keys: int | None = None,
    ) -> Outcome:
        """Restore a whole server or tables, as ``request`` says. ``confirm``: the name of the server where live tables
        are replaced, or ``ask`` is asked; ``keys``: the maximum number of keys that are reported of each sort of rows
        that differ. Raises what planning and the execution raise, RefusedError without confirmation."""
        self._refuse_unknown(request)
        into = request.into or request.folder
        what = f"{', '.join(request.tables)} of {request.target}" if request.of_tables else request.target
        where = {"tables": list(request.tables), "into": into} if request.of_tables else {"datadir": into}
        outcome: Outcome = self._do(
            "restore-started",
            f"{what} into {into}{', only to compare' if request.compare else ''}",
            JobKind.RESTORE,
            request.server,
            report,
            {
                "target": request.target,
                **where,
                "request": request.as_json(),
                **{name: value for name, value in (("confirm", confirm), ("keys", keys)) if value is not None},
            },
            ask,
        ).outcome
        return outcome

    def _refuse_unknown(self, request: RestoreRequest) -> None:
        """Raises UsageError, NotFoundError for what the request names and nobody knows, before it is in the audit."""
        request.table_options if request.of_tables else request.options  # noqa: B018  raises what is wrong with them
        for name in filter(None, (request.server, request.into)):
            self._wiring.settings.server(name)
        require_target(self._wiring, request.server, request.target)

    def _do(
        self,
        action: str,
        detail: str,
        kind: JobKind,
        server: str,
        report: Report,
        arguments: Mapping[str, Any],
        confirm: Confirm | None = None,
    ) -> Result:
        """As a job of ``kind``, by the table of actions. ``confirm``: see ``JobRun``."""

        def work(run: JobRun) -> Result:
            return perform(self._wiring, replace(run, confirm=confirm))

        with self._audited(action, server=server, detail=detail) as audited:
            caller = Caller(self._actor.name, audited.begun)
            return run_here(self._wiring, kind, server, work, report=report, arguments=arguments, caller=caller)

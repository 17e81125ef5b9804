"""What each kind of job does: the one table from a row of the catalog to the use case behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from backupd.app.context.run import JobRun, Result
from backupd.app.context.wiring import Wiring, owner
from backupd.app.jobs.jobs import live
from backupd.model.backup_record import BackupKind
from backupd.model.errors import BackupdError, DamagedError, RefusedError
from backupd.model.job import JobKind, Report, silent
from backupd.model.proof import INEXACT, UNDECIDED, Phase, Proof

if TYPE_CHECKING:
    from backupd.app.copies.replication import Replicated
    from backupd.app.verify import verification

Action = Callable[[Wiring, JobRun], Result]


def perform(wiring: Wiring, run: JobRun) -> Result:
    """Do what ``run.job`` asks for. Raises whatever makes it fail."""
    return _ACTIONS[JobKind(run.job.kind)](wiring, run)


def run_claimed(wiring: Wiring, job_id: str, token: int, report: Report = silent) -> Result:
    """Do a job that a worker claimed under ``token`` for this process.

    Raises RefusedError when the job is somebody else's by now, NotFoundError, and what makes the job fail.
    """
    job = wiring.catalog.jobs.adopt(job_id, token, owner(), wiring.clock())
    return live(wiring, job, lambda run: perform(wiring, run), lambda result: result, report)


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
    told = f"the test restore of backup {proof.backup_id} to {proof.target} "
    if proof.outcome == INEXACT:
        problem = BackupdError(
            f"{told}may hold other rows than the source had",
            detail="\n".join(proof.warnings),
            hint=f"take a full backup now: backupd backup {proof.server} --kind full",
        )
    elif proof.is_good and proof.older:
        problem = BackupdError(
            f"{told}shows nothing of the newest data",
            detail="\n".join(proof.warnings),
            hint=f"see what holds it up: backupd timeline {proof.server}",
        )
    elif not proof.is_good:
        failed = [f"{check.name}: {check.detail}" for check in proof.checks if check.outcome == "failed"]
        undecided = proof.outcome == UNDECIDED
        problem = BackupdError(
            told + ("did not come to its end, which says nothing about the backup" if undecided else "failed"),
            detail="\n".join([*([proof.error] if proof.error else []), *failed]),
            hint="mend what kept it from that, then test again"
            if undecided
            else f"look at its damages: backupd verify {proof.server}; and take a new full backup",
        )
    # Without phases: rates count those of the proof itself.
    return Result(proof.id, max((phase.bytes for phase in proof.phases), default=0), problem=problem)


def _verify(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.verify import verification

    begun = time.monotonic()
    subset, seconds = run.job.arguments.get("subset"), run.job.arguments.get("period")
    period = timedelta(seconds=seconds) if seconds else None
    outcome = verification.verify(wiring, run.job.server or None, subset, run.report, period=period)
    return replace(of_verification(outcome), phases=(Phase("verify", time.monotonic() - begun, outcome.bytes),))


def of_verification(outcome: verification.VerifyOutcome) -> Result:
    """What the row of a verification says."""
    problem = None
    if not outcome.ok:
        lines = [
            f"{damage.destination}: {damage.key or 'all of it'}: {damage.problem}"
            for damage in outcome.damages
            if not damage.repaired_from
        ]
        if not lines:
            return Result(
                "",
                outcome.bytes,
                problem=BackupdError(
                    f"{len(outcome.lacking)} stored backups lack tables, or may not be restorable",
                    detail="\n".join(map(str, outcome.lacking)),
                    hint="everything else in them is good; take a full backup now and test it: backupd backup SERVER "
                    "--kind full, backupd test-restore SERVER",
                ),
            )
        if not any(damage.key for damage in outcome.damages if not damage.repaired_from):
            return Result(
                "",
                outcome.bytes,
                problem=BackupdError(
                    f"{len(lines)} destinations could not be read",
                    detail="\n".join(lines),
                    hint="how the copies there are nobody knows; once they can be reached again: backupd verify",
                ),
            )
        problem = DamagedError(
            f"{len(lines)} damages were found in stored backups",
            lines,
            hint="the next backup stores damaged objects afresh, so take a full one now; a binary "
            "log is read from another destination, or what it held is a gap: backupd timeline",
        )
    return Result("", outcome.bytes, problem=problem)


def _witness(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.backups.physical import take_witness

    begun = time.monotonic()
    witness_id = take_witness(wiring, run)
    return Result(witness_id, phases=(Phase("witness", time.monotonic() - begun),))


def _challenge(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.keys.keys import issue_due

    issue_due(wiring, run)
    return Result()


def _retention(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.retention import retention

    retention.apply(wiring, run.job.server, run, really=bool(run.job.arguments.get("really")))
    if run.job.server in wiring.settings.servers:
        return Result()
    return Result(
        problem=RefusedError(
            f"{run.job.server} is not configured: no rule says what may go, so all stays",
            hint="delete what is not needed any more: backupd backups delete ID",
        )
    )


def _remove(wiring: Wiring, run: JobRun) -> Result:
    from backupd.app.retention.deletion import remove_marked

    held = remove_marked(wiring, [str(name) for name in run.job.arguments["backups"]])
    return Result(
        problem=RefusedError(
            "not everything that was to go at once is gone",
            detail="\n".join(held),
            hint="it stays marked: a later removal takes it, or `backupd backups undelete ID` brings it back",
        )
        if held
        else None
    )


def _replicate(wiring: Wiring, run: JobRun) -> Result:
    return of_replication(replicate(wiring, run))


def replicate(wiring: Wiring, run: JobRun) -> Replicated:
    """Bring the destination of ``run`` up to date, with what it says of itself."""
    from backupd.app.copies.replication import bring_up_to_date
    from backupd.app.metacopies.catalog_copies import after_job

    done = bring_up_to_date(wiring, run.job.server, str(run.job.arguments["destination"]), run)
    if done.copied:
        after_job(wiring)
    return done


def of_replication(done: Replicated) -> Result:
    """What the row of a replication says. What failed is in the catalog, and is tried again by itself."""
    seconds = sum(one.seconds for one in done.copied)
    sent = sum(one.sent for one in done.copied)
    return Result("", done.bytes, (Phase("replicate", seconds, sent),) if sent else (), problem=done.trouble)


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
    JobKind.REPLICATE: _replicate,
    JobKind.RESTORE: _restore,
    JobKind.REMOVAL: _remove,
}

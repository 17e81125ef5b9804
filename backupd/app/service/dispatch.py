"""What each kind of job does: the one table from a row of the catalog to the use case behind it.

Work that the process which was asked does itself, as a job of its own, while whoever asked waits and watches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from backupd.app.context.access import require_known, require_target
from backupd.app.context.audit import deed
from backupd.app.context.run import JobRun, Result
from backupd.app.context.wiring import Wiring, owner
from backupd.app.copies.missing_copies import destinations_of
from backupd.app.copies.replication import Replicated
from backupd.app.jobs.jobs import Asked, live, run_here
from backupd.app.restores.jobs import of_restore
from backupd.app.restores.request import RestoreRequest
from backupd.app.restores.table_restore import restore_tables
from backupd.app.restores.test_restore import RANDOM, test_restore
from backupd.app.restores.whole_server import restore
from backupd.app.retention import retention
from backupd.app.verify import verification
from backupd.model.access import Actor
from backupd.model.backup_record import BackupKind, BackupRecord
from backupd.model.errors import BackupdError, DamagedError, RefusedError
from backupd.model.job import JobKind, Report, silent
from backupd.model.proof import INEXACT, UNDECIDED, Phase, Proof
from restore.tables.outcome import TablesOutcome
from restore.tables.restore import Confirm
from restore.tables.row_difference import SAMPLE
from restore.whole.executor import RestoreOutcome

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
    from backupd.app.context.keys import issue_due

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


T = TypeVar("T")


class Foreground:
    """Of one actor. Every method raises errors of backupd.model.errors, and is in the audit, refused or not."""

    def __init__(self, wiring: Wiring, actor: Actor) -> None:
        self._wiring, self._actor = wiring, actor

    def backup(
        self, server: str, kind: BackupKind, report: Report, *, table_set: str = "", tables: Sequence[str] = ()
    ) -> BackupRecord:
        """``table_set`` of the policy, or patterns of ``tables``: what a logical backup takes, without them what the
        policy says. Raises whatever keeps it from being taken; a backup with tables missing is taken."""
        from backupd.app.copies.protection import with_protection

        asked = {"set": table_set, "tables": list(tables)}
        found = self._wiring.settings.server(server)
        if kind is BackupKind.LOGICAL:
            from backupd.app.backups.logical import chosen_tables

            chosen_tables(found, asked)
        done = self._do(
            "backup-requested",
            str(kind),
            JobKind(kind),
            server,
            lambda run: perform(self._wiring, run),
            report,
            lambda result: result,
            {name: value for name, value in asked.items() if value},
        )
        return with_protection(self._wiring, [self._wiring.catalog.backups.get(done.id)])[0]

    def test_restore(self, server: str, target: str, report: Report) -> Proof:
        self._wiring.settings.server(server)
        if target != RANDOM:
            require_target(self._wiring, server, target)
        return self._do(
            "test-restore-requested",
            target,
            JobKind.TEST_RESTORE,
            server,
            lambda run: test_restore(self._wiring, server, target, run.report),
            report,
            of_proof,
            {"target": target},
        )

    def verify(self, server: str | None, subset: float | None, report: Report) -> verification.VerifyOutcome:
        if server is not None:
            self._wiring.settings.server(server)
        return self._do(
            "verify-requested",
            "",
            JobKind.VERIFY,
            server or "",
            lambda run: verification.verify(self._wiring, server, subset, run.report),
            report,
            of_verification,
            {"subset": subset} if subset else {},
        )

    def replicate(self, server: str | None, place: str | None, report: Report) -> tuple[Replicated, ...]:
        """Bring destinations up to date, for one server or all of them: ``place``, or all that their policies name."""
        return tuple(
            self._do(
                "replicate-requested",
                one,
                JobKind.REPLICATE,
                name,
                lambda run: replicate(self._wiring, run),
                report,
                of_replication,
                {"destination": one},
            )
            for name, one in destinations_of(self._wiring, server, place)
        )

    def apply_retention(self, server: str, report: Report, *, really: bool = False) -> retention.Applied:
        require_known(self._wiring, server)
        return self._do(
            "retention-applied",
            "really" if really else "",
            JobKind.RETENTION,
            server,
            lambda run: retention.apply(self._wiring, server, run, really=really),
            report,
        )

    def restore(self, request: RestoreRequest, report: Report) -> RestoreOutcome:
        """Restore a whole server into the folder of ``request``."""
        self._refuse_unknown(request)
        return self._do(
            "restore-started",
            f"{request.target} into {request.datadir}",
            JobKind.RESTORE,
            request.server,
            lambda run: restore(self._wiring, request, run),
            report,
            of_restore,
            {"target": request.target, "datadir": request.datadir},
        )

    def restore_tables(
        self,
        request: RestoreRequest,
        report: Report,
        *,
        confirm: str | None = None,
        ask: Confirm | None = None,
        keys: int = SAMPLE,
    ) -> TablesOutcome:
        """``confirm``: the name of the server where live tables are replaced, or ``ask`` is asked; ``keys``: the
        maximum number of keys that are reported of each sort of rows that differ."""
        self._refuse_unknown(request)
        into = request.into or request.sql
        shown = f"{', '.join(request.tables)} of {request.target} into {into}"
        return self._do(
            "restore-started",
            f"{shown}{', only to compare' if request.compare else ''}",
            JobKind.RESTORE,
            request.server,
            lambda run: restore_tables(self._wiring, request, run, confirm=confirm, ask=ask, keys=keys),
            report,
            of_restore,
            {"target": request.target, "tables": list(request.tables), "into": into},
        )

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
        work: Callable[[JobRun], T],
        report: Report,
        result: Callable[[T], Result] = lambda _done: Result(),
        arguments: dict[str, Any] | None = None,
    ) -> T:
        with deed(self._wiring, self._actor, action, server=server, detail=detail) as told:
            return run_here(
                self._wiring,
                kind,
                server,
                work,
                report=report,
                arguments=arguments or {},
                result=result,
                asked=Asked(self._actor.name, told.begun),
            )

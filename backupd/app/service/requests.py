"""Jobs that there are, and work that people ask for and do not wait for: each request becomes a job in the queue, or is
refused at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from backupd.app.context import logging_setup
from backupd.app.context.access import Facade, require_all, require_known, require_target, see
from backupd.catalog.row_mapping import page_by_page
from backupd.model.backup_record import BackupKind
from backupd.model.errors import UsageError
from backupd.model.job import JobKind, JobRecord, JobState, RestoreRecord

if TYPE_CHECKING:
    from backupd.app.context.access import AuditedAction
    from backupd.app.restores.progress import RestoreView
    from backupd.app.restores.request import RestoreRequest
    from backupd.app.retention.deletion import Deleted
    from backupd.catalog.restores import StoredPlan


class Jobs(Facade):
    """Jobs of every state."""

    def list(
        self, server: str | None, *, kind: str | None = None, state: JobState | None = None, limit: int | None = None
    ) -> Iterator[JobRecord]:
        """Newest first, while they are read from the catalog. Jobs of servers that are not configured any more are
        still listed. Raises UnknownNameError."""
        if server is not None:
            require_known(self._wiring, server)
        which = self._actor.servers
        if server is not None:
            which = frozenset({server}) if self._actor.sees(server) else frozenset()
        page = partial(self._wiring.catalog.jobs.page, which, kind=kind, state=state)
        return page_by_page(lambda most, after: page(limit=most, after=after), limit)

    def get(self, job_id: str) -> JobRecord:
        """Raises NotFoundError."""
        return self._job(job_id)

    def log(self, job_id: str) -> str:
        """Its text. Raises NotFoundError, BackupdError for a file that cannot be read."""
        return logging_setup.read_log(self._wiring.settings, self._job(job_id).id)

    def cancel(self, job_id: str) -> JobRecord:
        """Cancel a queued job, ask a running one to stop. Raises NotFoundError, RefusedError when it is over."""
        from backupd.app.jobs import jobs

        with self._audited("job-cancelled", subject=job_id) as action:
            found = self._job(job_id)
            action.concerns(found.server, found.kind)
            return jobs.cancel(self._wiring, job_id, self._actor.name)

    def run(self, job_id: str, token: int) -> None:
        """Do a job that a worker has claimed for this process."""
        from backupd.app.service.dispatch import run_claimed

        run_claimed(self._wiring, job_id, token)


class Requests(Facade):
    """Work that a person asks for: queued at once, or refused."""

    def backup(self, server: str, kind: BackupKind, *, table_set: str = "", tables: Sequence[str] = ()) -> JobRecord:
        """``table_set`` of the policy, or patterns of ``tables``: what a logical backup takes."""
        from backupd.app.backups.logical import backup_arguments

        with self._audited("backup-requested", server=server, detail=str(kind)) as action:
            arguments = backup_arguments(self._wiring.settings.server(server), kind, table_set, tables)
            self._usable(server)
            return self._queue(JobKind(kind), server, arguments, action)

    def test_restore(self, server: str, target: str = "latest") -> JobRecord:
        """``target``: any of a restore, or ``random``."""
        from backupd.app.restores.test_restore import RANDOM

        with self._audited("test-restore-requested", server=server, detail=target) as action:
            self._usable(server)
            self._wiring.settings.needs_restore()
            if target != RANDOM:
                require_target(self._wiring, server, target)
            return self._queue(JobKind.TEST_RESTORE, server, {"target": target}, action)

    def check_consistency(self, server: str) -> JobRecord:
        """Compare a replica with its source, table by table."""
        with self._audited("consistency-requested", server=server) as action:
            self._usable(server)
            return self._queue(JobKind.CONSISTENCY, server, {}, action)

    def verify(self, server: str | None = None, subset: float | None = None) -> JobRecord:
        """``subset``: the share of the objects to read, more than 0 and at most 1; None for all."""
        with self._audited(
            "verify-requested",
            server=server or "",
            detail="all" if subset is None else f"{subset:.0%}",
        ) as action:
            if server is not None:
                self._usable(server)
            if server is None:
                require_all(self._actor)
            if subset is not None and not 0 < subset <= 1:
                raise UsageError(f"{subset:g} is not a share", hint="0.1 is 10%")
            return self._queue(JobKind.VERIFY, server or "", {} if subset is None else {"subset": subset}, action)

    def replicate(self, server: str | None = None, destination: str | None = None) -> tuple[JobRecord, ...]:
        """Bring destinations up to date, for one server or all of them: ``destination``, or all that their policies
        name. A job for each; one that waits already is not asked for twice, and given."""
        from backupd.app.copies.missing_copies import destinations_of

        with self._audited("replicate-requested", server=server or "", detail=destination or "") as action:
            made = [self._copying(name, one) for name, one in destinations_of(self._wiring, server, destination)]
            action.subject = " ".join(job.id for job in made)
            return tuple(made)

    def retention(self, server: str, *, really: bool = False) -> JobRecord:
        """Mark what the rules expire; ``really``: also what the brake holds back."""
        with self._audited("retention-requested", server=server, detail="really" if really else "") as action:
            self._usable(server)
            return self._queue(JobKind.RETENTION, server, {"really": True} if really else {}, action)

    def remove(self, backup_id: str, *, with_increments: bool = False) -> tuple[Deleted, JobRecord | None]:
        """Mark a backup deleted, and have a job remove it at once, without the grace period; no job where nothing of it
        is left. Raises what ``deletion.delete`` does."""
        from backupd.app.retention import deletion

        how = "at once, with its increments" if with_increments else "at once"
        with self._audited("backup-deleted", subject=backup_id, detail=how) as action:
            record = self._backup(backup_id)
            action.concerns(record.server)
            done = deletion.delete(self._wiring, backup_id, now=False, with_increments=with_increments)
            job = self._queue(JobKind.REMOVAL, record.server, {"backups": list(done.marked)}) if done.marked else None
            action.detail = how if job is None else f"{how}: removal {job.id} of {', '.join(done.marked)}"
            return done, job

    # -- restores

    def plan(self, request: RestoreRequest) -> StoredPlan:
        """What a restore would do, kept under an id for an hour. Moves nothing."""
        from backupd.app.restores.jobs import make_plan

        return make_plan(self._wiring, self._actor, request)

    def stored_plan(self, plan_id: str) -> StoredPlan:
        """Raises NotFoundError, also for one that has expired."""
        found = self._wiring.catalog.plans.get(plan_id, self._wiring.clock())
        see(self._actor, found.server, f"plan {plan_id}")
        return found

    def restore(self, wanted: str | RestoreRequest, confirm: str | None = None) -> tuple[RestoreRecord, JobRecord]:
        """Start the plan of this id, or this request. ``confirm``: the name of the server whose data it may replace.

        Raises PlanChangedError where the plan would be another one by now, UnconfirmedError, and what ``plan`` does.
        """
        from backupd.app.restores.jobs import request_restore

        named = wanted if isinstance(wanted, str) else f"{wanted.server} to {wanted.target}"
        server = self.stored_plan(wanted).server if isinstance(wanted, str) else wanted.server
        with self._audited("restore-requested", server=server, detail=named) as action:
            record, job = request_restore(self._wiring, self._actor, wanted, confirm)
            action.subject = record.id
            action.detail = f"{record.target} into {record.datadir}"
            return record, job

    def restore_view(self, restore_id: str) -> RestoreView:
        """How far it is. Raises NotFoundError."""
        from backupd.app.restores.progress import view

        record = self._wiring.catalog.restores.get(restore_id)
        see(self._actor, record.server, f"restore {restore_id}")
        return view(self._wiring, record)

    def runbook_of_restore(self, restore_id: str) -> str:
        """What it did or will do, and how to do that by hand. Raises NotFoundError and what reading the runbook of its
        backup raises."""
        from backupd.app.restores.progress import runbook

        record = self._wiring.catalog.restores.get(restore_id)
        see(self._actor, record.server, f"restore {restore_id}")
        return runbook(self._wiring, record)

    # -- inside

    def _usable(self, server: str) -> None:
        """Raises NotFoundError, and ConfigurationError where its policy is broken."""
        self._wiring.settings.server(server).policy  # noqa: B018  raises what is wrong with it

    def _queue(
        self, kind: JobKind, server: str, arguments: dict[str, Any], action: AuditedAction | None = None
    ) -> JobRecord:
        """``action``: the audited action whose subject the job is."""
        from backupd.app.jobs.jobs import queued

        job = queued(self._wiring, kind, server, by=self._actor.name, arguments=arguments)
        self._wiring.catalog.jobs.enqueue(job)
        if action is not None:
            action.subject = job.id
        return job

    def _copying(self, server: str, destination: str) -> JobRecord:
        waiting = self._wiring.catalog.jobs.list(server, kind=JobKind.REPLICATE, state=JobState.QUEUED)
        found = next((job for job in waiting if job.arguments.get("destination") == destination), None)
        return found or self._queue(JobKind.REPLICATE, server, {"destination": destination})

"""What follows from a command's own jobs where no service is there to do it: the rules of a server after its backup,
and sweeps.

They are queued by the end of each job, as ever, and taken from the queue as a worker takes them: by one process only,
and not before a pause or what runs lets them start. The rules wait for jobs of the same server only, as the command's
own job did: where commands for many servers begin at once, the first to end would never find a slot for its rules.
What is left there the service does, or the next command.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

from backupd.app.context.access import Facade
from backupd.app.context.wiring import Wiring, owner
from backupd.app.jobs.admission import Admission, obstacle
from backupd.app.service.dispatch import live, perform
from backupd.model.backup_record import HoldKind
from backupd.model.errors import BackupdError
from backupd.model.job import HOST, Bar, JobKind, JobRecord, silent


class FollowUps(Facade):
    """Jobs that nobody waits for, done by this process."""

    def run(self, servers: Collection[str]) -> Iterator[tuple[JobRecord, BackupdError]]:
        """Do the retention that waits for ``servers``, and the sweeps that wait, whoever queued them, unless a service
        of this host does. Gives those that went wrong. Raises CatalogError."""
        wiring = self._wiring
        while not _is_served(wiring) and (job := _claimed(wiring, servers)) is not None:
            try:
                live(wiring, job, partial(perform, wiring), silent)
            except BackupdError as error:
                yield job, error


def _is_served(wiring: Wiring) -> bool:
    return wiring.here.removeprefix(HOST) in wiring.catalog.hosts.served(wiring.clock())


def _claimed(wiring: Wiring, servers: Collection[str]) -> JobRecord | None:
    paused = {hold.server for hold in wiring.catalog.holds.all() if hold.kind is HoldKind.PAUSE}
    admission = Admission(wiring.settings, paused)

    def allowed(job: JobRecord, running: Sequence[JobRecord]) -> bool:
        if job.kind == JobKind.RETENTION and job.server in servers:
            return not obstacle(wiring.settings, paused, job, [one for one in running if one.server == job.server])
        return job.kind == JobKind.SWEEP and admission.allows(job, running)

    return wiring.catalog.jobs.claim(
        owner(),
        wiring.clock(),
        runs_on=wiring.here,
        allowed=allowed,
        bars=lambda _running: [Bar(but=(JobKind.RETENTION, JobKind.SWEEP))],
        inherits=False,
    )

"""Planning restores in the process that asks, thawing for them, and what unfinished ones left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backupd.app.context.access import Facade, require_known

if TYPE_CHECKING:
    from backupd.app.restores.request import RestoreRequest
    from backupd.app.restores.table_restore import Leftover
    from backupd.app.restores.thaw_for_restore import Thawed
    from backupd.model.job import JobRecord
    from backupd.model.thaw import Thawing
    from restore.planning.plan import Plan
    from restore.planning.table_plan import TablePlan


class Restores(Facade):
    """Restores of servers and of tables."""

    def plan(self, request: RestoreRequest) -> Plan:
        """What a restore of a whole server would do. Moves nothing."""
        from backupd.app.restores.whole_server import plan

        datadir = Path(request.datadir) if request.datadir else None
        return plan(self._wiring, request.server, request.target, datadir, options=request.options)

    def plan_tables(self, request: RestoreRequest) -> TablePlan:
        """What a restore of tables would do. Moves nothing."""
        from backupd.app.restores.table_restore import plan_tables

        return plan_tables(self._wiring, request.server, request.target, request.table_options)

    def thaw(
        self, server: str, target: str, *, tier: str | None = None, days: int | None = None, tables: Sequence[str] = ()
    ) -> Thawed:
        """Ask for what a restore to ``target`` (of ``tables`` only, where some are named) needs out of archives."""
        from backupd.app.restores.request import RestoreOptions
        from backupd.app.restores.thaw_for_restore import thaw_for

        options = RestoreOptions(thaw=tier or "", days=days or 0)
        with self._audited("thaw-requested", server=server, detail=target):
            return thaw_for(self._wiring, server, target, options, tables, self._actor.name)

    def thaws(self, server: str | None) -> Sequence[tuple[JobRecord, Thawing]]:
        """Every thaw that the catalog remembers, newest first; those that wait are looked at where it is time."""
        from backupd.app.restores.thaw_for_restore import thaws

        if server is not None:
            require_known(self._wiring, server)
        return [(job, thawing) for job, thawing in thaws(self._wiring, server) if self._actor.sees(job.server)]

    def raise_thaw(self, job_id: str, tier: str) -> tuple[JobRecord, Thawing]:
        """Ask for what has not come yet at a faster tier."""
        from backupd.app.restores.thaw_for_restore import raised

        with self._audited("thaw-raised", server=self._job(job_id).server, subject=job_id, detail=tier):
            return raised(self._wiring, job_id, tier)

    def leftovers(self, server: str, drop: str | None = None) -> tuple[Leftover, ...]:
        """What unfinished restores of tables left on a server; ``drop``: the id of one, or ``all``."""
        from backupd.app.restores.table_restore import leftovers

        if drop is None:
            return leftovers(self._wiring, server)
        with self._audited("leftovers-dropped", server=server, subject=drop):
            return leftovers(self._wiring, server, drop=drop)

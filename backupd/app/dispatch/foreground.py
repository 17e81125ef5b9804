"""Work that the process which was asked does itself, as a job of its own, while whoever asked waits and watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from backupd.app.context.audited_action import deed
from backupd.app.context.run import JobRun, Result
from backupd.app.context.scope import require_known, require_target
from backupd.app.context.wiring import Wiring
from backupd.app.copies.missing_copies import destinations_of
from backupd.app.copies.replication import Replicated
from backupd.app.dispatch.actions import of_proof, of_replication, of_verification, perform, replicate
from backupd.app.jobs.jobs import Asked, run_here
from backupd.app.restores.jobs import of_restore
from backupd.app.restores.table_restore import restore_tables
from backupd.app.restores.table_sources import TableWishes
from backupd.app.restores.test_restore import RANDOM, test_restore
from backupd.app.restores.whole_server import Wishes, restore
from backupd.app.retention import retention
from backupd.app.verify import verification
from backupd.model.access import Actor
from backupd.model.backup_record import BackupKind, BackupRecord
from backupd.model.job import JobKind, Report
from backupd.model.proof import Proof
from restore.cutover.cutover import Triggers
from restore.tables.outcome import TablesOutcome
from restore.tables.restore import Confirm
from restore.tables.row_difference import SAMPLE
from restore.whole.executor import RestoreOutcome

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

    def restore(
        self,
        server: str,
        target: str,
        datadir: Path,
        start: bool,
        report: Report,
        mode: str = "new-server",
        *,
        exclude: Sequence[str] = (),
        replay_with: str | None = None,
        thaw: str | None = None,
        accept_older: bool = False,
        accept_inexact: bool = False,
    ) -> RestoreOutcome:
        """``exclude``: GTIDs of transactions to leave out; ``replay_with``: ``applier`` or ``pipe``; ``thaw``: thaw
        what is archived at this tier, and wait for it; ``accept_older``, ``accept_inexact``: see ``Wishes``."""
        wishes = Wishes.of(exclude, replay_with, thaw, accept_older=accept_older, accept_inexact=accept_inexact)
        self._wiring.settings.server(server)
        require_target(self._wiring, server, target)
        return self._do(
            "restore-started",
            f"{target} into {datadir}",
            JobKind.RESTORE,
            server,
            lambda run: restore(self._wiring, server, target, datadir, start=start, mode=mode, run=run, wishes=wishes),
            report,
            of_restore,
            {"target": target, "datadir": str(datadir)},
        )

    def restore_tables(
        self,
        server: str,
        target: str,
        tables: Sequence[str],
        *,
        into: str | None = None,
        rename: str | None = None,
        sql: Path | None = None,
        confirm: str | None = None,
        compare: bool = False,
        ask: Confirm | None = None,
        triggers: str = "backup",
        exclude: Sequence[str] = (),
        source: str | None = None,
        thaw: str | None = None,
        keys: int = SAMPLE,
        accept_older: bool = False,
        accept_inexact: bool = False,
        report: Report,
    ) -> TablesOutcome:
        """``into``: the server that gets them; ``rename``: other names for them; ``sql``: a folder for SQL files
        instead; ``confirm``: the name of ``into`` where live tables are replaced, or ``ask`` is asked; ``source``:
        ``logical`` or ``physical``; ``keys``: the most that are told of each sort of rows that differ."""
        wishes = Wishes.of(exclude, None, thaw, accept_older=accept_older, accept_inexact=accept_inexact)
        wanted = TableWishes.of(tables, rename, wishes, source)
        for name in (server, *filter(None, [into])):
            self._wiring.settings.server(name)
        require_target(self._wiring, server, target)
        shown = f"{', '.join(tables)} of {target} into {into or sql}{', only to compare' if compare else ''}"
        return self._do(
            "restore-started",
            shown,
            JobKind.RESTORE,
            server,
            lambda run: restore_tables(
                self._wiring,
                server,
                target,
                wanted,
                into=into,
                sql=sql,
                confirm=confirm,
                compare=compare,
                ask=ask,
                triggers=Triggers(triggers),
                run=run,
                keys=keys,
            ),
            report,
            of_restore,
            {"target": target, "tables": list(tables), "into": into or str(sql)},
        )

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

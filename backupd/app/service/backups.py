"""What may be asked about stored backups and their binary logs, and done to them; and what the rules keep of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from backupd.app.context.access import Facade, seen
from backupd.app.runtime.clock_check import careful
from backupd.model.backup_record import EVERY_SERVER
from backupd.model.errors import BackupdError

if TYPE_CHECKING:
    from backupd.app.binlogs.search import Found, Query
    from backupd.app.binlogs.status import LogStatus
    from backupd.app.context.access import AuditedAction
    from backupd.app.restores import server_configuration as config
    from backupd.app.retention.deletion import Deleted
    from backupd.app.retention.holds import Held, Paused
    from backupd.app.retention.rules import Decisions
    from backupd.model.backup_record import BackupDetail, BackupRecord, Hold, HoldKind


class Backups(Facade):
    """Stored backups."""

    def list(self, server: str) -> Sequence[BackupRecord]:
        """Every backup of a server that the catalog knows, newest first, deleted ones (within their grace period) too.
        Raises NotFoundError."""
        return tuple(self.each(server))

    def each(self, server: str | None) -> Iterator[BackupRecord]:
        """The same, or those of all servers, while they are read from the catalog: a batch of them is in memory at a
        time. Raises NotFoundError."""
        from backupd.app.copies.protection import ProtectionOfBatches

        if server is not None:
            self._wiring.settings.server(server)
        protection = ProtectionOfBatches(self._wiring)
        batches = self._wiring.catalog.backups.batches(seen(self._actor, server), foreign=True)
        return chain.from_iterable(map(protection.of, batches))

    def show(self, backup_id: str) -> BackupDetail:
        """With what its manifest says, from the first copy that can be read. Raises NotFoundError."""
        from backupd.app.copies.protection import detail

        self._backup(backup_id)
        return detail(self._wiring, backup_id)

    def keep(self, backup_id: str, *, pinned: bool) -> tuple[str, ...]:
        """Gives the destinations where it could not be written, with why."""
        from backupd.app.retention import deletion

        with self._of_backup("backup-kept" if pinned else "backup-unkept", backup_id):
            return deletion.keep(self._wiring, backup_id, pinned=pinned)

    def delete(self, backup_id: str, *, now: bool = False, with_increments: bool = False) -> Deleted:
        """``held`` of the answer is empty when it is gone (or only marked, without ``now``)."""
        from backupd.app.metacopies.catalog_copies import after_job
        from backupd.app.retention import deletion

        how = [word for word, wanted in (("at once", now), ("with its increments", with_increments)) if wanted]
        with self._of_backup("backup-deleted", backup_id, detail=", ".join(how)):
            done = deletion.delete(self._wiring, backup_id, now=now, with_increments=with_increments)
            after_job(self._wiring)  # what destinations say of themselves may name it
            return done

    def undelete(self, backup_id: str) -> Sequence[str]:
        """Gives the ids that came back: what it builds on comes with it."""
        from backupd.app.metacopies.catalog_copies import after_job
        from backupd.app.retention import deletion

        with self._of_backup("backup-undeleted", backup_id):
            back = deletion.undelete(self._wiring, backup_id)
            after_job(self._wiring)
            return back

    def configuration(self, backup_id: str, out: Path | None) -> config.Contents:
        """What was kept of the server's host with a backup; written to ``out`` where that is given."""
        from backupd.app.restores import server_configuration as config

        self._backup(backup_id)
        return config.show(self._wiring, backup_id, out)

    def runbook(self, backup_id: str) -> str:
        """The text beside the backup, from the first copy where it is what was written."""
        from backupd.app.copies.protection import runbook

        self._backup(backup_id)
        return runbook(self._wiring, backup_id)

    def runbook_digest(self, backup_id: str) -> str:
        """SHA-256 of the runbook of a backup that was just taken, "" where no copy can be read by now."""
        from backupd.app.copies.protection import detail

        try:
            return detail(self._wiring, backup_id).runbook_sha256
        except BackupdError:
            return ""

    @contextmanager
    def _of_backup(self, action: str, backup_id: str, *, detail: str = "") -> Iterator[AuditedAction]:
        """What is done to a backup. Raises NotFoundError."""
        with self._audited(action, subject=backup_id, detail=detail) as audited:
            audited.concerns(self._backup(backup_id).server)
            yield audited


class Retention(Facade):
    """What the rules and holds keep."""

    def preview(self, server: str) -> tuple[Decisions, ...]:
        """What the rules say of every backup of the server, for each destination; changes nothing."""
        from backupd.app.retention.preview import preview

        self._see_server(server)
        return preview(self._wiring, server, now=careful(self._wiring.catalog, self._wiring.clock()))

    def holds(self) -> tuple[Hold, ...]:
        """Every hold and pause."""
        from backupd.app.retention import holds

        return tuple(
            one for one in holds.listed(self._wiring) if one.server == EVERY_SERVER or self._actor.sees(one.server)
        )

    def hold(self, server: str, reason: str) -> Held:
        """``server`` may be ``*`` here and below: every one."""
        from backupd.app.retention import holds

        with self._audited("hold-set", server=server, detail=reason):
            self._see_server(server)
            return holds.hold(self._wiring, server, reason, self._actor.name)

    def pause(self, server: str, reason: str, *, stop_running: bool = False) -> Paused:
        """Start no job of it; ``stop_running``: stop those that run, too, and empty its queue."""
        from backupd.app.retention import holds

        with self._audited("pause-set", server=server, detail=reason):
            self._see_server(server)
            return holds.pause(self._wiring, server, reason, self._actor.name, stop_running=stop_running)

    def release(self, server: str, kind: HoldKind) -> tuple[str, ...]:
        """Gives the destinations where a hold may still be written, with why."""
        from backupd.app.retention import holds

        with self._audited(f"{kind}-released", server=server):
            self._see_server(server)
            return holds.release(self._wiring, server, kind, self._actor.name)


class Binlogs(Facade):
    """Archived binary logs."""

    def status(self, server: str | None) -> tuple[LogStatus, ...]:
        """Of all servers that stream or ever did, without ``server``."""
        from backupd.app.binlogs.status import status

        return tuple(one for one in status(self._wiring, server, self._actor.servers) if self._actor.sees(one.server))

    def search(self, server: str, **query: Unpack[Query]) -> Iterator[Found]:
        """Transactions of archived binary logs, in log order."""
        from backupd.app.binlogs.search import search

        self._see_server(server)
        return search(self._wiring, server, **query)

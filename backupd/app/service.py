"""The whole application behind one door: what the command line (and later the REST interface) may ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backupd.app import deletion, verification
from backupd.app.backups import take_backup
from backupd.app.checkup import check
from backupd.app.jobs import run_here
from backupd.app.restores import plan, restore, test_restore
from backupd.app.settings import load_settings
from backupd.app.wiring import Wiring
from backupd.backup.finding import Finding
from backupd.catalog.session import open_catalog, upgrade
from backupd.model.backup import BackupKind, BackupRecord
from backupd.model.errors import BackupdError
from backupd.model.job import JobKind
from backupd.model.progress import Report
from backupd.model.proof import Proof
from backupd.transfer.manifestio import load_header, load_side_file
from restore.executor import RestoreOutcome
from restore.plan import Plan


@dataclass(frozen=True, slots=True)
class BackupDetail:
    """A backup's record with what its manifest adds: how many objects, for which keys."""

    record: BackupRecord
    objects: int
    recipients: Sequence[str]
    codec: str

    def as_json(self) -> dict[str, Any]:
        return {**self.record.as_json(), "objects": self.objects, "recipients": list(self.recipients),
                "codec": self.codec}


class Service:
    """Use as ``with Service.open(path) as service``. Every method raises errors of backupd.model.errors."""

    def __init__(self, wiring: Wiring, revision: str) -> None:
        self._wiring = wiring
        self._revision = revision

    @classmethod
    @contextmanager
    def open(cls, config_path: Path) -> Iterator[Service]:
        """Read the configuration and open the catalog. Raises ConfigurationError with every problem at once."""
        settings = load_settings(config_path)
        _before, revision = upgrade(settings.catalog)
        with open_catalog(settings.catalog) as catalog:
            yield cls(Wiring(settings, catalog), revision)

    def upgrade_catalog(self) -> str:
        """The revision the catalog's tables have now; opening the service brought them there."""
        return self._revision

    def check(self, server: str | None) -> list[Finding]:
        return check(self._wiring, server)

    def backup(self, server: str, kind: BackupKind, report: Report) -> BackupRecord:
        return run_here(self._wiring, JobKind(kind), server,
                        lambda run: take_backup(self._wiring, server, kind, run), report=report)

    def backups(self, server: str | None) -> list[BackupRecord]:
        """Every backup that the catalog knows, deleted ones (within their grace period) too."""
        if server is not None:
            self._wiring.settings.server(server)
        return list(self._wiring.catalog.backups.list(server))

    def show(self, backup_id: str) -> BackupDetail:
        record = self._wiring.catalog.backups.get(backup_id)
        errors: list[BackupdError] = []
        for copy in record.copies:
            try:
                header = load_header(self._wiring.destination(copy.destination), record.server, record.id)
            except BackupdError as error:
                errors.append(error)
                continue
            return BackupDetail(record, len(header.objects), header.recipients, header.codec)
        raise errors[0]

    def keep(self, backup_id: str, *, pinned: bool) -> None:
        deletion.keep(self._wiring, backup_id, pinned=pinned)

    def delete(self, backup_id: str, *, now: bool = False) -> list[str]:
        """Gives why the backup is still there after ``now``; empty when it is gone (or only marked, without)."""
        return deletion.delete(self._wiring, backup_id, now=now)

    def undelete(self, backup_id: str) -> None:
        deletion.undelete(self._wiring, backup_id)

    def plan(self, server: str, target: str, datadir: Path | None) -> Plan:
        return plan(self._wiring, server, target, datadir)

    def restore(self, server: str, target: str, datadir: Path, start: bool, report: Report,
                mode: str = "new-server") -> RestoreOutcome:
        return restore(self._wiring, server, target, datadir, start=start, mode=mode, report=report)

    def test_restore(self, server: str, target: str, report: Report) -> Proof:
        return test_restore(self._wiring, server, target, report)

    def verify(self, server: str | None, subset: float | None, report: Report) -> verification.VerifyOutcome:
        return verification.verify(self._wiring, server, subset, report)

    def fsck(self, *, repair: bool) -> verification.FsckOutcome:
        return verification.fsck(self._wiring, mend=repair)

    def runbook(self, backup_id: str) -> str:
        """The text beside the backup, from the first copy where it is what was written."""
        record = self._wiring.catalog.backups.get(backup_id)
        errors: list[BackupdError] = []
        for copy in record.copies:
            try:
                destination = self._wiring.destination(copy.destination)
                header = load_header(destination, record.server, record.id)
                return load_side_file(destination, header, header.runbook).decode()
            except BackupdError as error:
                errors.append(error)
        raise errors[0]


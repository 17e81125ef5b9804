"""What was hidden or overwritten at a destination with versions, found and brought back."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from backupd.app.context.trust import CatalogRecords
from backupd.app.context.wiring import Wiring
from backupd.model.document import Document, json_key
from backupd.model.errors import UsageError
from backupd.model.job import Report
from backupd.transfer.recover_versions import Found, Returned, bring_back, find
from storage.destination import Destination, as_versioned


@dataclass(frozen=True, slots=True)
class RecoveredVersions(Document):
    """``done`` is None where it was only looked."""

    destination: str
    found: Found = field(metadata=json_key(inline=True))
    done: Returned | None = None

    @property
    def ok(self) -> bool:
        """Is nothing lost, and did everything come back that was tried?"""
        return not self.found.lost and (self.done is None or not self.done.failed)


def preview(wiring: Wiring, name: str, since: datetime) -> RecoveredVersions:
    """What would come back: of what the catalog knows, what is as it knows it. Changes nothing."""
    if since > wiring.clock():
        raise UsageError(
            "--since is in the future", hint="give the time after which deletions and overwrites are to be undone"
        )
    return RecoveredVersions(name, find(wiring.destination(name), since, CatalogRecords(wiring.catalog, wiring.clock)))


def if_deleted(destination: Destination) -> str:
    """What else to do about a destination that seems to be empty."""
    if as_versioned(destination) is None:
        return ""
    return f" If somebody deleted it: `backupd recover-versions {destination.name} --since TIME` shows its versions"


def recover(wiring: Wiring, name: str, since: datetime, report: Report) -> RecoveredVersions:
    """Bring it back. Nothing of this installation removes anything meanwhile. What it knew of marks that are withdrawn
    is forgotten."""
    looked = preview(wiring, name, since)
    if looked.found.is_nothing:
        return looked
    with wiring.removing():
        done = bring_back(wiring.destination(name), looked.found, clock=wiring.clock, report=report)
        for owner in done.unmarked:
            wiring.catalog.marks.forget(name, owner)
    return RecoveredVersions(name, looked.found, done)

"""What a sweep tells: once when something keeps it from removing, once when that is over."""

from __future__ import annotations

from backupd.app.context.incidents import Incidents, Pair
from backupd.app.context.wiring import Wiring
from backupd.model.event import Event, Severity
from backupd.transfer.sweep.collection import Collected
from storage.contract.destination import Destination

LOCKED = Pair("removal-locked", "removal-unlocked")
BRAKED = Pair("removal-braked", "removal-released")
MISSING = Pair("manifests-missing", "manifests-found")

MISSING_HINT = (
    "no object is collected there until that is settled: mount or move back what is missing; `backupd "
    "verify` takes backups back from another destination, `backupd backups delete ID` forgets what is "
    "gone"
)


def tell(wiring: Wiring, destination: Destination, swept: Collected) -> None:
    """Record what ``swept`` says of locks, of the brake and of what is missing. Raises CatalogError."""
    name = destination.name
    if swept.locked:
        _broken(
            wiring,
            LOCKED,
            name,
            Severity.INFO,
            f"destination {name} does not let go of {swept.locked} files yet",
            swept.lock,
            "nothing is lost, and it is tried again with each removal; a lock ends by itself, missing rights do not",
        )
    elif not swept.skipped:
        _mended(wiring, LOCKED, name, f"destination {name} lets everything go that is due")
    if swept.braked:
        _broken(
            wiring,
            BRAKED,
            name,
            Severity.WARNING,
            f"too much would go at once at destination {name}",
            "\n".join(swept.braked),
            "look at what is marked and by whom: backupd backups; `backupd backups undelete ID` keeps one",
        )
    elif not swept.skipped:
        _mended(wiring, BRAKED, name, f"nothing at destination {name} waits for a word any more")

    if swept.missing:
        _broken(
            wiring,
            MISSING,
            name,
            Severity.ERROR,
            f"{len(swept.missing)} backups that the catalog expects at destination {name} are not there",
            ", ".join(f"{backup_id} of {server}" for server, backup_id in swept.missing),
            MISSING_HINT,
        )
    elif not swept.skipped:
        _mended(wiring, MISSING, name, f"destination {name} has every backup that the catalog expects there")


def _broken(wiring: Wiring, pair: Pair, place: str, severity: Severity, message: str, detail: str, hint: str) -> None:
    Incidents(wiring.catalog).broken(
        pair,
        Event(
            at=wiring.clock(),
            kind=pair.broken,
            severity=severity,
            subject=place,
            message=message,
            detail=detail,
            hint=hint,
        ),
    )


def _mended(wiring: Wiring, pair: Pair, place: str, message: str) -> None:
    Incidents(wiring.catalog).mended(
        pair, Event(at=wiring.clock(), kind=pair.mended, severity=Severity.INFO, subject=place, message=message)
    )

"""`backupd verify` and `backupd fsck`: what is stored, against what was written, and against the catalog."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from backupd.app.adopt import adopt_unknown
from backupd.app.deletion import forget_swept
from backupd.app.wiring import GRACE, Wiring, owner_is_alive, worker_count
from backupd.model.backup import BackupRecord, BackupState
from backupd.model.errors import NotFoundError
from backupd.model.manifest import Header
from backupd.model.progress import Report
from backupd.transfer.fsck import CatalogView, Finding, Invariant, ReadBody, examine, repair
from backupd.transfer.inventory import backup_ids, read
from backupd.transfer.manifestio import load_body
from backupd.transfer.remove import sweep
from backupd.transfer.scrub import Damage, Scrubbed, scrub
from storage import layout, objects
from storage.destination import Destination


@dataclass(frozen=True, slots=True)
class VerifyOutcome:
    """``backups`` that were looked at, ``objects`` and ``bytes`` re-read, and every damage found."""

    backups: tuple[str, ...]
    objects: int
    bytes: int
    damages: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.damages

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "backups": list(self.backups), "objects": self.objects, "bytes": self.bytes,
                "damages": [damage.as_json() for damage in self.damages]}


def verify(wiring: Wiring, server: str | None, subset: float | None, report: Report) -> VerifyOutcome:
    """Re-read the stored bytes of all backups (of ``server``) at every destination.

    ``subset``: share of the objects to read, 0 to 1; the share changes every day, so that as many days read all.
    Damaged objects are quarantined (the next backup stores their content afresh) and the copies that need them marked.
    """
    if server is not None:
        wiring.settings.server(server)
    seen: set[str] = set()
    results: list[Scrubbed] = []
    for destination in wiring.usable_destinations():
        headers, damages = _headers(destination, server)
        turns = max(1, round(1 / subset)) if subset else 1
        scrubbed = scrub(destination, headers, report=report, workers=worker_count(8), turns=turns,
                         turn=wiring.clock().toordinal() % turns)
        scrubbed = Scrubbed(scrubbed.objects, scrubbed.bytes, (*damages, *scrubbed.damages))
        names = {header.backup_id for header in headers} | {name for item in damages for name in item.backups}
        _record(wiring, destination, names, scrubbed, whole=turns == 1)
        seen |= names
        results.append(scrubbed)
    results += _missing(wiring, server, seen)
    return VerifyOutcome(tuple(sorted(seen)), sum(r.objects for r in results), sum(r.bytes for r in results),
                         tuple(damage for r in results for damage in r.damages))


def _headers(destination: Destination, server: str | None) -> tuple[list[Header], list[Damage]]:
    headers: list[Header] = []
    damages: list[Damage] = []
    for owner in backup_ids(destination, server):
        found = read(destination, *owner)
        if found is None:
            continue
        if isinstance(found.header, Header):
            headers.append(found.header)
        else:
            damages.append(Damage(destination.name, layout.manifest_key(*owner), found.header.detail, (owner[1],)))
    return headers, damages


def _missing(wiring: Wiring, server: str | None, seen: set[str]) -> list[Scrubbed]:
    """Backups that the catalog knows and whose manifest is at none of the destinations it names."""
    damages = [
        Damage(copy.destination, layout.manifest_key(record.server, record.id), "missing", (record.id,))
        for record in wiring.catalog.backups.list(server) if record.id not in seen
        for copy in record.copies
    ]
    for damage in damages:
        _mark_damaged(wiring, damage.backups[0], damage.destination)
    return [Scrubbed(0, 0, tuple(damages))]


def _record(wiring: Wiring, destination: Destination, names: Iterable[str], scrubbed: Scrubbed, *, whole: bool) -> None:
    hit = {name for damage in scrubbed.damages for name in damage.backups}
    for damage in scrubbed.damages:
        if damage.key.startswith(layout.OBJECTS):
            objects.quarantine(destination, layout.name_in(damage.key), damage.problem, wiring.clock())
    for name in names:
        if name in hit:
            _mark_damaged(wiring, name, destination.name)
        elif whole:
            _mark_verified(wiring, name, destination.name)


def _mark_damaged(wiring: Wiring, backup_id: str, destination: str) -> None:
    try:
        wiring.catalog.backups.mark_copy_damaged(backup_id, destination)
        record = wiring.catalog.backups.get(backup_id)
    except NotFoundError:
        return  # a backup that the catalog does not know yet: fsck says so
    if record.state is BackupState.COMPLETE and all(copy.state == "damaged" for copy in record.copies):
        wiring.catalog.backups.set_state(backup_id, BackupState.DAMAGED)


def _mark_verified(wiring: Wiring, backup_id: str, destination: str) -> None:
    try:
        wiring.catalog.backups.mark_copy_verified(backup_id, destination, wiring.clock())
        if wiring.catalog.backups.get(backup_id).state is BackupState.DAMAGED:
            wiring.catalog.backups.set_state(backup_id, BackupState.COMPLETE)
    except NotFoundError:
        return  # as above


@dataclass(frozen=True, slots=True)
class FsckOutcome:
    """Broken invariants, each with the destination it was found at (empty: the catalog itself), and what was mended."""

    findings: tuple[tuple[str, Finding], ...]
    repaired: tuple[tuple[str, Finding], ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "findings": [_shown(*item) for item in self.findings],
                "repaired": [_shown(*item) for item in self.repaired]}


def _shown(destination: str, finding: Finding) -> dict[str, Any]:
    return {"destination": destination, "invariant": str(finding.invariant), "subject": finding.subject,
            "message": finding.message, "repairable": finding.repairable}


def fsck(wiring: Wiring, *, mend: bool) -> FsckOutcome:
    """Do catalog, manifests, objects and intents agree, at every destination? ``mend`` repairs what can be."""
    found: list[tuple[str, Finding]] = []
    repaired: list[tuple[str, Finding]] = []
    if mend:
        wiring.catalog.jobs.abandon_dead(owner_is_alive, wiring.clock())
    for name in wiring.catalog.integrity():
        found.append(("", Finding(Invariant.CATALOG_INTACT, wiring.catalog.name, name, repairable=False)))
    for destination in wiring.usable_destinations():
        body = _body_reader(wiring, destination)
        if mend:
            before = examine(destination, _views(wiring, destination), clock=wiring.clock, read_body=body)
            swept = sweep(destination, clock=wiring.clock, grace=GRACE)
            forget_swept(wiring, destination, swept.backups)
            adopt_unknown(wiring, destination)
            after = repair(destination, _views(wiring, destination), clock=wiring.clock, read_body=body)
            left = {(item.invariant, item.subject) for item in after.left}
            repaired += [(destination.name, item) for item in before if (item.invariant, item.subject) not in left]
            found += [(destination.name, item) for item in after.left]
        else:
            found += [(destination.name, item) for item in examine(
                destination, _views(wiring, destination), clock=wiring.clock, read_body=body)]
    found += _unreachable(wiring)
    return FsckOutcome(tuple(found), tuple(repaired))


def _views(wiring: Wiring, destination: Destination) -> list[CatalogView]:
    return [CatalogView(record.server, record.id) for record in wiring.catalog.backups.list()
            if any(copy.destination == destination.name for copy in record.copies)]


def _body_reader(wiring: Wiring, destination: Destination) -> ReadBody | None:
    if wiring.settings.restore is None:
        return None
    unsealer = wiring.unsealer()
    return lambda header: load_body(destination, header, unsealer)


def _unreachable(wiring: Wiring) -> list[tuple[str, Finding]]:
    """Copies that the catalog expects at destinations that are not there."""
    usable = {destination.name for destination in wiring.usable_destinations()}
    records: tuple[BackupRecord, ...] = wiring.catalog.backups.list()
    return [
        (copy.destination, Finding(Invariant.BACKUP_HAS_MANIFEST, record.id,
                                   f"the catalog expects this backup of {record.server} at destination "
                                   f"{copy.destination}, which is not configured, not mounted or no repository",
                                   repairable=False))
        for record in records for copy in record.copies if copy.destination not in usable
    ]

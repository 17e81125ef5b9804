"""`backupd verify` and `backupd fsck`: what is stored, against what was written, and against the catalog."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from backupd.app.adopt import adopt_unknown
from backupd.app.deletion import sweep_destination
from backupd.app.jobs import abandon_dead
from backupd.app.logcheck import examine_logs, repair_logs, verify_logs
from backupd.app.wiring import Wiring, worker_count
from backupd.model.backup import BackupRecord, BackupState
from backupd.model.errors import DestinationError, NotFoundError
from backupd.model.manifest import Header
from backupd.model.progress import Report
from backupd.transfer.fsck import CatalogView, Finding, Invariant, ReadBody, examine, repair
from backupd.transfer.inventory import backup_ids, read
from backupd.transfer.manifestio import load_body
from backupd.transfer.remove import marks
from backupd.transfer.scrub import Damage, Scrubbed, scrub
from storage import layout, objects
from storage.destination import Destination


@dataclass(frozen=True, slots=True)
class VerifyOutcome:
    """``backups`` that were looked at, ``objects`` and ``bytes`` re-read, and every damage found; ``binlogs``: copies
    of archived binary logs that were looked at."""

    backups: tuple[str, ...]
    objects: int
    bytes: int
    damages: tuple[Damage, ...]
    binlogs: int = 0

    @property
    def ok(self) -> bool:
        return not self.damages

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "backups": list(self.backups), "binlogs": self.binlogs, "objects": self.objects,
                "bytes": self.bytes, "damages": [damage.as_json() for damage in self.damages]}


def verify(wiring: Wiring, server: str | None, subset: float | None, report: Report) -> VerifyOutcome:
    """Re-read the stored bytes of all backups and binary logs (of ``server``) at every destination.

    ``subset``: share of the objects to read, 0 to 1; the share changes every day, so that as many days read all.
    Damaged objects are quarantined (the next backup stores their content afresh) and the copies that need them marked.
    """
    if server is not None:
        wiring.settings.server(server)
    seen: set[str] = set()
    results: list[Scrubbed] = []
    binlogs = 0
    usable = wiring.usable_destinations()
    for destination in usable:
        headers, damages = _headers(destination, server)
        turns = max(1, round(1 / subset)) if subset else 1
        turn = wiring.clock().toordinal() % turns
        scrubbed = scrub(destination, headers, report=report, workers=worker_count(8), turns=turns, turn=turn)
        names = {header.backup_id for header in headers} | {name for item in damages for name in item.backups}
        found = _still_there(destination, (*damages, *scrubbed.damages, *_missing(wiring, destination, server, names)))
        found = _record(wiring, destination, names, found, whole=turns == 1)
        if turns == 1:
            _release(destination, headers, found)
        seen |= names
        results.append(Scrubbed(scrubbed.objects, scrubbed.bytes, found))
        logs, count = verify_logs(wiring, destination, server, report=report, workers=worker_count(8), turns=turns,
                                  turn=turn)
        results.append(logs)
        binlogs += count
    results.append(Scrubbed(0, 0, _out_of_reach(wiring, server, {destination.name for destination in usable})))
    return VerifyOutcome(tuple(sorted(seen)), sum(r.objects for r in results), sum(r.bytes for r in results),
                         tuple(damage for r in results for damage in r.damages), binlogs)


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


def _missing(wiring: Wiring, destination: Destination, server: str | None, seen: set[str]) -> list[Damage]:
    """Backups that the catalog expects at ``destination`` and whose manifest is not there."""
    return [
        Damage(destination.name, layout.manifest_key(record.server, record.id), "missing", (record.id,))
        for record in wiring.catalog.backups.list(server)
        if record.state is not BackupState.DELETED and record.id not in seen
        and any(copy.destination == destination.name and copy.state != "deleted" for copy in record.copies)
    ]


def _out_of_reach(wiring: Wiring, server: str | None, usable: set[str]) -> tuple[Damage, ...]:
    """Destinations that could not be looked at. That says nothing about the backups there, so nothing is marked."""
    names: dict[str, list[str]] = {}
    for record in wiring.catalog.backups.list(server):
        for copy in record.copies:
            if (copy.destination not in usable and record.state is not BackupState.DELETED
                    and copy.state != "deleted"):
                names.setdefault(copy.destination, []).append(record.id)
    return tuple(
        Damage(name, "", "not mounted, not configured or no repository: nothing was read there, and nothing was marked",
               tuple(backups))
        for name, backups in sorted(names.items()))


def _still_there(destination: Destination, damages: Iterable[Damage]) -> tuple[Damage, ...]:
    """Without what belongs only to backups that were deleted while they were being read."""
    gone_now = {name for damage in damages for name in damage.backups}
    present = {backup_id for _server, backup_id in backup_ids(destination)}
    gone_now -= present
    return tuple(damage for damage in damages
                 if set(damage.backups) - gone_now or damage.key.endswith(f"/{layout.MANIFEST}"))


def _record(wiring: Wiring, destination: Destination, names: Iterable[str], damages: tuple[Damage, ...], *,
            whole: bool) -> tuple[Damage, ...]:
    """Mark the copies; put damaged objects into quarantine where the destination can still be written."""
    hit = {name for damage in damages for name in damage.backups}
    for name in {*names, *hit}:
        if name in hit:
            _mark_damaged(wiring, name, destination.name)
        elif whole:
            _mark_verified(wiring, name, destination.name)
    told = []
    for damage in damages:
        if damage.key.startswith(layout.OBJECTS):
            try:
                objects.quarantine(destination, layout.name_in(damage.key), damage.problem, wiring.clock())
            except DestinationError as error:
                damage = replace(damage, problem=f"{damage.problem}; not put into quarantine: {error.message}")  # noqa: PLW2901  the same damage, told better
        told.append(damage)
    return tuple(told)


def _release(destination: Destination, headers: Iterable[Header], damages: Iterable[Damage]) -> None:
    """Objects that were read again and are good need no quarantine."""
    bad = {layout.name_in(damage.key) for damage in damages if damage.key}
    read_now = {item.name for header in headers for item in header.objects}
    for name in objects.quarantined(destination) & read_now - bad:
        # On a destination that cannot be written the note stays; it costs room, and must not hide what was found.
        with contextlib.suppress(DestinationError):
            objects.release(destination, name)


def _mark_damaged(wiring: Wiring, backup_id: str, destination: str) -> None:
    try:
        wiring.catalog.backups.mark_copy_damaged(backup_id, destination)
        record = wiring.catalog.backups.get(backup_id)
    except NotFoundError:
        return  # a backup that the catalog does not know yet: fsck says so
    if record.state is BackupState.COMPLETE and all(copy.state != "complete" for copy in record.copies):
        wiring.catalog.backups.set_state(backup_id, BackupState.DAMAGED)


def _mark_verified(wiring: Wiring, backup_id: str, destination: str) -> None:
    try:
        wiring.catalog.backups.mark_copy_verified(backup_id, destination, wiring.clock())
        record = wiring.catalog.backups.get(backup_id)
        if record.state is BackupState.DAMAGED and any(copy.state == "complete" for copy in record.copies):
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
        abandon_dead(wiring)
    for name in wiring.catalog.integrity():
        found.append(("", Finding(Invariant.CATALOG_INTACT, wiring.catalog.name, name, repairable=False)))
    for destination in wiring.usable_destinations():
        body = _body_reader(wiring, destination)
        if mend:
            before = [*examine(destination, _views(wiring, destination), clock=wiring.clock, read_body=body),
                      *_marks(wiring, destination)]
            before += examine_logs(wiring, destination)
            adopt_unknown(wiring, destination)
            repair_logs(wiring, destination)
            sweep_destination(wiring, destination)
            after = repair(destination, _views(wiring, destination), clock=wiring.clock, read_body=body)
            remaining = [*after.left, *examine_logs(wiring, destination)]
            left = {(item.invariant, item.subject) for item in remaining}
            repaired += [(destination.name, item) for item in before if (item.invariant, item.subject) not in left]
            found += [(destination.name, item) for item in remaining]
        else:
            found += [(destination.name, item) for item in (
                *examine(destination, _views(wiring, destination), clock=wiring.clock, read_body=body),
                *_marks(wiring, destination), *examine_logs(wiring, destination))]
    found += _unreachable(wiring)
    return FsckOutcome(tuple(found), tuple(repaired))


def _marks(wiring: Wiring, destination: Destination) -> list[Finding]:
    """Backups that are marked deleted here while the catalog offers them: a process died, or the catalog is older."""
    marked = {backup_id for _server, backup_id in marks(destination)}
    return [Finding(Invariant.MARK_MATCHES_CATALOG, record.id,
                    f"it is marked deleted here, and {copy.state} in the catalog; `backupd backups undelete "
                    f"{record.id}` keeps it, --repair believes the mark", repairable=True)
            for record in wiring.catalog.backups.list()
            if record.id in marked and record.state is not BackupState.DELETED
            for copy in record.copies if copy.destination == destination.name and copy.state != "deleted"]


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
    binlogs = wiring.catalog.binlogs
    logs = [(server, name) for server in binlogs.servers()
            for name in sorted({run.destination for run in binlogs.runs(server)} - usable)]
    gone = "which is not configured, not mounted or no repository"
    return [
        *((name, Finding(Invariant.SEGMENT_IS_STORED, server, f"the catalog expects binary logs of {server} at "
                         f"destination {name}, {gone}", repairable=False)) for server, name in logs),
        *((copy.destination, Finding(Invariant.BACKUP_HAS_MANIFEST, record.id,
                                     f"the catalog expects this backup of {record.server} at destination "
                                     f"{copy.destination}, {gone}", repairable=False))
          for record in records for copy in record.copies if copy.destination not in usable),
    ]

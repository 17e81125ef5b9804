"""`backupd verify` and `backupd fsck`: what is stored, against what was written, and against the catalog."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from backupd.app.backup_records import STRANGE_HINT, adopt_unknown
from backupd.app.context.wiring import Wiring, gathered
from backupd.app.jobs.jobs import abandon_dead
from backupd.app.metacopies.catalog_copies import read_copies
from backupd.app.metacopies.recover_document import mend_marker, noted_marker, texts_problems
from backupd.app.retention.deletion import believed, expected_at, forget_swept, sweep_destination
from backupd.app.verify.missing_tables import IncompleteBackup, look_back
from backupd.app.verify.scrubbing import Read, Rotation, examine_logs, repair_logs, scrub_server
from backupd.model.backup_record import BackupState
from backupd.model.document import Document, computed
from backupd.model.job import Report
from backupd.recovery.chains import strangers
from backupd.transfer.deletion import marks
from backupd.transfer.fsck import Finding, Invariant, ReadBody, examine, repair
from backupd.transfer.holds_and_locks import Backup
from backupd.transfer.records.manifests import backup_ids, load_body
from backupd.transfer.scrub_and_repair import Damage
from storage import layout
from storage.destination import Destination, exists


@dataclass(frozen=True, slots=True)
class VerifyOutcome(Document):
    """``backups`` that were looked at, ``objects`` and ``bytes`` re-read, and every damage found; ``binlogs``: copies
    of archived binary logs that were looked at; ``cold``: files in archive classes, of which only the destination's
    own checksum was compared; ``unseen``: those of them that have none; ``samples``: what of them is thawed to be read;
    ``lacking``: backups without tables that the server had; ``unbound``: those of a format in which nothing shows
    whether their clear manifest was changed."""

    backups: tuple[str, ...]
    binlogs: int = field(default=0, kw_only=True)
    objects: int
    bytes: int
    damages: tuple[Damage, ...]
    cold: int = 0
    unseen: int = 0
    samples: tuple[str, ...] = ()
    lacking: tuple[IncompleteBackup, ...] = ()
    unbound: tuple[str, ...] = ()

    @property
    @computed(after="")
    def ok(self) -> bool:
        """Is nothing damaged that could not be put right, and does no backup lack tables?"""
        return all(damage.repaired_from for damage in self.damages) and not self.lacking


def together(outcomes: Iterable[VerifyOutcome]) -> VerifyOutcome:
    """Of several servers, as one."""
    whole = VerifyOutcome((), 0, 0, ())
    for one in outcomes:
        whole = VerifyOutcome(
            **{each.name: getattr(whole, each.name) + getattr(one, each.name) for each in fields(one)}
        )
    return whole


def verify(
    wiring: Wiring, server: str | None, subset: float | None, report: Report, *, period: timedelta | None = None
) -> VerifyOutcome:
    """Re-read the stored bytes of all backups and binary logs (of ``server``) at every destination.

    ``subset``: share of the objects to read, 0 to 1, the ones that were not read for longest; ``period``: as many as it
    takes to read all of them within this time. Without both, everything, with the copies of catalog, configuration and
    proofs. Damage is put right from another destination's
    copy; where there is none, damaged objects are quarantined (the next backup stores their content afresh) and the
    copies that need them marked.
    """
    if server is not None:
        wiring.settings.server(server)
    rotation = Rotation(subset, period)
    usable = wiring.usable_destinations()
    results: list[Read] = []
    for destination in usable:
        for owner in [server] if server is not None else _servers(wiring, destination):
            results.append(scrub_server(wiring, destination, owner, rotation, report))
    copies = read_copies(wiring, server, whole=rotation.is_whole)
    copies = (*copies, *_markers(wiring, usable))
    gone = _out_of_reach(wiring, server, {destination.name for destination in usable})
    names = {name for one in results for name in one.backups}
    return VerifyOutcome(
        tuple(sorted(names)),
        sum(one.objects for one in results),
        sum(one.bytes for one in results),
        (*(damage for one in results for damage in one.damages), *copies, *gone),
        sum(one.cold for one in results),
        sum(one.unseen for one in results),
        tuple(one.sample for one in results if one.sample),
        look_back(wiring, server),
        tuple(sorted({name for one in results for name in one.unbound})),
        binlogs=sum(one.binlogs for one in results),
    )


def _markers(wiring: Wiring, usable: Iterable[Destination]) -> tuple[Damage, ...]:
    """Markers of destinations that are not as they were written."""
    found = [(destination, texts_problems(wiring, destination).get(layout.REPOSITORY, "")) for destination in usable]
    return tuple(
        Damage(destination.name, layout.REPOSITORY, why, trouble="`backupd fsck --repair` puts it back")
        for destination, why in found
        if why
    )


def _texts(wiring: Wiring, destination: Destination) -> list[Finding]:
    """What is wrong at the top of a destination."""
    known = bool(noted_marker(wiring, destination.name))
    return [
        Finding(
            Invariant.MARKER_INTACT if key == layout.REPOSITORY else Invariant.RECOVER_CURRENT,
            key,
            why,
            repairable=key == layout.RECOVER or known,
        )
        for key, why in sorted(texts_problems(wiring, destination).items())
    ]


def _servers(wiring: Wiring, destination: Destination) -> list[str]:
    """Of whom something is there, or should be."""
    found = {owner for owner, _id in backup_ids(destination)} | set(wiring.catalog.binlogs.servers())
    return sorted(found | wiring.catalog.inventory.servers(destination.name))


def _out_of_reach(wiring: Wiring, server: str | None, usable: set[str]) -> tuple[Damage, ...]:
    """Destinations that could not be looked at. That says nothing about the backups there, so nothing is marked."""
    backups = wiring.catalog.backups
    names = gathered(
        (copy.destination, record.id)
        for record in (backups.every(foreign=True) if server is None else backups.list(server, foreign=True))
        for copy in record.copies
        if copy.destination not in usable and record.state is not BackupState.DELETED and copy.state != "deleted"
    )
    why = _why_out_of_reach(wiring, names)
    return tuple(
        Damage(name, "", f"nothing was read there, and nothing was marked: {why[name]}", tuple(ids))
        for name, ids in sorted(names.items())
    )


def _why_out_of_reach(wiring: Wiring, names: Iterable[str]) -> dict[str, str]:
    """In the destination's own words, where it has any, and with what to do next."""
    silent = wiring.unreachable()
    found = {}
    for name in names:
        if name in silent:
            error = silent[name]
            found[name] = " ".join(": ".join(filter(None, (error.message, error.detail, error.hint))).split())
        elif name in wiring.settings.destinations:
            marker = noted_marker(wiring, name)
            found[name] = "its folder is empty or no repository: is its file system mounted?" + (
                f" Where only {layout.REPOSITORY} is gone, put it back: {marker}" if marker else ""
            )
        else:
            found[name] = (
                "it is no longer configured: add it again; `backupd backups delete ID` removes a copy from the catalog"
            )
    return found


@dataclass(frozen=True, slots=True)
class FsckOutcome:
    """Broken invariants, each with the destination it was found at (empty: the catalog itself), and what was mended."""

    findings: tuple[tuple[str, Finding], ...]
    repaired: tuple[tuple[str, Finding], ...]

    @property
    def ok(self) -> bool:
        """Is nothing broken any more?"""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """The document of `backupd fsck --json`."""
        return {
            "ok": self.ok,
            "findings": [{"destination": name, **finding.as_json()} for name, finding in self.findings],
            "repaired": [{"destination": name, **finding.as_json()} for name, finding in self.repaired],
        }


def fsck(wiring: Wiring, *, mend: bool) -> FsckOutcome:
    """Do catalog, manifests, objects and intents agree, at every destination? ``mend`` repairs what can be."""
    found: list[tuple[str, Finding]] = []
    repaired: list[tuple[str, Finding]] = []
    if mend:
        abandon_dead(wiring)
    for name in wiring.catalog.integrity():
        found.append(("", Finding(Invariant.CATALOG_INTACT, wiring.catalog.name, name, repairable=False)))
    found += [
        ("", Finding(Invariant.ONE_SERVER_OF_A_NAME, name, f"{one.words(name)}; {STRANGE_HINT}", repairable=False))
        for name in wiring.catalog.backups.servers()
        for one in strangers(wiring.catalog.backups.list(name, foreign=True))
        if not one.former and not one.apart
    ]
    for destination in wiring.usable_destinations():
        body = _body_reader(wiring, destination)
        if mend:
            before = _examined(wiring, destination, body)
            for item in before:
                if item.invariant is Invariant.MARKER_INTACT:
                    mend_marker(wiring, destination)
            adopt_unknown(wiring, destination)
            repair_logs(wiring, destination)
            sweep_destination(wiring, destination)
            _forget_gone(wiring, destination)
            after = repair(
                destination,
                _views(wiring, destination),
                clock=wiring.clock,
                read_body=body,
                dying=believed(wiring, destination)[1],
            )
            if any(item.invariant is Invariant.RECOVER_CURRENT for item in _texts(wiring, destination)):
                read_copies(wiring, None, whole=False)
            remaining = [*after.left, *_beside(wiring, destination)]
            left = {(item.invariant, item.subject) for item in remaining}
            repaired += [(destination.name, item) for item in before if (item.invariant, item.subject) not in left]
            found += [(destination.name, item) for item in remaining]
        else:
            found += [(destination.name, item) for item in _examined(wiring, destination, body)]
    found += _unreachable(wiring)
    return FsckOutcome(tuple(found), tuple(repaired))


def _examined(wiring: Wiring, destination: Destination, body: ReadBody | None) -> list[Finding]:
    found = examine(destination, _views(wiring, destination), clock=wiring.clock, read_body=body)
    return [*found, *_beside(wiring, destination)]


def _beside(wiring: Wiring, destination: Destination) -> list[Finding]:
    """What is wrong beside backups and their objects: marks, binary logs, and the texts at the top."""
    return [*_marks(wiring, destination), *examine_logs(wiring, destination), *_texts(wiring, destination)]


def _forget_gone(wiring: Wiring, destination: Destination) -> None:
    """Copies of which neither manifest nor body is there any more, so that nothing can be put right: where another
    destination has the backup, the row goes, and it can be copied anew. The last copy stays known, as damaged. Where
    more of a server is gone than is there nothing is forgotten: it may be out of sight, on something that is not
    mounted."""
    present = set(backup_ids(destination))
    known = expected_at(wiring, destination)(present, wiring.catalog.inventory.servers(destination.name))
    gone = Counter(server for server, _id in known.backups)
    there = Counter(server for server, _id in present)
    backups = wiring.catalog.backups
    absent = [one for one in backups.at(destination.name) if one.owner not in present]
    for record in backups.by_ids([one.id for one in absent if gone[one.server] <= there[one.server]]):
        states = {copy.destination: copy.state for copy in record.copies if copy.destination != destination.name}
        if str(BackupState.COMPLETE) in states.values() and not exists(
            destination, layout.body_key(record.server, record.id)
        ):
            forget_swept(wiring, destination, [record.id])


def _marks(wiring: Wiring, destination: Destination) -> list[Finding]:
    """Backups that are marked deleted here while the catalog offers them: a process died, or the catalog is older."""
    marked = [backup_id for _server, backup_id in marks(destination)]
    offered = wiring.catalog.backups.placed(destination.name, marked, offered=True)
    return [
        Finding(
            Invariant.MARK_MATCHES_CATALOG,
            one.id,
            f"it is marked deleted here, and {one.copy} in the catalog; `backupd backups undelete "
            f"{one.id}` keeps it, --repair marks it as deleted in the catalog, too",
            repairable=True,
        )
        for one in sorted(offered, key=lambda one: one.id, reverse=True)
        if one.state is not BackupState.DELETED
    ]


def _views(wiring: Wiring, destination: Destination) -> list[Backup]:
    """What the catalog expects there."""
    return [one.owner for one in wiring.catalog.backups.at(destination.name)]


def _body_reader(wiring: Wiring, destination: Destination) -> ReadBody | None:
    if wiring.settings.restore is None:
        return None
    unsealer = wiring.unsealer()
    return lambda header: load_body(destination, header, unsealer)


def _unreachable(wiring: Wiring) -> list[tuple[str, Finding]]:
    """Copies that the catalog expects at destinations that are not there."""
    usable = {destination.name for destination in wiring.usable_destinations()}
    binlogs = wiring.catalog.binlogs
    expected = [
        (name, Invariant.SEGMENT_IS_STORED, server, f"binary logs of {server}")
        for server in binlogs.servers()
        for name in sorted({run.destination for run in binlogs.runs(server)} - usable)
    ]
    expected += [
        (copy.destination, Invariant.BACKUP_HAS_MANIFEST, record.id, f"this backup of {record.server}")
        for record in wiring.catalog.backups.every(foreign=True)
        for copy in record.copies
        if copy.destination not in usable
    ]
    why = _why_out_of_reach(wiring, {name for name, *_rest in expected})
    return [
        (
            name,
            Finding(
                invariant,
                subject,
                f"the catalog expects {what} at destination {name}, which was not checked: {why[name]}",
                repairable=False,
            ),
        )
        for name, invariant, subject, what in expected
    ]

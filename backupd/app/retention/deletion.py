"""Deleting backups: marked first, gone after the grace period, and never the last one by accident.

The catalog's row changes before the mark is put and after it is taken away, so that a process that dies in between
leaves a backup that nobody offers but everybody can undelete, never one that is offered and swept. What builds on a
backup goes before it and comes back after it.

Marks at a destination are ordinary files and could say anything. What this installation knows of each (did it put the
mark, does a person here want it, since when is it seen here) is in the catalog, and counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import LOCKED, MISSING, OVER_LIMIT
from backupd.app.backup_records import adopt_unknown, soundness
from backupd.app.context.access import audit, service_actor
from backupd.app.context.destination_identity import require_single
from backupd.app.context.wiring import GRACE, Wiring
from backupd.app.retention.deletion_checks import destinations_of, ids_of, require_may_go
from backupd.app.retention.holds import kept_by_catalog, written
from backupd.catalog.backups import Placed
from backupd.catalog.row_mapping import EVER, Span
from backupd.model.backup_record import BackupRecord, BackupState, Sighting
from backupd.model.errors import CatalogError, NotFoundError, RefusedError
from backupd.model.event import Severity
from backupd.model.job import Report, silent
from backupd.recovery.chains import chain_of, dependants
from backupd.transfer.collection import Collected, Expected, HeldBack, Missing
from backupd.transfer.deletion import mark, mark_of, marked, marks, sweep, unmark
from backupd.transfer.deletion_limit import DAY
from backupd.transfer.holds_and_locks import Backup, Mark, Sightings, explaining, is_due, put_keep, remove_keep
from backupd.transfer.leases import await_sweeps
from backupd.transfer.records.manifests import backup_ids, read
from storage import layout
from storage.destination import Destination, exists

DELETED = str(BackupState.DELETED)
"""The state of a copy that is marked at its destination."""
_MANY = 16
"""More young backups than these are looked for by listing all, rather than one by one."""
_SHOWN = 10
"""Missing backups that are named of servers of which nothing is at the destination."""
_AT_ONCE = 500
"""Rows of such backups that are read at once while they are looked for."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """``held``: why something is still there that was to go at once; ``forgotten``: what is to be said of copies at
    destinations that are not configured any more, which nobody can touch from here; ``marked``: ids of the backups that
    are marked now, what builds on others before them."""

    held: tuple[str, ...] = ()
    forgotten: tuple[str, ...] = ()
    marked: tuple[str, ...] = ()


def delete(wiring: Wiring, backup_id: str, *, now: bool, with_increments: bool = False) -> Deleted:
    """Mark a backup deleted at every destination; ``now`` also removes it at once.

    ``with_increments``: and everything that builds on it. A backup whose manifest is nowhere any more is forgotten, and
    so is a copy whose destination is no longer configured.
    Raises NotFoundError, and RefusedError for a pinned or held backup, one that others build on, or the last
    restorable one of its server.
    """
    with wiring.removing():
        record = wiring.catalog.backups.get(backup_id)
        for destination in destinations_of(wiring, record):
            # A backup that the catalog does not know yet may build on it.
            adopt_unknown(wiring, destination, record.server)
        others = [other for other in wiring.catalog.backups.list(record.server, foreign=True) if other.id != backup_id]
        children = [
            other for other in dependants(backup_id, [record, *others]) if other.state is not BackupState.DELETED
        ]
        if children and not with_increments:
            raise RefusedError(
                f"backup {backup_id} is needed by {ids_of(children)}, which build on it",
                hint="--with-increments deletes those too, all or none",
            )
        victims = [*reversed(children), record]
        require_may_go(wiring, victims, [other for other in others if other not in children])
        held: list[str] = []
        forgotten: list[str] = []
        for victim in victims:
            forgotten += _forget_unconfigured(wiring, victim)
            _mark_everywhere(wiring, victim)
        if now:
            at_once = frozenset((victim.server, victim.id) for victim in victims)
            for destination in destinations_of(wiring, record):
                held += _remove(wiring, destination, at_once)
        known = {other.id for other in wiring.catalog.backups.list(record.server, foreign=True)}
        return Deleted(tuple(held), tuple(forgotten), tuple(victim.id for victim in victims if victim.id in known))


def remove_marked(wiring: Wiring, backup_ids: Sequence[str]) -> tuple[str, ...]:
    """Remove backups that ``delete`` has marked at once, without the grace period; one that came back since, or is gone
    by now, is left alone. Gives why something is still there."""
    with wiring.removing():
        records = wiring.catalog.backups.by_ids(backup_ids)
        at_once = frozenset((record.server, record.id) for record in records if _is_dead(record))
        names = dict.fromkeys(copy.destination for record in records for copy in record.copies if copy.state == DELETED)
        return tuple(
            reason
            for name in names
            if name in wiring.settings.destinations
            for reason in _remove(wiring, wiring.destination(name), at_once)
        )


def _forget_unconfigured(wiring: Wiring, record: BackupRecord) -> list[str]:
    """Forget the copies that ``destinations_of`` leaves out; gives what to say about them."""
    gone = [copy.destination for copy in record.copies if copy.destination not in wiring.settings.destinations]
    for name in gone:
        _forget_copy(wiring, name, record.id)
    if not record.copies:  # a process of an older version was killed between its last copy and its row
        wiring.catalog.backups.remove(record.id)
        wiring.catalog.witnesses.forget(record.id)
    return [
        f"{record.id}: its copy at {name} was removed from the catalog, since {name} is no longer configured; files "
        f"there stay, and the backup reappears when {name} is configured again"
        for name in gone
    ]


def _mark_everywhere(wiring: Wiring, record: BackupRecord) -> None:
    for destination in destinations_of(wiring, record):
        wiring.catalog.backups.set_copy_state(record.id, destination.name, DELETED)
    for destination in destinations_of(wiring, record):
        if not mark_copy(wiring, destination, record, "", confirmed=True):
            forget_swept(wiring, destination, [record.id])


def mark_copy(
    wiring: Wiring, destination: Destination, record: BackupRecord, reason: str, *, confirmed: bool = False
) -> bool:
    """Mark one copy deleted, in the catalog and then at its destination. ``confirmed``: a person wants it, so no limit
    holds it back. False where its manifest is not there: it may be out of sight, so only a person forgets it."""
    if read(destination, record.server, record.id) is None:
        return False
    wiring.catalog.backups.set_copy_state(record.id, destination.name, DELETED)
    owner = (record.server, record.id)
    before = mark_of(destination, *owner)
    take = partial(wiring.catalog.marks.take, destination.name, owner, wiring.clock(), confirmed=confirmed)
    take(stored=before.stored if before is not None else None)
    mark(destination, *owner, wiring.clock(), reason=reason)
    if (put := mark_of(destination, *owner)) is not None:
        # Hosts share no lock: one that listed the marks before this one was there may have forgotten that it is ours.
        take(stored=put.stored)
    return True


def _remove(wiring: Wiring, destination: Destination, at_once: frozenset[tuple[str, str]]) -> list[str]:
    """Sweep with backups that need not wait for their grace period; gives why some of them are still there."""
    swept = sweep_locked(wiring, destination, at_once=at_once)
    left = {name for _server, name in at_once} - set(swept.backups)
    return [one.why for one in swept.held_back if one.about & left] or (swept.held if left else [])


def sweep_destination(
    wiring: Wiring, destination: Destination, *, wait: bool = True, report: Report = silent
) -> list[str]:
    """Remove what is due and what dead runs left, and the rows of what is gone; gives what was held back, and why.
    With ``wait`` False it is left to the next one while somebody else removes."""
    with wiring.removing(wait=wait) as held:
        if not held:
            return []
        reconcile(wiring, destination)
        return sweep_locked(wiring, destination, report=report).held


def sweep_locked(
    wiring: Wiring,
    destination: Destination,
    *,
    at_once: frozenset[tuple[str, str]] = frozenset(),
    report: Report = silent,
) -> Collected:
    """One sweep by somebody who is ``removing`` already; rows of what is gone go with it. A destination that another
    name leads to, too, is left alone: that name may have other rules."""
    try:
        require_single(wiring, destination)
    except RefusedError as error:
        return Collected(held_back=[HeldBack(f"everything: {error.message}: {error.hint}")], skipped=True)
    swept = sweep(
        destination,
        clock=wiring.clock,
        grace=GRACE,
        sightings=sightings_at(wiring, destination),
        kept=lambda marked: kept_by_catalog(wiring, sorted({server for server, _id in marked})),
        at_once=at_once,
        limit=wiring.settings.deletion_limit,
        expected=expected_at(wiring, destination),
        gone=partial(_record_removed, wiring, destination, at_once),
        report=report,
    )
    report_sweep(wiring, destination, swept)
    return swept


def _record_removed(wiring: Wiring, destination: Destination, at_once: frozenset[Backup], backup: Backup) -> None:
    """What is gone for good is in the audit, whoever marked it, and its row goes."""
    waived = ", without its grace period" if backup in at_once else ""
    if not _is_recorded(wiring, destination.name, backup):
        _audit_removed(wiring, backup, f"at {destination.name}{waived}")
    forget_swept(wiring, destination, [backup[1]])


def _audit_removed(wiring: Wiring, backup: Backup, detail: str) -> None:
    server, name = backup
    audit(wiring, service_actor(), "backup-removed", server=server, subject=name, detail=detail)


def _is_recorded(wiring: Wiring, destination: str, backup: Backup) -> bool:
    """Has ``reconcile`` recorded this removal, which was interrupted then? Where the catalog does not answer, the log
    is to have it."""
    with suppress(CatalogError):
        known = wiring.catalog.backups.placed(destination, [backup[1]])
        return not known and _is_audited(wiring, destination, backup, EVER)
    return False


def _is_audited(wiring: Wiring, destination: str, backup: Backup, span: Span) -> bool:
    """Has the audit an entry within ``span`` about the removal of this copy?"""
    server, name = backup
    told = wiring.catalog.audit.list(action="backup-removed", server=server, subject=name, span=span)
    return any(_is_of(entry.detail, destination) for entry in told)


def _is_of(detail: str, destination: str) -> bool:
    """Does ``detail`` of a removal name this destination?"""
    return detail.partition(", ")[0].partition(": ")[0] == f"at {destination}"


def expected_at(wiring: Wiring, destination: Destination) -> Expected:
    """What the catalog says is there, whole or damaged, and not on its way out. Somebody else's mark that is not due
    does not put it on its way."""
    name, backups, now = destination.name, wiring.catalog.backups, wiring.clock()
    found, trusted = believed(wiring, destination)
    doubted = {one.owner for one in backups.placed(name, [backup_id for _server, backup_id in found - trusted])}
    doubted &= found

    def beyond(present: Collection[Backup], besides: Collection[str]) -> Missing:
        servers = {server for server, _id in (*present, *doubted)}.union(besides)
        absent = wiring.catalog.inventory.absent(name, present, servers)
        missing = {one.owner for one in _not_there(destination, absent.missing, now)}
        lost = doubted.difference(present, missing)
        others = _others_missing(wiring, destination, servers, absent.others, now)
        return Missing(len(missing) + len(lost) + others.count, others.backups.union(missing, lost))

    return beyond


def _not_there(destination: Destination, absent: Sequence[Placed], now: datetime) -> Iterator[Placed]:
    """Without those that have come meanwhile: the rows are younger than the list of what is present, so a backup that
    ended in between is looked for."""
    young = [one for one in absent if one.stored_at >= now - DAY]
    listed = set(backup_ids(destination)) if len(young) > _MANY else None
    for one in absent:
        if one.stored_at < now - DAY:
            yield one
        elif listed is None:
            if not exists(destination, layout.manifest_key(*one.owner)):
                yield one
        elif one.owner not in listed:
            yield one


def _others_missing(
    wiring: Wiring, destination: Destination, servers: Collection[str], count: int, now: datetime
) -> Missing:
    """``count`` copies are of servers of which nothing is there. Where all of them are young, they may have come
    meanwhile, and are looked for until one is missing: one is as bad as all, and the rest only counts."""
    if not count:
        return Missing()
    look = partial(wiring.catalog.inventory.others, destination.name, servers)
    if old := look(before=now - DAY, limit=_SHOWN):
        return Missing(count, frozenset(one.owner for one in old))
    looked, batch = 0, look(limit=_AT_ONCE)
    while batch:
        for one in batch:
            if not exists(destination, layout.manifest_key(*one.owner)):
                return Missing(max(count - looked, 1), frozenset({one.owner}))
            looked += 1
        batch = look(after=batch[-1].id, limit=_AT_ONCE)
    return Missing()


def reconcile(wiring: Wiring, destination: Destination, server: str | None = None) -> list[str]:
    """Make rows agree with ``destination``: the copy of what carries a mark is deleted, and a deleted copy whose
    manifest is gone is forgotten, with ``server`` only if it is one of that server's. Gives the ids changed. An older
    catalog, or a process that died, leaves such rows.

    A removal takes the body after the manifest and the mark last. So where the manifest is gone, and somebody else's
    mark that is not due is there, or none beside a body, nothing was removed: that copy is damaged, and expected."""
    marked, trusted = believed(wiring, destination)
    backups, name = wiring.catalog.backups, destination.name
    offered = backups.placed(name, [backup_id for _server, backup_id in marked], offered=True)
    changed = []
    for one in {one.id: one for one in (*offered, *backups.deleted_at(name, server))}.values():
        owner = one.owner
        if one.copy != DELETED and (owner in trusted or (owner in marked and read(destination, *owner) is not None)):
            backups.set_copy_state(one.id, name, DELETED)
            changed.append(one.id)
        elif one.is_deleted and read(destination, *owner) is None:
            if owner not in trusted and (owner in marked or exists(destination, layout.body_key(*owner))):
                backups.set_copy_state(one.id, name, str(BackupState.DAMAGED))
            else:
                # A process that died between the two has recorded it.
                if not _is_audited(wiring, name, owner, Span(one.stored_at)):
                    _audit_removed(
                        wiring,
                        owner,
                        f"at {name}: found gone, marked deleted: its removal ended before this was recorded, or was "
                        "another installation's",
                    )
                forget_swept(wiring, destination, [one.id])
            changed.append(one.id)
    return changed


def forget_swept(wiring: Wiring, destination: Destination, backups: Sequence[str]) -> None:
    """Take removed copies out of the catalog; a backup without any copy is forgotten."""
    for backup_id in backups:
        _forget_copy(wiring, destination.name, backup_id)


def _forget_copy(wiring: Wiring, destination: str, backup_id: str) -> None:
    """The witnesses of a backup go before its last copy: a process that dies in between leaves a row that the next look
    forgets. And after it, since other hosts may forget other copies at the same time."""

    def is_elsewhere() -> bool:
        try:
            return any(copy.destination != destination for copy in wiring.catalog.backups.get(backup_id).copies)
        except NotFoundError:
            return False

    if not is_elsewhere():
        wiring.catalog.witnesses.forget(backup_id)
    wiring.catalog.backups.remove_copy(backup_id, destination)
    if not is_elsewhere():
        wiring.catalog.witnesses.forget(backup_id)


def undelete(wiring: Wiring, backup_id: str) -> list[str]:
    """Take the marks away, whatever the catalog says, of the backup and of everything it builds on, wherever all of
    that is still there. Gives the ids that came back, what others build on first.

    Raises NotFoundError, RefusedError when nothing is marked, or when something it builds on is gone.
    """
    with wiring.removing():
        record = wiring.catalog.backups.get(backup_id)
        chain = chain_of(backup_id, wiring.catalog.backups.list(record.server, foreign=True))
        here = destinations_of(wiring, record)
        marked = {owner for destination in here for owner in marks(destination)}
        dead = [member for member in chain if (member.server, member.id) in marked or _is_dead(member)]
        if not dead:
            raise RefusedError(f"backup {backup_id} is not marked as deleted: it is {record.state}")
        whole = [
            destination
            for destination in here
            if all(read(destination, member.server, member.id) is not None for member in chain)
        ]
        if not whole:
            gone = "" if len(chain) == 1 else f", with {ids_of(chain[:-1])}, on which it builds"
            raise NotFoundError(
                f"no destination holds backup {backup_id} any more{gone}",
                hint="`backupd fsck` lists leftovers; `backupd backups` lists restorable backups",
            )
        for destination in whole:
            for member in chain:
                # Sweeps of this installation wait for our lock, and those of others are waited for, so the grace period
                # need not have time left.
                unmark(destination, member.server, member.id, now=wiring.clock(), grace=timedelta.max)
                wiring.catalog.marks.forget(destination.name, (member.server, member.id))
                state = soundness(destination, member.server, member.id)
                wiring.catalog.backups.set_copy_state(member.id, destination.name, state)
        return [member.id for member in dead]


def _is_dead(record: BackupRecord) -> bool:
    return record.state is BackupState.DELETED or any(copy.state == DELETED for copy in record.copies)


def keep(wiring: Wiring, backup_id: str, *, pinned: bool) -> tuple[str, ...]:
    """Keep a backup whatever rules say, or no longer; it is written at the destinations, too. Gives those where it
    could not be written, with why. Raises NotFoundError, RefusedError for a deleted one."""
    with wiring.removing():
        record = wiring.catalog.backups.get(backup_id)
        if pinned and record.state is BackupState.DELETED:
            raise RefusedError(
                f"backup {backup_id} is marked as deleted, so it cannot be kept",
                hint=f"first: backupd backups undelete {backup_id}",
            )
        wiring.catalog.backups.pin(backup_id, pinned=pinned)

        def write(destination: Destination) -> None:
            if pinned:
                put_keep(destination, record.server, record.id, wiring.clock())
                await_sweeps(destination, clock=wiring.clock)  # of another host, which has not seen it
            else:
                remove_keep(destination, record.server, record.id)

        return written(wiring, [copy.destination for copy in record.copies], write)


def sightings_at(wiring: Wiring, destination: Destination) -> Sightings:
    """Of every mark there is at ``destination``."""

    def look(found: Mapping[Backup, Mark]) -> Mapping[Backup, Sighting]:
        return wiring.catalog.marks.look(
            destination.name, {owner: note.stored for owner, note in found.items()}, wiring.clock()
        )

    return look


def own(wiring: Wiring, destination: Destination) -> dict[Backup, Mark]:
    """The marks that the rules, or somebody, of this installation put."""
    found = marked(destination)
    known = sightings_at(wiring, destination)(found)
    return {owner: note for owner, note in found.items() if known[owner].ours}


def believed(wiring: Wiring, destination: Destination) -> tuple[set[Backup], set[Backup]]:
    """The backups that are marked at ``destination``, and those of them whose mark explains that they are gone."""
    found = marked(destination)
    known = sightings_at(wiring, destination)(found)
    return set(found), explaining(found, known, wiring.clock(), GRACE)


def unconfirmed(wiring: Wiring, destination: Destination) -> dict[Backup, datetime]:
    """The marks that no person of this installation has confirmed, and the moment from which the deletion limit counts
    each."""
    found = marked(destination)
    known = sightings_at(wiring, destination)(found)
    return {owner: known[owner].since for owner in found if not known[owner].confirmed}


def confirm(wiring: Wiring, destination: Destination, server: str) -> None:
    """A person says that what is marked of ``server`` may go: what this installation marked, and somebody else's marks
    whose grace period is over, so that the deletion limit had time
    to report them. Younger ones are not meant."""
    found = marked(destination)
    known = sightings_at(wiring, destination)(found)
    now = wiring.clock()
    for owner, note in found.items():
        if (
            owner[0] == server
            and not known[owner].confirmed
            and (known[owner].ours or is_due(note, known[owner], now, GRACE))
        ):
            wiring.catalog.marks.take(destination.name, owner, now, stored=note.stored, confirmed=True)


MISSING_HINT = (
    "backupd removes no objects at this destination until the backups are present. Mount or move back the missing "
    "folder; to copy them from another destination: backupd verify; to remove a lost backup from the catalog: backupd "
    "backups delete ID"
)


def report_sweep(wiring: Wiring, destination: Destination, swept: Collected) -> None:
    """Record what ``swept`` says of locks, of the deletion limit and of what is missing. Raises CatalogError."""
    name = destination.name
    for kind, is_broken, severity, message, detail, hint, well in (
        (
            LOCKED,
            swept.locked,
            Severity.INFO,
            f"destination {name} refused to delete {swept.locked} files",
            swept.lock,
            "no data is lost; backupd retries at each removal. "
            + (swept.missing_rights or "Object locks expire; legal holds must be removed by whoever set them"),
            f"destination {name} deletes all due files again",
        ),
        (
            OVER_LIMIT,
            swept.over_limit,
            Severity.WARNING,
            f"mass-deletion limit reached at destination {name}",
            "\n".join(swept.over_limit),
            "review the marked backups: backupd backups; to keep one: backupd backups undelete ID",
            f"destination {name} is below the mass-deletion limit again",
        ),
        (
            MISSING,
            swept.missing,
            Severity.ERROR,
            f"{swept.missing.count} backups are missing at destination {name}, but the catalog lists them",
            swept.missing.names,
            MISSING_HINT,
            f"destination {name} has every backup that the catalog expects there",
        ),
    ):
        key = Key(kind, subject=name)
        if is_broken:
            wiring.settle(Condition(key, severity, message, detail, hint))
        elif not swept.skipped:
            wiring.settle(looked={key: well})

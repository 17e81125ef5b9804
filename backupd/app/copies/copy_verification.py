"""Copies that were read again where they lie.

A copy is *verified* when every byte of it was read at its destination. Of what we have just stored, of what lies in an
archive class, and at a place that audits itself, the place's own checksum has to do. What another backup there shares
and was verified for a few days ago is not read once more; the copy counts as verified since then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from backupd.app.context.wiring import Wiring, worker_count
from backupd.app.copies.repairs import mend
from backupd.model.backup_record import BackupRecord, BackupState, Copy
from backupd.model.errors import ArchivedError, CancelledError, NotFoundError
from backupd.model.job import Progress, Report
from backupd.model.manifest import Header, StoredObject
from backupd.transfer.dedup import missing
from backupd.transfer.records.manifests import backup_ids, read
from backupd.transfer.relay import Check, found_wrong
from backupd.transfer.scrub import Damage
from storage.contract import layout, objects
from storage.contract.destination import Destination

SHARED_FOR = timedelta(days=7)
"""For so long an object that was read for one backup need not be read again for another."""
_COMPLETE = str(BackupState.COMPLETE)
_DAMAGED = str(BackupState.DAMAGED)


@dataclass(frozen=True, slots=True)
class Examined:
    """``verified`` ids, stored ``bytes`` that were looked at, every damage found, and why some could not be read."""

    verified: tuple[str, ...] = ()
    bytes: int = 0
    damages: tuple[Damage, ...] = ()
    troubles: tuple[str, ...] = ()


def unverified(records: Iterable[BackupRecord], place: str) -> list[BackupRecord]:
    """Those with a whole copy at ``place`` that nobody has read again since it was stored, newest first."""
    return [
        record
        for record in records
        if record.state is BackupState.COMPLETE
        and any(
            copy.destination == place and copy.state == _COMPLETE and copy.verified_at is None for copy in record.copies
        )
    ]


def verify_copies(
    wiring: Wiring, destination: Destination, server: str, *, report: Report, check: Check, fresh: Collection[str] = ()
) -> Examined:
    """Look at every byte of the copies of ``server`` at ``destination`` that nobody has looked at. What is damaged is
    put right from another destination; where none has it, every copy that needs it is marked, and damaged objects put
    into quarantine there. ``fresh``: keys that we have just stored, of which the place's checksum tells enough. Raises
    DestinationError, CatalogError."""
    _reconsider(wiring, destination, server)
    records = wiring.catalog.backups.list(server)
    known = _lately(destination, records, wiring.clock() - SHARED_FOR)
    done = Examined()
    for record in unverified(records, destination.name):
        check()
        found = read(destination, server, record.id)
        if found is None:
            continue  # removed in this moment
        if not isinstance(found.header, Header):
            damages = mend(
                wiring,
                destination,
                server,
                (),
                [Damage(destination.name, layout.manifest_key(server, record.id), found.header.detail, (record.id,))],
            )
            done = replace(done, damages=(*done.damages, *damages))
            found = read(destination, server, record.id)
            if found is None or not isinstance(found.header, Header):
                wiring.catalog.backups.set_copy_state(record.id, destination.name, _DAMAGED)
                continue
        done = _one(wiring, destination, found.header, known, done, report, check, fresh)
    return done


def damaged(records: Iterable[BackupRecord], place: str) -> list[BackupRecord]:
    """Those with a copy at ``place`` that is not whole, or not there any more."""
    return [
        record
        for record in records
        if any(copy.destination == place and copy.state == _DAMAGED for copy in record.copies)
    ]


def _reconsider(wiring: Wiring, destination: Destination, server: str) -> None:
    """Copies that were found damaged and of which another destination has a whole one: what is known to be wrong with
    them is put right. Then they count as complete, and as not verified."""
    for record in damaged(wiring.catalog.backups.list(server), destination.name):
        if all(copy.destination == destination.name or copy.state != _COMPLETE for copy in record.copies):
            continue
        found = read(destination, server, record.id)
        if found is None:
            continue
        if not isinstance(found.header, Header):
            mend(
                wiring,
                destination,
                server,
                (),
                [Damage(destination.name, layout.manifest_key(server, record.id), found.header.detail, (record.id,))],
            )
            found = read(destination, server, record.id)
            if found is None or not isinstance(found.header, Header):
                continue
        header = found.header
        suspect = {*missing(destination, header.objects), *objects.quarantined(destination)}
        folder = layout.backup_folder(server, record.id)
        items = {folder + item.name: item for item in header.side_files}
        items |= {layout.object_key(item.name): item for item in header.objects if item.name in suspect}
        try:
            problems = {key: problem for key, item in items.items() if (problem := found_wrong(destination, key, item))}
            left = [one for one in _mended(wiring, destination, header, items, problems) if not one.repaired_from]
        except ArchivedError:
            continue
        if left:
            continue
        for item in header.objects:
            if item.name in suspect:
                objects.release(destination, item.name)
        copy = next(copy for copy in record.copies if copy.destination == destination.name)
        with contextlib.suppress(NotFoundError):  # deleted meanwhile
            wiring.catalog.backups.add_copy(record.id, Copy(copy.destination, _COMPLETE, copy.stored_at))


def _one(
    wiring: Wiring,
    destination: Destination,
    header: Header,
    known: dict[str, datetime],
    done: Examined,
    report: Report,
    check: Check,
    fresh: Collection[str],
) -> Examined:
    begun = wiring.clock()
    items = {layout.backup_folder(header.server, header.backup_id) + item.name: item for item in header.side_files}
    shared = [item for item in header.objects if item.name in known]
    items |= {layout.object_key(item.name): item for item in header.objects if item.name not in known}
    try:
        problems = _problems(destination, items, report, check, fresh)
        damages = _mended(wiring, destination, header, items, problems)
    except ArchivedError as error:
        return replace(done, troubles=(*done.troubles, f"{header.backup_id}: {error.message}"))
    done = replace(done, damages=(*done.damages, *damages))
    left = [damage for damage in damages if not damage.repaired_from]
    size = done.bytes + sum(item.size for item in items.values())
    try:
        if left:
            _mark_damaged(wiring, destination, header, {name for damage in left for name in damage.backups})
            _quarantine(wiring, destination, left)
            return replace(done, bytes=size)
        # No later than what was only believed for another backup's sake.
        since = min([begun, *(known[item.name] for item in shared)])
        wiring.catalog.backups.mark_copy_verified(header.backup_id, destination.name, since)
    except NotFoundError:
        return replace(done, bytes=size)  # deleted meanwhile
    known.update({item.name: begun for item in header.objects if item.name not in known})
    return replace(done, bytes=size, verified=(*done.verified, header.backup_id))


def _mark_damaged(wiring: Wiring, destination: Destination, header: Header, hit: Collection[str]) -> None:
    """The copies of the backup and of the others that are ``hit``, too. What is marked deleted stays so."""
    for record in wiring.catalog.backups.list(header.server, foreign=True):
        if record.id == header.backup_id or (
            record.id in hit
            and any(copy.destination == destination.name and copy.state == _COMPLETE for copy in record.copies)
        ):
            wiring.catalog.backups.set_copy_state(record.id, destination.name, _DAMAGED)


def _problems(
    destination: Destination, items: Mapping[str, StoredObject], report: Report, check: Check, fresh: Collection[str]
) -> dict[str, str]:
    total, lock = sum(item.size for item in items.values()), threading.Lock()
    seen = [0, 0]
    stop = threading.Event()

    def examine(one: tuple[str, StoredObject]) -> tuple[str, str]:
        check()
        if stop.is_set():
            raise CancelledError("stopped with the others")
        problem = found_wrong(destination, *one, fresh=one[0] in fresh)
        with lock:
            seen[0] += one[1].size
            seen[1] += 1
            told = Progress("verify", seen[0], total, seen[1], len(items), f"at {destination.name}")
        report(told)
        return one[0], problem

    with ThreadPoolExecutor(max_workers=worker_count(4), thread_name_prefix="verify") as pool:
        try:
            return {key: problem for key, problem in pool.map(examine, items.items()) if problem}
        finally:
            stop.set()  # for an interrupt of this thread, which would wait for all that is left


def _mended(
    wiring: Wiring,
    destination: Destination,
    header: Header,
    items: Mapping[str, StoredObject],
    problems: Mapping[str, str],
) -> tuple[Damage, ...]:
    """What is wrong, put right as far as another destination can; what is said to be right was looked at again."""
    if not problems:
        return ()
    seen = [read(destination, *owner) for owner in backup_ids(destination, header.server)]
    headers = [one.header for one in seen if one is not None and isinstance(one.header, Header)]
    users: dict[str, list[str]] = {key: [header.backup_id] for key in problems}
    for other in headers:
        for item in other.objects if other.backup_id != header.backup_id else ():
            if (key := layout.object_key(item.name)) in users:
                users[key].append(other.backup_id)
    damages = mend(
        wiring,
        destination,
        header.server,
        headers,
        [
            Damage(destination.name, key, problem, tuple(sorted(users[key])), stored=items[key])
            for key, problem in problems.items()
        ],
    )
    return tuple(
        replace(damage, repaired_from="", problem=problem)
        if damage.repaired_from and (problem := found_wrong(destination, damage.key, items[damage.key]))
        else damage
        for damage in damages
    )


def _quarantine(wiring: Wiring, destination: Destination, damages: Iterable[Damage]) -> None:
    for damage in damages:
        if damage.key.startswith(layout.OBJECTS):
            objects.quarantine(destination, layout.name_in(damage.key), damage.problem, wiring.clock())


def _lately(destination: Destination, records: Iterable[BackupRecord], since: datetime) -> dict[str, datetime]:
    """Objects that were read after ``since`` for another backup there, and when; of the newest few backups."""
    bad = objects.quarantined(destination)
    sizes = {}
    found: dict[str, datetime] = {}
    read_lately = [
        (record, copy.verified_at)
        for record in records
        for copy in record.copies
        if copy.destination == destination.name
        and copy.state == _COMPLETE
        and copy.verified_at is not None
        and copy.verified_at >= since
    ]
    for record, at in read_lately[:3]:
        seen = read(destination, record.server, record.id)
        for item in seen.header.objects if seen is not None and isinstance(seen.header, Header) else ():
            if item.name not in bad:
                found[item.name] = max(at, found.get(item.name, at))
                sizes[item.name] = item.size
    if not found:
        return {}
    there = {
        layout.name_in(info.key): info.size
        for info in destination.list(layout.OBJECTS)
        if layout.name_in(info.key) in found
    }
    return {name: at for name, at in found.items() if there.get(name) == sizes[name]}

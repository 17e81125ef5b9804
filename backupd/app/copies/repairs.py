"""Copies are read again where they are; damage that another destination's copy can put right is put right, and
reported.

A copy is *verified* when every byte of it was read at its destination. Of what we have just stored, of what is in an
archive class, and at a destination that audits itself, the destination's own checksum has to do. What another backup
there shares and was verified for a few days ago is not read once more; the copy counts as verified since then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial

from backupd.app.context.wiring import Wiring, worker_count
from backupd.model.backup_record import BackupRecord, BackupState, Copy
from backupd.model.binlog import SegmentKey
from backupd.model.errors import ArchivedError, BackupdError, CancelledError, NotFoundError
from backupd.model.event import Severity
from backupd.model.job import Progress, Report, silent
from backupd.model.manifest import Header, StoredObject
from backupd.model.text import new_id
from backupd.recovery.chains import chain_of
from backupd.transfer.copies import Order, replicate
from backupd.transfer.dedup import missing
from backupd.transfer.holds_and_locks import each, is_marked
from backupd.transfer.log_segments import keys
from backupd.transfer.records.manifests import backup_ids, read
from backupd.transfer.relay import Check, found_wrong
from backupd.transfer.scrub_and_repair import (
    Damage,
    inode_of,
    put_manifest_right,
    put_right,
    put_segment_right,
    show_again,
)
from storage import layout, objects
from storage.destination import Destination, as_archive, as_tree, exists

ROT = "rot-found"
REPAIRED = "rot-repaired"
_WORKERS = 4
"""Objects that are put right at once; each is in memory, 16 MiB at most as a rule."""


def mend(
    wiring: Wiring, destination: Destination, server: str, headers: Sequence[Header], damages: Sequence[Damage]
) -> tuple[Damage, ...]:
    """Put ``damages`` at ``destination``, all of ``server``, right from other destinations as far as they can; the same
    damages with what came of it, reported as events. ``headers``: the readable manifests of that server there."""
    if not damages:
        return ()
    sources = sorted(
        (other for other in wiring.usable_destinations() if other.name != destination.name),
        key=lambda other: as_archive(other) is not None,
    )
    found = _Mending(wiring, destination, server, sources).mend(headers, damages)
    _report(wiring, destination, server, found)
    return found


class _Mending:
    def __init__(self, wiring: Wiring, destination: Destination, server: str, sources: Sequence[Destination]) -> None:
        self._wiring, self._destination, self._server, self._sources = wiring, destination, server, sources

    def mend(self, headers: Sequence[Header], damages: Sequence[Damage]) -> tuple[Damage, ...]:
        tree = as_tree(self._destination)
        pooled = [damage for damage in damages if damage.key.startswith(layout.OBJECTS)]
        before = {
            inode: layout.name_in(damage.key)
            for damage in pooled
            if tree is not None and (inode := inode_of(tree, damage.key)) is not None
        }
        done = dict(zip((id(damage) for damage in pooled), each(self._one, pooled, workers=_WORKERS), strict=True))
        segments: dict[str, list[Damage]] = {}
        for damage in damages:
            if damage.key.startswith(layout.BINLOGS):
                segments.setdefault(damage.key.rpartition("/")[0], []).append(damage)
            elif id(damage) not in done:
                done[id(damage)] = self._one(damage)
        for group in segments.values():
            done |= {id(damage): found for damage, found in zip(group, self._segment(group), strict=True)}
        mended = {layout.name_in(one.key) for one in done.values() if one.repaired_from}
        if tree is not None and mended:
            for header in headers:
                if any(item.name in mended for item in header.objects):
                    show_again(tree, header, before)
        return tuple(done[id(damage)] for damage in damages)

    def _one(self, damage: Damage) -> Damage:
        try:
            return replace(damage, repaired_from=self._from(damage))
        except BackupdError as error:
            return replace(damage, trouble=error.line)

    def _from(self, damage: Damage) -> str:
        if damage.stored is not None:
            return put_right(self._destination, damage.key, damage.stored, self._sources)
        owner = layout.backup_of(damage.key)
        if owner is None or damage.key != layout.manifest_key(*owner):
            raise NotFoundError("no record shows what should be there")
        if exists(self._destination, damage.key):
            return put_manifest_right(self._destination, *owner, self._sources, clock=self._wiring.clock)
        return self._whole(owner[1])

    def _whole(self, backup_id: str) -> str:
        """A backup whose manifest is gone. When all else is gone, too, nothing of it is left to be mended."""
        wiring, target = self._wiring, self._destination
        if is_marked(target, self._server, backup_id):
            raise NotFoundError("it is marked deleted there")
        if not exists(target, layout.body_key(self._server, backup_id)):
            raise NotFoundError(
                "it is completely missing there, and no deletion is recorded",
                detail=f"`backupd replicate {self._server} --to {target.name}` copies it again where "
                "another destination has it, `backupd fsck --repair` forgets it",
            )
        chain = chain_of(backup_id, wiring.catalog.backups.list(self._server, foreign=True))
        order = Order(self._server, backup_id, new_id(wiring.clock()), tuple(member.id for member in chain[:-1]))
        holding = [one for one in self._sources if exists(one, layout.manifest_key(self._server, backup_id))]
        replicate(holding, target, order, clock=wiring.clock, report=silent, check=_go_on)
        return holding[0].name if holding else ""

    def _segment(self, damages: Sequence[Damage]) -> list[Damage]:
        found = layout.segment_of(damages[0].key)
        try:
            if found is None:
                raise NotFoundError("it is not a binary log")
            server, key, _name = found
            gone = not exists(self._destination, layout.segment_key(server, key))
            if gone and not any(other < key for other in self._stored_of(key.branch)):
                raise NotFoundError(
                    f"the binary log and all earlier ones of its branch are missing at {self._destination.name}",
                    detail="to drop them from the catalog: backupd fsck --repair",
                )
            source = put_segment_right(
                self._destination,
                server,
                key,
                [damage.key for damage in damages],
                self._sources,
                clock=self._wiring.clock,
                check=_go_on,
            )
            self._wiring.catalog.binlogs.mark_verified(server, [key], self._destination.name, self._wiring.clock())
        except BackupdError as error:
            return [replace(damage, trouble=error.line) for damage in damages]
        return [replace(damage, repaired_from=source) for damage in damages]

    def _stored_of(self, branch: str) -> Iterator[SegmentKey]:
        folder = layout.branch_folder(self._server, branch)
        return (key for _server, key in keys(self._destination, prefix=folder))


def _report(wiring: Wiring, destination: Destination, server: str, damages: Sequence[Damage]) -> None:
    mended = [damage for damage in damages if damage.repaired_from]
    left = [damage for damage in damages if not damage.repaired_from]
    if mended:
        names = ", ".join(sorted({damage.repaired_from for damage in mended}))
        wiring.note(
            REPAIRED,
            Severity.WARNING,
            f"{len(mended)} damaged files of {server} at destination {destination.name} were replaced by "
            f"those of {names}",
            server=server,
            subject=destination.name,
            detail="\n".join(map(str, mended)),
            hint=f"silent corruption indicates a failing disk: check the storage of {destination.name}",
        )
    if left:
        detail = "\n".join(f"{damage}: {damage.trouble}" for damage in left)
        last = wiring.catalog.events.last(server, (ROT,), destination.name)
        if last is None or last.detail != detail:
            wiring.note(
                ROT,
                Severity.ERROR,
                f"{len(left)} files of {server} at destination {destination.name} are damaged, "
                "and no other destination has them",
                server=server,
                subject=destination.name,
                detail=detail,
                hint=f"take a full backup now, it stores the data afresh: backupd backup {server} --kind full",
            )


def _go_on() -> None:
    """A repair is not stopped half way."""


SHARED_FOR = timedelta(days=7)
"""For so long an object that was read for one backup need not be read again for another."""
_COMPLETE = str(BackupState.COMPLETE)
_DAMAGED = str(BackupState.DAMAGED)
_Look = Callable[[Mapping[str, StoredObject]], dict[str, str]]
"""Looks at what is stored under these keys: what is wrong, by key."""


@dataclass(frozen=True, slots=True)
class Examined:
    """``verified`` ids, stored ``bytes`` that were looked at, every damage found, and why some could not be read."""

    verified: tuple[str, ...] = ()
    bytes: int = 0
    damages: tuple[Damage, ...] = ()
    troubles: tuple[str, ...] = ()


def unverified(records: Iterable[BackupRecord], destination: str) -> list[BackupRecord]:
    """Those with a whole copy at ``destination`` that nobody has read again since it was stored, newest first."""
    return [
        record
        for record in records
        if record.state is BackupState.COMPLETE
        and any(
            copy.destination == destination and copy.state == _COMPLETE and copy.verified_at is None
            for copy in record.copies
        )
    ]


def verify_copies(
    wiring: Wiring, destination: Destination, server: str, *, report: Report, check: Check, fresh: Collection[str] = ()
) -> Examined:
    """Look at every byte of the copies of ``server`` at ``destination`` that nobody has looked at. What is damaged is
    put right from another destination; where none has it, every copy that needs it is marked, and damaged objects put
    into quarantine there. ``fresh``: keys that we have just stored, of which the destination's checksum shows enough.
    Raises DestinationError, CatalogError."""
    _reconsider(wiring, destination, server)
    records = wiring.catalog.backups.list(server)
    known = _lately(destination, records, wiring.clock() - SHARED_FOR)
    look = partial(_problems, destination, report=report, check=check, fresh=fresh)
    done = Examined()
    for record in unverified(records, destination.name):
        check()
        header, damages = _readable(wiring, destination, record)
        done = replace(done, damages=(*done.damages, *damages))
        if header is not None:
            done = _one(wiring, destination, header, known, done, look)
        elif damages:  # else it was removed in this moment
            wiring.catalog.backups.set_copy_state(record.id, destination.name, _DAMAGED)
    return done


def _readable(
    wiring: Wiring, destination: Destination, record: BackupRecord
) -> tuple[Header | None, tuple[Damage, ...]]:
    """The manifest of a copy, put right where it could not be read; None where it is not there, or stays as it is."""
    damages: tuple[Damage, ...] = ()
    found = read(destination, record.server, record.id)
    if found is not None and not isinstance(found.header, Header):
        key = layout.manifest_key(record.server, record.id)
        damage = Damage(destination.name, key, found.header.detail, (record.id,))
        damages = mend(wiring, destination, record.server, (), [damage])
        found = read(destination, record.server, record.id)
    return found.header if found is not None and isinstance(found.header, Header) else None, damages


def damaged(records: Iterable[BackupRecord], destination: str) -> list[BackupRecord]:
    """Those with a copy at ``destination`` that is not whole, or not there any more."""
    return [record for record in records if record.state_at(destination) == _DAMAGED]


def _reconsider(wiring: Wiring, destination: Destination, server: str) -> None:
    """Copies that were found damaged and of which another destination has a whole one: what is known to be wrong with
    them is put right. Then they count as complete, and as not verified."""
    for record in damaged(wiring.catalog.backups.list(server), destination.name):
        if all(copy.destination == destination.name or copy.state != _COMPLETE for copy in record.copies):
            continue
        header, _damages = _readable(wiring, destination, record)
        if header is None:
            continue
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
    wiring: Wiring, destination: Destination, header: Header, known: dict[str, datetime], done: Examined, look: _Look
) -> Examined:
    """``done``, and what came of the copy of one backup. ``known``: objects that need not be read once more, and when
    they were; what is read now is added."""
    begun = wiring.clock()
    items = {layout.backup_folder(header.server, header.backup_id) + item.name: item for item in header.side_files}
    shared = [item for item in header.objects if item.name in known]
    items |= {layout.object_key(item.name): item for item in header.objects if item.name not in known}
    try:
        problems = look(items)
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
        if record.id == header.backup_id or (record.id in hit and record.state_at(destination.name) == _COMPLETE):
            wiring.catalog.backups.set_copy_state(record.id, destination.name, _DAMAGED)


def _problems(
    destination: Destination, items: Mapping[str, StoredObject], *, report: Report, check: Check, fresh: Collection[str]
) -> dict[str, str]:
    total, lock = sum(item.size for item in items.values()), threading.Lock()
    seen = [0, 0]
    stop = threading.Event()

    def examine(one: tuple[str, StoredObject]) -> tuple[str, str]:
        check()
        if stop.is_set():
            raise CancelledError("stopped, because another copy failed")
        problem = found_wrong(destination, *one, fresh=one[0] in fresh)
        with lock:
            seen[0] += one[1].size
            seen[1] += 1
            progress = Progress("verify", seen[0], total, seen[1], len(items), f"at {destination.name}")
        report(progress)
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

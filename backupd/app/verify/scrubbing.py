"""Reading again what is stored of one server at one destination, in rotation, and what the catalog learns from it.

Everything stored belongs to one of ``SHARES`` shares, by its name. When each was last read is in the catalog. A run
reads the oldest ones, as many as the time since the last run calls for; so after a run that was missed the next one
reads more, and a changed period or schedule loses nothing.

What is in an archive storage class cannot be read in rotation; a sample of it is thawed now and then, and read. Which
one is under way is in the catalog's events. Asking costs money, so one that is being thawed is not asked for again, and
the cheapest tier is taken.

Of binary logs what is stored is the truth: a segment that the catalog does not know is imported, one that is missing at
its destination is forgotten there, and the hole that it leaves is recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice

from backupd.app.backup_records import soundness
from backupd.app.binlogs.log_records import YOUNG, Reconciliation
from backupd.app.context.settings import spool_folder
from backupd.app.context.trust import mark_copy_damaged, settle_tampering
from backupd.app.context.wiring import Wiring, gathered, worker_count
from backupd.app.copies.repairs import mend
from backupd.app.metacopies import signed_heads as heads
from backupd.binlog.spool_files import Spool
from backupd.model.backup_record import BackupState
from backupd.model.binlog import Segment, SegmentKey
from backupd.model.errors import (
    BackupdError,
    DamagedError,
    DestinationError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
)
from backupd.model.event import Severity
from backupd.model.job import Report
from backupd.model.manifest import Header
from backupd.model.text import format_size
from backupd.model.thaw import TIERS
from backupd.process.throttle import Unlimited
from backupd.transfer import log_segments
from backupd.transfer.fsck import Finding, Invariant
from backupd.transfer.records.manifests import backup_ids, read
from backupd.transfer.records.segment_documents import SegmentHeader
from backupd.transfer.scrub_and_repair import SHARES, Damage, Due, Scrubbed, always, scrub, scrub_segments, share_of
from backupd.transfer.thaw import ask
from storage import layout, objects
from storage.destination import ArchiveDestination, ColdState, Destination, Tier, as_archive, exists

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a run has to read. ``subset``: at least this part of everything (0 to 1), None where nobody said so;
    ``period``: whatever was not read for so long. With neither: everything."""

    subset: float | None = None
    period: timedelta | None = None

    @property
    def is_whole(self) -> bool:
        """Is everything read?"""
        return self.subset is None and self.period is None


WHOLE = Rotation()


def due(done: Mapping[int, datetime], rotation: Rotation, now: datetime) -> frozenset[int]:
    """The shares to read now. ``done``: when each was last read, without those that never were."""
    if rotation.is_whole:
        return frozenset(range(SHARES))
    read = {share: at for share, at in done.items() if 0 <= share < SHARES}
    # What was never read is as old as the rotation: it began with its first row.
    began = min(read.values(), default=now)
    order = sorted(range(SHARES), key=lambda share: (read.get(share, began - _DAY), share))
    count = 1
    if rotation.subset is not None:
        count = max(count, math.ceil(SHARES * rotation.subset - 1e-6))
    if rotation.period is not None:
        since = now - max(read.values()) if read else _DAY
        count = max(count, math.ceil(SHARES * (since / rotation.period) - 1e-6))
        # The next run will come about as late as this one: nothing may become too old until then.
        limit = now + max(since, min(_DAY, rotation.period)) - rotation.period
        count = max(count, sum(1 for share in range(SHARES) if read.get(share, began) <= limit and read))
    return frozenset(order[:count])


def read_since(done: Mapping[int, datetime]) -> datetime | None:
    """Since when everything was read again at least once; None while something never was."""
    if any(share not in done for share in range(SHARES)):
        return None
    return min(done[share] for share in range(SHARES))


_BATCH = 1_000
"""Segments that are looked at in one go: what bounds memory."""
_FRESH = timedelta(minutes=10)
"""A stream writes the catalog's row right after the segment; a younger one may be on its way."""
_FORGET = "`backupd fsck --repair` forgets it and records the gap"
_REPLACED = "a larger piece has replaced it; `backupd fsck --repair` removes it from the catalog"
_YOUNG = (
    f"it was stored less than {YOUNG.seconds // 60} minutes ago and a stream is running, so it is left unchanged: run "
    "`backupd fsck --repair` again after that time"
)


@dataclass(frozen=True, slots=True)
class _SegmentsRead:
    """What was read of some segments. ``headers``: of those whose turn it was; ``broken``: those of which not even the
    header can be read; ``scrubbed``: without what was removed while it was being read."""

    headers: Sequence[SegmentHeader]
    broken: Sequence[log_segments.DamagedSegment]
    scrubbed: Scrubbed

    @property
    def bad(self) -> set[tuple[str, SegmentKey]]:
        """Segments that are damaged."""
        found = {(one.segment.server, one.segment.key) for one in self.scrubbed.damages if one.segment is not None}
        return found | {(one.server, one.key) for one in self.broken}

    @property
    def good(self) -> list[Segment]:
        """Segments of which everything was read, or compared by the destination itself, and is as it was stored."""
        bad, unseen = self.bad, set(self.scrubbed.unseen)
        return [
            one.segment
            for one in self.headers
            if (one.segment.server, one.segment.key) not in bad
            and not any(one.folder + item.name in unseen for item in one.sealed)
        ]


def verify_logs(
    wiring: Wiring, destination: Destination, server: str, *, report: Report, workers: int, due: Due
) -> tuple[Scrubbed, int]:
    """Re-read the segments whose turn it is; the catalog learns which copies are good and which are not, and forgets
    pieces that a larger one has replaced. Gives what was read and found, and how many segments that was."""
    read: list[_SegmentsRead] = []
    found = log_segments.headers(destination, server)
    while batch := list(islice(found, _BATCH)):
        read.append(_read_segments(destination, batch, report=report, workers=workers, due=due))
        _record_segments(wiring, destination.name, read[-1])
    broken = [
        Damage(destination.name, layout.segment_key(one.server, one.key), one.error.detail)
        for part in read
        for one in part.broken
    ]
    scrubbed = [part.scrubbed for part in read]
    return Scrubbed(
        sum(one.objects for one in scrubbed),
        sum(one.bytes for one in scrubbed),
        (*(damage for one in scrubbed for damage in one.damages), *broken, *_missing_logs(wiring, destination, server)),
        tuple(key for one in scrubbed for key in one.cold),
        tuple(sorted(key for one in scrubbed for key in one.unseen)),
    ), sum(len(part.headers) + len(part.broken) for part in read)


def _read_segments(
    destination: Destination,
    batch: Sequence[SegmentHeader | log_segments.DamagedSegment],
    *,
    report: Report,
    workers: int,
    due: Due,
) -> _SegmentsRead:
    headers = [one for one in batch if isinstance(one, SegmentHeader) and due(one.folder)]
    scrubbed = scrub_segments(destination, headers, report=report, workers=workers)
    here = [
        one
        for one in scrubbed.damages
        if one.segment and exists(destination, layout.segment_key(one.segment.server, one.segment.key))
    ]
    broken = [one for one in batch if isinstance(one, log_segments.DamagedSegment)]
    return _SegmentsRead(headers, broken, replace(scrubbed, damages=tuple(here)))


def _record_segments(wiring: Wiring, destination: str, read: _SegmentsRead) -> None:
    for owner, key in sorted(read.bad):
        _mark_segment_damaged(wiring, owner, key, destination)
    for owner, keys in gathered((segment.server, segment.key) for segment in read.good).items():
        wiring.catalog.binlogs.mark_verified(owner, keys, destination, wiring.clock())


def _missing_logs(wiring: Wiring, destination: Destination, server: str) -> Iterator[Damage]:
    """Segments that the catalog expects and that are not there; it forgets those that a larger one has replaced."""
    known = Reconciliation(wiring.catalog, destination, server, wiring.clock)
    missing = [record.key for record in known.missing()]
    replaced = {key for key in missing if known.is_replaced(key)}
    wiring.catalog.binlogs.drop_segments(server, sorted(replaced), destination.name)
    for key in missing:
        if key not in replaced:
            _mark_segment_damaged(wiring, server, key, destination.name)
            yield Damage(destination.name, layout.segment_key(server, key), "missing")


def _mark_segment_damaged(wiring: Wiring, server: str, key: SegmentKey, destination: str) -> None:
    try:
        wiring.catalog.binlogs.mark_damaged(server, key, destination)
    except NotFoundError:
        return  # a segment that the catalog does not know yet: fsck says so


# Fsck


def examine_logs(wiring: Wiring, destination: Destination) -> list[Finding]:
    """Do catalog and destination know the same segments?"""
    found: list[Finding] = []
    for server in _servers(wiring, destination):
        one = Reconciliation(wiring.catalog, destination, server, wiring.clock)
        at_work = is_at_work(wiring, server)
        unknown = [("branch", layout.branch_key(server, branch.id)) for branch in one.unknown_branches()]
        unknown += [
            ("binary log", layout.segment_key(server, key))
            for key in one.unknown()
            if not (at_work and _is_fresh(wiring, destination, server, key)) and one.header(key) is not None
        ]
        found += [
            Finding(
                Invariant.CATALOG_HAS_SEGMENT,
                key,
                f"the catalog does not know this {what} of {server}; `backupd fsck --repair` imports it",
                repairable=True,
            )
            for what, key in unknown
        ]
        for record in one.missing():
            replaced = one.is_replaced(record.key)
            young = at_work and not replaced and one.is_young(record, wiring.clock())
            found.append(
                Finding(
                    Invariant.SEGMENT_IS_STORED,
                    layout.segment_key(server, record.key),
                    "the catalog expects this binary "
                    f"log of {server} at destination {destination.name}, but it is not there; "
                    + (_REPLACED if replaced else _YOUNG if young else _FORGET),
                    repairable=True,
                )
            )
    return found


def repair_logs(wiring: Wiring, destination: Destination) -> None:
    """Take in what the catalog does not know, forget what is not there, and record where that leaves a hole."""
    for server in _servers(wiring, destination):
        at_work = is_at_work(wiring, server)
        Reconciliation(wiring.catalog, destination, server, wiring.clock).settle(at_work=at_work)
        if not at_work:  # else its stream records them
            _record_gaps(wiring, server)


def _record_gaps(wiring: Wiring, server: str) -> None:
    """Those that the spool remembers, if it is one of this host."""
    known = {branch.id for branch in wiring.catalog.binlogs.branches(server)}
    recorded = {
        (gap.branch, gap.destination, gap.after.file, gap.after.pos) for gap in wiring.catalog.binlogs.gaps(server)
    }
    try:
        gaps = Spool(spool_folder(wiring.settings, server)).gaps()
    except (DamagedError, RefusedError):
        return  # the stream of this server fails with it, and says so
    for gap in gaps:
        if gap.branch in known and (gap.branch, gap.destination, gap.after.file, gap.after.pos) not in recorded:
            wiring.catalog.binlogs.add_gap(gap)


# What both sides know


def _servers(wiring: Wiring, destination: Destination) -> list[str]:
    found = set(wiring.catalog.binlogs.servers())
    for info in destination.list(layout.BINLOGS):
        owner = layout.segment_of(info.key) or layout.branch_of(info.key)
        if owner is not None:
            found.add(owner[0])
    return sorted(found)


def is_at_work(wiring: Wiring, server: str) -> bool:
    """Has a stream said a moment ago how it is?"""
    state = wiring.catalog.binlogs.stream_state(server)
    return state is not None and wiring.clock() - state[1] <= _FRESH


def _is_fresh(wiring: Wiring, destination: Destination, server: str, key: SegmentKey) -> bool:
    """Was it stored a moment ago?"""
    try:
        return wiring.clock() - destination.stat(layout.segment_key(server, key)).modified_at < _FRESH
    except BackupdError:
        return True  # gone meanwhile


@dataclass(frozen=True, slots=True)
class Read:
    """What one run found at one destination: ids of ``backups``, how many ``objects``, ``bytes`` and ``binlogs`` were
    read, every damage with what became of it. ``cold``: how many objects are in an archive class, where only the
    destination's own checksum could be compared; ``unseen``: how many of them have none; ``sample``: what is said of
    the one that is thawed to be read; ``unbound``: backups that are not bound to their clear manifests."""

    backups: tuple[str, ...]
    objects: int
    bytes: int
    damages: tuple[Damage, ...]
    binlogs: int
    cold: int = 0
    unseen: int = 0
    sample: str = ""
    unbound: tuple[str, ...] = ()


def scrub_server(wiring: Wiring, destination: Destination, server: str, rotation: Rotation, report: Report) -> Read:
    """Read the shares whose turn it is; damage is put right from other destinations where they can, and quarantined
    and marked where not."""
    begun = wiring.clock()
    done = wiring.catalog.scrubs.done(server, destination.name)
    shares = due(done, rotation, begun)
    key = pending(wiring, destination, server)
    taken = layout.name_in(key) if key is not None else ""
    turn: Due = always if rotation.is_whole else (lambda name: share_of(name) in shares or name == taken)
    workers = worker_count(8)
    headers, damages = _headers(destination, server)
    scrubbed = scrub(destination, headers, report=report, workers=workers, due=turn)
    names = {header.backup_id for header in headers} | {name for item in damages for name in item.backups}
    found = _still_there(
        destination, server, (*damages, *scrubbed.damages, *_missing(wiring, destination, server, names))
    )
    logs, count = verify_logs(wiring, destination, server, report=report, workers=workers, due=turn)
    found = _quarantined(wiring, destination, mend(wiring, destination, server, headers, (*found, *logs.damages)))
    wiring.catalog.scrubs.record(server, destination.name, shares, begun)
    complete = begun if rotation.is_whole else read_since({**done, **dict.fromkeys(shares, begun)})
    _record_copies(wiring, destination, headers, found, complete, unseen=set(scrubbed.unseen))
    _release(destination, headers, found, turn)
    if all(damage.repaired_from for damage in found):
        heads.settle(wiring, destination, server)
    else:
        heads.is_rolled_back(wiring, destination, server)
    settle_tampering(
        wiring.catalog,
        wiring.clock,
        destination.name,
        server,
        (
            damage.key
            for damage in found
            if not damage.repaired_from and damage.key.rpartition("/")[2] in (layout.MANIFEST, layout.SEGMENT)
        ),
    )
    sampled = sample(wiring, destination, server, key, scrubbed.cold, {damage.key for damage in found})
    return Read(
        tuple(sorted(names)),
        scrubbed.objects + logs.objects,
        scrubbed.bytes + logs.bytes,
        found,
        count,
        len(scrubbed.cold) + len(logs.cold),
        len(scrubbed.unseen) + len(logs.unseen),
        sampled,
        tuple(header.backup_id for header in headers if not header.is_bound),
    )


def _headers(destination: Destination, server: str) -> tuple[list[Header], list[Damage]]:
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


def _missing(wiring: Wiring, destination: Destination, server: str, seen: Collection[str]) -> list[Damage]:
    """Backups that the catalog expects at ``destination`` and whose manifest is not there."""
    return [
        Damage(destination.name, layout.manifest_key(record.server, record.id), "missing", (record.id,))
        for record in wiring.catalog.backups.list(server, foreign=True)
        if record.state is not BackupState.DELETED
        and record.id not in seen
        and record.state_at(destination.name) not in ("", "deleted")
    ]


def _still_there(destination: Destination, server: str, damages: Iterable[Damage]) -> tuple[Damage, ...]:
    """Without what belongs only to backups that were deleted while they were being read."""
    found = list(damages)
    if not found:
        return ()
    present = {backup_id for _server, backup_id in backup_ids(destination, server)}
    return tuple(
        damage for damage in found if set(damage.backups) & present or damage.key.endswith(f"/{layout.MANIFEST}")
    )


def _quarantined(wiring: Wiring, destination: Destination, damages: Iterable[Damage]) -> tuple[Damage, ...]:
    """Put damaged objects that nothing could repair into quarantine, where the destination can still be written."""
    described = []
    for damage in damages:
        if damage.key.startswith(layout.OBJECTS) and not damage.repaired_from:
            try:
                objects.quarantine(destination, layout.name_in(damage.key), damage.problem, wiring.clock())
            except DestinationError as error:
                damage = replace(damage, problem=f"{damage.problem}; not put into quarantine: {error.message}")  # noqa: PLW2901  the same damage, described better
        described.append(damage)
    return tuple(described)


def _record_copies(
    wiring: Wiring,
    destination: Destination,
    headers: Sequence[Header],
    damages: Sequence[Damage],
    complete: datetime | None,
    *,
    unseen: Collection[str],
) -> None:
    """What the catalog learns of the copies. ``complete``: since when everything there was read at least once."""
    hit = {name for damage in damages if not damage.repaired_from for name in damage.backups}
    mended = {name for damage in damages if damage.repaired_from for name in damage.backups} - hit
    for name in sorted(hit):
        mark_copy_damaged(wiring.catalog, name, destination.name)
    blind = {
        header.backup_id
        for header in headers
        if unseen and any(layout.object_key(item.name) in unseen for item in header.objects)
    }
    for header in headers:
        name = header.backup_id
        if name in hit:
            continue
        if complete is not None and name not in blind and _stored_before(wiring, name, destination.name, complete):
            _mark_verified(wiring, name, destination.name, complete)
        elif name in mended:
            _mark_mended(wiring, header, destination)


def _release(destination: Destination, headers: Iterable[Header], damages: Iterable[Damage], turn: Due) -> None:
    """Objects that were read again and are good need no quarantine."""
    bad = {layout.name_in(damage.key) for damage in damages if damage.key and not damage.repaired_from}
    held = objects.quarantined(destination)
    if not held:
        return
    # What is in quarantine is read whatever turn it is.
    read_now = {item.name for header in headers for item in header.objects if item.name in held or turn(item.name)}
    for name in held & read_now - bad:
        # On a destination that cannot be written the note stays; it costs room, and must not hide what was found.
        with contextlib.suppress(DestinationError):
            objects.release(destination, name)


def _stored_before(wiring: Wiring, backup_id: str, destination: str, moment: datetime) -> bool:
    """Was the copy there by then, and is nothing newer known of it?"""
    try:
        record = wiring.catalog.backups.get(backup_id)
    except NotFoundError:
        return False  # a backup that the catalog does not know yet: fsck says so
    return any(
        copy.destination == destination
        and copy.stored_at <= moment
        and (copy.verified_at is None or copy.verified_at <= moment)
        for copy in record.copies
    )


def _mark_verified(wiring: Wiring, backup_id: str, destination: str, at: datetime) -> None:
    with contextlib.suppress(NotFoundError):  # as above
        wiring.catalog.backups.mark_copy_verified(backup_id, destination, at)
        _follow(wiring, backup_id)


def _mark_mended(wiring: Wiring, header: Header, destination: Destination) -> None:
    """A copy whose damages are put right is whole again, as far as anybody knows."""
    with contextlib.suppress(NotFoundError):
        record = wiring.catalog.backups.get(header.backup_id)
        if record.state_at(destination.name) == "damaged":
            state = soundness(destination, header.server, header.backup_id)
            wiring.catalog.backups.set_copy_state(header.backup_id, destination.name, state)


def _follow(wiring: Wiring, backup_id: str) -> None:
    record = wiring.catalog.backups.get(backup_id)
    if record.state is BackupState.DAMAGED and any(copy.state == "complete" for copy in record.copies):
        wiring.catalog.backups.set_state(backup_id, BackupState.COMPLETE)


THAWING, READ = "cold-sample-thawing", "cold-sample-read"
"""Kinds of events: a sample was asked for; it was read."""

_YEAR = timedelta(days=365)


def pending(wiring: Wiring, destination: Destination, server: str) -> str | None:
    """The key of the sample that was asked for and not read yet."""
    last = wiring.catalog.events.last(server, (THAWING, READ), destination.name)
    return last.detail if last is not None and last.kind == THAWING else None


def sample(
    wiring: Wiring,
    destination: Destination,
    server: str,
    key: str | None,
    cold: Collection[str],
    wrong: Collection[str],
) -> str:
    """Go on with the sample ``key`` (see ``pending``) after a run, or ask for one where it is time; what to say of it,
    if anything. ``cold``: keys that this run could not read; ``wrong``: those that it found damaged."""
    archive = as_archive(destination)
    if archive is None:
        return ""
    try:
        if key is None:
            return _begin(wiring, archive, server, cold)
        state = archive.coldness(key).state
    except ObjectMissingError:
        return _end(wiring, archive, server, key or "", "was removed before it could be read")
    if key in cold and state is not ColdState.THAWING:
        return _ask(wiring, archive, server, key)  # it went cold again before anybody read it
    if key in cold:
        return f"{destination.name}: {key} is being thawed, to be read as a sample"
    return _end(wiring, archive, server, key, "is damaged" if key in wrong else "was read, and is as it was stored")


def _begin(wiring: Wiring, archive: ArchiveDestination, server: str, cold: Collection[str]) -> str:
    policy = wiring.settings.server(server).policy if server in wiring.settings.servers else None
    count = policy.verify.cold_sample if policy is not None and policy.verify is not None else 0
    if not count or not cold:
        return ""
    last = wiring.catalog.events.last(server, (THAWING, READ), archive.name)
    if last is not None and wiring.clock() - last.at < _YEAR / count:
        return ""
    salt = f"{wiring.clock():%Y%m%d}"
    return _ask(wiring, archive, server, min(cold, key=lambda one: hashlib.sha256(f"{salt} {one}".encode()).digest()))


def _ask(wiring: Wiring, archive: ArchiveDestination, server: str, key: str) -> str:
    settings = wiring.settings.configuration.archive
    prices = settings.prices.as_prices
    found = archive.coldness(key)
    known = prices.retrieval.get(found.storage_class, {})
    tier = next((one for one in TIERS if one in known), settings.tier)
    problem = ""
    try:
        for batch in ask(archive, [key], Tier(tier), settings.days, now=wiring.clock(), pace=Unlimited()):
            problem = batch[0].problem
    except BackupdError as error:
        problem = error.message
    if problem:
        return f"{archive.name}: {key} could not be thawed as a sample: {problem}"
    cost = prices.cost(found.storage_class, tier, 1, found.size, settings.days)
    price = "" if cost is None else f", about {cost:.4f} {prices.currency}"
    text = (
        f"{archive.name}: {key} ({format_size(found.size)}) is thawed at the tier {tier}{price}, to be read as a sample"
    )
    wiring.note(THAWING, Severity.INFO, text, server=server, subject=archive.name, detail=key)
    return text


def _end(wiring: Wiring, archive: ArchiveDestination, server: str, key: str, what: str) -> str:
    text = f"{archive.name}: {key}, thawed as a sample, {what}"
    wiring.note(READ, Severity.INFO, text, server=server, subject=archive.name, detail=key)
    return text

"""Archived binary logs in `backupd verify` and `backupd fsck`: re-read, compared with the catalog, set right there.

What is stored is the truth: a segment that the catalog does not know is taken in, one that is nowhere to be found at
its destination is forgotten there, and the hole that it leaves is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import islice

from backupd.app.context.settings import spool_folder
from backupd.app.context.wiring import Wiring
from backupd.app.reconcile.log_records import YOUNG, Reconciliation
from backupd.binlog.spool_files import Spool
from backupd.model.binlog import Segment, SegmentKey
from backupd.model.errors import BackupdError, DamagedError, NotFoundError, ObjectMissingError, RefusedError
from backupd.model.job import Report
from backupd.transfer import log_segments
from backupd.transfer.fsck import Finding, Invariant
from backupd.transfer.records.segment_documents import SegmentHeader
from backupd.transfer.scrub import Damage, Due, Scrubbed, scrub_segments
from storage.contract import layout
from storage.contract.destination import Destination

_BATCH = 1_000
"""Segments that are looked at in one go: what bounds memory."""
_FRESH = timedelta(minutes=10)
"""A stream writes the catalog's row right after the segment; a younger one may be on its way."""
_FORGET = "`backupd fsck --repair` forgets it and records the gap"
_REPLACED = "a larger piece that is there has replaced it; `backupd fsck --repair` forgets it"
_YOUNG = (
    f"it was stored less than {YOUNG.seconds // 60} minutes ago and a stream is at work, so it is left as it is: "
    "run `backupd fsck --repair` again after that time, which finishes it"
)


# Verify


def verify_logs(
    wiring: Wiring, destination: Destination, server: str, *, report: Report, workers: int, due: Due
) -> tuple[Scrubbed, int]:
    """Re-read the segments whose turn it is; the catalog learns which copies are good and which are not, and forgets
    pieces that a larger one has replaced. Gives what was read and found, and how many segments that was."""
    read = size = count = 0
    damages: list[Damage] = []
    cold: list[str] = []
    unseen: set[str] = set()
    found = log_segments.headers(destination, server)
    while batch := list(islice(found, _BATCH)):
        headers = [one for one in batch if isinstance(one, SegmentHeader) and due(one.folder)]
        broken = [one for one in batch if isinstance(one, log_segments.DamagedSegment)]
        scrubbed = scrub_segments(destination, headers, report=report, workers=workers)
        here = [
            damage
            for damage in scrubbed.damages
            if damage.segment is not None and _is_there(destination, damage.segment.server, damage.segment.key)
        ]
        damages += [
            *here,
            *(Damage(destination.name, layout.segment_key(one.server, one.key), one.error.detail) for one in broken),
        ]
        bad = {(damage.segment.server, damage.segment.key) for damage in here if damage.segment is not None}
        bad |= {(one.server, one.key) for one in broken}
        unseen |= set(scrubbed.unseen)
        cold += scrubbed.cold
        _record(
            wiring,
            destination.name,
            [one.segment for one in headers if not any(one.folder + item.name in unseen for item in one.sealed)],
            bad,
        )
        read, size, count = read + scrubbed.objects, size + scrubbed.bytes, count + len(headers) + len(broken)
    one = Reconciliation(wiring.catalog, destination, server, wiring.clock)
    missing = [record.key for record in one.missing()]
    replaced = {key for key in missing if one.is_replaced(key)}
    wiring.catalog.binlogs.drop_segments(server, sorted(replaced), destination.name)
    for key in missing:
        if key not in replaced:
            _mark_damaged(wiring, server, key, destination.name)
            damages.append(Damage(destination.name, layout.segment_key(server, key), "missing"))
    return Scrubbed(read, size, tuple(damages), tuple(cold), tuple(sorted(unseen))), count


def _record(wiring: Wiring, destination: str, read: Sequence[Segment], bad: set[tuple[str, SegmentKey]]) -> None:
    for owner, key in sorted(bad):
        _mark_damaged(wiring, owner, key, destination)
    by_server: dict[str, list[SegmentKey]] = {}
    for segment in read:
        if (segment.server, segment.key) not in bad:
            by_server.setdefault(segment.server, []).append(segment.key)
    for owner, keys in by_server.items():
        wiring.catalog.binlogs.mark_verified(owner, keys, destination, wiring.clock())


def _mark_damaged(wiring: Wiring, server: str, key: SegmentKey, destination: str) -> None:
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
        found += [
            Finding(
                Invariant.CATALOG_HAS_SEGMENT,
                layout.branch_key(server, branch.id),
                f"the catalog does not know this branch of {server}; `backupd fsck --repair` takes it in",
                repairable=True,
            )
            for branch in one.unknown_branches()
        ]
        found += [
            Finding(
                Invariant.CATALOG_HAS_SEGMENT,
                layout.segment_key(server, key),
                f"the catalog does not know this binary log of {server}; `backupd fsck --repair` takes it in",
                repairable=True,
            )
            for key in one.unknown()
            if not (at_work and _is_fresh(wiring, destination, server, key)) and one.header(key) is not None
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
        if not at_work:  # else it tells by itself
            _tell_gaps(wiring, server)


def _tell_gaps(wiring: Wiring, server: str) -> None:
    """Those that the spool remembers, if it is one of this host."""
    known = {branch.id for branch in wiring.catalog.binlogs.branches(server)}
    told = {(gap.branch, gap.destination, gap.after.file, gap.after.pos) for gap in wiring.catalog.binlogs.gaps(server)}
    try:
        gaps = Spool(spool_folder(wiring.settings, server)).gaps()
    except (DamagedError, RefusedError):
        return  # the stream of this server fails with it, and says so
    for gap in gaps:
        if gap.branch in known and (gap.branch, gap.destination, gap.after.file, gap.after.pos) not in told:
            wiring.catalog.binlogs.add_gap(gap)


# What both sides know


def _servers(wiring: Wiring, destination: Destination) -> list[str]:
    found = set(wiring.catalog.binlogs.servers())
    for info in destination.list(layout.BINLOGS):
        owner = layout.segment_of(info.key) or layout.branch_of(info.key)
        if owner is not None:
            found.add(owner[0])
    return sorted(found)


def _is_there(destination: Destination, server: str, key: SegmentKey) -> bool:
    try:
        destination.stat(layout.segment_key(server, key))
    except ObjectMissingError:
        return False
    return True


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

"""Archived binary logs in `backupd verify` and `backupd fsck`: re-read, compared with the catalog, set right there.

What is stored is the truth: a segment that the catalog does not know is taken in, one that is nowhere to be found at
its destination is forgotten there, and the hole that it leaves is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import groupby, islice

from backupd.app.wiring import Wiring
from backupd.model.binlog import Branch, BranchReason, Gap, Run, Segment, SegmentKey
from backupd.model.errors import BackupdError, DamagedError, NotFoundError, ObjectMissingError
from backupd.model.progress import Report
from backupd.model.server import Position
from backupd.recovery.runs import first_of, last_of, place_of
from backupd.transfer import segments
from backupd.transfer.fsck import Finding, Invariant
from backupd.transfer.scrub import Damage, Scrubbed, scrub_segments, turn_of
from backupd.transfer.segmentdoc import SegmentHeader
from storage import layout
from storage.destination import Destination

_BATCH = 1_000
"""Segments that are looked at in one go: what bounds memory."""
_FRESH = timedelta(minutes=10)
"""A stream writes the catalog's row right after the segment; a younger one may be on its way."""
_GONE = "it was removed from the destination by somebody else: `backupd fsck --repair` found nothing of it there"


# Verify

def verify_logs(wiring: Wiring, destination: Destination, server: str | None, *, report: Report, workers: int,
                turns: int, turn: int) -> tuple[Scrubbed, int]:
    """Re-read the segments whose turn it is; the catalog learns which copies are good and which are not. Gives what was
    read and found, and how many segments that was."""
    read = size = count = 0
    damages: list[Damage] = []
    found = segments.headers(destination, server)
    while batch := list(islice(found, _BATCH)):
        headers = [one for one in batch if isinstance(one, SegmentHeader)
                   and (turns == 1 or turn_of(one.folder, turns) == turn)]
        broken = [one for one in batch if isinstance(one, segments.DamagedSegment)]
        scrubbed = scrub_segments(destination, headers, report=report, workers=workers)
        here = [damage for damage in scrubbed.damages if damage.segment is not None
                and _is_there(destination, damage.segment.server, damage.segment.key)]
        damages += [*here, *(Damage(destination.name, layout.segment_key(one.server, one.key), one.error.detail)
                             for one in broken)]
        bad = {(damage.segment.server, damage.segment.key) for damage in here if damage.segment is not None}
        bad |= {(one.server, one.key) for one in broken}
        _record(wiring, destination.name, [one.segment for one in headers], bad)
        read, size, count = read + scrubbed.objects, size + scrubbed.bytes, count + len(headers) + len(broken)
    for owner in _servers(wiring, server):
        for key in _missing(wiring, destination, owner):
            _mark_damaged(wiring, owner, key, destination.name)
            damages.append(Damage(destination.name, layout.segment_key(owner, key), "missing"))
    return Scrubbed(read, size, tuple(damages)), count


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
    for server in _servers(wiring, None, destination):
        known = {branch.id for branch in wiring.catalog.binlogs.branches(server)}
        for branch in segments.branches(destination, server):
            if isinstance(branch, Branch) and branch.id not in known:
                found.append(Finding(
                    Invariant.CATALOG_HAS_SEGMENT, layout.branch_key(server, branch.id), "the catalog does not know "
                    f"this branch of {server}; `backupd fsck --repair` takes it in", repairable=True))
        found += [Finding(Invariant.CATALOG_HAS_SEGMENT, layout.segment_key(server, key), "the catalog does not know "
                          f"this binary log of {server}; `backupd fsck --repair` takes it in", repairable=True)
                  for key in _unknown(wiring, destination, server) if _header(destination, server, key) is not None]
        found += [Finding(Invariant.SEGMENT_IS_STORED, layout.segment_key(server, key), "the catalog expects this "
                          f"binary log of {server} at destination {destination.name}, but it is not there; "
                          "`backupd fsck --repair` forgets it and records the gap", repairable=True)
                  for key in _missing(wiring, destination, server)]
    return found


def repair_logs(wiring: Wiring, destination: Destination) -> None:
    """Take in what the catalog does not know, forget what is not there, and record where that leaves a hole."""
    for server in _servers(wiring, None, destination):
        _adopt_branches(wiring, destination, server)
        unknown = _unknown(wiring, destination, server)
        while batch := list(islice(unknown, _BATCH)):
            _adopt(wiring, destination, server, batch)
        gone = list(_missing(wiring, destination, server))
        if gone:
            wiring.catalog.binlogs.drop_segments(server, gone, destination.name)
        _set_gaps(wiring, destination.name, server, gone)


def _adopt_branches(wiring: Wiring, destination: Destination, server: str) -> None:
    known = {branch.id for branch in wiring.catalog.binlogs.branches(server)}
    for branch in segments.branches(destination, server):
        if isinstance(branch, Branch) and branch.id not in known:
            wiring.catalog.binlogs.add_branch(branch)


def _adopt(wiring: Wiring, destination: Destination, server: str, keys: Iterable[SegmentKey]) -> None:
    headers = [header for key in keys if (header := _header(destination, server, key)) is not None]
    known = {branch.id for branch in wiring.catalog.binlogs.branches(server)}
    for header in headers:
        if header.segment.branch not in known:
            known.add(header.segment.branch)
            wiring.catalog.binlogs.add_branch(_stand_in(wiring, header.segment))
    wiring.catalog.binlogs.add_segments([(header.segment, header.stored_bytes) for header in headers],
                                        destination.name, wiring.clock())


def _stand_in(wiring: Wiring, segment: Segment) -> Branch:
    """For a branch whose description is lost everywhere: its logs can be replayed, but not across its beginning."""
    return Branch(
        segment.server, segment.branch, segment.first_at or wiring.clock(), BranchReason.UNKNOWN, "", segment.flavour,
        segment.file.rpartition(".")[0], segment.number, note="its description was lost; taken in from its segments")


def _set_gaps(wiring: Wiring, destination: str, server: str, gone: Sequence[SegmentKey]) -> None:
    binlogs = wiring.catalog.binlogs
    runs = binlogs.runs(server, destination)
    for gap in binlogs.gaps(server):
        if gap.destination == destination and _is_closed(gap, runs):
            binlogs.remove_gap(gap)
    branches = {branch.id: branch for branch in binlogs.branches(server)}
    for key in gone:
        here = [run for run in runs if run.branch == key.branch]
        before = [run for run in here if last_of(run) <= (key.number, key.start)]
        after = [run for run in here if first_of(run) >= (key.number, key.end) or first_of(run)[0] > key.number]
        if before and after:  # else what is left only begins later or ends earlier
            branch, one, other = branches[key.branch], before[-1], after[0]
            binlogs.add_gap(Gap(
                server, key.branch, destination, Position(branch.file(one.last_number), one.last_pos, one.gtids_after),
                Position(branch.file(other.first_number), other.first_pos, other.gtids_before), one.last_at,
                other.first_at, _GONE, wiring.clock()))


def _is_closed(gap: Gap, runs: Iterable[Run]) -> bool:
    after, before = place_of(gap.after), place_of(gap.before) if gap.before is not None else None
    return after is not None and before is not None and any(
        run.branch == gap.branch and first_of(run) <= after and before <= last_of(run) for run in runs)


# What both sides know

def _servers(wiring: Wiring, server: str | None, destination: Destination | None = None) -> list[str]:
    if server is not None:
        return [server]
    found = set(wiring.catalog.binlogs.servers())
    if destination is not None:
        for info in destination.list(layout.BINLOGS):
            owner = layout.segment_of(info.key) or layout.branch_of(info.key)
            if owner is not None:
                found.add(owner[0])
    return sorted(found)


def _unknown(wiring: Wiring, destination: Destination, server: str) -> Iterator[SegmentKey]:
    """Segments at the destination of which the catalog has no row for it, but for those that are just being stored."""
    for branch, here in groupby((key for _server, key in segments.keys(destination, server)),
                                key=lambda key: key.branch):
        known = _known(wiring, destination.name, server, branch)
        for key, stored, recorded in _compared(here, known):
            if stored and not recorded and not _is_fresh(wiring, destination, server, key):
                yield key


def _missing(wiring: Wiring, destination: Destination, server: str) -> Iterator[SegmentKey]:
    """Segments that the catalog expects at the destination and that are not there; those it calls damaged, too."""
    for branch in wiring.catalog.binlogs.branches(server):
        prefix = layout.branch_folder(server, branch.id)
        here = (key for _server, key in segments.keys(destination, prefix=prefix))
        for key, stored, recorded in _compared(here, _known(wiring, destination.name, server, branch.id)):
            if recorded and not stored and not _is_there(destination, server, key) and any(
                    record.key == key and destination.name in record.destinations
                    for record in wiring.catalog.binlogs.segments(
                        server, branch.id, from_place=(key.number, key.start), to_place=(key.number, key.end))):
                yield key


def _known(wiring: Wiring, destination: str, server: str, branch: str) -> Iterator[SegmentKey]:
    return (record.key for record in wiring.catalog.binlogs.each_segment(server, branch)
            if destination in record.destinations)


def _compared(here: Iterable[SegmentKey], known: Iterable[SegmentKey]) -> Iterator[tuple[SegmentKey, bool, bool]]:
    """Each key of one branch with whether it is stored and whether it is recorded. Both are in the order of files; no
    more than one file's are in memory."""
    left, right = _by_file(here), _by_file(known)
    one, other = next(left, None), next(right, None)
    while one is not None or other is not None:
        number = min(group[0] for group in (one, other) if group is not None)
        stored = one[1] if one is not None and one[0] == number else set()
        recorded = other[1] if other is not None and other[0] == number else set()
        for key in sorted(stored | recorded):
            yield key, key in stored, key in recorded
        if one is not None and one[0] == number:
            one = next(left, None)
        if other is not None and other[0] == number:
            other = next(right, None)


def _by_file(keys: Iterable[SegmentKey]) -> Iterator[tuple[int, set[SegmentKey]]]:
    for number, found in groupby(keys, key=lambda key: key.number):
        yield number, set(found)


def _header(destination: Destination, server: str, key: SegmentKey) -> SegmentHeader | None:
    """None for one that is gone meanwhile or damaged, of which fsck tells by itself."""
    try:
        return segments.load_header(destination, server, key)
    except (NotFoundError, DamagedError):
        return None


def _is_there(destination: Destination, server: str, key: SegmentKey) -> bool:
    try:
        destination.stat(layout.segment_key(server, key))
    except ObjectMissingError:
        return False
    return True


def _is_fresh(wiring: Wiring, destination: Destination, server: str, key: SegmentKey) -> bool:
    """Was it stored a moment ago by a stream that is at work?"""
    state = wiring.catalog.binlogs.stream_state(server)
    if state is None or wiring.clock() - state[1] > _FRESH:
        return False
    try:
        return wiring.clock() - destination.stat(layout.segment_key(server, key)).modified_at < _FRESH
    except BackupdError:
        return True  # gone meanwhile

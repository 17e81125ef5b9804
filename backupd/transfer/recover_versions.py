"""Recovering what was hidden by deletions, or overwritten, where a destination keeps versions. Needs no private key.

No catalog either. What comes back is what manifests and descriptions of binary logs name, by the digests that they
record. These themselves, and what nobody has a digest of, come back as they were. Everything that was done at the
destination from a moment on is doubted, and nothing before it: what had been marked deleted by then stays away, and so
does what was gone by then; a mark of deletion that came later does not count.

``find`` decides and changes nothing; ``bring_back`` does it, one key after the other.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Any

from backupd.model.binlog import SegmentKey
from backupd.model.document import HIDDEN, NOTE_LIMIT, Document, computed, json_key, parsed
from backupd.model.errors import ArchivedError, BackupdError, DamagedError, ForbiddenError, RefusedError
from backupd.model.job import Report
from backupd.model.manifest import Header, StoredObject, decode_header
from backupd.model.text import Clock, format_time
from backupd.transfer.holds_and_locks import Backup, each, takes_back, withdraw
from backupd.transfer.leases import unswept
from backupd.transfer.log_segments import covers
from backupd.transfer.past_versions import Past, Trail
from backupd.transfer.records.authenticity import Records
from backupd.transfer.records.manifests import read
from backupd.transfer.records.segment_documents import SegmentHeader, decode_branch, decode_segment
from backupd.transfer.relay import Meter, line_of
from storage import layout
from storage.destination import Destination, Version, VersionedDestination, as_versioned

MARKER, MANIFEST, OBJECT, SIDE = "marker", "manifest", "object", "file of a backup"
LOG, LOG_PART, BRANCH = "binary log", "part of a binary log", "branch"
SIGNATURE, COPY, HOLD, TEXT = "signature", "copy or proof", "hold", "RECOVER.md"
_ORDER = (MARKER, OBJECT, SIDE, LOG_PART, SIGNATURE, BRANCH, COPY, HOLD, TEXT, LOG, MANIFEST)
"""What names other things comes after them, so that whatever is interrupted leaves no backup that is not whole."""


@dataclass(frozen=True, slots=True)
class Return:
    """``version`` of a key becomes what is seen again. ``since``: when it was hidden, or overwritten."""

    kind: str
    version: Version
    above: tuple[Version, ...]
    hidden: bool
    since: datetime

    @property
    def key(self) -> str:
        """The key that becomes visible again."""
        return self.version.key

    @property
    def size(self) -> int:
        """Bytes of the version that comes back."""
        return self.version.size or 0

    def as_json(self) -> dict[str, Any]:
        """One entry of ``returns`` in the command's JSON."""
        return {
            "key": self.key,
            "kind": self.kind,
            "bytes": self.size,
            "since": format_time(self.since),
            "was": "hidden" if self.hidden else "overwritten",
            "version": self.version.id,
        }


@dataclass(frozen=True, slots=True)
class Found(Document):
    """``returns``: in the order in which they come back; ``lost``: by key, what no version has, and why; ``left``: by
    key, what stays away rightly, and why; ``before``: how many keys were hidden before the moment; ``marks``: backups
    that are there, or come back, and were marked deleted only from the moment on, with when."""

    since: datetime
    returns: tuple[Return, ...]
    lost: Mapping[str, str]
    left: Mapping[str, str]
    before: int = field(metadata=json_key("hidden_before"))
    marks: Mapping[Backup, datetime] = field(metadata=HIDDEN)

    @property
    @computed("marks")
    def marked_backups(self) -> list[dict[str, Any]]:
        """``marks`` as they are shown."""
        return [
            {"server": server, "backup": backup_id, "since": at}
            for (server, backup_id), at in sorted(self.marks.items())
        ]

    @property
    def is_nothing(self) -> bool:
        """Is there nothing to be done?"""
        return not self.returns and not self.marks

    def kinds(self) -> dict[str, list[Return]]:
        """``returns`` by what they are (``MANIFEST``, ``OBJECT``, ...)."""
        found: dict[str, list[Return]] = {}
        for one in self.returns:
            found.setdefault(one.kind, []).append(one)
        return found

    def backups(self) -> list[tuple[str, str]]:
        """(server, id) of those whose manifest comes back."""
        return sorted(
            owner for one in self.returns if one.kind == MANIFEST and (owner := layout.backup_of(one.key)) is not None
        )


def find(destination: Destination, since: datetime, records: Records | None = None) -> Found:
    """What would be brought back. ``records``: what is known of the documents; a version that is another one does not
    come back. Changes nothing. Raises RefusedError where no versions are kept, ForbiddenError naming the right that is
    missing, DestinationError."""
    return _Search(Past(destination, since), records).run()


@dataclass
class _Search:
    past: Past
    records: Records | None
    returns: list[Return] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _chosen: dict[str, Version] = field(default_factory=dict)

    def run(self) -> Found:
        past = self.past
        self._document(MARKER, layout.REPOSITORY, _is_json, written_once=True)
        headers = list(self._manifests())
        self._named((layout.object_key(item.name), item, OBJECT) for header in headers for item in header.objects)
        self._named(
            (layout.backup_folder(header.server, header.backup_id) + item.name, item, SIDE)
            for header in headers
            for item in header.side_files
        )
        self._logs(headers)
        self._others()
        self.returns.sort(key=lambda one: (_ORDER.index(one.kind), one.key))
        return Found(past.since, tuple(self.returns), self.lost, self.left, past.before, self._doubted_marks())

    # -- backups

    def _manifests(self) -> Iterator[Header]:
        """Of all backups that are there, or come back."""
        past = self.past
        pool = past.below(layout.OBJECTS)
        for key in sorted({*past.leading, *past.suspects}):
            owner = layout.backup_of(key)
            if owner is None or key != layout.manifest_key(*owner):
                continue
            trail = past.suspects.get(key)
            if trail is None:
                if pool or past.below(layout.backup_folder(*owner)):
                    header = _header(past.read(past.leading[key]), owner)
                    yield from () if header is None else (header,)
                continue
            if trail.is_hidden and (marked := self._marked(owner)) is not None:
                self.left[key] = f"it had been marked deleted at {format_time(marked)}"
                continue
            version = self._document(MANIFEST, key, partial(self._is_manifest, owner=owner), written_once=True)
            if version is not None and (header := _header(past.read(version), owner)) is not None:
                yield header

    def _is_manifest(self, raw: bytes, owner: tuple[str, str]) -> bool:
        recorded = self.records.manifest(owner[1]) if self.records is not None else ""
        return _header(raw, owner) is not None and recorded in ("", hashlib.sha256(raw).hexdigest())

    def _is_log(self, raw: bytes, key: str) -> bool:
        found = _segment(raw, key)
        if found is None or self.records is None:
            return found is not None
        return self.records.segment(found.segment.server, found.segment.key) in ("", found.segment.sha256)

    def _marked(self, owner: tuple[str, str]) -> datetime | None:
        """Since when the backup was marked deleted, by the state of its mark at the moment that counts."""
        trail = self.past.marks.get(layout.mark_key(*owner))
        then = self.past.state_then(trail) if trail is not None else None
        if then is None:
            return None
        return None if self._takes_back(then) else then.modified_at

    def _takes_back(self, mark: Version) -> bool:
        try:
            return takes_back(parsed(self.past.read(mark), limit=NOTE_LIMIT))
        except (ArchivedError, ValueError):
            return False  # one that cannot be read counts

    def _doubted_marks(self) -> dict[Backup, datetime]:
        """Of backups that are there, or come back, and had no mark at the moment that counts."""
        back = {one.key for one in self.returns if one.kind == MANIFEST}
        found: dict[Backup, datetime] = {}
        for key, trail in self.past.marks.items():
            owner = layout.backup_of(key)
            if owner is None or key != layout.mark_key(*owner):
                continue
            if (manifest := layout.manifest_key(*owner)) not in back and manifest not in self.past.leading:
                continue
            if trail.is_hidden or trail.changed_at < self.past.since or self._takes_back(trail.states[0]):
                continue
            if self._marked(owner) is None:
                found[owner] = trail.changed_at
        return found

    # -- binary logs

    def _logs(self, headers: Iterable[Header]) -> None:
        past = self.past
        oldest: dict[str, datetime] = {}
        for header in headers:
            oldest[header.server] = min(header.started_at, oldest.get(header.server, header.started_at))
        owners = {
            key: (found[0], found[1])
            for key in sorted({*past.leading, *past.suspects})
            if (found := layout.segment_of(key)) is not None and found[2] == layout.SEGMENT
        }
        files: dict[tuple[str, str, int], list[SegmentKey]] = {}
        for server, segment in owners.values():
            files.setdefault((server, segment.branch, segment.number), []).append(segment)
        branches: set[str] = set()
        for key, (server, segment) in owners.items():
            trail = past.suspects.get(key)
            hidden = trail is not None and trail.is_hidden
            if hidden and any(covers(other, segment) for other in files[server, segment.branch, segment.number]):
                self.left[key] = "a larger part of the same binary log is there, or is restored"
                continue
            if trail is None and not past.below(key.removesuffix(layout.SEGMENT)):
                branches.add(layout.branch_key(server, segment.branch))
                continue
            version = self._segment(key, trail, oldest.get(server) if hidden else None)
            if version is None:
                continue
            branches.add(layout.branch_key(server, segment.branch))
            described = _segment(past.read(version), key)
            if described is not None:
                self._named((described.folder + item.name, item, LOG_PART) for item in described.sealed)
        for key in branches & past.suspects.keys():
            self._document(BRANCH, key, _is_branch, written_once=False)

    def _segment(self, key: str, trail: Trail | None, oldest: datetime | None) -> Version | None:
        """What describes the log: as it is seen, or as it comes back; None where it stays away, or is lost."""
        if trail is None:
            return self.past.leading[key]
        version = self.past.well_formed(trail, lambda raw: self._is_log(raw, key), written_once=True)
        found = _segment(self.past.read(version), key) if version is not None else None
        if found is not None and oldest is not None and (last := found.segment.last_at) is not None and last < oldest:
            self.left[key] = "not needed: every backup is newer than this binary log"
            return None
        return self._document(LOG, key, lambda raw: _differ_in_ending(_segment(raw, key), found), written_once=False)

    # -- everything else

    def _others(self) -> None:
        """What nobody has a digest of: as it was, where it was hidden."""
        past = self.past
        newest = {
            made[1]: key
            for key in sorted(past.suspects)
            if (made := layout.copy_of(key)) is not None
            and any(past.is_of_then(past.suspects[key], one) for one in past.suspects[key].kept)
        }
        for key, trail in past.suspects.items():
            document = key.removesuffix(layout.SIGNATURE)
            if document != key:
                stays = document in past.suspects and document not in self._chosen and past.suspects[document].is_hidden
                if not stays and (made := layout.copy_of(document)) is not None:
                    stays = newest.get(made[1]) not in (None, document)
                if not stays:
                    self._document(SIGNATURE, key, _is_signature, written_once=self._is_of_then(document))
            elif not trail.is_hidden:
                continue
            elif (made := layout.copy_of(key)) is not None:
                if newest.get(made[1]) == key:
                    self._document(COPY, key, _is_anything, written_once=True)
                elif not any(past.is_of_then(trail, one) for one in trail.kept):
                    self.left[key] = "this copy was made only from that time on"
            elif layout.proof_of(key) is not None:
                self._document(COPY, key, _is_anything, written_once=True)
            elif key.startswith(layout.HELD):
                self._document(HOLD, key, _is_anything, written_once=False)
            elif key == layout.RECOVER:
                self._document(TEXT, key, _is_anything, written_once=True)

    def _is_of_then(self, document: str) -> bool:
        """Is what is to be seen under this key, as far as it was looked at, from before the moment?"""
        trail = self.past.suspects.get(document)
        if trail is None:
            seen = self.past.leading.get(document)
            return seen is None or seen.modified_at < self.past.since
        return self.past.is_of_then(trail, self._chosen.get(document, trail.kept[0]))

    # -- how

    def _document(
        self, kind: str, key: str, is_right: Callable[[bytes], bool], *, written_once: bool
    ) -> Version | None:
        """The state of ``key`` that is to be seen, noted as a return where it is another one than is seen."""
        trail = self.past.suspects.get(key)
        if trail is None:
            return None
        version = self.past.well_formed(trail, is_right, written_once=written_once)
        if version is None:
            self.lost[key] = f"it was {_word(trail)} at {format_time(trail.changed_at)}, and no version of it is whole"
        else:
            self._chosen[key] = version
            if not self._is_seen(trail, version):
                self._note(kind, trail, version)
        return version

    def _is_seen(self, trail: Trail, version: Version) -> bool:
        """Is what is seen the same bytes: ``version`` that was stored once more?"""
        seen = trail.states[0]
        try:
            return seen.size == version.size and self.past.read(seen) == self.past.read(version)
        except ArchivedError:
            return False

    def _named(self, items: Iterable[tuple[str, StoredObject, str]]) -> None:
        """What a manifest or a log's description names."""
        wanted = {key: (item, kind) for key, item, kind in items}
        todo = [(trail, *wanted[key]) for key in wanted if (trail := self.past.suspects.get(key)) is not None]
        for key, (item, _kind) in wanted.items():
            if key not in self.past.suspects and not self.past.is_seen(key, item.size):
                self.lost[key] = "it is not there, and was not hidden since then"

        def look(one: tuple[Trail, StoredObject, str]) -> tuple[Version | None, str]:
            trail, item, _kind = one
            try:
                return self.past.holding(trail, item), ""
            except ArchivedError as error:
                return None, error.message

        for (trail, _item, kind), (version, why) in zip(todo, each(look, todo), strict=True):
            if version is None:
                self.lost[trail.key] = why or (
                    f"it was {_word(trail)} at {format_time(trail.changed_at)}, and no "
                    "version has the bytes that were stored"
                )
            else:
                self._note(kind, trail, version)

    def _note(self, kind: str, trail: Trail, version: Version) -> None:
        if version != trail.states[0]:
            self.returns.append(Return(kind, version, trail.hiding(version), trail.is_hidden, trail.changed_at))


def _header(raw: bytes, owner: tuple[str, str]) -> Header | None:
    try:
        header = decode_header(raw, where="a version")
        for item in header.objects:
            layout.object_key(item.name)
    except DamagedError:
        return None
    return header if (header.server, header.backup_id) == owner else None


def _segment(raw: bytes, key: str) -> SegmentHeader | None:
    try:
        found = decode_segment(raw, where="a version")
    except DamagedError:
        return None
    return found if found.key == key else None


def _differ_in_ending(one: SegmentHeader | None, other: SegmentHeader | None) -> bool:
    """Do these describe the same, except for how it ends? That becomes known later; nothing else of it changes."""
    if one is None or other is None:
        return False
    return replace(one, segment=replace(one.segment, ending=other.segment.ending)) == other


def _is_branch(raw: bytes) -> bool:
    try:
        decode_branch(raw, where="a version")
    except DamagedError:
        return False
    return True


def _is_json(raw: bytes) -> bool:
    try:
        return isinstance(parsed(raw, limit=NOTE_LIMIT), dict)
    except ValueError:
        return False


def _is_signature(raw: bytes) -> bool:
    return b"-----BEGIN PGP SIGNATURE-----" in raw


def _is_anything(raw: bytes) -> bool:
    return bool(raw)


def _word(trail: Trail) -> str:
    return "hidden" if trail.is_hidden else "overwritten"


@dataclass(frozen=True, slots=True)
class Returned(Document):
    """``keys``: what is seen again; ``failed``: by key, what is not, or is not believed, and why, and marks that could
    not be withdrawn; ``unmarked``: the backups whose mark of deletion was."""

    keys: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)
    unmarked: tuple[Backup, ...] = field(default=(), metadata=HIDDEN)

    @property
    @computed("unmarked")
    def unmarked_backups(self) -> list[dict[str, str]]:
        """``unmarked`` as it is shown."""
        return [{"server": server, "backup": backup_id} for server, backup_id in self.unmarked]


def bring_back(destination: Destination, found: Found, *, clock: Clock, report: Report) -> Returned:
    """While it runs nobody removes anything there. What fails for one key is reported, and the others go on.

    Raises ForbiddenError naming the right that is missing, BusyError while somebody removes, RefusedError where the
    marker does not come back: without it the destination is none of ours.
    """
    versioned = as_versioned(destination)
    if versioned is None:
        raise RefusedError(f"destination {destination.name} keeps no versions")
    work = _Work(versioned, found.returns, report)
    marker = [one for one in found.returns if one.kind == MARKER]
    work.run(marker)
    if why := work.failed.get(layout.REPOSITORY) or found.lost.get(layout.REPOSITORY):
        raise RefusedError(
            f"the marker of destination {destination.name} could not be restored",
            detail=why,
            hint="nothing else was touched",
        )
    with unswept(destination, clock=clock) as lease:
        work.unmark(destination, found, clock)  # first: whatever is interrupted brings nothing back for a sweep to take
        for _kind, group in groupby(found.returns[len(marker) :], key=lambda one: one.kind):
            lease.assert_held()
            work.run(list(group))
    return work.judged(destination, found)


class _Work:
    def __init__(self, versioned: VersionedDestination, returns: Sequence[Return], report: Report) -> None:
        self._versioned = versioned
        self._meter = Meter(report, "bring back", sum(one.size for one in returns), len(returns))
        self._lock = threading.Lock()
        self._denied = False
        self._done: dict[str, int] = {}
        self._unmarked: list[Backup] = []
        self.failed: dict[str, str] = {}

    def run(self, returns: Sequence[Return]) -> None:
        each(self._one, returns)

    def unmark(self, destination: Destination, found: Found, clock: Clock) -> None:
        """Withdraw the marks of deletion that do not stand."""

        def one(owner: Backup) -> None:
            try:
                withdraw(destination, *owner, clock())
            except BackupdError as error:
                with self._lock:
                    self.failed[layout.mark_key(*owner)] = f"this mark of deletion remains: {line_of(error)}"
                return
            with self._lock:
                self._unmarked.append(owner)

        each(one, found.marks)

    def judged(self, destination: Destination, found: Found) -> Returned:
        """A look at what is seen now, and at whether the manifests among it are believed."""
        waiting = dict(self._done)
        for info in destination.list(""):
            if waiting.get(info.key) == info.size:
                del waiting[info.key]
        for key in waiting:
            self.failed[key] = "restored, but not listed by the destination yet; run the command again"
        for server, backup_id in found.backups():
            manifest = read(destination, server, backup_id)
            if manifest is not None and isinstance(manifest.header, DamagedError):
                self.failed[layout.manifest_key(server, backup_id)] = line_of(manifest.header)
        return Returned(
            tuple(key for key in self._done if key not in self.failed), self.failed, tuple(sorted(self._unmarked))
        )

    def _one(self, one: Return) -> None:
        if self._denied:
            return  # what one may not do, none may
        try:
            self._versioned.bring_back(one.version, one.above)
        except ForbiddenError:
            self._denied = True
            raise
        except BackupdError as error:
            with self._lock:
                self.failed[one.key] = line_of(error)
            return
        with self._lock:
            self._done[one.key] = one.size
        self._meter.add(one.size, 1)

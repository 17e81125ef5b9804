"""Vouching for documents of record that were stored before a policy said that they have to be signed.

What proves a manifest is its digest in the catalog, which the run that made the backup wrote there. A row that was made
from what a destination told (a rebuild, an adoption) proves nothing about that destination, and of binary logs and
branches the catalog holds no digest: those are signed only for somebody who says so, and only where they agree with
all that the catalog knows and with what lies there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backupd.app.trust import undecided, wanting
from backupd.app.wiring import Wiring
from backupd.model.backup import BackupRecord
from backupd.model.binlog import Branch, SegmentKey
from backupd.model.errors import BackupdError, NotFoundError, ObjectMissingError, RefusedError, TamperedError
from backupd.model.manifest import Header, decode_header
from backupd.transfer import segments
from backupd.transfer.inventory import backup_ids
from backupd.transfer.manifestio import load_body
from backupd.transfer.presence import Presence
from backupd.transfer.segmentdoc import decode_branch, decode_segment
from backupd.transfer.signed import SignedDestination
from backupd.transfer.unseal import Unsealer
from storage import layout, objects

_OTHERWISE = "it agrees with the catalog, which holds no digest of it: with --unproven it is signed all the same"


@dataclass(frozen=True, slots=True)
class Vouched:
    """``signed``: how many documents were; ``left``: those that were not, each with why."""

    signed: int
    left: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"signed": self.signed, "left": list(self.left)}


def vouch(wiring: Wiring, name: str, *, unproven: bool = False) -> Vouched:
    """Sign what lies unsigned at destination ``name`` and is, byte by byte, what the runs of this catalog stored; for
    backups that are older than `signed: true`. ``unproven``: also what merely agrees with all that the catalog knows.

    Raises RefusedError where no policy wants anything signed, KeyUnusableError, DestinationError.
    """
    destination = wiring.destination(name)
    if not isinstance(destination, SignedDestination):
        raise RefusedError("no policy says `signed: true`, so nothing has to be",
                           hint="set it in the policy of a server first")
    left = [f"{name}: nothing of {server} is signed: its policy cannot be used; mend it first"
            for server in sorted(undecided(wiring.settings))]
    count = 0
    for server in sorted(wanting(wiring.settings)):
        one = _Server(wiring, destination, server, unproven=unproven)
        for key, judge in one.documents():
            try:
                document = destination.as_it_lies(key)
                doubt = destination.doubt(key, document)
            except ObjectMissingError:
                continue  # removed while we look
            except TamperedError as error:
                left.append(f"{name}: {key}: it is not what the run stored that made this backup, or what was found "
                            f"there when it was taken in: {error.detail}")
                continue
            if not doubt:
                continue
            try:
                why = judge.why_not(document, signed=not destination.unsigned(key))
            except BackupdError as error:
                why = str(error.detail or error.message)
            if why:
                left.append(f"{name}: {key}: {why}")
            else:
                destination.sign(key, document)
                count += 1
    return Vouched(count, tuple(left))


class _Server:
    """The documents of record of one server at a destination."""

    def __init__(self, wiring: Wiring, destination: SignedDestination, server: str, *, unproven: bool) -> None:
        self._wiring, self._destination, self._server, self._unproven = wiring, destination, server, unproven

    def documents(self) -> Iterator[tuple[str, _Judge]]:
        """Each with what judges it."""
        server, destination, binlogs = self._server, self._destination, self._wiring.catalog.binlogs
        unsealer = self._wiring.unsealer() if self._wiring.settings.restore is not None else None
        presence: Presence | None = None
        for _server, backup_id in backup_ids(destination, server):
            presence = presence or Presence(destination)
            yield layout.manifest_key(server, backup_id), _Backup(
                destination, self._unproven, self._record(backup_id), presence, unsealer)
        branches = {branch.id: branch for branch in binlogs.branches(server)}
        for info in list(destination.list(layout.binlogs_folder(server))):
            owner = layout.branch_of(info.key)
            if owner is not None:
                yield info.key, _Branch(destination, self._unproven, info.key, branches.get(owner[1]))
        for _server, key in segments.keys(destination, server):
            yield layout.segment_key(server, key), _Segment(destination, self._unproven, self._wiring, server, key)

    def _record(self, backup_id: str) -> BackupRecord | None:
        try:
            return self._wiring.catalog.backups.get(backup_id)
        except NotFoundError:
            return None


class _Judge:
    """May a document be signed?"""

    def __init__(self, destination: SignedDestination, unproven: bool) -> None:
        self._destination, self._unproven = destination, unproven

    def why_not(self, document: bytes, *, signed: bool) -> str:
        """"" where it may. ``signed``: it has a signature, which is not believed. Raises DamagedError."""
        digest = self.digest()
        if digest:
            same = hashlib.sha256(document).hexdigest() == digest
            return "" if same else "it is not what the run stored that made this backup"
        problem = self.disagreement(document)
        if problem:
            return problem
        if signed:
            return "it has a signature that is not believed, and the catalog holds no digest of it"
        return "" if self._unproven else _OTHERWISE

    def digest(self) -> str:
        """SHA-256 of the true document, "" where nobody knows it."""
        return ""

    def disagreement(self, document: bytes) -> str:
        """What it tells otherwise than the catalog, or than what lies there; "" where nothing."""
        raise NotImplementedError


class _Backup(_Judge):
    def __init__(self, destination: SignedDestination, unproven: bool, record: BackupRecord | None,
                 presence: Presence, unsealer: Unsealer | None) -> None:
        super().__init__(destination, unproven)
        self._record, self._presence, self._unsealer = record, presence, unsealer

    def digest(self) -> str:
        return self._record.manifest if self._record is not None else ""

    def disagreement(self, document: bytes) -> str:
        header = decode_header(document)
        record = self._record
        if record is None:
            return "the catalog knows no such backup"
        if _told(header) != _known(record):
            return "it tells other sizes, times or positions than the catalog"
        missing = [item.name for item in header.objects if not self._presence.holds(item)]
        if missing:
            return f"{len(missing)} of its {len(header.objects)} objects are missing, damaged, or of another size"
        folder = layout.backup_folder(header.server, header.backup_id)
        for item in header.side_files:
            problem = objects.problem(self._destination, folder + item.name, item)
            if problem:
                return f"its {item.name} {problem}"
        if self._unsealer is None:
            return "the catalog holds no digest of it, and no private key is at hand to look into its body"
        facts = load_body(self._destination, header, self._unsealer).facts
        same = (facts.parent, facts.position, str(facts.server.flavour), str(facts.server.version),
                str(facts.tool.version)) == (
            record.parent, record.position, record.flavour, record.server_version, record.tool_version)
        return "" if same else "its body tells another parent, position or version than the catalog"


def _told(header: Header) -> tuple[object, ...]:
    return (header.backup_id, header.server, header.parent, header.kind, header.started_at, header.finished_at,
            header.stats, header.from_lsn, header.to_lsn, header.server_uuid, header.reason, header.table_set,
            header.tables_missing)


def _known(record: BackupRecord) -> tuple[object, ...]:
    return (record.id, record.server, record.parent, str(record.kind), record.started_at, record.finished_at,
            record.stats, record.from_lsn, record.to_lsn, record.server_uuid, record.reason, record.table_set,
            record.tables_missing)


class _Branch(_Judge):
    def __init__(self, destination: SignedDestination, unproven: bool, key: str, known: Branch | None) -> None:
        super().__init__(destination, unproven)
        self._key, self._known = key, known

    def disagreement(self, document: bytes) -> str:
        found = decode_branch(document, where=self._key)
        return "" if found == self._known else "it is not the branch that the catalog knows"


class _Segment(_Judge):
    def __init__(self, destination: SignedDestination, unproven: bool, wiring: Wiring, server: str,
                 key: SegmentKey) -> None:
        super().__init__(destination, unproven)
        self._wiring, self._server, self._key = wiring, server, key

    def disagreement(self, document: bytes) -> str:
        key = self._key
        found = decode_segment(document, where=layout.segment_key(self._server, key))
        known = [record.segment for record in self._wiring.catalog.binlogs.segments(
            self._server, key.branch, from_place=(key.number, key.start), to_place=(key.number, key.end))
            if record.key == key]
        if [found.segment] != known:
            return "it is not what the catalog knows"
        wrong = segments.problems(self._destination, found)
        return "; ".join(f"{name} {problem}" for name, problem in wrong.items())

"""Vouching for documents of record that were stored before they had to be signed, or that a key signed which counts no
longer.

What proves a manifest is its digest in the catalog, which the run that made the backup wrote there. A row that was made
from what a destination told (a rebuild, an adoption) proves nothing about that destination, and of binary logs and
branches the catalog holds no digest: those are signed only for somebody who says so, or where the former key vouches
for them, and only where they agree with all that the catalog knows and with what lies there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from backupd.app.context.trust import undecided, wanting
from backupd.app.context.wiring import Wiring
from backupd.app.metacopies.copy_check import COPY_NOTE, CopyNote
from backupd.model.backup_record import EVERY_SERVER, BackupRecord
from backupd.model.binlog import Branch, SegmentKey
from backupd.model.errors import BackupdError, NotFoundError, ObjectMissingError, RefusedError, TamperedError
from backupd.model.manifest import Header, decode_header
from backupd.transfer import log_segments
from backupd.transfer.dedup import Presence
from backupd.transfer.holds_and_locks import each
from backupd.transfer.records.authenticity import SignedDestination, Signing, problem_of
from backupd.transfer.records.manifests import backup_ids, load_body
from backupd.transfer.records.sealing import Unsealer
from backupd.transfer.records.segment_documents import decode_branch, decode_segment
from storage import layout, objects

_BATCH = 256
_IN_BOTH = (
    "server",
    "parent",
    "started_at",
    "finished_at",
    "stats",
    "from_lsn",
    "to_lsn",
    "server_uuid",
    "reason",
    "table_set",
    "tables_missing",
)
"""What a manifest says of its backup, and its row in the catalog, too."""
_OTHERWISE = "it agrees with the catalog, which holds no digest of it: with --unproven it is signed all the same"
_FOUND = (
    "the catalog took it in from a destination, where whoever has the former key could have put it: with "
    "--unproven it is signed all the same"
)


@dataclass(frozen=True, slots=True)
class Vouched:
    """``signed``: how many documents were; ``left``: those that were not, each with why."""

    signed: int
    left: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As `catalog sign --json` gives it."""
        return {"signed": self.signed, "left": list(self.left)}


def vouch(wiring: Wiring, name: str, *, unproven: bool = False) -> Vouched:
    """Sign what is unsigned at destination ``name`` and is, byte by byte, what the runs of this catalog stored; for
    backups that are older than `signed: true`. ``unproven``: also what merely agrees with all that the catalog
    knows.

    Raises RefusedError where no policy wants anything signed, KeyUnusableError, DestinationError.
    """
    return _vouch(wiring, name, _Allowed(unproven))


def vouch_anew(wiring: Wiring, name: str, former: Signing, *, unproven: bool = False) -> Vouched:
    """As ``vouch``, of all that the signing key of ``wiring`` does not vouch for, with copies and proofs; ``former``:
    believes the key that signed until now. Signatures that are there stay beside the new ones, so that whoever still
    goes by that key believes all of it, too."""
    return _vouch(wiring, name, _Allowed(unproven, former))


@dataclass(frozen=True, slots=True)
class _Allowed:
    """What may be signed that the catalog has no digest of: see ``vouch`` and ``vouch_anew``."""

    unproven: bool
    former: Signing | None = None

    def why_not(self, document: bytes, signature: bytes | None, *, found: bool = False) -> str:
        """Of what agrees with the catalog. ``found``: because the catalog has it from a destination."""
        if self.former is not None and signature is not None:
            if problem := problem_of(self.former, document, signature):
                return f"{problem}, and the catalog holds no digest of it"
            return _FOUND if found and not self.unproven else ""
        if signature is not None:
            return "it has a signature that is not believed, and the catalog holds no digest of it"
        return "" if self.unproven else _OTHERWISE


def _vouch(wiring: Wiring, name: str, allowed: _Allowed) -> Vouched:
    destination = wiring.destination(name)
    if not isinstance(destination, SignedDestination):
        raise RefusedError(
            "no policy says `signed: true`, so nothing has to be",
            hint="set it in the policy of a server first, or name a signing key: backupd keys make-signing",
        )
    left = [
        f"{name}: nothing of {server} is signed: its policy cannot be used; correct it first"
        for server in sorted(undecided(wiring.settings))
    ]

    def look(found: tuple[str, _Judge]) -> str | None:
        return _look(destination, *found, keeps=allowed.former is not None)

    count = 0
    for batch in _in_batches(_documents(wiring, destination, allowed)):
        told = each(look, batch)
        count += told.count("")
        left += [f"{name}: {key}: {why}" for (key, _judge), why in zip(batch, told, strict=True) if why]
    return Vouched(count, tuple(left))


def _look(destination: SignedDestination, key: str, judge: _Judge, *, keeps: bool) -> str | None:
    """Sign the object ``key`` where that may be; why it may not be, "" where it was, None where nothing is to do.
    ``keeps``: existing signatures stay."""
    try:
        document = destination.as_it_lies(key)
        doubt = destination.doubt(key, document)
    except ObjectMissingError:
        return None  # removed while we look
    except TamperedError as error:
        return (
            "it is not what the run stored that made this backup, or what was found there when it was taken in: "
            f"{error.detail}"
        )
    if not doubt:
        return None
    signature = destination.signature(key)
    try:
        why = judge.why_not(document, signature)
    except BackupdError as error:
        return str(error.detail or error.message)
    if not why:
        destination.sign(key, document, beside=signature if keeps else None)
    return why


def _documents(wiring: Wiring, destination: SignedDestination, allowed: _Allowed) -> Iterator[tuple[str, _Judge]]:
    servers = sorted(wanting(wiring.settings))
    for server in servers:
        yield from _Server(wiring, destination, server, allowed).documents()
    if allowed.former is not None:  # else what lacks a signature is put anew
        stored = {
            **CopyNote(wiring.settings.spool / COPY_NOTE).stored(destination.name),
            **wiring.catalog.deposits.at(destination.name),
        }
        for key, digest in sorted(stored.items()):
            if layout.signed_of(key) in (EVERY_SERVER, *servers):
                yield key, _Stored(destination, allowed, digest)


def _in_batches(found: Iterable[tuple[str, _Judge]]) -> Iterator[list[tuple[str, _Judge]]]:
    left = iter(found)
    while batch := list(islice(left, _BATCH)):
        yield batch


class _Server:
    """The documents of record of one server at a destination."""

    def __init__(self, wiring: Wiring, destination: SignedDestination, server: str, allowed: _Allowed) -> None:
        self._wiring, self._destination, self._server, self._allowed = wiring, destination, server, allowed

    def documents(self) -> Iterator[tuple[str, _Judge]]:
        """Each with what judges it."""
        server, destination, binlogs = self._server, self._destination, self._wiring.catalog.binlogs
        unsealer = self._wiring.unsealer() if self._wiring.settings.restore is not None else None
        presence: Presence | None = None
        for _server, backup_id in backup_ids(destination, server):
            presence = presence or Presence(destination)
            yield (
                layout.manifest_key(server, backup_id),
                _Backup(destination, self._allowed, self._record(backup_id), presence, unsealer),
            )
        branches = {branch.id: branch for branch in binlogs.branches(server)}
        for info in list(destination.list(layout.binlogs_folder(server))):
            owner = layout.branch_of(info.key)
            if owner is not None:
                yield info.key, _Branch(destination, self._allowed, info.key, branches.get(owner[1]))
        for _server, key in log_segments.keys(destination, server):
            yield layout.segment_key(server, key), _Segment(destination, self._allowed, self._wiring, server, key)

    def _record(self, backup_id: str) -> BackupRecord | None:
        try:
            return self._wiring.catalog.backups.get(backup_id)
        except NotFoundError:
            return None


class _Judge:
    """May a document be signed? ``altered``: what is said of one that is not what its digest says."""

    altered = "it is not what was put there"
    from_destination = False

    def __init__(self, destination: SignedDestination, allowed: _Allowed) -> None:
        self._destination, self._allowed = destination, allowed

    def why_not(self, document: bytes, signature: bytes | None) -> str:
        """ "" where it may. ``signature``: one that is not believed. Raises DamagedError."""
        digest = self.digest()
        if digest:
            same = hashlib.sha256(document).hexdigest() == digest
            return "" if same else self.altered
        problem = self.disagreement(document)
        return problem or self._allowed.why_not(document, signature, found=self.from_destination)

    def digest(self) -> str:
        """SHA-256 of the true document, "" where it is not known."""
        return ""

    def disagreement(self, document: bytes) -> str:
        """What it says otherwise than the catalog, or than what is stored; "" where nothing."""
        raise NotImplementedError


class _Backup(_Judge):
    altered = "it is not what the run stored that made this backup"
    from_destination = True

    def __init__(
        self,
        destination: SignedDestination,
        allowed: _Allowed,
        record: BackupRecord | None,
        presence: Presence,
        unsealer: Unsealer | None,
    ) -> None:
        super().__init__(destination, allowed)
        self._record, self._presence, self._unsealer = record, presence, unsealer

    def digest(self) -> str:
        return self._record.manifest if self._record is not None else ""

    def disagreement(self, document: bytes) -> str:
        header = decode_header(document)
        record = self._record
        if record is None:
            return "the catalog knows no such backup"
        if not _agree(header, record):
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
            return "the catalog holds no digest of it, and no private key is available to read its body"
        facts = load_body(self._destination, header, self._unsealer).facts
        same = (
            facts.parent,
            facts.position,
            str(facts.server.flavour),
            str(facts.server.version),
            str(facts.tool.version),
        ) == (record.parent, record.position, record.flavour, record.server_version, record.tool_version)
        return "" if same else "its body tells another parent, position or version than the catalog"


def _agree(header: Header, record: BackupRecord) -> bool:
    """Does a manifest say the same as the row of its backup?"""
    return (header.backup_id, header.kind) == (record.id, str(record.kind)) and all(
        getattr(header, name) == getattr(record, name) for name in _IN_BOTH
    )


class _Stored(_Judge):
    """A copy or a proof, of which it was noted what was put."""

    def __init__(self, destination: SignedDestination, allowed: _Allowed, digest: str) -> None:
        super().__init__(destination, allowed)
        self._noted = digest

    def digest(self) -> str:
        return self._noted


class _Branch(_Judge):
    def __init__(self, destination: SignedDestination, allowed: _Allowed, key: str, known: Branch | None) -> None:
        super().__init__(destination, allowed)
        self._key, self._known = key, known

    def disagreement(self, document: bytes) -> str:
        found = decode_branch(document, where=self._key)
        return "" if found == self._known else "it is not the branch that the catalog knows"


class _Segment(_Judge):
    def __init__(
        self, destination: SignedDestination, allowed: _Allowed, wiring: Wiring, server: str, key: SegmentKey
    ) -> None:
        super().__init__(destination, allowed)
        self._wiring, self._server, self._key = wiring, server, key

    def disagreement(self, document: bytes) -> str:
        key = self._key
        found = decode_segment(document, where=layout.segment_key(self._server, key))
        known = [
            record.segment
            for record in self._wiring.catalog.binlogs.segments(
                self._server, key.branch, from_place=(key.number, key.start), to_place=(key.number, key.end)
            )
            if record.key == key
        ]
        if [found.segment] != known:
            return "it is not what the catalog knows"
        wrong = log_segments.problems(self._destination, found)
        return "; ".join(f"{name} {problem}" for name, problem in wrong.items())

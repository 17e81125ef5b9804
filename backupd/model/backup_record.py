"""A backup as the catalog and every interface show it.

What keeps backups: an operator's hold or pause on a server, and what this installation itself knows of a mark of
deletion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.server_facts import NodeFacts, Position
from backupd.model.text import format_time


class BackupKind(StrEnum):
    PHYSICAL_FULL = "physical-full"
    PHYSICAL_INCREMENTAL = "physical-incremental"
    LOGICAL = "logical"

    @property
    def word(self) -> str:
        """As commands and requests name it: ``full``, ``incremental``, ``logical``."""
        return self.removeprefix("physical-")

    @classmethod
    def of(cls, word: str) -> BackupKind:
        """The kind with this word. Raises KeyError."""
        return {kind.word: kind for kind in cls}[word]


INCONSISTENT = "inconsistent-source"
ERRANT = "errant-transactions"
_FLAGS = {
    INCONSISTENT: "was taken of a replica whose tables differed from its source's",
    ERRANT: "was taken of a replica that had executed transactions which its source had not",
}


class BackupState(StrEnum):
    """Only committed backups have a row, so: usable, found damaged, or on its way out."""

    COMPLETE = "complete"
    DAMAGED = "damaged"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Copy(Document):
    """One destination's copy of a backup."""

    destination: str
    state: str
    """``complete``, ``damaged``, or ``deleted`` (marked there, not yet swept)."""
    stored_at: datetime
    verified_at: datetime | None = None
    """When it was last read again and found good."""


@dataclass(frozen=True, slots=True)
class Stats(Document):
    """Sizes in bytes: of the source's plaintext, of all objects referenced, of the objects that were new."""

    bytes_source: int
    bytes_stored: int
    bytes_new: int
    files: int
    files_linked: int
    """Files that were the same as in earlier backups."""


@dataclass(frozen=True, slots=True)
class Member(Document):
    """The member of a group that a backup was taken from."""

    name: str
    reason: str
    """Why it was taken, and why others were not."""
    log: Position | None = None
    """The position of the backup in the binary log of the group, where that is streamed from another member; None where
    it is the position of the backup itself, or is not known."""
    log_server: str = ""
    """The server_uuid of the member that the binary log is streamed from."""


@dataclass(frozen=True, slots=True)
class BackupRecord(Document):
    """A backup. Times are UTC, sizes bytes."""

    id: str
    server: str
    kind: BackupKind
    state: BackupState
    parent: str | None
    """What an increment builds on."""
    started_at: datetime
    finished_at: datetime
    stats: Stats = field(metadata=json_key(inline=True))
    position: Position
    flavour: str
    server_version: str
    tool_version: str
    pinned: bool = False
    """No rule deletes it."""
    warnings: tuple[str, ...] = ()
    from_lsn: int = 0
    """Log sequence number of the tool, 0 where it has none; an increment begins where its parent ends."""
    to_lsn: int = 0
    server_uuid: str = field(default="", metadata=HIDDEN)
    """Of the source."""
    reason: str = ""
    """Why this kind was taken when another one was due."""
    table_set: str = field(default="", metadata=json_key("set"))
    """Of a logical backup: the set of tables of the policy."""
    tables_missing: int = 0
    """Of a logical backup: tables that could not be dumped. Of a physical one: tables that its tool leaves out and no
    logical backup takes, or that it lost because they were changed meanwhile."""
    manifest: str = field(default="", metadata=HIDDEN)
    """SHA-256 of the manifest, as the run that made the backup stored it; "" in rows that say what somebody found at a
    destination."""
    missing: tuple[str, ...] | None = field(default=None, metadata=HIDDEN)
    """Of a physical backup: tables (as ``TableName.shown``) of which a file that they need is not in it; None where
    nobody looked."""
    doubtful: str = ""
    """Reason why the backup, or one that builds on it, may not be restorable; normally empty. Run a test restore to
    find out."""
    protected: bool = False
    """It has as many verified copies as the policy wants."""  # filled in by whoever shows the record: no row says so
    apart: bool = False
    """It is of another server, which answered under this name and which nobody has accepted: no rule, no proof and no
    target but its own id means it."""
    found: str = field(default="", metadata=HIDDEN)
    """SHA-256 of the manifest as it was found at a destination, of a backup that no run of this catalog made."""
    foreign: bool = False
    """It is at a destination, but was neither taken nor adopted by this installation. Retention and test restores
    ignore it; only ``backup:ID`` restores it, and nothing removes it."""
    node: NodeFacts | None = field(default=None, metadata=json_key("galera", later=True))
    """Of a physical backup of a Galera node: its position in the cluster, and the load that it made; null otherwise."""
    member: Member | None = None
    """Of a group: the member that it was taken from."""
    flags: tuple[str, ...] = field(default=(), metadata=json_key(later=True))
    """What was known of the server when it was taken: ``inconsistent-source``, its tables differed from those of the
    server that it replicates from; ``errant-transactions``, it had executed transactions that its source had not."""
    copies: tuple[Copy, ...] = ()
    upstream: Position | None = None
    """Of a replica that follows one source: the position of that source. ``position`` is the server's own."""

    @property
    def start(self) -> Position:
        """Where a replay onto it begins, in the binary log that is archived."""
        return self.member.log if self.member is not None and self.member.log is not None else self.position

    @property
    def log_uuid(self) -> str:
        """The server_uuid of the server in whose binary log ``start`` is."""
        return self.member.log_server if self.member is not None and self.member.log is not None else self.server_uuid

    @property
    def not_dumped(self) -> int:
        """Tables that another backup may well have. What a physical tool leaves out is in no other one, either."""
        return self.tables_missing if self.kind is BackupKind.LOGICAL else len(self.missing or ())

    @property
    @computed("partial", after="tables_missing")
    def is_partial(self) -> bool:
        """It lacks tables that other backups of its kind have."""
        return self.not_dumped > 0

    @property
    @computed("missing", after="partial")
    def known_missing(self) -> tuple[str, ...]:
        """Of a physical backup: tables of which files are not in it."""
        return self.missing or ()

    @property
    def flag_words(self) -> tuple[str, ...]:
        """What a plan says of its flags."""
        return tuple(f"{self.id} {_FLAGS.get(flag, f'is marked {flag}')} ({flag})" for flag in self.flags)

    @property
    def whole_at(self) -> frozenset[str]:
        """The destinations of its undamaged copies."""
        return frozenset(copy.destination for copy in self.copies if copy.state == BackupState.COMPLETE)

    def state_at(self, destination: str) -> str:
        """Of the copy at one destination: complete, damaged or deleted; empty where there is none."""
        return next((copy.state for copy in self.copies if copy.destination == destination), "")


def partial_words(backup_id: str, names: Iterable[str]) -> str:
    """What a plan, and the restore that follows it, say of a physical backup without these tables."""
    listed = sorted(names)
    return f"{backup_id} is partial: {len(listed)} tables are not in it and do not come back: {', '.join(listed)}"


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A backup that others build on. ``verified``: the destinations that hold a complete copy which was read again."""

    server: str
    id: str
    kind: str
    parent: str | None
    verified: frozenset[str]

    @classmethod
    def of(cls, record: BackupRecord) -> Ancestor:
        """What its record says."""
        verified = frozenset(
            copy.destination
            for copy in record.copies
            if copy.state == BackupState.COMPLETE and copy.verified_at is not None
        )
        return cls(record.server, record.id, record.kind, record.parent, verified)


@dataclass(frozen=True, slots=True)
class BackupDetail(Document):
    """A backup's record with what its manifest adds."""

    record: BackupRecord = field(metadata=json_key(inline=True))
    objects: int
    """Stored objects that it consists of."""
    recipients: Sequence[str]
    """Fingerprints of the keys that open it."""
    codec: str
    bound: bool = True
    """What it says in the clear (server, kind, times, sizes) is compared with what was sealed. False in backups of
    format 1: nothing in them shows that it was changed."""
    runbook_sha256: str = ""
    """Of RUNBOOK.md beside it: what is followed by hand is compared with it."""


EVERY_SERVER = "*"


class HoldKind(StrEnum):
    """``hold``: nothing of the server is deleted. ``pause``: no job of it starts by schedule."""

    HOLD = "hold"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Hold(Document):
    """``server`` may be ``*``: every server. ``set_by``: the person."""

    server: str
    kind: HoldKind
    reason: str
    set_by: str = field(metadata=json_key("by"))
    since: datetime

    @property
    def text(self) -> str:
        """``audit until March (held by anna since 2026-11-21T12:00:00Z)``"""
        word = "held" if self.kind is HoldKind.HOLD else "paused"
        whose = "every server is " if self.server == EVERY_SERVER else ""
        return f"{self.reason} ({whose}{word} by {self.set_by} since {format_time(self.since)})"


@dataclass(frozen=True, slots=True)
class Sighting:
    """``since``: when this installation put the mark, or first saw somebody else's, by its own clock. ``ours``: its own
    rules, or a person here, want the backup gone; ``confirmed``: a person here does, so no deletion limit holds it
    back."""

    since: datetime
    ours: bool = False
    confirmed: bool = False

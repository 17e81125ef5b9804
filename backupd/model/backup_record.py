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
from backupd.model.manifest import Stats
from backupd.model.server_facts import Position
from backupd.model.text import format_time


class BackupKind(StrEnum):
    PHYSICAL_FULL = "physical-full"
    PHYSICAL_INCREMENTAL = "physical-incremental"
    LOGICAL = "logical"


class BackupState(StrEnum):
    """Only committed backups have a row, so: usable, found damaged, or on its way out."""

    COMPLETE = "complete"
    DAMAGED = "damaged"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Copy(Document):
    """One destination's copy of a backup. ``state``: complete, damaged, or deleted (marked there, not yet swept)."""

    destination: str
    state: str
    stored_at: datetime
    verified_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class BackupRecord(Document):
    """The JSON shape of a backup (contract): see ``as_json``. Times are UTC, sizes bytes.

    ``from_lsn`` and ``to_lsn``: log sequence numbers of the tool, 0 where it has none; an increment begins where its
    parent ends. ``server_uuid``: of the source. ``reason``: why this kind was taken when another one was due. Of a
    logical one: ``table_set`` of the policy, and ``tables_missing``, how many tables of it could not be dumped; of a
    physical one: how many its tool leaves out that the policy puts into no logical one either.
    ``manifest``: SHA-256 of the manifest, as the run that made the backup stored it; "" in rows that tell what somebody
    found at a destination. ``protected``: are there as many verified copies as the policy wants? No row of the catalog
    says so: whoever shows the record fills it in. ``apart``: it is of another server, which answered under this name
    and which nobody has accepted, so no rule, no proof and no target but its own id means it. ``missing``: of a
    physical backup, tables (as ``TableName.shown``) of which a file that they need is not in it; None where nobody
    looked. ``doubtful``: why nobody should count on a restore of it, or of what builds on it, before a test restore has
    shown that it works; empty as a rule. ``found``: SHA-256 of the manifest as it was found at a destination, of a
    backup that no run of this catalog made. ``foreign``: nothing shows that this installation took it and nobody has
    adopted it, so no rule, no proof and no target but its own id means it, and nothing removes it.
    """

    id: str
    server: str
    kind: BackupKind
    state: BackupState
    parent: str | None
    started_at: datetime
    finished_at: datetime
    stats: Stats = field(metadata=json_key(inline=True))
    position: Position
    flavour: str
    server_version: str
    tool_version: str
    pinned: bool = False
    warnings: tuple[str, ...] = ()
    from_lsn: int = 0
    to_lsn: int = 0
    server_uuid: str = field(default="", metadata=HIDDEN)
    reason: str = ""
    table_set: str = field(default="", metadata=json_key("set"))
    tables_missing: int = 0
    manifest: str = field(default="", metadata=HIDDEN)
    missing: tuple[str, ...] | None = field(default=None, metadata=HIDDEN)
    doubtful: str = ""
    protected: bool = False
    apart: bool = False
    found: str = field(default="", metadata=HIDDEN)
    foreign: bool = False
    copies: tuple[Copy, ...] = ()

    @property
    def not_dumped(self) -> int:
        """Tables that another backup may well have. What a physical tool leaves out is in no other one, either."""
        return self.tables_missing if self.kind is BackupKind.LOGICAL else len(self.missing or ())

    @property
    @computed("partial", after="tables_missing")
    def is_partial(self) -> bool:
        """Does it lack tables that others of its kind have?"""
        return self.not_dumped > 0

    @property
    @computed("missing", after="partial")
    def known_missing(self) -> tuple[str, ...]:
        """``missing``, where nobody looked: none."""
        return self.missing or ()

    def state_at(self, destination: str) -> str:
        """Of the copy at one destination: complete, damaged or deleted; empty where there is none."""
        return next((copy.state for copy in self.copies if copy.destination == destination), "")


def partial_words(backup_id: str, names: Iterable[str]) -> str:
    """What a plan, and the restore that follows it, say of a physical backup without these tables."""
    listed = sorted(names)
    return f"{backup_id} is partial: {len(listed)} tables are not in it and do not come back: {', '.join(listed)}"


@dataclass(frozen=True, slots=True)
class BackupDetail(Document):
    """A backup's record with what its manifest adds: how many objects, for which keys, whether what it tells in the
    clear is bound to what is sealed, and the SHA-256 of its runbook."""

    record: BackupRecord = field(metadata=json_key(inline=True))
    objects: int
    recipients: Sequence[str]
    codec: str
    bound: bool = True
    runbook_sha256: str = ""


EVERY_SERVER = "*"


class HoldKind(StrEnum):
    """``hold``: nothing of the server is deleted. ``pause``: no job of it starts by itself."""

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

"""What a test restore leaves behind, and what it compares with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from backupd.model.document import Document, computed, json_key
from backupd.model.server_facts import Position


@dataclass(frozen=True, slots=True)
class Phase(Document):
    """One timed step: ``fetched``, ``prepared``, ``restored``, ``started``, ``rolled_forward``, ``verified``."""

    name: str
    seconds: float = field(metadata=json_key(digits=3))
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Check(Document):
    """One question asked of the restored data. ``outcome``: ``passed``, ``failed`` or ``skipped`` (with why)."""

    name: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Witness(Document):
    """Table checksums read on the source in one consistent snapshot.

    ``position`` is that snapshot's position in the binary log. ``checksums`` maps ``schema.table`` (each name quoted
    with backticks, inner backticks doubled) to the value of CHECKSUM TABLE; tables that no snapshot covers
    (non-transactional engines) are in ``uncovered`` with the reason. ``objects`` counts views, triggers, routines,
    events and users.

    ``definitions``: kind (``table``, ``view``, ``trigger``, ``procedure`` ...) to name (quoted as above) to a digest of
    its definition, "" where only its name is known, of all that was there at the snapshot for certain; None in
    witnesses that are older than this. ``version``: of the server that printed the definitions. ``rows``: quoted table
    name to its number of rows, of tables that no snapshot covers and that were counted while nothing could change.
    """

    server: str
    taken_at: datetime
    position: Position
    checksums: Mapping[str, int]
    uncovered: Mapping[str, str]
    objects: Mapping[str, int]
    seconds: float = field(metadata=json_key(digits=3))
    definitions: Mapping[str, Mapping[str, str]] | None = field(default=None, metadata=json_key(later=True))
    version: str = field(default="", metadata=json_key(later=True))
    rows: Mapping[str, int] = field(default_factory=dict, metadata=json_key(later=True))

    def as_json(self) -> dict[str, Any]:
        document = Document.as_json(self)
        if self.definitions is None:  # without them, the document is the one that earlier versions wrote
            for name in ("definitions", "version", "rows"):
                del document[name]
        return document


@dataclass(frozen=True, slots=True)
class Tally:
    """What a test restore looked at. ``equal``: tables whose rows were compared with the witness and are the same;
    ``present``: tables that are there, defined as they were as far as that is known, of whose rows nothing is known;
    ``unseen``: tables and other objects of the witness that could not be looked at."""

    equal: int = 0
    present: int = 0
    unseen: int = 0

    def __str__(self) -> str:
        return f"tables equal: {self.equal}, present: {self.present}, not looked at: {self.unseen}"


PROVED, RESTORED, FAILED, UNDECIDED, INEXACT = "proved", "restored", "failed", "undecided", "inexact"
WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Proof(Document):
    """The record of one test restore."""

    id: str
    server: str
    backup_id: str = field(metadata=json_key("backup"))
    target: str
    outcome: str
    """``proved``, ``restored`` (no witness to compare, or not with all of it), ``failed`` (the data is bad),
    ``undecided`` (something else kept the test from its end, which says nothing about the data), ``inexact`` (the
    replay that was tested may give other rows than the source had), or ``withdrawn``."""
    started_at: datetime
    finished_at: datetime
    phases: tuple[Phase, ...]
    checks: tuple[Check, ...]
    tables_compared: int
    """Tables whose rows are equal to the witness."""
    error: str = ""
    warnings: tuple[str, ...] = field(default=(), metadata=json_key(later=True))
    """Of its plan, and of the restore."""
    older: bool = field(default=False, metadata=json_key(later=True))
    """The target was the newest moment, and something later than what was restored is known to exist, or may: never
    ``proved``, and it shows nothing of the server's present history."""
    tables_present: int = field(default=0, metadata=json_key(later=True))
    """Tables that are there, defined as at the source, of whose rows nothing is known."""
    not_looked_at: int = field(default=0, metadata=json_key(later=True))
    """Tables and other objects of the witness that could not be looked at; more than 0 is never ``proved``."""
    withdrawn: str = field(default="", metadata=json_key(later=True))
    """Why a good proof does not count any more; empty as a rule."""
    flags: tuple[str, ...] = field(default=(), metadata=json_key(later=True))
    """Those of the backups that it restored (``inconsistent-source``, ``errant-transactions``): what was proved is a
    replica's data, which was not its source's."""

    @property
    def is_good(self) -> bool:
        """Was the data found good?"""
        return self.outcome in (PROVED, RESTORED)

    @property
    def is_current(self) -> bool:
        """Was it found good, and was it as new as the target asked for?"""
        return self.is_good and not self.older

    @property
    def tally(self) -> Tally:
        return Tally(self.tables_compared, self.tables_present, self.not_looked_at)

    @property
    @computed(after="finished_at", digits=3)
    def seconds(self) -> float:
        return (self.finished_at - self.started_at).total_seconds()

"""What the solver says: of every backup whether it stays, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from backupd.model.clock import format_time
from backupd.retention.view import BinlogRun, Stored

BYTES_NOTE = (
    "bytes are what these backups name; objects that others share stay, so what becomes free is less, and "
    "is known only once they are swept"
)


class Ground(NamedTuple):
    """Why a backup stays. ``rule`` is a stable word: a rule of the policy, ``pinned``, ``parent``, ``read``,
    ``building``, ``newest``, ``proved``, ``remains``, ``future``, ``foreign``, ``awaited``, ``hold``, ``minimum`` or
    ``everything``."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True)
class Decision:
    """``grounds`` is empty for a backup that goes; ``reasons`` are for people in either case."""

    backup: Stored
    grounds: tuple[Ground, ...]
    explain: Callable[[Stored], tuple[str, ...]] = field(compare=False, repr=False)

    @property
    def keep(self) -> bool:
        return bool(self.grounds)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every rule that keeps it; or, for one that goes, of every rule why it does not. Made when asked for."""
        return tuple(ground.text for ground in self.grounds) or self.explain(self.backup)

    def as_json(self) -> dict[str, Any]:
        backup = self.backup
        return {
            "id": backup.id,
            "kind": str(backup.kind),
            "parent": backup.parent,
            "finished_at": format_time(backup.finished_at),
            "bytes": backup.bytes,
            "marked": backup.marked,
            "keep": self.keep,
            "rules": [ground.rule for ground in self.grounds],
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, slots=True)
class RunDecision:
    run: BinlogRun
    keep: bool
    reason: str

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.run.name,
            "from": format_time(self.run.first_at),
            "to": format_time(self.run.last_at),
            "bytes": self.run.bytes,
            "keep": self.keep,
            "reasons": [self.reason],
        }


@dataclass(frozen=True, slots=True)
class Recoverable:
    """Every moment from ``since`` to ``until`` can be restored, beginning with ``base``; one moment where both are
    the same."""

    since: datetime
    until: datetime
    base: str

    def as_json(self) -> dict[str, Any]:
        return {"from": format_time(self.since), "to": format_time(self.until), "base": self.base}


@dataclass(frozen=True, slots=True)
class Decisions:
    """For one server at one destination, backups newest first.

    ``stopped``: ids that the rules would expire and that only a hold, or being the newest proved chain, keeps.
    ``recoverable``: what the kept ones allow, within the recovery window where there is one.
    """

    server: str
    destination: str
    at: datetime
    backups: tuple[Decision, ...]
    runs: tuple[RunDecision, ...] = ()
    recoverable: tuple[Recoverable, ...] = ()
    stopped: tuple[str, ...] = ()
    hold: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[Decision, ...]:
        return tuple(decision for decision in self.backups if decision.keep)

    @property
    def expired(self) -> tuple[Decision, ...]:
        """Those to be marked now: those that carry a mark already are left out."""
        return tuple(decision for decision in self.backups if not decision.keep and not decision.backup.marked)

    @property
    def bytes_expired(self) -> int:
        return sum(decision.backup.bytes for decision in self.expired)

    def as_json(self) -> dict[str, Any]:
        return {
            "server": self.server,
            "destination": self.destination,
            "at": format_time(self.at),
            "hold": self.hold or None,
            "keep": len(self.kept),
            "expire": len(self.expired),
            "bytes_expire": self.bytes_expired,
            "note": BYTES_NOTE,
            "backups": [decision.as_json() for decision in self.backups],
            "binlogs": [run.as_json() for run in self.runs],
            "recoverable": [span.as_json() for span in self.recoverable],
            "stopped": list(self.stopped),
            "warnings": list(self.warnings),
        }

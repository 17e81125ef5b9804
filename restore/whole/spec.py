"""What a restore is told before it begins, and what it tells when it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from backupd.model.binlog import ReplaySpec
from backupd.model.proof import Check, Phase, Witness
from backupd.model.server_facts import Position
from restore.datadir.checks import FAILED
from restore.datadir.resources import DEFAULT_CAP
from restore.datadir.start import Started
from restore.replay.roll_forward import RolledForward


@dataclass(frozen=True, slots=True)
class RestoreSpec:
    """Every decision about one restore, taken before it begins.

    ``target``: as it was asked for; ``chain``: backup ids, full first; ``replay``: the binary logs that are replayed
    onto it, None for the backup as it is. ``owner``: OS user of the server. ``start``: start a server on the result
    and leave it running, deaf and mute; ``replica``: keep the replication settings of the source (mode ``replica``).
    ``checks`` (the policy's statements, about ``moment``) and ``witness`` are for a server that is started.
    ``workers`` 0: as many as this machine can use. ``memory_cap`` in bytes. ``programs`` and ``templates``: see
    ``rollforward.Means``. ``key_files``: of the configuration.
    """

    restore_id: str
    server: str
    target: str
    chain: tuple[str, ...]
    moment: datetime
    datadir: Path
    owner: str
    replay: ReplaySpec | None = None
    start: bool = False
    replica: bool = False
    checks: tuple[str, ...] = ()
    witness: Witness | None = None
    workers: int = 0
    templates: Path | None = None
    memory_cap: int = DEFAULT_CAP
    programs: Mapping[str, str] = field(default_factory=dict)
    key_files: Sequence[Path] = ()


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """``position``: where the copy stands; ``replay``: what was replayed onto it, None without; ``started``: the server
    that was left running. ``inexact``: it may hold other rows than the source had."""

    restore_id: str
    server: str
    backup_id: str
    target: str
    datadir: Path
    position: Position
    phases: tuple[Phase, ...]
    checks: tuple[Check, ...] = ()
    tables_compared: int = 0
    warnings: tuple[str, ...] = ()
    started: Started | None = None
    replay: RolledForward | None = None
    inexact: bool = False

    @property
    def is_good(self) -> bool:
        """Did no check of the started server fail?"""
        return not any(check.outcome == FAILED for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The JSON of ``backupd restore``; "seconds" is the sum of the phases."""
        return {
            "id": self.restore_id,
            "server": self.server,
            "backup": self.backup_id,
            "target": self.target,
            "outcome": "inexact" if self.inexact else "restored",
            "datadir": str(self.datadir),
            "position": self.position.as_json(),
            "replay": self.replay.as_json() if self.replay else None,
            "phases": [phase.as_json() for phase in self.phases],
            "seconds": round(sum(phase.seconds for phase in self.phases), 3),
            "checks": [check.as_json() for check in self.checks],
            "tables_compared": self.tables_compared,
            "warnings": list(self.warnings),
            "started": {"socket": str(self.started.socket), "pid": self.started.pid} if self.started else None,
        }

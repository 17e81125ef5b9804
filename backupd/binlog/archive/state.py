"""What the archive writes down in the spool's folder: how files were cut, and what each destination holds of them.

It is only about files that are in the spool. Where it is lost, the files are cut anew from their beginning, and what
destinations hold of them already is found there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from backupd.binlog.archive.checkpoint import Cut, LogFile
from backupd.engine.binlog.scan import ScanContext
from backupd.model.binlog import Ending, SegmentKey
from backupd.model.text import format_time, parse_time
from backupd.process.folders import write_whole

_FORMAT = "backupd-archive/1"
_NAME = "archive.json"


@dataclass(slots=True)
class Holding:
    """What one destination holds: ``stored`` of the files in the spool, as the recorder knows it; ``drops``: pieces
    there that a larger segment replaced."""

    stored: dict[SegmentKey, Ending] = field(default_factory=dict)
    drops: set[SegmentKey] = field(default_factory=set)


@dataclass(slots=True)
class ArchiveState:
    """``passed``: (branch, number, size) of the last file that left the spool. ``cut_at``: of the last piece."""

    files: dict[tuple[str, int], LogFile] = field(default_factory=dict)
    holdings: dict[str, Holding] = field(default_factory=dict)
    passed: tuple[str, int, int] | None = None
    cut_at: datetime | None = None

    def file(self, branch: str, number: int) -> LogFile:
        return self.files.get((branch, number)) or LogFile(branch, number)

    def keep(self, file: LogFile) -> None:
        self.files[file.branch, file.number] = file

    def prune(self, present: Iterable[tuple[str, int]]) -> None:
        """Forget files that are not in the spool any more."""
        here = set(present)
        self.files = {key: file for key, file in self.files.items() if key in here}
        for holding in self.holdings.values():
            holding.stored = {key: ending for key, ending in holding.stored.items() if (key.branch, key.number) in here}


class StateFile:
    """The state in ``folder``. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._written = b""

    def load(self, destinations: Iterable[str]) -> ArchiveState:
        """The state, with a holding for each of ``destinations`` and no other. One that cannot be read is none."""
        try:
            state = _decode(json.loads(self._path.read_bytes()))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            state = ArchiveState()
        state.holdings = {name: state.holdings.get(name) or Holding() for name in destinations}
        return state

    def save(self, state: ArchiveState) -> None:
        """Nothing is written where nothing changed."""
        raw = json.dumps(_encode(state), separators=(",", ":"), sort_keys=True).encode()
        if raw != self._written:
            write_whole(self._path, raw)
            self._written = raw


def _encode(state: ArchiveState) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "files": [
            {
                "branch": file.branch,
                "number": file.number,
                "cuts": [_cut(cut) for cut in file.cuts],
                "whole": _cut(file.whole) if file.whole else None,
                "damage": file.damage,
                "damaged_at": format_time(file.damaged_at) if file.damaged_at else None,
                "context": file.context.as_json() if file.context else None,
            }
            for _key, file in sorted(state.files.items())
        ],
        "holdings": {
            name: {
                "stored": [[*_key(key), str(ending)] for key, ending in sorted(holding.stored.items())],
                "drops": [_key(key) for key in sorted(holding.drops)],
            }
            for name, holding in state.holdings.items()
        },
        "passed": list(state.passed) if state.passed else None,
        "cut_at": format_time(state.cut_at) if state.cut_at else None,
    }


def _decode(data: Mapping[str, Any]) -> ArchiveState:
    if data["format"] != _FORMAT:
        raise ValueError(f"format {data['format']!r} is not known to this version")
    files = [
        LogFile(
            item["branch"],
            item["number"],
            tuple(_read_cut(cut) for cut in item["cuts"]),
            _read_cut(item["whole"]) if item["whole"] else None,
            ScanContext.from_json(item["context"]) if item["context"] else None,
            item["damage"],
            parse_time(item["damaged_at"]) if item["damaged_at"] else None,
        )
        for item in data["files"]
    ]
    passed = data["passed"]
    return ArchiveState(
        files={(file.branch, file.number): file for file in files},
        holdings={
            name: Holding(
                {SegmentKey(*key): Ending(ending) for *key, ending in item["stored"]},
                {SegmentKey(*key) for key in item["drops"]},
            )
            for name, item in data["holdings"].items()
        },
        passed=(passed[0], passed[1], passed[2]) if passed else None,
        cut_at=parse_time(data["cut_at"]) if data["cut_at"] else None,
    )


def _cut(cut: Cut) -> list[Any]:
    return [cut.start, cut.end, str(cut.ending), cut.remark]


def _read_cut(data: list[Any]) -> Cut:
    start, end, ending, remark = data
    return Cut(start, end, Ending(ending), remark)


def _key(key: SegmentKey) -> list[Any]:
    return [key.branch, key.number, key.start, key.end]

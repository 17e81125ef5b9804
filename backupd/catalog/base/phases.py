"""Timed phases in a JSON column."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from backupd.model.backup.proof import Phase


def phases_json(phases: Iterable[Phase]) -> list[dict[str, Any]]:
    """Exact, unlike ``Phase.as_json``, which rounds for readers."""
    return [{"name": phase.name, "seconds": phase.seconds, "bytes": phase.bytes} for phase in phases]


def phases_from(column: Iterable[dict[str, Any]]) -> tuple[Phase, ...]:
    return tuple(Phase(item["name"], float(item["seconds"]), int(item["bytes"])) for item in column)

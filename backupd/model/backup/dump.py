"""What a logical backup holds: its layout in files, and what became of every table.

The layout does not depend on the tool that took it. ``E(name)`` is the name with all of ASCII but letters, digits,
``_`` and ``-``, and whatever cannot be printed, as ``%`` and two hex digits per byte of UTF-8: different names stay
different, none leaves its folder, and 64 characters of any script fit into the 255 bytes that file systems allow::

    schemas/E(schema)/create.sql              CREATE DATABASE
    schemas/E(schema)/views.sql               views
    schemas/E(schema)/routines.sql            procedures and functions (packages, too)
    schemas/E(schema)/events.sql              scheduled events
    tables/E(schema)/E(table)/definition.sql  CREATE TABLE (or SEQUENCE), as the server prints it
    tables/E(schema)/E(table)/data-00000.sql  rows, in any number of files; INSERT statements without the schema
    tables/E(schema)/E(table)/triggers.sql    its triggers

Every file can be given to the client as it is (``mariadb --binary-mode --comments SCHEMA < FILE``): whatever it needs
so that rows and bodies come back as they were, it sets itself, and each file of rows in the same way, whichever tool
wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from backupd.model.backup.table import TableName
from backupd.model.server.facts import Position

_CODED = re.compile(r"(?:%[0-9A-F]{2})+")
_KEPT = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def encode_name(name: str) -> str:
    """``E(name)``."""
    return "".join(
        char if char in _KEPT or (not char.isascii() and char.isprintable()) else _coded(char) for char in name
    )


def decode_name(text: str) -> str:
    """What ``encode_name`` wrote."""
    return _CODED.sub(lambda run: bytes.fromhex(run[0].replace("%", "")).decode("utf-8", "surrogateescape"), text)


def _coded(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogateescape"))


def table_folder(name: TableName) -> str:
    return f"tables/{encode_name(name.schema)}/{encode_name(name.table)}/"


def definition_path(name: TableName) -> str:
    return table_folder(name) + "definition.sql"


def triggers_path(name: TableName) -> str:
    return table_folder(name) + "triggers.sql"


def data_path(name: TableName, number: int) -> str:
    """``number`` from 0; without a gap in a finished backup."""
    return f"{table_folder(name)}data-{number:05d}.sql"


def schema_folder(schema: str) -> str:
    return f"schemas/{encode_name(schema)}/"


PREPARED_XA = "prepared_xa"
"""Among a dump's settings: XA transactions that were prepared at its position, in whose words stands why it cannot be
rolled forward. Missing without any."""


class Outcome(StrEnum):
    """``skipped``: left out by a rule (too large, an engine without rows). ``failed``: wanted, and not there."""

    DUMPED = "dumped"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DumpedTable:
    """What became of one table. ``rows`` None: not counted. ``bytes`` and ``files`` of its rows. ``tool``: which wrote
    the rows. ``reason``: why it was skipped or failed, or "". ``note``: what to know of a dumped one (its engine has no
    snapshots, say). ``position``: of its own snapshot where that is not the backup's."""

    name: TableName
    outcome: Outcome
    engine: str = ""
    rows: int | None = None
    bytes: int = 0
    files: int = 0
    tool: str = ""
    reason: str = ""
    note: str = ""
    position: Position | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": self.name.schema,
            "table": self.name.table,
            "outcome": str(self.outcome),
            "engine": self.engine,
            "rows": self.rows,
            "bytes": self.bytes,
            "files": self.files,
            "tool": self.tool,
            "reason": self.reason,
            "note": self.note,
            "position": self.position.as_json() if self.position else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DumpedTable:
        return cls(
            name=TableName(data["schema"], data["table"]),
            outcome=Outcome(data["outcome"]),
            engine=data["engine"],
            rows=data["rows"],
            bytes=int(data["bytes"]),
            files=int(data["files"]),
            tool=data["tool"],
            reason=data["reason"],
            note=data["note"],
            position=Position.from_json(data["position"]) if data["position"] else None,
        )


@dataclass(frozen=True, slots=True)
class DumpFacts:
    """Of a logical backup. ``table_set``: the set of the policy, "" for all of it. ``blocked``: seconds that commits
    were blocked for while the snapshots were opened. ``schemas``: those with files in ``schemas/``."""

    tables: tuple[DumpedTable, ...]
    schemas: tuple[str, ...] = ()
    table_set: str = ""
    blocked: float = 0.0
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def dumped(self) -> tuple[DumpedTable, ...]:
        return tuple(table for table in self.tables if table.outcome is Outcome.DUMPED)

    @property
    def failed(self) -> tuple[DumpedTable, ...]:
        return tuple(table for table in self.tables if table.outcome is Outcome.FAILED)

    @property
    def skipped(self) -> tuple[DumpedTable, ...]:
        return tuple(table for table in self.tables if table.outcome is Outcome.SKIPPED)

    def as_json(self) -> dict[str, Any]:
        return {
            "set": self.table_set,
            "blocked": self.blocked,
            "schemas": list(self.schemas),
            "settings": dict(self.settings),
            "tables": [table.as_json() for table in self.tables],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DumpFacts:
        return cls(
            tables=tuple(DumpedTable.from_json(one) for one in data["tables"]),
            schemas=tuple(data["schemas"]),
            table_set=data["set"],
            blocked=float(data["blocked"]),
            settings={str(name): str(value) for name, value in data["settings"].items()},
        )

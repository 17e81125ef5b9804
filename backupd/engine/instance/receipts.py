"""The small files in which a physical tool records its own run.

Two families of names carry the same contents: ``xtrabackup_*`` (xtrabackup, and mariadb-backup up to 11.0)
and ``mariadb_backup_*`` (mariadb-backup from 11.1 on, MDEV-18931). Contents as written by both tools::

xtrabackup_checkpoints   "key = value" lines: backup_type, from_lsn, to_lsn, last_lsn xtrabackup_info
"key = value" lines: tool_version, server_version, binlog_pos, incremental ... xtrabackup_binlog_info   one
record: file TAB position [TAB GTID set]; MySQL's GTID sets may hold line ends xtrabackup_slave_info    SQL
that makes another server a replica of this one's source; on replicas only backup-my.cnf            what
prepare must know: page size, layout of system and undo tablespaces, key plugin
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from backupd.model.errors import StreamError
from backupd.model.server_facts import Position, Receipts

BACKUP_CNF = "backup-my.cnf"
_SIZE_LIMIT = 1024 * 1024
"""Bytes; the largest, a GTID set, has a few kilobytes."""
_HINT = "run the backup again; if it repeats, the tool's version is not supported"


@dataclass(frozen=True, slots=True)
class ReceiptNames:
    """What one tool calls its files."""

    prefix: str

    @property
    def checkpoints(self) -> str:
        return f"{self.prefix}_checkpoints"

    @property
    def info(self) -> str:
        return f"{self.prefix}_info"

    @property
    def binlog_info(self) -> str:
        return f"{self.prefix}_binlog_info"

    @property
    def slave_info(self) -> str:
        return f"{self.prefix}_slave_info"

    @property
    def all(self) -> frozenset[str]:
        return frozenset({self.checkpoints, self.info, self.binlog_info, self.slave_info, BACKUP_CNF})

    @property
    def required(self) -> tuple[str, ...]:
        """Written last by a run that succeeded; a stream cut between two files lacks them and nothing else
        tells.
        """
        return (self.checkpoints, self.info, BACKUP_CNF)


XTRABACKUP = ReceiptNames("xtrabackup")
MARIADB_BACKUP = ReceiptNames("mariadb_backup")
FAMILIES = (XTRABACKUP, MARIADB_BACKUP)


class ReceiptCollector:
    """Keeps the receipts while they pass by in a stream."""

    def __init__(self) -> None:
        self._wanted: frozenset[str] = frozenset().union(*(family.all for family in FAMILIES))
        self._open: dict[str, bytearray] = {}
        self.files: dict[str, bytes] = {}
        """Complete receipts by name."""

    def data(self, path: str, payload: memoryview) -> None:
        """Raises StreamError when a receipt is larger than any can be."""
        if path in self._wanted:
            kept = self._open.setdefault(path, bytearray())
            kept += payload
            if len(kept) > _SIZE_LIMIT:
                raise StreamError(f"{path} is larger than {_SIZE_LIMIT} bytes", hint=_HINT)

    def end(self, path: str) -> None:
        if path in self._wanted:
            self.files[path] = bytes(self._open.pop(path, b""))


def read_receipts(folder: Path) -> Receipts:
    """The receipts of a backup that lies in ``folder``. Raises StreamError."""
    wanted: frozenset[str] = frozenset().union(*(family.all for family in FAMILIES))
    return parse_receipts({path.name: path.read_bytes() for path in folder.iterdir() if path.name in wanted})


def family_of(names: Collection[str]) -> ReceiptNames:
    """Which family the files of a backup belong to. Raises StreamError when it has no checkpoints file."""
    for family in FAMILIES:
        if family.checkpoints in names:
            return family
    raise StreamError(
        "the backup has no checkpoints file: the tool did not finish",
        detail=f"neither {' nor '.join(family.checkpoints for family in FAMILIES)} is there",
        hint=_HINT,
    )


def parse_receipts(files: Mapping[str, bytes]) -> Receipts:
    """``files``: name to content. Raises StreamError naming what is missing or unreadable."""
    family = family_of(files)
    missing = [name for name in family.required if name not in files]
    if missing:
        raise StreamError(f"the backup lacks {', '.join(missing)}: the tool did not finish", hint=_HINT)
    checkpoints = _pairs(files, family.checkpoints)
    info = _pairs(files, family.info)
    if not _text(files, BACKUP_CNF).strip():
        raise StreamError(f"{BACKUP_CNF} is empty", hint=_HINT)
    if info.get("binlog_pos") and family.binlog_info not in files:
        raise StreamError(f"the server writes a binary log, but the backup has no {family.binlog_info}", hint=_HINT)
    return Receipts(
        backup_type=_value(checkpoints, family.checkpoints, "backup_type"),
        from_lsn=_number(checkpoints, family.checkpoints, "from_lsn"),
        to_lsn=_number(checkpoints, family.checkpoints, "to_lsn"),
        last_lsn=_number(checkpoints, family.checkpoints, "last_lsn"),
        position=_position(files, family.binlog_info),
        tool_version=_value(info, family.info, "tool_version"),
        server_version=_value(info, family.info, "server_version"),
        replica_of=_text(files, family.slave_info).strip() if family.slave_info in files else "",
    )


def _position(files: Mapping[str, bytes], name: str) -> Position:
    if name not in files:
        return Position()
    record = _text(files, name).strip()
    if not record:
        return Position()
    fields = record.split("\t")
    if len(fields) not in (2, 3) or not fields[1].strip().isdecimal():
        raise StreamError(f"{name} is not readable", detail=record[:500], hint=_HINT)
    gtid = "".join(fields[2].split()) if len(fields) == 3 else ""
    return Position(file=fields[0].strip(), pos=int(fields[1]), gtid=gtid)


def _pairs(files: Mapping[str, bytes], name: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for line in _text(files, name).splitlines():
        key, equals, value = line.partition("=")
        if equals:
            pairs.setdefault(key.strip(), value.strip())
    return pairs


def _text(files: Mapping[str, bytes], name: str) -> str:
    return files[name].decode("utf-8", "replace")


def _value(pairs: Mapping[str, str], name: str, key: str) -> str:
    if not pairs.get(key):
        raise StreamError(f"{name} does not tell {key}", hint=_HINT)
    return pairs[key]


def _number(pairs: Mapping[str, str], name: str, key: str) -> int:
    value = _value(pairs, name, key)
    if not value.isdecimal():
        raise StreamError(f"{name}: {key} is {value!r}, not a number", hint=_HINT)
    return int(value)

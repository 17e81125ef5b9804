"""What a database server is: flavour, version, identity, and everything that a later restore has to know about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from backupd.model.text import format_time


class Flavour(StrEnum):
    MYSQL = "mysql"
    PERCONA = "percona"
    MARIADB = "mariadb"


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """``10.11.19``. The *series* is what must match between server and physical tool: major.minor."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> Version:
        """Find the first dotted version in ``text``, e.g. ``10.11.19-MariaDB-0+deb12u1-log``. Raises ValueError."""
        match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
        if not match:
            raise ValueError(f"no version number in {text!r}")
        return cls(int(match.group(1)), int(match.group(2)), int(match.group(3) or 0))

    @property
    def series(self) -> str:
        return f"{self.major}.{self.minor}"

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class Role(StrEnum):
    STANDALONE = "standalone"
    SOURCE = "source"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a server's binary log. Empty file: the server writes no binary log."""

    file: str = ""
    pos: int = 0
    gtid: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"file": self.file, "pos": self.pos, "gtid": self.gtid}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Position:
        return cls(file=str(data["file"]), pos=int(data["pos"]), gtid=str(data["gtid"]))


_FIRST_ROLLED: Version = Version(5, 7, 6)


def no_roll_forward(flavour: str, version: Version) -> str:
    """Why binary logs cannot be replayed onto a copy of such a server; "" where they can.

    MySQL before 5.7.6 has neither replication channels nor a gtid_mode that takes transactions with and without GTIDs:
    physical backups, their chains and restores of a backup are all that is done there.
    """
    if flavour == Flavour.MARIADB or version >= _FIRST_ROLLED:
        return ""
    return (
        f"binary logs are replayed onto {flavour} {_FIRST_ROLLED} and later only, and this server is {version}: "
        "a restore gives the moment of a backup"
    )


@dataclass(frozen=True, slots=True)
class ExternalPath:
    """Data of the server that lives outside its datadir.

    ``kind``: ``tablespace`` (DATA DIRECTORY, general tablespace), ``undo``, ``redo``, ``system``, ``schema``
    (symlinked folder) or ``binlog``. ``name``: what the server calls it (``shop/orders``); ``path``: absolute path on
    the source host.
    """

    kind: str
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The answer of a probe. ``variables`` holds what a started copy needs (page size, undo layout, ...)."""

    flavour: Flavour
    version: Version
    version_text: str
    datadir: str
    hostname: str
    server_id: int
    server_uuid: str
    role: Role
    read_only: bool
    log_bin: bool
    position: Position
    gtid_mode: str
    engines: Mapping[str, int]
    data_bytes: int
    tables: int
    encrypted: tuple[str, ...] = ()
    external: tuple[ExternalPath, ...] = ()
    plugins: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "flavour": str(self.flavour),
            "version": str(self.version),
            "version_text": self.version_text,
            "datadir": self.datadir,
            "hostname": self.hostname,
            "server_id": self.server_id,
            "server_uuid": self.server_uuid,
            "role": str(self.role),
            "read_only": self.read_only,
            "log_bin": self.log_bin,
            "position": self.position.as_json(),
            "gtid_mode": self.gtid_mode,
            "engines": dict(self.engines),
            "data_bytes": self.data_bytes,
            "tables": self.tables,
            "encrypted": list(self.encrypted),
            "plugins": list(self.plugins),
            "external": [{"kind": e.kind, "name": e.name, "path": e.path} for e in self.external],
            "variables": dict(self.variables),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ServerInfo:
        return cls(
            flavour=Flavour(data["flavour"]),
            version=Version.parse(data["version"]),
            version_text=data["version_text"],
            datadir=data["datadir"],
            hostname=data["hostname"],
            server_id=int(data["server_id"]),
            server_uuid=data["server_uuid"],
            role=Role(data["role"]),
            read_only=bool(data["read_only"]),
            log_bin=bool(data["log_bin"]),
            position=Position.from_json(data["position"]),
            gtid_mode=data["gtid_mode"],
            engines={str(k): int(v) for k, v in data["engines"].items()},
            data_bytes=int(data["data_bytes"]),
            tables=int(data["tables"]),
            encrypted=tuple(data["encrypted"]),
            plugins=tuple(data["plugins"]),
            external=tuple(ExternalPath(e["kind"], e["name"], e["path"]) for e in data["external"]),
            variables={str(k): str(v) for k, v in data["variables"].items()},
        )


@dataclass(frozen=True, slots=True)
class Tool:
    """An external program as it was found: what ran is recorded with each backup (path, version, digest)."""

    name: str
    path: str
    version: Version
    version_text: str
    sha256: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": self.path,
            "version": str(self.version),
            "version_text": self.version_text,
            "sha256": self.sha256,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tool:
        return cls(data["name"], data["path"], Version.parse(data["version"]), data["version_text"], data["sha256"])


@dataclass(frozen=True, slots=True)
class Receipts:
    """What a physical tool leaves about its own run: checkpoints, binary log position, versions.

    ``from_lsn``/``to_lsn``/``last_lsn`` as in the tool's checkpoints file. ``replica_of`` is the text of its
    slave_info file, sealed with everything else because it can name a source.
    """

    backup_type: str
    from_lsn: int
    to_lsn: int
    last_lsn: int
    position: Position
    tool_version: str
    server_version: str
    replica_of: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "backup_type": self.backup_type,
            "from_lsn": self.from_lsn,
            "to_lsn": self.to_lsn,
            "last_lsn": self.last_lsn,
            "position": self.position.as_json(),
            "tool_version": self.tool_version,
            "server_version": self.server_version,
            "replica_of": self.replica_of,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Receipts:
        return cls(
            backup_type=data["backup_type"],
            from_lsn=int(data["from_lsn"]),
            to_lsn=int(data["to_lsn"]),
            last_lsn=int(data["last_lsn"]),
            position=Position.from_json(data["position"]),
            tool_version=data["tool_version"],
            server_version=data["server_version"],
            replica_of=data["replica_of"],
        )


STRANGER = "another server answers under this name"
"""The reason of each backup that was taken of a stranger begins with it: a catalog that is made anew knows by it which
backups were kept apart."""


class Verdict(StrEnum):
    """``own``: the server itself, restored or upgraded or accepted by an operator too; ``failover``: another one, which
    holds what was archived last and goes on from there; ``stranger``: one of which nothing shows either."""

    OWN = "own"
    FAILOVER = "failover"
    STRANGER = "stranger"


@dataclass(frozen=True, slots=True)
class Identity:
    """A database server that answered under the name ``server``. ``uuid``: its ``server_uuid`` or ``server_uid``;
    ``server_id``: 0 where that is not known. ``evidence``: why the verdict, in words. ``since``: when it answered
    first, ``seen_at``: last. ``accepted_by``: the operator who accepted it, "" where nobody had to."""

    server: str
    uuid: str
    verdict: Verdict
    since: datetime
    seen_at: datetime
    server_id: int = 0
    evidence: str = ""
    address: str = ""
    accepted_by: str = ""

    @property
    def is_stranger(self) -> bool:
        return self.verdict is Verdict.STRANGER

    def as_json(self) -> dict[str, Any]:
        return {
            "server": self.server,
            "uuid": self.uuid,
            "verdict": str(self.verdict),
            "server_id": self.server_id,
            "evidence": self.evidence,
            "address": self.address,
            "since": format_time(self.since),
            "seen_at": format_time(self.seen_at),
            "accepted_by": self.accepted_by,
        }

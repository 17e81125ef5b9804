"""What a database server is: flavour, version, identity, and everything that a later restore has to know about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Self

from backupd.model.document import Document


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
    def parse(cls, text: str) -> Self:
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

    as_json, from_json = __str__, parse


class Role(StrEnum):
    STANDALONE = "standalone"
    SOURCE = "source"
    REPLICA = "replica"


@dataclass(frozen=True, slots=True)
class Position(Document):
    """A position in a server's binary log. Empty file: the server writes no binary log."""

    file: str = ""
    pos: int = 0
    gtid: str = ""


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
class ExternalPath(Document):
    """Data of the server that lives outside its datadir.

    ``kind``: ``tablespace`` (DATA DIRECTORY, general tablespace), ``undo``, ``redo``, ``system``, ``schema``
    (symlinked folder) or ``binlog``. ``name``: what the server calls it (``shop/orders``); ``path``: absolute path on
    the source host.
    """

    kind: str
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class ServerInfo(Document):
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
    plugins: tuple[str, ...] = ()
    external: tuple[ExternalPath, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tool(Document):
    """An external program as it was found: what ran is recorded with each backup (path, version, digest)."""

    name: str
    path: str
    version: Version
    version_text: str
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Receipts(Document):
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
class Identity(Document):
    """A database server that answered under the name ``server``. ``uuid``: its ``server_uuid`` or ``server_uid``;
    ``server_id``: 0 where that is not known. ``evidence``: why the verdict, in words. ``since``: when it answered
    first, ``seen_at``: last. ``accepted_by``: the operator who accepted it, "" where nobody had to."""

    server: str
    uuid: str
    verdict: Verdict
    server_id: int = field(default=0, kw_only=True)
    evidence: str = field(default="", kw_only=True)
    address: str = field(default="", kw_only=True)
    since: datetime
    seen_at: datetime
    accepted_by: str = ""

    @property
    def is_stranger(self) -> bool:
        return self.verdict is Verdict.STRANGER

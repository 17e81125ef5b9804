"""What a database server is: flavour, version, identity, and everything that a later restore has to know about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Self

from backupd.model.document import Document, json_key


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
    """``node``: of a Galera cluster. A node that follows a source outside of its cluster besides is a ``replica``."""

    STANDALONE = "standalone"
    SOURCE = "source"
    REPLICA = "replica"
    NODE = "node"


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
    """The answer of a probe. ``variables`` holds what a started copy needs (page size, undo layout, ...). ``sources``:
    uuids of the servers that it replicates from, of those that have none their server_ids."""

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
    sources: tuple[str, ...] = field(default=(), metadata=json_key(later=True))


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
    slave_info file, sealed with everything else because it can name a source. ``upstream``: the position of that source
    at ``position``, as far as that text says; None of a server that follows none, or several.
    """

    backup_type: str
    from_lsn: int
    to_lsn: int
    last_lsn: int
    position: Position
    tool_version: str
    server_version: str
    replica_of: str = ""
    upstream: Position | None = field(default=None, metadata=json_key(later=True))


UNKNOWN_SEQNO = -1
"""Of a node that has no position in its cluster, or of which nobody knows it."""
SYNCED = "Synced"
"""The state of a node that takes part: any other one lags behind its cluster on purpose, or is not in it."""
PRIMARY = "Primary"
"""The status of the part of a cluster that goes on."""


@dataclass(frozen=True, slots=True)
class ClusterPosition(Document):
    """A position in the history of a Galera cluster: ``UUID:seqno``. The nodes of one cluster have the same ``uuid``,
    and each of their transactions has the same ``seqno`` on all of them."""

    uuid: str
    seqno: int

    def __str__(self) -> str:
        return f"{self.uuid}:{self.seqno}"


@dataclass(frozen=True, slots=True)
class WsrepState(Document):
    """A node of a Galera cluster at a moment, in the words of its status and variables (``wsrep_...``).

    ``position``: the cluster's uuid and the last transaction that was committed here, -1 where it has none. ``name``,
    ``node``: of the cluster, of the node. ``size``: nodes in its part of the cluster. ``status``: ``Primary`` where
    that part goes on. ``state``: ``Synced``, ``Donor/Desynced`` and so on. ``cached_downto``: the oldest seqno that its
    gcache holds, None where it holds none. ``gcache_bytes``: the size of that cache, 0 where it does not say;
    ``written_bytes``: what passed through it since the server's start. ``gtid_mode``: is wsrep_gtid_mode on, with
    ``gtid_domain``. ``desync_count``: how often it was asked to leave flow control to the others. ``recv_queue``,
    ``send_queue``: write sets that wait there. ``flow_paused_ns``: how long flow control has stopped the cluster since
    the start, ``flow_sent``: how often this node asked for it. ``incoming``: addresses for clients of all nodes.
    """

    position: ClusterPosition
    name: str
    node: str
    size: int
    status: str
    state: str
    cached_downto: int | None
    gcache_bytes: int
    written_bytes: int
    gtid_mode: bool
    gtid_domain: int
    desync_count: int
    recv_queue: int
    send_queue: int
    flow_paused_ns: int
    flow_sent: int
    provider: str = ""
    sst_method: str = ""
    incoming: tuple[str, ...] = ()

    @property
    def is_synced(self) -> bool:
        """Does it take part in its cluster, so that clients may be sent to it?"""
        return self.status == PRIMARY and self.state == SYNCED

    def is_apart_from(self, other: WsrepState) -> bool:
        """Are both of clusters that have the same uuid, but no node in common? One was made of a copy of the other, and
        goes on by itself: what is behind the copy's position is of two histories."""
        return (
            self.position.uuid == other.position.uuid
            and self.status == other.status == PRIMARY
            and bool(self.incoming and other.incoming)
            and not set(self.incoming) & set(other.incoming)
        )

    @property
    def words(self) -> str:
        """``node2 of lab is Donor/Desynced (Primary, 3 nodes)``"""
        return (
            f"{self.node or 'the node'} of {self.name} is {self.state or 'unknown'} ({self.status}, {self.size} nodes)"
        )


@dataclass(frozen=True, slots=True)
class NodeLoad(Document):
    """What a backup made of a node, by what was seen while it ran. ``desynced_seconds``: how long it was not Synced.
    ``recv_queue``: most write sets that waited there. ``flow_control_seconds``: how long flow control stopped the
    cluster meanwhile; ``flow_control_sent``: how often this node asked for it. ``samples``: how often it was asked."""

    desynced_seconds: float = field(metadata=json_key(digits=1))
    recv_queue: int
    flow_control_seconds: float = field(metadata=json_key(digits=3))
    flow_control_sent: int
    samples: int


class Evidence(StrEnum):
    """By what the seqno of a backup is known: ``lock``, the node's own word while the backup's lock kept it still;
    ``proof``, what a prepare found in InnoDB."""

    LOCK = "lock"
    PROOF = "proof"


@dataclass(frozen=True, slots=True)
class NodeFacts(Document):
    """What a backup of a Galera node records of its cluster. ``uuid`` and ``seqno``: the backup's position, -1 as long
    as nobody knows it; ``evidence``: by what it is known, "" for nothing. ``cluster``, ``node``: their names.
    ``load``: None where nobody looked."""

    cluster: str
    node: str
    uuid: str
    seqno: int
    evidence: str
    gtid_mode: bool
    gtid_domain: int
    load: NodeLoad | None = None

    @property
    def position(self) -> ClusterPosition | None:
        """Where the backup is in the history of its cluster."""
        return ClusterPosition(self.uuid, self.seqno) if self.seqno != UNKNOWN_SEQNO else None


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

"""Semi-synchronous replication as the source has it: settings and counters, by the names of both families.

MariaDB has it built in, under the old words; MySQL as a plugin, under the old words or (from 8.0.26 on) under new ones.
What was measured with MariaDB 10.11 and MySQL 9.7:

- ``status`` alone proves nothing: MariaDB answers a session whose wait is ended by KILL QUERY with OK, and leaves it
  ON. Every commit that was answered without an acknowledgement is counted in ``no_tx``.
- The counters begin anew with a restart, and with FLUSH STATUS or a reset of the binary logs. After FLUSH STATUS the
  acknowledged commits of a busy server soon pass their old number; when it was shows only the time since.
- The first acknowledgement ends the wait, whoever sends it. MySQL can be told to wait for several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from backupd.model.document import Document, json_key

if TYPE_CHECKING:
    from backupd.engine.sql.client import Session

AFTER_SYNC = "AFTER_SYNC"
_WORDS = (("source", "replica"), ("master", "slave"))


@dataclass(frozen=True, slots=True)
class SemiSync(Document):
    """``source``, ``replica``: the words that this server has in names; empty where it knows no semi-synchronous
    replication. ``on``: is it switched on; ``status``: is it at work now. ``timeout``: seconds that a commit waits.
    ``waits_alone``: also without any replica. ``needed``: acknowledgements of one commit. ``clients``: semi-synchronous
    replicas that are connected. ``acknowledged``, ``unacknowledged``: commits that were answered with and without one;
    ``fell_back``: how often it gave up. ``uptime``: of the server, ``flushed``: since its counters began anew, in
    seconds; -1 where it does not say. ``ours``: is the dump connected that was asked about. ``counted_at``: by its
    clock, right after the counters were read. ``sync_binlog``: as set."""

    source: str = ""
    replica: str = ""
    on: bool = False
    status: bool = False
    wait_point: str = ""
    timeout: float = 0.0
    waits_alone: bool = False
    needed: int = 1
    clients: int = 0
    acknowledged: int = 0
    unacknowledged: int = 0
    fell_back: int = 0
    uptime: int = 0
    sync_binlog: int = 1
    counted_at: datetime | None = field(default=None)
    flushed: int = field(default=-1, metadata=json_key(later=True))
    ours: bool = field(default=False, metadata=json_key(later=True))

    @property
    def is_known(self) -> bool:
        """Does the server know semi-synchronous replication?"""
        return bool(self.source)

    def variable(self, name: str) -> str:
        """The server's own name of a setting: ``enabled``, ``timeout``, ``wait_point``."""
        return f"rpl_semi_sync_{self.source}_{name}"


def read_semi_sync(session: Session, dump: int = 0) -> SemiSync:
    """As it is now. ``dump``: thread of the one that is ours, 0 without one. Raises ServerError."""
    ours = bool(dump) and has_dump(session, dump)
    settings = _rows(session, "VARIABLES", "rpl\\_semi\\_sync\\_%", "sync_binlog")
    counters = _rows(session, "STATUS", "Rpl\\_semi\\_sync\\_%", "Uptime", "Uptime_since_flush_status")
    counted_at = moment(session.scalar("SELECT UTC_TIMESTAMP(6)"))
    uptime, sync_binlog = int(counters.get("uptime", 0)), int(settings.get("sync_binlog", 1))
    for source, replica in _WORDS:
        prefix = f"rpl_semi_sync_{source}_"
        if f"{prefix}enabled" not in settings:
            continue

        def count(name: str, prefix: str = prefix) -> int:
            return int(counters.get(prefix + name, 0))

        return SemiSync(
            source,
            replica,
            on=settings[f"{prefix}enabled"] == "ON",
            status=counters.get(f"{prefix}status") == "ON",
            wait_point=settings.get(f"{prefix}wait_point", ""),
            timeout=int(settings.get(f"{prefix}timeout", 0)) / 1000,
            waits_alone=settings.get(f"{prefix}wait_no_{replica}") == "ON",
            needed=int(settings.get(f"{prefix}wait_for_{replica}_count", 1)),
            clients=count("clients"),
            acknowledged=count("yes_tx"),
            unacknowledged=count("no_tx"),
            fell_back=count("no_times"),
            uptime=uptime,
            sync_binlog=sync_binlog,
            counted_at=counted_at,
            flushed=int(counters.get("uptime_since_flush_status", -1)),
            ours=ours,
        )
    return SemiSync(uptime=uptime, sync_binlog=sync_binlog, counted_at=counted_at)


def has_dump(session: Session, thread_id: int) -> bool:
    """Is a dump of this account connected under this id? Raises ServerError."""
    return bool(
        session.query(
            "SELECT 1 FROM information_schema.PROCESSLIST WHERE ID = %s AND COMMAND LIKE 'Binlog Dump%%'"
            " AND USER = SUBSTRING_INDEX(USER(), '@', 1)",
            thread_id,
        )
    )


def moment(value: datetime | str) -> datetime:
    """A time in UTC as a server gives it."""
    naive = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return naive.replace(tzinfo=UTC)


def _rows(session: Session, what: str, like: str, *names: str) -> Mapping[str, str]:
    rows = session.query(
        f"SHOW GLOBAL {what} WHERE Variable_name LIKE %s" + " OR Variable_name = %s" * len(names),
        like,
        *names,
    )
    return {str(name).lower(): str(value) for name, value in rows}

"""Semi-synchronous replication as the source has it: settings and counters, by the names of both families.

MariaDB has it built in, under the old words; MySQL as a plugin, under the old words or (from 8.0.26 on) under new ones.
What was measured with MariaDB 10.11 and MySQL 9.7:

- ``status`` alone proves nothing: MariaDB answers a session whose wait is ended by KILL QUERY with OK, and leaves it
  ON. Every commit that was answered without an acknowledgement is counted in ``no_tx``.
- The counters begin anew with a restart, and with FLUSH STATUS or a reset of the binary logs.
- The first acknowledgement ends the wait, whoever sends it. MySQL can be told to wait for several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from backupd.model.document import Document

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
    ``fell_back``: how often it gave up. ``uptime``: of the server. ``counted_at``: by its clock, right after the
    counters were read. ``sync_binlog``: as set."""

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

    @property
    def is_known(self) -> bool:
        """Does the server know semi-synchronous replication?"""
        return bool(self.source)

    def variable(self, name: str) -> str:
        """The server's own name of a setting: ``enabled``, ``timeout``, ``wait_point``."""
        return f"rpl_semi_sync_{self.source}_{name}"


def read_semi_sync(session: Session) -> SemiSync:
    """As it is now. Raises ServerError."""
    settings = _rows(session, "VARIABLES", "rpl\\_semi\\_sync\\_%", "sync_binlog")
    counters = _rows(session, "STATUS", "Rpl\\_semi\\_sync\\_%", "Uptime")
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
        )
    return SemiSync(uptime=uptime, sync_binlog=sync_binlog, counted_at=counted_at)


def moment(value: datetime | str) -> datetime:
    """A time in UTC as a server gives it."""
    naive = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return naive.replace(tzinfo=UTC)


def _rows(session: Session, what: str, like: str, name: str) -> Mapping[str, str]:
    rows = session.query(
        f"SHOW GLOBAL {what} WHERE Variable_name LIKE %s OR Variable_name = %s",
        like,
        name,
    )
    return {str(name).lower(): str(value) for name, value in rows}

"""The status of each server, by the last look at it; and looks at nodes of Galera clusters.

A row of a status says up to which change it was made (see ``backupd.catalog.tables.changes``), so one that was
overtaken is known by it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import BigInteger, Column, Connection, String, Table, bindparam, delete, func, insert, select, text

from backupd.catalog.database import Rows
from backupd.catalog.row_mapping import FreeText, UtcTime, metadata, narrowed, row_of
from backupd.catalog.tables.binlogs import binlog_branches, binlog_confirmed
from backupd.catalog.tables.changes import server_changes
from backupd.recovery.ist import NodeSample

server_standings = Table(
    "server_standings",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("changes", BigInteger, nullable=False),
    Column("losses", BigInteger, nullable=False),
    Column("basis", String(64), nullable=False),
    Column("made_at", UtcTime, nullable=False),
    Column("document", FreeText, nullable=False),
)
"""``changes``, ``losses``: those that were counted before the look began. ``basis``: of which configuration it was
made."""

node_samples = Table(
    "node_samples",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("at", UtcTime, primary_key=True),
    Column("uuid", String(64), nullable=False),
    Column("name", FreeText, nullable=False),
    Column("node", FreeText, nullable=False),
    Column("status", String(32), nullable=False),
    Column("state", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("last", BigInteger, nullable=False),
    Column("downto", BigInteger),
    Column("written_bytes", BigInteger, nullable=False),
    Column("gcache_bytes", BigInteger, nullable=False),
)

Confirmed = Mapping[str, datetime]
"""By destination."""
Branches = Mapping[str, Confirmed]
"""What is confirmed of each branch."""

_KEEP = text(
    "INSERT INTO server_standings (server, changes, losses, basis, made_at, document)"
    " VALUES (:server, :changes, :losses, :basis, :made_at, :document) ON CONFLICT (server) DO UPDATE"
    " SET changes = excluded.changes, losses = excluded.losses, basis = excluded.basis, made_at = excluded.made_at,"
    " document = excluded.document WHERE excluded.changes >= server_standings.changes"
).bindparams(bindparam("made_at", type_=UtcTime), bindparam("document", type_=FreeText))


def confirmed(connection: Connection, servers: Collection[str] | None = None) -> dict[str, Branches]:
    """Of each server and branch: until when, by destination, all that was committed is stored in the last run there."""
    query = (
        select(binlog_branches.c.server, binlog_branches.c.id, _F.destination, _F.at)
        .join_from(binlog_branches, binlog_confirmed, _F.branch == binlog_branches.c.number)
        .order_by(_F.number)
    )
    found: dict[str, dict[str, dict[str, datetime]]] = {}
    for server, branch, destination, at in connection.execute(narrowed(query, (binlog_branches.c.server, servers))):
        found.setdefault(server, {}).setdefault(branch, {})[destination] = at
    return dict(found)


@dataclass(frozen=True, slots=True)
class Count:
    """Of the changes of a server."""

    changes: int = 0
    losses: int = 0


@dataclass(frozen=True, slots=True)
class StandingRow:
    """What is kept of a server, but for the document. ``made``: what was counted before the look; ``now``: what is
    counted now."""

    server: str
    made: Count
    now: Count
    basis: str
    made_at: datetime

    @property
    def has_lost(self) -> bool:
        """Was something lost since the look?"""
        return self.made.losses != self.now.losses

    def is_same(self, other: StandingRow) -> bool:
        """Were both made by one look?"""
        return (self.made, self.basis, self.made_at) == (other.made, other.basis, other.made_at)


class Standings(Rows):
    """The status of servers, by the last look at each."""

    def count(self, server: str) -> Count:
        """The changes of a server until now."""
        rows = self._rows(select(_C.changes, _C.losses).where(_C.server == server))
        return Count(*rows[0]) if rows else Count()

    def counts(self) -> Mapping[str, Count]:
        """The same of every server that something was ever recorded of."""
        rows = self._rows(select(_C.server, _C.changes, _C.losses))
        return {server: Count(changes, losses) for server, changes, losses in rows}

    def servers(self) -> tuple[str, ...]:
        """Every server that something was ever recorded of, by name."""
        return tuple(self._scalars(select(_C.server).order_by(_C.server)))

    def confirmed(self, server: str) -> Branches:
        """As in ``rows``, of one server."""
        with self._database.read() as connection:
            return confirmed(connection, [server]).get(server, {})

    def rows(self, servers: Collection[str] | None = None) -> tuple[dict[str, StandingRow], dict[str, Branches]]:
        """Of all or of these, as far as somebody looked at them; with what is confirmed of their binary logs at the
        same moment (see ``confirmed``)."""
        query = select(
            _S.server,
            _S.changes,
            _S.losses,
            func.coalesce(_C.changes, 0),
            func.coalesce(_C.losses, 0),
            _S.basis,
            _S.made_at,
        ).outerjoin_from(server_standings, server_changes, _C.server == _S.server)
        with self._database.read() as connection:
            rows = {
                server: StandingRow(server, Count(changes, losses), Count(later, lost), basis, at)
                for server, changes, losses, later, lost, basis, at in connection.execute(
                    narrowed(query, (_S.server, servers))
                )
            }
            return rows, confirmed(connection, servers)

    def documents(self, servers: Collection[str] | None = None) -> Mapping[str, str]:
        """Of all or of these, by server."""
        query = narrowed(select(_S.server, _S.document), (_S.server, servers))
        with self._database.read() as connection:
            return {row.server: row.document for row in connection.execute(query)}

    def keep(self, server: str, count: Count, basis: str, at: datetime, document: str) -> None:
        """What a look found that began when this was the ``count``. One that knew more stays. Raises CatalogError at
        once while another process writes for long: the next look finds it again, and whoever reads should not wait."""
        values = {"server": server, "changes": count.changes, "losses": count.losses, "basis": basis}
        with self._database.write(waits=False) as connection:
            connection.execute(_KEEP, {**values, "made_at": at, "document": document})


class Nodes(Rows):
    """What nodes of Galera clusters were seen to be."""

    def add(self, sample: NodeSample) -> None:
        """One more look at a node; two within one microsecond are one. Raises CatalogError at once while another
        process writes for long: the next look comes soon."""
        with self._database.write(waits=False) as connection:
            connection.execute(delete(node_samples).where(_N.server == sample.server, _N.at == sample.at))
            connection.execute(insert(node_samples).values(row_of(node_samples, sample)))

    def of(self, server: str, since: datetime) -> tuple[NodeSample, ...]:
        """Of a server since then, the oldest first."""
        query = select(node_samples).where(_N.server == server, _N.at >= since).order_by(_N.at)
        return self._records(NodeSample, query)

    def servers(self) -> tuple[str, ...]:
        """Every server that was seen to be a node and not forgotten since, by name."""
        return tuple(self._scalars(select(_N.server).distinct().order_by(_N.server)))

    def forget(self, before: datetime) -> None:
        """Remove looks of earlier than then."""
        self._do(delete(node_samples).where(_N.at < before))


_N = node_samples.c
_C, _S, _F = server_changes.c, server_standings.c, binlog_confirmed.c

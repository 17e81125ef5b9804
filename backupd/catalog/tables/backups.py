"""The tables of backups and their copies, and the stock of each destination, kept up to date within the transaction
that changes a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    ForeignKey,
    Index,
    Select,
    String,
    Table,
    delete,
    false,
    func,
    insert,
    select,
    text,
    update,
)

from backupd.catalog.row_mapping import FreeText, UtcTime, metadata, position_fields
from backupd.catalog.tables.changes import changed
from backupd.model.backup_record import BackupState

_DELETED = text("state = 'deleted'")
"""Of the indexes of what is on its way out, which is little; the same for PostgreSQL, as their migration says."""

backups = Table(
    "backups",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("state", String(32), nullable=False),
    Column("parent", String(64)),
    Column("started_at", UtcTime, nullable=False),
    Column("finished_at", UtcTime, nullable=False),
    Column("bytes_source", BigInteger, nullable=False),
    Column("bytes_stored", BigInteger, nullable=False),
    Column("bytes_new", BigInteger, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("files_linked", BigInteger, nullable=False),
    *position_fields(),
    Column("flavour", String(32), nullable=False),
    Column("server_version", FreeText, nullable=False),
    Column("tool_version", FreeText, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("warnings", JSON, nullable=False),
    Column("from_lsn", BigInteger, nullable=False, server_default="0"),
    Column("to_lsn", BigInteger, nullable=False, server_default="0"),
    Column("server_uuid", FreeText, nullable=False, server_default=text("''")),
    Column("reason", FreeText, nullable=False, server_default=text("''")),
    Column("table_set", String(64), nullable=False, server_default=text("''")),
    Column("tables_missing", BigInteger, nullable=False, server_default="0"),
    Column("manifest", String(64), nullable=False, server_default=text("''")),
    Column("missing", JSON(none_as_null=True)),
    Column("doubtful", FreeText, nullable=False, server_default=text("''")),
    Column("found", String(64), nullable=False, server_default=text("''")),
    Column("foreign", Boolean, nullable=False, server_default=false()),
    Column("node", JSON(none_as_null=True)),
    Column("upstream", JSON(none_as_null=True)),
    Column("member", JSON(none_as_null=True)),
    Column("flags", JSON, nullable=False, server_default=text("'[]'")),
    Index(None, "server", "finished_at", "id"),
    Index(None, "finished_at", "id"),
    Index("ix_backups_deleted", "id", sqlite_where=_DELETED),
)


commits = Table(
    "commits",
    metadata,
    Column("backup_id", String(64), primary_key=True),
    Column("manifest", String(64), nullable=False),
)
"""Every backup that is ours, by its manifest: written right before it is committed, or when it is adopted. It outlives
the row in ``backups``, which a run that died never wrote, or which goes with a destination that is not configured."""


identities = Table(
    "identities",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("uuid", String(64), primary_key=True),
    Column("verdict", String(16), nullable=False),
    Column("server_id", BigInteger, nullable=False),
    Column("evidence", FreeText, nullable=False),
    Column("address", FreeText, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("seen_at", UtcTime, nullable=False),
    Column("accepted_by", FreeText, nullable=False),
)
"""Who answered under a server's name; see ``recovery.lineage``."""


copies = Table(
    "copies",
    metadata,
    Column("backup_id", String(64), ForeignKey("backups.id", ondelete="CASCADE"), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("state", String(32), nullable=False),
    Column("stored_at", UtcTime, nullable=False),
    Column("verified_at", UtcTime),
    Index(None, "destination", "backup_id"),
    Index("ix_copies_deleted", "destination", "backup_id", sqlite_where=_DELETED),
)


absences = Table(
    "absences",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("job_id", String(64), nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("after", FreeText, nullable=False),
)
"""Servers that a backup took out of rotation, and the program that brings each back; gone once that has run."""


server_stock = Table(
    "server_stock",
    metadata,
    Column("destination", String(64), primary_key=True),
    Column("server", String(64), primary_key=True),
    Column("backups", BigInteger, nullable=False),
    Column("bytes_new", BigInteger, nullable=False),
    Column("bytes_stored", BigInteger, nullable=False),
)
"""Of the complete copies of a server at a destination: how many there are, the sum of ``bytes_new`` of their backups,
and the largest ``bytes_stored``."""

Amounts = tuple[int, int, int]
"""The last three columns of ``server_stock``."""


@contextmanager
def changing(connection: Connection, backup_id: str, *, loses: bool = True) -> Iterator[None]:
    """The block changes the row of a backup, or its copies. ``loses``: as of ``changed``. Of a backup that is not there
    nothing is counted: it is for the block to say so."""
    server = connection.scalar(select(backups.c.server).where(backups.c.id == backup_id))
    if server is None:
        yield
        return
    changed(connection, server, loses=loses)  # first, so that of two who change a server the second reads after it
    before = _whole(connection, backup_id)
    yield
    _restock(connection, server, before, _whole(connection, backup_id))


def stock_added(connection: Connection, server: str, backup_id: str) -> None:
    """A backup was inserted, with its copies."""
    changed(connection, server, loses=False)
    _restock(connection, server, {}, _whole(connection, backup_id))


def counted_stock(connection: Connection, server: str) -> dict[str, Amounts]:
    """By destination, counted from the copies."""
    query = (
        select(copies.c.destination, func.count(), func.sum(backups.c.bytes_new), func.max(backups.c.bytes_stored))
        .join(backups, backups.c.id == copies.c.backup_id)
        .where(backups.c.server == server, copies.c.state == _COMPLETE)
        .group_by(copies.c.destination)
    )
    return {
        destination: (int(count), int(fresh), int(most))
        for destination, count, fresh, most in connection.execute(query)
    }


def kept_stock(connection: Connection, server: str) -> dict[str, Amounts]:
    """By destination, as it was kept."""
    query = select(_T.destination, _T.backups, _T.bytes_new, _T.bytes_stored)
    return {
        destination: (count, fresh, most)
        for destination, count, fresh, most in connection.execute(query.where(_T.server == server))
    }


def write_stock(connection: Connection, server: str, found: Mapping[str, Amounts]) -> None:
    """Replaces what was kept."""
    connection.execute(delete(server_stock).where(_T.server == server))
    for destination, amounts in found.items():
        connection.execute(insert(server_stock).values(_row(destination, server, amounts)))


_COMPLETE = str(BackupState.COMPLETE)
_T = server_stock.c


def _row(destination: str, server: str, amounts: Amounts) -> dict[str, Any]:
    count, fresh, most = amounts
    return {"destination": destination, "server": server, "backups": count, "bytes_new": fresh, "bytes_stored": most}


def _whole(connection: Connection, backup_id: str) -> dict[str, tuple[int, int]]:
    """Where a backup has a complete copy, each with its bytes."""
    query = (
        select(copies.c.destination, backups.c.bytes_new, backups.c.bytes_stored)
        .join(backups, backups.c.id == copies.c.backup_id)
        .where(copies.c.backup_id == backup_id, copies.c.state == _COMPLETE)
    )
    return {destination: (fresh, size) for destination, fresh, size in connection.execute(query)}


def _restock(
    connection: Connection, server: str, before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]
) -> None:
    for destination in before.keys() - after.keys():
        _move(connection, destination, server, -1, *before[destination])
    for destination in after.keys() - before.keys():
        _move(connection, destination, server, 1, *after[destination])


def _move(connection: Connection, destination: str, server: str, count: int, fresh: int, size: int) -> None:
    here = (_T.destination == destination, _T.server == server)
    most = connection.scalar(select(_T.bytes_stored).where(*here))
    if most is None:
        connection.execute(insert(server_stock).values(_row(destination, server, (0, 0, 0))))
        most = 0
    if count < 0 and size >= most:
        most = _largest(connection, destination, server)
    elif count > 0:
        most = max(most, size)
    connection.execute(
        update(server_stock)
        .where(*here)
        .values(backups=_T.backups + count, bytes_new=_T.bytes_new + count * fresh, bytes_stored=most)
    )


def _largest(connection: Connection, destination: str, server: str) -> int:
    query: Select[Any] = (
        select(func.max(backups.c.bytes_stored))
        .join(copies, copies.c.backup_id == backups.c.id)
        .where(backups.c.server == server, copies.c.destination == destination, copies.c.state == _COMPLETE)
    )
    return int(connection.scalar(query) or 0)

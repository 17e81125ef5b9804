"""How often each server was changed: counted by whoever changes something that its standing is made of, in the same
transaction."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Connection, String, Table, text

from backupd.catalog.row_mapping import metadata

server_changes = Table(
    "server_changes",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("changes", BigInteger, nullable=False),
    Column("losses", BigInteger, nullable=False),
)
"""``losses``: of the changes those after which less may be recoverable than before, or the binary log goes on in
another branch."""

_COUNT = text(
    "INSERT INTO server_changes (server, changes, losses) VALUES (:server, 1, :losses) ON CONFLICT (server) DO UPDATE"
    " SET changes = server_changes.changes + 1, losses = server_changes.losses + excluded.losses"
)


def changed(connection: Connection, server: str, *, loses: bool = True) -> None:
    """Something that the standing of ``server`` is made of changes in this transaction. ``loses``: it may have become
    less, or other than what it goes on from."""
    connection.execute(_COUNT, {"server": server, "losses": int(loses)})

"""Rows of holds and pauses: at most one of each kind for each server."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, insert, select
from sqlalchemy.engine import RowMapping

from backupd.catalog.base.database import Database
from backupd.catalog.base.tables import holds
from backupd.model.hold import EVERY_SERVER, Hold, HoldKind


class Holds:
    """Every method is one transaction and raises CatalogError when the database fails. ``server`` ``*``: every one."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def set(self, server: str, kind: HoldKind, reason: str, by: str, now: datetime) -> Hold:
        """A new reason replaces an older one of the same kind."""
        hold = Hold(server, HoldKind(kind), reason, by, now)
        with self._database.write() as connection:
            connection.execute(delete(holds).where((holds.c.server == server) & (holds.c.kind == str(kind))))
            connection.execute(insert(holds).values(server=server, kind=str(kind), reason=reason, set_by=by, since=now))
        return hold

    def release(self, server: str, kind: HoldKind) -> bool:
        """Was there one? That of every server is only released under the name ``*``."""
        with self._database.write() as connection:
            found = connection.execute(delete(holds).where((holds.c.server == server) & (holds.c.kind == str(kind))))
            return bool(found.rowcount)

    def of(self, server: str, kind: HoldKind | None = None) -> tuple[Hold, ...]:
        """Everything that concerns ``server``, its own before that of every server."""
        found = [
            hold
            for hold in self.all()
            if hold.server in (server, EVERY_SERVER) and (kind is None or hold.kind is HoldKind(kind))
        ]
        return tuple(sorted(found, key=lambda hold: (hold.server != server, hold.kind)))

    def all(self) -> tuple[Hold, ...]:
        with self._database.read() as connection:
            rows = connection.execute(select(holds).order_by(holds.c.server, holds.c.kind)).mappings()
            return tuple(_hold(row) for row in rows)


def _hold(row: RowMapping) -> Hold:
    return Hold(row["server"], HoldKind(row["kind"]), row["reason"], row["set_by"], row["since"])

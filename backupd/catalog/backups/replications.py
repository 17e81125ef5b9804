"""Rows of replications: backups that are not at a destination yet where they belong. None is forgotten before it has
arrived, or does not belong there any more."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select, update

from backupd.catalog.base.database import Database
from backupd.catalog.base.tables import replications
from backupd.model.clock import format_time

WAITING, COPYING, FAILING = "waiting", "copying", "failing"

_R = replications.c


@dataclass(frozen=True, slots=True)
class Replication:
    """``state``: waiting, copying, or failing: then ``message`` says why, ``attempts`` how often in a row, and it is
    tried again at ``not_before``. ``since``: when it was found missing. ``bytes_done`` of ``bytes_total`` stored bytes,
    in the last attempt."""

    backup_id: str
    destination: str
    state: str
    attempts: int
    not_before: datetime | None
    since: datetime
    updated_at: datetime
    bytes_total: int = 0
    bytes_done: int = 0
    message: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "backup": self.backup_id,
            "destination": self.destination,
            "state": self.state,
            "attempts": self.attempts,
            "not_before": format_time(self.not_before) if self.not_before else None,
            "since": format_time(self.since),
            "updated_at": format_time(self.updated_at),
            "bytes_total": self.bytes_total,
            "bytes_done": self.bytes_done,
            "message": self.message,
        }


class Replications:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(self, destination: str | None = None) -> tuple[Replication, ...]:
        """By destination, newest backup first."""
        query = select(replications).order_by(_R.destination, _R.backup_id.desc())
        if destination is not None:
            query = query.where(_R.destination == destination)
        with self._database.read() as connection:
            return tuple(Replication(**row) for row in connection.execute(query).mappings())

    def expect(self, destination: str, sizes: Mapping[str, int], now: datetime) -> None:
        """Backups (id: stored bytes) that belong there from now on; what is known of one already stays."""
        with self._database.write() as connection:
            known = set(connection.scalars(select(_R.backup_id).where(_R.destination == destination)))
            rows = [
                {
                    "backup_id": name,
                    "destination": destination,
                    "state": WAITING,
                    "attempts": 0,
                    "not_before": None,
                    "since": now,
                    "updated_at": now,
                    "bytes_total": size,
                    "bytes_done": 0,
                    "message": "",
                }
                for name, size in sizes.items()
                if name not in known
            ]
            if rows:
                connection.execute(insert(replications), rows)

    def copying(self, backup_id: str, destination: str, done: int, total: int, now: datetime) -> None:
        self._change(backup_id, destination, state=COPYING, bytes_done=done, bytes_total=total, updated_at=now)

    def failing(self, backup_id: str, destination: str, now: datetime, *, not_before: datetime, message: str) -> None:
        self._change(
            backup_id,
            destination,
            state=FAILING,
            attempts=_R.attempts + 1,
            not_before=not_before,
            message=message,
            updated_at=now,
        )

    def forget(self, destination: str, backups: Collection[str]) -> None:
        """They have arrived, or do not belong there any more."""
        with self._database.write() as connection:
            for name in backups:
                connection.execute(delete(replications).where(_is(name, destination)))

    def _change(self, backup_id: str, destination: str, **values: Any) -> None:
        with self._database.write() as connection:
            connection.execute(update(replications).where(_is(backup_id, destination)).values(**values))


def _is(backup_id: str, destination: str) -> Any:
    return (_R.backup_id == backup_id) & (_R.destination == destination)

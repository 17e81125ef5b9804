"""Rows of lags: of each hour the longest that a destination was behind its server."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, insert, select, update

from backupd.catalog.base.database import Database
from backupd.catalog.base.log_tables import binlog_lags
from backupd.model.clock import format_time


@dataclass(frozen=True, slots=True)
class Lag:
    """In the hour that begins at ``hour`` up to ``seconds`` of commits were not yet at the destination; at ``at``."""

    server: str
    destination: str
    hour: datetime
    seconds: float
    at: datetime

    def as_json(self) -> dict[str, Any]:
        return {
            "destination": self.destination,
            "hour": format_time(self.hour),
            "seconds": round(self.seconds, 3),
            "at": format_time(self.at),
        }


class Lags:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def note(self, server: str, destination: str, seconds: float, at: datetime) -> None:
        """Recorded where it is the worst of its hour so far."""
        hour = at.replace(minute=0, second=0, microsecond=0)
        here = (
            (binlog_lags.c.server == server) & (binlog_lags.c.destination == destination) & (binlog_lags.c.hour == hour)
        )
        with self._database.write() as connection:
            known = connection.scalar(select(binlog_lags.c.seconds).where(here))
            if known is None:
                connection.execute(
                    insert(binlog_lags).values(
                        server=server, destination=destination, hour=hour, seconds=seconds, at=at
                    )
                )
            elif seconds > known:
                connection.execute(update(binlog_lags).where(here).values(seconds=seconds, at=at))

    def list(self, server: str, since: datetime, *, destination: str | None = None) -> tuple[Lag, ...]:
        """Of every hour that ended after ``since``, oldest first."""
        begin = since.replace(minute=0, second=0, microsecond=0)
        query = (
            select(binlog_lags)
            .where(binlog_lags.c.server == server, binlog_lags.c.hour >= begin)
            .order_by(binlog_lags.c.hour, binlog_lags.c.destination)
        )
        if destination is not None:
            query = query.where(binlog_lags.c.destination == destination)
        with self._database.read() as connection:
            return tuple(Lag(**row) for row in connection.execute(query).mappings())

    def worst(self, server: str, since: datetime) -> dict[str, float]:
        """Of each destination the most seconds it was behind in any hour since then: the RPO that was achieved."""
        begin = since.replace(minute=0, second=0, microsecond=0)
        query = (
            select(binlog_lags.c.destination, func.max(binlog_lags.c.seconds).label("worst"))
            .where(binlog_lags.c.server == server, binlog_lags.c.hour >= begin)
            .group_by(binlog_lags.c.destination)
        )
        with self._database.read() as connection:
            return {row.destination: row.worst for row in connection.execute(query)}

    def forget(self, before: datetime) -> None:
        """Remove hours that began before then."""
        with self._database.write() as connection:
            connection.execute(delete(binlog_lags).where(binlog_lags.c.hour < before))

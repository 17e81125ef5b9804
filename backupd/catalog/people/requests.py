"""Rows of requests with an Idempotency-Key: what was answered, so that asking again does nothing twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, insert, select, update

from backupd.catalog.base.database import Database
from backupd.catalog.base.people_tables import requests

REMEMBERED = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Asked:
    """An earlier request. ``digest``: of all that it asked; ``status`` None: it is still being worked on."""

    digest: str
    at: datetime
    status: int | None
    headers: Mapping[str, str]
    body: bytes


class Requests:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, actor: str, key: str, digest: str, now: datetime) -> Asked | None:
        """Note that this is being worked on; or give the request that had the same key within the last day."""
        same = (requests.c.actor == actor) & (requests.c.key == key)
        with self._database.write() as connection:
            if not self._database.sqlite:  # there BEGIN IMMEDIATE keeps others out
                connection.exec_driver_sql("LOCK TABLE requests IN EXCLUSIVE MODE")
            connection.execute(delete(requests).where(requests.c.at < now - REMEMBERED))
            row = connection.execute(select(requests).where(same)).mappings().first()
            if row is not None:
                return Asked(row["digest"], row["at"], row["status"], row["headers"] or {}, row["body"] or b"")
            connection.execute(insert(requests).values(actor=actor, key=key, digest=digest, at=now))
        return None

    def finish(self, actor: str, key: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
        with self._database.write() as connection:
            connection.execute(
                update(requests)
                .where(requests.c.actor == actor, requests.c.key == key)
                .values(status=status, headers=dict(headers), body=body)
            )

    def forget(self, actor: str, key: str) -> None:
        """It came to nothing: the same key may be tried again."""
        with self._database.write() as connection:
            connection.execute(delete(requests).where(requests.c.actor == actor, requests.c.key == key))

"""Rows of schedules: up to which due time each leg of each server has been dealt with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, bindparam, insert, select, update

from backupd.catalog.alerts.events import insert_events
from backupd.catalog.base.database import Database
from backupd.catalog.base.tables import schedules
from backupd.catalog.work.jobs import insert_jobs, skip_jobs
from backupd.model.errors import RefusedError
from backupd.model.event import Event
from backupd.model.job import JobRecord

Key = tuple[str, str]
"""Server and leg."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A leg since ``since``; every due time up to ``handled`` has its row among the jobs.

    ``cadence`` is what was followed, in words of the caller; empty while the leg is in no configuration: then nothing
    after ``handled`` has a row yet.
    """

    server: str
    leg: str
    cadence: str
    since: datetime
    handled: datetime

    @property
    def key(self) -> Key:
        return self.server, self.leg


class Schedules:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> dict[Key, Schedule]:
        with self._database.read() as connection:
            return _all(connection)

    def settle(
        self,
        before: Mapping[Key, Schedule],
        after: Sequence[Schedule],
        *,
        jobs: Sequence[JobRecord] = (),
        events: Sequence[Event] = (),
        skipped: Mapping[str, str] | None = None,
        now: datetime | None = None,
    ) -> None:
        """Write ``after``, ``jobs`` and ``events``, and end the queued jobs ``skipped`` (id: why) at ``now``, all or
        nothing.

        ``before``: the rows as the decision saw them. Raises RefusedError when one of those written has changed since:
        then somebody else dealt with the same due times; or when one of ``skipped`` has just been started.
        """
        with self._database.write() as connection:
            found = _all(connection)
            changed = [row.key for row in after if found.get(row.key) != before.get(row.key)]
            if changed:
                raise RefusedError(
                    f"{len(changed)} schedules were changed by another process",
                    detail=", ".join("/".join(key) for key in changed[:10]),
                    hint="is a second backupd service at work on this catalog?",
                )
            new = [row for row in after if row.key not in found]
            old = [row for row in after if row.key in found]
            if new:
                connection.execute(
                    insert(schedules),
                    [
                        {
                            "server": row.server,
                            "leg": row.leg,
                            "cadence": row.cadence,
                            "since": row.since,
                            "handled": row.handled,
                        }
                        for row in new
                    ],
                )
            if old:
                connection.execute(
                    _UPDATE,
                    [
                        {
                            "at_server": row.server,
                            "at_leg": row.leg,
                            "cadence": row.cadence,
                            "since": row.since,
                            "handled": row.handled,
                        }
                        for row in old
                    ],
                )
            if skipped and now is not None:
                skip_jobs(connection, skipped, now)
            insert_jobs(connection, jobs)
            insert_events(connection, events)


_UPDATE = update(schedules).where(schedules.c.server == bindparam("at_server"), schedules.c.leg == bindparam("at_leg"))


def _all(connection: Connection) -> dict[Key, Schedule]:
    return {(row.server, row.leg): Schedule(*row) for row in connection.execute(select(schedules))}

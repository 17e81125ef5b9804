"""Rows of jobs: what ran, for whom, how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, exists, insert, select, update
from sqlalchemy.engine import RowMapping

from backupd.catalog.database import Database
from backupd.catalog.phases import phases_from, phases_json
from backupd.catalog.tables import jobs
from backupd.model.errors import BackupdError, NotFoundError, RefusedError
from backupd.model.job import FIRST_STATES, JOB_MOVES, JobRecord, JobState
from backupd.model.proof import Phase


class Jobs:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, record: JobRecord) -> None:
        """Record a job in one of its first states. Raises RefusedError for an id that exists."""
        if record.state not in FIRST_STATES:
            raise ValueError(f"no job begins as {record.state}")
        with self._database.write() as connection:
            if connection.scalar(select(exists().where(jobs.c.id == record.id))):
                raise RefusedError(f"job {record.id} is in the catalog already")
            connection.execute(insert(jobs).values(**_columns(record)))

    def finish(self, job_id: str, state: JobState, now: datetime, *, error: BackupdError | None = None,
               bytes: int = 0, phases: Sequence[Phase] = ()) -> JobRecord:  # noqa: A002  the model's word
        """End a running job. ``bytes`` of plaintext moved.

        Raises RefusedError when the job is over: a worker that slept through being declared abandoned must not
        call itself successful. Raises NotFoundError.
        """
        sources = [str(source) for source, moves in JOB_MOVES.items() if state in moves]
        ending = update(jobs).where(jobs.c.id == job_id, jobs.c.state.in_(sources)).values(
            state=str(state), finished_at=now, message=error.message if error else "",
            detail=error.detail if error else "", hint=error.hint if error else "", bytes=bytes,
            phases=phases_json(phases))
        with self._database.write() as connection:
            changed = connection.execute(ending).rowcount
            record = _one(connection, job_id)
            if not changed:
                raise RefusedError(f"job {job_id} is {record.state}, it cannot become {state}")
            return record

    def get(self, job_id: str) -> JobRecord:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            return _one(connection, job_id)

    def list(self, server: str | None = None, *, kind: str | None = None, state: JobState | None = None,
             limit: int | None = None) -> tuple[JobRecord, ...]:
        """Newest first."""
        query = select(jobs).order_by(jobs.c.queued_at.desc(), jobs.c.id.desc()).limit(limit)
        for column, wanted in ((jobs.c.server, server), (jobs.c.kind, kind), (jobs.c.state, state)):
            if wanted is not None:
                query = query.where(column == str(wanted))
        with self._database.read() as connection:
            return tuple(_record(row) for row in connection.execute(query).mappings())

    def abandon_dead(self, is_alive: Callable[[str], bool], now: datetime) -> tuple[JobRecord, ...]:
        """End as abandoned every running job whose ``owner`` is not alive; gives those."""
        dead = [job for job in self.list(state=JobState.RUNNING) if not is_alive(job.owner)]
        error = BackupdError("the process that ran this job is gone",
                             hint="run it again; whatever it left at a destination is removed by the next run")
        ended = []
        for job in dead:
            try:
                ended.append(self.finish(job.id, JobState.ABANDONED, now, error=error))
            except RefusedError:
                continue  # it ended by itself, or another process abandoned it, since we looked
        return tuple(ended)


def _one(connection: Connection, job_id: str) -> JobRecord:
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).mappings().first()
    if row is None:
        raise NotFoundError(f"there is no job {job_id}")
    return _record(row)


def _columns(record: JobRecord) -> dict[str, Any]:
    columns = {column.name: getattr(record, column.name) for column in jobs.columns}
    return {**columns, "state": str(record.state), "arguments": dict(record.arguments),
            "progress": dict(record.progress) if record.progress else None, "phases": phases_json(record.phases)}


def _record(row: RowMapping) -> JobRecord:
    return JobRecord(**{**row, "state": JobState(row["state"]), "phases": phases_from(row["phases"])})

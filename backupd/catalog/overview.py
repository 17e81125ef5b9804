"""What is read of all servers at once, in a few statements however many there are: for metrics and overviews."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Select, case, func, or_, select

from backupd.catalog.alerts import messages
from backupd.catalog.database import Rows
from backupd.catalog.destinations import binlog_lags
from backupd.catalog.jobs import OPEN
from backupd.catalog.proofs import proofs
from backupd.catalog.tables.backups import server_stock
from backupd.catalog.tables.binlogs import (
    binlog_runs,
    binlog_streams,
)
from backupd.catalog.tables.jobs import jobs
from backupd.model.event import MessageState
from backupd.model.job import NOT_COUNTED, JobState, LastJob
from backupd.model.proof import PROVED, RESTORED

BAD_ENDS = frozenset({JobState.FAILED, JobState.ABANDONED, JobState.PARTIAL, JobState.MISSED})
"""Of a last job: somebody should look."""


@dataclass(frozen=True, slots=True)
class LastTest:
    """The newest test restore of a server, and when one found its data good and as new as it was asked for.
    ``warnings`` and ``older``: None of one of before there were any."""

    id: str
    backup_id: str
    outcome: str
    finished_at: datetime
    tables_compared: int
    error: str
    proved_at: datetime | None
    warnings: Sequence[str] | None
    older: bool | None


def is_in_trouble(job: LastJob, others: Iterable[LastJob]) -> bool:
    """Did it end badly, with nothing since that makes up for it? What a person asked for is made up for by any later
    success of its server and kind; a schedule by its own."""
    if job.state not in BAD_ENDS or job.leg or job.finished_at is None:
        return job.state in BAD_ENDS
    return not any(
        one.succeeded_at is not None and one.succeeded_at > job.finished_at
        for one in others
        if (one.server, one.kind) == (job.server, job.kind)
    )


@dataclass(frozen=True, slots=True)
class Stock:
    """Of one destination: backups with a complete copy, and the bytes of all that is there."""

    backups: int = 0
    bytes: int = 0


def _of(servers: Collection[str] | None, query: Select[Any]) -> Select[Any]:
    """Those rows of ``query`` that are of these servers; None: of all."""
    return query if servers is None else query.where(query.selected_columns.server.in_(servers))


_STOCK = server_stock.c
_GROUP = ("server", "kind", "leg")


def _groups(servers: Collection[str] | None) -> Any:
    """Each server, kind and leg of which there is a job. Of all servers it is found by a step of the index for each,
    however many jobs it has: no database plans the plain query so."""
    if servers is not None:
        return select(*(jobs.c[name] for name in _GROUP)).where(jobs.c.server.in_(servers)).distinct().subquery()

    def first(*where: Any) -> Any:
        one = jobs.alias("one")
        of_one = [one.c[name] for name in _GROUP]
        query = select(one.c.id).where(*(condition(one.c) for condition in where))
        return query.order_by(*of_one, one.c.id).limit(1).correlate(jobs).scalar_subquery()

    this = jobs.c
    found = select(first().label("id")).cte("found", recursive=True)
    following = func.coalesce(
        first(lambda one: one.server == this.server, lambda one: one.kind == this.kind, lambda one: one.leg > this.leg),
        first(lambda one: one.server == this.server, lambda one: one.kind > this.kind),
        first(lambda one: one.server > this.server),
    )
    found = found.union_all(select(following).join_from(found, jobs, jobs.c.id == found.c.id))
    return select(*(this[name] for name in _GROUP)).join_from(found, jobs, this.id == found.c.id).subquery()


class Glances(Rows):
    """What is read of all servers at once."""

    def mark(self) -> tuple[int, int] | None:
        """Changes with what anybody writes into the catalog; None where that cannot be seen without asking it."""
        if not self._database.sqlite:
            return None
        try:
            found = Path(f"{self._database.name}-wal").stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def streams(self, servers: Collection[str] | None = None) -> dict[str, tuple[Mapping[str, Any], datetime]]:
        """The status that each stream recorded last, and when."""
        return {row.server: (row.status, row.updated_at) for row in self._rows(_of(servers, select(binlog_streams)))}

    def lags(self, since: datetime) -> dict[tuple[str, str], float]:
        """By server and destination: the most seconds that it was behind in any hour since then."""
        begin = since.replace(minute=0, second=0, microsecond=0)
        query = (
            select(binlog_lags.c.server, binlog_lags.c.destination, func.max(binlog_lags.c.seconds))
            .where(binlog_lags.c.hour >= begin)
            .group_by(binlog_lags.c.server, binlog_lags.c.destination)
        )
        return {(server, destination): worst for server, destination, worst in self._rows(query)}

    def tests(self, servers: Collection[str] | None = None) -> dict[str, LastTest]:
        """By server."""
        last = _of(servers, select(proofs.c.server, func.max(proofs.c.finished_at).label("at")))
        last = last.group_by(proofs.c.server)
        newest = last.subquery()
        good = last.where(proofs.c.outcome.in_([PROVED, RESTORED]) & proofs.c.older.is_not(True)).subquery()
        query = (
            select(
                proofs.c.server,
                proofs.c.id,
                proofs.c.backup_id,
                proofs.c.outcome,
                proofs.c.finished_at,
                proofs.c.tables_compared,
                proofs.c.error,
                good.c.at,
                proofs.c.warnings,
                proofs.c.older,
            )
            .join(newest, (newest.c.server == proofs.c.server) & (newest.c.at == proofs.c.finished_at))
            .outerjoin(good, good.c.server == proofs.c.server)
            .order_by(proofs.c.id)
        )
        return {server: LastTest(*rest) for server, *rest in self._rows(query)}

    def last_jobs(self, servers: Collection[str] | None = None) -> tuple[LastJob, ...]:
        """One for each server, kind and leg. Jobs that were cancelled, and runs that a rule skipped, do not count."""
        ended = jobs.c.state.not_in([*map(str, OPEN), *map(str, NOT_COUNTED)])
        each = _groups(servers)

        def of_group(query: Select[Any]) -> Any:
            return query.where(*(jobs.c[name] == each.c[name] for name in _GROUP)).correlate(each).scalar_subquery()

        last = of_group(select(jobs.c.id).where(ended).order_by(jobs.c.id.desc()).limit(1))
        good = of_group(select(func.max(jobs.c.finished_at)).where(jobs.c.state == str(JobState.SUCCEEDED)))
        found = select(last.label("id"), good.label("succeeded_at")).select_from(each).subquery()
        query = (
            select(
                jobs.c.id,
                jobs.c.server,
                jobs.c.kind,
                jobs.c.leg,
                jobs.c.state,
                jobs.c.finished_at,
                jobs.c.message,
                jobs.c.hint,
                found.c.succeeded_at,
            )
            .join(found, found.c.id == jobs.c.id)
            .order_by(jobs.c.server, jobs.c.kind, jobs.c.leg)
        )
        return self._records(LastJob, query)

    def ended_jobs(self, since: datetime) -> dict[tuple[str, str, str], int]:
        """How many ended since then, by server, kind and state."""
        query = (
            select(jobs.c.server, jobs.c.kind, jobs.c.state, func.count())
            .where(
                or_(jobs.c.finished_at >= since, jobs.c.finished_at.is_(None) & (jobs.c.queued_at >= since)),
                jobs.c.state.not_in([str(state) for state in OPEN]),
            )
            .group_by(jobs.c.server, jobs.c.kind, jobs.c.state)
        )
        return {(server, kind, state): count for server, kind, state, count in self._rows(query)}

    def stock(self) -> dict[str, Stock]:
        """By destination. Objects that several backups share are counted with the one that stored them first; where
        that is gone, the largest that is left is a lower bound."""
        most = case((_STOCK.bytes_new > _STOCK.bytes_stored, _STOCK.bytes_new), else_=_STOCK.bytes_stored)
        whole = select(_STOCK.destination, func.sum(_STOCK.backups), func.sum(most)).group_by(_STOCK.destination)
        logs = select(binlog_runs.c.destination, func.sum(binlog_runs.c.stored)).group_by(binlog_runs.c.destination)
        found: dict[str, Stock] = {}
        with self._database.read() as connection:
            for destination, count, size in connection.execute(whole):
                found[destination] = Stock(int(count), int(size))
            for destination, stored in connection.execute(logs):
                before = found.get(destination, Stock())
                found[destination] = Stock(before.backups, before.bytes + int(stored))
        return found

    def messages(self) -> dict[MessageState, int]:
        """How many there are in each state."""
        query = select(messages.c.state, func.count()).group_by(messages.c.state)
        found = {MessageState(state): count for state, count in self._rows(query)}
        return {state: found.get(state, 0) for state in MessageState}

    def oldest_message(self) -> datetime | None:
        """When the oldest one that still waits to be sent was made."""
        queued = messages.c.state == str(MessageState.QUEUED)
        oldest: datetime | None = self._scalar(select(func.min(messages.c.created_at)).where(queued))
        return oldest

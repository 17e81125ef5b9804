"""Restores, the plans that they are started from, and how fast each of their phases went."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Connection,
    Float,
    Index,
    String,
    Table,
    and_,
    delete,
    exists,
    insert,
    select,
    text,
    update,
)

from backupd.catalog.database import Rows
from backupd.catalog.jobs import OPEN, insert_jobs
from backupd.catalog.proofs import proofs
from backupd.catalog.row_mapping import (
    EVER,
    FreeText,
    Listed,
    Span,
    UtcTime,
    first_record,
    metadata,
    narrowed,
    page,
    phases_from,
    phases_json,
    row_of,
)
from backupd.catalog.tables.jobs import jobs
from backupd.model.errors import BusyError, NotFoundError, RefusedError
from backupd.model.job import RESTORE_MOVES, JobRecord, JobState, RestoreRecord
from backupd.model.proof import Phase
from backupd.model.text import format_time

if TYPE_CHECKING:
    from backupd.recovery.ist import Rejoin

restores = Table(
    "restores",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("backup_id", String(64), nullable=False),
    Column("target", FreeText, nullable=False),
    Column("datadir", FreeText, nullable=False),
    Column("state", String(32), nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("finished_at", UtcTime),
    Column("phases", JSON, nullable=False),
    Column("error", FreeText, nullable=False),
    Column("owner", FreeText, nullable=False),
    Column("job_id", String(64), nullable=False, server_default=text("''")),
    Column("request", JSON(none_as_null=True)),
    Index(None, "server", "started_at"),
    Index(None, "state"),
)


plans = Table(
    "plans",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("made_at", UtcTime, nullable=False),
    Column("made_by", FreeText, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    Column("request", JSON, nullable=False),
    Column("document", JSON, nullable=False),
)
"""Plans that somebody was shown, and may start by their id until they expire."""


rejoins = Table(
    "rejoins",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("node", FreeText, nullable=False),
    Column("uuid", String(64), nullable=False),
    Column("seqno", BigInteger, nullable=False),
    Column("forecast", String(32), nullable=False),
    Column("donor", String(64), nullable=False),
    Column("until", UtcTime),
    Column("predicted_seconds", Float),
    Column("began_at", UtcTime, nullable=False),
    Column("came", String(32), nullable=False),
    Column("ended_at", UtcTime),
    Index(None, "uuid", "began_at"),
)


class Rejoins(Rows):
    """How nodes came back to their clusters, beside what was predicted of that."""

    def put(self, rejoin: Rejoin) -> None:
        """Record what is predicted, or what came of it; an earlier row of the restore gives way."""
        self._put(rejoins, row_of(rejoins, rejoin))

    def find(self, restore_id: str) -> Rejoin | None:
        """Of a restore."""
        from backupd.recovery.ist import Rejoin

        return self._record(Rejoin, select(rejoins).where(rejoins.c.id == restore_id))

    def of_cluster(self, uuid: str, limit: int = 10) -> tuple[Rejoin, ...]:
        """The newest ones to a cluster, newest first."""
        from backupd.recovery.ist import Rejoin

        query = select(rejoins).where(rejoins.c.uuid == uuid)
        return self._records(Rejoin, query.order_by(rejoins.c.began_at.desc()).limit(limit))


class Restores(Rows):
    """Restores. A failed or abandoned one can run again: what it fetched is still in its staging folder."""

    def start(self, record: RestoreRecord) -> None:
        """Record a restore that begins now. Raises RefusedError for an id that exists."""
        with self._database.write() as connection:
            _insert(connection, record)

    def queue(self, record: RestoreRecord, job: JobRecord) -> RestoreRecord:
        """A restore that waits for ``job``, both recorded or neither: a new one, or one that is over and is gone on
        with. Raises BusyError where another one into the same data directory waits or runs."""
        with self._database.write() as connection:
            busy = connection.scalar(
                select(restores.c.id)
                .where(
                    restores.c.server == record.server,
                    restores.c.datadir == record.datadir,
                    restores.c.state.in_(_OPEN),
                )
                .limit(1)
            )
            if busy is not None:
                raise BusyError(
                    f"restore {busy} into {record.datadir} is queued or running already",
                    hint="wait for it, or cancel its job first (backupd jobs)",
                )
            if connection.scalar(select(exists().where(restores.c.id == record.id))):
                _move(
                    connection,
                    record.id,
                    JobState.QUEUED,
                    finished_at=None,
                    error="",
                    owner="",
                    job_id=job.id,
                    target=record.target,
                    backup_id=record.backup_id,
                    request=_plain(record.request),
                )
            else:
                _insert(connection, record)
            insert_jobs(connection, [job])
            return _one(connection, record.id)

    def requeue(self, restore_id: str, job_id: str) -> RestoreRecord:
        """One that is over waits for another job. Raises RefusedError from any other state, NotFoundError."""
        with self._database.write() as connection:
            return _move(connection, restore_id, JobState.QUEUED, finished_at=None, error="", owner="", job_id=job_id)

    def take_up(self, restore_id: str, job_id: str, owner: str) -> RestoreRecord:
        """One that waits, or that is over without having succeeded, runs as ``job_id``. Its phases stay. Raises
        RefusedError from any other state, NotFoundError."""
        with self._database.write() as connection:
            return _move(
                connection, restore_id, JobState.RUNNING, finished_at=None, error="", owner=owner, job_id=job_id
            )

    def keep_outcome(self, restore_id: str, outcome: Mapping[str, Any]) -> None:
        """What it came to, with what was asked for. Raises NotFoundError."""
        with self._database.write() as connection:
            record = _one(connection, restore_id)
            connection.execute(
                update(restores)
                .where(restores.c.id == restore_id)
                .values(request={**(record.request or {}), "outcome": dict(outcome)})
            )

    def settle(self, now: datetime) -> tuple[RestoreRecord, ...]:
        """End what waits for, or runs as, a job that is over, as that ended; gives those."""
        query = (
            select(restores.c.id, jobs.c.state, jobs.c.message)
            .select_from(restores.outerjoin(jobs, restores.c.job_id == jobs.c.id))
            .where(
                restores.c.state.in_(_OPEN),
                restores.c.job_id != "",
                jobs.c.state.is_(None) | jobs.c.state.not_in([str(state) for state in OPEN]),
            )
        )
        with self._database.read() as connection:
            over = connection.execute(query).all()
        ended = []
        for restore_id, state, message in over:
            as_it_ended = {str(one): one for one in (JobState.CANCELLED, JobState.FAILED)}
            try:
                ended.append(
                    self.finish(
                        restore_id,
                        as_it_ended.get(state, JobState.ABANDONED),
                        now,
                        error=message or "the job ended without a result for this restore",
                    )
                )
            except RefusedError:
                continue  # another process was faster
        return tuple(ended)

    def phase_done(self, restore_id: str, phase: Phase) -> RestoreRecord:
        """Append a finished phase to a running restore; one of the same name is replaced (it ran again).

        Raises RefusedError when the restore is not running, NotFoundError.
        """
        with self._database.write() as connection:
            record = _one(connection, restore_id)
            if record.state is not JobState.RUNNING:
                raise RefusedError(f"restore {restore_id} is {record.state}, not running")
            phases = [done for done in record.phases if done.name != phase.name] + [phase]
            connection.execute(update(restores).where(restores.c.id == restore_id).values(phases=phases_json(phases)))
            return _one(connection, restore_id)

    def finish(
        self, restore_id: str, state: JobState, now: datetime, *, error: str = "", phases: Sequence[Phase] | None = None
    ) -> RestoreRecord:
        """End a running restore; ``phases`` None keeps those recorded on the way.

        Raises RefusedError when it is over, NotFoundError.
        """
        with self._database.write() as connection:
            return _move(
                connection,
                restore_id,
                state,
                finished_at=now,
                error=error,
                **({} if phases is None else {"phases": phases_json(phases)}),
            )

    def get(self, restore_id: str) -> RestoreRecord:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            return _one(connection, restore_id)

    def list(
        self,
        server: str | None = None,
        *,
        state: JobState | None = None,
        datadir: str | None = None,
        limit: int | None = None,
    ) -> tuple[RestoreRecord, ...]:
        """Newest first."""
        query = select(restores).order_by(restores.c.started_at.desc(), restores.c.id.desc()).limit(limit)
        query = narrowed(query, (restores.c.server, server), (restores.c.state, state), (restores.c.datadir, datadir))
        return self._records(RestoreRecord, query)

    def page(
        self,
        servers: Collection[str] | None = None,
        *,
        state: JobState | None = None,
        span: Span = EVER,
        limit: int = 100,
        after: str | None = None,
    ) -> Listed[RestoreRecord]:
        """One page of the list; ``servers`` None: of all; ``span``: when they were begun. Raises UsageError for what is
        no cursor."""
        query = narrowed(select(restores), (restores.c.server, servers), (restores.c.state, state))
        read = partial(self._records, RestoreRecord)
        return page(read, span.of(query, restores.c.started_at), restores.c.started_at, after, limit)

    def abandon_dead(self, is_alive: Callable[[str], bool], now: datetime) -> tuple[RestoreRecord, ...]:
        """End as abandoned every running restore whose ``owner`` is not alive; gives those."""
        ended = []
        for record in self.list(state=JobState.RUNNING):
            if is_alive(record.owner):
                continue
            try:
                ended.append(
                    self.finish(record.id, JobState.ABANDONED, now, error="the process that ran this restore is gone")
                )
            except RefusedError:
                continue  # it ended, or another process abandoned it, since we looked
        return tuple(ended)


_OPEN = (str(JobState.QUEUED), str(JobState.RUNNING))


def _insert(connection: Connection, record: RestoreRecord) -> None:
    if connection.scalar(select(exists().where(restores.c.id == record.id))):
        raise RefusedError(f"restore {record.id} is in the catalog already")
    connection.execute(insert(restores).values(row_of(restores, record, request=_plain(record.request))))


def _plain(request: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return dict(request) if request else None


def _move(connection: Connection, restore_id: str, state: JobState, **values: object) -> RestoreRecord:
    sources = [str(source) for source, moves in RESTORE_MOVES.items() if state in moves]
    changed = connection.execute(
        update(restores)
        .where(restores.c.id == restore_id, restores.c.state.in_(sources))
        .values(state=str(state), **values)
    ).rowcount
    record = _one(connection, restore_id)
    if not changed:
        raise RefusedError(f"restore {restore_id} is {record.state}, it cannot become {state}")
    return record


def _one(connection: Connection, restore_id: str) -> RestoreRecord:
    found = first_record(connection, RestoreRecord, select(restores).where(restores.c.id == restore_id))
    if found is None:
        raise NotFoundError(f"there is no restore {restore_id}")
    return found


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """``request``: what was asked for, and ``document``: the plan for that, both as JSON."""

    id: str
    server: str
    made_at: datetime
    made_by: str
    expires_at: datetime
    request: Mapping[str, Any]
    document: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """As the REST interface gives it."""
        return {
            **self.document,
            "id": self.id,
            "server": self.server,
            "made_at": format_time(self.made_at),
            "made_by": self.made_by,
            "expires_at": format_time(self.expires_at),
            "request": dict(self.request),
        }


class Plans(Rows):
    """Plans: what a restore would do, as somebody was shown it, to be started by its id for a while."""

    def add(self, plan: StoredPlan, now: datetime) -> None:
        """Those that have expired go."""
        with self._database.write() as connection:
            connection.execute(delete(plans).where(plans.c.expires_at <= now))
            connection.execute(insert(plans).values(row_of(plans, plan)))

    def get(self, plan_id: str, now: datetime) -> StoredPlan:
        """Raises NotFoundError, also for one that has expired."""
        found = self._record(StoredPlan, select(plans).where(plans.c.id == plan_id, plans.c.expires_at > now))
        if found is None:
            raise NotFoundError(
                f"there is no plan {plan_id[:80]}, or it has expired", hint="request a new plan and start that one"
            )
        return found


SAMPLES = 20
"""Runs of each sort that are looked at, newest first: old hardware should be forgotten."""

OF_TABLES = ("extracted", "loaded", "handed_over")
_WHOLE = "/%"
"""Restores of whole servers have the path of a data directory; those of tables name the tables, and where to."""
_SIGNIFICANT = 4 * 1024 * 1024
"""Bytes of rows from which on a speed means something: below, it is the time that starting takes."""
_SHORTEST = 0.001
"""Seconds below which a phase says nothing about speed."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What is known of one phase.

    ``bytes_per_second``: the median over runs that moved bytes, None when none did. ``seconds``: the median
    duration. ``samples``: runs counted. ``server``: whose runs they are, None when the server has none
    and those of all servers were taken. ``start``, of ``rolled_forward``: the median duration of runs that replayed
    next to nothing, which is what the applier takes to begin; the speed is that of the others, without it. None: no
    such run.
    """

    phase: str
    bytes_per_second: float | None
    seconds: float
    samples: int
    server: str | None
    start: float | None = None

    def estimate(self, size: int) -> float:
        """Seconds that this phase takes for ``size`` bytes; without a rate, its median duration."""
        return size / self.bytes_per_second if self.bytes_per_second else self.seconds


class Rates(Rows):
    """Rates: how fast each phase of restores and backups went lately, which a plan's estimate is made of."""

    def of(self, server: str) -> Mapping[str, Rate]:
        """Rates by phase name, from the server's own successful runs; phases it never ran, from all servers' runs."""
        return {**rates(self._phases(None), None), **rates(self._phases(server), server)}

    def of_tables(self, server: str) -> Mapping[str, Rate]:
        """Rates of what only restores of tables do (``OF_TABLES``), likewise. Their other phases work on next to
        nothing and say nothing about a whole server."""
        of_tables = and_(restores.c.state == str(JobState.SUCCEEDED), restores.c.datadir.not_like(_WHOLE))
        found = {}
        for whose in (None, server):
            phases = [
                phase
                for phase in self._recent(restores, of_tables, whose)
                if phase.name in OF_TABLES and phase.bytes >= _SIGNIFICANT
            ]
            found.update(rates(phases, whose))
        return found

    def _phases(self, server: str | None) -> list[Phase]:
        succeeded = str(JobState.SUCCEEDED)
        found: list[Phase] = []
        # A failed test restore still fetched and prepared at a true speed only up to its failing phase, whose time
        # means nothing; so only good ends count.
        for table, state, values in (
            # Not its bare name: SQLite would sort what its index of states gives, nearly every job, for the last few.
            (jobs, jobs.c.state.concat(""), (succeeded, str(JobState.PARTIAL))),
            (proofs, proofs.c.outcome, ("proved", "restored")),
        ):
            found.extend(self._recent(table, state.in_(values), server))
        whole = and_(restores.c.state == succeeded, restores.c.datadir.like(_WHOLE))
        return [*found, *self._recent(restores, whole, server)]

    def _recent(self, table: Table, good: Any, server: str | None) -> Iterable[Phase]:
        query = select(table.c.phases).where(good).order_by(table.c.finished_at.desc()).limit(SAMPLES)
        if server is not None:
            query = query.where(table.c.server == server)
        return [phase for column in self._scalars(query) for phase in phases_from(column)]


def rates(phases: Iterable[Phase], server: str | None) -> dict[str, Rate]:
    """Medians by phase name."""
    grouped: dict[str, list[Phase]] = {}
    for phase in phases:
        grouped.setdefault(phase.name, []).append(phase)
    found = {}
    for name, group in grouped.items():
        if name == "rolled_forward":
            found[name] = _replay_rate(group, server)
            continue
        speeds = [phase.bytes / phase.seconds for phase in group if phase.bytes > 0 and phase.seconds >= _SHORTEST]
        found[name] = Rate(
            phase=name,
            bytes_per_second=median(speeds) if speeds else None,
            seconds=median(phase.seconds for phase in group),
            samples=len(group),
            server=server,
        )
    return found


def _replay_rate(group: Sequence[Phase], server: str | None) -> Rate:
    """How fast the applier starts is no speed, and what it takes with little to do is no time that grows."""
    little = [phase.seconds for phase in group if phase.bytes < _SIGNIFICANT]
    start = median(little) if little else None
    speeds = [
        phase.bytes / max(phase.seconds - (start or 0.0), _SHORTEST) for phase in group if phase.bytes >= _SIGNIFICANT
    ]
    return Rate(
        phase="rolled_forward",
        bytes_per_second=median(speeds) if speeds else None,
        seconds=median(phase.seconds for phase in group),
        samples=len(group),
        server=server,
        start=start,
    )

"""The queue of jobs, and the schedules that fill it.

A job that runs has a lease: the pair of the job and a token. The token grows with every new owner, and a writer names
the one it holds, so that a process that slept through being declared dead can no longer change its job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Update,
    and_,
    bindparam,
    column,
    delete,
    exists,
    false,
    func,
    insert,
    not_,
    or_,
    select,
    table,
    text,
    tuple_,
    update,
)

from backupd.catalog.alerts import events as events_table
from backupd.catalog.database import SERVER_TIME, Rows
from backupd.catalog.row_mapping import (
    EVER,
    Listed,
    Span,
    UtcTime,
    among,
    first_record,
    insert_all,
    narrowed,
    page,
    phases_json,
    record_of,
    records,
    row_of,
)
from backupd.catalog.tables.jobs import jobs, schedules
from backupd.model.errors import BackupdError, RefusedError, unknown
from backupd.model.event import Event
from backupd.model.job import FIRST_STATES, HOST, JOB_MOVES, Bar, JobKind, JobRecord, JobState, Key, Schedule
from backupd.model.proof import Phase

FRESH = timedelta(minutes=5)
"""A job of a process that cannot be seen from here is dead when its heartbeat is older."""

OPEN = (JobState.QUEUED, JobState.WAITING, JobState.RUNNING)
"""States of a job that is not over."""
_CLAIMING = 0x6261636B75706A
"""Key of the advisory lock that claimers of one PostgreSQL database take turns by: the letters ``backupj``."""
_SWEEPING = 0x6261636B757073
"""Key of the advisory lock under which sweeps are queued: the letters ``backups``."""

_destination = jobs.c.arguments["destination"].as_string()
"""That a job names; null in one of none."""
_HOSTS = table("hosts", column("name"))
"""As ``catalog.hosts`` has it, which is built on this module."""

_FIRST, _MORE = 4, 50
"""Queued jobs that are read at once: mostly the oldest may start."""

Allowed = Callable[[JobRecord, Sequence[JobRecord]], bool]
"""May this queued job start now, with those running? Asked from the oldest one on, for one look at the queue."""
Bars = Callable[[Sequence[JobRecord]], Sequence[Bar]]
"""Which queued jobs cannot start now, with those running."""


class Jobs(Rows):
    """Jobs: the queue, the lease on each job that runs, and what became of it."""

    def add(self, record: JobRecord) -> None:
        """Record a job in one of its first states. Raises RefusedError for an id that exists."""
        with self._database.write() as connection:
            if connection.scalar(select(exists().where(jobs.c.id == record.id))):
                raise RefusedError(f"job {record.id} is in the catalog already")
            if record.heartbeat_at is not None:
                record = replace(record, heartbeat_at=self._database.clock(connection, record.heartbeat_at))
            insert_jobs(connection, [record])

    def enqueue(self, record: JobRecord) -> None:
        """The same, for those who leave the work to the service of the host that it ``runs_on``. Raises RefusedError
        for a host that is not in the catalog, too: nobody would ever take the job."""
        name = record.runs_on.removeprefix(HOST)
        if name and not self._scalar(select(exists().where(_HOSTS.c.name == name))):
            raise RefusedError(
                f"job {record.id} is for host {name}, which this catalog does not know",
                hint="`backupd hosts` lists the hosts; a host is recorded when its service begins: backupd serve",
            )
        self.add(record)

    def claim(
        self,
        owner: str,
        now: datetime,
        *,
        runs_on: str = "",
        allowed: Allowed = lambda _job, _running: True,
        bars: Bars = lambda _running: (),
        inherits: bool = True,
    ) -> JobRecord | None:
        """Take the oldest queued job of ``runs_on`` whose time has come and which ``allowed`` lets start, as running
        for ``owner``. Those of ``bars`` are passed over unseen. ``inherits``: those of before hosts had names become
        jobs of ``runs_on``.

        Claimers of one host take turns, so no job is taken twice and ``allowed`` sees every job just taken. Reads the
        jobs that run, and the queue as far as the first that may start.
        """
        with self._database.write() as connection:
            if not self._database.sqlite:
                connection.execute(
                    text("SELECT pg_advisory_xact_lock(hashtextextended(:host, :key))"),
                    {"host": runs_on, "key": _CLAIMING},
                )
            if runs_on and inherits:
                readdress(connection, "", runs_on)  # of before hosts had names
            running = records(connection, JobRecord, _RUNNING)
            for job in _waiting(connection, runs_on, now, partial(bars, running)):
                if not allowed(job, running):
                    continue
                taken = {
                    **_moving(job.id, job.token),
                    "owner": owner,
                    "token": job.token + 1,
                    "started_at": now,
                    "message": "",
                    "hint": "",
                    **({"heartbeat_at": now} if self._database.sqlite else {}),
                }
                row = connection.execute(_TAKE[self._database.sqlite], taken).mappings().first()
                if row is not None:  # else it was cancelled in this very moment
                    return record_of(JobRecord, row)
        return None

    def adopt(self, job_id: str, token: int, owner: str, now: datetime) -> JobRecord:
        """``owner`` goes on with a running job that was claimed for it, under a new token.

        Raises RefusedError when ``token`` is not the job's newest or the job is over, NotFoundError.
        """
        return self._write(job_id, token, {"owner": owner, "token": token + 1}, now)

    def heartbeat(self, job_id: str, token: int, now: datetime, progress: Mapping[str, Any] | None = None) -> str:
        """Say that the job is alive and how far it is; gives who asked to stop it, empty when nobody did.

        Raises RefusedError when the job is no longer the caller's, NotFoundError.
        """
        values = {} if progress is None else {"progress": dict(progress)}
        return self._write(job_id, token, values, now).cancel_by

    def assert_held(self, job_id: str, token: int) -> None:
        """Raises RefusedError when the job is no longer the caller's, NotFoundError."""
        record = self.get(job_id)
        if (record.state, record.token) != (JobState.RUNNING, token):
            raise _taken_over(record)

    def finish(
        self,
        job_id: str,
        state: JobState,
        now: datetime,
        *,
        token: int,
        error: BackupdError | None = None,
        result: str = "",
        bytes: int = 0,  # noqa: A002  the model's word
        phases: Sequence[Phase] = (),
        then: Sequence[JobRecord] = (),
        events: Sequence[Event] = (),
    ) -> JobRecord:
        """End a job in ``state``, a last one. ``bytes`` of plaintext moved; ``result``: the id of what it made.
        ``then``: jobs that follow from it; they and ``events`` are recorded with it, or nothing is.

        Raises RefusedError when the job is over or ``token`` is not its newest: a worker that slept through being
        declared abandoned must not call itself successful. Raises NotFoundError.
        """
        if JOB_MOVES[state]:
            raise ValueError(f"no job ends as {state}")
        ending = {
            **_moving(job_id, token),
            "finished_at": now,
            "message": error.message if error else "",
            "detail": error.detail if error else "",
            "hint": error.hint if error else "",
            "result": result,
            "bytes": bytes,
            "phases": phases_json(phases),
        }
        with self._database.write() as connection:
            row = connection.execute(_END[state], ending).mappings().first()
            if row is not None:
                insert_jobs(connection, then)
                insert_all(connection, events_table, events)
                return record_of(JobRecord, row)
            record = _one(connection, job_id)
            if record.token != token and record.state is JobState.RUNNING:
                raise _taken_over(record)
            raise RefusedError(f"job {job_id} is {record.state}, it cannot become {state}")

    def request_cancel(self, job_id: str, by: str, now: datetime) -> JobRecord:
        """Cancel a queued or waiting job at once; ask the owner of a running one to stop. Asking twice changes nothing.

        Raises RefusedError for a job that is over, NotFoundError.
        """
        with self._database.write() as connection:
            ending = {"state": str(JobState.CANCELLED), "cancel_by": by, "finished_at": now}
            queued = _changed(job_id, JobState.QUEUED, **ending, message=f"cancelled by {by} before it began")
            waiting = _changed(job_id, JobState.WAITING, **ending, message=f"cancelled by {by} while it waited")
            asked = _changed(job_id, JobState.RUNNING, cancel_by=by).where(jobs.c.cancel_by == "")
            changed = any(connection.execute(change).rowcount for change in (queued, waiting, asked))
            record = _one(connection, job_id)
            if not changed and record.state is not JobState.RUNNING:
                raise RefusedError(f"job {job_id} is {record.state}: it cannot be cancelled")
            return record

    def pull_back(self, now: datetime, horizon: timedelta) -> tuple[JobRecord, ...]:
        """Jobs that were queued more than ``horizon`` after ``now``, by a clock that was ahead, count as queued now and
        wait for nothing. Gives them as they were."""
        ahead = jobs.c.queued_at > now + horizon
        found = self._records(JobRecord, _in_state(JobState.QUEUED).where(ahead))
        if found:
            queued = update(jobs).where(jobs.c.state == str(JobState.QUEUED), ahead)
            self._do(queued.values(queued_at=now, not_before=None))
        return found

    def say_waiting(self, reasons: Mapping[str, str], hint: str) -> None:
        """Write beside queued jobs (id: why) why they have not started, in one transaction: there may be a thousand.
        Nothing happens to one that is not queued any more."""
        if reasons:
            said = [{"of_job": job_id, "why": why, "what_to_do": hint} for job_id, why in reasons.items()]
            self._do(_SAY, said)

    def late(self, before: datetime, limit: int) -> tuple[JobRecord, ...]:
        """Queued jobs that could have started at ``before``, those that have waited longest first."""
        due = or_(jobs.c.not_before.is_(None), jobs.c.not_before <= before)
        query = _in_state(JobState.QUEUED).where(jobs.c.queued_at <= before, due)
        return self._records(JobRecord, query.order_by(jobs.c.queued_at, jobs.c.id).limit(limit))

    def open_copies(self) -> frozenset[tuple[str, str]]:
        """Servers and destinations of which a job that replicates is not over."""
        open_now = jobs.c.state.in_([str(state) for state in OPEN])
        query = select(jobs.c.server, _destination).where(open_now, jobs.c.kind == JobKind.REPLICATE)
        return frozenset((row[0], row[1] or "") for row in self._rows(query))

    def waiting(self, now: datetime, horizon: timedelta) -> tuple[JobRecord, ...]:
        """Waiting jobs that are to be looked at now; also those whose time is more than ``horizon`` ahead, which a
        clock that was ahead has set."""
        due = or_(jobs.c.not_before.is_(None), jobs.c.not_before <= now, jobs.c.not_before > now + horizon)
        query = _in_state(JobState.WAITING).where(due)
        return self._records(JobRecord, query.order_by(jobs.c.queued_at, jobs.c.id))

    def go_on_waiting(
        self,
        job_id: str,
        until: datetime,
        message: str,
        *,
        hint: str = "",
        progress: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """When a waiting job is to be looked at next, and what it waits for; nothing happens to one that is over."""
        given = {"progress": progress, "arguments": arguments}
        changed = {name: dict(value) for name, value in given.items() if value is not None}
        self._do(_changed(job_id, JobState.WAITING, not_before=until, message=message, hint=hint, **changed))

    def dead(self, is_alive: Callable[[str], bool | None], now: datetime) -> tuple[JobRecord, ...]:
        """Running jobs whose ``owner`` is not alive.

        ``is_alive`` says None of an owner that cannot be seen from here: then a heartbeat of the last five minutes
        counts as life.
        """
        found = []
        with self._database.read() as connection:
            clock = self._database.clock(connection, now)
            running = records(connection, JobRecord, _in_state(JobState.RUNNING))
        for job in running:
            alive = is_alive(job.owner)
            if alive is None:
                seen = job.heartbeat_at or job.started_at
                alive = seen is not None and clock - seen < FRESH
            if not alive:
                found.append(job)
        return tuple(found)

    def _write(self, job_id: str, token: int, values: dict[str, Any], now: datetime) -> JobRecord:
        """Change a running job that is the caller's, which is a sign of life."""
        beat = {"heartbeat_at": self._database.stamp(now)}
        ours = _changed(job_id, JobState.RUNNING, **beat, **values).where(jobs.c.token == token)
        with self._database.write() as connection:
            row = connection.execute(ours.returning(*jobs.c)).mappings().first()
            if row is None:
                raise _taken_over(_one(connection, job_id))
            return record_of(JobRecord, row)

    def get(self, job_id: str) -> JobRecord:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            return _one(connection, job_id)

    def find(self, job_id: str) -> JobRecord | None:
        """None for one that is forgotten, like every job after a while."""
        return self._record(JobRecord, select(jobs).where(jobs.c.id == job_id))

    def list(
        self,
        server: str | Collection[str] | None = None,
        *,
        kind: str | None = None,
        state: JobState | Collection[JobState] | None = None,
        leg: str | None = None,
        previous: str | None = None,
        since: datetime | None = None,
        limit: int | None = None,
    ) -> tuple[JobRecord, ...]:
        """Newest first. ``state``: one or several; ``since``: those queued then or later."""
        query = narrowed(
            Span(since).of(_of(server, kind), jobs.c.queued_at),
            (jobs.c.state, state),
            (jobs.c.leg, leg),
            (jobs.c.previous, previous),
        )
        return self._records(JobRecord, query.order_by(jobs.c.queued_at.desc(), jobs.c.id.desc()).limit(limit))

    def page(
        self,
        servers: Collection[str] | None = None,
        *,
        kind: str | None = None,
        state: JobState | None = None,
        span: Span = EVER,
        limit: int = 100,
        after: str | None = None,
    ) -> Listed[JobRecord]:
        """One page of the list; ``servers`` None: of all, and of none; ``span``: when they were queued. Raises
        UsageError for what is no cursor."""
        query = narrowed(_of(servers, kind), (jobs.c.state, state))
        read = partial(self._records, JobRecord)
        return page(read, span.of(query, jobs.c.queued_at), jobs.c.queued_at, after, limit)

    def prune(self, older_than: datetime) -> tuple[str, ...]:
        """Remove jobs that were over before ``older_than``, and give their ids.

        Of each server, kind and leg the last one stays, and the last that succeeded.
        """
        last = select(func.max(jobs.c.id)).group_by(jobs.c.server, jobs.c.kind, jobs.c.leg)
        with self._database.write() as connection:
            over = select(jobs.c.id).where(
                jobs.c.state.not_in([str(state) for state in OPEN]),
                func.coalesce(jobs.c.finished_at, jobs.c.queued_at) < older_than,
                jobs.c.id.not_in(last),
                jobs.c.id.not_in(last.where(jobs.c.state == str(JobState.SUCCEEDED))),
            )
            gone = tuple(connection.scalars(over))
            for start in range(0, len(gone), 500):
                connection.execute(delete(jobs).where(jobs.c.id.in_(gone[start : start + 500])))
            return gone


def _of(servers: str | Collection[str] | None, kind: str | None) -> Select[Any]:
    """Thaws are rare: those of all servers are found by the index of each server's kinds, without a look at every
    job."""
    query = narrowed(select(jobs), (jobs.c.server, servers), (jobs.c.kind, kind))
    return query.where(jobs.c.server.in_(_each_server())) if servers is None and kind == JobKind.THAW else query


def _each_server() -> Select[Any]:
    """Of which there are jobs: a step of the index for each."""
    found = select(func.min(jobs.c.server).label("server")).cte("known", recursive=True)
    one = jobs.alias("one")
    following = select(func.min(one.c.server)).where(one.c.server > found.c.server).scalar_subquery()
    found = found.union_all(select(following).where(found.c.server.is_not(None)))
    return select(found.c.server).where(found.c.server.is_not(None))


def _waiting(
    connection: Connection, runs_on: str, now: datetime, bars: Callable[[], Sequence[Bar]]
) -> Iterator[JobRecord]:
    """Queued jobs whose time has come, the oldest first, but those of ``bars``, which is asked again now and then."""
    query, values = _QUEUE_FIRST, {"host": runs_on, "moment": now}
    name = connection.dialect.name
    while found := records(connection, JobRecord, _without(query, bars(), name), values):
        yield from found
        query, values = _QUEUE_AFTER, {**values, "last": found[-1].queued_at, "last_id": found[-1].id}


def _queue() -> Select[Any]:
    due = or_(jobs.c.not_before.is_(None), jobs.c.not_before <= bindparam("moment"))
    query = _in_state(JobState.QUEUED).where(jobs.c.runs_on == bindparam("host"), due)
    return query.order_by(jobs.c.queued_at, jobs.c.id)


def _without(query: Select[Any], bars: Sequence[Bar], dialect: str) -> Select[Any]:
    return query.where(*(not_(_fits(bar, dialect)) for bar in bars)) if bars else query


def _fits(bar: Bar, dialect: str) -> ColumnElement[bool]:
    """As a condition on a row of ``jobs``."""
    found = [jobs.c.leg != ""] if bar.scheduled else []
    for one, values in ((jobs.c.kind, bar.kinds), (_destination, bar.destinations)):
        if values is not None:
            found.append(one.in_(sorted(values)))
    if bar.servers is not None:
        found.append(among(jobs.c.server, bar.servers, dialect))
    if bar.but is not None:
        found.append(jobs.c.kind.not_in(sorted(bar.but)))
    return func.coalesce(and_(*found), false())


def readdress(connection: Connection, before: str, after: str) -> None:
    """Jobs that are not over and wait for the host ``before`` wait for ``after``."""
    connection.execute(
        update(jobs)
        .where(jobs.c.runs_on == before, jobs.c.state.in_([str(state) for state in OPEN]))
        .values(runs_on=after)
    )


def insert_jobs(connection: Connection, records: Sequence[JobRecord]) -> None:
    """Record jobs, as ``Jobs.add`` does, within a transaction of the caller. No sweep is queued beside one that waits
    for the same host and destination: that one has not begun to look, and will see whatever this one was to see."""
    if wrong := [record.state for record in records if record.state not in FIRST_STATES]:
        raise ValueError(f"no job begins as {wrong[0]}")
    sweeps = [one for one in records if one.kind == JobKind.SWEEP and one.state is JobState.QUEUED]
    if sweeps and connection.dialect.name == "postgresql":  # two jobs may end at once; SQLite has one writer
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SWEEPING})
    late = {one.id for one in sweeps if connection.scalar(select(exists(_waits_like(one))))}
    insert_all(connection, jobs, [one for one in records if one.id not in late])


def _waits_like(sweep: JobRecord) -> Select[Any]:
    """A queued sweep of the same destination, for the same host."""
    same = _destination == str(sweep.arguments["destination"])
    return _in_state(JobState.QUEUED).where(jobs.c.runs_on == sweep.runs_on, jobs.c.kind == JobKind.SWEEP, same)


def skip_jobs(connection: Connection, reasons: Mapping[str, str], now: datetime) -> None:
    """End queued jobs (id: why) as skipped, within a transaction of the caller. Raises RefusedError when one of them is
    not queued any more."""
    if not reasons:
        return
    # At once: a thousand may be, and nobody else writes meanwhile.
    ending = [{"of_job": job_id, "reason": reason, "at": now} for job_id, reason in reasons.items()]
    if connection.execute(_SKIP, ending).rowcount != len(ending):
        raise RefusedError(f"one of {len(ending)} jobs that were to be skipped does not wait any more")


def _taken_over(record: JobRecord) -> RefusedError:
    how = "it was taken over" if record.state is JobState.RUNNING else f"it is {record.state}"
    return RefusedError(
        f"job {record.id} is no longer this process's: {how}", hint=f"see: backupd jobs show {record.id}"
    )


def _moving(job_id: str, token: int) -> dict[str, Any]:
    """Which job is moved."""
    return {"of_job": job_id, "of_token": token}


def _move(state: JobState, *changed: str) -> Update:
    """To ``state``, from any from which the table of moves allows it, with new values of ``changed``."""
    return (
        update(jobs)
        .where(*_movable(jobs.c, state))
        .values({"state": str(state), **{name: bindparam(name) for name in changed}})
        .returning(*jobs.c)
    )


def _movable(columns: Any, state: JobState) -> tuple[ColumnElement[bool], ...]:
    sources = [str(source) for source, moves in JOB_MOVES.items() if state in moves]
    return columns.id == bindparam("of_job"), columns.token == bindparam("of_token"), columns.state.in_(sources)


def _take(beat: ColumnElement[datetime]) -> Update:
    """A claim passes over a job that somebody else changes in this moment (it is being cancelled): it waits for
    nobody."""
    one = jobs.alias("one")
    free = select(one.c.id).where(*_movable(one.c, JobState.RUNNING)).with_for_update(skip_locked=True)
    moved = _move(JobState.RUNNING, "owner", "token", "started_at", "message", "hint")
    return moved.values(heartbeat_at=beat).where(jobs.c.id == free.scalar_subquery())


def _in_state(*states: JobState) -> Select[Any]:
    return select(jobs).where(jobs.c.state.in_([str(state) for state in states]))


# A claim and an end are asked for with each job: their statements are made once.
_TAKE = {True: _take(bindparam("heartbeat_at")), False: _take(SERVER_TIME)}
"""On SQLite, where the caller says the time; on PostgreSQL, where the server does (see ``Database.stamp``)."""
_ENDED = ("finished_at", "message", "detail", "hint", "result", "bytes", "phases")
_END = {state: _move(state, *_ENDED) for state, moves in JOB_MOVES.items() if not moves}
_SKIP = (
    update(jobs)
    .where(jobs.c.id == bindparam("of_job"), jobs.c.state == str(JobState.QUEUED))
    .values(state=str(JobState.SKIPPED), finished_at=bindparam("at"), message=bindparam("reason"), hint="")
)
_SAY = (
    update(jobs)
    .where(jobs.c.id == bindparam("of_job"), jobs.c.state == str(JobState.QUEUED))
    .values(message=bindparam("why"), hint=bindparam("what_to_do"))
)
_RUNNING = _in_state(JobState.RUNNING)
_QUEUE_FIRST = _queue().limit(_FIRST)
_QUEUE_AFTER = (
    _queue()
    .where(tuple_(jobs.c.queued_at, jobs.c.id) > tuple_(bindparam("last", type_=UtcTime), bindparam("last_id")))
    .limit(_MORE)
)


def _changed(job_id: str, now: JobState, **values: Any) -> Update:
    """Of a job in this state now; nothing happens to one that is not."""
    return update(jobs).where(jobs.c.id == job_id, jobs.c.state == str(now)).values(**values)


def _one(connection: Connection, job_id: str) -> JobRecord:
    if (found := first_record(connection, JobRecord, select(jobs).where(jobs.c.id == job_id))) is None:
        raise unknown("job", job_id, lists="jobs")
    return found


class Schedules(Rows):
    """Schedules: up to which due time each leg of each server has been dealt with."""

    def all(self) -> dict[Key, Schedule]:
        """Every row, by server and leg."""
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
            if after:
                connection.execute(_FORGET, [{"of_server": row.server, "of_leg": row.leg} for row in after])
                connection.execute(insert(schedules), [row_of(schedules, row) for row in after])
            if skipped and now is not None:
                skip_jobs(connection, skipped, now)
            insert_jobs(connection, jobs)
            insert_all(connection, events_table, events)


_FORGET = delete(schedules).where(schedules.c.server == bindparam("of_server"), schedules.c.leg == bindparam("of_leg"))


def _all(connection: Connection) -> dict[Key, Schedule]:
    return {(row.server, row.leg): Schedule(*row) for row in connection.execute(select(schedules))}

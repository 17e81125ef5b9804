"""Letting a replica loose: started for good, it follows its source, is waited for, and is handed over read-only.

Its server listens on a socket that only its own user and root reach. Caught up means: it has applied what the source
had executed a few seconds ago. A delayed replica has received that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from backupd.engine.server.launch import ServerConfig
from backupd.engine.server.replication import Receiving, ReplicaStatus, read_replica, set_account, start_replica
from backupd.engine.sql.client import Session
from backupd.engine.sql.dialect import Dialect, dialect_of
from backupd.model.binlog import MysqlGtids, covers
from backupd.model.document import Document, json_key
from backupd.model.errors import BackupdError, CancelledError, RefusedError, ServerError
from backupd.model.job import Progress
from backupd.model.proof import Check
from backupd.model.server_facts import Flavour, Position, ServerInfo
from backupd.model.text import format_duration
from backupd.process.output import redact
from backupd.process.run_context import RunContext
from restore.datadir.start import Started, drop_account, end_started, running, start_with_account
from restore.planning.plan import ComparedBy
from restore.replica.hand_over import LATE, HandOver, compare_checksums, compare_gtids
from restore.replica.setup import ReplicaSpec, ReplicaState, replica_options

CLOSE_SECONDS = 3.0
"""A replica that has applied what the source had so long ago has caught up."""
GONE_SECONDS = 90.0
"""How long the source may not answer."""
STILL_SECONDS = 900.0
"""How long a replica that is behind may not move."""
MOST_SECONDS = 7 * 24 * 3600.0
_PAUSE = 0.25
_PURGED, _FATAL = 1236, 13114
"""MySQL 8 and later puts what the source answers into words of its own: "Got fatal error 1236 from source ..."."""
_LASTING = frozenset({1045, 1130, 1236, 1593, 1698, 2061, 13114, 13117, 13122})
"""Errors of the receiver that do not go away by trying again: the account, purged logs, equal ids."""
PHASE = "replicated"


@dataclass(frozen=True, slots=True)
class Replica(Document):
    """The replica that a restore made. ``position``: where it began; ``uuid``: its own; ``gtids``: what it had executed
    when it was handed over; ``lag``: seconds behind its source then. ``events``: scheduled events that were disabled;
    ``options``: what its service has to be started with. ``compared_by``: what of it was compared with its source
    before that, and ``not_compared``: why not all, or nothing."""

    source: str
    server_id: int
    uuid: str
    position: Position
    by_gtid: bool
    caught_up: bool
    delay: int = 0
    lag: float | None = field(default=None, metadata=json_key(digits=1))
    gtids: str = ""
    events: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    compared_by: ComparedBy = field(default=ComparedBy.NOTHING, metadata=json_key(later=True))
    not_compared: str = field(default="an earlier version did not record it", metadata=json_key(later=True))


def not_begun(state: ReplicaState, info: ServerInfo, delay: int) -> Replica:
    """Of a copy that is a replica and has not begun: its own service will."""
    return Replica(
        state.source,
        state.server_id,
        state.uuid,
        state.start.position,
        state.start.by_gtid,
        caught_up=False,
        delay=delay,
        events=state.events,
        options=replica_options(info, state.server_id, state.gtid_mode),
        not_compared="replication has not begun",
    )


def follow(
    config: ServerConfig, info: ServerInfo, spec: ReplicaSpec, state: ReplicaState, context: RunContext
) -> tuple[Started, Replica, Check]:
    """Start the server of ``config`` and its replication, wait until it has caught up, compare it with its
    source, and hand it over.

    Raises ServerError where replication stops or the source is gone, RefusedError where it cannot go on: the server is
    left as it is then, and the same command goes on with it."""
    dialect = dialect_of(info.flavour, info.version)
    if (up := running(config.directory)) is not None:
        end_started(up)  # with an account whose password nobody knows any more
    started, connection = start_with_account(config)
    with connection.connect() as session:
        set_account(session, dialect, spec.source)
        start_replica(session, dialect)
        status, lag = _Wait(session, dialect, spec, state, context).run()
        if state.start.by_gtid:
            compared = compare_gtids(session, spec.connection)
        elif status.is_delayed:
            compared = HandOver(ComparedBy.NOTHING, LATE)
        else:
            compared = compare_checksums(spec.connection, connection, context)
            status, lag = _Wait(session, dialect, spec, state, context).run()
        drop_account(session)
        if info.flavour is not Flavour.MARIADB:
            session.execute("SET GLOBAL super_read_only = ON")
    done = Replica(
        state.source,
        state.server_id,
        state.uuid,
        state.start.position,
        state.start.by_gtid,
        caught_up=True,
        delay=status.delay,
        lag=lag,
        gtids=status.gtids,
        events=state.events,
        options=replica_options(info, state.server_id, state.gtid_mode),
        compared_by=compared.by,
        not_compared=compared.why,
    )
    return started, done, compared.check


class _Wait:
    """Until the replica has caught up."""

    def __init__(
        self, session: Session, dialect: Dialect, spec: ReplicaSpec, state: ReplicaState, context: RunContext
    ) -> None:
        self._session, self._dialect, self._spec, self._state, self._context = session, dialect, spec, state, context
        self._mariadb = dialect.flavour is Flavour.MARIADB
        self._first: tuple[float, float] | None = None

    def run(self) -> tuple[ReplicaStatus, float]:
        """The last look, and how many seconds the replica was behind at most."""
        begun = seen = moved = time.monotonic()
        goal: tuple[Position, float] | None = None
        before: tuple[object, ...] = ()
        while True:
            if self._context.cancel.is_set():
                raise CancelledError(
                    "waiting for the replica was cancelled; it goes on replicating", hint="repeat the command"
                )
            status = read_replica(self._session, self._dialect)
            if status is None:
                raise ServerError("the replica has no replication connection any more", hint="repeat the command")
            self._refuse_broken(status)
            now = time.monotonic()
            if status.receiving is Receiving.YES:
                seen = now
            elif now - seen > GONE_SECONDS:
                raise ServerError(
                    f"the source {self._state.source} has not answered for {GONE_SECONDS:.0f} s",
                    detail=redact(str(status)),
                    hint="the replica is set up and left running: repeat the command once the source is back",
                )
            goal = goal or self._goal(now)
            if goal is not None and status.receiving is Receiving.YES and self._is_at(status, goal[0]):
                if now - goal[1] <= CLOSE_SECONDS:
                    return status, max(now - goal[1], float(status.lag or 0.0) if status.is_delayed else 0.0)
                goal = None
                continue
            place = (status.gtids, status.applied.file, status.applied.pos, status.received.file, status.received.pos)
            if place != before:
                before, moved = place, now
            elif now - moved > STILL_SECONDS or now - begun > MOST_SECONDS:
                raise ServerError(
                    f"the replica has not moved for {format_duration(now - moved)} and has not caught up",
                    detail=redact(str(status)),
                    hint="the replica is left running: SHOW PROCESSLIST says why; then repeat the command",
                )
            self._report(status, now)
            time.sleep(_PAUSE)

    def _goal(self, now: float) -> tuple[Position, float] | None:
        """Where the source is; None while it cannot be asked."""
        try:
            with self._spec.connection.connect() as session:
                gtids = str(session.scalar(self._dialect.executed_gtid) or "").replace("\n", "")
                row = next(iter(session.permitted(self._dialect.binlog_status) or ()), None)
        except ServerError:
            return None
        return Position(str(row[0]) if row else "", int(row[1]) if row else 0, gtids), now

    def _is_at(self, status: ReplicaStatus, goal: Position) -> bool:
        if self._state.start.by_gtid:
            return covers(status.gtids, goal.gtid, mariadb=self._mariadb) or (
                status.is_delayed and covers(self._received(status), goal.gtid, mariadb=self._mariadb)
            )
        at = status.received if status.is_delayed else status.applied
        if goal.file:
            return (_number(at.file), at.pos) >= (_number(goal.file), goal.pos)
        return status.has_applied_all and status.lag == 0

    def _received(self, status: ReplicaStatus) -> str:
        if self._mariadb:
            return status.retrieved or status.gtids
        return str(MysqlGtids.parse(status.gtids).plus(MysqlGtids.parse(status.retrieved)))

    def _refuse_broken(self, status: ReplicaStatus) -> None:
        error: BackupdError
        if status.apply_error:
            raise ServerError(
                f"replication stopped at {status.applied.file}:{status.applied.pos} (error {status.apply_error.code})",
                detail=redact(status.apply_error.text),
                hint="the copy differs from its source there: restore from another backup, and have that one proved",
            )
        if status.receive_error and status.receive_error.code in _LASTING:
            code = status.receive_error.code
            if code == _PURGED or (code == _FATAL and f"fatal error {_PURGED} " in status.receive_error.text):
                error = RefusedError(
                    f"the source {self._state.source} does not send what follows {self._state.start}: it was purged "
                    "meanwhile, or its history is another one",
                    detail=redact(status.receive_error.text),
                    hint="remove this copy, take a new backup, and restore that",
                )
            else:
                error = ServerError(
                    f"the replica cannot connect to its source {self._state.source} (error {code})",
                    detail=redact(status.receive_error.text),
                    hint="correct the account of replication_defaults_file at the source, then repeat the command",
                )
            raise error

    def _report(self, status: ReplicaStatus, now: float) -> None:
        """With what is left at the speed of the time so far."""
        note = str(status) if status.receiving is not Receiving.YES else f"lag {_lag(status)}"
        lag = float(status.lag or 0.0) - status.delay
        if lag > 0:
            first = self._first = self._first or (now, lag)
            if now - first[0] >= 5 and first[1] > lag:
                left = lag * (now - first[0]) / (first[1] - lag)
                note += f", caught up in about {format_duration(left)}"
        self._context.report(Progress("replicate", note=note, waits=True))


def _lag(status: ReplicaStatus) -> str:
    return "unknown" if status.lag is None else format_duration(status.lag)


def _number(file: str) -> int:
    ending = file.rpartition(".")[2]
    return int(ending) if ending.isdecimal() else 0

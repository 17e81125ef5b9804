"""Doing a restore, of a whole server or of tables: resolved from the catalog, executed without it, recorded. And what
unfinished restores of tables left on a server."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from backupd.app.context.keys import require_keys
from backupd.app.context.logging_setup import say
from backupd.app.context.server_identity import refuse_stranger
from backupd.app.context.wiring import JobRun, Wiring, owner, owner_is_alive
from backupd.app.restores.cluster_members import galera_spec
from backupd.app.restores.donors import donors, foretold
from backupd.app.restores.new_replica import planned_whole
from backupd.app.restores.plan import moment_of, sources, statements
from backupd.app.restores.progress import OVER
from backupd.app.restores.request import WHOLE_MODES, RestoreOptions, RestoreRequest
from backupd.app.restores.table_sources import chosen_way
from backupd.app.restores.thaw_jobs import JobThawWait
from backupd.app.restores.thaw_wait import parts_of, refuse_cold
from backupd.app.verify.missing_tables import doubt
from backupd.engine.sql.client import Connection
from backupd.model.backup_record import BackupRecord
from backupd.model.errors import (
    BackupdError,
    CancelledError,
    CatalogError,
    DamagedError,
    DestinationError,
    NotFoundError,
    RefusedError,
    UnknownNameError,
)
from backupd.model.event import Severity
from backupd.model.job import JobRecord, JobState, RestoreRecord
from backupd.model.proof import Phase, Witness
from backupd.model.text import format_time, is_id, new_id
from backupd.process.run_context import RunContext
from backupd.recovery.ist import Rejoin
from policies.document import suggestion
from restore.cutover.cutover import pending, settle
from restore.cutover.plan import Pending
from restore.cutover.staging_schema import Staging, drop_staging, stagings
from restore.cutover.table_swap import LostError
from restore.fetch.sources import NO_THAW_WAIT, ThawWait
from restore.galera import rejoin
from restore.planning.plan import Plan
from restore.planning.starting_backup import same_gtid
from restore.planning.table_plan import Source, TablePlan, Triggers
from restore.tables import restore as tablerestore
from restore.tables.outcome import TablesOutcome, TablesSpec
from restore.tables.restore import discard
from restore.tables.row_difference import SAMPLE
from restore.whole_server import RestoreOutcome, RestoreSpec, execute

IST_MISSED = "ist-missed"
"""Event while a node's restore takes longer than a donor keeps what the node lacks."""
_LOOKED_AT = 50
"""Restores of a server, the newest, among which earlier attempts at the same are looked for."""


Outcome = RestoreOutcome | TablesOutcome


def restore(
    wiring: Wiring,
    request: RestoreRequest,
    run: JobRun,
    *,
    waiting: RestoreRecord | None = None,
    as_promised: Callable[[TablePlan], None] = lambda _chosen: None,
) -> Outcome:
    """Restore a whole server into a folder, or tables into a running server or as SQL files, as ``run``; or go on with
    what an interrupted one left. ``waiting``: its row, where one was queued; else it gets a new one, or that of the
    interrupted one. ``as_promised`` raises where the plan for tables is not what was asked for.

    Without a renaming tables replace live ones: the job's ``confirm`` must be the name of that server, or
    ``run.confirm`` is asked once it is known how they differ. Raises what planning raises, RefusedError without
    confirmation, and what the execution raises; no live table was touched then, or a repeated call finishes what had
    begun.
    """
    kind: type[_Restore] = _Tables if request.of_tables else _Server
    work = kind(wiring, request, run, waiting)
    if isinstance(work.chosen, TablePlan):
        as_promised(work.chosen)
    work.refuse()
    require_keys(wiring, request.server, work.base.chain)
    thaw = thaw_wait_of(wiring, work.base, request.options)
    work.prepare(thaw)
    restores = wiring.catalog.restores
    earlier = waiting or earlier_attempt(wiring, request, work.chosen)
    if earlier is not None:
        work.row = restores.take_up(earlier.id, run.job.id, owner())
    else:
        work.row = replace(row_of(request, work.chosen, run.job), started_at=wiring.clock(), owner=owner())
        restores.start(work.row)
    try:
        outcome = work.execute(thaw)
    except BaseException as error:
        work.failed(error)
        with contextlib.suppress(RefusedError):  # it was over, and stopped while it put its tools away
            stopped = isinstance(error, KeyboardInterrupt | CancelledError)
            text = str(error) if isinstance(error, BackupdError) else f"stopped: {type(error).__name__}"
            restores.finish(work.row.id, JobState.CANCELLED if stopped else JobState.FAILED, wiring.clock(), error=text)
        raise
    warnings = (*work.chosen.warnings, *outcome.warnings, *work.end())
    return replace(outcome, inexact=bool(work.base.inexact), warnings=tuple(dict.fromkeys(warnings)))


class _Restore(ABC):
    """One restore, resolved from the catalog. ``chosen``: its plan, ``base``: that of its backup; ``row``: what is
    recorded of it, once that runs."""

    chosen: Plan | TablePlan
    base: Plan
    row: RestoreRecord

    def __init__(self, wiring: Wiring, request: RestoreRequest, run: JobRun, waiting: RestoreRecord | None) -> None:
        """``waiting``: its row, where one was queued."""
        self._wiring, self._request, self._run, self._waiting = wiring, request, run, waiting

    def refuse(self) -> None:  # noqa: B027  as a rule nothing
        """Raises RefusedError for what may not be done."""

    def prepare(self, thaw: ThawWait) -> None:  # noqa: B027  as a rule nothing
        """Called before it has a row that runs."""

    @abstractmethod
    def execute(self, thaw: ThawWait) -> Outcome:
        """Do it, and record that it succeeded."""

    def failed(self, error: BaseException) -> None:  # noqa: B027  as a rule nothing
        """Called with what ended it."""

    def end(self) -> list[str]:
        """After it was done: what is to be said besides."""
        return []

    def _phase_done(self, phase: Phase) -> None:
        self._wiring.catalog.restores.phase_done(self.row.id, phase)

    def _succeeded(self, phases: Sequence[Phase]) -> None:
        self._wiring.catalog.restores.finish(self.row.id, JobState.SUCCEEDED, self._wiring.clock(), phases=phases)


class _Server(_Restore):
    """Of a whole server."""

    def __init__(self, wiring: Wiring, request: RestoreRequest, run: JobRun, waiting: RestoreRecord | None) -> None:
        super().__init__(wiring, request, run, waiting)
        if request.mode not in WHOLE_MODES:
            raise RefusedError(
                f"this version does not support mode {request.mode}", hint=f"use one of {', '.join(WHOLE_MODES)}"
            )
        chosen, self._follow = planned_whole(wiring, request, waiting.backup_id if waiting is not None else None)
        self.base = self.chosen = chosen
        wiring.settings.needs_restore()

    def execute(self, thaw: ThawWait) -> RestoreOutcome:
        """Do it, and record that it succeeded."""
        wiring, request, run, chosen = self._wiring, self._request, self._run, self.base
        server = wiring.settings.server(request.server)
        record = wiring.catalog.backups.get(chosen.backup_id)
        spec = RestoreSpec(
            restore_id=self.row.id,
            server=server.name,
            target=request.target,
            chain=chosen.chain,
            replay=chosen.replay,
            moment=moment_of(chosen, record),
            datadir=Path(request.datadir),
            owner=server.owner,
            start=request.start,
            replica=request.mode == "replica",
            checks=statements(server),
            witness=_witness_at_the_end(wiring, chosen, record),
            follow=self._follow,
        )
        read_from, context = sources(wiring, chosen, thaw), run.context(wiring, self._phase_done)
        outcome = (
            self._rejoined(record, lambda: rejoin.execute(spec, self._galera(), read_from, context))
            if request.of_node
            else execute(spec, read_from, context)
        )
        self._succeeded(outcome.phases)
        return outcome

    def _galera(self) -> rejoin.GaleraSpec:
        return replace(galera_spec(self._wiring, self._request), told=self._ist_missed)

    def _ist_missed(self, what: str, hint: str) -> None:
        """From a thread of its own, while the work goes on."""
        say(IST_MISSED, f"{what}; {hint}", level=logging.WARNING, server=self._request.server, job=self._run.job.id)
        with contextlib.suppress(CatalogError):
            self._wiring.note(
                IST_MISSED,
                Severity.WARNING,
                what,
                server=self._request.server,
                subject=self.row.id,
                hint=hint,
                job_id=self._run.job.id,
            )

    def _rejoined(self, record: BackupRecord, work: Callable[[], rejoin.RejoinOutcome]) -> rejoin.RejoinOutcome:
        """``work``, with what was foretold of it kept beside what came."""
        wiring, request = self._wiring, self._request
        verdict = foretold(wiring, request.server, record, timedelta(seconds=self.base.seconds))
        began = Rejoin.of(self.row.id, request.cluster, request.server, verdict, wiring.clock())
        if request.start:
            wiring.catalog.rejoins.put(began)
        try:
            outcome = work()
        except (RefusedError, DamagedError, DestinationError, NotFoundError) as error:
            error.detail = "\n".join(filter(None, (error.detail, self._seqnos())))
            raise
        if outcome.join is not None:
            came = replace(began, came=str(outcome.join.ending), ended_at=wiring.clock())
            wiring.catalog.rejoins.put(came)
        return outcome

    def _seqnos(self) -> str:
        """Between which seqnos something stood in the way."""
        backups = self._wiring.catalog.backups
        chain = [backups.get(one) for one in self.base.chain]
        at = [
            f"{one.id} at {one.node.seqno}" for one in chain if one.node is not None and one.node.position is not None
        ]
        with contextlib.suppress(BackupdError):
            looked = donors(self._wiring, self._request.server, next((one.node.uuid for one in chain if one.node), ""))
            at += [f"the cluster at {max(one.sample.last for one in looked.donors)}"] if looked.donors else []
        return f"seqnos: {', '.join(at)}" if at else ""

    def failed(self, error: BaseException) -> None:
        """What speaks against the backup makes it doubtful."""
        if isinstance(error, BackupdError):
            doubt(self._wiring, self.base.backup_id, error)


class _Tables(_Restore):
    """Of tables, into a running server or as SQL files."""

    def __init__(self, wiring: Wiring, request: RestoreRequest, run: JobRun, waiting: RestoreRecord | None) -> None:
        super().__init__(wiring, request, run, waiting)
        self._scratch = wiring.settings.needs_restore().scratch
        self._wanted = request.table_options
        self._goal = wiring.settings.reached(request.into) if request.into else None
        self._plan, self._way = chosen_way(wiring, request.server, request.target, self._wanted)
        self.chosen, self.base = self._plan, self._plan.base
        self._confirm: str | None = request.into or None if waiting is not None else run.job.arguments.get("confirm")

    def refuse(self) -> None:
        """Raises RefusedError without confirmation, and where another server answers than the configured one."""
        refuse_unconfirmed(self._request, self._confirm, asked=self._run.confirm is not None)
        if self._goal is not None:
            refuse_stranger(
                self._wiring,
                self._goal.name,
                self._goal.restore_connection(),
                "its tables are neither compared nor replaced: they are not those of the configured server",
            )

    def prepare(self, thaw: ThawWait) -> None:
        """Wait for all of it: of these tables there is little, and all of it is needed before they are rows."""
        for part in parts_of(self.base):
            thaw.wait(part, self._run.report, self._run.cancel.is_set)
        for one in self._wiring.catalog.restores.list(self._request.server, limit=_LOOKED_AT):
            if one.state is JobState.SUCCEEDED:  # and killed while it put its tools away
                discard(self._scratch.path, one.id)

    def execute(self, thaw: ThawWait) -> TablesOutcome:  # noqa: ARG002  waited for before
        """Do it, and record that it succeeded."""
        wiring, request, run, chosen, way = self._wiring, self._request, self._run, self._plan, self._way
        return tablerestore.execute(
            TablesSpec(
                restore_id=self.row.id,
                server=request.server,
                target=request.target,
                way=chosen.chosen.way,
                chain=chosen.base.chain,
                replay=chosen.base.replay,
                statements=way.statements,
                goals=chosen.goals,
                into=request.into,
                sql=Path(request.sql) if request.sql else None,
                whole=self._wanted.whole_schemas(chosen.goals),
                missing=way.missing,
                replace=self._wanted.renaming is None,
                compare=request.compare,
                keys=int(run.job.arguments.get("keys") or SAMPLE),
                triggers=Triggers(request.triggers),
                folder=self._scratch.path,
                max_bytes=self._scratch.max_bytes,
            ),
            self._goal.restore_connection() if self._goal else None,
            sources(wiring, chosen.base),
            run.context(wiring, self._phase_done),
            confirm=(lambda _found: True) if run.confirm is None or self._confirm == request.into else run.confirm,
            on_done=self._succeeded,
        )

    def failed(self, error: BaseException) -> None:
        """Where what was fetched is damaged or out of reach, the other way may do."""
        if isinstance(error, DamagedError | DestinationError) and self._wanted.source is None:
            other = Source.PHYSICAL if self._plan.chosen.way is Source.LOGICAL else Source.LOGICAL
            error.hint = "; ".join(filter(None, (error.hint, f"or use the other kind of backup: --from {other}")))

    def end(self) -> list[str]:
        """Remove what earlier attempts at the same tables left; gives what could not be removed."""
        connection = self._goal.restore_connection() if self._goal else None
        return _forget_superseded(self._wiring, connection, self.row, self._scratch.path)


@dataclass(frozen=True, slots=True)
class Leftover:
    """What an unfinished restore of tables left on a server. ``pending``: the cut-over of tables that it was in the
    middle of (None: none); ``finished``: its tables had their final names, and what they lacked was added now (a
    dropped one that is not finished was taken back); ``dropped``: it was removed."""

    staging: Staging
    pending: Pending | None = None
    finished: bool = False
    dropped: bool = False

    def as_json(self) -> dict[str, Any]:
        """As `leftovers --json` gives it; ``bytes`` of the staged tables."""
        one = self.staging
        moving = self.pending
        return {
            "restore": self.restore_id,
            "schemas": list(one.schemas),
            "tables": one.tables,
            "bytes": one.bytes,
            "begun": format_time(one.begun) if one.begun else None,
            "active": one.active,
            "hand_over": {"tables": [name.shown for name in moving.tables], "renamed": moving.renamed}
            if moving
            else None,
            "finished": self.finished,
            "dropped": self.dropped,
        }

    @property
    def restore_id(self) -> str:
        """As it is called elsewhere: names of schemas are in small letters."""
        moment, dash, number = self.staging.restore_id.partition("-")
        name = f"{moment.upper()}{dash}{number}"
        return name if is_id(name) else self.staging.restore_id


def leftovers(wiring: Wiring, server_name: str, *, drop: str | None = None) -> tuple[Leftover, ...]:
    """Staging schemas on a server; with ``drop`` (the id of a restore, ``all`` for every one that no process works
    at) these are removed, after a cut-over that had begun is taken back, or finished where its tables have their
    final names. Raises UnknownNameError, BusyError, ServerError, RefusedError where another server than the
    configured one answers."""
    connection = wiring.settings.server(server_name).restore_connection()
    refuse_stranger(
        wiring, server_name, connection, "backupd drops no schemas on a server other than the configured one"
    )
    found = stagings(connection)
    wanted = [
        one
        for one in found
        if drop is not None and (one.restore_id == drop.lower() or (drop == "all" and not one.active))
    ]
    if drop not in (None, "all") and not wanted:
        near = suggestion(drop, [one.restore_id for one in found])
        raise UnknownNameError(
            f"restore {drop} left nothing on {server_name}{near}",
            hint=f"`backupd leftovers {server_name}` lists the leftovers",
        )
    listed = []
    for one in found:
        begun = next((moving for schema in one.schemas if (moving := pending(connection, schema))), None)
        if one not in wanted:
            listed.append(Leftover(one, begun))
            continue
        finished = False
        for schema in one.schemas:
            with contextlib.suppress(LostError):  # taken back, and what is gone was to be dropped anyway
                finished = settle(connection, schema, RunContext()) is not None or finished
        drop_staging(connection, one.schemas)
        listed.append(Leftover(one, begun, finished=finished, dropped=True))
    return tuple(listed)


def refuse_unconfirmed(request: RestoreRequest, confirm: str | None, *, asked: bool) -> None:
    """Raises RefusedError where live tables would be replaced, and neither ``confirm`` is the name of their server nor
    somebody can be ``asked``."""
    into = request.into
    if not request.replaces_live or request.rename:
        return
    if confirm is not None and confirm != into:
        raise RefusedError(
            f"--confirm {confirm} does not match the target server {into}",
            hint=f"check the name; to replace tables of {into} give --confirm {into}",
        )
    if confirm is None and not asked:
        raise RefusedError(
            f"the restore replaces live tables on {into} and needs --confirm {into}",
            hint=f"compare first (--compare), then give --confirm {into}, or restore under other names (--as)",
        )


def identity_of(chosen: Plan | TablePlan, request: RestoreRequest) -> str:
    """What identifies a restore in the catalog: of a whole server its data directory. An interrupted one of tables is
    continued only for the very same rows (``latest`` is another position each time) and names."""
    if not isinstance(chosen, TablePlan):
        return os.path.realpath(request.datadir)
    wanted = request.table_options
    tables = " ".join(sorted(str(pattern) for pattern in wanted.tables))
    name = f" as {wanted.renaming.schema}.{wanted.renaming.table}" if wanted.renaming else ""
    replay = chosen.base.replay
    rows = (
        str(chosen.chosen.way),
        chosen.base.chain,
        chosen.base.until,
        replay.exclude if replay else (),
        [goal.as_json() for goal in chosen.goals],
        request.triggers,
    )
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:16]
    return f"{tables}{name} -> {request.into or Path(request.sql)} [{digest}]"


def _forget_superseded(wiring: Wiring, into: Connection | None, row: RestoreRecord, folder: Path) -> list[str]:
    """Remove what earlier attempts at the same tables left that came to be done in another way, or to another moment.
    Gives what could not be removed."""
    order = row.datadir.rpartition(" [")[0]
    over = {
        one.id.lower(): one.id
        for one in wiring.catalog.restores.list(row.server, limit=_LOOKED_AT)
        if one.id != row.id and one.datadir.rpartition(" [")[0] == order and one.state is not JobState.RUNNING
    }
    for restore_id in over.values():
        discard(folder, restore_id)
    if into is None or not over:
        return []
    try:
        for one in stagings(into):
            if one.restore_id in over and not one.active:
                drop_staging(into, one.schemas)
    except BackupdError as error:
        return [f"leftovers of earlier attempts could not be removed: {error.message}"]
    return []


# -- rows


def thaw_wait_of(wiring: Wiring, chosen: Plan, options: RestoreOptions) -> ThawWait:
    """What a restore waits at; with a tier it asks now for what is archived. Raises ArchivedError without one, where
    something has to be thawed."""
    if options.thaw:
        return JobThawWait(wiring, chosen, options.thaw, options.days)
    refuse_cold(chosen)
    return NO_THAW_WAIT


def _witness_at_the_end(wiring: Wiring, chosen: Plan, record: BackupRecord) -> Witness | None:
    """A witness of the very position that is restored."""
    if chosen.replay is None:
        return wiring.catalog.witnesses.of_backup(record.id)
    stop = chosen.replay.stop
    taken = wiring.catalog.witnesses.between(chosen.server, record.started_at, wiring.clock())
    return next(
        (
            witness
            for witness in taken
            if (witness.position.file, witness.position.pos) == (stop.file, stop.pos)
            and same_gtid(witness.position.gtid, stop.gtids)
        ),
        None,
    )


def earlier_attempt(wiring: Wiring, request: RestoreRequest, chosen: Plan | TablePlan) -> RestoreRecord | None:
    """The interrupted restore that ``chosen`` continues: of tables only to the very same target, which without a replay
    says no more than the backup does."""
    restores, base = wiring.catalog.restores, base_of(chosen)
    restores.abandon_dead(owner_is_alive, wiring.clock())
    for row in restores.list(base.server, datadir=identity_of(chosen, request), limit=1):
        same = (base.replay is None and not request.of_tables) or row.target == base.target
        if row.state in OVER and row.backup_id == base.backup_id and same:
            return row
    return None


def base_of(chosen: Plan | TablePlan) -> Plan:
    """The plan of the backup that a restore begins from."""
    return chosen.base if isinstance(chosen, TablePlan) else chosen


def promise(document: Mapping[str, Any]) -> dict[str, Any]:
    """What of a plan must not be otherwise when it is carried out."""
    until = document.get("until")
    return {
        "chain": list(document["chain"]),
        "way": document.get("way"),
        "tables": sorted(f"{one['source']} as {one['target']}" for one in document.get("tables", ())),
        "until": {name: until[name] for name in ("branch", "file", "pos", "gtid")} if until else None,
    }


def row_of(request: RestoreRequest, chosen: Plan | TablePlan, job: JobRecord) -> RestoreRecord:
    """The row of the restore that ``job`` does or will do, with what was asked for and what it was planned to come
    to."""
    base = base_of(chosen)
    steps = [{"name": step.name, "seconds": round(step.seconds, 1), "bytes": step.bytes} for step in chosen.steps]
    return RestoreRecord(
        id=new_id(job.queued_at),
        server=request.server,
        backup_id=base.backup_id,
        target=base.target,
        datadir=identity_of(chosen, request),
        state=job.state,
        started_at=job.queued_at,
        job_id=job.id,
        request={"request": request.as_json(), "promise": promise(chosen.as_json()), "steps": steps},
    )

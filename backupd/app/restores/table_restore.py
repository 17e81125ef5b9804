"""Restores of tables: which way is taken, from the catalog; then done without it, and recorded."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backupd.app.context.keys import require_keys
from backupd.app.context.server_identity import refuse_stranger
from backupd.app.context.wiring import JobRun, Wiring, owner
from backupd.app.restores.request import RestoreRequest, TableOptions
from backupd.app.restores.table_sources import chosen_way
from backupd.app.restores.thaw_wait import parts_of
from backupd.app.restores.whole_server import begin_row, end_row, gate_of, phases_of, sources
from backupd.engine.sql.client import Connection
from backupd.model.errors import (
    BackupdError,
    DamagedError,
    DestinationError,
    RefusedError,
    UnknownNameError,
)
from backupd.model.job import JobState, RestoreRecord
from backupd.model.proof import Phase
from backupd.model.text import format_time, is_id
from policies.document import suggestion
from restore.cutover.cutover import pending, settle
from restore.cutover.plan import Pending, Triggers
from restore.cutover.staging_schema import Staging, drop_staging, stagings
from restore.cutover.table_swap import LostError
from restore.planning.table_plan import Source, TablePlan
from restore.tables import restore as tablerestore
from restore.tables.outcome import TablesOutcome, TablesSpec
from restore.tables.restore import Confirm, discard
from restore.tables.row_difference import SAMPLE

_LOOKED_AT = 50
"""Restores of a server, the newest, among which earlier attempts at the same are looked for."""


def plan_tables(wiring: Wiring, server_name: str, target: str, wanted: TableOptions) -> TablePlan:
    """What a restore of these tables to ``target`` would do. Moves nothing, reads manifests, and where binary logs are
    replayed their indexes. Raises what ``restores.plan`` raises, for want of any way."""
    return chosen_way(wiring, server_name, target, wanted)[0]


def restore_tables(
    wiring: Wiring,
    request: RestoreRequest,
    run: JobRun,
    *,
    confirm: str | None = None,
    ask: Confirm | None = None,
    restore_id: str = "",
    keys: int = SAMPLE,
    promise: Callable[[TablePlan], None] = lambda _chosen: None,
) -> TablesOutcome:
    """Restore tables into a running server, or as SQL files into a folder, as ``run``. ``restore_id``: the row that
    waits for it; ``keys``: the maximum number of keys that are reported of each sort of rows that differ; ``promise``
    raises where what is done now is not what was asked for.

    Without a renaming they take the place of live tables: ``confirm`` must be the name of that server, or ``ask`` is
    asked once it is known how they differ. Raises what ``plan_tables`` raises, RefusedError without confirmation, and
    what the execution raises; no live table was touched then, or a repeated call finishes what had begun.
    """
    settings = wiring.settings.needs_restore()
    wanted = request.table_options
    goal = wiring.settings.server(request.into) if request.into else None
    chosen, way = chosen_way(wiring, request.server, request.target, wanted)
    promise(chosen)
    refuse_unconfirmed(request, confirm, asked=ask is not None)
    if goal is not None:
        refuse_stranger(
            wiring,
            goal.name,
            goal.restore_connection(),
            "its tables are neither compared nor replaced: they are not those of the configured server",
        )
    require_keys(wiring, request.server, chosen.base.chain)
    gate = gate_of(wiring, chosen.base, wanted.options)
    for part in parts_of(chosen.base):  # of these tables there is little, and all of it is needed before they are rows
        gate.wait(part, run.report, run.cancel.is_set)
    for one in wiring.catalog.restores.list(request.server, limit=_LOOKED_AT):
        if one.state is JobState.SUCCEEDED:  # and killed while it put its tools away
            discard(settings.scratch.path, one.id)
    row = (
        wiring.catalog.restores.take_up(restore_id, run.job.id, owner())
        if restore_id
        else begin_row(wiring, chosen.base, place_of(chosen, request), run, exactly=True)
    )
    spec = TablesSpec(
        restore_id=row.id,
        server=request.server,
        target=request.target,
        way=chosen.chosen.way,
        chain=chosen.base.chain,
        replay=chosen.base.replay,
        statements=way.statements,
        goals=chosen.goals,
        into=request.into,
        sql=_sql_folder(request),
        whole=wanted.whole_schemas(chosen.goals),
        missing=way.missing,
        replace=wanted.renaming is None,
        compare=request.compare,
        keys=keys,
        triggers=Triggers(request.triggers),
        folder=settings.scratch.path,
        max_bytes=settings.scratch.max_bytes,
    )
    try:
        outcome = tablerestore.execute(
            spec,
            goal.restore_connection() if goal else None,
            sources(wiring, chosen.base),
            run.context(wiring, phases_of(wiring, row.id)),
            confirm=_answer(request.into, confirm, ask),
            on_done=lambda phases: _succeeded(wiring, row.id, phases),
        )
    except BaseException as error:
        if isinstance(error, DamagedError | DestinationError) and wanted.source is None:
            other = Source.PHYSICAL if chosen.chosen.way is Source.LOGICAL else Source.LOGICAL
            error.hint = "; ".join(filter(None, (error.hint, f"or take the other way: --from {other}")))
        with contextlib.suppress(RefusedError):  # it was over, and stopped while it put its tools away
            end_row(wiring, row.id, error)
        raise
    left = _forget_superseded(wiring, goal.restore_connection() if goal else None, row, settings.scratch.path)
    return replace(
        outcome,
        inexact=bool(chosen.base.inexact),
        warnings=tuple(dict.fromkeys((*chosen.warnings, *outcome.warnings, *left))),
    )


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
        wiring, server_name, connection, "what is on it is not the remains of a restore into the configured server"
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
            hint=f"`backupd leftovers {server_name}` lists what there is",
        )
    told = []
    for one in found:
        begun = next((moving for schema in one.schemas if (moving := pending(connection, schema))), None)
        if one not in wanted:
            told.append(Leftover(one, begun))
            continue
        finished = False
        for schema in one.schemas:
            with contextlib.suppress(LostError):  # taken back, and what is gone was to be dropped anyway
                finished = settle(connection, schema) is not None or finished
        drop_staging(connection, one.schemas)
        told.append(Leftover(one, begun, finished=finished, dropped=True))
    return tuple(told)


def refuse_unconfirmed(request: RestoreRequest, confirm: str | None, *, asked: bool) -> None:
    """Raises RefusedError where live tables would be replaced, and neither ``confirm`` is the name of their server nor
    somebody can be ``asked``."""
    into = request.into
    if not request.replaces_live or request.rename:
        return
    if confirm is not None and confirm != into:
        raise RefusedError(
            f"--confirm {confirm} is not the server that gets the tables, which is {into}",
            hint=f"check the name; to replace tables of {into} give --confirm {into}",
        )
    if confirm is None and not asked:
        raise RefusedError(
            f"these tables take the place of those on {into} that have the same names, and nobody confirmed that",
            hint=f"compare first (--compare), then give --confirm {into}, or restore under other names (--as)",
        )


def _answer(into: str, confirm: str | None, ask: Confirm | None) -> Confirm:
    if ask is None or confirm == into:
        return lambda _found: True
    return ask


def _sql_folder(request: RestoreRequest) -> Path | None:
    return Path(request.sql) if request.sql else None


def place_of(chosen: TablePlan, request: RestoreRequest) -> str:
    """What identifies a restore of tables in the catalog, where one of a whole server has its data directory. An
    interrupted one is continued only for the very same rows (``latest`` is another position each time) and names."""
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
    return f"{tables}{name} -> {request.into or _sql_folder(request)} [{digest}]"


def _succeeded(wiring: Wiring, restore_id: str, phases: Sequence[Phase]) -> None:
    wiring.catalog.restores.finish(restore_id, JobState.SUCCEEDED, wiring.clock(), phases=phases)


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
        return [f"remains of earlier attempts could not be removed: {error.message}"]
    return []

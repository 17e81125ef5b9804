"""Restoring tables into a running server: their rows to a folder, from there beside the live tables, compared with
those, and then in one step to their names. Knows no catalog.

Whatever ends an attempt, the next one with the same spec goes on: rows that were read completely are read no more, what
is loaded stays loaded, and a cut-over that had begun is finished. Until the very last step no live table is touched.

``workplace`` is the folder in which a restore keeps what it has so far, from one attempt to the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from backupd.engine.server.definitions import read_tables
from backupd.engine.server.service_account import STAGING, account_for_restores
from backupd.engine.sql.client import Connection, is_denied
from backupd.model.document import made_of
from backupd.model.errors import BackupdError, BusyError, RefusedError, ServerError
from backupd.model.proof import Phase
from backupd.model.table import Outcome, TableName, quote_name
from backupd.process.folders import make_passable, opened, remove_dead, write_whole
from backupd.process.run_context import RunContext
from restore.cutover.cutover import cut_over, finished, settle
from restore.cutover.keys_and_triggers import TableInventory
from restore.cutover.parallel_load import Loaded, load
from restore.cutover.plan import CutOverResult, Goal, refuse_unfit
from restore.cutover.schema_objects import SchemaObject, SchemaObjects, add_missing, create_missing
from restore.cutover.staging_schema import drop_staging, staging_names, stagings
from restore.fetch.chain import merged
from restore.fetch.sources import Sources
from restore.planning.plan import TABLE_STEP_NAMES, in_order
from restore.planning.table_plan import TableGoal, Triggers
from restore.tables.outcome import (
    ROWS,
    TABLESPACE,
    RestoredTable,
    TablesOutcome,
    TablesSpec,
    refuse_old,
    remarks_on,
    unknown_to,
)
from restore.tables.row_difference import Pair, TableDifference, difference
from restore.tables.source import Extracted, extract, read_files
from restore.tables.sql_files import refuse_target, write_sql
from restore.tables.tablespace_copy import TablespaceCopier

_PREFIX = "tables-"
_OVER = ".over"
"""At the end of a folder's name: its restore is over, it was killed while it removed this."""
_ABANDONED = 3 * 86400
"""Seconds after which what an unfinished restore left is taken for forgotten, when the next one begins."""

_HANDED = "handed-over.json"
_NAMED = 20
Confirm = Callable[[Sequence[TableDifference]], bool]
"""Told how the restored tables differ from the live ones they are to replace; False: leave everything as it is."""


@contextlib.contextmanager
def workplace(spec: TablesSpec) -> Iterator[Path]:
    """The folder of this restore, locked. It is removed when the block is left well, and kept for the next attempt
    otherwise; what nobody came back to for days is removed first. Raises BusyError, RefusedError."""
    remove_dead(spec.folder, _PREFIX, condemned=_is_forgotten)
    folder = spec.folder / f"{_PREFIX}{spec.restore_id}"
    with contextlib.ExitStack() as stack:
        try:
            make_passable(spec.folder)
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = stack.enter_context(opened(folder, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            raise RefusedError(
                f"cannot keep the rows of tables at {folder}: {error.strerror}",
                hint="restore.scratch.path in the configuration must be a folder in which this user may create folders",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"restore {spec.restore_id} is running in another process", hint="wait for it, or stop it"
            ) from None
        try:
            yield folder
        except BaseException:
            with contextlib.suppress(OSError):
                folder.rmdir()  # where there is nothing in it that the next attempt could use
            raise
        shutil.rmtree(folder.rename(folder.with_suffix(_OVER)), ignore_errors=True)


def discard(path: Path, restore_id: str) -> None:
    """Remove what a restore that nobody goes on with kept below ``path``, unless somebody is at it."""
    name = f"{_PREFIX}{restore_id}"
    remove_dead(path, name, condemned=lambda folder: folder.name in (name, f"{name}{_OVER}"))


def _is_forgotten(folder: Path) -> bool:
    return folder.suffix == _OVER or time.time() - folder.stat().st_mtime > _ABANDONED


def execute(
    spec: TablesSpec,
    into: Connection | None,
    sources: Sources,
    context: RunContext,
    *,
    confirm: Confirm = lambda _found: True,
    on_done: Callable[[Sequence[Phase]], None] = lambda _phases: None,
) -> TablesOutcome:
    """Restore the tables of ``spec`` into the server at ``into``, or into SQL files where that is None.

    ``on_done`` is called before the last trace of it is removed: whoever is killed before that goes on with the next
    attempt, whoever is killed later is done.

    Raises RefusedError before anything is done for names that are taken, and what each step raises; then nothing live
    was touched, or the next attempt finishes the cut-over: its tables are in their places then.
    """
    work = _Work(spec, sources, context.with_own_phases(), on_done)
    if into is None:
        return work.files()
    return work.server(into, confirm)


class _Work:
    def __init__(
        self,
        spec: TablesSpec,
        sources: Sources,
        context: RunContext,
        on_done: Callable[[Sequence[Phase]], None],
    ) -> None:
        self._spec, self._sources, self._context, self._on_done = spec, sources, context, on_done
        self._warnings: list[str] = []
        self._objects = SchemaObjects()
        self._live: dict[TableName, str] = {}

    def files(self) -> TablesOutcome:
        spec = self._spec
        if spec.sql is None:
            raise RefusedError("no target given: name a server or a folder", hint="give --into SERVER or --sql DIR")
        if spec.sql.exists():
            raise RefusedError(
                f"{spec.sql} exists", hint="name a folder that does not exist yet: backupd overwrites nothing"
            )
        refuse_target(spec.sql)
        with workplace(spec) as folder:
            found = extract(spec, folder, self._sources, self._context)
            write_sql(found.folder, spec.sql, found.flavour)
            outcome = self._outcome(found, tuple(_restored(goal, found) for goal in spec.goals), done=True)
            self._on_done(outcome.phases)
            return outcome

    def server(self, into: Connection, confirm: Confirm) -> TablesOutcome:
        spec = self._spec
        with into.connect() as session:
            refuse_old(session, spec.into)
        schemas = sorted({goal.source.schema for goal in spec.goals})
        staging = staging_names(spec.restore_id, schemas)
        with workplace(spec) as folder:
            self._settle_others(into, staging)
            finished = self._finish(into, staging, folder / _HANDED)
            if finished is None:
                self._refuse_taken(into)
                self._refuse_helpless(into, staging)
            copier = TablespaceCopier(into, staging) if finished is None else None
            found = extract(spec, folder, self._sources, self._context, copier)
            if finished is not None:
                there = dict(finished.tables)
                tables = tuple(
                    replace(
                        _restored(goal, found),
                        aside=there.get(goal.target),
                        trouble="" if goal.target in there else _why_not(goal, found),
                    )
                    for goal in spec.goals
                )
                self._add_objects(into, found.folder, frozenset())
                return self._end(into, staging, found, tables, finished)
            loaded = self._load(into, found, staging)
            good = [goal for goal in spec.goals if goal.source in loaded.rows]
            differences = self._compare(into, good, staging, found.folder)
            replaced = [found for goal, found in differences.items() if goal.target == found.live]
            handed: CutOverResult | None = None
            if good and not spec.compare and (not replaced or confirm(replaced)):
                handed = self._cut_over(into, good, staging, found.folder)
            asides = dict(handed.tables) if handed else {}
            tables = tuple(
                replace(
                    _restored(goal, found),
                    rows=loaded.rows.get(goal.source),
                    aside=asides.get(goal.target),
                    difference=differences.get(goal),
                    trouble="" if goal in good else loaded.failed.get(goal.source, _why_not(goal, found)),
                )
                for goal in spec.goals
            )
            if handed is not None and (missing := [one.goal.source for one in tables if one.trouble]):
                self._warnings.append(
                    f"{len(missing)} of {len(tables)} tables were not restored, the others have their names: to try "
                    f"again, name only {', '.join(name.shown for name in missing[:_NAMED])}"
                    + (" and the others" if len(missing) > _NAMED else "")
                )
            return self._end(into, staging, found, tables, handed)

    # -- the steps

    def _settle_others(self, into: Connection, staging: Mapping[str, str]) -> None:
        """What other restores that died had begun to hand over must not stand in the way of this one: taken back, or,
        where the tables had changed places, finished. Raises RefusedError where these are the very tables that this one
        would replace: they may be what was wanted, and hold rows written since."""
        ours = {goal.target for goal in self._spec.goals} if self._spec.replace and not self._spec.compare else set()
        for other in stagings(into):
            if other.active or not set(other.schemas).isdisjoint(staging.values()):
                continue
            with contextlib.suppress(BusyError):
                done = [self._settled(into, schema) for schema in other.schemas]
                placed = {target for one in done if one is not None for target, _aside in one.tables}
                if not placed:
                    continue
                drop_staging(into, other.schemas)
                text = f"restore {other.restore_id} had renamed its tables into place before it was interrupted"
                if again := sorted(placed & ours):
                    raise RefusedError(
                        f"{text}: it was completed now, and nothing else was done",
                        detail=", ".join(name.shown for name in again),
                        hint="check these tables; to replace them again, repeat the command",
                    )
                self._warnings.append(f"{text}: that was finished")

    def _finish(self, into: Connection, staging: Mapping[str, str], note: Path) -> CutOverResult | None:
        """What an attempt before had handed over, or had exchanged and is finished now; None when none had: what it
        had begun is taken back. ``note``: where one that was killed in its last moments wrote down what came of it."""
        done = CutOverResult.from_json(json.loads(note.read_text(encoding="utf-8"))) if note.is_file() else None
        for schema in staging.values():
            done = done or self._settled(into, schema)
        if done is not None:
            self._warnings.append("an interrupted attempt had renamed the tables into place; it was completed")
        return done

    def _settled(self, into: Connection, schema: str) -> CutOverResult | None:
        return settle(into, schema, self._context) or finished(into, schema)

    def _refuse_taken(self, into: Connection) -> None:
        """Raises RefusedError for names that no table can get, or that live tables have, unless those are to be
        replaced."""
        targets = [goal.target for goal in self._spec.goals]
        with into.connect() as session:
            self._warnings += remarks_on(session, self._spec.into)
            inventory = TableInventory.look(session, {name.schema for name in targets})
        if self._spec.compare:
            return
        refuse_unfit(inventory, targets)
        if self._spec.replace:
            return
        taken = [name for name in targets if inventory.has(name)]
        if taken:
            raise RefusedError(
                f"{len(taken)} of these names are taken on {self._spec.into}: {taken[0].shown}",
                detail=", ".join(name.shown for name in taken),
                hint=f"choose other names (--as '*_restored'), or leave out --as and give --confirm {self._spec.into}: "
                "the live tables are then renamed aside",
            )

    def _refuse_helpless(self, into: Connection, staging: Mapping[str, str]) -> None:
        """Raises RefusedError for an account that may only read, before anything is fetched."""
        name = next(iter(staging.values()))
        with into.connect() as session:
            if session.query("SELECT 1 FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = %s", name):
                return
            try:
                session.execute(f"CREATE DATABASE {quote_name(name)}")
                session.execute(f"DROP DATABASE {quote_name(name)}")
            except ServerError as error:
                if not is_denied(error):
                    raise
                where = self._spec.into
                raise RefusedError(
                    f"the account {into.user} may not write to {where}",
                    detail=error.detail,
                    hint=f"name an option file of one that may: servers.{where}.restore_defaults_file. To make one: "
                    f"{account_for_restores()} (instead of *.*: the schemas of the tables, and `{STAGING}`)",
                ) from error

    def _load(self, into: Connection, found: Extracted, staging: Mapping[str, str]) -> Loaded:
        wanted = {goal.source for goal in self._spec.goals}
        tables = [table for table in found.tables if table.name in wanted and table.outcome is Outcome.DUMPED]
        with into.connect() as session:
            unknown = unknown_to(session, (read_files(found.folder, table.name) for table in tables))
        tables = [table for table in tables if table.name not in unknown]
        with self._context.watch.phase("loaded", sum(table.bytes for table in tables)):
            loaded = load(into, found.folder, tables, staging, self._context)
        self._warnings += loaded.warnings
        return replace(loaded, failed={**loaded.failed, **unknown})

    def _compare(
        self, into: Connection, goals: Sequence[TableGoal], staging: Mapping[str, str], folder: Path
    ) -> dict[TableGoal, TableDifference]:
        """With the live table whose name each is to get, or else with the one that it comes from."""
        with into.connect() as session:
            inventory = TableInventory.look(
                session, {name.schema for goal in goals for name in (goal.target, goal.source)}
            )
        pairs = {}
        for goal in goals:
            there = next((name for name in (goal.target, goal.source) if inventory.has(name)), None)
            if there is not None:
                definition = read_files(folder, goal.source)
                if self._spec.triggers is Triggers.NONE:
                    definition = replace(definition, triggers="")
                pairs[goal] = Pair(
                    TableName(staging[goal.source.schema], goal.source.table),
                    there,
                    definition,
                    triggers=self._spec.triggers is not Triggers.LIVE,
                )
        with into.connect() as session:
            live = read_tables(session, [pair.live for goal, pair in pairs.items() if pair.live == goal.target]).tables
        self._live = {name: one.create for name, one in live.items()}
        with self._context.watch.phase("compared"):
            found = difference(into, list(pairs.values()), self._context.cancel, sample=self._spec.keys)
        return dict(zip(pairs, found, strict=True))

    def _cut_over(
        self, into: Connection, goals: Sequence[TableGoal], staging: Mapping[str, str], folder: Path
    ) -> CutOverResult:
        fresh = create_missing(
            into, folder, {goal.source.schema for goal in goals if goal.source.schema == goal.target.schema}
        )
        with self._context.watch.phase("handed_over"):
            handed = cut_over(
                into,
                [
                    Goal(
                        TableName(staging[goal.source.schema], goal.source.table),
                        goal.target,
                        read_files(folder, goal.source),
                        self._live.get(goal.target, ""),
                    )
                    for goal in goals
                ],
                self._context,
                replace=self._spec.replace,
                aside=f"__before_{self._spec.restore_id.replace('-', '_')}",
                triggers=self._spec.triggers,
            )
        self._warnings += handed.warnings
        self._add_objects(into, folder, fresh)
        return handed

    def _add_objects(self, into: Connection, folder: Path, fresh: Collection[str]) -> None:
        """Of whole schemas. The tables are there, so nothing that goes wrong now ends the restore."""
        if not self._spec.whole:
            return
        try:
            self._objects = add_missing(into, folder, self._spec.whole, fresh)
        except BackupdError as error:
            schemas = [SchemaObject("schema", schema) for schema in self._spec.whole]
            self._objects = SchemaObjects(failed=dict.fromkeys(schemas, error.detail or error.message))
        self._warnings += self._objects.warnings

    def _end(
        self,
        into: Connection,
        staging: Mapping[str, str],
        found: Extracted,
        tables: tuple[RestoredTable, ...],
        handed: CutOverResult | None,
    ) -> TablesOutcome:
        if handed is not None:  # the journal of the cut-over goes with the schemas
            write_whole(found.folder.with_name(_HANDED), json.dumps(handed.as_json()).encode())
        try:
            drop_staging(into, staging.values())
        except BackupdError as error:
            self._warnings.append(f"the staging schemas {', '.join(staging.values())} are still there: {error.message}")
        outcome = replace(self._outcome(found, tables, done=handed is not None), handed_over=handed)
        self._on_done(outcome.phases)
        return outcome

    def _outcome(self, found: Extracted, tables: tuple[RestoredTable, ...], *, done: bool) -> TablesOutcome:
        spec = self._spec
        return made_of(
            TablesOutcome,
            spec,
            way=str(spec.way),
            backup_id=spec.chain[-1],
            position=found.position,
            phases=in_order(merged(self._context.watch.phases), TABLE_STEP_NAMES),
            tables=tables,
            done=done,
            folder=spec.sql,
            replay=found.replay,
            objects=self._objects,
            warnings=tuple(dict.fromkeys((*found.warnings, *self._warnings))),
        )


def _restored(goal: TableGoal, found: Extracted) -> RestoredTable:
    """What was brought to the folder of it."""
    dumped = next((table for table in found.tables if table.name == goal.source), None)
    return RestoredTable(
        goal,
        dumped.rows if dumped else None,
        trouble="" if dumped is not None and dumped.outcome is Outcome.DUMPED else _why_not(goal, found),
        how=TABLESPACE if found.is_carried(goal.source) else ROWS,
    )


def _why_not(goal: TableGoal, found: Extracted) -> str:
    dumped = next((table for table in found.tables if table.name == goal.source), None)
    return dumped.reason if dumped is not None and dumped.reason else "it is not among the restored tables"

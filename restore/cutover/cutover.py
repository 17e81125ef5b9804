"""Restored tables take their place: from the staging schema to the names that they are wanted under.

Nothing is dropped: a table that is in the way is renamed aside. All tables change places by one RENAME TABLE, prepared
in the moment before under locks (``restore.cutover.table_swap``). What is going to happen is written into the staging
schema first, so that the next call knows what to do with a cut-over that was killed between any two statements: before
the RENAME it is taken back, after it it is finished. Every name means the old table or the new one, whole, at any time.

To the foreign keys: the new table has those of its definition; those of other tables that referenced the old one
reference the new one; the old one has none, so that nobody's rows are held or changed for its sake. They are added
without looking at the rows, and afterwards rows without parents are counted in both directions. Triggers move in the
same way. Privileges, views and routines mean names, so they are as before.

A table in the staging schema, the journal, remembers what a cut-over is doing, so that the next call can settle it. Who
holds the locks that a cut-over waits for is reported by ``lock_holders``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from backupd.engine.server.definition_text import check_names
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.engine.sql.tables import ForeignKey, orphans
from backupd.model.errors import (
    BackupdError,
    BusyError,
    CancelledError,
    NotFoundError,
    RefusedError,
    ServerError,
    UsageError,
)
from backupd.model.job import Progress
from backupd.model.table import TableName, quote_name
from backupd.process.run_context import RunContext
from restore.cutover.keys_and_triggers import TableInventory, read_keys
from restore.cutover.plan import CutOverResult, Goal, Patience, Pending, Plan, Saved, digest, make_plan, shape
from restore.cutover.staging_schema import DYING, holds
from restore.cutover.table_swap import LostError, Stage, Swap, prepare
from restore.planning.table_plan import Triggers

_METADATA = """
SELECT t.PROCESSLIST_ID, t.PROCESSLIST_USER, t.PROCESSLIST_HOST, MAX(t.PROCESSLIST_TIME),
       LEFT(COALESCE(MAX(t.PROCESSLIST_INFO), MAX(t.PROCESSLIST_COMMAND)), 100),
       CONCAT(m.OBJECT_SCHEMA, '.', m.OBJECT_NAME)
FROM performance_schema.metadata_locks m JOIN performance_schema.threads t ON t.THREAD_ID = m.OWNER_THREAD_ID
WHERE m.OBJECT_TYPE = 'TABLE' AND m.LOCK_STATUS = 'GRANTED' AND t.PROCESSLIST_ID <> CONNECTION_ID()
  AND (m.OBJECT_SCHEMA, m.OBJECT_NAME) IN ({tables})
GROUP BY 1, 2, 3, 6 ORDER BY 4 DESC LIMIT 10
"""
_PLUGIN = """
SELECT p.ID, p.USER, p.HOST, p.TIME, LEFT(COALESCE(p.INFO, p.COMMAND), 100), CONCAT(m.TABLE_SCHEMA, '.', m.TABLE_NAME)
FROM information_schema.METADATA_LOCK_INFO m JOIN information_schema.PROCESSLIST p ON p.ID = m.THREAD_ID
WHERE p.ID <> CONNECTION_ID() AND (m.TABLE_SCHEMA, m.TABLE_NAME) IN ({tables}) ORDER BY p.TIME DESC LIMIT 10
"""
_TRANSACTIONS = "SELECT trx_mysql_thread_id FROM information_schema.INNODB_TRX ORDER BY trx_started"
_SHOWN = 10
_NOT_HERE = frozenset({1109, 1146})
"""No such table: a plugin that is not loaded, a performance schema that is not there."""

TABLE = "backupd_handover"
_READ = "SELECT id, plan, result FROM {table} ORDER BY id"
_BEGIN = "REPLACE INTO {table} VALUES (%s, %s, NULL)"
_FINISH = "UPDATE {table} SET result = %s WHERE id = %s"
_FORGET = "DELETE FROM {table} WHERE id = %s"
PHASE = "hand over"
_AGAIN = frozenset({1205, 1213, 1146})
"""Lock wait timeout, deadlock; no such table: somebody else dropped or renamed one."""
_AS_IT_WAS = "every table is as it was"
_LAST = 3
"""Attempts to put everything back, once it is given up."""
_PATIENCE = Patience()
_Done = TypeVar("_Done")


def lock_holders(session: Session, tables: Iterable[TableName]) -> tuple[str, ...]:
    """In words, whoever holds locks of ``tables``, as far as the server shows this account; where it does not show
    locks, whoever has an open transaction. Raises ServerError."""
    names = [part for name in tables for part in (name.schema, name.table)]
    pairs = ", ".join(["(%s, %s)"] * (len(names) // 2))
    for query in (_METADATA, _PLUGIN):
        if rows := _asked(session, query.format(tables=pairs), *names):
            return tuple(
                f"{table} is held by connection {number} of {user}@{host}, {seconds} s: {info}"
                for number, user, host, seconds, info, table in rows
            )
    there = {int(row["Id"]): row for row in session.records("SHOW PROCESSLIST", shown=True)}
    open_ones = [
        there[number] for (number,) in _asked(session, _TRANSACTIONS) if number in there and number != session.thread_id
    ]
    return tuple(
        f"open transaction: connection {row['Id']} of {row['User']}@{row['Host']}, {row['Time']} s: "
        f"{row['Info'] or row['Command']}"
        for row in open_ones[:_SHOWN]
    )


def _asked(session: Session, query: str, *names: str) -> list[tuple[object, ...]]:
    try:
        return session.query(query, *names, shown=True)
    except ServerError as error:
        if not (is_denied(error) or error_code(error) in _NOT_HERE):
            raise
        return []


@dataclass(frozen=True, slots=True)
class Entry:
    """``result`` None: not finished."""

    key: str
    plan: Plan
    result: CutOverResult | None


class Journal:
    """Of the cut-overs out of the staging schema ``schema``, each under its key."""

    def __init__(self, session: Session, schema: str) -> None:
        self.schema = schema
        self._session = session
        self._table = TableName(schema, TABLE)

    def create(self) -> None:
        """If it is not there. Raises ServerError."""
        self._session.execute(
            f"CREATE TABLE IF NOT EXISTS {self._table} (id CHAR(64) CHARACTER SET ascii PRIMARY KEY, "
            f"plan LONGTEXT NOT NULL, result LONGTEXT) CHARACTER SET utf8mb4 ENGINE = InnoDB"
        )

    def entries(self) -> tuple[Entry, ...]:
        """Raises ServerError."""
        if not holds(self._session, self.schema, TABLE):
            return ()
        return tuple(
            Entry(str(key), Plan.from_text(plan), CutOverResult.from_json(json.loads(result)) if result else None)
            for key, plan, result in self._session.query(_READ.format(table=self._table))
        )

    def begin(self, key: str, plan: Plan) -> None:
        """Raises ServerError."""
        self._session.execute(_BEGIN.format(table=self._table), key, plan.as_text())

    def finish(self, key: str, result: CutOverResult) -> None:
        """Raises ServerError."""
        self._session.execute(_FINISH.format(table=self._table), json.dumps(result.as_json()), key)

    def forget(self, key: str) -> None:
        """After everything was put back. Raises ServerError."""
        self._session.execute(_FORGET.format(table=self._table), key)


def _lock_name(schema: str) -> str:
    """Of the server's lock that whoever hands over out of ``schema`` holds."""
    return f"backupd/{quote_name(schema)}"[:64]


def cut_over(
    connection: Connection,
    goals: Sequence[Goal],
    context: RunContext,
    *,
    replace: bool,
    aside: str,
    triggers: Triggers = Triggers.BACKUP,
    patience: Patience = _PATIENCE,
) -> CutOverResult:
    """Give every goal's staged table its target's name; all of them or none.

    ``replace``: tables that have these names may be renamed aside, to ``<name><aside>`` (shortened where that is too
    long). A schema that is missing is made with the collation of the staging schema. What was interrupted before is
    settled first (see ``settle``); a cut-over of the same tables that is finished gives its result again.

    Raises RefusedError (also for live tables that changed since they were compared), NotFoundError, UsageError,
    BusyError, CancelledError: every table is as it was; ServerError: the next call settles it. So does whatever else
    stops it; it receives what was done then.
    """
    if not goals:
        return CutOverResult(())
    staging = goals[0].staged.schema
    key = digest((goal.staged, goal.target) for goal in goals)

    def plan_it(session: Session, within: bool) -> Plan:
        plan = make_plan(session, goals, replace_live=replace, aside=aside, triggers=triggers, within=within)
        _make_schemas(session, plan)
        return plan

    with _working(connection, staging, context, patience) as work:
        work.settle()
        known = {entry.key: entry for entry in work.journal.entries()}.get(key)
        if known is not None and known.result is not None and work.is_over(known.plan):
            return known.result
        return work.cut_over(key, plan_it, {goal.target: shape(goal.target, goal.live) for goal in goals if goal.live})


def settle(
    connection: Connection, staging: str, context: RunContext, *, patience: Patience = _PATIENCE
) -> CutOverResult | None:
    """What an interrupted call left of a cut-over out of the schema ``staging``: finished where the tables had changed
    places, and then its result; else taken back and forgotten, and None, as where there is nothing.

    Raises LostError after it was taken back, because restored tables are gone; CancelledError, ServerError: again.
    """
    with _working(connection, staging, context, patience) as work:
        return work.settle()


def pending(connection: Connection, staging: str) -> Pending | None:
    """The cut-over out of the schema ``staging`` that was interrupted, or that somebody is at; None: there is none.
    Changes nothing. Raises ServerError."""
    with connection.connect() as session:
        work = _Work(session, staging, RunContext(), Patience())
        for entry in work.journal.entries():
            if entry.result is None:
                return Pending(tuple(move.target for move in entry.plan.moves), work.is_renamed(entry.plan))
    return None


def finished(connection: Connection, staging: str) -> CutOverResult | None:
    """What the cut-over out of the schema ``staging`` that is finished came to; None: there is none. Raises
    ServerError."""
    with connection.connect() as session:
        done = [entry.result for entry in Journal(session, staging).entries() if entry.result is not None]
    return done[-1] if done else None


class _Work:
    def __init__(self, session: Session, staging: str, context: RunContext, patience: Patience) -> None:
        self._session, self._context, self._patience = session, context, patience
        self.journal = Journal(session, staging)
        # MySQL renames tables that the same session has locked from 8.0.13 on, MariaDB does not.
        self._within = read_dialect(session).renames_locked_tables

    def is_over(self, plan: Plan) -> bool:
        """Has nobody loaded the same tables again?"""
        inventory = TableInventory.look(self._session, {move.staged.schema for move in plan.moves})
        return not any(inventory.has(move.staged) for move in plan.moves)

    def is_renamed(self, plan: Plan) -> bool:
        try:
            return self._swap("", plan).stage() is Stage.DONE
        except LostError:
            return False

    def settle(self, attempts: int | None = None) -> CutOverResult | None:
        for entry in self.journal.entries():
            if entry.result is not None:
                continue
            swap = self._swap(entry.key, entry.plan)
            lost: LostError | None = None
            try:
                if swap.stage() is Stage.DONE:
                    return self._finish(entry.key, swap, attempts)
            except LostError as error:
                lost = error
            self._persist(
                swap,
                swap.undo,
                "the cut-over is incomplete, and its rollback failed",
                "each name still refers to the old table, but that may lack triggers and foreign keys: end the "
                "transactions that use it, then repeat the command",
                attempts,
            )
            self.journal.forget(entry.key)
            self._step(f"the cut-over was rolled back: {_AS_IT_WAS}")
            if lost is not None:
                raise lost
        return None

    def cut_over(self, key: str, plan_it: Callable[[Session, bool], Plan], seen: dict[TableName, str]) -> CutOverResult:
        """``seen``: shapes of the live tables; who has another one now, is refused."""
        swap: Swap | None = None
        held, names = "", ""
        try:
            for pause in self._patience.pauses:
                if self._context.cancel.wait(pause):
                    break
                try:
                    if swap is not None:
                        swap.undo()
                        swap = None
                    plan = plan_it(self._session, self._within)
                    _refuse_changed(plan, seen)
                    self.journal.create()
                    self.journal.begin(key, plan)
                    swap = self._swap(key, plan)
                    names = ", ".join(move.target.shown for move in plan.moves)
                    self._rename_checks(plan)
                    if swap.exchange():
                        return self._finish(key, swap)
                    held = "the tables were altered meanwhile"
                except ServerError as error:
                    if error_code(error) not in _AGAIN:
                        raise
                    if swap is not None and self.is_renamed(swap.plan):
                        return self._finish(key, swap)
                    held = "\n".join((error.detail, *(self._holders(swap.plan) if swap is not None else ())))
                self._step(f"waits for {names}: {held}")
            done = self.settle(attempts=_LAST)
        except (RefusedError, NotFoundError, UsageError) as refusal:
            if not isinstance(refusal, BusyError | CancelledError):
                with suppress(LostError):
                    self.settle(attempts=_LAST)
            raise
        if done is not None:
            return done
        if self._context.is_cancelled():
            raise CancelledError(f"the cut-over was cancelled; {_AS_IT_WAS}")
        raise BusyError(
            f"could not lock {names} in {self._patience.attempts} attempts; {_AS_IT_WAS}",
            detail=held,
            hint="end the transactions that use these tables, or try again later: the loaded rows are kept",
        )

    def _finish(self, key: str, swap: Swap, attempts: int | None = None) -> CutOverResult:
        problems = self._persist(
            swap,
            swap.complete,
            "the restored tables are live, but some of their foreign keys or triggers are missing",
            "repeat the command, which adds them",
            attempts,
        )
        result = self._result(swap.plan, problems)
        self.journal.finish(key, result)
        return result

    def _persist(self, swap: Swap, what: Callable[[], _Done], message: str, hint: str, attempts: int | None) -> _Done:
        """Cancelled or not, it is tried once."""
        said: ServerError | None = None
        for pause in islice(self._patience.pauses, attempts):
            if self._context.cancel.wait(pause) and said is not None:
                break
            try:
                return what()
            except ServerError as error:
                said = error
                if error_code(error) not in _AGAIN:
                    break
                self._step(f"waits: {error.detail}")
        holders = self._holders(swap.plan)
        raise ServerError(message, detail="\n".join([*([said.detail] if said else []), *holders]), hint=hint) from said

    def _holders(self, plan: Plan) -> tuple[str, ...]:
        try:
            return lock_holders(self._session, [*(move.target for move in plan.moves), *plan.referencing])
        except ServerError as error:
            return (f"cannot determine who holds the locks: {error.detail}",)

    def _swap(self, key: str, plan: Plan) -> Swap:
        def remember(more: Plan) -> None:
            with self._session.connection.connect() as own:  # this one holds locks of other tables
                Journal(own, self.journal.schema).begin(key, more)

        return Swap(self._session, plan, self._within, self._patience.seconds, self._step, remember)

    def _step(self, what: str) -> None:
        self._context.report(Progress(PHASE, note=what))

    def _rename_checks(self, plan: Plan) -> None:
        for move in plan.moves:
            if not move.new_checks:
                continue
            present = {name.lower() for name in check_names(self._session, move.staged)}
            for name, clause in move.new_checks:
                if name.lower() in present:
                    self._step(f"another name for the check {name} of {move.target.shown}")
                    self._session.execute(f"ALTER TABLE {move.staged} DROP CHECK {quote_name(name)}, ADD {clause}")

    def _result(self, plan: Plan, problems: Sequence[str]) -> CutOverResult:
        found = list(self._orphans(plan))
        return CutOverResult(
            tables=tuple((move.target, move.aside) for move in plan.moves),
            warnings=(*plan.warnings, *problems, *found),
            orphans=tuple(found),
            saved=tuple(
                Saved(move.target, move.aside, move.saved) for move in plan.moves if move.aside and move.saved.strip()
            ),
        )

    def _orphans(self, plan: Plan) -> Iterator[str]:
        """Looked for among the keys that are there: a missing one is reported already."""
        tables = dict.fromkeys([move.target for move in plan.moves] + [key.child for key in plan.children])
        for table in tables:
            for key in read_keys(self._session, table):
                ours = any(plan.same(name, move.target) for move in plan.moves for name in (key.child, key.parent))
                if ours and (warning := self._orphan_warning(key)):
                    yield warning

    def _orphan_warning(self, key: ForeignKey) -> str:
        self._step(f"look for rows of {key.child.shown} without parents in {key.parent.shown}")
        try:
            lost = orphans(self._session, key)
        except ServerError as error:
            self._session.ping()
            return (
                f"rows of {key.child.shown} without parents in {key.parent.shown} could not be looked for: "
                f"{error.detail}"
            )
        if not lost.rows:
            return ""
        sample = ", ".join(str(one[0] if len(one) == 1 else one) for one in lost.sample)
        why = "which does not exist" if lost.missing else "which does not have these"
        return (
            f"{lost.rows} rows of {key.child.shown} ({', '.join(key.columns)}: {sample}"
            f"{', ...' if lost.rows > len(lost.sample) else ''}) reference rows of {key.parent.shown}, {why}: "
            f"foreign key {key.name}"
        )


@contextmanager
def _working(connection: Connection, staging: str, context: RunContext, patience: Patience) -> Iterator[_Work]:
    """Nobody else hands over out of ``staging`` meanwhile. Whatever interrupts it (a signal), is settled before that
    goes on, with a note of how."""
    number = 0
    try:
        with connection.connect() as session:
            number = session.thread_id
            prepare(session, patience.seconds)
            if not session.scalar("SELECT GET_LOCK(%s, %s)", _lock_name(staging), DYING):
                raise BusyError(f"another process runs a cut-over from {staging}", hint="wait until that has ended")
            yield _Work(session, staging, context, patience)
    except BackupdError:
        raise
    except BaseException as stop:
        if number:
            stop.add_note(_stopped(connection, staging, number, patience))
        raise


def _stopped(connection: Connection, staging: str, number: int, patience: Patience) -> str:
    """What became of a cut-over that was stopped. ``number``: of its session, which may still wait for locks."""
    try:
        with connection.connect() as session:
            with suppress(ServerError):  # it is gone already
                session.execute(f"KILL {number}")
            session.scalar("SELECT GET_LOCK(%s, 10)", _lock_name(staging))
        few = replace(patience, attempts=_LAST)
        if settle(connection, staging, RunContext(), patience=few) or finished(connection, staging):
            return "the new tables are in their places; repeat the command to complete the restore"
    except BackupdError as error:
        return f"the cut-over was stopped in the middle: {error.message}; {error.hint or 'repeat the command'}"
    return _AS_IT_WAS


def _refuse_changed(plan: Plan, seen: dict[TableName, str]) -> None:
    """Raises RefusedError for a live table that is not any more what was compared, or looked at first."""
    for move in plan.moves:
        if seen.setdefault(move.target, move.shape) != move.shape:
            raise RefusedError(
                f"{move.target.shown} was changed meanwhile, compare again: {_AS_IT_WAS}",
                detail=f"its definition now:\n{move.shape}" if move.shape else "it no longer exists",
                hint="repeat the command; it compares with the table as it is now",
            )


def _make_schemas(session: Session, plan: Plan) -> None:
    present = {
        str(name): str(collation)
        for name, collation in session.query(
            "SELECT SCHEMA_NAME, DEFAULT_COLLATION_NAME FROM information_schema.SCHEMATA"
        )
    }
    for move in plan.moves:
        schema = move.target.schema
        if schema not in present and (not plan.folded or schema.lower() not in present):
            collation = present[move.staged.schema]
            session.execute(
                f"CREATE DATABASE IF NOT EXISTS {quote_name(schema)} "
                f"CHARACTER SET {collation.partition('_')[0]} COLLATE {collation}"
            )
            present[schema] = collation

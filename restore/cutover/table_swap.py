"""Tables change places while nobody can write to them: foreign keys and triggers first, then one RENAME TABLE.

Everything is prepared under ``LOCK TABLES``, so that writers see the old table with all that it had, or the new one
with all that it is to have. MySQL renames locked tables. MariaDB does not: there the restored tables wait beside the
present ones, are given their triggers there, and another session's RENAME is first in the line when the locks are
given back. What the present tables are is read again under the locks, and what came to them in the moment before the
RENAME is looked for after it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from enum import Enum

from backupd.engine.server import definitions as ddl
from backupd.engine.server.definition_text import check_names
from backupd.engine.sql.client import Session, error_code, is_denied
from backupd.engine.sql.tables import ForeignKey, graph
from backupd.model.errors import RefusedError, ServerError
from backupd.model.table import TableName, quote_name
from restore.cutover.keys_and_triggers import TableInventory, Wanted, arrange, column_text, is_arranged, pointed
from restore.cutover.plan import Move, Plan, shape

_BROKEN = frozenset({144, 145, 1034, 1194, 1195, 1812, 1877, 1932})
"""The table cannot be opened, so it cannot be locked either; renamed it can be, as a rule."""
_MIXED = 1785
"""GTIDs are enforced, and the tables are of engines with transactions and without: the server takes a lock of both for
a statement that would have to be logged."""
_SETTINGS = {
    "foreign_key_checks": "0",
    "sql_mode": "''",
    "sql_quote_show_create": "1",
    "wait_timeout": "28800",
    "max_statement_time": "0",
    "information_schema_stats_expiry": "0",
    "restrict_fk_on_non_standard_key": "0",
    "system_versioning_alter_history": "'KEEP'",
}
_NEXT = "SELECT next_not_cached_value FROM {table}"
_NUMBER = "SELECT AUTO_INCREMENT FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
_SETTLED = 2.0
"""Seconds within which a list of tables shows all of one RENAME (MariaDB shows it as several)."""


def await_queued(renaming: Future[None], number: int, holder: Session) -> None:
    """Returns when ``renaming``, a statement of the session ``number``, waits in line for the locks of ``holder``, or
    ended. Raises ServerError."""
    while not renaming.done():
        # Not out of information_schema: MySQL's has no answer while one statement there is no valid UTF-8.
        if any(
            row["Id"] == number and "waiting" in str(row["State"]).lower()
            for row in holder.records("SHOW PROCESSLIST", shown=True)
        ):
            return
        wait([renaming], 0.002)


class Stage(Enum):
    """Where the restored tables are: in the staging schema, beside their targets, at their targets."""

    STAGED = "staged"
    WAITING = "waiting"
    DONE = "done"


class LostError(RefusedError):
    """Restored tables are gone before they could take their places."""


def prepare(session: Session, seconds: int) -> None:
    """The settings under which tables are handed over. ``seconds``: of a wait for locks. Raises ServerError."""
    names = ", ".join(f"'{name}'" for name in _SETTINGS)
    present = {str(row[0]).lower() for row in session.query(f"SHOW VARIABLES WHERE Variable_name IN ({names})")}
    session.execute(f"SET SESSION lock_wait_timeout = {seconds}")
    for name, value in _SETTINGS.items():
        if name in present:
            try:
                session.execute(f"SET SESSION {name} = {value}")
            except ServerError as error:
                if not is_denied(error):
                    raise


@dataclass(slots=True)
class Swap:
    """``session`` is prepared. ``within``: the server renames locked tables. ``step`` is called before each change,
    ``remember`` a plan with more in it before anything follows from that. ``seconds``: of a wait for locks."""

    session: Session
    plan: Plan
    within: bool
    seconds: int
    step: Callable[[str], None]
    remember: Callable[[Plan], None]

    def exchange(self) -> bool:
        """The tables change places; False: they, or what hangs on them, are not any more what the plan says. Whatever
        it ends with: ``undo`` puts everything back as long as they have not changed places, then ``complete`` must
        follow. Raises ServerError."""
        if not self.within and self.stage() is Stage.STAGED:
            self._move("waiting", [(move.staged, move.waiting) for move in self.plan.moves])
        renaming: Future[None] | None = None
        # The other session's RENAME goes on when the locks are given back, and only then the stack waits for it.
        with contextlib.ExitStack() as stack, self._locks(swapped=False) as locked:
            if not self._is_as_planned():
                return False
            self._keep(replace(self.plan, touched=True))
            self._arrange(swapped=False, triggers=not self.within)
            for move in self.plan.moves:
                self._count_on(move)
            if self.within or not locked:
                self._drop_checks()
                self._change(self.plan.rename)
                if not locked:
                    self._look_behind()
                self._arrange(swapped=True, triggers=True)
            else:
                self.step("rename")
                other = stack.enter_context(self.session.connection.connect())
                prepare(other, self.seconds)
                pool = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="rename"))
                renaming = pool.submit(other.execute, self.plan.rename)
                await_queued(renaming, other.thread_id, self.session)
        if renaming is not None:
            renaming.result()
        return True

    def complete(self) -> tuple[str, ...]:
        """After the tables changed places: foreign keys and triggers. Returns in words what could not be put on, and
        what came in the last moment. Raises ServerError: again, then."""
        self._look_behind()
        problems: tuple[str, ...] = ()
        if not is_arranged(self.session, self._forward(swapped=True, triggers=True), self.plan.same):
            with self._locks(swapped=True):
                problems = self._arrange(swapped=True, triggers=True)
        return (*problems, *self._changed_behind(), *self._point_late_children())

    def stage(self) -> Stage:
        """Raises ServerError; LostError when somebody else moved or dropped tables before they changed places."""
        moves = self.plan.moves
        until = time.monotonic() + min(_SETTLED, self.seconds)
        while True:
            inventory = self._shelf()
            if all(inventory.has(move.staged) for move in moves):
                return Stage.STAGED
            if all(inventory.has(move.waiting) for move in moves):
                return Stage.WAITING
            left = [name for move in moves for name in (move.staged, move.waiting) if inventory.has(name)]
            if not left and all(inventory.has(move.target) for move in moves) and self._is_proved(inventory):
                return Stage.DONE
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        gone = [
            move.staged.shown if self.within else f"{move.waiting.shown} (or {move.staged.shown})"
            for move in moves
            if not inventory.has(move.staged) and not inventory.has(move.waiting)
        ]
        raise LostError(
            f"{', '.join(gone)}: dropped or renamed before the cut-over put it in place of "
            f"{', '.join(move.target.shown for move in moves)}; no live table was replaced",
            detail="another session renamed or dropped a table of this cut-over",
            hint="the cut-over is rolled back: repeat the restore",
        )

    def undo(self) -> None:
        """Back to what was before; only while the tables have not changed places. Raises ServerError."""
        inventory = self._shelf()
        wanted = tuple(one for one in self.plan.back() if inventory.has(one.table)) if self.plan.touched else ()
        lost = self._lost_checks() if self.plan.touched else ()
        problems: tuple[str, ...] = ()
        if lost or not is_arranged(self.session, wanted, self.plan.same):
            with self._locks(swapped=False):
                problems = arrange(self.session, wanted, self.plan.same, self.step)
                for table, clause in lost:
                    self._change(f"ALTER TABLE {table} ADD {clause}")
        waiting = [
            (move.waiting, move.staged)
            for move in self.plan.moves
            if move.waiting != move.staged and inventory.has(move.waiting)
        ]
        if waiting:
            self._move("back", waiting)
        if problems:
            raise ServerError(
                "the rollback of the cut-over failed",
                detail="\n".join(problems),
                hint="fix the cause, then run the statements in the detail by hand",
            )

    def _shelf(self) -> TableInventory:
        return TableInventory.look(
            self.session,
            {name.schema for move in self.plan.moves for name in (move.staged, move.waiting, move.target)}
            | {name.schema for name in self.plan.referencing},
        )

    def _is_proved(self, inventory: TableInventory) -> bool:
        """One RENAME moved all tables: one that is aside stands for all; without any the new ones are known by their
        columns."""
        asides = [move.aside for move in self.plan.moves if move.aside]
        if asides:
            return any(inventory.has(aside) for aside in asides)
        return all(column_text(self.session, move.target) == move.columns for move in self.plan.moves)

    def _is_as_planned(self) -> bool:
        """Have the present tables the definitions and triggers that the plan knows?"""
        inventory = self._shelf()
        if any(inventory.has(move.target) != bool(move.aside) for move in self.plan.moves):
            return False
        known = [move for move in self.plan.moves if move.aside and move.readable]
        found = ddl.read_tables(self.session, [move.target for move in known]).tables
        for move in known:
            live = found.get(move.target)
            if (
                live is None
                or live.triggers != move.old_triggers
                or shape(move.target, live.create) != move.shape
                or set(live.foreign_keys) != set(move.old_keys)
            ):
                return False
        return True

    def _look_behind(self) -> None:
        """Triggers that the old tables got in the moment before they were renamed are saved with their others."""
        inventory = self._shelf()
        asides = [move.aside for move in self.plan.moves if move.aside and move.readable and inventory.has(move.aside)]
        found = ddl.read_tables(self.session, asides).tables
        moves = tuple(self._with_late(move, found) for move in self.plan.moves)
        if moves != self.plan.moves:
            self._keep(replace(self.plan, moves=moves))

    @staticmethod
    def _with_late(move: Move, found: Mapping[TableName, ddl.TableDefinition]) -> Move:
        text = found[move.aside].triggers if move.aside and move.aside in found else ""
        return replace(move, old_triggers=move.old_triggers + text) if text not in move.old_triggers else move

    def _keep(self, plan: Plan) -> None:
        self.plan = plan
        self.remember(plan)

    def _changed_behind(self) -> tuple[str, ...]:
        inventory = self._shelf()
        shapes = {
            move.aside: (move.target, move.shape)
            for move in self.plan.moves
            if move.aside and move.shape and inventory.has(move.aside)
        }
        found = ddl.read_tables(self.session, shapes).tables
        return tuple(
            f"the definition of {shapes[name][0].shown} was changed right before it was renamed; the table that has "
            f"its name now lacks that change: compare SHOW CREATE TABLE {name}"
            for name, one in found.items()
            if _bare(shape(name, one.create)) != _bare(shapes[name][1])
        )

    def _point_late_children(self) -> tuple[str, ...]:
        """Foreign keys that nobody knew of when it was planned went along with the tables that were renamed aside."""
        targets = {self.plan.fold(move.aside): move.target for move in self.plan.moves if move.aside}
        late: dict[TableName, list[ForeignKey]] = {}
        for key in graph(self.session):
            if self.plan.fold(key.parent) in targets and self.plan.fold(key.child) not in targets:
                late.setdefault(key.child, []).append(key)
        problems: list[str] = []
        for child, keys in late.items():
            right = pointed(keys, lambda name: targets.get(self.plan.fold(name), name))
            wanted = Wanted(child, right, frozenset(key.name.lower() for key in right))
            try:
                problems += arrange(self.session, [wanted], self.plan.same, self.step)
            except ServerError as error:
                self.session.ping()
                problems.append(
                    f"foreign keys of {child.shown} still reference a table that was renamed aside: {error.detail}"
                )
        self.plan = replace(self.plan, children=(*self.plan.children, *(key for keys in late.values() for key in keys)))
        return tuple(problems)

    def _forward(self, *, swapped: bool, triggers: bool) -> tuple[Wanted, ...]:
        wanted = self.plan.forward(swapped=swapped, triggers=triggers)
        if not swapped:
            return wanted
        inventory = self._shelf()
        return tuple(one for one in wanted if inventory.has(one.table))

    def _arrange(self, *, swapped: bool, triggers: bool) -> tuple[str, ...]:
        return arrange(self.session, self._forward(swapped=swapped, triggers=triggers), self.plan.same, self.step)

    @contextlib.contextmanager
    def _locks(self, *, swapped: bool) -> Iterator[bool]:
        """In the block all tables are locked; gives what ``_lock`` does."""
        locked = self._lock(swapped=swapped)
        try:
            yield locked
        finally:
            with contextlib.suppress(ServerError):  # whoever lost the connection lost the locks, too
                self.session.execute("UNLOCK TABLES")

    def _lock(self, *, swapped: bool) -> bool:
        """False: a present table is broken, or the account may not lock them all, so nothing is locked. Raises
        ServerError."""
        moves = self.plan.moves
        if not all(move.readable for move in moves):
            return False
        own = self._shelf()
        old = [move.aside if swapped else move.target for move in moves if move.aside]
        new = [move.target if swapped else move.waiting for move in moves]
        written = list(
            dict.fromkeys(name for name in (*old, *new, *self.plan.referencing) if name is not None and own.has(name))
        )
        names = [name.schema for name in self.plan.parents]
        inventory = TableInventory.look(self.session, names)
        read = [name for name in self.plan.parents if inventory.has(name) and name not in written]
        statement = "LOCK TABLES " + ", ".join(
            [*(f"{name} WRITE" for name in written), *(f"{name} READ" for name in read)]
        )
        try:
            return self._is_taken(statement)
        except ServerError as error:
            if error_code(error) not in _BROKEN:
                raise
            return False

    def _is_taken(self, statement: str) -> bool:
        """Of locks; without being logged, which they never are, where the server would have to log for all of them."""
        try:
            self.session.execute(statement)
        except ServerError as error:
            if error_code(error) != _MIXED:
                raise
        else:
            return True
        try:
            self.session.execute("SET SESSION sql_log_bin = 0")
        except ServerError as error:
            if not is_denied(error):
                raise
            return False
        try:
            self.session.execute(statement)
        finally:
            self.session.execute("SET SESSION sql_log_bin = 1")
        return True

    def _count_on(self, move: Move) -> None:
        """Numbers that the present table gave since the backup are not given a second time."""
        if move.aside is None or not move.readable:
            return
        inventory = TableInventory.look(self.session, [move.target.schema, move.waiting.schema])
        if inventory.kind(move.target) == inventory.kind(move.waiting) == "SEQUENCE":
            number = self.session.scalar(_NEXT.format(table=move.target))
            self.step(f"set {move.target.shown} to {number}")
            self.session.execute(f"SELECT SETVAL({move.waiting}, {int(number)}, 0)")
            return
        old, new = (self.session.scalar(_NUMBER, name.schema, name.table) for name in (move.target, move.waiting))
        if old is not None and new is not None and int(old) > int(new):
            self._change(f"ALTER TABLE {move.waiting} AUTO_INCREMENT = {int(old)}")

    def _drop_checks(self) -> None:
        lost = self._lost_checks()
        for move in self.plan.moves:
            for name, clause in move.old_checks:
                if (move.target, clause) not in lost:
                    self._change(f"ALTER TABLE {move.target} DROP CHECK {quote_name(name)}")

    def _lost_checks(self) -> tuple[tuple[TableName, str], ...]:
        """Those that a present table does not have any more."""
        lost = []
        for move in self.plan.moves:
            present = {name.lower() for name in check_names(self.session, move.target)} if move.old_checks else set()
            lost += [(move.target, clause) for name, clause in move.old_checks if name.lower() not in present]
        return tuple(lost)

    def _move(self, what: str, pairs: list[tuple[TableName, TableName]]) -> None:
        self.step(f"rename: {what}")
        self.session.execute("RENAME TABLE " + ", ".join(f"{old} TO {new}" for old, new in pairs))

    def _change(self, statement: str) -> None:
        self.step(statement)
        self.session.execute(statement)


def _bare(shape_of_one: str) -> str:
    """Without the constraints and indexes that come and go with a name and with foreign keys."""
    return "\n".join(line for line in shape_of_one.split("\n") if not line.startswith(("  KEY ", "  CONSTRAINT ")))

"""Tables change places while nobody can write to them: foreign keys and triggers first, then one RENAME TABLE.

Everything is prepared under ``LOCK TABLES``, so that writers see the old table with all that it had, or the new one
with all that it is to have. MySQL renames locked tables. MariaDB does not: there the restored tables wait beside the
present ones, are given their triggers there, and another session's RENAME stands first in the line when the locks are
given back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from threading import Event

from backupd.engine.client import Connection, Session, error_code, is_denied
from backupd.engine.constraints import check_names
from backupd.model.errors import BusyError, CancelledError, RefusedError, ServerError
from backupd.model.table import TableName, quote_name
from restore.arrangement import arrange, is_arranged
from restore.handovergoals import Patience
from restore.handoverplan import Move, Plan
from restore.renaming import Renaming
from restore.shelf import Shelf

_AGAIN = frozenset({1205, 1213, 1146})
"""Lock wait timeout, deadlock; no such table: a RENAME of before came through."""
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
_TRANSACTIONS = """
SELECT p.ID, p.USER, p.TIME, LEFT(COALESCE(p.INFO, p.COMMAND), 100) FROM information_schema.PROCESSLIST p
JOIN information_schema.INNODB_TRX t ON t.trx_mysql_thread_id = p.ID WHERE p.ID <> CONNECTION_ID()
ORDER BY t.trx_started LIMIT 10
"""
_NEXT = "SELECT next_not_cached_value FROM {table}"
_NUMBER = "SELECT AUTO_INCREMENT FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"


class Place(Enum):
    """Where the restored tables are: in the staging schema, beside their targets, at their targets."""

    STAGED = "staged"
    WAITING = "waiting"
    DONE = "done"


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


@dataclass(frozen=True, slots=True)
class Swap:
    """``session`` is prepared. ``within``: the server renames locked tables. ``step`` is told before each change."""

    connection: Connection
    session: Session
    plan: Plan
    within: bool
    patience: Patience
    step: Callable[[str], None]
    cancel: Event | None = None

    def run(self) -> tuple[str, ...]:
        """Until it is done; returns in words what could not be put on. Goes on from wherever it was left.

        Raises BusyError or CancelledError: everything is as it was; ServerError: it may be half done.
        """
        held = ""
        for attempt in range(self.patience.attempts):
            if self._is_cancelled(self.patience.pause if attempt else 0):
                break
            try:
                if self.place() is Place.STAGED and not self.within:
                    self._move("waiting", [(move.staged, move.waiting) for move in self.plan.moves])
                problems = self._locked()
                if problems is not None:
                    return problems
            except ServerError as error:
                if error_code(error) not in _AGAIN:
                    raise
                held = error.detail
        blockers = self._blockers()
        try:
            self.undo()
        except ServerError as error:
            raise ServerError(
                "the hand-over could be neither finished nor taken back", detail=f"{error.detail}\n{blockers}".strip(),
                hint="each name still means the old table, but it may lack triggers and foreign keys: end the "
                     "transactions that use it, then repeat the hand-over, which finishes it") from error
        if self.cancel is not None and self.cancel.is_set():
            raise CancelledError("the hand-over was cancelled; every table is as it was")
        raise BusyError(
            f"the locks for {', '.join(move.target.shown for move in self.plan.moves)} could not be had in "
            f"{self.patience.attempts} attempts; every table is as it was", detail=f"{held}\n{blockers}".strip(),
            hint="end the transactions that use these tables, or try again later: what was loaded is still there")

    def place(self) -> Place:
        """Raises ServerError; RefusedError when somebody else moved tables."""
        moves = self.plan.moves
        schemas = {name.schema for move in moves for name in (move.staged, move.waiting, move.target)}
        until = time.monotonic() + self.patience.seconds
        while True:
            shelf = Shelf.look(self.session, schemas)
            if all(shelf.has(move.staged) for move in moves):
                return Place.STAGED
            if all(shelf.has(move.waiting) for move in moves):
                return Place.WAITING
            if all(shelf.has(move.target) and not shelf.has(move.waiting) for move in moves):
                return Place.DONE
            if time.monotonic() > until:
                break
            time.sleep(0.05)  # the list of tables shows one RENAME as several (MariaDB)
        gone = [name.shown for move in moves for name in (move.waiting, move.target) if not shelf.has(name)]
        raise RefusedError("somebody else renamed or dropped tables of this hand-over", detail=", ".join(gone),
                           hint="compare the tables with those that the hand-over was to move")

    def undo(self) -> None:
        """Back to what was before, unless the tables have changed places already. Raises ServerError."""
        place = self.place()
        if place is Place.DONE:
            return
        problems: tuple[str, ...] = ()
        if (self.within or place is Place.WAITING) and not self._is_as_it_was():
            self._lock(swapped=False)
            try:
                problems = arrange(self.session, self.plan.back(), self.plan.same, self.step)
                for table, clause in self._lost_checks():
                    self._change(f"ALTER TABLE {table} ADD {clause}")
            finally:
                self.session.execute("UNLOCK TABLES")
        if self.place() is Place.WAITING and not self.within:
            self._move("back", [(move.waiting, move.staged) for move in self.plan.moves])
        if problems:
            raise ServerError("not everything could be put back", detail="\n".join(problems),
                              hint="the statements are in the detail: run them by hand once the reason is gone")

    def _locked(self) -> tuple[str, ...] | None:
        """None: the tables were not where they had been before the locks."""
        swapped = self.place() is Place.DONE
        locked = self._lock(swapped=swapped)
        renaming: Renaming | None = None
        try:
            if (self.place() is Place.DONE) is not swapped:
                return None
            problems = self._arrange(swapped=swapped, triggers=swapped or not self.within)
            if not swapped:
                for move in self.plan.moves:
                    self._count_on(move)
                if self.within or not locked:
                    self._drop_checks()
                    self._change(self.plan.rename)
                    problems = self._arrange(swapped=True, triggers=True)
                else:
                    self.step("rename")
                    renaming = Renaming(self._another_session(), self.plan.rename)
                    renaming.queue(self.session)
        finally:
            try:
                self.session.execute("UNLOCK TABLES")
            finally:
                if renaming is not None:
                    renaming.join()
        if renaming is not None:
            renaming.check()
            problems = self._arrange(swapped=True, triggers=True)
        return problems

    def _another_session(self) -> Session:
        session = self.connection.connect()
        try:
            prepare(session, self.patience.seconds)
        except BaseException:
            session.close()
            raise
        return session

    def _arrange(self, *, swapped: bool, triggers: bool) -> tuple[str, ...]:
        return arrange(self.session, self.plan.forward(swapped=swapped, triggers=triggers), self.plan.same, self.step)

    def _lock(self, *, swapped: bool) -> bool:
        """False: a present table is broken, or the account may not lock them all, so nothing is locked. Raises
        ServerError."""
        moves = self.plan.moves
        if not all(move.readable for move in moves):
            return False
        old = [move.aside if swapped else move.target for move in moves if move.aside]
        new = [move.target if swapped else move.waiting for move in moves]
        written = list(dict.fromkeys([*old, *new, *self.plan.referencing]))
        names = [name.schema for name in self.plan.parents]
        shelf = Shelf.look(self.session, names)
        read = [name for name in self.plan.parents if shelf.has(name) and name not in written]
        statement = "LOCK TABLES " + ", ".join([*(f"{name} WRITE" for name in written),
                                                *(f"{name} READ" for name in read)])
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
        shelf = Shelf.look(self.session, [move.target.schema, move.waiting.schema])
        if shelf.kind(move.target) == shelf.kind(move.waiting) == "SEQUENCE":
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

    def _is_as_it_was(self) -> bool:
        return is_arranged(self.session, self.plan.back(), self.plan.same) and not self._lost_checks()

    def _move(self, what: str, pairs: list[tuple[TableName, TableName]]) -> None:
        self.step(f"rename: {what}")
        self.session.execute("RENAME TABLE " + ", ".join(f"{old} TO {new}" for old, new in pairs))

    def _change(self, statement: str) -> None:
        self.step(statement)
        self.session.execute(statement)

    def _is_cancelled(self, seconds: float) -> bool:
        """After so long, or at once when it is."""
        if self.cancel is None:
            time.sleep(seconds)
            return False
        return self.cancel.wait(seconds)

    def _blockers(self) -> str:
        try:
            rows = self.session.query(_TRANSACTIONS)
        except ServerError as error:
            if not is_denied(error):
                raise
            return ""
        return "\n".join(f"open transaction: connection {number} of {user}, {seconds} s: {info}"
                         for number, user, seconds, info in rows)

"""Locks while tables are dumped: the short moment in which nobody commits (``BlockedCommits``), and who waits for a
lock that the dump keeps (``WaitWatch``).

MariaDB's BACKUP STAGE makes writers of InnoDB wait from BLOCK_COMMIT on only, and it waits for no SELECT. Elsewhere it
is FLUSH TABLES WITH READ LOCK, which waits for every running statement while all writers queue behind it. Either way
the moment has a bound that holds whatever happens: from another session a timer kills the one that blocks. What was
opened by then is worthless, since it belongs to different moments; the caller begins anew.

Killing FLUSH TABLES does not undo it: a table that a long SELECT was reading then lets nobody in until that SELECT has
ended (measured on 9.7.4: an INSERT waited 4.9 s for one of 5 s). So there nothing is begun while a statement is running
that has taken a second already.

A transaction keeps a lock on the definition of every table that it has read, until its end; mydumper has no means to
give one back before. An ALTER TABLE on such a table waits for as long as the dump runs, and every other statement on
that table waits behind it. Nothing of that shows at the dump, so that somebody has to look.

Which tables changed their definition, or their name another table, while their rows were being written.

InnoDB refuses to read a rebuilt table in an older snapshot, but it reads an instantly altered one through its new
columns (which look like the old ones where one was dropped and added again), and a table that took another one's name
(as tools for online changes of a schema do) with whatever it held when the snapshot was taken. Neither looks like an
error to a tool.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from backupd.engine.server.probe import read_dialect, visible_xa
from backupd.engine.server.snapshot import position_now
from backupd.engine.server_load import Changing, Running, changing, running, waiting
from backupd.engine.sql.client import Connection, Session, error_code, is_denied
from backupd.engine.sql.tables import (
    LockedTableError,
    Mark,
    TableIds,
    definitions,
    hurry,
    settled_definitions,
    table_ids,
    table_names,
)
from backupd.model.errors import BusyError, CancelledError, ServerError, ToolError
from backupd.model.job import Progress
from backupd.model.server_facts import Position
from backupd.model.table import TableName
from backupd.process.run_context import RunContext

_Read = TypeVar("_Read")
_SHARE = 0.8
"""Of the bound, when the timer fires: killing takes a moment, too."""
_LOCK_WAIT_TIMEOUT = 1205
_LOST = (2006, 2013, 4031)
"""The server ended the session, for whatever reason: only another one can tell whether it is still there."""
_LOOK_SECONDS = 0.5
_LONG_UNDER_FLUSH = 1.0
_SHOWN = 10

_MOST_SHOWN = 20
_LEAVE_SECONDS = 5.0


class NotOpenedError(ServerError):
    """The moment was not long enough, or a lock was not to be had within it. A later one may be."""


class BlockedCommits:
    """Nobody commits within the block, which lasts for ``max_seconds`` at most. A context manager, to be used once.

    ``position``: the end of the binary log in that moment. ``prepared``: XA transactions that were prepared then, as
    far as the account may see them. ``seconds``: for how long somebody had to wait, when it is over. Entering raises
    NotOpenedError and ServerError; leaving raises NotOpenedError when commits went on before the end of the block.
    """

    def __init__(self, connection: Connection, *, max_seconds: float) -> None:
        self._connection, self._max = connection, max_seconds
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._expired = False
        self._over = False
        self._began = 0.0
        self.position = Position()
        self.prepared: tuple[str, ...] = ()
        self.seconds = 0.0

    @property
    def left(self) -> float:
        """Seconds until the block is ended by force."""
        return max(0.0, self._began + self._max * _SHARE - time.monotonic())

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._locker = stack.enter_context(self._connection.connect())
            guard = stack.enter_context(self._connection.connect())
            self._dialect = read_dialect(self._locker)
            # For where neither we nor the timer are left to end it: a server does not notice that its client died, or
            # was stopped, or that the machine under it was. It ends a session that says nothing, and its lock with it.
            bound = max(1, math.ceil(self._max))
            self._locker.execute(f"SET SESSION lock_wait_timeout = {bound}, wait_timeout = {bound}")
            try:
                for statement in self._dialect.prepare_block:
                    self._locker.execute(statement)
                self._began = time.monotonic()
                timer = threading.Timer(self._max * _SHARE, self._expire, [guard, self._locker.thread_id])
                timer.daemon = True
                timer.start()
                stack.callback(timer.join)
                stack.callback(timer.cancel)
                stack.callback(self._disarm)
                for statement in self._dialect.block_commits:
                    self._locker.execute(statement)
                self.position = position_now(self._locker, self._dialect)
                self.prepared = visible_xa(self._locker, self._dialect)
            except ServerError as error:
                self.seconds = time.monotonic() - self._began if self._began else 0.0
                raise self._judged(error) from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self._disarm()
            try:
                self._locker.execute(self._dialect.unblock_commits)
            except ServerError as lost:  # and the lock was, too: nobody knows when
                if error is None:
                    raise self._too_long(lost.detail) from lost
            finally:
                self.seconds = time.monotonic() - self._began
            if isinstance(error, ServerError | ToolError) and (self._expired or not self.left):
                raise self._too_long(str(error)) from error
        finally:
            self._stack.close()

    # -- inside

    def _disarm(self) -> None:
        with self._lock:
            self._over = True

    def _expire(self, guard: Session, victim: int) -> None:
        with self._lock:
            if self._over:
                return
            self._expired = True
            with contextlib.suppress(ServerError):  # it is gone already, and its locks with it
                guard.execute(f"KILL {victim}")

    def _judged(self, error: ServerError) -> ServerError:
        if self._expired or error_code(error) in (_LOCK_WAIT_TIMEOUT, *_LOST):
            return self._too_long(error.detail)
        return error

    def _too_long(self, detail: str) -> NotOpenedError:
        return NotOpenedError(
            f"the snapshots could not be opened while commits were blocked for {self._max:g} s at most",
            detail=detail,
            hint="a long statement or another backup blocks them: SHOW PROCESSLIST names it; take the backup at a "
            "quieter time, or raise logical.max_lock in the policy",
        )


@dataclass(frozen=True, slots=True)
class ClearWay:
    """What to do about statements that have taken ``longer_than`` seconds already: everybody would queue behind them,
    so they are waited for, ``patience`` seconds at most."""

    connection: Connection
    longer_than: float
    patience: float
    context: RunContext

    def clear(self) -> None:
        """Wait until nothing such is running that the lock would wait for. Raises BusyError when something still is
        after the patience, ServerError, CancelledError."""
        until = time.monotonic() + self.patience
        with self.connection.connect() as session:
            stages = bool(read_dialect(session).prepare_block)
            while found := _in_the_way(session, self.longer_than, stages=stages):
                if time.monotonic() >= until:
                    raise BusyError(
                        f"{len(found)} long-running statements would block the locks that open the snapshots, and all "
                        "sessions behind them",
                        detail="\n".join(str(one) for one in found[:_SHOWN]),
                        hint="wait for them or end them; or choose another time, or logical.long_queries and "
                        "limits.max_pause in the policy",
                    )
                self._wait(f"for a long statement: {found[0]}")

    def listed(self, read: Callable[[], _Read]) -> _Read:
        """What ``read`` gives, which lists tables: again and again while somebody keeps one of them locked, as a CREATE
        TABLE ... SELECT does until it has ended. Raises BusyError, which names the statement, as soon as one has taken
        too long and the patience is over; and what ``read`` raises, ServerError, CancelledError."""
        began = time.monotonic()
        late: float | None = None
        while True:
            try:
                return read()
            except LockedTableError as locked:
                with self.connection.connect() as session:
                    found = [one.by for one in changing(session)]
                now, longest = time.monotonic(), self.longer_than
                if late is None and (any(one.seconds >= longest for one in found) or now - began >= longest):
                    late = now
                if late is not None and now - late >= self.patience:
                    raise BusyError(
                        "the tables cannot be listed: a statement keeps one of them locked",
                        detail="\n".join(str(one) for one in found[:_SHOWN]) or locked.detail,
                        hint="wait for it or end it (SHOW PROCESSLIST); or choose another time, or "
                        "logical.long_queries and limits.max_pause in the policy",
                    ) from locked
            self._wait(f"for a locked table: {found[0] if found else 'SHOW PROCESSLIST tells who'}")

    def _wait(self, note: str) -> None:
        self.context.report(Progress("wait", note=note))
        if self.context.cancel.wait(_LOOK_SECONDS):
            raise CancelledError("the dump was cancelled")


def _in_the_way(session: Session, seconds: float, *, stages: bool) -> Sequence[Running]:
    if stages:
        return [one.by for one in changing(session) if one.by.seconds >= seconds]
    return running(session, min(seconds, _LONG_UNDER_FLUSH))


class WaitWatch:
    """A context manager. ``bound``: seconds that a statement which changes one of ``tables`` may wait before it goes to
    ``report`` while it waits ("" when nobody does any more), to ``log``, and to ``warnings`` afterwards."""

    def __init__(
        self,
        connection: Connection,
        tables: Collection[TableName],
        *,
        bound: float,
        report: Callable[[str], None],
        log: Path | None = None,
    ) -> None:
        self._connection, self._tables, self._bound, self._report = connection, frozenset(tables), bound, report
        self._log, self._reported = log, ""
        self._since: dict[tuple[int, str], float] = {}
        self._longest: dict[tuple[int, str], tuple[float, Changing]] = {}
        self._trouble = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="waits", daemon=True)

    @property
    def warnings(self) -> tuple[str, ...]:
        """In words, the statements that waited longer than the bound, and what kept us from looking."""
        waited = [
            f"{self._words(one)} waited for {seconds:.0f} s for the metadata lock of a table of this dump, and other "
            "sessions behind it"
            for seconds, one in self._longest.values()
        ]
        more = [f"and {len(waited) - _MOST_SHOWN} statements more waited"] if len(waited) > _MOST_SHOWN else []
        return (*waited[:_MOST_SHOWN], *more, *([self._trouble] if self._trouble else []))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end.set()
        # A server that hangs may hold the thread; it is a daemon, so it cannot keep the process.
        self._thread.join(_LEAVE_SECONDS)

    def _run(self) -> None:
        try:
            with self._connection.connect() as session:
                while not self._end.wait(_LOOK_SECONDS):
                    self._look(session)
        except (ServerError, OSError) as error:
            why = error.detail if isinstance(error, ServerError) else f"its log cannot be written: {error.strerror}"
            self._trouble = f"the sessions that waited for locks of the dump were not recorded to the end: {why}"

    def _look(self, session: Session) -> None:
        now = time.monotonic()
        there = {(one.by.id, one.by.statement): one for one in waiting(session) if self._tables & set(one.tables)}
        self._since = {key: self._since.get(key, now) for key in there}
        late = {key: one for key, one in there.items() if now - self._since[key] >= self._bound}
        for key, one in late.items():
            self._longest[key] = now - self._since[key], one
        if late or self._longest:
            first = next(iter(late.values()), None)
            self._say(f"{self._words(first)} waits for the metadata lock of a table of this dump" if first else "")

    def _say(self, words: str) -> None:
        if words and words != self._reported and self._log is not None:
            with self._log.open("a", encoding="utf-8") as log:
                log.write(f"backupd: {words}\n")
        self._reported = words
        self._report(words)

    def _words(self, one: Changing) -> str:
        by = one.by
        return f"{by.user}@{by.host} (connection {by.id}): {by.statement}"


_FEW = 20
"""As many definitions are asked for one by one; more of them, all at once."""
_REST = 20.0
"""Between two looks at least as many times the time that the last one took."""
_SHORTEST_REST = 2.0

DROPPED = "it was dropped or renamed while the backup ran"
RENAMED = "it was renamed to {} while the backup ran; the backup holds it under that name"
ALTERED = "its definition was changed while the backup ran"
SWAPPED = "another table took its name, or it was emptied or rebuilt, while the backup ran"


class TableWatch:
    """Remembers the tables as they are now: make it before their definitions are read and the snapshots are opened. A
    change before the snapshot then looks like one after it, which costs a repetition and nothing else. Keeps a session;
    close it. Every method may raise ServerError; making
    one LockedTableError, while a table cannot be described."""

    def __init__(self, connection: Connection) -> None:
        self._session = connection.connect()
        try:
            self._session.execute("SET SESSION time_zone = '+00:00'")
            self._dialect = read_dialect(self._session)
            hurry(self._session)
            self._ids = self._ids_now()
            self._definitions = settled_definitions(self._session, strict=True)
        except BaseException:
            self._session.close()
            raise
        self._unjudged: set[TableName] = set()
        self._sound: set[TableName] = set()
        self._found: dict[TableName, str] = {}
        self._next = 0.0

    def written(self, table: TableName) -> None:
        """Rows of ``table`` were written just now; a look is taken when one is due."""
        self._unjudged.add(table)
        if time.monotonic() >= self._next:
            self.look()

    def look(self, others: Collection[TableName] = ()) -> None:
        """Judge the tables with rows that were written since the last look, and those of ``others`` that never were."""
        began = time.monotonic()
        asked = self._unjudged | (set(others) - self._sound - self._found.keys())
        ids = self._ids_now()
        now = self._definitions_of(asked)
        for table in asked:
            self._found.pop(table, None)
            self._sound.discard(table)
            if table not in now:
                self._found[table] = DROPPED
            elif now[table] != self._definitions.get(table):
                self._found[table] = ALTERED
            elif self._ids is not None and ids is not None and self._ids.of(table) != ids.of(table):
                self._found[table] = SWAPPED
            else:
                self._sound.add(table)
        self._unjudged.clear()
        self._next = time.monotonic() + max(_SHORTEST_REST, _REST * (time.monotonic() - began))

    def judged(self, names: Collection[TableName]) -> dict[TableName, str]:
        """Those of ``names`` that were not the same any more at a look after their last rows, and why. Looks once
        more; what cannot be known is no good either."""
        try:
            self.look(names)
        except ServerError as error:
            unknown = f"cannot determine whether it was changed meanwhile: {error.detail or error.message}"
            return {
                name: self._found.get(name, unknown)
                for name in names
                if name not in self._sound or name in self._unjudged
            }
        return {name: self._found[name] for name in names if name in self._found}

    def renamed(self, names: Collection[TableName]) -> dict[TableName, TableName]:
        """Those of ``names`` that are InnoDB's and have another name now: this one. Empty when that cannot be known."""
        before = self._ids
        now = self._ids_now() if names and before is not None else None
        if before is None or now is None:
            return {}
        found = {name: now.bearer(before.of(name)) for name in names}
        return {name: other for name, other in found.items() if other is not None and other != name}

    def present(self) -> frozenset[TableName]:
        """Every table that there is now, and every view."""
        return table_names(self._session)

    def close(self) -> None:
        """End its session."""
        self._session.close()

    def _definitions_of(self, asked: Collection[TableName]) -> dict[TableName, Mark]:
        if len(asked) > _FEW:
            with contextlib.suppress(LockedTableError):  # as a rule it is none of these
                return definitions(self._session, strict=True)
        return {
            name: number for table in asked for name, number in definitions(self._session, table, strict=True).items()
        }

    def _ids_now(self) -> TableIds | None:
        try:
            return table_ids(self._session, self._dialect.innodb_tables)
        except ServerError as error:
            if not is_denied(error):
                raise
            return None

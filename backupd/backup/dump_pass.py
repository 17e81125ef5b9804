"""One pass over tables: snapshots of one moment, their rows written and packed, and a judgement of each table.

A table is good when its tool says that all rows were written, nothing happened to its definition or its name meanwhile,
and as many rows came as the snapshot holds.

``RowCounter`` shows how many rows a table has in the snapshot; the count is read in a snapshot of our own, opened in
the same moment as those of the tools, while they write.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from backupd.backup.commit import BackupSpec
from backupd.backup.dump_intake import Intake
from backupd.backup.dump_locks import DROPPED, BlockedCommits, NotOpenedError, TableWatch, WaitWatch
from backupd.engine.dump.insert_files import DumpRequest, DumpRun, DumpTable, DumpTool
from backupd.engine.server.definitions import TableDefinition
from backupd.engine.server.snapshot import Snapshot
from backupd.engine.sql.client import Connection
from backupd.engine.sql.tables import Table
from backupd.model.errors import BackupdError, CancelledError, ServerError, ToolError
from backupd.model.server_facts import Position
from backupd.model.table import TableName
from backupd.process.run_context import RunContext
from backupd.transfer.parts import Packer

_COUNT = "SELECT COUNT(*) FROM {table}{history}"

ATTEMPTS = 5
"""How often the snapshots are tried to be opened; somebody may be in the way for a moment."""
_PAUSE_SECONDS = 2.0
"""After the first attempt; twice as long after each further one."""
_LEAST_ROOM = 64 * 1024 * 1024
_MOST_ROOM = 1024 * 1024 * 1024
_COUNT_LOOK_SECONDS = 0.2
_LEAST_WORK = 1024 * 1024
"""Reading a table costs as much as so many bytes, however small it is."""


class RowCounter:
    """Counts tables one after the other, in a thread, from ``start`` to ``finish``. A context manager: leaving it ends
    a count that is under way.

    A table that cannot be counted has no number. ``trouble``: why counting ended early, or nothing.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._snapshot = Snapshot(connection)
        self._thread: threading.Thread | None = None
        self._going = threading.Event()
        self._going.set()
        self._stopped = False
        self._counts: dict[TableName, int] = {}
        self.trouble = ""

    def open(self, position: Position) -> None:
        """Take the snapshot; commits are blocked. Raises ServerError."""
        self._snapshot.open(position)

    def start(self, statements: Mapping[TableName, str]) -> None:
        """Begin to count; ``statements`` of ``counting_statement``."""
        self._thread = threading.Thread(
            target=self._count, args=[tuple(statements.items())], name="counter", daemon=True
        )
        self._thread.start()

    def pause(self) -> None:
        """Begin no other table."""
        self._going.clear()

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._going.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the last table at most this long; True when it is over."""
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True

    @property
    def counts(self) -> Mapping[TableName, int]:
        """Rows in the snapshot, of each table that is counted so far."""
        return dict(self._counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stopped = True
        self._going.set()
        if self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(ServerError), self._connection.connect() as session:  # else the thread ends soon
                session.execute(f"KILL {self._snapshot.session.thread_id}")
            self._thread.join()
        self._snapshot.close()

    def _count(self, statements: Sequence[tuple[TableName, str]]) -> None:
        for table, statement in statements:
            self._going.wait()
            if self._stopped:
                return
            try:
                self._count_one(table, statement)
            except ServerError as error:
                self.trouble = error.detail or error.message
                return
            if self.trouble:
                return

    def _count_one(self, table: TableName, statement: str) -> None:
        rows: int | None = None
        try:
            rows = int(self._snapshot.session.scalar(statement))
        except ServerError:
            self._snapshot.session.ping()  # the table's own trouble, which the tool will report, unless this raises
        # What was counted holds only if the snapshot was still there.
        if not self._snapshot.release():
            self.trouble = "the server gave up the snapshot"
        elif rows is not None:
            self._counts[table] = rows


def counting_statement(table: TableName, *, versioned: bool) -> str:
    """``versioned``: rows of its history count, too."""
    return _COUNT.format(table=table, history=" FOR SYSTEM_TIME ALL" if versioned else "")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A table, its definition before the snapshot, and the tools that bring it back exactly, best first."""

    table: Table
    definition: TableDefinition
    tools: tuple[DumpTool, ...]

    @property
    def name(self) -> TableName:
        """Schema and name of the table."""
        return self.table.name


@dataclass(frozen=True, slots=True)
class Written:
    """The rows of a good table. ``note``: what to know of them."""

    rows: int
    bytes: int
    files: int
    tool: DumpTool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass came to. ``bad``: why a table is not good; ``blamed``: the tool, where that is its doing. ``early``:
    tables that were gone before the snapshot. ``trouble``: for people. ``prepared``: XA transactions that were prepared
    at ``position``. ``renamed``: of those that are gone, their names now."""

    position: Position
    blocked: float
    good: Mapping[TableName, Written]
    bad: Mapping[TableName, str]
    blamed: Mapping[TableName, DumpTool]
    early: frozenset[TableName]
    present: frozenset[TableName]
    trouble: tuple[str, ...] = ()
    prepared: tuple[str, ...] = ()
    renamed: Mapping[TableName, TableName] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpSpec(BackupSpec):
    """How tables are dumped. ``folder``: empty, private, on a disk. ``threads``: the most sessions of a tool.
    ``max_lock``: seconds that commits may be blocked for. ``pressure``: why the server should be left alone, or
    nothing."""

    folder: Path
    threads: int = 4
    chunk_bytes: int = 64 * 1024 * 1024
    max_lock: float = 1.0
    count_rows: bool = True
    pressure: Callable[[], str] = lambda: ""


@dataclass(frozen=True, slots=True)
class PassSettings:
    """``steady``: engines that read a snapshot. ``ready`` is called before each attempt to open the snapshots; it
    returns when nothing long is in their way, or raises. ``opened`` is called when they are there, and says which
    tables are not defined any more as ``wanted`` says, and why. ``notice`` receives, from a thread, who waits for locks
    of the dump, and "" when nobody does any more."""

    spec: DumpSpec
    context: RunContext
    steady: frozenset[str]
    ready: Callable[[], None]
    opened: Callable[[], Mapping[TableName, str]]
    notice: Callable[[str], None]


def dump(
    settings: PassSettings,
    watch: TableWatch,
    wanted: Sequence[Wanted],
    packer: Packer,
    arrived: Callable[[TableName, int], None],
) -> Passed:
    """Dump ``wanted``. What is bad leaves nothing in ``packer``. ``watch``: made before the definitions were read.
    ``arrived`` receives table and size of each file.

    Raises NotOpenedError, ToolError and ServerError when the snapshots cannot be opened, DestinationError and whatever
    else packing does, CancelledError. Trouble of a tool afterwards is trouble of its tables.
    """

    def seen(table: TableName, size: int) -> None:
        with contextlib.suppress(ServerError):  # the last look shows
            watch.written(table)
        arrived(table, size)

    with contextlib.ExitStack() as outer:
        intake = outer.enter_context(
            Intake(
                packer,
                throttle=settings.spec.throttle,
                pressure=settings.spec.pressure,
                room=_room(settings.spec.folder),
                cancel=settings.context.cancel,
                arrived=seen,
            )
        )
        opened = outer.enter_context(_opened(settings, wanted))
        counter = opened.counter
        present = watch.present()
        early = frozenset(one.name for one in wanted) - present
        stale = settings.opened()
        if counter is not None:
            steady = [one for one in wanted if _is_steady(settings, one)]
            counter.start(
                {one.name: counting_statement(one.name, versioned=one.definition.columns.versioned) for one in steady}
            )
        with WaitWatch(
            settings.spec.connection,
            [one.name for one in wanted],
            bound=settings.spec.max_lock,
            report=settings.notice,
            log=settings.context.log,
        ) as waits:
            ended = intake.take([run for _tool, run, _tables in opened.runs], [counter] if counter is not None else [])
            uncounted = _counted(counter, settings.context.cancel)
        trouble = (*opened.trouble, *uncounted, *waits.warnings)
        counts = counter.counts if counter is not None else {}
        bad = _verdicts(opened, ended)
        changed = {one.name: stale[one.name] for one in wanted if one.name in stale}
        changed |= watch.judged([one.name for one in wanted])
        renamed = _renamed(watch, [name for name, why in changed.items() if why == DROPPED])
        bad |= {name: f"{why} ({bad[name]})" if name in bad else why for name, why in changed.items()}
        good: dict[TableName, Written] = {}
        blamed: dict[TableName, DumpTool] = {}
        for tool, _run, tables in opened.runs:
            for one in tables:
                rows, reported = intake.rows(one.name), intake.reported(one.name)
                expected = counts.get(one.name, rows)
                if one.name not in bad and rows != expected:
                    bad[one.name] = f"{rows} rows were written where the snapshot holds {expected}"
                if one.name not in bad and rows != reported:
                    bad[one.name] = f"{tool.tool.name} reported {reported} rows of it, but its files hold {rows}"
                if one.name in bad:
                    intake.drop(one.name)
                    if one.name not in changed:
                        blamed[one.name] = tool
                    continue
                received = intake.keep(one.name)
                good[one.name] = Written(rows, received.bytes, received.files, tool, _note(settings, one))
    return Passed(opened.position, opened.blocked, good, bad, blamed, early, present, trouble, opened.prepared, renamed)


# -- before


@dataclass(frozen=True, slots=True)
class _Opened:
    runs: tuple[tuple[DumpTool, DumpRun, tuple[Wanted, ...]], ...]
    counter: RowCounter | None
    position: Position
    blocked: float
    prepared: tuple[str, ...]
    trouble: tuple[str, ...]


@contextlib.contextmanager
def _opened(settings: PassSettings, wanted: Sequence[Wanted]) -> Iterator[_Opened]:
    """All snapshots. A tool that cannot begin gives its tables to the next one."""
    broken: dict[DumpTool, ToolError] = {}
    attempt = 0
    longest = 0.0
    while True:
        settings.ready()
        shares = _shares(wanted, broken)
        with contextlib.ExitStack() as stack:
            runs = tuple(
                (tool, stack.enter_context(tool.run(_request(stack, settings, tables))), tables)
                for tool, tables in shares.items()
            )
            counter = stack.enter_context(RowCounter(settings.spec.connection)) if settings.spec.count_rows else None
            beginning: DumpTool | None = None
            moment = BlockedCommits(settings.spec.connection, max_seconds=settings.spec.max_lock)
            try:
                with moment:
                    if counter is not None:
                        counter.open(moment.position)
                    for tool, run, _tables in runs:
                        beginning = tool
                        run.open(moment.left)
            except NotOpenedError:
                attempt += 1
                if attempt == ATTEMPTS:
                    raise
            except ToolError as error:
                if beginning is None:
                    raise
                broken[beginning] = error
                continue
            else:
                longest = max(longest, moment.seconds)
                trouble = (*_overstayed(settings, longest), *_not_begun(broken))
                yield _Opened(runs, counter, moment.position, longest, moment.prepared, trouble)
                return
        longest = max(longest, moment.seconds)
        _wait(settings.context.cancel, _PAUSE_SECONDS * 2 ** (attempt - 1))


def _overstayed(settings: PassSettings, seconds: float) -> tuple[str, ...]:
    if seconds <= settings.spec.max_lock:
        return ()
    words = (
        f"commits may have been blocked for up to {seconds:.1f} s, longer than logical.max_lock allows "
        f"({settings.spec.max_lock:g} s): this process or its host was suspended, or the server responded slowly"
    )
    return (words,)


def _not_begun(broken: Mapping[DumpTool, ToolError]) -> Iterator[str]:
    for tool, error in broken.items():
        yield f"{_words(tool, error)}; another tool read its tables"


def _shares(wanted: Sequence[Wanted], broken: Mapping[DumpTool, ToolError]) -> dict[DumpTool, tuple[Wanted, ...]]:
    """Which tool takes which tables. Raises ToolError when one has no tool left."""
    shares: dict[DumpTool, list[Wanted]] = defaultdict(list)
    for one in wanted:
        tool = next((tool for tool in one.tools if tool not in broken), None)
        if tool is None:
            raise next(broken[tool] for tool in one.tools)
        shares[tool].append(one)
    return {tool: tuple(tables) for tool, tables in shares.items()}


def _request(stack: contextlib.ExitStack, settings: PassSettings, tables: Sequence[Wanted]) -> DumpRequest:
    folder = Path(tempfile.mkdtemp(prefix="rows-", dir=settings.spec.folder))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return DumpRequest(
        connection=settings.spec.connection,
        folder=folder,
        chunk_bytes=settings.spec.chunk_bytes,
        threads=sessions(
            [one.table.size for one in tables], most=settings.spec.threads, each=settings.spec.chunk_bytes
        ),
        tables=tuple(DumpTable(one.name, one.table.engine, one.table.size) for one in tables),
        log=settings.context.log,
        cancel=settings.context.cancel,
    )


def sessions(sizes: Sequence[int], *, most: int, each: int) -> int:
    """In how many sessions it is worth to read tables of these ``sizes``: one for each ``each`` bytes, and at least
    two: what a lost session did not read, another one reads. Every session is opened while commits are blocked."""
    work = sum(max(size, _LEAST_WORK) for size in sizes)
    return min(most, max(2, -(-work // each)))


# -- afterwards


def _renamed(watch: TableWatch, names: Sequence[TableName]) -> Mapping[TableName, TableName]:
    with contextlib.suppress(ServerError):  # then they count as dropped
        return watch.renamed(names)
    return {}


def _counted(counter: RowCounter | None, cancel: threading.Event) -> tuple[str, ...]:
    if counter is None:
        return ()
    while not counter.wait(_COUNT_LOOK_SECONDS):
        if cancel.is_set():
            raise CancelledError("the dump was cancelled")
    return (f"rows of some tables were not counted: {counter.trouble}",) if counter.trouble else ()


def _verdicts(opened: _Opened, ended: Mapping[int, Exception]) -> dict[TableName, str]:
    """Tables that were not written in full, and why."""
    bad: dict[TableName, str] = {}
    for number, (tool, run, tables) in enumerate(opened.runs):
        if number in ended:
            error = ended[number]
            if not isinstance(error, BackupdError):
                raise error
            bad |= {one.name: _words(tool, error) for one in tables}
            continue
        verdicts = run.verdicts()
        for one in tables:
            why = verdicts.get(one.name, f"{tool.tool.name} did not report it")
            if why is not None:
                bad[one.name] = why
    return bad


def _words(tool: DumpTool, error: BackupdError) -> str:
    return f"{tool.tool.name}: {error.message}" + (f": {error.detail.splitlines()[-1]}" if error.detail else "")


def _is_steady(settings: PassSettings, one: Wanted) -> bool:
    """Are its rows those of the snapshot?"""
    return one.table.engine in settings.steady and not one.table.is_sequence


def _note(settings: PassSettings, one: Wanted) -> str:
    if _is_steady(settings, one) or one.table.is_sequence:
        return ""
    return f"{one.table.engine} keeps no snapshots: its rows may be newer than the position"


def _room(folder: Path) -> int:
    """Bytes that files may take while they wait: a part of what the disk has left."""
    return max(_LEAST_ROOM, min(_MOST_ROOM, shutil.disk_usage(folder).free // 4))


def _wait(cancel: threading.Event, seconds: float) -> None:
    if cancel.wait(seconds):
        raise CancelledError("the dump was cancelled")

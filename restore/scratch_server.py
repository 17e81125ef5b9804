"""A throw-away copy of a server: restored, started where nobody can reach it, and gone when the block is left.

Some tables of a logical backup in a private server of their own, where they can be rolled forward.

A logical backup is no data directory. So an empty system is made, the tables are loaded into it under their own names,
with their foreign keys (InnoDB's cascades are in no log) and triggers (which statements in the logs fire), and from the
backup's position on it is a copy like any other: it holds just these tables, and a replay is narrowed down to them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from threading import Event

from backupd.engine.binlog.statements import effect
from backupd.engine.binlog.walk import walk
from backupd.engine.physical.capture import LeftOut, PhysicalTool, nothing
from backupd.engine.physical.datafiles import assert_local
from backupd.engine.scratch_source import empty_system, installer_of
from backupd.engine.server.definitions import read_definition, statements
from backupd.engine.server.launch import LaunchedServer, Options, ServerConfig, options_for_copy
from backupd.engine.sql.client import Connection, Session
from backupd.engine.sql.tables import ForeignKey
from backupd.engine.toolset import server_program
from backupd.model.binlog import ChangeKind, ReplaySpec, Stop
from backupd.model.errors import DamagedError, RefusedError, ToolMissingError
from backupd.model.job import Report
from backupd.model.proof import Phase
from backupd.model.server_facts import ServerInfo, Tool
from backupd.model.table import DumpedTable, TableName, definition_path, quote_name, schema_folder, triggers_path
from backupd.model.text import Clock, format_size
from backupd.process import folders
from backupd.process.folders import locked_folder
from backupd.transfer.records.sealing import Unsealer
from restore.cutover.parallel_load import load
from restore.cutover.staging_schema import TABLE
from restore.datadir.occupancy import FOLDER_MODE, RESERVE, Account, hand_over, refuse_too_small, worker_account
from restore.datadir.start import looked_at, server_config
from restore.fetch.chain import Built, Stopwatch, assemble, compare_named, fetch_members
from restore.fetch.sources import (
    Loaded,
    find_programs,
    load_chain,
    need_of,
    pinned,
    present,
    refuse_over_limit,
    remarks,
)
from restore.planning.plan import bytes_of
from restore.replay.logs import Logs
from restore.replay.private_replay import (
    PHASE,
    Beginning,
    Means,
    Replaying,
    RolledForward,
    replay_config,
    replay_workers,
    tables_of,
)
from storage.destination import Destination

_PREFIX = "scratch-"
_LEAST_POOL = 64 * 1024 * 1024
_MOST_POOL = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ScratchSpec:
    """``scratch_id``: an id of its own; ``chain``: backup ids, full first; ``replay``: binary logs that the copy can be
    rolled forward with; ``path``: the folder that scratch copies are made in; ``max_bytes``: the most that this one may
    take there, None for what is free; ``memory``: most bytes for prepare and for the server; ``workers`` 0: as many as
    this machine can use; ``templates``: see ``rollforward.Means``; ``programs``: paths of programs that are not
    searched. ``accounts``: start it with the accounts of the source, as a replay needs it, too; without them scheduled
    events cannot be read. ``key_files``: of the configuration."""

    scratch_id: str
    server: str
    chain: tuple[str, ...]
    path: Path
    max_bytes: int | None
    memory: int
    workers: int = 0
    replay: ReplaySpec | None = None
    templates: Path | None = None
    programs: Mapping[str, str] = field(default_factory=dict)
    accounts: bool = False
    key_files: Sequence[Path] = ()


@dataclass(slots=True)
class Scratch:
    """A running copy. ``phases`` that are over: ``fetched``, ``prepared``, ``restored``, ``started``; and
    ``rolled_forward`` after ``roll_forward``, which there is where the spec has a replay: call it once, with what is to
    be done at the end of each leg. ``datadir``: its files."""

    connection: Connection
    last: Loaded
    sandboxed: bool
    datadir: Path
    phases: list[Phase] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    roll_forward: Callable[[Callable[[Stop], None]], RolledForward] | None = None


@contextlib.contextmanager
def scratch_instance(
    spec: ScratchSpec,
    *,
    destinations: Sequence[Destination],
    unsealer: Unsealer,
    clock: Clock,
    report: Report,
    cancel: Event | None = None,
    on_phase: Callable[[Phase], None] = lambda _phase: None,
    archives: Sequence[Destination] | None = None,
) -> Iterator[Scratch]:
    """Restore into a private folder and start a server on it: no network, no replication, no events, no path outside.

    ``archives``: destinations that may hold binary logs, None for the same. Everything is removed at the end, well or
    not; what a killed process left is removed by the next call. Raises RefusedError (too large, another series),
    DamagedError, KeyUnusableError, ToolError, ServerError.
    """
    with workshop(
        spec,
        destinations=destinations,
        unsealer=unsealer,
        clock=clock,
        report=report,
        cancel=cancel,
        on_phase=on_phase,
        archives=archives,
    ) as work:
        work.refuse(work.chain)
        with work.place() as folder:
            with work.pinned():
                work.fetch(work.chain, folder)
                built = work.assemble(work.chain, folder)
            with work.started(work.chain, folder, built) as copy:
                yield copy


@contextlib.contextmanager
def workshop(
    spec: ScratchSpec,
    *,
    destinations: Sequence[Destination],
    unsealer: Unsealer,
    clock: Clock,
    report: Report,
    cancel: Event | None = None,
    on_phase: Callable[[Phase], None] = lambda _phase: None,
    archives: Sequence[Destination] | None = None,
) -> Iterator[Workshop]:
    """The means of one scratch copy, after everything that forbids it whatever its size; see ``scratch_instance``."""
    phases: list[Phase] = []

    def note(phase: Phase) -> None:
        phases.append(phase)
        on_phase(phase)

    account = worker_account()
    remove_dead(spec.path)
    watch = Stopwatch(note)
    replaying = (
        None
        if spec.replay is None
        else Replaying(
            spec.server,
            spec.replay,
            destinations if archives is None else archives,
            unsealer,
            memory=spec.memory // 4,
            workers=spec.workers,
            means=Means(spec.programs, spec.templates),
            watch=watch,
            report=report,
            cancel=cancel,
        )
    )
    chain, said = load_chain(spec.server, spec.chain, destinations, unsealer)
    programs = find_programs(chain[-1].body.facts, start=True, paths=spec.programs)
    if programs.server is None:
        raise ToolMissingError("no server program was found", hint="install the database server on this host")
    yield Workshop(
        spec,
        chain,
        tuple(destinations),
        unsealer,
        clock,
        report,
        cancel,
        watch,
        account,
        programs.tool,
        programs.server,
        replaying,
        phases,
        [*said, *remarks(chain[-1].body.facts.server)],
    )


@dataclass(slots=True)
class Workshop:
    """What a copy is made with, in steps. ``chain``: all of each backup; every step is given that, or a part of it.
    ``warnings`` that the copy will have; ``tables``: what its replay is narrowed down to, when it begins."""

    spec: ScratchSpec
    chain: tuple[Loaded, ...]
    destinations: tuple[Destination, ...]
    unsealer: Unsealer
    clock: Clock
    report: Report
    cancel: Event | None
    watch: Stopwatch
    account: Account
    tool: PhysicalTool
    server: Tool
    replaying: Replaying | None
    phases: list[Phase]
    warnings: list[str]
    tables: tuple[TableName, ...] = ()
    _logs: Logs | None = None

    def refuse(self, chain: Sequence[Loaded], *, there: Path | None = None) -> None:
        """Raises RefusedError where ``chain`` is too large. ``there``: a folder with some of it."""
        if self.spec.max_bytes is not None:
            refuse_over_limit(chain, self.spec.max_bytes)
        self.warnings += refuse_too_small(need_of(chain), self.spec.path, there=present(there) if there else (0, 0))

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        """The folder of this copy, with the binary logs that are to be replayed: the dearest failures come first."""
        with scratch_folder(self.spec.path, self.spec.scratch_id) as folder:
            if self.replaying is not None:
                self._logs = self.replaying.logs(folder / "binlogs")
            yield folder

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """While the backups are read nobody removes them."""
        backups = [(self.spec.server, backup_id) for backup_id in self.spec.chain]
        with pinned(self.destinations, self.spec.scratch_id, backups, clock=self.clock) as unpinned:
            self.warnings += [line for line in unpinned if line not in self.warnings]
            yield

    def fetch(self, chain: Sequence[Loaded], folder: Path) -> None:
        """Bring the backups of ``chain`` below ``folder``. Raises DamagedError, DestinationError, CancelledError."""
        self.warnings += fetch_members(
            chain,
            folder,
            destinations=self.destinations,
            unsealer=self.unsealer,
            workers=self.spec.workers,
            watch=self.watch,
            report=self.report,
            cancel=self.cancel,
        )

    def assemble(self, chain: Sequence[Loaded], folder: Path, *, left_out: LeftOut = nothing) -> Built:
        """What was fetched becomes ``folder/data``, whose server may be started."""
        built = assemble(
            chain,
            folder,
            tool=self.tool,
            memory_cap=self.spec.memory,
            watch=self.watch,
            report=self.report,
            cancel=self.cancel,
            left_out=left_out,
            key_files=self.spec.key_files,
        )
        data, store = folder / "data", folder / "external"
        with self.watch.phase("restored", _size(chain)):
            hand_over(data, self.account, folder_mode=FOLDER_MODE)
            if store.is_dir():
                hand_over(store, self.account, folder_mode=FOLDER_MODE)
            assert_local(data, store)
        return built

    @contextlib.contextmanager
    def started(self, chain: Sequence[Loaded], folder: Path, built: Built, *, clean: bool = True) -> Iterator[Scratch]:
        """The running copy. ``clean``: shut it down at the end; else it is killed, for nobody needs its files."""
        last, spec, data = chain[-1], self.spec, folder / "data"
        info = last.body.facts.server
        pool = max(_LEAST_POOL, min(spec.memory // 2, _MOST_POOL))
        config = server_config(
            self.server.path,
            data,
            folder / "run",
            built.options,
            account=self.account,
            store=folder / "external",
            memory=pool,
            key_files=spec.key_files,
        )
        if self.replaying is not None:
            config = self.replaying.config(config, last)
        elif spec.accounts:
            config = replace(config, skip_grants=False, own_account=True)
        with contextlib.ExitStack() as stack:
            with self.watch.phase("started", _size(chain)):
                server = stack.enter_context(looked_at(config, info, replica=False))
                named = compare_named(server.connection, last)
            copy = Scratch(
                server.connection, last, server.sandboxed, data, self.phases, [*self.warnings, *built.warnings, *named]
            )
            if self.replaying is not None and self._logs is not None:
                begin = self.replaying.beginning(self._logs, last, built.place)
                copy.roll_forward = lambda on_stop: self._roll(server, info, begin, folder / "replay", on_stop)
            try:
                yield copy
            finally:
                if not clean:
                    server.kill()

    def _roll(
        self, server: LaunchedServer, info: ServerInfo, begin: Beginning, folder: Path, on_stop: Callable[[Stop], None]
    ) -> RolledForward:
        replaying, logs = self.replaying, self._logs
        if replaying is None or logs is None:
            raise ValueError("there is nothing to be replayed")
        if self.tables:
            replaying = replace(replaying, spec=replace(replaying.spec, tables=tuple(map(str, self.tables))))
        return replaying.roll(
            server,
            info,
            logs,
            begin,
            folder=folder,
            on_stop=on_stop,
            timed=lambda leg: self.watch.phase(PHASE, leg.size),
        )


def _size(chain: Sequence[Loaded]) -> int:
    return bytes_of("restored", [loaded.header.stats.bytes_source for loaded in chain])


@contextlib.contextmanager
def scratch_folder(path: Path, scratch_id: str) -> Iterator[Path]:
    """A locked folder of its own. The server's user may pass through it, and list nothing."""
    folder = path / f"{_PREFIX}{scratch_id}"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked_folder(folder))
        except OSError as error:
            raise _unusable(folder, error) from error
        yield folder


def _unusable(path: Path, error: OSError) -> RefusedError:
    return RefusedError(
        f"cannot make scratch copies at {path}: {error.strerror}",
        hint="restore.scratch.path in the configuration must be a folder that this user may make folders in",
    )


def remove_dead(path: Path) -> tuple[str, ...]:
    """Remove scratch copies in ``path`` whose process is gone: nobody holds their lock any more. Gives their names."""
    try:
        folders.make_passable(path)
    except OSError as error:
        raise _unusable(path, error) from error
    return folders.remove_dead(path, _PREFIX)


WITH_SNAPSHOTS = frozenset({"INNODB", "ROCKSDB", "TOKUDB"})
_USUAL = {"lower_case_table_names": "0", "innodb_page_size": "16384"}
_MADE_WITH = tuple(_USUAL)
_GROWTH = 2
"""A loaded table may take twice the bytes of its statements: pages half full, keys, undo."""
_SYSTEM = 512 * 1024 * 1024
"""An empty system, its redo log included."""
_NOWHERE = "no-external"


@dataclass(frozen=True, slots=True)
class TableCopySpec:
    """``copy_id``: an id of its own; ``server``: whose binary logs ``replay`` names; ``info``: that server as it was
    when the backup was taken, which ended at ``taken``; ``path``: the folder that scratch copies are made in;
    ``memory``: most bytes for the server; ``max_bytes``: the most that the copy may take there, None for what is free;
    ``workers`` 0: as many as this machine can use; ``templates``: see ``rollforward.Means``; ``programs``: paths of
    programs that are not searched."""

    copy_id: str
    server: str
    info: ServerInfo
    taken: datetime
    path: Path
    memory: int
    max_bytes: int | None = None
    workers: int = 0
    replay: ReplaySpec | None = None
    templates: Path | None = None
    programs: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class TableCopy:
    """A running copy. ``tables`` that are in it; ``failed``: those that could not be loaded, and why. ``phases`` that
    are over: ``started``, ``restored``; and ``rolled_forward`` after ``roll_forward``, which is there where the spec
    has a replay: call it once, with what is to be done at the end of each leg."""

    connection: Connection
    datadir: Path
    tables: tuple[TableName, ...]
    failed: Mapping[TableName, str]
    phases: list[Phase] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    roll_forward: Callable[[Callable[[Stop], None]], RolledForward] | None = None


@contextlib.contextmanager
def loaded_instance(
    spec: TableCopySpec,
    folder: Path,
    tables: Sequence[DumpedTable],
    *,
    archives: Sequence[Destination],
    unsealer: Unsealer,
    report: Report,
    cancel: Event | None = None,
    on_phase: Callable[[Phase], None] = lambda _phase: None,
) -> Iterator[TableCopy]:
    """Load ``tables``, whose files are in ``folder`` in the layout of a logical backup, into an empty private server.

    ``archives``: destinations that may hold binary logs. Everything is removed at the end, well or not; what a killed
    process left is removed by the next call. Raises RefusedError (tables with another position than the backup's, or
    without a snapshot, cannot be rolled forward), DamagedError, ToolError, ServerError.
    """
    phases: list[Phase] = []

    def note(phase: Phase) -> None:
        phases.append(phase)
        on_phase(phase)

    watch, info = Stopwatch(note), spec.info
    account = worker_account()
    remove_dead(spec.path)
    program = server_program(info.flavour, info.version, paths=spec.programs).path
    replaying = (
        None
        if spec.replay is None
        else Replaying(
            spec.server,
            spec.replay,
            archives,
            unsealer,
            memory=spec.memory // 4,
            workers=spec.workers,
            means=Means(spec.programs, spec.templates),
            watch=watch,
            report=report,
            cancel=cancel,
        )
    )
    _refuse_no_room(spec, sum(table.bytes for table in tables))
    if replaying is not None:
        refuse_inexact(tables, replaying.spec)
    with scratch_folder(spec.path, spec.copy_id) as place:
        logs = replaying.logs(place / "binlogs") if replaying else None
        data = place / "data"
        config = _config(spec, program, data, place / "run", account)
        with contextlib.ExitStack() as stack:
            with watch.phase("started"):
                empty_system(
                    data,
                    program,
                    installer=installer_of(program, info, paths=spec.programs),
                    user=account.name,
                    templates=spec.templates,
                    options=_lasting(info),
                )
                server = stack.enter_context(LaunchedServer(config, cancel=cancel))
            with watch.phase("restored", sum(table.bytes for table in tables)):
                with server.connection.connect() as session:
                    _make_schemas(session, folder, tables, spec.replay, logs)
                filled = _fill(server.connection, folder, tables, spec, report=report, cancel=cancel)
            copy = TableCopy(server.connection, data, filled.tables, filled.failed, phases, list(filled.warnings))
            if replaying is not None and logs is not None:
                _refuse_without_parent(filled)
                begin = Beginning(replaying.spec.legs[0].start)
                copy.roll_forward = lambda on_stop: replaying.roll(
                    server,
                    info,
                    logs,
                    begin,
                    folder=place / "replay",
                    on_stop=on_stop,
                    timed=lambda leg: watch.phase(PHASE, leg.size),
                )
            yield copy


def _config(spec: TableCopySpec, program: str, data: Path, run_folder: Path, account: Account) -> ServerConfig:
    options = {**options_for_copy(data, spec.info.variables), **_lasting(spec.info)}
    # Keys are of the source; what is loaded lies on this disk for as long as the restore takes.
    options = {name: value for name, value in options.items() if "encrypt" not in name}
    pool = max(_LEAST_POOL, min(spec.memory // 2, _MOST_POOL))
    config = server_config(program, data, run_folder, options, account=account, store=data / _NOWHERE, memory=pool)
    if spec.replay is None:
        return replace(config, skip_grants=False, own_account=True)
    return replay_config(
        config,
        spec.info,
        spec.replay.server_ids,
        replay_workers(spec.workers),
        since=spec.taken,
        until=max(spec.taken, spec.replay.stop.at or spec.taken),
    )


def _lasting(info: ServerInfo) -> Options:
    """What a system is made with and keeps: as the source has it."""
    return {name: info.variables[name] for name in _MADE_WITH if info.variables.get(name, _USUAL[name]) != _USUAL[name]}


def _refuse_no_room(spec: TableCopySpec, rows: int) -> None:
    """Raises RefusedError when tables with so many bytes of rows do not fit."""
    room = os.statvfs(spec.path)
    free, need = room.f_bavail * room.f_frsize, rows * _GROWTH + _SYSTEM
    if spec.max_bytes is not None and need > spec.max_bytes:
        raise RefusedError(
            f"a copy of these tables needs {format_size(need)}; allowed are {format_size(spec.max_bytes)}",
            hint="raise restore.scratch.max_bytes in the configuration",
        )
    if free < need + RESERVE:
        raise RefusedError(
            f"too little room at {spec.path} for a copy of these tables: {format_size(need + RESERVE)} "
            f"needed, {format_size(free)} free",
            hint="free some space there",
        )


def refuse_inexact(tables: Sequence[DumpedTable], replay: ReplaySpec) -> None:
    """Raises RefusedError for tables whose rows are not those of the place where the replay begins."""
    start = replay.legs[0].start
    elsewhere = [
        table.name.shown
        for table in tables
        if table.position is not None and (table.position.file, table.position.pos) != (start.file, start.pos)
    ]
    loose = [
        f"{table.name.shown} ({table.engine})"
        for table in tables
        if table.engine and table.engine.upper() not in WITH_SNAPSHOTS
    ]
    for names, why in (
        (elsewhere, "they were dumped at a later place than the rest of the backup"),
        (loose, "their engines have no snapshots: nobody knows which place their rows are of"),
    ):
        if names:
            raise RefusedError(
                f"{len(names)} tables of this backup cannot be rolled forward: {why}",
                detail=", ".join(names),
                hint="restore the other tables without them, and these as the backup has them (--to "
                "backup:ID); on a physical backup, where there is one, they can be rolled forward",
            )


def _make_schemas(
    session: Session, folder: Path, tables: Sequence[DumpedTable], replay: ReplaySpec | None, logs: Logs | None
) -> None:
    """Those of the tables, and those that tables are moved to later on: unless the logs make them."""
    needed = {table.name.schema for table in tables}
    if replay is not None and logs is not None:
        first: dict[str, ChangeKind] = {}
        for leg, files in zip(replay.legs, logs.legs, strict=True):
            for statement in walk(files, leg.start).statements if files else ():
                for change in effect(statement.text, statement.schema).changes:
                    if not change.name and change.kind in (ChangeKind.CREATE, ChangeKind.DROP):
                        first.setdefault(change.schema, change.kind)
        needed |= {table.schema for table in tables_of(replay) if first.get(table.schema) is not ChangeKind.CREATE}
    for schema in sorted(needed):
        _run_script(
            session,
            folder / schema_folder(schema) / "create.sql",
            "",
            otherwise=f"CREATE DATABASE IF NOT EXISTS {quote_name(schema)}",
        )


@dataclass(frozen=True, slots=True)
class _Filled:
    tables: tuple[TableName, ...]
    failed: Mapping[TableName, str]
    warnings: tuple[str, ...]
    orphaned: tuple[ForeignKey, ...]
    """Constraints that were left out, because their parents are not here."""


def _fill(
    connection: Connection,
    folder: Path,
    tables: Sequence[DumpedTable],
    spec: TableCopySpec,
    *,
    report: Report,
    cancel: Event | None,
) -> _Filled:
    """Raises ServerError, DamagedError for files that are not as a backup has them."""
    schemas = sorted({table.name.schema for table in tables})
    loaded = load(
        connection,
        folder,
        tables,
        {schema: schema for schema in schemas},
        workers=spec.workers or replay_workers(0),
        report=report,
        cancel=cancel,
    )
    there = tuple(table.name for table in tables if table.name in loaded.rows)
    with connection.connect() as session:
        for schema in schemas:
            session.execute(f"DROP TABLE IF EXISTS {quote_name(schema, TABLE)}")
        orphaned = list(_add_keys(session, folder, there))
        for schema in schemas:
            _run_script(session, folder / schema_folder(schema) / "routines.sql", schema)
        for name in there:
            _run_script(session, folder / triggers_path(name), name.schema)
    return _Filled(there, loaded.failed, loaded.warnings, tuple(orphaned))


def _add_keys(session: Session, folder: Path, tables: Sequence[TableName]) -> Iterator[ForeignKey]:
    """Gives those whose parents are not here. They only held back changes that the source did not make, either."""
    session.execute("SET SESSION foreign_key_checks = 0")
    for name in tables:
        path = folder / definition_path(name)
        try:
            definition = read_definition(name, path.read_bytes())
        except ValueError as error:
            raise DamagedError(f"the definition of {name.shown} is not as a backup has it", [str(error)]) from error
        for key in definition.foreign_keys:
            if key.parent in tables:
                session.execute(f"ALTER TABLE {name} ADD {key.clause}")
            else:
                yield key


def _refuse_without_parent(filled: _Filled) -> None:
    """Raises RefusedError where a replay would lack what InnoDB did by itself."""
    acting = [
        f"{key.child.shown} to {key.parent.shown} (ON DELETE {key.on_delete} ON UPDATE {key.on_update})"
        for key in filled.orphaned
        if key.acts
    ]
    if acting:
        raise RefusedError(
            "tables cannot be rolled forward without the parents of their foreign keys",
            detail="\n".join(acting),
            hint="InnoDB's cascades are in no log: the backup must hold the parents, too; take the base "
            "from another one",
        )


def _run_script(session: Session, path: Path, schema: str, *, otherwise: str = "") -> None:
    """Execute a client script of the backup in ``schema``, as far as it is there."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else ""
    if schema:
        session.execute(f"USE {quote_name(schema)}")
    for statement in statements(text) if text else filter(None, [otherwise]):
        session.execute(statement)

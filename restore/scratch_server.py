"""A throw-away copy of a server: restored, started where nobody can reach it, and gone when the block is left.

Or just of some tables of a logical backup (``loaded_instance``), where they can be rolled forward. A logical backup is
no data directory: so an empty system is made, the tables are loaded into it under their own names, with their foreign
keys (InnoDB's cascades are in no log) and triggers (which statements in the logs fire), and from the backup's position
on it is a copy like any other: it holds just these tables, and a replay is narrowed down to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from backupd.engine.binlog.statements import effect
from backupd.engine.binlog.walk import walk
from backupd.engine.empty_system import empty_system, installer_of
from backupd.engine.physical.capture import LeftOut, PhysicalTool, nothing
from backupd.engine.physical.datafiles import assert_local
from backupd.engine.server.definitions import read_definition, statements
from backupd.engine.server.launch import LaunchedServer, Options, options_for_copy
from backupd.engine.sql.client import Connection, Session
from backupd.engine.sql.tables import ForeignKey
from backupd.engine.toolset import server_program
from backupd.model.binlog import ChangeKind, ReplaySpec, Stop
from backupd.model.errors import DamagedError, RefusedError
from backupd.model.proof import Phase
from backupd.model.server_facts import ClusterPosition, ServerInfo, Tool
from backupd.model.table import DumpedTable, TableName, definition_path, quote_name, schema_folder, triggers_path
from backupd.model.text import format_size
from backupd.process import folders
from backupd.process.folders import locked_folder
from backupd.process.run_context import RunContext
from restore.cutover.parallel_load import load
from restore.cutover.staging_schema import TABLE
from restore.datadir.occupancy import (
    FOLDER_MODE,
    RESERVE,
    Account,
    hand_over,
    refuse_full,
    refuse_too_small,
    worker_account,
)
from restore.datadir.start import looked_at, server_config
from restore.fetch.chain import Built, assemble, compare_named, data_bytes, fetch_members
from restore.fetch.sources import (
    Loaded,
    Sources,
    find_programs,
    load_chain,
    need_of,
    pinned,
    present,
    refuse_over_limit,
    remarks,
)
from restore.replay.logs import Logs
from restore.replay.private_replay import (
    Beginning,
    Replaying,
    RolledForward,
    replay_workers,
    tables_of,
)

_PREFIX = "scratch-"
_LEAST_POOL = 64 * 1024 * 1024
_MOST_POOL = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ScratchSpec:
    """``scratch_id``: an id of its own; ``chain``: backup ids, full first; ``path``: the folder that scratch copies are
    made in; ``max_bytes``: the most that this one may take there, None for what is free; ``replay``: binary logs that
    the copy can be rolled forward with. ``accounts``: start it with the accounts of the source, as a replay needs it,
    too; without them scheduled events cannot be read."""

    scratch_id: str
    server: str
    chain: tuple[str, ...]
    path: Path
    max_bytes: int | None = None
    replay: ReplaySpec | None = None
    accounts: bool = False


@dataclass(slots=True)
class Scratch:
    """A running copy. ``phases`` that are over: ``fetched``, ``prepared``, ``restored``, ``started``; and
    ``rolled_forward`` after ``roll_forward``, which there is where the spec has a replay: call it once, with what is to
    be done at the end of each leg. ``datadir``: its files. ``node``: as of ``Built``."""

    connection: Connection
    last: Loaded
    sandboxed: bool
    datadir: Path
    phases: list[Phase] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    roll_forward: Callable[[Callable[[Stop], None]], RolledForward] | None = None
    node: ClusterPosition | None = None


@contextlib.contextmanager
def scratch_instance(spec: ScratchSpec, sources: Sources, context: RunContext) -> Iterator[Scratch]:
    """Restore into a private folder and start a server on it: no network, no replication, no events, no path outside.

    Everything is removed at the end, well or not; what a killed process left is removed by the next call. Raises
    RefusedError (too large, another series), DamagedError, KeyUnusableError, ToolError, ServerError.
    """
    work = workshop(spec, sources, context)
    work.refuse(work.chain)
    with work.place() as folder:
        with work.pinned():
            work.fetch(work.chain, folder)
            built = work.assemble(work.chain, folder)
        with work.started(work.chain, folder, built) as copy:
            yield copy


def workshop(spec: ScratchSpec, sources: Sources, context: RunContext) -> Workshop:
    """The means of one scratch copy, after everything that forbids it whatever its size; see ``scratch_instance``."""
    account = worker_account()
    remove_dead(spec.path)
    chain, said = load_chain(spec.server, spec.chain, sources)
    programs = find_programs(chain[-1].body.facts, start=True, paths=context.programs)
    context = context.with_own_phases()
    return Workshop(
        spec,
        chain,
        sources,
        context,
        account,
        programs.tool,
        programs.needed_server,
        Replaying(spec.server, spec.replay, sources, context) if spec.replay else None,
        [*said, *remarks(chain[-1].body.facts.server)],
    )


@dataclass(slots=True)
class Workshop:
    """What a copy is made with, in steps. ``chain``: all of each backup; every step is given that, or a part of it.
    ``warnings`` that the copy will have; ``tables``: what its replay is narrowed down to, when it begins."""

    spec: ScratchSpec
    chain: tuple[Loaded, ...]
    sources: Sources
    context: RunContext
    account: Account
    tool: PhysicalTool
    server: Tool
    replaying: Replaying | None
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
        spec = self.spec
        with pinned(self.sources, spec.scratch_id, spec.server, spec.chain, self.context) as unpinned:
            self.warnings += [line for line in unpinned if line not in self.warnings]
            yield

    def fetch(self, chain: Sequence[Loaded], folder: Path) -> None:
        """Bring the backups of ``chain`` below ``folder``. Raises DamagedError, DestinationError, CancelledError."""
        self.warnings += fetch_members(chain, folder, self.sources, self.context)

    def assemble(self, chain: Sequence[Loaded], folder: Path, *, left_out: LeftOut = nothing) -> Built:
        """What was fetched becomes ``folder/data``, whose server may be started."""
        built = assemble(chain, folder, self.tool, self.context, left_out=left_out)
        data, store = folder / "data", folder / "external"
        with self.context.watch.phase("restored", data_bytes(chain)):
            hand_over(data, self.account, folder_mode=FOLDER_MODE)
            if store.is_dir():
                hand_over(store, self.account, folder_mode=FOLDER_MODE)
            assert_local(data, store)
        return built

    @contextlib.contextmanager
    def started(self, chain: Sequence[Loaded], folder: Path, built: Built, *, clean: bool = True) -> Iterator[Scratch]:
        """The running copy. ``clean``: shut it down at the end; else it is killed, for nobody needs its files."""
        last, data, watch = chain[-1], folder / "data", self.context.watch
        info = last.body.facts.server
        config = server_config(
            self.server.path,
            data,
            folder / "run",
            built.options,
            self.context,
            account=self.account,
            store=folder / "external",
            memory=_pool(self.context),
        )
        if self.replaying is not None:
            config = self.replaying.config(config, info, last.header.finished_at)
        elif self.spec.accounts:
            config = replace(config, skip_grants=False, own_account=True)
        with contextlib.ExitStack() as stack:
            with watch.phase("started", data_bytes(chain)):
                server = stack.enter_context(looked_at(config, info, replica=False))
                named = compare_named(server.connection, last)
            copy = Scratch(
                server.connection, last, server.sandboxed, data, watch.phases, [*self.warnings, *built.warnings, *named]
            )
            copy.node = built.node
            if self.replaying is not None and self._logs is not None:
                begin = self.replaying.beginning(self._logs, last, built.position)
                copy.roll_forward = partial(self._roll, server, self._logs, begin, folder / "replay")
            try:
                yield copy
            finally:
                if not clean:
                    server.kill()

    def _roll(
        self, server: LaunchedServer, logs: Logs, begin: Beginning, folder: Path, on_stop: Callable[[Stop], None]
    ) -> RolledForward:
        replaying, info = self.replaying, self.chain[-1].body.facts.server
        assert replaying is not None  # noqa: S101  whose logs these are
        if self.tables:
            replaying = replace(replaying, spec=replace(replaying.spec, tables=tuple(map(str, self.tables))))
        return replaying.roll(server, info, logs, begin, folder, on_stop=on_stop)


def _pool(context: RunContext) -> int:
    """Bytes of the buffer pool of a scratch server."""
    return max(_LEAST_POOL, min(context.memory // 2, _MOST_POOL))


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
        hint="restore.scratch.path in the configuration must be a folder in which this user may create folders",
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


@dataclass(slots=True)
class TableCopy:
    """A running copy. ``tables`` that are in it; ``failed``: those that could not be loaded, and why.
    ``roll_forward`` is there where the spec has a replay: call it once, with what is to be done at the end of each
    leg."""

    connection: Connection
    tables: tuple[TableName, ...]
    failed: Mapping[TableName, str]
    warnings: list[str] = field(default_factory=list)
    roll_forward: Callable[[Callable[[Stop], None]], RolledForward] | None = None


@contextlib.contextmanager
def loaded_instance(
    spec: ScratchSpec,
    info: ServerInfo,
    taken: datetime,
    folder: Path,
    tables: Sequence[DumpedTable],
    sources: Sources,
    context: RunContext,
) -> Iterator[TableCopy]:
    """Load ``tables``, whose files are in ``folder`` in the layout of a logical backup, into an empty private server.
    ``info``: the server as it was when that backup was taken, which ended at ``taken``.

    Everything is removed at the end, well or not; what a killed process left is removed by the next call. Raises
    RefusedError (tables with another position than the backup's, or without a snapshot, cannot be rolled forward),
    DamagedError, ToolError, ServerError.
    """
    context = context.with_own_phases()
    watch = context.watch
    account = worker_account()
    remove_dead(spec.path)
    program = server_program(info.flavour, info.version, paths=context.programs).path
    replaying = Replaying(spec.server, spec.replay, sources, context) if spec.replay else None
    _refuse_no_room(spec, sum(table.bytes for table in tables))
    if replaying is not None:
        refuse_inexact(tables, replaying.spec)
    with scratch_folder(spec.path, spec.scratch_id) as scratch:
        logs = replaying.logs(scratch / "binlogs") if replaying else None
        data = scratch / "data"
        options = {**options_for_copy(data, info.variables), **_lasting(info)}
        # Keys are of the source; what is loaded is on this disk for as long as the restore takes.
        options = {name: value for name, value in options.items() if "encrypt" not in name}
        config = server_config(
            program,
            data,
            scratch / "run",
            options,
            replace(context, key_files=()),
            account=account,
            store=data / _NOWHERE,
            memory=_pool(context),
        )
        config = (
            replaying.config(config, info, taken) if replaying else replace(config, skip_grants=False, own_account=True)
        )
        with contextlib.ExitStack() as stack:
            with watch.phase("started"):
                empty_system(
                    data,
                    program,
                    installer=installer_of(program, info, paths=context.programs),
                    user=account.name,
                    templates=context.templates,
                    options=_lasting(info),
                )
                server = stack.enter_context(LaunchedServer(config, cancel=context.cancel))
            with watch.phase("restored", sum(table.bytes for table in tables)):
                with server.connection.connect() as session:
                    _make_schemas(session, folder, tables, spec.replay, logs)
                filled = _fill(server.connection, folder, tables, context)
            copy = TableCopy(server.connection, filled.tables, filled.failed, list(filled.warnings))
            if replaying is not None and logs is not None:
                _refuse_without_parent(filled)
                begin = Beginning(replaying.spec.legs[0].start)
                copy.roll_forward = lambda on_stop: replaying.roll(
                    server, info, logs, begin, scratch / "replay", on_stop=on_stop
                )
            yield copy


def _lasting(info: ServerInfo) -> Options:
    """What a system is made with and keeps: as the source has it."""
    return {name: info.variables[name] for name in _MADE_WITH if info.variables.get(name, _USUAL[name]) != _USUAL[name]}


def _refuse_no_room(spec: ScratchSpec, rows: int) -> None:
    """Raises RefusedError when tables with so many bytes of rows do not fit."""
    need = rows * _GROWTH + _SYSTEM
    if spec.max_bytes is not None and need > spec.max_bytes:
        raise RefusedError(
            f"a copy of these tables needs {format_size(need)}; allowed are {format_size(spec.max_bytes)}",
            hint="raise restore.scratch.max_bytes in the configuration",
        )
    refuse_full(spec.path, need + RESERVE, "a copy of these tables", hint="free space there")


def refuse_inexact(tables: Sequence[DumpedTable], replay: ReplaySpec) -> None:
    """Raises RefusedError for tables whose rows are not those of the position where the replay begins."""
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
        (elsewhere, "they were dumped at a later position than the rest of the backup"),
        (loose, "their engines have no snapshots: the position of their rows is unknown"),
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


def _fill(connection: Connection, folder: Path, tables: Sequence[DumpedTable], context: RunContext) -> _Filled:
    """Raises ServerError, DamagedError for files that are not as a backup has them."""
    schemas = sorted({table.name.schema for table in tables})
    loaded = load(
        connection,
        folder,
        tables,
        {schema: schema for schema in schemas},
        replace(context, workers=replay_workers(context.workers)),
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
            "tables cannot be rolled forward without the parent tables of their foreign keys",
            detail="\n".join(acting),
            hint="InnoDB's cascades are in no binary log, so the backup must hold the parent tables: choose another "
            "one (--to backup:ID)",
        )


def _run_script(session: Session, path: Path, schema: str, *, otherwise: str = "") -> None:
    """Execute a client script of the backup in ``schema``, as far as it is there."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else ""
    if schema:
        session.execute(f"USE {quote_name(schema)}")
    for statement in statements(text) if text else filter(None, [otherwise]):
        session.execute(statement)

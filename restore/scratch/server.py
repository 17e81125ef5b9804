"""A throw-away copy of a server: restored, started where nobody can reach it, and gone when the block is left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

from backupd.engine.instance.launch import LaunchedServer
from backupd.engine.physical.capture import LeftOut, PhysicalTool, nothing
from backupd.engine.physical.external_tablespaces import assert_local
from backupd.engine.sql.client import Connection
from backupd.model.binlog import ReplaySpec, Stop
from backupd.model.errors import RefusedError, ToolMissingError
from backupd.model.job import Report
from backupd.model.proof import Phase
from backupd.model.server_facts import ServerInfo, Tool
from backupd.model.table import TableName
from backupd.model.text import Clock
from backupd.process import folders
from backupd.process.folders import locked_folder
from backupd.transfer.seal.seal import Unsealer
from restore.datadir.occupancy import FOLDER_MODE, Account, hand_over, worker_account
from restore.datadir.resources import refuse_too_small
from restore.datadir.start import looked_at, server_config
from restore.fetch.chain import Built, Stopwatch, assemble, compare_named, fetch_members
from restore.fetch.refusals import find_programs, need_of, present, refuse_over_limit, remarks
from restore.fetch.sources import Loaded, load_chain, pinned
from restore.planning.plan import bytes_of
from restore.replay.logs import Logs
from restore.replay.private_replay import PHASE, Replaying
from restore.replay.roll_forward import Beginning, Means, RolledForward
from storage.contract.destination import Destination

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

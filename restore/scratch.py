"""A throw-away copy of a server: restored, started where nobody can reach it, and gone when the block is left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from backupd.engine.client import Connection
from backupd.engine.external import assert_local
from backupd.engine.launch import DATABASE_USER
from backupd.model.binlog import ReplaySpec, Stop
from backupd.model.clock import Clock
from backupd.model.errors import RefusedError, ToolMissingError
from backupd.model.progress import Report
from backupd.model.proof import Phase
from backupd.process import folders
from backupd.process.folders import locked_folder
from backupd.transfer.unseal import Unsealer
from restore.build import Stopwatch, build
from restore.ownership import FOLDER_MODE, find_account, hand_over
from restore.plan import bytes_of
from restore.refusals import find_programs, need_of, refuse_over_limit, remarks
from restore.replaying import PHASE, Replaying
from restore.rollforward import Means, RolledForward
from restore.room import refuse_too_small
from restore.sources import Loaded, load_chain, pinned
from restore.start import looked_at, server_config
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
    searched."""

    scratch_id: str
    server: str
    chain: tuple[str, ...]
    path: Path
    max_bytes: int | None
    memory: int
    workers: int = 0
    replay: ReplaySpec | None = None
    templates: Path | None = None
    owner: str = DATABASE_USER
    programs: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Scratch:
    """A running copy. ``phases`` that are over: ``fetched``, ``prepared``, ``restored``, ``started``; and
    ``rolled_forward`` after ``roll_forward``, which there is where the spec has a replay: call it once, with what is to
    be done at the end of each leg."""

    connection: Connection
    last: Loaded
    sandboxed: bool
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
    phases: list[Phase] = []

    def note(phase: Phase) -> None:
        phases.append(phase)
        on_phase(phase)

    watch = Stopwatch(note)
    account = find_account(spec.owner)
    remove_dead(spec.path)
    replaying = _replaying(spec, destinations if archives is None else archives, unsealer, watch, report, cancel)
    chain, said = load_chain(spec.server, spec.chain, destinations, unsealer)
    last = chain[-1]
    info = last.body.facts.server
    size = bytes_of("restored", [loaded.header.stats.bytes_source for loaded in chain])
    programs = find_programs(last.body.facts, start=True, paths=spec.programs)
    if programs.server is None:
        raise ToolMissingError("no server program was found", hint="install the database server on this host")
    if spec.max_bytes is not None:
        refuse_over_limit(chain, spec.max_bytes)
    warnings = [*said, *remarks(info), *refuse_too_small(need_of(chain), spec.path)]
    with _folder(spec) as folder:
        logs = replaying.logs(folder / "binlogs") if replaying else None
        backups = [(spec.server, backup_id) for backup_id in spec.chain]
        with pinned(destinations, spec.scratch_id, backups, clock=clock) as unpinned:
            built = build(
                chain,
                folder,
                destinations=destinations,
                unsealer=unsealer,
                tool=programs.tool,
                workers=spec.workers,
                memory_cap=spec.memory,
                watch=watch,
                report=report,
                cancel=cancel,
            )
        warnings += [*unpinned, *built.warnings]
        data, store = folder / "data", folder / "external"
        with watch.phase("restored", size):
            hand_over(data, account, folder_mode=FOLDER_MODE)
            if store.is_dir():
                hand_over(store, account, folder_mode=FOLDER_MODE)
            assert_local(data, store)
        pool = max(_LEAST_POOL, min(spec.memory // 2, _MOST_POOL))
        config = server_config(
            programs.server.path, data, folder / "run", built.options, account=account, store=store, memory=pool
        )
        if replaying is not None:
            config = replaying.config(config, last)
        with contextlib.ExitStack() as stack:
            with watch.phase("started", size):
                server = stack.enter_context(looked_at(config, info, replica=False))
            copy = Scratch(server.connection, last, server.sandboxed, phases, warnings)
            if replaying is not None and logs is not None:
                begin = replaying.beginning(logs, last, built.place)
                copy.roll_forward = lambda on_stop: replaying.roll(
                    server, info, logs, begin, folder=folder / "replay", on_stop=on_stop,
                    timed=lambda leg: watch.phase(PHASE, leg.size))
            yield copy


def _replaying(
    spec: ScratchSpec,
    destinations: Sequence[Destination],
    unsealer: Unsealer,
    watch: Stopwatch,
    report: Report,
    cancel: Event | None,
) -> Replaying | None:
    if spec.replay is None:
        return None
    return Replaying(spec.server, spec.replay, destinations, unsealer, memory=spec.memory // 4, workers=spec.workers,
                     means=Means(spec.programs, spec.templates), watch=watch, report=report, cancel=cancel)


@contextlib.contextmanager
def _folder(spec: ScratchSpec) -> Iterator[Path]:
    """A locked folder of its own. The server's user may pass through it, and list nothing."""
    folder = spec.path / f"{_PREFIX}{spec.scratch_id}"
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
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from error
    return folders.remove_dead(path, _PREFIX)

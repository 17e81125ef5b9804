"""A whole restore: fetch, prepare, roll forward, place, start, check; after a kill -9 anywhere the same call goes on.

Knows no catalog: everything is in the spec, and everything found is in the outcome.
"""

from __future__ import annotations

import contextlib
import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from backupd.engine.physical.datafiles import assert_local
from backupd.engine.server.launch import ServerConfig
from backupd.engine.sql.client import Connection
from backupd.model.binlog import ReplaySpec
from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.errors import DamagedError, RefusedError
from backupd.model.job import Progress
from backupd.model.proof import Check, Phase, Witness
from backupd.model.server_facts import Position, Tool
from backupd.model.text import format_time
from backupd.model.thaw import LOGS
from backupd.process.folders import make_passable
from backupd.process.run_context import RunContext, Stopwatch
from restore.datadir.checks import FAILED, LISTED, PASSED, SKIPPED, examine
from restore.datadir.occupancy import (
    find_account,
    find_occupants,
    not_looked_at,
    refuse_nested,
    refuse_non_empty,
    refuse_occupied,
)
from restore.datadir.selinux import look, relabel
from restore.datadir.staging import (
    STAGED,
    State,
    choose_site,
    exclusive,
    marker_time,
    passable,
    read_marker,
    read_state,
    refuse_foreign_staging,
    sync_filesystem,
    workable,
    write_marker,
    write_state,
)
from restore.datadir.start import (
    Started,
    clear,
    close_datadir,
    look_folder,
    looked_at,
    place,
    remove_dead_folders,
    run_folder,
    running,
    server_config,
    start_for_good,
    starting,
)
from restore.fetch.chain import assemble, compare_named, data_bytes, fetch_members
from restore.fetch.objects import default_workers
from restore.fetch.sources import (
    Loaded,
    Programs,
    Sources,
    find_programs,
    load_chain,
    pinned,
    read_when_thawed,
    refuse_no_room,
    remarks,
)
from restore.planning.plan import STEP_NAMES, in_order
from restore.replay.logs import Logs
from restore.replay.private_replay import Replaying, RolledForward, goal_of
from restore.replica.follow import PHASE as REPLICATED
from restore.replica.follow import Replica, follow, not_begun
from restore.replica.old_settings import replica_remarks
from restore.replica.setup import ReplicaSpec, ReplicaState, replica_config, set_up, state_of


@dataclass(frozen=True, slots=True)
class RestoreSpec:
    """Every decision about one restore, taken before it begins.

    ``target``: as it was asked for; ``chain``: backup ids, full first; ``replay``: the binary logs that are replayed
    onto it, None for the backup as it is. ``owner``: OS user of the server. ``start``: start a server on the result
    and leave it running, deaf and mute; ``replica``: keep the replication settings of the source (mode ``replica``);
    ``follow``: make the copy a replica, which with ``start`` is handed over once it has caught up.
    ``checks`` (the policy's statements, about ``moment``) and ``witness`` are for a server that is started.
    """

    restore_id: str
    server: str
    target: str
    chain: tuple[str, ...]
    moment: datetime
    datadir: Path
    owner: str
    replay: ReplaySpec | None = None
    start: bool = False
    replica: bool = False
    checks: tuple[str, ...] = ()
    witness: Witness | None = None
    follow: ReplicaSpec | None = None


@dataclass(frozen=True, slots=True)
class RestoreOutcome(Document):
    """``position``: where the copy is; ``replay``: what was replayed onto it, None without; ``started``: the server
    that was left running. ``inexact``: it may hold other rows than the source had. ``replica``: what follows a source
    now, or will. ``selinux_enforcing``: None where there is no SELinux."""

    restore_id: str = field(metadata=json_key("id"))
    server: str
    backup_id: str = field(metadata=json_key("backup"))
    target: str
    datadir: Path
    position: Position
    phases: tuple[Phase, ...]
    checks: tuple[Check, ...] = ()
    tables_compared: int = 0
    warnings: tuple[str, ...] = ()
    started: Started | None = None
    replay: RolledForward | None = field(default=None, metadata=json_key(after="position"))
    inexact: bool = field(default=False, metadata=HIDDEN)
    replica: Replica | None = None
    selinux_enforcing: bool | None = None

    @property
    @computed(after="target")
    def outcome(self) -> str:
        """``restored``, or ``inexact``: it may hold other rows than the source had."""
        return "inexact" if self.inexact else "restored"

    @property
    @computed(after="phases", digits=3)
    def seconds(self) -> float:
        """Sum of the phases."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def is_good(self) -> bool:
        """Did no check of the started server fail?"""
        return not any(check.outcome == FAILED for check in self.checks)


_HANDED_OVER = "handed_over"
"""In what is remembered of a replica: what it was when it was handed over."""
_DYING = 20.0
"""Seconds that the server of a killed attempt may take to vanish after it."""


def execute(spec: RestoreSpec, sources: Sources, context: RunContext) -> RestoreOutcome:
    """Restore, or go on with what an interrupted call for the same backup left behind.

    Raises RefusedError before anything is changed when a rule forbids it, DamagedError naming everything damaged,
    KeyUnusableError, ToolError; what was fetched is kept for the next attempt.
    """
    with contextlib.ExitStack() as held:
        return WholeRestore(spec, sources, context).run(held)


def listed(connection: Connection, last: Loaded) -> Check:
    """Does the server on the copy know every table that the backup lists?"""
    if last.body.facts.inventory is None:
        return Check(LISTED, SKIPPED, "its manifest is of an earlier version and lists none")
    try:
        besides = compare_named(connection, last)
    except DamagedError as error:
        return Check(LISTED, FAILED, f"{error.message}: {', '.join(error.damages)}")
    return Check(LISTED, PASSED, "; ".join((f"{len(last.body.facts.inventory)} tables", *besides)))


class WholeRestore:
    """One restore. What another kind does otherwise are its methods without an underscore."""

    def __init__(self, spec: RestoreSpec, sources: Sources, context: RunContext) -> None:
        self._spec, self._sources = spec, sources
        self._phase_done = context.watch.add
        self._context = replace(context, watch=Stopwatch(self._phase_ended))
        self._site = choose_site(spec.datadir)
        self._account = find_account(spec.owner)
        self._state = State(spec.restore_id, spec.server, spec.target, spec.chain, goal=goal_of(spec.replay))
        self._warnings: list[str] = []
        self._labels = look(self._site.datadir)

    def run(self, held: contextlib.ExitStack) -> RestoreOutcome:
        site = self._site
        refuse_nested(site.datadir)
        held.enter_context(exclusive(site.datadir, site.folder))
        refuse_foreign_staging(site)
        remove_dead_folders()
        if self.is_finished():
            return self._again()
        with workable(site.datadir):
            placed = self.resume()
        started = running(run_folder(self._state.restore_id)) if placed else None
        if started is None:
            self.await_free(placed=placed)
        if not placed:
            self.refuse_filled((*site.ours, *self._state.moves))
        chain = self._load()
        facts = chain[-1].body.facts
        replays = self._spec.replay is not None
        needs_server = self._spec.start or replays or self._spec.follow is not None
        programs = find_programs(facts, start=needs_server, paths=self._context.programs)
        self._warnings += remarks(facts.server)
        if not placed:
            with workable(site.datadir):
                self._warnings += refuse_no_room(chain, site)
                self._open(held)
            self._stage(chain, programs)
            self.before_place(chain, programs)
            self._context.report(Progress("place"))
            with self._context.watch.phase("restored", data_bytes(chain)):
                self._state = place(site, self._state, self._account, programs.tool.leftovers)
            write_marker(site.datadir, self._state)
        self._warnings += relabel(site.datadir, (site.datadir, site.final_store), self._labels)
        return self.complete(chain, programs, started)

    def await_free(self, *, placed: bool) -> None:
        """Raises RefusedError where somebody lives in the data directory; what a killed attempt left there may go on
        for a moment."""
        _await_free(self._site.datadir, seconds=_DYING if placed else 0.0)
        self._warnings += not_looked_at(self._site.datadir)

    def refuse_filled(self, ours: tuple[str, ...]) -> None:
        """Raises RefusedError where something besides ``ours`` is in the data directory."""
        refuse_non_empty(self._site.datadir, ours=ours)

    def before_place(self, chain: Sequence[Loaded], programs: Programs) -> None:
        """Called with a copy that is as it is to be put in place; again after a kill."""

    def rolled(self, rolled: RolledForward, chain: Sequence[Loaded], program: Tool) -> None:
        """Called with a copy that was rolled forward, before that is remembered: after a kill it is rebuilt."""

    def cleared(self) -> None:
        """The staging folder is gone."""
        site = self._site
        clear(site)
        if site.folder.is_dir():
            self._warnings.append(f"{site.folder} is still there: it contains a file that backupd did not create")

    def complete(self, chain: Sequence[Loaded], programs: Programs, started: Started | None) -> RestoreOutcome:
        """What is done with the copy in its place. ``started``: the server of an earlier attempt that still runs."""
        self.cleared()
        if self._spec.replica and self._spec.follow is None:
            self._warnings += replica_remarks(chain[-1].body.facts, self._position(chain[-1]))
        outcome = self._outcome(chain[-1])
        if self._spec.follow is not None:
            with starting():
                outcome = self._replicate(outcome, chain, programs.needed_server, self._spec.follow)
            self._finish()
            return replace(outcome, phases=in_order(self._state.phases, STEP_NAMES))
        if started is not None:
            self._warnings.append(
                "the server was already running; the check results of the interrupted attempt are lost"
            )
        if self._spec.start and programs.server is not None:
            with starting():
                outcome = replace(outcome, started=started) if started else self._start(outcome, chain, programs.server)
        self._finish()
        return replace(outcome, phases=in_order(self._state.phases, STEP_NAMES))

    def _finish(self) -> None:
        self._state = replace(self._state, stage="finished")
        write_marker(self._site.datadir, self._state)

    def is_finished(self) -> bool:
        """Is there nothing to restore any more? Raises RefusedError unless it is asked for its server again."""
        marker = read_marker(self._site.datadir)
        if marker is None or marker.stage != "finished":
            return False
        with workable(self._site.datadir):
            when = format_time(marker_time(self._site.datadir))
        was_started = any(phase.name == "started" for phase in marker.phases)
        is_this = self._spec.follow is None or bool(marker.replica)  # else it has lived as another server since
        if marker.same_work(self._state) and self._spec.start and was_started and is_this:
            self._state = marker
            self._warnings.append(
                f"restore {marker.restore_id} was finished at {when}: nothing was restored or checked again"
            )
            return True
        asked = self._state
        same = "" if marker.same_work(asked) else f"; requested: backup {asked.chain[-1]}, target {asked.target}"
        raise RefusedError(
            f"{self._site.datadir} is not empty: restore {marker.restore_id} was finished there at {when}",
            detail=f"backup {marker.chain[-1]} of {marker.server}, target {marker.target}{same}",
            hint="use it, or give an empty data directory: it was not restored as a replica"
            if marker.same_work(asked) and not is_this
            else "use it: set the server's datadir to it. With its server started by backupd, --start --to "
            f"{marker.words} finds or starts that again; to restore something else, give an empty data directory"
            if was_started
            else "use it: start the server with this datadir; to restore once more, give an empty data directory",
        )

    def _again(self) -> RestoreOutcome:
        """The server of a finished restore: the one that runs, or, where it was ended, another one as it was."""
        site, folder = self._site, run_folder(self._state.restore_id)
        started = running(folder)
        if started is None:
            _await_free(site.datadir, seconds=0.0)
        chain = self._load()
        if started is None:
            programs = find_programs(chain[-1].body.facts, start=True, paths=self._context.programs)
            assert_local(site.datadir, site.final_store)
            with starting():
                if self._spec.follow is not None:
                    outcome = self._replicate(
                        self._outcome(chain[-1]), chain, programs.needed_server, self._spec.follow
                    )
                    return replace(outcome, phases=())
                started = start_for_good(self._config(programs.needed_server, folder))
            self._warnings.append("its server had ended and was started again")
        outcome = self._outcome(chain[-1])
        if _HANDED_OVER in self._state.replica:
            outcome = replace(outcome, replica=Replica.from_json(self._state.replica[_HANDED_OVER]))
        # No phase was gone through: those of the first time must not be measured twice.
        return replace(outcome, started=started, phases=())

    def _load(self) -> tuple[Loaded, ...]:
        chain, warnings = load_chain(self._spec.server, self._spec.chain, self._sources)
        self._warnings += warnings
        return chain

    def _config(self, program: Tool, folder: Path) -> ServerConfig:
        return server_config(
            program.path,
            self._site.datadir,
            folder,
            self._state.options,
            self._context,
            account=self._account,
            store=self._site.final_store,
        )

    def resume(self) -> bool:
        """Take up what an earlier attempt left. True when it was already put in place."""
        marker = read_marker(self._site.datadir)
        if marker is not None and marker.stage == "placed" and marker.same_work(self._state):
            self._state = marker
            return True
        earlier = read_state(self._site)
        if earlier is None:
            if self._site.datadir.is_dir():
                self._state = replace(self._state, mode=stat.S_IMODE(self._site.datadir.stat().st_mode))
        elif earlier.same_work(self._state):
            self._state = earlier
        else:
            raise RefusedError(
                f"an unfinished restore of backup {earlier.chain[-1]} (target {earlier.target}) is in the way",
                detail=f"it lies in {self._site.folder}",
                hint=f"continue it with --to {earlier.words}, or remove {self._site.folder}",
            )
        return False

    def _open(self, held: contextlib.ExitStack) -> None:
        """From here on something of ours is on the disk."""
        site = self._site
        site.refuse_moved()
        if not site.folder.is_dir():
            for above in reversed([folder for folder in site.folder.parents if not folder.exists()]):
                make_passable(above)  # the server's user has to come to its data
            site.folder.mkdir(mode=0o700, exist_ok=True)
            held.enter_context(exclusive(site.folder))
            if read_state(site) is not None:
                raise RefusedError(f"another restore has just begun in {site.folder}", hint="check its result first")
        if read_state(site) is None:
            write_state(site, self._state)
        close_datadir(site)
        refuse_foreign_staging(site)  # from now on nobody else can put another folder there
        if self._state.stage == "fetching":
            site.data.mkdir(mode=0o700, exist_ok=True)
        # Locked under this name, it stays locked under the name of the data directory.
        held.enter_context(exclusive(site.data))

    def _stage(self, chain: Sequence[Loaded], programs: Programs) -> None:
        """Make the staged copy what is to be put in place, whatever an earlier attempt left of it."""
        spec, site = self._spec, self._site
        if self._state.stage not in STAGED:
            return
        logs, work = None, None
        if spec.replay is not None and self._state.stage != "replayed":
            work = Replaying(spec.server, spec.replay, self._sources, self._context)
            if self._sources.thaw.is_open(LOGS):  # the dearest failures come first
                logs = self._logs(work)
        if self._state.stage == "replaying":
            _await_free(site.folder, seconds=_DYING)
            shutil.rmtree(site.folder / "replay", ignore_errors=True)
            self._warnings.append(
                "an earlier attempt was interrupted while it replayed binary logs: its copy was rebuilt, since no log "
                "may be applied twice"
            )
            self._remember(replace(self._state, stage="fetching"))
        if self._state.stage == "fetching":
            self._build(chain, programs)
        if work is not None:
            self.roll_forward(work, logs or self._logs(work), chain, programs.needed_server)

    def _logs(self, work: Replaying) -> Logs:
        folder = self._site.folder / "binlogs"
        return read_when_thawed(self._sources.thaw, LOGS, lambda: work.logs(folder), self._context)

    def roll_forward(self, work: Replaying, logs: Logs, chain: Sequence[Loaded], program: Tool) -> None:
        """Replay the fetched ``logs`` onto the prepared copy."""
        site, state = self._site, self._state
        self._remember(replace(state, stage="replaying"))
        rolled = work.roll_staged(site, logs, chain, program, state, look_folder(state.restore_id))
        self.rolled(rolled, chain, program)
        shutil.rmtree(site.folder / "binlogs", ignore_errors=True)
        sync_filesystem(site.folder)
        self._remember(replace(self._state, stage="replayed", goal=goal_of(work.spec), replay=rolled.as_json()))

    def _remember(self, state: State) -> None:
        self._state = state
        write_state(self._site, state)

    def _build(self, chain: Sequence[Loaded], programs: Programs) -> None:
        spec, site, context = self._spec, self._site, self._context
        with passable(site), pinned(self._sources, spec.restore_id, spec.server, spec.chain, context) as said:
            self._warnings += said
            self._warnings += fetch_members(chain, site.folder, self._sources, context)
            built = assemble(chain, site.folder, programs.tool, context, final_store=site.final_store)
        self._warnings += built.warnings
        sync_filesystem(site.folder)
        self._remember(replace(self._state, stage="prepared", options=built.options, position=built.position))

    def _replicate(
        self, outcome: RestoreOutcome, chain: Sequence[Loaded], program: Tool, follow_spec: ReplicaSpec
    ) -> RestoreOutcome:
        """Make the copy a replica; to be started, look at it first, let it loose, and wait until it has caught up."""
        spec, site, context = self._spec, self._site, self._context
        info = chain[-1].body.facts.server
        state = state_of(self._state.replica)
        # On one that is finished its own service may have run since, and have applied what follows its position.
        if state is None or not (state.following or self._state.stage == "finished"):
            assert_local(site.datadir, site.final_store)
            private = self._config(program, look_folder(self._state.restore_id))
            if spec.start:
                outcome = self._examined(outcome, chain, private)
            context.report(Progress("set up replication"))
            with context.watch.phase("started", data_bytes(chain)):
                shutil.rmtree(private.directory, ignore_errors=True)
                state = set_up(private, info, follow_spec, self._position(chain[-1]))
                shutil.rmtree(private.directory, ignore_errors=True)
        if not state.following:
            state = self._let_loose(state)
        if not spec.start:
            replica = not_begun(state, info, follow_spec.delay)
            return replace(outcome, replica=replica, warnings=(*outcome.warnings, *state.notes))
        config = replica_config(
            self._config(program, run_folder(self._state.restore_id)), info, state.server_id, state.gtid_mode
        )
        context.report(Progress("replicate"))
        with context.watch.phase(REPLICATED):
            started, replica, compared = follow(config, info, follow_spec, state, context)
        self._state = replace(self._state, replica={**state.as_json(), _HANDED_OVER: replica.as_json()})
        notes = list(state.notes)
        if replica.not_compared:
            notes.append(f"the replica was not, or not wholly, {compared.name}: {replica.not_compared}")
        return replace(
            outcome,
            started=started,
            replica=replica,
            checks=(*outcome.checks, compared),
            warnings=(*outcome.warnings, *notes),
        )

    def _let_loose(self, state: ReplicaState) -> ReplicaState:
        """Remember a replica that is set up. From the moment it is let loose nobody sets its position again."""
        state = replace(state, following=self._spec.start)
        self._state = replace(self._state, replica=state.as_json())
        write_marker(self._site.datadir, self._state)
        return state

    def _start(self, outcome: RestoreOutcome, chain: Sequence[Loaded], program: Tool) -> RestoreOutcome:
        """Look at the copy in a sandbox, then start the server that stays."""
        context = self._context
        assert_local(self._site.datadir, self._site.final_store)
        config = self._config(program, look_folder(self._state.restore_id))
        outcome = self._examined(outcome, chain, config)
        context.report(Progress("start"))
        with context.watch.phase("started", data_bytes(chain)):
            shutil.rmtree(config.directory, ignore_errors=True)
            started = start_for_good(replace(config, directory=run_folder(self._state.restore_id)))
        return replace(outcome, started=started)

    def _examined(self, outcome: RestoreOutcome, chain: Sequence[Loaded], config: ServerConfig) -> RestoreOutcome:
        """With the checks of the copy, which a server in a sandbox answers."""
        spec, context = self._spec, self._context
        facts = chain[-1].body.facts
        size = data_bytes(chain)
        with contextlib.ExitStack() as stack:
            context.report(Progress("start"))
            with context.watch.phase("started", size):
                server = stack.enter_context(looked_at(config, facts.server, replica=spec.replica))
            context.report(Progress("verify"))
            with context.watch.phase("verified", size):
                checks, tally = examine(
                    server.connection,
                    replace(context, workers=context.workers or default_workers()),
                    statements=spec.checks,
                    target=spec.moment,
                    witness=spec.witness,
                    position=outcome.position,
                )
                if outcome.replay is None:  # else they were looked for before the replay
                    checks.append(listed(server.connection, chain[-1]))
        return replace(outcome, checks=tuple(checks), tables_compared=tally.equal)

    def _rolled(self) -> RolledForward | None:
        return RolledForward.from_json(self._state.replay) if self._state.replay else None

    def _position(self, last: Loaded) -> Position:
        rolled = self._rolled()
        return rolled.stop.position if rolled else last.body.facts.position

    def _outcome(self, last: Loaded) -> RestoreOutcome:
        rolled = self._rolled()
        return RestoreOutcome(
            restore_id=self._state.restore_id,
            server=self._spec.server,
            backup_id=self._spec.chain[-1],
            target=self._spec.target,
            datadir=self._site.datadir,
            position=self._position(last),
            phases=in_order(self._state.phases, STEP_NAMES),
            warnings=tuple(dict.fromkeys((*self._warnings, *(rolled.remarks if rolled else ())))),
            replay=rolled,
            selinux_enforcing=self._labels.enforcing,
        )

    def _phase_ended(self, phase: Phase) -> None:
        """Kept with the staged files, so that the next attempt can estimate the time of all of them."""
        self._state = self._state.with_phase(phase)
        if self._state.stage in STAGED:
            write_state(self._site, self._state)
        self._phase_done(next(p for p in self._state.phases if p.name == phase.name))


def _await_free(datadir: Path, *, seconds: float) -> None:
    """Raises RefusedError when somebody lives in ``datadir`` and does not go away within ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(find_occupants(datadir)):
        time.sleep(0.1)
    refuse_occupied(datadir)

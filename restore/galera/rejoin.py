"""A node of a Galera cluster out of a backup, and back in its cluster; after a kill -9 anywhere the same call goes on.

A whole restore (``restore.whole_server``) with what a node needs besides. For the files in the data directory holds
at every moment: the seqno of grastate.dat <= the position of InnoDB == the state of the data. So the copy gets its
grastate.dat in the staging folder, when everything else is done: no server could take it for a node's before.

What the state of the restore keeps (``State.node``): ``position`` and ``gtid`` of the copy, once they are proved;
``aside``: where the old data directory is; ``began``: the position that the running join began from, and ``offset``:
the byte of the node's log where it began; ``spoiled``: rows of the copy contradicted the cluster's, so it must not
join again.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backupd.engine.server.launch import ServerConfig
from backupd.engine.server.wsrep import cluster_position
from backupd.engine.sql.client import Connection
from backupd.model.document import json_key
from backupd.model.errors import BackupdError, RefusedError, ServerError
from backupd.model.job import Progress
from backupd.model.proof import Check
from backupd.model.server_facts import ClusterPosition, Tool
from backupd.process.run_context import RunContext
from restore.datadir.checks import FAILED, PASSED, SKIPPED
from restore.datadir.occupancy import foreign_entries, refuse_links, refuse_occupied, worker_account
from restore.datadir.staging import passable, read_marker, read_state, write_marker, write_state
from restore.datadir.start import Started, clear, look_folder, server_config, starting
from restore.fetch.sources import Loaded, Programs, Sources
from restore.galera import grastate
from restore.galera.cluster import look
from restore.galera.comparison import compare
from restore.galera.join import INCONSISTENT, Ending, Joined, log_size, watch
from restore.galera.node import Node, end_all, refuse_no_node, server_option, started_by
from restore.galera.old_datadir import (
    aside_name,
    move_aside,
    refuse_no_old_datadir,
    remains_of,
    remove_foreign_logs,
)
from restore.galera.position import (
    Recovered,
    gtid_in,
    move,
    prepared_position,
    recover,
    refuse_other_cluster,
    refuse_unequal,
    refuse_unlike_record,
    refuse_unproved,
)
from restore.galera.seqno import narrowed
from restore.galera.window import Told, Window
from restore.replay.logs import Logs
from restore.replay.private_replay import Replaying, RolledForward
from restore.whole_server import RestoreOutcome, RestoreSpec, WholeRestore


@dataclass(frozen=True, slots=True)
class GaleraSpec:
    """``cluster``: its name, and ``members``: its other nodes, by name; ``node``: where this one answers once it runs;
    ``option_file``: what its server is started with, None for the usual files. ``allow_sst``: start it although no
    member can send what it lacks. ``told``: called while a replay takes so long that IST is missed."""

    cluster: str
    members: Mapping[str, Connection]
    node: Connection
    option_file: Path | None = None
    allow_sst: bool = False
    told: Told = lambda _what, _hint: None


@dataclass(frozen=True, slots=True)
class RejoinOutcome(RestoreOutcome):
    """``node``: the position of the restored files in the cluster's history; ``join``: how the node came back, None
    where it was not started. ``aside``: where its old data directory is, "" without one."""

    node: ClusterPosition | None = field(default=None, metadata=json_key(later=True))
    join: Joined | None = field(default=None, metadata=json_key(later=True))
    aside: str = field(default="", metadata=json_key(later=True))


def execute(spec: RestoreSpec, galera: GaleraSpec, sources: Sources, context: RunContext) -> RejoinOutcome:
    """Restore a node and, with ``spec.start``, let it join; or go on with what an interrupted call left behind.

    Raises what ``whole_server.execute`` raises. A join that came out as anything but an IST is a failed check of the
    outcome; the files stay in place then, and the same call tries again.
    """
    with contextlib.ExitStack() as held:
        outcome = _Rejoin(spec, galera, sources, context).run(held)
    if not isinstance(outcome, RejoinOutcome):
        raise TypeError("the restore of a node gave another outcome")
    return outcome


class _Rejoin(WholeRestore):
    def __init__(self, spec: RestoreSpec, galera: GaleraSpec, sources: Sources, context: RunContext) -> None:
        super().__init__(spec, sources, context)
        self._galera = galera
        if spec.start:
            refuse_no_node(galera.option_file)
        self._cluster = look(galera.cluster, galera.members)
        self._warnings += [f"{name} was not asked: {why}" for name, why in self._cluster.silent.items()]

    # -- what a whole restore does otherwise

    def is_finished(self) -> bool:
        """A finished one whose server still runs is over. Else the data directory is that of a dead node by now."""
        marker = read_marker(self._site.datadir)
        if marker is None or marker.stage != "finished" or not marker.same_work(self._state):
            return False
        if self._spec.start and not marker.node.get("joined") and self._explicit() is not None:
            self._state = replace(marker, stage="placed")
            write_marker(self._site.datadir, self._state)
        return False

    def resume(self) -> bool:
        """Take up what an earlier attempt left. An SST may have removed the marker: the staging folder has it, too.
        What was put in place and was moved away since is restored anew."""
        asked = self._state
        if super().resume():
            return True
        if self._state.stage != "placed":
            return False
        if foreign_entries(self._site.datadir, self._site.ours):
            return True
        clear(self._site)
        self._state = asked
        return False

    def await_free(self, *, placed: bool) -> None:
        """The node itself, which an earlier attempt started, goes on joining."""
        if placed and started_by(self._state.restore_id) is not None:
            return
        if placed:  # what an SST waits with outlives the server that began it
            end_all(self._state.restore_id, self._site.datadir)
        super().await_free(placed=placed)

    def refuse_filled(self, ours: tuple[str, ...]) -> None:
        """A node's old data directory is moved aside later on; here its end is compared with the cluster's."""
        datadir = self._site.datadir
        if not foreign_entries(datadir, ours):
            return
        refuse_no_old_datadir(datadir)
        if self._site.inside:
            raise RefusedError(
                f"what is in {datadir} cannot be moved aside by one rename: the restore is built inside it",
                detail="it is a mount point, or the folder above it is another file system or not writable",
                hint="move its content into another folder yourself, and keep it until the node is back",
            )
        log_bin = ""
        with contextlib.suppress(BackupdError):
            log_bin = server_option(self._galera.option_file, "log_bin")
        remains = remains_of(datadir, log_bin)
        if remains is None:
            return
        words = remains.words(self._cluster.seqno)
        self._context.report(Progress("look", note=words))
        self._warnings.append(words)
        if remains.position is not None:
            if remains.position.uuid != self._cluster.uuid:
                raise RefusedError(
                    f"{datadir} is of a node of another cluster: it is at {remains.position}, the cluster's uuid is "
                    f"{self._cluster.uuid}",
                    hint="move it away yourself if it is not needed, and repeat the command",
                )
            self._cluster.refuse_ahead(remains.position, f"the old data directory {datadir}")

    def roll_forward(self, work: Replaying, logs: Logs, chain: Sequence[Loaded], program: Tool) -> None:
        """Replay only where no member keeps what follows the backup: an IST is several times quicker. Up to the last
        transaction of rows, see ``seqno``."""
        base = self._base()
        self._cluster = look(self._galera.cluster, self._galera.members)
        if donors := self._cluster.donors(base.seqno):
            self._warnings.append(
                f"the binary logs were not replayed: {', '.join(donors)} can send everything behind {base.seqno} by "
                "IST, which is quicker"
            )
            return
        info = chain[-1].body.facts.server
        refuse_unproved(info, tuple(self._cluster.members.values()))
        cut = narrowed(work.spec, logs, base.seqno, self._domain if self._gtid_mode else None)
        if cut is None:
            self._warnings.append(f"the archived binary logs hold no transaction behind seqno {base.seqno}")
            return
        if cut.left:
            self._warnings.append(
                f"{cut.left} statements at the end of the binary logs were not replayed: the cluster sends them by IST"
            )
        self._cluster.refuse_ahead(ClusterPosition(base.uuid, cut.seqno), "the archive")
        self._target = Recovered(
            ClusterPosition(base.uuid, cut.seqno), self._gtid(cut.spec.stop.gtids) if self._gtid_mode else ""
        )
        window = Window(
            self._target.position,
            lambda: look(self._galera.cluster, self._galera.members),
            self._context,
            self._galera.told,
        )
        watched = replace(work, spec=cut.spec, context=replace(work.context, report=window.report))
        with window.watched():
            super().roll_forward(watched, cut.logs, chain, program)
        self._warnings += window.warnings

    _target: Recovered | None = None

    def rolled(self, rolled: RolledForward, chain: Sequence[Loaded], program: Tool) -> None:  # noqa: ARG002  as WholeRestore calls it
        """Let InnoDB know how far it came."""
        if self._target is None:
            raise AssertionError("a node was rolled forward to nowhere")
        with self._private(program.path) as config, self._context.watch.phase("rolled_forward"):
            move(config, self._base(), self._target, chain[-1].body.facts.server.server_id, self._context)
        self._keep(position=str(self._target.position), gtid=self._target.gtid)

    def before_place(self, chain: Sequence[Loaded], programs: Programs) -> None:
        """Make the copy a node's, and the old data directory give way."""
        site = self._site
        if self._state.stage != "placing":
            # What an earlier attempt knew of a copy that was rebuilt since is not true of this one.
            known = self._known() if self._state.stage == "replayed" else None
            found = known or Recovered(self._base())
            if known is None and (node := chain[-1].body.facts.node) is not None:
                self._warnings += filter(None, [refuse_unlike_record(found.position, node.position)])
            with self._private(programs.needed_server.path) as config:
                grastate.remove(site.data)
                refuse_unequal(recover(config, found.gtid), found)
            refuse_links(site.data)
            remove_foreign_logs(site.data)
            self._cluster.refuse_ahead(found.position, "the backup")
            grastate.write(site.data, found.position)
            aside = self._state.node.get("aside") or (
                str(aside_name(site.datadir, self._state.restore_id))
                if foreign_entries(site.datadir, site.ours)
                else ""
            )
            self._keep(position=str(found.position), gtid=found.gtid, aside=aside)
        if aside := self._state.node.get("aside"):
            self._yielded(Path(aside))

    def _yielded(self, aside: Path) -> None:
        """The old data directory gives way. Hours may have gone by since it was looked at: its server may live again,
        and may have gone on."""
        datadir = self._site.datadir
        if foreign_entries(datadir, self._site.ours):
            self.await_free(placed=False)
            self._cluster = look(self._galera.cluster, self._galera.members)
            self.refuse_filled(self._site.ours)
        move_aside(datadir, aside)

    def complete(self, chain: Sequence[Loaded], programs: Programs, started: Started | None) -> RestoreOutcome:  # noqa: ARG002  as WholeRestore calls it
        """Start the node and watch it, or say how to."""
        found = self._known()
        if found is None:
            raise AssertionError("a node was put in place without a position")
        outcome = RejoinOutcome(
            **{name: getattr(self._outcome(chain[-1]), name) for name in RestoreOutcome.__dataclass_fields__},
            node=found.position,
            aside=str(self._state.node.get("aside", "")),
        )
        if not self._spec.start:
            self.cleared()
            self._state = replace(self._state, stage="finished")
            write_marker(self._site.datadir, self._state)
            return replace(outcome, warnings=(*outcome.warnings, *self._advice(found.position)))
        self._keep_placed()
        joined = self._join(programs)
        checks = [Check("join", PASSED if joined.ending is Ending.IST and not joined.reason else FAILED, joined.words)]
        if joined.reason and joined.ending is Ending.IST:
            checks.append(Check("compared", FAILED, joined.reason))
        if (seen := joined.compared) is not None:
            words = f"{seen.tables} tables equal to {seen.member}'s at seqno {seen.seqno}, {seen.skipped} not compared"
            nothing = seen.skipped and not seen.tables
            passed = FAILED if seen.differing else SKIPPED if nothing else PASSED
            checks.append(Check("compared", passed, "; ".join((words, *seen.differing))))
        if joined.pid:
            self.cleared()
            if joined.ending is Ending.IST:
                self._state = replace(self._state, stage="finished", node={**self._state.node, "joined": True})
                write_marker(self._site.datadir, self._state)
        warnings = tuple(dict.fromkeys((*outcome.warnings, *self._warnings)))
        return replace(outcome, join=joined, checks=tuple(checks), warnings=warnings, phases=self._state.phases)

    # -- the join

    def _join(self, programs: Programs) -> Joined:
        node = self._node(programs)
        context = self._context
        begun = time.monotonic()
        with context.watch.phase("joined"):
            context.report(Progress("join"))
            if started_by(node.restore_id) is None:
                self._begin(node, programs)
            began = cluster_position(str(self._state.node["began"]))
            if began is None:
                raise AssertionError("a join began from nowhere")
            donors = self._cluster.donors(began.seqno)
            offset = int(self._state.node.get("offset", 0))
            ending, markers, reason = watch(node, began, self._galera.node, offset, context)
            if ending in (Ending.FAILED, Ending.HUNG):
                node.end()
                reason = "\n".join(filter(None, (reason, self._settled(programs, reason))))
        joined = Joined(
            ending,
            began,
            markers.first if ending is Ending.IST else 0,
            markers.last if ending is Ending.IST else 0,
            time.monotonic() - begun,
            donors,
            started_by(node.restore_id) or 0,
            reason,
        )
        if ending in (Ending.FAILED, Ending.HUNG):
            return joined
        return self._compared(joined)

    def _begin(self, node: Node, programs: Programs) -> None:
        """Ask the members again, write grastate.dat anew, and start the server. Raises RefusedError where it would
        take an SST and may not."""
        datadir = self._site.datadir
        if self._state.node.get("spoiled"):
            raise RefusedError(
                f"what is in {datadir} contradicted the cluster in an earlier attempt: it must not join again",
                hint=f"move {datadir} away, keep it for an examination, and repeat the command: it restores anew",
            )
        refuse_occupied(datadir)  # a service may have started it as soon as it was in place
        found, known = recover(self._config(programs.needed_server, look_folder(self._state.restore_id))), self._known()
        if found is None or known is None or found.position.seqno < known.position.seqno:
            raise RefusedError(
                f"InnoDB in {datadir} is at {found or 'no position'}, and it was restored to {known}",
                hint=f"another server has worked on it: move {datadir} away and repeat the command: it restores anew",
            )
        self._cluster = look(self._galera.cluster, self._galera.members)
        refuse_other_cluster(found.position, self._cluster.uuid)
        self._cluster.refuse_ahead(found.position, "the restored node")
        if not self._cluster.donors(found.position.seqno) and not self._galera.allow_sst:
            raise RefusedError(
                f"no member of {self._galera.cluster} can send what the node lacks by IST: it is at "
                f"{found.position.seqno}, the cluster at {self._cluster.seqno}",
                detail=self._cluster.reach(),
                hint="the node was not started; --allow-sst starts it all the same, to take a full copy of a donor; "
                "--to latest replays archived binary logs first; a larger gcache.size keeps more",
            )
        refuse_occupied(datadir)
        for name in grastate.CACHES:
            (datadir / name).unlink(missing_ok=True)
        grastate.write(datadir, found.position, self._account)
        self._keep(began=str(found.position), offset=log_size(node.log))
        node.start()

    def _settled(self, programs: Programs, reason: str) -> str:
        """After a join that failed: grastate.dat, in which the server left -1, says again what InnoDB has."""
        datadir = self._site.datadir
        if INCONSISTENT in reason:
            self._keep(spoiled=True)
            grastate.remove(datadir)
            return f"its rows contradict the cluster's: move {datadir} away and repeat the command, which restores anew"
        try:
            found = recover(self._config(programs.needed_server, look_folder(self._state.restore_id)))
            known = self._known()
            if found is None or known is None or found.position.uuid != known.position.uuid:
                grastate.remove(datadir)
                return f"what it left is no node's data any more: move {datadir} away and repeat the command"
            grastate.write(datadir, found.position, self._account)
        except BackupdError as error:
            return f"what it left cannot be looked at: {error.message}"
        return f"grastate.dat was written anew for seqno {found.position.seqno}; the same command tries again"

    def _compared(self, joined: Joined) -> Joined:
        """With the first member that answers."""
        self._context.report(Progress("verify"))
        why = ""
        with self._context.watch.phase("verified"):
            for name in self._cluster.members:
                try:
                    return replace(joined, compared=compare(name, self._galera.members[name], self._galera.node))
                except ServerError as error:
                    why = f"the node could not be compared with {name}: {error.message}"
        return replace(joined, reason=joined.reason or why)

    # -- what is known

    def _base(self) -> ClusterPosition:
        """The position of the prepared backup."""
        return prepared_position(self._site.folder / "logs", self._cluster.uuid)

    def _known(self) -> Recovered | None:
        """The proved position of the copy."""
        kept = self._state.node
        position = cluster_position(str(kept.get("position", "")))
        return Recovered(position, str(kept.get("gtid", ""))) if position is not None else None

    def _explicit(self) -> ClusterPosition | None:
        """What grastate.dat in the data directory says, where it is still what the restore wrote."""
        with contextlib.suppress(RefusedError):
            state = grastate.read(self._site.datadir)
            return state.position if state is not None and state.is_explicit else None
        return None

    @property
    def _gtid_mode(self) -> bool:
        return any(state.gtid_mode for state in self._cluster.members.values())

    @property
    def _domain(self) -> int:
        """Of the cluster's GTIDs, where these are common."""
        return next(state.gtid_domain for state in self._cluster.members.values() if state.gtid_mode)

    def _gtid(self, gtids: str) -> str:
        return gtid_in(gtids, self._domain)

    def _keep(self, **node: Any) -> None:
        """Remember it durably, in the marker of what is in place and in the staging folder of what is not."""
        self._state = replace(self._state, node={**self._state.node, **node})
        if self._state.stage == "placed" and read_marker(self._site.datadir) is not None:
            write_marker(self._site.datadir, self._state)
        if self._site.folder.is_dir() and read_state(self._site) is not None:
            write_state(self._site, self._state)

    def _keep_placed(self) -> None:
        """The staging folder remembers the restore until the node is back, as an SST removes the marker. One inside the
        data directory would be taken for a schema."""
        if self._site.inside:
            self.cleared()
        else:
            for name in ("data", "logs", "binlogs", "replay"):
                shutil.rmtree(self._site.folder / name, ignore_errors=True)
            self._keep()

    @contextlib.contextmanager
    def _private(self, program: str) -> Iterator[ServerConfig]:
        """The configuration of a private server on the staged copy."""
        site = self._site
        folder = look_folder(self._state.restore_id)
        with passable(site), starting():
            yield server_config(
                program,
                site.data,
                folder,
                self._state.options,
                self._context,
                account=worker_account(),
                store=site.store,
            )
        shutil.rmtree(folder, ignore_errors=True)

    def _node(self, programs: Programs) -> Node:
        return Node(
            self._state.restore_id,
            programs.needed_server.path,
            self._galera.option_file,
            self._site.datadir,
            self._account,
        )

    def _advice(self, position: ClusterPosition) -> tuple[str, ...]:
        """How the node is started by hand, and what will come of it now, which the members are asked for once more."""
        seqno = position.seqno
        try:
            self._cluster = look(self._galera.cluster, self._galera.members)
        except RefusedError as error:
            return (f"do not start the node's service yet, it is at seqno {seqno}: {error.message}",)
        if donors := self._cluster.donors(seqno):
            senders = ", ".join(donors)
            return (f"start the node's service: it is at seqno {seqno}, and {senders} can send the rest by IST",)
        text = f"do not start the node's service yet: no member can send what follows {seqno} by IST, so it would take"
        return (f"{text} a full copy of a donor (SST)", *self._cluster.reach().splitlines())

"""From a restored backup to any later moment: the binary logs of every leg, applied to a private server on the copy one
after the other, and only what can be shown to be right is handed over.

A copy that is to be put in place is rolled forward where it was built (``Replaying.roll_staged``): a private server on
it, the binary logs, a clean shutdown. So a replay that was killed leaves nothing that a server could be started on.
Such a copy is never replayed onto again: nobody knows how far it is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from backupd.engine.binlog.scan import Conflict, Conflicts, scan
from backupd.engine.physical.datafiles import assert_local, astray, relink
from backupd.engine.relay_logs import RELAY_LOGS, Leg
from backupd.engine.replay_applier import NO_FOLDER_ELSEWHERE
from backupd.engine.server.launch import LaunchedServer, Options, ServerConfig, zone_of
from backupd.engine.sql.dialect import dialect_of
from backupd.model.binlog import ReplayLeg, ReplayMethod, ReplaySpec, Stop, Transaction, plus
from backupd.model.document import Document, json_key, made_of
from backupd.model.errors import RefusedError
from backupd.model.server_facts import Flavour, Position, ServerInfo, Tool, Version
from backupd.model.table import TableName
from backupd.process.folders import PASSABLE
from backupd.process.run_context import RunContext
from restore.datadir.checks import joined
from restore.datadir.occupancy import FOLDER_MODE, hand_over, refuse_links, worker_account
from restore.datadir.staging import WITHOUT, Site, State, passable
from restore.datadir.start import forget_replication, server_config, starting
from restore.fetch.chain import compare_named, data_bytes
from restore.fetch.sources import Loaded, Sources
from restore.replay.logs import Logs, fetch_logs, refuse_no_room_for
from restore.replay.replay import Replayed, replay

MOST_WORKERS = 16
_LEAST_WORKERS = 4
"""More than two processors have: workers wait for each other and for the disk, too."""
_NAMED = 20

_ALWAYS: Options = {
    # Lost work is done again from the backup; only a clean stop makes the copy a restored server.
    "innodb_flush_log_at_trx_commit": "0",
    "sync_relay_log": "0",
    "relay_log": RELAY_LOGS,
    "loose_slave_max_allowed_packet": "1073741824",
    "loose_replica_max_allowed_packet": "1073741824",
    "loose_slave_exec_mode": "STRICT",
    "loose_replica_exec_mode": "STRICT",
    "loose_slave_transaction_retries": "100",
    "loose_replica_transaction_retries": "100",
    # Of plugins that the copied tables name: it must not write anybody's audit.
    "loose_server_audit": "OFF",
    "loose_audit_log": "OFF",
    "loose_group_replication": "OFF",
}
_MARIADB: Options = {
    "sync_master_info": "0",
    "sync_relay_log_info": "0",
    "slave_parallel_mode": "optimistic",
    "slave_parallel_max_queued": str(16 * 1024 * 1024),
    "slave_run_triggers_for_rbr": "NO",
    "gtid_strict_mode": "OFF",
}
_MYSQL: Options = {
    # For the applier's own tables, which show what its workers do; nothing else is measured.
    "performance_schema": "ON",
    "performance_schema_instrument": "%=OFF",
    "loose_slave_parallel_type": "LOGICAL_CLOCK",
}
_MYSQL_57: Options = {
    # Its own default, FILE, allows no channel besides the unnamed one (error 3077).
    "master_info_repository": "TABLE",
    "relay_log_info_repository": "TABLE",
}
_TABLES_BY_DEFAULT = Version(8, 0)

PHASE = "rolled_forward"


@dataclass(frozen=True, slots=True)
class RolledForward(Document):
    """What was replayed. ``stop``: where the copy is; ``transactions`` that were applied; ``bytes`` of logs;
    ``excluded``, ``doubtful``: as in the spec; ``events``: scheduled events that got back the status which their DDL
    gave them; ``prepared_xa``: XA transactions that are prepared and hold locks."""

    stop: Stop = field(metadata=json_key(inline=True))
    method: ReplayMethod
    reason: str
    transactions: int
    bytes: int
    seconds: float = field(metadata=json_key(digits=3))
    excluded: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    prepared_xa: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As outcomes show it and the state of a restore keeps it; what was left out is in none."""
        document = Document.as_json(self)
        del document["next_gtid"], document["next_at"]
        return document

    @property
    def remarks(self) -> tuple[str, ...]:
        """What an operator has to know of it."""
        found = list(self.warnings)
        if self.doubtful:
            found.append(f"the binary logs do not show whether these belong before the target: {joined(self.doubtful)}")
        if self.prepared_xa:
            found.append(
                f"{len(self.prepared_xa)} XA transactions are prepared and hold locks until XA COMMIT or XA ROLLBACK: "
                f"{joined(self.prepared_xa)}"
            )
        if self.excluded:
            found.append(f"left out as requested: {joined(self.excluded)}")
        return tuple(found)


def goal_of(spec: ReplaySpec | None) -> str:
    """Where a replay goes and what it leaves out, in a few words; "" for none."""
    if spec is None:
        return ""
    without = f"{WITHOUT}{', '.join(sorted(spec.exclude))}" if spec.exclude else ""
    return f"{spec.stop.branch} {spec.stop.file}:{spec.stop.pos}{without}"


def tables_of(spec: ReplaySpec) -> tuple[TableName, ...]:
    """What a replay is narrowed down to; empty for everything."""
    return tuple(TableName.parse(table) for table in spec.tables)


def replay_workers(wanted: int) -> int:
    """How many appliers; ``wanted`` 0: as many as this machine can use."""
    return wanted or max(_LEAST_WORKERS, min(MOST_WORKERS, len(os.sched_getaffinity(0))))


def refuse_conflicts(spec: ReplaySpec, logs: Logs) -> None:
    """Raises RefusedError when a transaction that is to be left out is not there, or later ones build upon it."""
    if not spec.exclude:
        return
    conflicts = Conflicts(spec.exclude)
    found: list[Conflict] = []
    for leg, files in zip(spec.legs, logs.legs, strict=True):
        for path in files:
            with path.open("rb") as stream:
                found += conflicts.look(stream, since=leg.start.pos if path.name == leg.start.file else 0)
    if conflicts.missing:
        raise RefusedError(
            f"not between the backup and the target: {', '.join(conflicts.missing)}",
            hint="give transactions that would be replayed: `backupd binlog search SERVER` finds them; transactions in "
            "the backup itself cannot be left out; an older backup may not contain them",
        )
    if found:
        lines = [
            f"{conflict.gtid} builds on {conflict.excluded}"
            f"{' in ' + conflict.table if conflict.table else ''}: {conflict.why}"
            for conflict in found
        ]
        raise RefusedError(
            f"{', '.join(spec.exclude)} cannot be left out: {len(found)} later transactions build upon it",
            detail="\n".join([*lines[:_NAMED], *([f"and {len(lines) - _NAMED} more"] if len(lines) > _NAMED else [])]),
            hint="leave those out, too (--exclude-gtid for each), or restore to before-gtid: and correct the rest by "
            "hand",
        )


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a replay begins: ``skipped`` transactions behind the backup's recorded position; ``reason`` why, or ""."""

    position: Position
    skipped: int = 0
    reason: str = ""


def beginning(
    leg: ReplayLeg, files: Sequence[Path], recorded: Position | None, *, taken_until: datetime, mariadb: bool
) -> Beginning:
    """Where the first leg begins. As a rule where the backup's receipts say; further on when InnoDB's own ``recorded``
    (after prepare) is, because nothing may be replayed twice.

    InnoDB also remembers places of an earlier sequence of files with the same names (RESET), so its word counts only
    where a transaction ends at that very byte of these files that had committed by ``taken_until``, the end of the
    backup.
    """
    start = leg.start
    if recorded is None or not start.file or not start.file.rpartition(".")[2].isdecimal():
        return Beginning(start)
    by_name = {path.name: path for path in files}
    if recorded.file not in by_name or (_number(recorded.file), recorded.pos) <= (_number(start.file), start.pos):
        return Beginning(start)
    skipped: list[Transaction] = []
    for path in files:
        if _number(start.file) <= _number(path.name) <= _number(recorded.file):
            since = start.pos if path.name == start.file else 0
            until = recorded.pos if path.name == recorded.file else None
            skipped += _transactions(path, since, until)
    last = skipped[-1] if skipped else None
    if last is None or last.end != recorded.pos or last.at > taken_until:
        return Beginning(start)
    gtid = start.gtid
    for transaction in skipped:
        if transaction.gtid:
            gtid = plus(gtid, transaction.gtid, mariadb=mariadb)
    return Beginning(
        Position(recorded.file, recorded.pos, gtid),
        len(skipped),
        f"the copy is at {recorded.file}:{recorded.pos} by InnoDB's own record, {len(skipped)} transactions after the "
        f"backup's position {start.file}:{start.pos}: replayed from there, so that nothing is applied twice",
    )


def _transactions(path: Path, since: int, until: int | None) -> list[Transaction]:
    found: list[Transaction] = []
    with path.open("rb") as stream:
        scan(stream, stop=until, on_transaction=lambda one: found.append(one) if one.start >= since else None)
    return found


def _number(file: str) -> int:
    return int(file.rpartition(".")[2])


def _replay_options(info: ServerInfo, workers: int) -> Options:
    """Options of a copy that logs can be replayed onto, in parallel by ``workers`` (0: as this machine can)."""
    number = str(replay_workers(workers))
    if info.flavour is Flavour.MARIADB:
        return {**_ALWAYS, **_MARIADB, "slave_parallel_threads": number}
    ordered = "ON" if info.version >= Version(8, 0, 19) else "OFF"  # before that it needed a binary log
    return {
        **_ALWAYS,
        **_MYSQL,
        **dialect_of(info.flavour, info.version).replay_options,
        **({} if info.version >= _TABLES_BY_DEFAULT else _MYSQL_57),
        "loose_slave_parallel_workers": number,
        "loose_replica_parallel_workers": number,
        "loose_slave_preserve_commit_order": ordered,
        "loose_replica_preserve_commit_order": ordered,
    }


def replay_config(
    config: ServerConfig, info: ServerInfo, server_ids: Sequence[int], workers: int, *, since: datetime, until: datetime
) -> ServerConfig:
    """``config`` changed so that logs can be replayed: a server id that occurs in no event, its accounts known (GRANT
    and CREATE EVENT must work), one of ours among them until the server is stopped, and the time zone that the source
    had when it wrote them, from ``since`` to ``until``."""
    numbers = iter(lambda: secrets.randbelow(2**31) + 2**30, 0)
    return replace(
        config,
        skip_grants=False,
        own_account=True,
        server_id=next(number for number in numbers if number not in server_ids),
        options={**config.options, **_replay_options(info, workers)},
        zone=zone_of(info.variables, since, until),
    )


@dataclass(frozen=True, slots=True)
class Replaying:
    """One replay onto a private copy: the binary logs of ``server`` that ``spec`` names, out of the archives of
    ``sources``."""

    server: str
    spec: ReplaySpec
    sources: Sources
    context: RunContext

    def logs(self, folder: Path) -> Logs:
        """Bring the logs to ``folder`` and look whether everything can be replayed as it was asked for: before the
        backup itself is fetched. Raises what ``fetch_logs`` does, and RefusedError."""
        refuse_no_room_for(self.spec, folder)
        with self.context.watch.phase(PHASE):
            logs = fetch_logs(self.server, self.spec, self.sources, folder, self.context)
            refuse_conflicts(self.spec, logs)
        return logs

    def beginning(self, logs: Logs, last: Loaded, recorded: Position | None) -> Beginning:
        """Where the replay onto a copy of ``last`` begins; ``recorded``: InnoDB's own, after prepare, which says
        nothing of the log of another member."""
        member = last.body.facts.member
        return beginning(
            self.spec.legs[0],
            logs.legs[0],
            recorded if member is None or member.log is None else None,
            taken_until=last.header.finished_at,
            mariadb=last.body.facts.server.flavour is Flavour.MARIADB,
        )

    def roll(
        self,
        server: LaunchedServer,
        info: ServerInfo,
        logs: Logs,
        begin: Beginning,
        folder: Path,
        *,
        timed: bool = True,
        on_stop: Callable[[Stop], None] = lambda _stop: None,
    ) -> RolledForward:
        """Apply every leg to ``server``, which was started with ``replay_config``; ``folder``, for what the replay
        itself needs, is made and removed. ``timed``: each leg is a phase; ``on_stop`` is called after it.

        Raises RefusedError for what cannot be replayed exactly (also when the logs made files in folders elsewhere),
        ToolError or ServerError when it went wrong; the copy is not to be used then.
        """
        spec = self.spec
        done: list[Replayed] = []
        folder.mkdir()
        folder.chmod(PASSABLE)
        for number, (leg, files) in enumerate(zip(spec.legs, logs.legs, strict=True), start=1):
            here = begin if number == 1 else Beginning(leg.start)
            with self.context.watch.phase(PHASE, leg.size) if timed else contextlib.nullcontext():
                done.append(self._leg(server, info, leg, files, here, folder / f"{number}"))
            on_stop(leg.stop)
        # Some folders the sandbox lets it make (/tmp, or everything where it is not entered as root), and forgets.
        if made := astray(server.config.datadir, server.config.writable):
            raise RefusedError(
                "the binary logs create tables in folders that the copy does not have",
                detail="\n".join(made),
                hint=NO_FOLDER_ELSEWHERE,
            )
        shutil.rmtree(folder, ignore_errors=True)
        return made_of(
            RolledForward,
            spec,
            transactions=sum(one.transactions for one in done),
            bytes=sum(one.bytes for one in done),
            seconds=sum(one.seconds for one in done),
            excluded=spec.exclude,
            events=tuple(dict.fromkeys(event for one in done for event in one.events)),
            prepared_xa=done[-1].prepared_xa if done else (),
            warnings=(
                *logs.warnings,
                *([begin.reason] if begin.reason else []),
                *dict.fromkeys(warning for one in done for warning in one.warnings),
            ),
        )

    def _leg(
        self,
        server: LaunchedServer,
        info: ServerInfo,
        leg: ReplayLeg,
        files: Sequence[Path],
        begin: Beginning,
        folder: Path,
    ) -> Replayed:
        first = _number(begin.position.file) if begin.position.file else 0
        needed = tuple(path for path in files if _number(path.name) >= first)
        if not needed:
            return Replayed(gtids=leg.stop.gtids, transactions=0, seconds=0.0, bytes=0)
        return replay(
            server,
            Leg(
                info,
                needed,
                begin.position,
                leg.stop,
                self.spec.method,
                folder,
                self.context,
                server_ids=self.spec.server_ids,
                transactions=None if leg.transactions is None else leg.transactions - begin.skipped,
                exclude=self.spec.exclude,
                tables=tables_of(self.spec),
            ),
        )

    def config(self, config: ServerConfig, info: ServerInfo, taken: datetime) -> ServerConfig:
        """``config`` of a server that logs are replayed onto. ``taken``: the end of the backup that it is a copy of.

        What they create with a DATA DIRECTORY is in no folder that this server keeps: the replay stops there or, where
        the sandbox has such a folder of its own, is refused at its end (``roll``).
        (With NO_DIR_IN_CREATE it would stop already where a table that lay elsewhere is altered: error 1618.)
        """
        return replay_config(
            config,
            info,
            self.spec.server_ids,
            replay_workers(self.context.workers),
            since=taken,
            until=max(taken, self.spec.stop.at or taken),
        )

    def roll_staged(
        self, site: Site, logs: Logs, chain: Sequence[Loaded], program: Tool, state: State, folder: Path
    ) -> RolledForward:
        """Roll the prepared copy of ``chain`` in ``site`` forward and shut its server down cleanly. ``state``: what the
        prepare left to know of it; ``folder``: for the server's socket and log. Raises as ``roll`` does."""
        last, account = chain[-1], worker_account()
        info = last.body.facts.server
        relink(site.data, store=site.final_store, final=site.store)
        hand_over(site.data, account, folder_mode=FOLDER_MODE)
        if site.store.is_dir():
            hand_over(site.store, account, folder_mode=FOLDER_MODE)
        assert_local(site.data, site.store)
        begin = self.beginning(logs, last, state.position)
        config = self.config(
            server_config(
                program.path, site.data, folder, state.options, self.context, account=account, store=site.store
            ),
            info,
            last.header.finished_at,
        )
        watch = self.context.watch
        with passable(site), starting(), contextlib.ExitStack() as stack:
            with watch.phase("started", data_bytes(chain)):
                server = stack.enter_context(LaunchedServer(config, cancel=self.context.cancel))
                forget_replication(server.connection, info)
                named = compare_named(server.connection, last)
            with watch.phase(PHASE, self.spec.size):
                rolled = self.roll(server, info, logs, begin, site.folder / "replay", timed=False)
                stack.close()
        refuse_links(site.data)
        relink(site.data, store=site.store, final=site.final_store)
        shutil.rmtree(folder, ignore_errors=True)
        return replace(rolled, warnings=(*rolled.warnings, *named))

"""A staged copy rolled forward: a private server on it, the binary logs, a clean shutdown.

It happens where the copy was built and before it is put in place, so that a replay that was killed leaves nothing that
a server could be started on. Such a copy is never replayed onto again: nobody knows how far it is.

``replay_options`` and ``replay_config``: how the server of a restored copy is set up so that logs can be replayed onto
it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from threading import Event

from backupd.engine.instance.launch import LaunchedServer, Options, ServerConfig, zone_of
from backupd.engine.physical.external_tablespaces import assert_local, astray, relink
from backupd.engine.replay.applier import NO_FOLDER_ELSEWHERE
from backupd.model.binlog import ReplayLeg, ReplaySpec, Stop
from backupd.model.errors import RefusedError, ToolMissingError
from backupd.model.job import Report
from backupd.model.server_facts import Flavour, Position, ServerInfo, Version
from backupd.transfer.seal.seal import Unsealer
from restore.datadir.occupancy import FOLDER_MODE, Account, hand_over, refuse_links
from restore.datadir.staging import Site, passable
from restore.datadir.start import forget_replication, server_config, starting
from restore.fetch.chain import Stopwatch, compare_named
from restore.fetch.refusals import Programs
from restore.fetch.sources import Loaded
from restore.replay.logs import Logs, fetch_logs, refuse_no_room_for
from restore.replay.roll_forward import (
    Beginning,
    Means,
    RolledForward,
    beginning,
    refuse_conflicts,
    replay_workers,
    roll_forward,
)
from storage.contract.destination import Destination

_MOST_WORKERS = 8
_RELAY_SPACE = 1024 * 1024 * 1024

_ALWAYS: Options = {
    # Lost work is done again from the backup; only a clean stop makes the copy a restored server.
    "innodb_flush_log_at_trx_commit": "0",
    "sync_relay_log": "0",
    "relay_log": "backupd-relay",
    "relay_log_space_limit": str(_RELAY_SPACE),
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
    "loose_persisted_globals_load": "OFF",
    # Takes events with GTIDs and without, and turns no statement away that the source executed.
    "gtid_mode": "OFF_PERMISSIVE",
    "enforce_gtid_consistency": "OFF",
    # For the applier's own tables, which tell what its workers do; nothing else is measured.
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


def replay_options(info: ServerInfo, server_ids: Sequence[int], workers: int) -> Options:
    """Options of a copy that logs with events of ``server_ids`` can be replayed onto, in parallel by ``workers`` (0: as
    this machine can). ``replay_config`` sets them, and what is no option of the server."""
    cores = os.cpu_count() or 1
    number = str(workers or min(_MOST_WORKERS, cores))
    if info.flavour is Flavour.MARIADB:
        # It runs transactions side by side that may turn out to be in each other's way: with few cores that costs more
        # than it gains (2 cores, 30,000 transactions: 3.6 s with one worker, 5.0 with two, 5.9 with four).
        number = str(workers or min(_MOST_WORKERS, max(1, cores // 2)))
        return {**_ALWAYS, **_MARIADB, "slave_parallel_threads": number, "server_id": str(_own_id(server_ids))}
    ordered = "ON" if info.version >= Version(8, 0, 19) else "OFF"  # before that it needed a binary log
    old = {} if info.version >= _TABLES_BY_DEFAULT else _MYSQL_57
    return {
        **_ALWAYS,
        **_MYSQL,
        **old,
        "server_id": str(_own_id(server_ids)),
        "loose_slave_parallel_workers": number,
        "loose_replica_parallel_workers": number,
        "loose_slave_preserve_commit_order": ordered,
        "loose_replica_preserve_commit_order": ordered,
    }


def replay_config(
    config: ServerConfig, info: ServerInfo, server_ids: Sequence[int], workers: int, *, since: datetime, until: datetime
) -> ServerConfig:
    """``config`` changed so that logs can be replayed: ``replay_options``, a server id that occurs in no event, its
    accounts known (GRANT and CREATE EVENT must work), one of ours among them until the server is stopped, and the time
    zone that the source had when it wrote them, from ``since`` to ``until``."""
    options = dict(replay_options(info, server_ids, workers))
    return replace(
        config,
        skip_grants=False,
        own_account=True,
        server_id=int(options.pop("server_id") or 0),
        options={**config.options, **options},
        zone=zone_of(info.variables, since, until),
    )


def _own_id(server_ids: Sequence[int]) -> int:
    taken = set(server_ids)
    return next(number for number in iter(lambda: secrets.randbelow(2**31) + 2**30, 0) if number not in taken)


@dataclass(frozen=True, slots=True)
class Replaying:
    """What a replay is done with: the spec and the means. ``memory``: most bytes for the copy's server."""

    server: str
    spec: ReplaySpec
    destinations: Sequence[Destination]
    unsealer: Unsealer
    memory: int
    workers: int
    means: Means
    watch: Stopwatch
    report: Report
    cancel: Event | None

    def logs(self, folder: Path) -> Logs:
        """Bring the logs to ``folder`` and look whether everything can be replayed as it was asked for: before the
        backup itself is fetched. Raises what ``fetch_logs`` does, and RefusedError."""
        refuse_no_room_for(self.spec, folder)
        with self.watch.phase(PHASE):
            logs = fetch_logs(
                self.server, self.spec, self.destinations, self.unsealer, folder, report=self.report, cancel=self.cancel
            )
            refuse_conflicts(self.spec, logs)
        return logs

    def beginning(self, logs: Logs, last: Loaded, place: Position | None) -> Beginning:
        """Where the replay onto a copy of ``last`` begins; ``place``: InnoDB's own, after prepare."""
        return beginning(
            self.spec.legs[0],
            logs.legs[0],
            place,
            taken_until=last.header.finished_at,
            mariadb=last.body.facts.server.flavour is Flavour.MARIADB,
        )

    def roll(
        self,
        server: LaunchedServer,
        info: ServerInfo,
        logs: Logs,
        begin: Beginning,
        *,
        folder: Path,
        on_stop: Callable[[Stop], None] = lambda _stop: None,
        timed: Callable[[ReplayLeg], AbstractContextManager[None]] = lambda _leg: contextlib.nullcontext(),
    ) -> RolledForward:
        """Apply the logs to ``server``; ``folder`` is made and removed. ``timed`` is entered around each
        leg, ``on_stop`` called after it. Raises RefusedError when the logs made files in folders elsewhere."""
        rolled = roll_forward(
            server,
            info,
            self.spec,
            logs,
            begin,
            folder=folder,
            report=self.report,
            cancel=self.cancel,
            means=self.means,
            timed=timed,
            on_stop=on_stop,
        )
        # Some folders the sandbox lets it make (/tmp, or everything where it is not entered as root), and forgets.
        if made := astray(server.config.datadir, server.config.writable):
            raise RefusedError(
                "the logs make tables in folders elsewhere, which a copy does not have",
                detail="\n".join(made),
                hint=NO_FOLDER_ELSEWHERE,
            )
        shutil.rmtree(folder, ignore_errors=True)
        return replace(rolled, warnings=(*logs.warnings, *rolled.warnings))

    def config(self, config: ServerConfig, last: Loaded) -> ServerConfig:
        """``config`` of a server that logs are replayed onto.

        What they create with a DATA DIRECTORY is in no folder that this server keeps: the replay stops there or, where
        the sandbox has such a folder of its own, is refused at its end (``roll``).
        (With NO_DIR_IN_CREATE it would stop already where a table that lay elsewhere is altered: error 1618.)
        """
        taken = last.header.finished_at
        return replay_config(
            config,
            last.body.facts.server,
            self.spec.server_ids,
            replay_workers(self.workers),
            since=taken,
            until=max(taken, self.spec.stop.at or taken),
        )


def roll_staged(
    work: Replaying,
    site: Site,
    logs: Logs,
    *,
    chain: Sequence[Loaded],
    programs: Programs,
    account: Account,
    options: Options,
    place: Position | None,
    run_folder: Path,
    size: int,
    key_files: Sequence[Path],
) -> RolledForward:
    """Roll the prepared copy in ``site`` forward and shut its server down cleanly. ``place``: InnoDB's own; ``size``:
    bytes of the copy; ``run_folder``: for the server's socket and log; ``key_files``: of the configuration. Raises as
    ``roll_forward`` does."""
    if programs.server is None:
        raise ToolMissingError("no server program was found", hint="install the database server on this host")
    last = chain[-1]
    info = last.body.facts.server
    relink(site.data, store=site.final_store, final=site.store)
    hand_over(site.data, account, folder_mode=FOLDER_MODE)
    if site.store.is_dir():
        hand_over(site.store, account, folder_mode=FOLDER_MODE)
    assert_local(site.data, site.store)
    begin = work.beginning(logs, last, place)
    config = work.config(
        server_config(
            programs.server.path,
            site.data,
            run_folder,
            options,
            account=account,
            store=site.store,
            memory=work.memory,
            key_files=key_files,
        ),
        last,
    )
    with passable(site), starting(), contextlib.ExitStack() as stack:
        with work.watch.phase("started", size):
            server = stack.enter_context(LaunchedServer(config, cancel=work.cancel))
            forget_replication(server.connection, info)
            named = compare_named(server.connection, last)
        with work.watch.phase(PHASE, work.spec.size):
            rolled = work.roll(server, info, logs, begin, folder=site.folder / "replay")
            stack.close()
    refuse_links(site.data)
    relink(site.data, store=site.store, final=site.final_store)
    shutil.rmtree(run_folder, ignore_errors=True)
    return replace(rolled, warnings=(*rolled.warnings, *named))

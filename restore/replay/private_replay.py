"""A staged copy rolled forward: a private server on it, the binary logs, a clean shutdown.

It happens where the copy was built and before it is put in place, so that a replay that was killed leaves nothing that
a server could be started on. Such a copy is never replayed onto again: nobody knows how far it is.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

from backupd.engine.instance.launch import LaunchedServer, Options, ServerConfig
from backupd.engine.physical.external_tablespaces import assert_local, astray, relink
from backupd.engine.replay.applier import NO_FOLDER_ELSEWHERE
from backupd.model.binlog import ReplayLeg, ReplaySpec, Stop
from backupd.model.errors import RefusedError, ToolMissingError
from backupd.model.job import Report
from backupd.model.server_facts import Flavour, Position, ServerInfo
from backupd.transfer.seal.seal import Unsealer
from restore.datadir.ownership import FOLDER_MODE, Account, hand_over, refuse_links
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
from restore.replay.server_options import replay_config
from storage.contract.destination import Destination

PHASE = "rolled_forward"


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

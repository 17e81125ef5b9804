"""Replay by one mysqlbinlog with all files, piped into one client: slower by far, and the way out when a server's
applier fails.

One process for all files, because temporary tables and settings of a session may reach from one file into the next.
It is the same session for all transactions, which is why what needs several is refused.

The logs may be forged, and the client sends whatever file a statement in them names (LOAD DATA LOCAL). So both programs
are the user that the copy's server is, and where anything can be confined they see their own files only, no network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from backupd.engine.binlog_program import binlog_program
from backupd.engine.relay_logs import Leg, copy_log, lay_out
from backupd.engine.replay_applier import (
    exclude_mysql,
    executed_by,
    hint_of_statement,
    mysql_executed,
    set_mariadb_position,
)
from backupd.engine.server.launch import LaunchedServer, give
from backupd.engine.server.sandbox import confine, is_available
from backupd.engine.sql.client import Session
from backupd.engine.sql.dialect import dialect_of, pipes_everything
from backupd.engine.toolset import find_tool
from backupd.model.errors import RefusedError, ServerError, ToolError
from backupd.process.command import Command
from backupd.process.folders import write_anew
from backupd.process.pipeline import Pipeline
from backupd.process.runtime import render_options

_PACKET = "1G"

_NEITHER = (
    "neither the pipe nor the applier can replay this exactly: restore to right before the GTID that occurs twice "
    "(--to with its file and position), or from a newer backup"
)


def refuse_inexact(leg: Leg) -> None:
    """Raises RefusedError for what the pipe cannot do exactly."""
    found, start, first = leg.found, leg.start, leg.files[0].name
    reason = ""
    if found.marks:
        reason = "the source encrypts its logs, and mariadb-binlog takes these decrypted copies for encrypted ones"
    elif not pipes_everything(leg.info.flavour):
        if leg.exclude:
            reason = "mariadb-binlog cannot leave out single transactions"
        elif found.xa:
            reason = "the logs hold XA transactions, and one session cannot hold a prepared one and go on"
        elif start.file != first and found.twice:
            reason = f"the logs hold {', '.join(found.twice[:5])} twice, and the start is known by its GTID only"
        elif start.file != first and found.start.last != found.first.last:
            reason = f"the start {found.start} is known by its GTID only, and is not the beginning of {first}"
    elif start.file != first and found.anonymous:
        reason = "transactions without GTIDs can be replayed only from a position in the first file"
    if reason:
        raise RefusedError(
            f"this replay cannot go through the pipe: {reason}",
            hint=_NEITHER if found.twice else "replay by the server's applier (--replay-with applier)",
        )


def replay_through_pipe(copy: LaunchedServer, session: Session, leg: Leg) -> tuple[str, int]:
    """Execute the files of ``leg`` from its start on as statements of one session on ``copy``, without the transactions
    that it excludes. Gives what the copy has executed (GTIDs), and how many transactions were applied.

    ``session``: an open one to the copy. The ``folder`` of the leg takes the room of the logs. Triggers do not fire for
    row events, nor do scheduled events run: the copy's own are off. Raises RefusedError for what cannot be done exactly
    so, ToolError when either program fails (the client stops at the first error), CancelledError.
    """
    refuse_inexact(leg)
    found = leg.found
    if leg.mariadb:
        _execute(copy, leg)
        # The client's session left no trace of its position; that every statement was executed, both exit codes say.
        set_mariadb_position(session, found, found.end)
        return executed_by(session, leg.info), found.transactions
    before = mysql_executed(session)
    exclude_mysql(session, leg.exclude)
    _execute(copy, leg)
    executed = mysql_executed(session)
    applied = executed.minus(before).count if found.is_by_gtid else found.transactions
    return str(executed), applied - len(leg.exclude)


def _execute(copy: LaunchedServer, leg: Leg) -> None:
    reader = binlog_program(leg.info.flavour, paths=leg.context.programs).path
    client = find_tool(
        ("mariadb", "mysql") if leg.mariadb else ("mysql",),
        paths=leg.context.programs,
        hint="install the client programs of the server on this host",
    ).path
    start = leg.start
    at = start.pos - leg.closed
    beginning = [f"--start-position={at}"] if start.file == leg.files[0].name and start.pos else []
    dialect = dialect_of(leg.info.flavour, leg.info.version)
    reading = [dialect.replay_reader] if dialect.replay_reader else []
    session = [f"--init-command={dialect.replay_session}"] if dialect.replay_session else []
    with _laid_out(leg.folder, copy, leg.files) as (options, logs, loads), _taking_files(copy):
        # The reader writes what LOAD DATA read into files, which it never removes, and has the client send them.
        checked = (reader, "--no-defaults", "--verify-binlog-checksum", f"--local-load={loads}", *reading, *beginning)
        sent = (client, f"--defaults-file={options}", "--binary-mode", f"--max-allowed-packet={_PACKET}", *session)
        commands = [
            _confined(copy, (*checked, *map(str, logs)), writable=[loads], readable=logs, temporary=loads),
            _confined(copy, (*sent, "--local-infile=1"), readable=[options, loads, copy.config.socket]),
        ]
        try:
            with Pipeline(commands, cancel=leg.context.cancel) as pipeline:
                pipeline.drain()
        except ToolError as error:
            error.hint = error.hint or hint_of_statement(error.detail)
            raise


@contextlib.contextmanager
def _laid_out(folder: Path, copy: LaunchedServer, files: Sequence[Path]) -> Iterator[tuple[Path, list[Path], Path]]:
    """The client's option file, copies of the logs, and a folder for what LOAD DATA read: all of the server's user."""
    user = copy.config.user
    try:
        lay_out(folder, user)
        loads = folder / "loads"
        loads.mkdir(mode=0o700)
        logs = [folder / path.name for path in files]
        for path, log in zip(files, logs, strict=True):
            copy_log(path, log)
        options = folder / "options.cnf"
        write_anew(options, render_options(copy.connection.option_groups()).encode())
        for made, mode in ((loads, 0o700), (options, 0o600), *((log, 0o600) for log in logs)):
            give(made, user, mode)
        yield options, logs, loads
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _confined(
    copy: LaunchedServer,
    argv: tuple[str, ...],
    *,
    writable: Sequence[Path] = (),
    readable: Sequence[Path] = (),
    temporary: Path | None = None,
) -> Command:
    user = copy.config.user if os.geteuid() == 0 else None
    plain = Command(argv, user=user, env={"TMPDIR": str(temporary)} if temporary else {})
    return confine(plain, writable=writable, readable=readable) if is_available(user) else plain


@contextlib.contextmanager
def _taking_files(copy: LaunchedServer) -> Iterator[None]:
    """While the block runs, clients may send the server files; otherwise it takes none."""
    with copy.connection.connect() as session:
        session.execute("SET GLOBAL local_infile = ON")
        try:
            yield
        finally:
            with contextlib.suppress(ServerError):  # one that is gone takes nothing; what ended the replay is reported
                session.execute("SET GLOBAL local_infile = OFF")

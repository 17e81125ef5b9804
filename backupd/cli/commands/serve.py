"""``backupd serve``, and the processes that the service starts: for each job, for each server's binary log, and for the
REST interface and the web page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from backupd.cli.commands.jobs import JobId
from backupd.cli.session import NewCatalog, Run, Server, flag
from backupd.model.errors import RefusedError
from backupd.model.event import Severity

Settings = Annotated[
    Path | None,
    typer.Option("--settings", metavar="FILE", help="File with the active settings, written by the service."),
]


def serve(
    run: Run,
    standby: Annotated[
        bool,
        flag("--standby", "If another backupd service uses this catalog, wait and take over when it exits."),
    ] = False,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", min=0, help="Time that running jobs have to finish after a stop."),
    ] = 30.0,
    new_catalog: NewCatalog = False,
) -> None:
    """Run the backupd service: schedule backups, test restores and retention as the policies define.

    SIGHUP reloads the configuration. SIGTERM and SIGINT stop the service: no new job starts, and running jobs that do
    not finish within the grace time are stopped. A second signal stops them immediately. After SIGTERM the streams of
    binary logs go on, and the next service adopts them; SIGINT ends them, too.
    """
    from backupd.app.context.logging_setup import logging_to
    from backupd.app.service import daemon

    with logging_to(sys.stderr):
        code = daemon.serve(run.config, daemon.Manner(standby=standby, grace=grace, new_catalog=new_catalog))
    if code:
        raise typer.Exit(code)


def reload(run: Run) -> None:
    """Let the running service of this host read its configuration and policies, and show its answer. Exit status 1 if
    it keeps the previous ones."""
    answer = run.service.installation.reload()
    if answer.severity is not Severity.INFO:
        raise RefusedError(answer.message, detail=answer.detail, hint=answer.hint)
    run.screen.done = answer.message
    run.screen.document({"reloaded": True, "message": answer.message})
    run.screen.line(answer.message, style="green")


def run_stream(
    run: Run,
    server: Server,
    once: Annotated[
        bool,
        flag(
            "--once", "Exit when the binary log that exists at the start of the command is stored at every destination."
        ),
    ] = False,
    settings: Settings = None,
    beside: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="SERVER", hidden=True, help="Another server of the same process."),
    ] = None,
) -> None:
    """Stream a server's binary log to its destinations, in the foreground. `backupd serve` starts this command
    automatically."""
    from backupd.app.binlogs import shared_streams, stream_process
    from backupd.app.context.logging_setup import logging_to

    with logging_to(sys.stderr):
        if beside and settings is not None:
            shared_streams.run_streams(settings, [server, *beside])
        else:
            stream_process.run_stream(run.config, server, held=settings, once=once)


def run_job(
    run: Run,
    job_id: JobId,
    token: Annotated[int, typer.Option("--token", help="Token of the worker's claim.")],
    settings: Settings = None,
) -> None:
    """Run a job that a worker has claimed. The worker starts this command automatically."""
    run.held = settings
    run.service.jobs.run(job_id, token)


def run_api(
    run: Run,
    descriptor: Annotated[int, typer.Option("--fd", metavar="N", min=0, help="The listening socket.")],
    ready: Annotated[
        int | None,
        typer.Option(
            "--ready", metavar="N", min=0, help="File descriptor to notify when the process accepts requests."
        ),
    ] = None,
    settings: Settings = None,
) -> None:
    """Serve the REST interface and the web page on an inherited socket. `backupd serve` starts this command
    automatically."""
    from api import server
    from backupd.app.context.logging_setup import logging_to

    with logging_to(sys.stderr):
        server.run(run.config, descriptor, held=settings, ready=ready)

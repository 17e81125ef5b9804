"""`backupd serve`, and `backupd run-stream`, which the service starts for each server whose binary log it streams."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from backupd.cli.session import Config, NewCatalog, Server, config_path, guarded


def serve(
    context: typer.Context,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="If another backupd service uses this catalog, wait and take over when it exits."
        ),
    ] = False,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", min=0, help="How long running jobs may go on after a stop."),
    ] = 30.0,
    new_catalog: NewCatalog = False,
    config: Config = None,
) -> None:
    """Run the backupd service: schedule backups, test restores and retention as the policies define.

    SIGHUP reads the configuration anew. SIGTERM and SIGINT stop: nothing new starts, running jobs may end within the
    grace time, then they are stopped; a second one stops them at once.
    """
    with guarded(context, False):
        from backupd.app.context.logging_setup import logging_to
        from backupd.app.service.daemon import Manner
        from backupd.app.service.daemon import serve as run

        with logging_to(sys.stderr):
            code = run(config_path(context, config), Manner(standby=standby, grace=grace, new_catalog=new_catalog))
    if code:
        raise typer.Exit(code)


def run_stream(
    context: typer.Context,
    server: Server,
    once: Annotated[
        bool, typer.Option("--once", help="End when everything that the server has by now is stored everywhere.")
    ] = False,
    settings: Annotated[
        Path | None,
        typer.Option("--settings", metavar="FILE", help="File with the active settings, written by the service."),
    ] = None,
    config: Config = None,
) -> None:
    """Stream a server's binary log to its destinations, in the foreground. `backupd serve` starts this command
    automatically."""
    with guarded(context, False):
        from backupd.app.binlogs.stream_process import run_stream as run
        from backupd.app.context.logging_setup import logging_to

        with logging_to(sys.stderr):
            run(config_path(context, config), server, held=settings, once=once)

"""`backupd run-stream`: streams of binary logs, one process for each server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from backupd.cli.options import Config, Server, config_path
from backupd.cli.session import guarded


def run_stream(
    context: typer.Context,
    server: Server,
    once: Annotated[
        bool, typer.Option("--once", help="End when everything that the server has by now is stored everywhere.")
    ] = False,
    settings: Annotated[
        Path | None, typer.Option("--settings", metavar="FILE", help="What the service holds in force.")
    ] = None,
    config: Config = None,
) -> None:
    """Stream a server's binary log to its destinations, in the foreground. The service does this by itself."""
    with guarded(context, False):
        from backupd.app.binlogs.stream_process import run_stream as run
        from backupd.app.context.logging_setup import logging_to

        with logging_to(sys.stderr):
            run(config_path(context, config), server, held=settings, once=once)

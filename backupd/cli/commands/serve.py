"""`backupd serve`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from backupd.cli.options import Config, NewCatalog, config_path
from backupd.cli.session import guarded


def serve(
    context: typer.Context,
    standby: Annotated[
        bool, typer.Option("--standby", help="When another service is at work: wait, and take over when it is gone.")
    ] = False,
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="SECONDS", min=0, help="How long running jobs may go on after a stop."),
    ] = 30.0,
    new_catalog: NewCatalog = False,
    config: Config = None,
) -> None:
    """Follow the policies: start backups, test restores and retention by themselves, until stopped.

    SIGHUP reads the configuration anew. SIGTERM and SIGINT stop: nothing new starts, running jobs may end within the
    grace time, then they are stopped; a second one stops them at once.
    """
    with guarded(context, False):
        from backupd.app.context.logging_setup import logging_to
        from backupd.app.daemon.daemon import Manner
        from backupd.app.daemon.daemon import serve as run

        with logging_to(sys.stderr):
            code = run(config_path(context, config), Manner(standby=standby, grace=grace, new_catalog=new_catalog))
    if code:
        raise typer.Exit(code)

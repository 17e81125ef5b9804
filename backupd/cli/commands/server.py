"""`backupd server`: which database server a name of the configuration stands for."""

from __future__ import annotations

import typer

from backupd.cli.options import Config, Json, Server, remember
from backupd.cli.session import session

server_app = typer.Typer(
    help="Which database server a name of the configuration stands for.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@server_app.callback()
def group(context: typer.Context, config: Config = None, as_json: Json = False) -> None:
    """Accept another server under a known name."""
    remember(context, config, as_json)


@server_app.command()
def accept(context: typer.Context, server: Server, config: Config = None, as_json: Json = False) -> None:
    """Say that the other server that answers under this name is the right one from now on.

    Its backups and binary logs, kept apart until then, count as those of the server; so do those before it.
    """
    with session(context, config, as_json) as run:
        found = run.service.servers.accept(server)
        run.screen.done = f"{found.uuid} was accepted as {server}"
        run.screen.document(found.as_json())
        run.screen.line(
            f"{found.uuid} at {found.address} is {server} from now on; take a full backup now: "
            f"backupd backup {server} --kind full"
        )

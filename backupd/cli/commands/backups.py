"""``backupd backups``: list, show, keep, delete, undelete."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from backupd.cli.options import AnyServer, BackupId, Config, Json, remember
from backupd.cli.session import session


class ListByDefault(TyperGroup):
    """``backups [SERVER]`` means ``backups list [SERVER]``: the first word that is no command is a server."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's own Context
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] != "--":
            if args[position] in ("--help", "-h"):
                return super().parse_args(ctx, args)
            position += 2 if args[position] == "--config" else 1
        if position >= len(args) or args[position] not in self.commands:
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ListByDefault,
    help="List backups; show, keep, delete or undelete one.",
    rich_markup_mode=None,
    add_completion=False,
)


@app.callback()
def group(context: typer.Context, config: Config = None, as_json: Json = False) -> None:
    remember(context, config, as_json)


@app.command("list")
def list_(context: typer.Context, server: AnyServer = None, config: Config = None, as_json: Json = False) -> None:
    """List backups, newest first (also without the word `list`)."""
    with session(context, config, as_json) as run:
        records = sorted(run.service.backups.list(server), key=lambda record: record.id, reverse=True)
        run.screen.document([record.as_json() for record in records])
        from backupd.cli.screen.render import show_backups

        show_backups(run.screen, records)


@app.command()
def show(context: typer.Context, backup_id: BackupId, config: Config = None, as_json: Json = False) -> None:
    """Show everything that is known of a backup."""
    with session(context, config, as_json) as run:
        document = run.service.backups.show(backup_id).as_json()
        run.screen.document(document)
        from backupd.cli.screen.render import show_mapping

        show_mapping(run.screen, document)


@app.command()
def keep(
    context: typer.Context,
    backup_id: BackupId,
    release: Annotated[bool, typer.Option("--release", help="Take the mark away again.")] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Keep a backup: no rule deletes it until it is released."""
    with session(context, config, as_json) as run:
        problems = run.service.backups.keep(backup_id, pinned=not release)
        run.screen.done = f"{backup_id} was {'released' if release else 'kept'}"
        run.screen.document({"id": backup_id, "pinned": not release, "problems": list(problems)})
        run.screen.line(f"{backup_id} is {'released' if release else 'kept'}")
        for problem in problems:
            run.screen.line(f"NOT written at {problem}; say it again later", style="bold red")


@app.command()
def delete(
    context: typer.Context,
    backup_id: BackupId,
    now: Annotated[bool, typer.Option("--now", help="Without the grace period; cannot be undone.")] = False,
    with_increments: Annotated[
        bool, typer.Option("--with-increments", help="And everything that builds on it.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Mark a backup as deleted; its data goes after the grace period."""
    with session(context, config, as_json) as run:
        done = run.service.backups.delete(backup_id, now=now, with_increments=with_increments)
        held = done.held
        run.screen.done = f"{backup_id} was {'deleted' if now and not held else 'marked as deleted'}"
        run.screen.document(
            {"id": backup_id, "state": "deleted", "now": now, "held": list(held), "forgotten": list(done.forgotten)}
        )
        for sentence in done.forgotten:
            run.screen.line(sentence, style="yellow")
        if held:
            run.screen.line(f"{backup_id} is marked as deleted, but it was NOT removed yet:")
            for sentence in held:
                run.screen.line(f"  {sentence}")
            raise typer.Exit(1)
        run.screen.line(
            f"{backup_id} is deleted"
            if now
            else f"{backup_id} is marked as deleted; `backupd backups undelete {backup_id}` brings it back"
        )


@app.command()
def undelete(context: typer.Context, backup_id: BackupId, config: Config = None, as_json: Json = False) -> None:
    """Take back a deletion whose grace period is not over."""
    with session(context, config, as_json) as run:
        back = run.service.backups.undelete(backup_id)
        run.screen.done = f"{backup_id} was brought back"
        run.screen.document({"id": backup_id, "state": "complete", "brought_back": back})
        run.screen.line(f"{', '.join(back)} {'is' if len(back) == 1 else 'are'} back")


@app.command("config")
def kept_configuration(
    context: typer.Context,
    backup_id: BackupId,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", show_default=False, help="Write it to this new or empty folder."),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """List or extract the server configuration and accounts stored with a backup. Requires a private key."""
    with session(context, config, as_json) as run:
        found = run.service.backups.configuration(backup_id, out)
        run.screen.done = f"the configuration was written to {out}" if out else ""
        run.screen.document(found.as_json())
        for sentence in found.left_out:
            run.screen.line(sentence, style="yellow")
        if out is not None:
            run.screen.line(f"{len(found.written)} files are in {out}; they hold passwords and hashes")
            return
        rows = [
            (
                one.name + (f" -> {one.target}" if one.target else ""),
                f"{one.mode:04o}",
                one.owner,
                str(one.size) if one.kind == "file" else one.kind,
            )
            for one in found.members
        ]
        run.screen.table(("name", "mode", "owner", "bytes"), rows, right=("bytes",))

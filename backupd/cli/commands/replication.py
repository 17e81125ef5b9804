"""``backupd replicate``: bring destinations up to date now, without waiting for the service.

Documents: a list with one entry for each server and destination: ``server``, ``destination``, ``ok``, ``copied``
(``backup``, ``bytes``, ``objects``, ``present``, ``seconds``, ``rate``, ``remarks``), ``declined`` and ``waiting``
(``backup``, ``reason``), ``binlogs`` (``segments``, ``bytes``, ``dropped``, ``lacking``, ``troubles``), ``verified``
(ids), ``troubles``, ``damages``, ``lost`` (ids of copies that had vanished), ``damaged`` (ids of copies that are not
whole), ``error``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.options import AnyServer, Config, Json
from backupd.cli.screen.output import Screen
from backupd.cli.session import session

if TYPE_CHECKING:
    from backupd.app.copies.replication import Replicated


def replicate(
    context: typer.Context,
    server: AnyServer = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="DESTINATION", show_default=False, help="Only this one; all without it."),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Copy what destinations lack of backups and binary logs, and read again what was stored there."""
    from backupd.cli.screen.progress import reporting

    with session(context, config, as_json) as run:
        with reporting() as report:
            found = run.service.foreground.replicate(server, to, report)
        run.screen.document([one.as_json() for one in found])
        for one in found:
            _show(run.screen, one)
        if not found:
            run.screen.line("no server's policy names this destination" if to else "no servers")
        if not all(one.ok for one in found):
            raise typer.Exit(1)


def _show(screen: Screen, one: Replicated) -> None:
    from backupd.app.copies.replication import rate_text
    from backupd.model.text import format_size

    screen.line(
        f"{one.server} at {one.destination}: " + ("up to date" if one.ok else "NOT up to date"),
        style="bold" if one.ok else "bold red",
    )
    if one.lost:
        screen.line(f"  was gone, and nobody marked it deleted: {', '.join(one.lost)}", style="yellow")
    for copied in one.copied:
        screen.line(f"  copied {copied.header.backup_id}: {rate_text(copied)}")
        for remark in copied.remarks:
            screen.line(f"    read elsewhere: {remark}", style="yellow")
    if one.logs.segments or one.logs.dropped:
        screen.line(
            f"  binary logs: {one.logs.segments} segments copied ({format_size(one.logs.bytes)}), "
            f"{one.logs.dropped} pieces gone"
        )
    if one.examined.verified:
        screen.line(f"  verified: {', '.join(one.examined.verified)} ({format_size(one.examined.bytes)} looked at)")
    for damage in one.examined.damages:
        if damage.repaired_from:
            screen.line(f"  put right from {damage.repaired_from}: {damage}", style="yellow")
    for name, why in one.declined:
        screen.line(f"  not copied: {name}: {one.destination} would not keep it: {why}")
    for name, why in one.waiting.items():
        screen.line(f"  waits: {name}: {why}", style="yellow")
    for text in one.examined.troubles:
        screen.line(f"  not verified: {text}", style="yellow")
    error = one.trouble
    if error is not None:
        for line in str(error).splitlines():
            screen.line(f"  {line}", style="red")

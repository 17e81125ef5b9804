"""``backupd bring-back``: what was deleted or overwritten at a place that keeps versions is what is seen again.

Document: ``destination``, ``since``, ``returns`` (each ``key``, ``kind``, ``bytes``, ``since``, ``was``, ``version``),
``lost`` and ``left`` (by key: why), ``hidden_before``, ``marks`` (marks of deletion that are withdrawn, each
``server``, ``backup``, ``since``), and ``done`` (``keys``, ``failed``, ``unmarked``: each ``server``, ``backup``; null
without ``--yes``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.options import Config, Json, moment
from backupd.cli.screen.output import Screen
from backupd.cli.session import session
from backupd.model.text import format_size, format_time

if TYPE_CHECKING:
    from backupd.app.restores.recover_versions import RecoveredVersions

_SHOWN = 20


def bring_back(
    context: typer.Context,
    place: Annotated[str, typer.Argument(metavar="DESTINATION", help="Name of a destination in the configuration.")],
    *,
    since: Annotated[
        datetime,
        typer.Option(
            "--since",
            parser=moment,
            metavar="TIME",
            show_default=False,
            help="Undo deletions and overwrites made after this time.",
        ),
    ],
    yes: Annotated[
        bool, typer.Option("--yes", help="Apply the changes. Without this option, the command only lists them.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Bring back what was deleted or overwritten in a bucket with versions since a time.

    What was gone, or marked deleted, at that time stays so.
    """
    from backupd.cli.screen.progress import reporting

    with session(context, config, as_json) as run:
        if yes:
            with reporting() as report:
                told = run.service.maintenance.bring_back(place, since, report)
        else:
            told = run.service.maintenance.look_back(place, since)
        run.screen.document(told.as_json())
        _show(run.screen, told)
        if not told.ok:
            raise typer.Exit(1)


def _show(screen: Screen, told: RecoveredVersions) -> None:
    found, done = told.found, told.done
    begin = format_time(found.since)
    if not found.returns:
        screen.line(f"nothing that is needed was hidden or overwritten at {told.destination} since {begin}")
    else:
        screen.table(
            ("WHAT", "HIDDEN", "OVERWRITTEN", "BYTES", "FIRST", "LAST"),
            (
                (
                    kind,
                    str(sum(one.hidden for one in group)),
                    str(sum(not one.hidden for one in group)),
                    format_size(sum(one.size for one in group)),
                    format_time(min(one.since for one in group)),
                    format_time(max(one.since for one in group)),
                )
                for kind, group in found.kinds().items()
            ),
            right=("HIDDEN", "OVERWRITTEN", "BYTES"),
        )
    if backups := found.backups():
        screen.line()
        screen.table(("SERVER", "BACKUP"), backups)
    if found.marks:
        screen.line()
        screen.line(f"marked deleted only since {begin}, so these marks are withdrawn:")
        screen.table(
            ("SERVER", "BACKUP", "MARKED"),
            ((server, backup_id, format_time(at)) for (server, backup_id), at in sorted(found.marks.items())),
        )
    _list(screen, "no intact version", found.lost, style="yellow")
    _list(screen, "stays away", found.left)
    if found.before:
        screen.line(f"{found.before} more files were hidden before {begin}, and stay so")
    if done is None:
        if not found.is_nothing:
            what = [f"these {len(found.returns)} files come back"] if found.returns else []
            what += [f"these {len(found.marks)} marks are withdrawn"] if found.marks else []
            screen.line()
            screen.line(f"-> nothing was changed; with --yes {' and '.join(what)}")
        return
    _list(screen, "did not come back", done.failed, style="yellow")
    screen.line()
    screen.line(
        f"{len(done.keys)} files are what is seen again"
        + (f"; {len(done.unmarked)} marks of deletion are withdrawn" if done.unmarked else "")
    )
    screen.line(
        "-> first revoke the credentials that deleted the objects; then run `backupd fsck --repair` (updates the "
        "catalog) and `backupd verify` (reads every object)"
    )


def _list(screen: Screen, what: str, keys: Mapping[str, str], *, style: str = "") -> None:
    for key, why in list(keys.items())[:_SHOWN]:
        screen.line(f"{what}: {key}: {why}", style=style)
    if len(keys) > _SHOWN:
        screen.line(f"{what}: and {len(keys) - _SHOWN} more; --json names all", style=style)

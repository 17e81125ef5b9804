"""``backupd catalog``: its upgrade, its copies at the destinations, and making it anew from one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.options import Config, Json, remember
from backupd.cli.session import session

if TYPE_CHECKING:
    from backupd.app.rebuild import Rebuilt
    from backupd.cli.screen import Screen

app = typer.Typer(help="The catalog's own care.", no_args_is_help=True, rich_markup_mode=None)

Place = Annotated[str, typer.Argument(metavar="DESTINATION", help="Name of a destination in the configuration.")]


@app.callback()
def group(context: typer.Context, config: Config = None, as_json: Json = False) -> None:
    remember(context, config, as_json)


@app.command()
def upgrade(context: typer.Context, config: Config = None, as_json: Json = False) -> None:
    """Bring the catalog's tables up to this version (also done at first use)."""
    with session(context, config, as_json, opening="makes") as run:
        revision = run.service.upgrade_catalog()
        run.screen.document({"revision": revision})
        run.screen.line(f"the catalog is at {revision}")


@app.command()
def rebuild(
    context: typer.Context,
    place: Annotated[
        str, typer.Option("--from", metavar="DESTINATION", show_default=False, help="Where the backups are.")
    ],
    into_existing: Annotated[
        bool, typer.Option("--into-existing", help="Add to a catalog that is not empty.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Make the catalog anew from what lies at one destination.

    It needs no private key. With one, positions, proofs and the history of the lost catalog come back, too.
    """
    from backupd.cli.progress import reporting

    with session(context, config, as_json, opening="makes") as run:
        with reporting() as report:
            done = run.service.upkeep.rebuild(place, report, merge=into_existing)
        run.screen.done = "the catalog was rebuilt"
        run.screen.document(done.as_json())
        _show(run.screen, done)
        if done.problems:
            raise typer.Exit(1)


@app.command()
def copy(context: typer.Context, config: Config = None, as_json: Json = False) -> None:
    """Copy catalog, configuration and proofs, sealed, and RECOVER.md to every destination now.

    Jobs do that by themselves: of the catalog at most once an hour, of the rest whenever it changed.
    """
    with session(context, config, as_json) as run:
        told = run.service.upkeep.copy()
        run.screen.document([one.as_json() for one in told])
        for one in told:
            new = [key for key in (one.catalog, one.configuration, "RECOVER.md" if one.recover else "") if key]
            new += [f"{one.proofs} proofs and witnesses"] if one.proofs else []
            text = f"{one.destination}: {', '.join(new) or 'nothing has changed'}"
            run.screen.line(f"{text}; {one.problem}" if one.problem else text, style="yellow" if one.problem else "")
        if any(one.problem for one in told):
            raise typer.Exit(1)


@app.command()
def sign(
    context: typer.Context,
    place: Place,
    unproven: Annotated[
        bool, typer.Option("--unproven", help="Also what agrees with a catalog that cannot prove it: you know that "
                                              "nobody tampered with this destination.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Sign what was stored before the policy said `signed: true`.

    Only what is, byte by byte, what this installation's own backups stored; the rest is named.
    """
    with session(context, config, as_json) as run:
        done = run.service.upkeep.sign(place, unproven=unproven)
        run.screen.document(done.as_json())
        run.screen.line(f"{done.signed} documents were signed")
        for text in done.left:
            run.screen.line(f"not signed: {text}", style="yellow")
        if done.left:
            raise typer.Exit(1)


def _show(screen: Screen, done: Rebuilt) -> None:
    screen.line(f"{done.backups} backups, {done.segments} binary logs in {done.branches} branches, {done.proofs} "
                f"proofs, {done.witnesses} witnesses, {done.holds} holds")
    if done.damaged:
        screen.line(f"not whole there: {', '.join(done.damaged)}", style="yellow")
    if done.closed:
        screen.line(f"{done.closed} backups have no position, because no private key was at hand: with "
                    "restore.gnupg_home in the configuration, run it again with --into-existing", style="yellow")
    for moment in done.catalog_of:
        screen.line(f"jobs, events and schedules are those of the copy of {moment:%Y-%m-%d %H:%M:%S} UTC")
    for problem in done.problems:
        screen.line(problem, style="yellow")

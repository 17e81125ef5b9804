"""Restores of tables on the command line: what is wanted, the question before anything is replaced, and the answer."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from datetime import tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backupd.cli.output import beside
from backupd.cli.render import position_text, show_phases, show_plan_warnings, show_steps, until_text
from backupd.cli.session import Run, Server, flag, one_of, option
from backupd.model.errors import UsageError
from backupd.model.text import few, format_duration, format_size

if TYPE_CHECKING:
    from backupd.app.restores.execution import Leftover
    from backupd.app.restores.request import RestoreRequest
    from backupd.cli.output import Screen
    from restore.planning.table_plan import TablePlan
    from restore.tables.row_difference import TableDifference

_SHOWN = 10
"""Keys of rows that differ, where nobody asks for another number."""
Tables = Annotated[
    list[str] | None,
    option(
        "--tables",
        "PATTERN",
        "Only these tables: schema.table, where * stands for any text; may be given several times.",
    ),
]
Into = Annotated[
    str | None,
    option("--into", "SERVER", "The running server that gets the tables."),
]
As = Annotated[
    str | None,
    option(
        "--as",
        "NAME",
        "New name: TABLE, SCHEMA.TABLE, or a pattern in which * stands for the old name ('*_restored', 'SCHEMA.*'). "
        "Without it, the restored tables replace the live tables; backupd keeps those under new names.",
    ),
]
Sql = Annotated[
    Path | None,
    option("--sql", "DIR", "Write the tables as SQL files into this new folder."),
]
Confirm = Annotated[
    str | None,
    option(
        "--confirm",
        "SERVER",
        "Repeat the name of the --into server to confirm that live tables may be replaced. On a terminal, backupd "
        "prompts for it.",
    ),
]
Compare = Annotated[
    bool, flag("--compare", "Only show how the restored rows differ from the live ones; change nothing.")
]
MOST_KEYS = 1000
Keys = Annotated[
    int | None,
    option(
        "--keys",
        "N",
        "Maximum number of row keys to display per difference (missing, changed, added).",
        min=1,
        max=MOST_KEYS,
    ),
]


Which = Annotated[
    str | None,
    one_of(
        ("backup", "live", "none"),
        "--triggers",
        "Triggers of the restored tables: from the backup at the target (default), from the live tables, or none.",
        show_default=False,
    ),
]


OutOf = Annotated[
    str | None,
    one_of(
        ("logical", "physical"),
        "--from",
        "Kind of backup that the tables are restored from. Default: the faster one.",
        show_default=False,
    ),
]


def requested(
    server: str, target: str, *, tables: Sequence[str] | None, mode: str | None = None, **options: Any
) -> RestoreRequest:
    """The request that the options of a command make. ``options``: by the names of its fields; None for those that were
    not given. Raises BadParameter for an empty text, which names nothing."""
    from backupd.app.restores.request import TABLES, RestoreRequest, option_name

    given = {name: value for name, value in options.items() if value is not None}
    if mode is not None or tables:
        given["mode"] = TABLES if tables else mode
    values: dict[str, Any] = {"tables": tuple(tables or ())}
    for name, value in given.items():
        if value == "":
            raise typer.BadParameter(f"{option_name(name)}: must not be empty")
        match value:
            case list():
                values[name] = tuple(value)
            case Path():
                values[name] = str(value.absolute())
            case bool() | int():
                values[name] = value
            case _:
                values[name] = str(value)
    return RestoreRequest(server, target, **values)


def refuse_mixture(request: RestoreRequest, said: Collection[str] = (), *, somewhere: bool = False) -> None:
    """Raises BadParameter for options that do not go together. ``said``: see ``RestoreRequest.mixed``; ``somewhere``:
    what to restore into has to be named, too."""
    from backupd.app.restores.request import option_name

    problems = request.mixed(option_name, said=said)
    try:
        if somewhere and not problems:
            request.check_target_folder(option_name)
    except UsageError as error:
        problems = [error.message]
    if problems:
        others = "" if request.of_tables else " (to restore tables: --tables with --into SERVER or --sql DIR)"
        raise typer.BadParameter("; ".join(problems) + others)


def restore_tables(run: Run, request: RestoreRequest, *, confirm: str | None, keys: int | None) -> None:
    """Restore them, ask before anything is replaced, show what came of it."""
    into = request.into

    def ask(found: Sequence[TableDifference]) -> bool:
        for difference in found:
            typer.echo(difference_text(difference.as_json(), keys or _SHOWN), err=True)
        return bool(
            typer.prompt(
                f"The listed tables on {into} will be replaced; backupd keeps them under new names. "
                f"Type {into} to continue",
                default="",
                show_default=False,
                err=True,
            )
            == into
        )

    with run.reporting() as report:
        outcome = run.service.foreground.restore(
            request,
            report,
            confirm=confirm,
            ask=ask if sys.stdin.isatty() else None,
            keys=keys,
        )
    document = outcome.as_json()
    run.screen.done = (
        f"the tables were restored into {into or request.sql}" if document["done"] else "no table was replaced"
    )
    run.screen.document(document)
    show_tables(run.screen, document, keys or _SHOWN)
    run.ends(well=outcome.is_good)


def show_tables(screen: Screen, outcome: dict[str, Any], keys: int) -> None:
    """A finished restore of tables: its JSON document. ``keys``: the most that are shown of rows that differ."""

    position = outcome["position"]
    screen.facts(
        (
            ("restore", outcome["id"]),
            ("backup", f"{outcome['backup']} ({outcome['way']})"),
            ("state of", position_text(position["file"], position["pos"], position["gtid"])),
            ("into", outcome["into"] or outcome["folder"] or ""),
            (
                "replaced",
                ""
                if outcome["done"]
                else "nothing: no table could be restored"
                if all(one["trouble"] for one in outcome["tables"])
                else "nothing: the live tables are as they were",
            ),
        )
    )
    screen.line()
    as_files = any(one["how"] != "rows" for one in outcome["tables"])
    screen.table(
        ("TABLE", "RESTORED AS", "ROWS", *(("METHOD",) if as_files else ()), "PREVIOUS TABLE"),
        (
            (
                one["source"],
                one["target"] if outcome["done"] and not one["trouble"] else "",
                "" if one["rows"] is None else str(one["rows"]),
                *((one["how"],) if as_files else ()),
                one["aside"] or "",
            )
            for one in outcome["tables"]
        ),
        right=("ROWS",),
    )
    for one in outcome["tables"]:
        if one["trouble"]:
            screen.line(f"failed: {one['source']}: {one['trouble']}", style="bold red")
        if one["difference"]:
            screen.line(difference_text(one["difference"], keys))
    for orphan in outcome["orphans"]:
        screen.line(f"failed: {orphan}", style="bold red")
    _show_objects(screen, outcome["objects"])
    screen.line()
    show_phases(screen, outcome["phases"])
    for saved in outcome["saved"]:
        screen.line(
            f"note: {saved['aside']} lost triggers, foreign keys or checks that only {saved['table']} can have. To "
            "restore them after renaming it back, run:",
            style="yellow",
        )
        screen.text(saved["script"])
    for warning in outcome["warnings"]:
        screen.line(f"note: {warning}", style="yellow")


def _show_objects(screen: Screen, objects: dict[str, Any]) -> None:
    """Views, routines and events."""

    def listed(found: Sequence[dict[str, Any]]) -> str:
        return ", ".join(f"{one['kind']} {one['name']}" for one in found)

    kept = objects["left_alone"]
    for title, found in (
        ("created, because missing", objects["added"]),
        ("left unchanged, same as in the backup", [one for one in kept if one["differs"] is False]),
        ("left unchanged, although different in the backup", [one for one in kept if one["differs"]]),
        ("left unchanged, could not be compared", [one for one in kept if one["differs"] is None]),
    ):
        if found:
            screen.line(f"{title}: {listed(found)}")
    for one in objects["failed"]:
        screen.line(f"failed: {one['kind']} {one['name']}: {one['why']}", style="bold red")


def difference_text(found: dict[str, Any], shown: int = _SHOWN) -> str:
    """How a restored table differs from the live one, in a few lines, with at most ``shown`` keys of a sort."""
    if not found["comparable"]:
        head = f"{found['live']}: cannot be compared with the restored one: {found['why_not']}"
        return "\n".join([head, *(f"  {line}" for line in found["definition_differs"])])
    if not (found["missing"] or found["added"] or found["changed"]):
        head = (
            f"{found['live']}: equal to the restored one, {found['live_rows']} rows"
            if found["same"]
            else f"{found['live']}: the same {found['live_rows']} rows as the restored one, another definition"
        )
    else:
        head = (
            f"{found['live']}: {found['live_rows']} rows, the restored one {found['restored_rows']}: "
            f"{found['missing']} are missing, {found['changed']} changed, {found['added']} added since"
        )
    lines = [head]
    for name in ("missing", "changed", "added"):
        sample = found["samples"][name]
        if sample:
            keys = ", ".join("/".join(key) for key in sample[:shown])
            more = ", ..." if found[name] > len(sample[:shown]) else ""
            lines.append(f"  {name}, by {'/'.join(found['key'])}: {keys}{more}")
    lines += [f"  {line}" for line in (*found["remarks"], *found["columns_differ"], *found["definition_differs"])]
    return "\n".join(lines)


def show_table_plan(screen: Screen, plan: TablePlan, zone: tzinfo | None = None) -> None:
    """A plan for tables, for people; ``zone``: in which its moments are shown beside UTC."""
    screen.facts(
        (
            ("target", beside(plan.base.target, zone)),
            ("until", beside(until_text(plan.base), zone)),
            ("way", beside(plan.reason, zone)),
            (
                "tables",
                few((goal.source.shown for goal in plan.goals), 20),
            ),
            (
                "needed, too",
                ", ".join(
                    name.shown for name in plan.chosen.needed if name not in {goal.source for goal in plan.goals}
                ),
            ),
            ("read from", ", ".join(plan.base.destinations)),
            ("to fetch", f"{format_size(plan.chosen.stored)} stored, {format_size(plan.chosen.source)} of data"),
            ("of", f"{format_size(plan.base.bytes_stored)} that the whole backup takes"),
            ("estimate", format_duration(plan.seconds)),
        )
    )
    show_steps(screen, plan.steps, plan.base.thaw)
    for other in plan.others:
        screen.line(other)
    show_plan_warnings(screen, plan.base.chain, plan.warnings)


def leftovers(
    run: Run,
    server: Server,
    *,
    drop: Annotated[
        str | None,
        option(
            "--drop",
            "ID|all",
            "Remove the leftovers of this restore, or of all inactive restores. backupd first rolls back an "
            "interrupted cut-over, or completes it if the tables are already renamed.",
        ),
    ] = None,
) -> None:
    """List the staging schemas that unfinished table restores left on a server."""
    found = run.service.restores.leftovers(server, drop)
    run.screen.document([one.as_json() for one in found])
    run.screen.table(
        ("RESTORE", "BEGUN", "TABLES", "BYTES", "STATE"),
        (
            (
                one.restore_id,
                f"{one.staging.begun:%Y-%m-%d %H:%M}" if one.staging.begun else "",
                str(one.staging.tables),
                format_size(one.staging.bytes),
                "dropped" if one.dropped else "in use" if one.staging.active else "waits",
            )
            for one in found
        ),
        right=("TABLES", "BYTES"),
    )
    for one in found:
        if one.pending is not None:
            names = ", ".join(name.shown for name in one.pending.tables)
            run.screen.line(f"{one.restore_id}: {_cut_over_text(server, names, one)}", style="yellow")
    if not found:
        run.screen.line("nothing")


def _cut_over_text(server: str, names: str, one: Leftover) -> str:
    if one.dropped:
        return (
            f"the cut-over of {names} was completed: the restored tables have their final names"
            if one.finished
            else f"the cut-over of {names} was rolled back: every table is as it was"
        )
    if one.staging.active:
        return f"cut-over of {names} in progress"
    return (
        f"{names}: the restored tables have their final names, but foreign keys and triggers may be missing. To "
        f"complete the cut-over, repeat the restore or run backupd leftovers {server} --drop {one.restore_id}"
        if one.pending is not None and one.pending.renamed
        else f"was stopped before it replaced {names}; the same restore, or --drop, rolls back what it had begun"
    )

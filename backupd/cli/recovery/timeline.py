"""The command ``backupd timeline``: which moments of a server are recoverable, as a picture in words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import typer

from backupd.cli.options import Config, Json, Server
from backupd.cli.screen.output import Screen
from backupd.cli.session import session
from backupd.model.text import format_duration

if TYPE_CHECKING:
    from backupd.model.server_facts import Position
    from backupd.recovery.timeline import Timeline
    from backupd.recovery.windows import Window

_MOST = 40
"""Lines of a kind that are shown, the newest; --json has all."""


def timeline(context: typer.Context, server: Server, config: Config = None, as_json: Json = False) -> None:
    """Show the recoverable moments of a server, what interrupts them, and whether its objectives are kept."""
    with session(context, config, as_json) as run:
        found = run.service.servers.timeline(server)
        run.screen.document(found.as_json())
        if not as_json:
            show_timeline(run.screen, found)


def show_timeline(screen: Screen, found: Timeline) -> None:
    if found.latest is None:
        if found.first_due is not None:
            screen.line(
                f"nothing of {found.server} is recoverable yet: its first backup is due at {_time(found.first_due)}",
                style="bold",
            )
        else:
            screen.line(f"nothing of {found.server} is recoverable", style="bold red")
        kind = "logical" if found.tables_only else "full"
        screen.line(f"-> take a backup: backupd backup {found.server} --kind {kind}")
    else:
        what = f"tables of {found.server} are" if found.tables_only else f"{found.server} is"
        screen.line(
            f"{what} recoverable up to {_time(found.latest)}, "
            f"{format_duration((found.now - found.latest).total_seconds())} ago",
            style="bold",
        )
        if found.tables_only:
            screen.line("the server as a whole is not: its policy takes dumps only, and dumps restore tables")
            screen.line(
                f"-> all of its tables: backupd restore {found.server} --to latest --tables '*.*' --sql DIR, "
                "or --into SERVER"
            )
    for text in found.warnings:
        screen.line(f"! {text}", style="yellow")
    screen.line()
    if found.windows:
        _windows(screen, found)
    _gaps(screen, found)
    if found.destinations:
        screen.line()
        screen.table(
            ("DESTINATION", "RECOVERABLE UP TO", "AGE", "BEHIND", "TROUBLE"),
            (
                (
                    reach.name,
                    _time(reach.latest) if reach.latest else "nothing",
                    _span(reach.rpo),
                    _span(reach.behind),
                    "yes, see above" if reach.trouble else "",
                )
                for reach in found.destinations
            ),
            right=("AGE", "BEHIND"),
        )
    if len(found.branches) > 1:
        screen.line()
        screen.table(
            ("BRANCH", "BECAUSE OF", "FROM", "TO", "FORKED FROM"),
            (
                (
                    branch.id,
                    str(branch.reason),
                    _time(branch.noticed_at),
                    _time(end) if end else "now",
                    f"{branch.parent} at {_place(branch.fork)}" if branch.parent else "",
                )
                for branch, end in found.branch_ends()
            ),
        )
    screen.line()
    _promises(screen, found)


def _windows(screen: Screen, found: Timeline) -> None:
    """From one moment to another; backups without binary logs behind them are one line together."""
    lines: list[tuple[str, str, str, str]] = []
    points: list[Window] = []
    for window in found.windows:
        if window.begin == window.end:
            if points and points[-1].reason_end != window.reason_end:
                lines.append(_points(points))
                points = []
            points.append(window)
            continue
        if points:
            lines.append(_points(points))
            points = []
        doubts = f" (doubtful: {'; '.join(window.conditions)})" if window.conditions else ""
        lines.append(
            (
                f"{_time(window.begin)} ━━ {_time(window.end)}",
                ",".join(window.destinations),
                window.branch,
                window.reason_end + doubts,
            )
        )
    if points:
        lines.append(_points(points))
    _cut(screen, len(lines))
    several = len(found.branches) > 1
    columns = ("RECOVERABLE", "AT", *(("BRANCH",) if several else ()), "ENDS BECAUSE")
    screen.table(
        columns, ((span, at, *((branch,) if several else ()), why) for span, at, branch, why in lines[-_MOST:])
    )


def _points(points: Sequence[Window]) -> tuple[str, str, str, str]:
    names = ",".join(dict.fromkeys(name for point in points for name in point.destinations))
    if len(points) == 1:
        return f"{_time(points[0].end)} •", names, points[0].branch, points[0].reason_end
    return (
        f"{_time(points[0].end)} •• {_time(points[-1].end)}",
        names,
        points[-1].branch,
        f"only the moments of {len(points)} backups: {points[-1].reason_end}",
    )


def _gaps(screen: Screen, found: Timeline) -> None:
    if not found.gaps:
        return
    screen.line()
    screen.line(
        f"{len(found.gaps)} gaps: nothing inside them can be replayed"
        if len(found.gaps) > 1
        else "a gap: nothing inside it can be replayed",
        style="yellow",
    )
    _cut(screen, len(found.gaps))
    for gap in found.gaps[-_MOST:]:
        where = f"at {gap.destination}" if gap.destination else "everywhere"
        until = _place(gap.before) if gap.before else "nothing follows"
        screen.line(f"  {_place(gap.after)} ── {until}, {where}: {gap.reason}", style="yellow")


def _promises(screen: Screen, found: Timeline) -> None:
    proof = found.last_proof
    screen.facts(
        (
            (
                "last test",
                f"{proof.outcome} {_time(proof.finished_at)}: {proof.target} from {proof.backup_id}, in "
                f"{format_duration(proof.seconds)}{', NOT THE NEWEST DATA' if proof.older else ''}"
                if proof
                else "never",
            ),
            ("data loss now (RPO)", _promise(found.rpo, found.objectives.rpo, found.rpo_kept, "objectives.rpo")),
            (
                "restore time (RTO)",
                _promise(found.predicted_rto, found.objectives.rto, found.rto_kept, "objectives.rto"),
            ),
        )
    )


def _promise(value: timedelta | None, promised: timedelta | None, kept: bool | None, name: str) -> str:
    text = _span(value) or "not known"
    if promised is None:
        return text
    how = "NOT KEPT" if kept is False else "kept" if kept else "not judged yet"
    return f"{text}; {name} is {_span(promised)}: {how}"


def _cut(screen: Screen, count: int) -> None:
    if count > _MOST:
        screen.line(f"... {count - _MOST} older ones; --json lists them all")


def _place(position: Position | None) -> str:
    if position is None:
        return "a place that is not known"
    return f"{position.file}:{position.pos}" if position.file else f"GTID {position.gtid}"


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}Z"


def _span(span: timedelta | None) -> str:
    return format_duration(span.total_seconds()) if span is not None else ""

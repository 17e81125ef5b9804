"""``backupd binlog``: the archived binary logs: how the streams are, and which transaction did it.

Documents: ``status`` gives a list of ``{"server", "state", "branch", "branches", "gaps", "destinations", "updated_at",
"stream", "acknowledgement"}``;
each destination has ``name``, ``runs``, ``segments``, ``bytes``, ``bytes_stored``, ``from``, ``latest``,
``confirmed_at``, ``rpo_seconds``, ``worst_rpo_seconds_of_a_day``, ``bytes_behind``, ``error``. ``search`` gives a list
of transactions: ``at``, ``precise``, ``gtid``, ``file``, ``pos``, ``end``, ``branch``, ``server_id``, ``changes``
(``schema``, ``table``, ``kind``, ``rows``), ``statement``, ``state``, ``restore_before`` (a target).

The command ``backupd timeline``: which moments of a server are recoverable, as a picture in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, tzinfo
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.output import Screen, beside, visible
from backupd.cli.session import AnyServer, Commands, Labels, Run, Server, Written, option, written
from backupd.model.binlog import ChangeKind
from backupd.model.text import format_duration, format_size, format_time

if TYPE_CHECKING:
    from backupd.app.binlogs.search import Found
    from backupd.app.binlogs.status import Held, LogStatus
    from backupd.model.server_facts import Position
    from backupd.recovery.timeline import Timeline
    from backupd.recovery.windows import Window


SHOWN = 100
"""Transactions of a search unless more are asked for."""

app = Commands(help="Binary logs: show the streams, search the archived transactions.", no_args_is_help=True)


@app.command()
def status(run: Run, server: AnyServer = None, label: Labels = None) -> None:
    """Show the binary log streams, what each destination holds, and how far it is behind."""
    found = run.labelled(label, server).binlogs.status(server)
    run.screen.document([one.as_json() for one in found])
    if not found:
        run.screen.line("no binary log is streamed: `binlog: {stream: true}` in a policy enables it")
    for one in found:
        _show(run.screen, one)


def _show(screen: Screen, one: LogStatus) -> None:
    stream = one.stream or {}
    reported = f", last report at {format_time(one.told_at)}" if one.told_at is not None else ""
    screen.line(f"{one.server}: {one.state}{reported}", style="bold")
    if stream.get("file"):
        spooled = format_size(stream.get("spool_bytes") or 0)
        screen.line(f"  copied up to {stream['file']}:{stream.get('pos')}, {spooled} in the spool")
    if stream.get("error"):
        screen.line(f"  {stream['error']}", style="red")
    if one.acknowledgement is not None:
        words = one.acknowledgement.words(one.server)
        screen.line(f"  {words}", style="" if one.acknowledgement.holds else "red")
    if one.branches > 1:
        screen.line(f"  {one.branches} branches of its history; it is on {one.branch.id if one.branch else 'none'}")
    if one.gaps:
        screen.line(f"  {one.gaps} gaps: `backupd timeline {one.server}` names them", style="yellow")
    numbers = ("BEHIND", "WORST OF A DAY", "LOGS", "STORED", "WAITING")
    screen.table(("DESTINATION", "UP TO", "CONFIRMED", *numbers, "ERROR"), map(_row, one.destinations), right=numbers)
    screen.line()


def _row(held: Held) -> tuple[str, ...]:
    return (
        held.destination,
        held.latest or "nothing yet",
        format_time(held.confirmed_at) if held.confirmed_at else "",
        _seconds(held.behind),
        _seconds(held.worst),
        str(held.segments),
        format_size(held.stored),
        "" if held.waiting is None else format_size(held.waiting),
        held.error,
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else format_duration(value)


def _kinds(text: str) -> frozenset[ChangeKind]:
    try:
        return frozenset(ChangeKind(word.strip().lower()) for word in text.split(",") if word.strip())
    except ValueError:
        raise typer.BadParameter(f"kinds are {', '.join(ChangeKind)}, separated by commas") from None


@app.command()
def search(
    run: Run,
    server: Server,
    table: Annotated[
        list[str] | None,
        option("--table", "PATTERN", "`shop.orders`, `shop.*`, or `orders` in any schema; several are allowed."),
    ] = None,
    kind: Annotated[str, option("--kind", "KIND[,KIND]", f"Of: {', '.join(ChangeKind)}.")] = "",
    since: Annotated[
        Written | None,
        option("--since", "TIME", "Committed at this time or later.", parser=written),
    ] = None,
    until: Annotated[
        Written | None,
        option("--until", "TIME", "Committed at this time or earlier.", parser=written),
    ] = None,
    gtid: Annotated[str | None, option("--gtid", "GTID", "Only this transaction.")] = None,
    branch: Annotated[str | None, option("--branch", "ID", "Only on this branch.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Maximum number of rows.")] = SHOWN,
) -> None:
    """Search the archived binary logs for transactions, for example a DROP TABLE, and print the restore target
    before each. Requires the private key."""
    kinds = _kinds(kind)
    from backupd.model.errors import DamagedError, DestinationError

    found: list[Found] = []
    failure: DamagedError | DestinationError | None = None
    try:
        for one in run.service.binlogs.search(
            server,
            tables=table or (),
            kinds=tuple(kinds),
            since=run.moment(since),
            until=run.moment(until),
            gtid=gtid,
            branch=branch,
            limit=limit + 1,
        ):
            found.append(one)
    except (DamagedError, DestinationError) as error:
        failure = error  # reported after what was found
    run.screen.document([one.as_json() for one in found[:limit]])
    zone = run.zone
    for one in found[:limit]:
        _show_found(run.screen, server, one, zone)
    if len(found) > limit:
        run.screen.line(f"... and more: only the first {limit} are shown (--limit)", style="yellow")
    if not found and failure is None:
        run.screen.line("nothing found")
    if failure is not None:
        raise failure


_NAMED = 5
"""Tables in the command that a search proposes."""


def _show_found(screen: Screen, server: str, one: Found, zone: tzinfo | None = None) -> None:
    transaction = one.transaction
    shown = ", ".join(_change(change.kind, change.schema, change.name, change.rows) for change in one.changes)
    moment = beside(format_time(transaction.at), zone) + ("" if transaction.precise else " (to the second)")
    name = transaction.gtid or "without a GTID"
    position = f"{one.file}:{transaction.start}"
    screen.line(visible(f"{moment}  {name}  {shown or 'no table'}  {position}"), style="bold")
    if transaction.state:
        screen.line(visible(f"    part of XA transaction {transaction.xid}: {transaction.state}"))
    if transaction.statement:
        screen.line(visible(f"    {' '.join(transaction.statement.split())[:200]}"))
    names = dict.fromkeys(f"{change.schema}.{change.name or '*'}" for change in one.changes if change.schema)
    if names:
        tables = " ".join(f"--tables {quote(name)}" for name in list(names)[:_NAMED])
        more = f" (and {len(names) - _NAMED} more tables)" if len(names) > _NAMED else ""
        screen.line(
            visible(
                f"    restore before it: backupd restore {server} --to {quote(one.target)} {tables} "
                f"--into {server} --compare{more}"
            )
        )
    else:
        screen.line(visible(f"    restore before it: backupd restore {server} --to {quote(one.target)} --datadir DIR"))


def _change(kind: ChangeKind, schema: str, name: str, rows: int) -> str:
    table = ".".join(word for word in (schema, name) if word)
    count = f" of {rows} row{'s' if rows != 1 else ''}" if rows else ""
    return f"{kind}{count} {'in ' if rows else ''}{table}".rstrip()


_MOST = 40
"""Lines of a kind that are shown, the newest; --json has all."""


def timeline(run: Run, server: Server) -> None:
    """Show the recoverable points in time of a server, the gaps between them, and whether its RPO and RTO are met."""
    found = run.service.servers.timeline(server)
    run.screen.document(found.as_json())
    if not run.screen.as_json:
        show_timeline(run.screen, found, run.zone)


def show_timeline(screen: Screen, found: Timeline, zone: tzinfo | None = None) -> None:
    """``zone``: in which the newest moment is shown beside UTC."""
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
            f"{what} recoverable up to {beside(_time(found.latest), zone)}, "
            f"{format_duration((found.now - found.latest).total_seconds())} ago",
            style="bold",
        )
        if found.tables_only:
            screen.line(
                "the whole server is not recoverable: its policy takes only logical backups, which restore tables"
            )
            screen.line(
                f"-> all of its tables: backupd restore {found.server} --to latest --tables '*.*' --sql DIR, "
                "or --into SERVER"
            )
    if found.acknowledgement is not None and found.acknowledgement.holds:
        screen.line(found.acknowledgement.words(found.server))
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
                    f"{branch.parent} at {_position_text(branch.fork)}" if branch.parent else "",
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
        until = _position_text(gap.before) if gap.before else "nothing follows"
        screen.line(f"  {_position_text(gap.after)} ── {until}, {where}: {gap.reason}", style="yellow")


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
    how = "NOT KEPT" if kept is False else "kept" if kept else "not determined yet"
    return f"{text}; {name} is {_span(promised)}: {how}"


def _cut(screen: Screen, count: int) -> None:
    if count > _MOST:
        screen.line(f"... {count - _MOST} older ones; --json lists them all")


def _position_text(position: Position | None) -> str:
    if position is None:
        return "an unknown position"
    return f"{position.file}:{position.pos}" if position.file else f"GTID {position.gtid}"


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S}Z"


def _span(span: timedelta | None) -> str:
    return format_duration(span.total_seconds()) if span is not None else ""

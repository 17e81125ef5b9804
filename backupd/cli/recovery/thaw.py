"""``backupd thaw``: ask for what lies in archive classes before a restore, list what was asked for, make it faster.

Documents: with ``--to`` ``server``, ``target``, ``chain``, ``needed`` (as ``thaw`` of a plan), ``job`` and ``thaw``
(``objects``, ``bytes``, ``ready``, ``bytes_ready``, ``failed``, ``not_asked_yet``, ``expected_at``, ``ready_until``,
``destinations``; both null where everything can be read as it is); with ``--raise`` ``job`` and ``thaw``; alone a list
of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.options import TARGETS, AnyServer, Config, Json, one_of
from backupd.cli.recovery.tables import Tables
from backupd.cli.screen.output import Screen
from backupd.cli.screen.render import show_thaw
from backupd.cli.session import session
from backupd.model.job import JobRecord, JobState
from backupd.model.text import format_size, format_time

if TYPE_CHECKING:
    from backupd.model.thaw import Thawing


class TierName(StrEnum):
    """How fast."""

    BULK = "bulk"
    STANDARD = "standard"
    EXPEDITED = "expedited"


ThawTier = Annotated[
    TierName | None,
    one_of(
        TierName,
        "--thaw",
        "What lies in an archive class is thawed at this tier: bulk, standard or expedited.",
        metavar="TIER",
        show_default=False,
    ),
]


def thaw(
    context: typer.Context,
    server: AnyServer = None,
    *,
    target: Annotated[str | None, typer.Option("--to", metavar="TARGET", help=TARGETS, show_default=False)] = None,
    tier: Annotated[
        TierName | None,
        one_of(TierName, "--tier", "How fast; by default as configured. Faster costs more.", show_default=False),
    ] = None,
    days: Annotated[
        int | None,
        typer.Option(
            "--days",
            min=1,
            max=365,
            show_default=False,
            help="For how many days it stays readable; by default as configured.",
        ),
    ] = None,
    tables: Tables = None,
    raise_id: Annotated[
        str | None,
        typer.Option(
            "--raise",
            metavar="ID",
            show_default=False,
            help="Request the remaining objects of this thaw job at a faster --tier.",
        ),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Thaw what a restore to a target needs; without a target list what was asked for."""
    if raise_id is not None and (target or days or tables or server):
        raise typer.BadParameter("--raise takes --tier and nothing else")
    if raise_id is not None and tier is None:
        raise typer.BadParameter("--raise: say how fast with --tier")
    if target is None and raise_id is None and (tier or days or tables):
        raise typer.BadParameter("--tier and --days require SERVER and --to TARGET")
    if target is not None and server is None:
        raise typer.BadParameter("say which server")
    with session(context, config, as_json) as run:
        if raise_id is not None and tier is not None:
            job, thawing = run.service.restores.raise_thaw(raise_id, tier.value)
            run.screen.document({"job": job.as_json(), "thaw": thawing.as_json()})
            run.screen.line(_sentence(job, thawing))
            return
        if target is None or server is None:
            found = run.service.restores.thaws(server)
            run.screen.document([{"job": job.as_json(), "thaw": thawing.as_json()} for job, thawing in found])
            _list(run.screen, found)
            return
        chosen = tier.value if tier else None
        done = run.service.restores.thaw(server, target, tier=chosen, days=days, tables=tables or ())
        run.screen.document(done.as_json())
        for warning in done.plan.warnings:
            run.screen.warn(warning)
        if done.plan.thaw is None or done.job is None or done.thawing is None:
            run.screen.line("nothing has to be thawed: everything that this needs can be read as it is")
            return
        show_thaw(run.screen, done.plan.thaw)
        run.screen.line()
        run.screen.line(_sentence(done.job, done.thawing))
        if done.job.state is JobState.WAITING:
            run.screen.line(
                f"-> job {done.job.id}; the service looks after it, and so does `backupd thaw`. "
                f"Faster: backupd thaw --raise {done.job.id} --tier TIER"
            )


def _list(screen: Screen, found: Sequence[tuple[JobRecord, Thawing]]) -> None:
    if not found:
        screen.line("nothing was ever thawed")
        return
    rows = []
    for job, thawing in found:
        objects, size = thawing.total()
        ready = thawing.as_json()["ready"]
        rows.append(
            (
                job.id,
                job.server,
                str(job.arguments["target"]),
                str(job.arguments["tier"]),
                str(job.state),
                f"{ready}/{objects}",
                format_size(size),
                _when(job, thawing),
            )
        )
    screen.table(("ID", "SERVER", "TARGET", "TIER", "STATE", "READY", "BYTES", "WHEN"), rows, right=("READY", "BYTES"))


def _when(job: JobRecord, thawing: Thawing) -> str:
    if job.state is JobState.WAITING:
        expected = thawing.expected_at
        return f"by {format_time(expected)}" if expected else job.message
    until = thawing.ready_until
    return f"until {format_time(until)}" if until else ""


def _sentence(job: JobRecord, thawing: Thawing) -> str:
    if job.state is JobState.SUCCEEDED:
        until = thawing.ready_until
        return "everything can be read" + (f" until {format_time(until)}" if until else "")
    return job.message or f"job {job.id} is {job.state}"

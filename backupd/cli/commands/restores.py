"""``backupd thaw``: ask for what is in archive classes before a restore, list what was asked for, make it faster.

Documents: with ``--to`` ``server``, ``target``, ``chain``, ``needed`` (as ``thaw`` of a plan), ``job`` and ``thaw``
(``objects``, ``bytes``, ``ready``, ``bytes_ready``, ``failed``, ``not_asked_yet``, ``expected_at``, ``ready_until``,
``destinations``; both null where everything can be read as it is); with ``--raise`` ``job`` and ``thaw``; alone a list
of these.

Commands of the way back: plan, restore, test-restore, runbook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backupd.cli.commands.tables import (
    As,
    Compare,
    Confirm,
    Into,
    Keys,
    OutOf,
    Sql,
    Tables,
    Which,
    refuse_mixture,
    requested,
    restore_tables,
    show_table_plan,
)
from backupd.cli.output import Screen
from backupd.cli.render import show_thaw
from backupd.cli.session import TARGETS, AnyServer, BackupId, Run, Server, flag, one_of, option
from backupd.model.job import JobRecord, JobState
from backupd.model.text import format_size, format_time

if TYPE_CHECKING:
    from backupd.model.thaw import Thawing


_TIERS = ("bulk", "standard", "expedited")
"""How fast."""
ThawTier = Annotated[
    str | None,
    one_of(
        _TIERS,
        "--thaw",
        "Thaw archived objects at this tier first: bulk, standard or expedited.",
        metavar="TIER",
        show_default=False,
    ),
]


def thaw(
    run: Run,
    server: AnyServer = None,
    *,
    target: Annotated[str | None, option("--to", "TARGET", TARGETS)] = None,
    tier: Annotated[
        str | None,
        one_of(_TIERS, "--tier", "Default: as configured. Faster tiers cost more.", show_default=False),
    ] = None,
    days: Annotated[
        int | None,
        typer.Option(
            "--days",
            min=1,
            max=365,
            show_default=False,
            help="Number of days for which the thawed copies stay readable. Default: as configured.",
        ),
    ] = None,
    tables: Tables = None,
    raise_id: Annotated[
        str | None,
        option("--raise", "ID", "Request the remaining objects of this thaw job at a faster --tier."),
    ] = None,
) -> None:
    """Thaw the archived objects that a restore needs. Without --to: list thaw jobs."""
    if raise_id is not None and (target or days or tables or server):
        raise typer.BadParameter("--raise takes --tier and nothing else")
    if raise_id is not None and tier is None:
        raise typer.BadParameter("--raise requires --tier")
    if target is None and raise_id is None and (tier or days or tables):
        raise typer.BadParameter("--tier and --days require SERVER and --to TARGET")
    if target is not None and server is None:
        raise typer.BadParameter("name a server")
    if raise_id is not None and tier is not None:
        job, thawing = run.service.restores.raise_thaw(raise_id, tier)
        run.screen.document({"job": job.as_json(), "thaw": thawing.as_json()})
        run.screen.line(_sentence(job, thawing))
        return
    if target is None or server is None:
        found = run.service.restores.thaws(server)
        run.screen.document([{"job": job.as_json(), "thaw": thawing.as_json()} for job, thawing in found])
        _list(run.screen, found)
        return
    done = run.service.restores.thaw(server, run.target(target), tier=tier, days=days, tables=tables or ())
    run.screen.document(done.as_json())
    for warning in done.plan.warnings:
        run.screen.warn(warning)
    if done.plan.thaw is None or done.job is None or done.thawing is None:
        run.screen.line("no thaw is needed: all required objects are readable")
        return
    show_thaw(run.screen, done.plan.thaw)
    run.screen.line()
    run.screen.line(_sentence(done.job, done.thawing))
    if done.job.state is JobState.WAITING:
        run.screen.line(
            f"-> job {done.job.id}: the service tracks it; to show its state: backupd thaw. "
            f"To speed it up: backupd thaw --raise {done.job.id} --tier TIER"
        )


def _list(screen: Screen, found: Sequence[tuple[JobRecord, Thawing]]) -> None:
    if not found:
        screen.line("no thaw jobs")
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
        return "all objects are readable" + (f" until {format_time(until)}" if until else "")
    return job.message or f"job {job.id} is {job.state}"


Target = Annotated[str, option("--to", "TARGET", TARGETS)]


def parse_datadir(text: str) -> Path:
    """A folder. Raises BadParameter for "", which Path would take for the current folder."""
    if not text:
        raise typer.BadParameter("an empty path names no folder")
    return Path(text)


_MODES = ("new-server", "replica", "galera")
"""What the restored server becomes."""
Mode = Annotated[
    str,
    one_of(
        _MODES,
        "--mode",
        "new-server: clears the replication settings of the source; replica: keeps them, or with --source makes the "
        "copy a replica of that server; galera: a node that comes back to its cluster by IST (with --cluster; --start "
        "lets it join).",
    ),
]
Exclude = Annotated[
    list[str] | None,
    option(
        "--exclude-gtid",
        "GTID",
        "Skip this transaction during replay. May be repeated. Refused if later transactions depend on it.",
    ),
]


ReplayWith = Annotated[
    str | None,
    one_of(
        ("applier", "pipe"),
        "--replay-with",
        "applier: the server's replication applier, in parallel; pipe: one client session, slow. Default: applier, if "
        "it is usable.",
        show_default=False,
    ),
]


AcceptOlder = Annotated[
    bool,
    flag(
        "--accept-older",
        "With --to latest: accept the newest recoverable point in time even if later data is known to exist.",
    ),
]

AcceptInexact = Annotated[
    bool,
    flag(
        "--accept-inexact",
        "Replay even if statements use temporary tables that were open at the backup position. Rows may be "
        "missing or differ from the source.",
    ),
]


Cluster = Annotated[
    str | None,
    option(
        "--cluster",
        "NAME",
        "With --mode galera: the node's cluster: a configured group of servers, or the wsrep_cluster_name of "
        "configured servers.",
    ),
]

Node = Annotated[
    str | None,
    option(
        "--node",
        "MEMBER",
        "With --mode galera and a group of servers: the member that comes back. Default: the only one that does not "
        "run.",
    ),
]

AllowSst = Annotated[
    bool,
    flag(
        "--allow-sst",
        "With --mode galera --start: start the node even if no member can send what it lacks by IST. It then takes a "
        "full copy of a donor (SST), and the command ends with 1.",
    ),
]

ReplicateFrom = Annotated[
    str | None,
    option(
        "--source",
        "SERVER|HOST:PORT",
        "With --mode replica: make the copy a replica of this server, by its name in the configuration or its address. "
        "backupd sets the position; with --start it also starts replication and waits until the replica has caught up.",
    ),
]
Delay = Annotated[
    str | None,
    option("--delay", "DURATION", "With --source: a delayed replica, which stays behind for this long (1h)."),
]
ServerId = Annotated[
    int | None,
    option(
        "--server-id",
        "N",
        "With --source: the server_id of the replica. Default: one that no event and no server of this source has.",
        min=1,
        max=2**32 - 1,
    ),
]


def plan(
    run: Run,
    server: Server,
    *,
    target: Annotated[str, option("--to", "TARGET", f"{TARGETS}. Default: latest.")] = "latest",
    datadir: Annotated[
        Path | None,
        option("--datadir", "DIR", "Also check that the restored data fits into this directory.", parser=parse_datadir),
    ] = None,
    tables: Tables = None,
    rename: As = None,
    source: OutOf = None,
    exclude: Exclude = None,
    replay_with: ReplayWith = None,
    thaw: ThawTier = None,
    accept_older: AcceptOlder = False,
    accept_inexact: AcceptInexact = False,
    mode: Mode = _MODES[0],
    cluster: Cluster = None,
    node: Node = None,
    replicate_from: ReplicateFrom = None,
    delay: Delay = None,
    server_id: ServerId = None,
) -> None:
    """Show what a restore would do, how many bytes it moves and how long it takes. Moves nothing."""
    request = requested(
        server,
        target,
        datadir=datadir,
        cluster=cluster,
        node=node,
        tables=tables,
        rename=rename,
        source=source,
        exclude=exclude,
        replay_with=replay_with,
        thaw=thaw,
        accept_older=accept_older,
        accept_inexact=accept_inexact,
        mode=mode,
        replicate_from=replicate_from,
        delay=delay,
        server_id=server_id,
    )
    refuse_mixture(request)
    request = replace(request, target=run.target(request.target))
    if request.of_tables:
        chosen = run.service.restores.plan_tables(request)
        run.screen.document(chosen.as_json())
        show_table_plan(run.screen, chosen, run.zone)
        return
    made = run.service.restores.plan(request)
    run.screen.document(made.as_json())
    from backupd.cli.render import show_plan

    is_asked = not run.screen.as_json and made.until is None
    as_of = run.service.listings.backup(made.backup_id).finished_at if is_asked else None
    show_plan(run.screen, made, run.zone, as_of)


def restore(
    run: Run,
    server: Server,
    *,
    target: Target,
    datadir: Annotated[
        Path | None,
        option("--datadir", "DIR", "Target data directory: empty, or not existing yet.", parser=parse_datadir),
    ] = None,
    start: Annotated[bool, flag("--start", "Start a database server on it afterwards.")] = False,
    mode: Mode = _MODES[0],
    cluster: Cluster = None,
    allow_sst: AllowSst = False,
    node: Node = None,
    exclude: Exclude = None,
    replay_with: ReplayWith = None,
    tables: Tables = None,
    into: Into = None,
    rename: As = None,
    sql: Sql = None,
    confirm: Confirm = None,
    compare: Compare = False,
    keys: Keys = None,
    triggers: Which = None,
    source: OutOf = None,
    thaw: ThawTier = None,
    accept_older: AcceptOlder = False,
    accept_inexact: AcceptInexact = False,
    replicate_from: ReplicateFrom = None,
    delay: Delay = None,
    server_id: ServerId = None,
) -> None:
    """Restore into an empty data directory, or tables into a running server; a repeated call continues an interrupted
    one."""
    request = requested(
        server,
        target,
        mode=mode,
        cluster=cluster,
        allow_sst=allow_sst,
        node=node,
        datadir=datadir,
        start=start,
        tables=tables,
        into=into,
        rename=rename,
        sql=sql,
        compare=compare,
        triggers=triggers,
        source=source,
        exclude=exclude,
        replay_with=replay_with,
        thaw=thaw,
        accept_older=accept_older,
        accept_inexact=accept_inexact,
        replicate_from=replicate_from,
        delay=delay,
        server_id=server_id,
    )
    said = {"mode": mode != _MODES[0], "confirm": confirm, "keys": keys, "triggers": triggers}
    refuse_mixture(request, {name for name, value in said.items() if value not in (None, False)}, somewhere=True)
    request = replace(request, target=run.target(request.target))
    if request.of_tables:
        restore_tables(run, request, confirm=confirm, keys=keys)
        return
    with run.reporting() as report:
        outcome = run.service.foreground.restore(request, report)
    document = outcome.as_json()
    ending = "was made" if outcome.is_good else "finished with errors"
    run.screen.done = f"the restore into {datadir} {ending}"
    run.screen.document(document)
    from backupd.cli.render import show_restore

    show_restore(run.screen, document)
    run.ends(well=outcome.is_good)


def prove(
    run: Run,
    server: Server,
    *,
    target: Annotated[str, typer.Option("--to", metavar="TARGET|random", help=f"{TARGETS} | random")] = "latest",
) -> None:
    """Restore to a temporary server, check the data, and record the proof."""
    with run.reporting() as report:
        proof = run.service.foreground.test_restore(server, run.target(target), report)
    run.screen.document(proof.as_json())
    from backupd.cli.render import show_proof

    show_proof(run.screen, proof)
    run.ends(well=proof.is_current)


def runbook(run: Run, backup_id: BackupId) -> None:
    """Print how to restore a backup by hand, with gpg, zstd and the database's own tools."""
    text = run.service.backups.runbook(backup_id)
    run.screen.document({"id": backup_id, "runbook": text})
    run.screen.text(text)

"""``backupd cluster``: the Galera cluster of a server, and how a restored node would come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backupd.cli.session import Run, Server
from backupd.model.text import format_duration, format_size, format_time

if TYPE_CHECKING:
    from backupd.app.views.clusters import Cluster
    from backupd.cli.output import Screen
    from backupd.recovery.ist import Donor


def cluster(run: Run, server: Server) -> None:
    """Show the Galera cluster that a server is a node of, and for each backup whether a node that is restored from it
    comes back by IST (only what it lacks) or by SST (a donor copies all its data)."""
    found = run.service.servers.cluster(server)
    run.screen.document(found.as_json())
    if not run.screen.as_json:
        show_cluster(run.screen, found)


def show_cluster(screen: Screen, found: Cluster) -> None:
    screen.line(f"cluster {found.name} ({found.uuid}), {found.size} nodes", style="bold")
    for text in found.troubles:
        screen.line(f"! {text}", style="yellow")
    screen.line()
    screen.table(
        ("SERVER", "NODE", "STATE", "LAST SEQNO", "GCACHE FROM", "GCACHE", "WRITTEN", "HOLDS"),
        [_row(one) for one in found.donors],
        right=("LAST SEQNO", "GCACHE FROM", "GCACHE", "WRITTEN", "HOLDS"),
    )
    screen.line()
    if not found.backups:
        screen.line("no backup of a node of this cluster knows its position in it", style="yellow")
    for one in found.backups:
        style = "" if one.forecast.is_ist else "yellow"
        screen.line(f"{one.backup} ({one.server}): {one.words}", style=style)
    if found.advice:
        screen.line(f"-> {found.advice}")
    for past in found.rejoins:
        came = past.came or "not known yet"
        error = f", {past.error:+.0f} s against the prediction" if past.error is not None else ""
        screen.line(f"{past.node} joined at {format_time(past.began_at)}: {past.forecast} predicted, {came}{error}")


def _row(donor: Donor) -> tuple[str, ...]:
    one = donor.sample
    return (
        one.server,
        one.node,
        one.state if one.status == "Primary" else f"{one.state} ({one.status})",
        str(one.last),
        "-" if one.downto is None else str(one.downto),
        format_size(donor.room) if donor.room else "?",
        "?" if donor.bytes is None else f"{format_size(donor.bytes)}/s",
        "?" if donor.window is None else format_duration(donor.window.total_seconds()),
    )

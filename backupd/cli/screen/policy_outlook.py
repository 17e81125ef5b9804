"""An explained policy on the screen."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

from backupd.cli.screen.output import Screen
from backupd.model.text import format_size

if TYPE_CHECKING:
    from backupd.app.views.policy_explanation import Explanation
    from backupd.retention.decisions import Decision, Decisions

_MOST_RUNS = 60


def show_explanation(screen: Screen, found: Explanation) -> None:
    zone = ZoneInfo(found.zone)
    whom = f" for {found.server}" if found.server else ""
    screen.line(f"{found.policy}{whom}", style="bold")
    for sentence in found.sentences:
        screen.line(f"  {sentence}")
    for text in found.warnings:
        screen.line(f"  warning: {text}", style="yellow")
    screen.line()
    screen.line(f"Runs from {_time(found.at, zone)} to {_time(found.until, zone)}, in {found.zone}:", style="bold")
    shown = found.runs[:_MOST_RUNS]
    screen.table(["start", "leg"], ([_time(run.at, zone), run.leg] for run in shown))
    if len(found.runs) > len(shown):
        screen.line(f"... and {len(found.runs) - len(shown)} more; --json lists them all")
    for decisions in found.today:
        screen.line()
        screen.line(
            f"{decisions.destination} today: {len(decisions.kept)} stay, {len(decisions.expired)} would expire "
            f"({format_size(decisions.bytes_expired)})",
            style="bold",
        )
        _decisions(screen, decisions.expired, zone)
        for text in decisions.warnings:
            screen.line(f"  warning: {text}", style="yellow")
    for decisions in found.ahead:
        screen.line()
        screen.line(
            f"{decisions.destination} after these runs: {len(decisions.kept)} backups{_span(decisions, zone)}",
            style="bold",
        )
        _decisions(screen, decisions.kept, zone)
    if found.forecasts:
        screen.line()
    for one in found.forecasts:
        screen.line(f"{one.destination}: {one.text}", style="yellow" if one.is_soon else "")


def _decisions(screen: Screen, decisions: Iterable[Decision], zone: ZoneInfo) -> None:
    rows = [
        [
            decision.backup.id,
            str(decision.backup.kind),
            _time(decision.backup.finished_at, zone),
            "; ".join(decision.reasons),
        ]
        for decision in decisions
    ]
    if rows:
        screen.table(["backup", "kind", "finished", "why"], rows)


def _span(decisions: Decisions, zone: ZoneInfo) -> str:
    moments = [decision.backup.finished_at for decision in decisions.kept]
    return f", the oldest of {_time(min(moments), zone)}" if moments else ""


def _time(moment: datetime, zone: ZoneInfo) -> str:
    return f"{moment.astimezone(zone):%a %Y-%m-%d %H:%M}"

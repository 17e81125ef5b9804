"""The regular letter: what is recoverable, when that was proved, and what is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from backupd.alerts.letter import Block, Grid, Letter
from backupd.alerts.rules import title_of
from backupd.alerts.wording import Site
from backupd.model.clock import format_time
from backupd.model.incident import Incident
from backupd.model.units import format_duration

_MOST = 1000
"""Servers that one report names."""


@dataclass(frozen=True, slots=True)
class ServerLine:
    """One server. ``status``: good, warning or bad, with ``why``; ``latest``: the newest moment that could be restored;
    ``proof``: how the last proof ended. ``tables_only``: only dumps are taken of it."""

    server: str
    status: str
    why: str
    hint: str
    earliest: datetime | None
    latest: datetime | None
    proof: str
    proved_at: datetime | None
    tables_only: bool = False


@dataclass(frozen=True, slots=True)
class PlaceLine:
    """One destination; ``forecast``: when it will be full."""

    name: str
    status: str
    why: str
    forecast: str


def report(
    servers: Sequence[ServerLine],
    places: Sequence[PlaceLine],
    incidents: Sequence[Incident],
    site: Site,
    now: datetime,
    noted: Sequence[tuple[str, str]] = (),
) -> Letter:
    """``noted``: what to keep outside of the store, to compare with: (what it is, what it says)."""
    rank = {"bad": 0, "warning": 1}
    ordered = sorted(servers, key=lambda one: (rank.get(one.status, 2), one.server))
    bad = sum(one.status == "bad" for one in servers)
    doubtful = sum(one.status == "warning" for one in servers)
    good = len(servers) - bad - doubtful
    summary = ", ".join(
        filter(
            None,
            [
                f"{bad} bad" if bad else "",
                f"{doubtful} with warnings" if doubtful else "",
                f"{good} good" if good or not servers else "",
            ],
        )
    )
    word = "BAD" if bad else "WARNING" if doubtful or incidents else "GOOD"
    wrong = [
        Block(f"{one.server}: {one.why or one.status}", "error" if one.status == "bad" else "warning", hint=one.hint)
        for one in ordered
        if one.status != "good"
    ]
    rows = tuple(
        (
            one.server,
            one.status + (", tables only" if one.tables_only else ""),
            _moment(one.earliest),
            _moment(one.latest),
            _age(one.latest, now),
            f"{one.proof} {_age(one.proved_at, now)} ago" if one.proved_at else "never",
        )
        for one in ordered[:_MOST]
    )
    grids = (
        [Grid("What can be restored", ("SERVER", "STATUS", "FROM", "UNTIL", "AGE", "LAST PROOF"), rows)] if rows else []
    )
    if incidents:
        grids.append(
            Grid(
                "What is open",
                ("SINCE", "WHAT", "ACKNOWLEDGED BY"),
                tuple(
                    (_moment(one.opened_at), title_of(one), one.acknowledged_by or "nobody")
                    for one in incidents[:_MOST]
                ),
            )
        )
    if places:
        grids.append(
            Grid(
                "Destinations",
                ("DESTINATION", "STATUS", "WHAT"),
                tuple((one.name, one.status, one.why or one.forecast) for one in places),
            )
        )
    if noted:
        grids.append(Grid("Keep this: what is stored can be compared with it", ("WHAT", "VALUE"), tuple(noted)))
    return Letter(
        f"[backupd] {word} report of {site.host}: {len(servers)} servers, {summary}",
        intro=f"{len(servers)} servers: {summary}. {len(incidents)} incidents are open.",
        blocks=tuple(wrong[:25]),
        grids=tuple(grids),
        link=site.page(""),
        footer=site.footer,
    )


def _moment(moment: datetime | None) -> str:
    return format_time(moment.replace(microsecond=0)) if moment else "nothing"


def _age(moment: datetime | None, now: datetime) -> str:
    return format_duration(max((now - moment).total_seconds(), 0.0)) if moment else ""

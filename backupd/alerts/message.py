"""A letter to people: once as values, shown as text and as HTML. Nothing in it can be taken for markup or a header.

What messages say: of one incident, of several at once, that there are too many for messages, and the regular report
of what is recoverable, when that was proved, and what is open.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from textwrap import indent
from types import MappingProxyType
from typing import TYPE_CHECKING

from backupd.alerts.ledger import Turn, quiet_after
from backupd.alerts.rules import title_of
from backupd.model.event import Incident, MessageKind, Severity
from backupd.model.text import format_duration, format_time
from backupd.process.output import Redactor

if TYPE_CHECKING:
    from jinja2 import Environment

_LONGEST = 4000
"""Characters of one text: a mail is no log."""
_LINES = 60
_LINE = 600
_SUBJECT = 160


@dataclass(frozen=True, slots=True)
class Block:
    """One thing that is reported. ``tone``: ``error``, ``warning``, ``good`` or empty; ``facts``: pairs of label and
    value."""

    heading: str
    tone: str = ""
    message: str = ""
    hint: str = ""
    detail: str = ""
    facts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows under headings; the first cell of a row names it."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Letter:
    """``link``: the page that shows more, empty where there is none; ``footer``: who writes."""

    subject: str
    intro: str = ""
    blocks: tuple[Block, ...] = ()
    grids: tuple[Grid, ...] = ()
    link: str = ""
    footer: str = ""

    @property
    def subject_line(self) -> str:
        """One line, however many the names in it have."""
        return one_line(self.subject, _SUBJECT)

    def as_text(self) -> str:
        """The body as plain text."""
        parts = [clean(self.intro)] if self.intro else []
        parts += [_block_text(block) for block in self.blocks]
        parts += [_grid_text(grid) for grid in self.grids]
        if self.link:
            parts.append(f"More: {one_line(self.link, _LONGEST)}")
        return "\n\n".join([*parts, f"-- \n{clean(self.footer)}"]) + "\n"

    def as_html(self) -> str:
        """The body as HTML; every value is escaped."""
        return _pages().get_template("letter.html").render(letter=self)


def one_line(text: str, longest: int) -> str:
    """``text`` on one line, without secrets, and cut where it is too long."""
    line = " ".join("".join(_visible(char) for char in clean(text)).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def clean(text: str) -> str:
    """``text`` without secrets and table data, control characters, and more than anybody reads."""
    redactor = Redactor()
    lines = [redactor.line(line[:_LINE]) for line in text.splitlines()]
    if len(lines) > _LINES:
        lines = [*lines[:_LINES], f"... and {len(lines) - _LINES} more lines"]
    shown = "\n".join("".join(_visible(char) for char in line).rstrip() for line in lines)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]} ..."


def _visible(char: str) -> str:
    """Control characters, marks that turn the direction of writing and lone surrogates become something harmless."""
    category = unicodedata.category(char)
    if category == "Cs":
        return "�"
    return " " if category in {"Cc", "Cf", "Zl", "Zp"} else char


def _block_text(block: Block) -> str:
    parts = [one_line(block.heading, _SUBJECT), "=" * min(len(one_line(block.heading, _SUBJECT)), 78)]
    if block.message:
        parts += ["", clean(block.message)]
    if block.hint:
        parts += ["", "What to do next:", indent(clean(block.hint), "    ")]
    if block.detail:
        parts += ["", "What is known:", indent(clean(block.detail), "    ")]
    if block.facts:
        parts += ["", *(f"{label}: {one_line(value, _LONGEST)}" for label, value in block.facts)]
    return "\n".join(parts)


def _grid_text(grid: Grid) -> str:
    rows = [tuple(one_line(cell, 60) for cell in row) for row in (grid.columns, *grid.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(grid.columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([one_line(grid.heading, _SUBJECT), "", *lines])


@cache
def _pages() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes its time to load

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    made.filters.update(clean=clean, line=one_line)
    made.globals.update(longest=_LONGEST, subject=_SUBJECT)
    return made


SHOWN = 25
"""Incidents that one letter shows in full; the others are counted."""
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Site:
    """Who writes: ``host``, and ``url`` of the web page, empty without one."""

    host: str
    url: str = ""

    @property
    def footer(self) -> str:
        """The last lines of each message: who sends it, and from where."""
        return f"backupd on {self.host}. All times are UTC."

    def page(self, path: str) -> str:
        """The address of a page of the web interface, "" where none is configured."""
        return f"{self.url.rstrip('/')}/{path}" if self.url else ""


def letter_about(turns: Sequence[Turn], site: Site, now: datetime) -> Letter:
    """``turns`` is not empty; the gravest come first."""
    ordered = sorted(turns, key=_rank)
    if len(ordered) == 1:
        turn = ordered[0]
        return Letter(
            f"[backupd] {_word(turn)} {title_of(turn.incident)}",
            blocks=(_block(turn, now),),
            link=_link(turn.incident, site),
            footer=site.footer,
        )
    servers = sorted({turn.incident.server for turn in ordered})
    where = (servers[0] or site.host) if len(servers) == 1 else f"{len(servers)} servers"
    subjects = {turn.incident.subject for turn in ordered}
    if len(servers) > 1 and len(subjects) == 1 and "" not in subjects:
        where = f"{min(subjects)}, {where}"
    counted = _counted(ordered)
    named = "; ".join(dict.fromkeys(_without_server(turn.incident) for turn in ordered[:_NAMED]))
    more = f"and {len(ordered) - SHOWN} more: `backupd alerts` lists them" if len(ordered) > SHOWN else ""
    return Letter(
        f"[backupd] {_word(ordered[0])} {where}: {counted}: {named}",
        intro=f"This message combines {counted}.\n{more}".strip(),
        blocks=tuple(_block(turn, now) for turn in ordered[:SHOWN]),
        link=site.page("alerts"),
        footer=site.footer,
    )


def letter_of_silence(turns: Sequence[Turn], site: Site, now: datetime, *, limit: int, until: datetime) -> Letter:
    """That there were too many letters: the next one comes when that is over."""
    return replace(
        letter_about(turns, site, now),
        subject=f"[backupd] TOO MANY ALERTS on {site.host}: the next mail comes at {until:%H:%M} UTC",
        intro=f"Alert limit reached: more than {limit} alerts within one hour. backupd suppresses alerts until "
        f"{format_time(until)} and then sends one summary. To list the open incidents: backupd alerts",
        link=site.page("alerts"),
    )


def letter_after_silence(
    incidents: Sequence[Incident],
    site: Site,
    now: datetime,
    since: datetime,
    unwatched: Mapping[str, str] = MappingProxyType({}),
) -> Letter:
    """What has happened while no letters were sent. ``unwatched``: why nobody looks after one any more, by its id."""
    turns = [
        Turn(
            MessageKind.ALERT if one.is_open or one.settles else MessageKind.RECOVERY,
            one,
            unwatched.get(one.id, ""),
            well=one.id not in unwatched,
        )
        for one in incidents
    ]
    ordered = sorted(turns, key=_rank)
    more = f"\nand {len(ordered) - SHOWN} more: `backupd alerts --all` lists them" if len(ordered) > SHOWN else ""
    return Letter(
        f"[backupd] {_word(ordered[0])} summary since {since:%H:%M} UTC on {site.host}: {_counted(ordered)}",
        intro=f"No alerts were sent since {format_time(since)}, because the alert limit was reached.{more}",
        blocks=tuple(_block(turn, now) for turn in ordered[:SHOWN]),
        link=site.page("alerts"),
        footer=site.footer,
    )


def letter_of_test(site: Site, now: datetime, by: str) -> Letter:
    """The message of `backupd alerts test`."""
    return Letter(
        f"[backupd] TEST from {site.host}",
        intro=f"Test message requested by {by} at {format_time(now)}. backupd sends alerts through this channel.",
        blocks=(
            Block(
                "Nothing is wrong",
                "good",
                "Here an alert describes what happened.",
                hint="Here it names the next command.",
            ),
        ),
        link=site.page("alerts"),
        footer=site.footer,
    )


def _rank(turn: Turn) -> tuple[int, int, str]:
    order = {MessageKind.ALERT: 0, MessageKind.REMINDER: 1, MessageKind.RECOVERY: 2}
    return order.get(turn.kind, 3), turn.incident.severity is not Severity.ERROR, turn.incident.id


def _word(turn: Turn) -> str:
    if turn.kind is MessageKind.RECOVERY:
        return "RECOVERED" if turn.well else "NOT WATCHED"
    if turn.kind is MessageKind.REMINDER:
        return f"STILL {str(turn.incident.severity).upper()}"
    return "INFO" if turn.incident.severity is Severity.INFO else str(turn.incident.severity).upper()


def _counted(turns: Sequence[Turn]) -> str:
    wrong = sum(turn.kind is not MessageKind.RECOVERY for turn in turns)
    well = sum(turn.kind is MessageKind.RECOVERY and turn.well for turn in turns)
    left = len(turns) - wrong - well
    return " and ".join(
        filter(
            None,
            [
                f"{wrong} {'alert' if wrong == 1 else 'alerts'}" if wrong else "",
                f"{well} recovered" if well else "",
                f"{left} no longer monitored" if left else "",
            ],
        )
    )


def _without_server(incident: Incident) -> str:
    return title_of(incident).removeprefix(f"{incident.server}: ")


def _block(turn: Turn, now: datetime) -> Block:
    incident = turn.incident
    over = turn.kind is MessageKind.RECOVERY
    facts = [("since", format_time(incident.opened_at))]
    if incident.closed_at is not None:
        facts += [("over", format_time(incident.closed_at)), ("took", _span(incident.closed_at - incident.opened_at))]
    elif turn.kind is MessageKind.REMINDER:
        facts.append(("open for", _span(now - incident.opened_at)))
    if incident.count > 1:
        facts.append(("occurrences", f"{incident.count} times, last at {format_time(incident.last_at)}"))
    if incident.job_id:
        facts.append(("job", f"{incident.job_id} (backupd jobs log {incident.job_id})"))
    if not over and turn.often:
        quiet = _span(quiet_after(turn.often))
        facts.append(
            ("flapping", f"{turn.often} times within one day; backupd closes it after {quiet} without a failure")
        )
    if not over and incident.next_reminder is not None:
        enough = f"backupd alerts acknowledge {incident.id}"
        facts.append(("next reminder", f"{format_time(incident.next_reminder)}; to stop reminders: {enough}"))
    if over:
        said = turn.news or "the incident is closed"
        return Block(
            f"{_word(turn)}: {title_of(incident)}",
            "good" if turn.well else "warning",
            said,
            detail=f"original alert: {incident.message}",
            facts=tuple(facts),
        )
    return Block(
        f"{_word(turn)}: {title_of(incident)}",
        str(incident.severity),
        incident.message,
        incident.hint or _next_step(incident),
        incident.detail,
        tuple(facts),
    )


def _next_step(incident: Incident) -> str:
    """Where whoever recorded it had none."""
    steps = [f"to see its log: backupd jobs log {incident.job_id}"] if incident.job_id else []
    return "; ".join([*steps, f"to find the cause: backupd check {incident.server}".rstrip()])


def _span(time: timedelta) -> str:
    return format_duration(max(time.total_seconds(), 0.0))


def _link(incident: Incident, site: Site) -> str:
    return site.page(f"jobs/{incident.job_id}" if incident.job_id else "alerts")


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
class DestinationLine:
    """One destination; ``forecast``: when it will be full."""

    name: str
    status: str
    why: str
    forecast: str


def report(
    servers: Sequence[ServerLine],
    destinations: Sequence[DestinationLine],
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
        [Grid("Recoverable points in time", ("SERVER", "STATUS", "FROM", "UNTIL", "AGE", "LAST PROOF"), rows)]
        if rows
        else []
    )
    if incidents:
        grids.append(
            Grid(
                "Open incidents",
                ("SINCE", "WHAT", "ACKNOWLEDGED BY"),
                tuple(
                    (_moment(one.opened_at), title_of(one), one.acknowledged_by or "nobody")
                    for one in incidents[:_MOST]
                ),
            )
        )
    if destinations:
        grids.append(
            Grid(
                "Destinations",
                ("DESTINATION", "STATUS", "WHAT"),
                tuple((one.name, one.status, one.why or one.forecast) for one in destinations),
            )
        )
    if noted:
        grids.append(Grid("Keep this report, to detect a rollback of the stored data", ("WHAT", "VALUE"), tuple(noted)))
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

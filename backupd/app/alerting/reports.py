"""The regular report: when it is due, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from backupd.alerts.message import Letter
from backupd.alerts.wording import PlaceLine, ServerLine, report
from backupd.app.alerting.channels import site_of, working, written
from backupd.app.context.trust import recovery_page, signed_servers
from backupd.app.context.wiring import Wiring
from backupd.app.metacopies.signed_heads import noted
from backupd.app.schedule.calendar import next_runs
from backupd.app.views.overview import DestinationView, ServerOverview, overview, places
from backupd.model.errors import BackupdError
from backupd.model.event import MessageKind
from backupd.model.text import format_time

REPORTED = "report"
"""A cursor: the moment, in seconds, up to which every report that was due was made."""


def report_if_due(wiring: Wiring, now: datetime) -> bool:
    """Queue one where one is due; True when it did. However many were missed, one stands for them. Raises
    CatalogError."""
    settings = wiring.settings
    wanted = settings.alerts.report
    if wanted is None:
        return False
    handled = wiring.catalog.cursors.all().get(REPORTED)
    if handled is None or handled > now.timestamp() + 1:  # new, or the clock was ahead then
        wiring.catalog.cursors.move({REPORTED: int(now.timestamp())})
        return False
    due = next(
        iter(
            next_runs(wanted.schedule, settings.configuration.timezone, datetime.fromtimestamp(handled, UTC), count=1)
        ),
        None,
    )
    if due is None or due > now:
        return False
    channels, _trouble = working(settings)  # the trouble is told by who looks after it
    messages = written(settings, channels, report_now(wiring, now), MessageKind.REPORT, now)
    wiring.catalog.incidents.record((), messages, {REPORTED: int(now.timestamp())})
    return True


def report_now(wiring: Wiring, now: datetime) -> Letter:
    """Raises CatalogError."""
    return report(
        [_server(one) for one in overview(wiring, now)],
        [_place(one) for one in places(wiring, now)],
        wiring.catalog.incidents.open(),
        site_of(wiring.settings),
        now,
        tuple(_noted(wiring)),
    )


def _noted(wiring: Wiring) -> Iterator[tuple[str, str]]:
    """What would show that somebody has turned back or replaced what is stored."""
    for newest in wiring.catalog.audit.list(limit=1):
        yield "audit", f"{newest.number} entries, the newest with digest {newest.digest}"
    for server, head in sorted(noted(wiring).items()):
        yield f"head of {server}", f"counter {head.counter}, of {format_time(head.at)}"
        if head.runbook:
            yield f"runbook of {server}", head.runbook
    if signed_servers(wiring.settings):
        try:
            page = recovery_page(wiring.settings)
        except BackupdError as error:
            yield "signing key", f"not known: {error.message}"
        else:
            yield "signing key", page.signing_key
            yield "before you read RECOVER.md", page.command


def _server(one: ServerOverview) -> ServerLine:
    why = next(iter(one.reasons), None)
    proof = one.last_proof
    return ServerLine(
        one.name,
        str(one.status),
        why.text if why else "",
        why.hint if why else "",
        one.first,
        one.latest,
        proof.outcome if proof else "",
        proof.finished_at if proof else None,
        one.tables_only,
    )


def _place(one: DestinationView) -> PlaceLine:
    why = next(iter(one.reasons), None)
    return PlaceLine(one.name, str(one.status), why.text if why else "", one.forecast)

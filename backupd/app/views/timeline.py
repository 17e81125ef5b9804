"""The timeline of one server: which moments are recoverable, from what the catalog holds. Reads no destination."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from backupd.app.binlogs.status import acknowledged, one_line, stream_troubles
from backupd.app.binlogs.stream_report import behind_limit
from backupd.app.binlogs.targets import history
from backupd.app.context.server_identity import kept_apart
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.app.restores.usable_backups import measured_rates, not_believed, within_reach
from backupd.model.backup_record import BackupRecord
from backupd.model.errors import NotFoundError, RefusedError
from backupd.model.text import format_time, parse_time
from backupd.recovery.timeline import Objectives, Timeline
from backupd.recovery.timeline import timeline as made
from backupd.recovery.windows import nobody_knows
from policies.lint import streams
from restore.planning.planner import Preferences, make_plan
from restore.planning.target import Latest, Target


def timeline(wiring: Wiring, server_name: str, listed: Sequence[BackupRecord] | None = None) -> Timeline:
    """``listed``: its backups, where somebody has read them already. Raises NotFoundError for a server that is not
    configured."""
    server = wiring.settings.server(server_name)
    promised = server.policy.objectives if server.usable else None  # a broken policy must not hide what is there
    records = counted(wiring, wiring.catalog.backups.list(server_name) if listed is None else listed)
    archived = history(wiring, server, exact=False)
    now = wiring.clock()
    preferences = Preferences(
        destinations=server.preferred, rates=measured_rates(wiring, server_name), start=True, accept_older=True
    )
    try:
        plan = make_plan(server_name, records, Target(Latest()), preferences, now=now, history=archived)
    except (NotFoundError, RefusedError):
        plan = None  # the windows say why
    said = wiring.catalog.binlogs.stream_state(server_name)
    is_streamed = server.usable and streams(server.policy)
    return made(
        server_name,
        records,
        archived.branches if archived else (),
        archived.runs if archived else (),
        archived.gaps if archived else (),
        now=now,
        proofs=wiring.catalog.proofs.list(server_name, limit=1),
        predicted_rto=timedelta(seconds=plan.seconds) if plan else None,
        objectives=Objectives(promised.rpo, promised.rto) if promised else None,
        troubles=destination_troubles(server, said[0] if said else None, now),
        doubts=(*kept_apart(wiring, server_name), *not_believed(wiring, server_name)),
        warnings=stream_troubles(server_name, said, now) if is_streamed else (),
        destinations=server.others if server.usable else (),
        by_dumps=by_dumps(server),
        repeats=archived.resolver.repeats if archived else nobody_knows,
        first_due=None if records or not server.usable else _first_due(wiring, server_name, now),
        acknowledgement=acknowledged(said, now) if is_streamed else None,
    )


def by_dumps(server: ServerSettings) -> bool:
    """Does its policy take dumps and nothing else?"""
    return server.usable and server.policy.physical is None and server.policy.logical is not None


def counted(wiring: Wiring, listed: Iterable[BackupRecord]) -> list[BackupRecord]:
    """The backups that a timeline is made of."""
    return [one for one in within_reach(wiring, listed) if not one.apart]


def _first_due(wiring: Wiring, server: str, now: datetime) -> datetime | None:
    from backupd.app.views.objectives import first_to_come  # asks the calendar, of a server without backups

    return first_to_come(wiring, server, now)


def destination_troubles(server: ServerSettings, row: Mapping[str, Any] | None, now: datetime) -> Mapping[str, str]:
    """By destination, of those that there is something to report of. ``row``: what the stream said of itself last."""
    found: dict[str, str] = {}
    if row is None or not server.usable or not streams(server.policy):
        return found
    for name, one in row.get("destinations", {}).items():
        since = parse_time(one["behind_since"]) if one.get("behind_since") else None
        late = f"lacks binary logs since {format_time(since)}" if since else ""
        if error := one_line(one.get("error") or ""):
            found[name] = f"{late}: {error}" if late else error
        elif since is not None and now - since >= behind_limit(server.policy):
            found[name] = late
    return found

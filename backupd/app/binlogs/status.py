"""`backupd binlog status`: what is streamed, what each destination holds, and how far it is behind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from backupd.app.binlogs.stream_report import SILENT, STOPPED
from backupd.app.context.server_identity import own_branches
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring, gathered, owner_is_alive
from backupd.binlog.acknowledgement import LONGEST_GAP, Evidence
from backupd.binlog.stream_status import StreamState
from backupd.model.acknowledged import Acknowledged
from backupd.model.binlog import Branch, Run
from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.errors import BackupdError
from backupd.model.text import format_time, parse_time
from backupd.recovery.runs import file_position, last_of, same_state
from policies.lint import streams
from restore.planning.target import LIMIT, Stream

DAY = timedelta(days=1)
NOT_RUNNING = "not running"
OFF = "off"
_ASKED = 3.0
"""Seconds in which a server has to answer a plan."""


@dataclass(frozen=True, slots=True)
class Held(Document):
    """What one destination has of a server's binary logs. ``since``, ``latest``: both ends of the newest run;
    ``worst``: the most seconds that it was behind within a day; ``waiting``: bytes in the spool."""

    destination: str = field(metadata=json_key("name"))
    runs: int
    segments: int
    bytes: int
    stored: int = field(metadata=json_key("bytes_stored"))
    since: str = field(metadata=json_key("from", or_null=True))
    latest: str = field(metadata=json_key(or_null=True))
    confirmed_at: datetime | None
    behind: float | None = field(metadata=json_key("rpo_seconds", digits=3))
    worst: float | None = field(metadata=json_key("worst_rpo_seconds_of_a_day", digits=3))
    waiting: int | None = field(metadata=json_key("bytes_behind"))
    error: str


@dataclass(frozen=True, slots=True)
class LogStatus(Document):
    """``state``: of the stream, ``off`` where the policy asks for none, ``not running`` where its process is gone.
    ``stream``: what that said of itself last, at ``told_at``. ``acknowledgement``: since when RPO 0 holds; null where
    no commit waits for it."""

    server: str
    state: str
    branch: Branch | None = field(metadata=HIDDEN)
    branches: int
    gaps: int
    destinations: tuple[Held, ...]
    told_at: datetime | None = field(metadata=json_key("updated_at"))
    stream: Mapping[str, Any] | None
    acknowledgement: Acknowledged | None = None

    @property
    @computed("branch", after="state")
    def branch_id(self) -> str | None:
        """The present one of the server's history."""
        return self.branch.id if self.branch else None


def status(wiring: Wiring, server: str | None = None, among: Collection[str] | None = None) -> tuple[LogStatus, ...]:
    """Of one server, or of all that stream or ever did, ``among`` these if they are given. Raises NotFoundError for an
    unknown one."""
    known = wiring.catalog.binlogs.servers()
    if server is not None:
        if server not in known:
            wiring.settings.server(server)
        return (_status(wiring, server),)
    names = {*known, *(name for name in wiring.settings.servers if _is_streamed(wiring, name))}
    return tuple(_status(wiring, name) for name in sorted(names if among is None else names & set(among)))


def _status(wiring: Wiring, server: str) -> LogStatus:
    binlogs, now = wiring.catalog.binlogs, wiring.clock()
    branches = binlogs.branches(server)
    said = binlogs.stream_state(server)
    stream, told_at = said if said is not None else (None, None)
    runs = gathered((run.destination, run) for run in binlogs.runs(server))
    rows: Mapping[str, Any] = stream.get("destinations", {}) if stream is not None else {}
    worst = wiring.catalog.lags.worst(server, now - DAY)
    expected = wiring.settings.server(server).preferred if _is_streamed(wiring, server) else ()
    names = dict.fromkeys([*expected, *sorted(runs), *sorted(rows)])
    return LogStatus(
        server,
        state_of(wiring, server, stream),
        branches[-1] if branches else None,
        len(branches),
        len(binlogs.gaps(server)),
        tuple(_held(name, runs.get(name, []), branches, rows.get(name, {}), worst.get(name), now) for name in names),
        told_at,
        stream,
        acknowledged(said, now) if _is_streamed(wiring, server) else None,
    )


def _held(
    name: str, runs: list[Run], branches: tuple[Branch, ...], row: Mapping[str, Any], worst: float | None, now: datetime
) -> Held:
    current = branches[-1] if branches else None
    newest = next((run for run in reversed(runs) if current is not None and run.branch == current.id), None)
    confirmed = newest.confirmed_at if newest is not None else None
    since = latest = ""
    if newest is not None and current is not None:
        since = f"{current.file(newest.first_number)}:{newest.first_pos}"
        latest = f"{current.file(newest.last_number)}:{newest.last_pos}"
    return Held(
        name,
        len(runs),
        sum(run.segments for run in runs),
        sum(run.size for run in runs),
        sum(run.stored for run in runs),
        since,
        latest,
        confirmed,
        max(0.0, (now - confirmed).total_seconds()) if confirmed is not None else None,
        worst,
        row.get("bytes_behind"),
        str(row.get("error") or ""),
    )


def state_of(wiring: Wiring, server: str, stream: Mapping[str, Any] | None) -> str:
    """As ``LogStatus.state``; ``stream``: what it said of itself last."""
    if not _is_streamed(wiring, server):
        return OFF
    if stream is None or not owner_is_alive(str(stream.get("owner", ""))):
        return NOT_RUNNING
    return str(stream.get("state", ""))


def _is_streamed(wiring: Wiring, server: str) -> bool:
    if server not in wiring.settings.servers:
        return False
    found = wiring.settings.server(server)
    return found.usable and streams(found.policy)


def stream_of(wiring: Wiring, server: ServerSettings) -> Stream | None:
    """The state of its stream, for a plan of the newest moment; None where its policy asks for none."""
    if not server.usable or not streams(server.policy):
        return None
    now = wiring.clock()
    said = wiring.catalog.binlogs.stream_state(server.name)
    troubles = "; ".join(stream_troubles(server.name, said, now))
    if said is None:
        return Stream(troubles, limit=None)
    known = wiring.catalog.identities.of(server.name)
    newest = max(known, key=lambda one: one.seen_at, default=None)
    if newest is not None and newest.is_stranger:
        stranger = (
            f"another server, {newest.uuid}, answers under this name since {format_time(newest.since)}, and its binary "
            f"log is kept separate ({newest.evidence}); if it is the right server: backupd server accept {server.name}"
        )
        troubles = "; ".join(filter(None, (stranger, troubles)))
    row, at = said
    rpo = server.policy.objectives.rpo
    runs = _is_running(row, at, now)
    state = row.get("state") if runs else row.get("ended", row.get("state"))
    away = state == StreamState.WAITING and bool(row.get("away"))
    stuck = not runs and state == StreamState.WAITING and not away and bool(row.get("error"))
    failed = state == StreamState.FAILED or stuck
    if failed and not runs:
        troubles += f"; last error: {one_line(row.get('error') or '')}"
    return Stream(
        troubles,
        failed=failed or (newest is not None and newest.is_stranger),
        unseen_since=parse_time(str(row["since"])) if runs and away else None,
        limit=rpo if rpo is not None else LIMIT,
        promised=rpo is not None,
        missed=_missed(wiring, server) if rpo is None and not runs else "",
    )


def _missed(wiring: Wiring, server: ServerSettings) -> str:
    """What the server, asked now, has in its binary log behind all that is archived of it; "" where that is nothing,
    and where it does not answer or another one does: then nobody knows."""
    socket = server.config.socket
    if socket is not None and not socket.exists():
        return ""  # nobody would answer there; the client for MySQL takes longer to import than most plans to make
    from backupd.engine.server.binary_logs import BinlogSource

    branches = own_branches(wiring, server.name)
    runs = [run for run in wiring.catalog.binlogs.runs(server.name) if branches and run.branch == branches[-1].id]
    if not runs:
        return ""
    try:
        state = BinlogSource(replace(server.connection(), connect_timeout=_ASKED)).look(files=False)
    except BackupdError:
        return ""
    last, position = max(runs, key=last_of), file_position(state.position)
    if (
        state.server_uuid != branches[-1].server_uuid
        or position is None
        or position <= last_of(last)
        or (state.history and same_state(branches[-1].executed(last.gtids_after), state.history))
    ):
        return ""
    return (
        f"the server has written up to {state.position.file}:{state.position.pos} since, and its binary log is "
        f"archived up to {branches[-1].file(last.last_number)}:{last.last_pos}"
    )


def acknowledged(said: tuple[Mapping[str, Any], datetime] | None, now: datetime) -> Acknowledged | None:
    """Since when RPO 0 holds, by the last row of the stream; None where no commit waits for it. It holds now only where
    that was shown a moment ago."""
    if said is None or not (known := said[0].get("acknowledgement")):
        return None
    row, at = said
    try:
        found = Evidence.from_json(known)
    except (KeyError, TypeError, ValueError):
        return None
    why, until = found.why, found.until
    if not why and not _is_running(row, at, now):
        why = "the binary log is not streamed now"
    elif not why and (asked := found.shown_at or until) is not None and now - asked > LONGEST_GAP:
        why = "the server was not asked since"
    return Acknowledged(
        found.mode,
        holds=not why,
        since=found.since if not why else None,
        until=until,
        why=why,
        lost_at=(found.lost_at if found.why else until) if why else None,
        windows=found.windows,
    )


def stream_troubles(server: str, said: tuple[Mapping[str, Any], datetime] | None, now: datetime) -> Iterator[str]:
    """Why the recovery windows do not grow as they should, by the last row of the stream."""
    again = "`backupd serve` streams it unless the server is paused"
    if said is None:
        yield f"the binary log of {server} has never been streamed: {again}"
        return
    row, at = said
    if not _is_running(row, at, now):
        yield (
            f"the binary log of {server} is not streamed now (last report at {format_time(at)}), so new commits are "
            f"not recoverable: {again}"
        )
        return
    error, trouble = one_line(row.get("error") or ""), one_line(row.get("trouble") or "")
    if row.get("state") != StreamState.STREAMING:
        yield f"the stream of {server} is {row.get('state')} since {row.get('since')}: {error}"
    elif error:
        yield f"the stream of {server}: {error}"
    if trouble:
        yield f"the archive of {server}: {trouble}"
    said_of_commits = acknowledged(said, now)
    if said_of_commits is not None and not said_of_commits.holds:
        yield said_of_commits.words(server)


def one_line(text: str) -> str:
    """What happened and why, without what to do, in one line."""
    return ": ".join(
        line.removeprefix("detail:").strip() for line in text.splitlines() if not line.strip().startswith("hint:")
    )


def _is_running(row: Mapping[str, Any], at: datetime, now: datetime) -> bool:
    """Does the process go on that wrote this row of status at ``at``?"""
    return row.get("state") != STOPPED and now - at <= SILENT and owner_is_alive(str(row.get("owner", "")))

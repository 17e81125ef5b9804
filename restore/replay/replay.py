"""Rolling a restored copy forward: the logs of one leg, applied to a private server, to one position exactly.

A leg is one sequence of log files. What is known of it is compared before anything is applied (do the files follow each
other, do they continue the copy, do they end at the stop, whose ids occur) and afterwards (what has the copy executed,
how many transactions did its server count). That a thread stopped is no proof, nor is the GTID alone.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from backupd.engine import event_states
from backupd.engine.binlog.walk import Walk, walk
from backupd.engine.relay_logs import Leg, lay_relay_logs
from backupd.engine.replay_applier import (
    OF_SOME_TABLES,
    Standing,
    applier_for,
    bytes_before,
    other_way,
    refuse_repeated,
    set_start,
)
from backupd.engine.replay_pipe import replay_through_pipe
from backupd.engine.server.launch import LaunchedServer, Zone, global_zone
from backupd.engine.server.probe import prepared_xa
from backupd.engine.sql.client import Session
from backupd.engine.sql.dialect import dialect_of
from backupd.model.binlog import FIRST_EVENT, ReplayMethod, Stop, covers, plus, same
from backupd.model.errors import DamagedError, RefusedError, ServerError
from backupd.model.job import Progress
from backupd.model.server_facts import Position, ServerInfo

PHASE = "replay"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What one leg did. ``gtids``: all that the copy has executed now; ``transactions``: how many were applied;
    ``bytes`` of logs; ``events``: scheduled events (``schema.name: state``) that got back the state that their
    statements gave them; ``prepared_xa``: XA transactions that are prepared and hold locks, as XA RECOVER names
    them."""

    gtids: str
    transactions: int
    seconds: float
    bytes: int
    events: tuple[str, ...] = ()
    prepared_xa: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def replay(server: LaunchedServer, leg: Leg) -> Replayed:
    """Apply the files of ``leg`` from its start to its stop onto ``server``, which runs with ``replay_config``.

    After an error the copy is somewhere between: throw it away, or ask it. Raises RefusedError (files, start, stop
    or server id do not fit; nothing was applied), DamagedError, ServerError (the applier failed), ToolError,
    CancelledError.
    """
    began = time.monotonic()
    if leg.tables and leg.method is ReplayMethod.PIPE:
        raise RefusedError(
            "a replay of some tables only cannot go through the pipe",
            detail="the client executes whatever the logs hold",
            hint=OF_SOME_TABLES,
        )
    files = _in_order(leg.files, leg.start, leg.stop)
    found = walk(files, leg.start, wanted=leg.exclude)
    leg = replace(leg, files=files, found=found)
    _refuse_wrong(leg)
    leg.context.report(Progress(PHASE, 0, found.bytes))
    dialect = dialect_of(leg.info.flavour, leg.info.version)
    with server.connection.connect() as session:
        _refuse_own_id(session, found, leg.server_ids)
        warnings = [*_set_zone(session, leg.info, server.config.zone)]
        if found.by_statement and leg.method is ReplayMethod.APPLIER:
            warnings.append(
                "the logs hold data changes in STATEMENT format, which must run in order: replayed without parallel "
                "workers"
            )
        had = event_states.read_events(session)
        events = (
            had if leg.tables else event_states.after(had, found.statements, folds=event_states.folds_schemas(session))
        )
        before = executed = set_start(session, leg.info, found, leg.start)
        counted = 0
        if found.works:
            run = _apply if leg.method is ReplayMethod.APPLIER else replay_through_pipe
            executed, counted = run(server, session, leg)
        _refuse_unequal(leg, before, executed, counted)
        settled = event_states.settle(session, had, events, ran_until=_ran_until(leg))
        return Replayed(
            gtids=executed,
            transactions=_applied(found, counted, leg.exclude),
            seconds=time.monotonic() - began,
            bytes=found.bytes,
            events=settled.changed,
            prepared_xa=prepared_xa(session, dialect),
            warnings=(*warnings, *settled.warnings),
        )


def _apply(server: LaunchedServer, session: Session, leg: Leg) -> tuple[str, int]:
    refuse_repeated(leg.found, narrowed=bool(leg.tables))
    _refuse_other_end(leg)
    sizes, whole = leg.sizes, leg.found.bytes
    total = sum(size for _name, size in sizes)

    def moved(now: Standing) -> None:
        done = bytes_before(now.file, now.pos, sizes) - (total - whole)
        leg.context.report(Progress(PHASE, max(0, min(done, whole)), whole, note=now.gtids))

    applier = applier_for(server, session, lay_relay_logs(server, leg), leg)
    applier.prepare()
    applier.apply(moved)
    executed, counted = applier.executed(), applier.applied()
    applier.close()
    return executed, counted


def _refuse_other_end(leg: Leg) -> None:
    """Raises RefusedError when the files of a MySQL server do not end where the stop's GTIDs are executed. Those of one
    that was made from a backup do not record all that is in its data."""
    last, gtids = str(leg.found.executed), leg.stop.gtids
    if leg.mariadb or not gtids:
        return  # MariaDB's are compared whatever the way of the replay is
    everything = plus(leg.start.gtid, last, mariadb=False)
    if not (covers(gtids, last, mariadb=False) and covers(everything, gtids, mariadb=False)):
        raise RefusedError(
            "the logs do not end at the stop position of the replay",
            detail=f"they end at {last or 'no GTID'}, the stop is at {gtids}",
            hint="fetch the logs again; `backupd timeline` lists the recoverable moments",
        )


def _in_order(leg_files: Sequence[Path], start: Position, stop: Stop) -> tuple[Path, ...]:
    """The files that hold something. Raises RefusedError for a sequence that no server has written so."""
    files = list(leg_files)
    names = [path.name for path in files]
    numbers = [_number(name) for name in names]
    wrong = ""
    if not files and not _is_same_position(start, stop):
        wrong = "no binary log was given"
    elif len({name.rpartition(".")[0] for name in names}) > 1:
        wrong = "the files have different base names, so they are of different servers"
    elif any(later != earlier + 1 for earlier, later in itertools.pairwise(numbers)):
        wrong = "a file is missing or out of order"
    elif start.file in names[1:]:
        wrong = f"the start {start.file}:{start.pos} is not in the first one"
    elif files and stop.file and stop.file != names[-1]:
        wrong = f"the stop {stop.file}:{stop.pos} is not in the last one"
    elif files and stop.file and (size := files[-1].stat().st_size) != stop.pos:
        wrong = f"{names[-1]} has {size:,} bytes, and the stop is at {stop.pos:,}"
    if wrong:
        raise RefusedError(
            f"cannot replay the binary logs: {wrong}",
            detail=" ".join(names),
            hint="`backupd timeline` names the gaps of the archive; fetch the logs again",
        )
    if files and files[-1].stat().st_size <= FIRST_EVENT:
        files.pop()  # the stop is before its first event
    return tuple(files)


def _number(name: str) -> int:
    number = name.rpartition(".")[2]
    if not number.isdecimal():
        raise RefusedError(f"{name} is not the name of a binary log", hint="logs are replayed under original names")
    return int(number)


def _is_same_position(start: Position, stop: Stop) -> bool:
    return (start.file, start.pos) == (stop.file, stop.pos) or (bool(start.gtid) and start.gtid == stop.gtids)


def _refuse_wrong(leg: Leg) -> None:
    """What the files hold against what the plan says of them."""
    mariadb, stop, found = leg.mariadb, leg.stop, leg.found
    if found.bytes and found.mariadb is not mariadb:
        raise RefusedError(f"these are no logs of a {leg.info.flavour} server")
    if found.is_by_gtid and not mariadb and not stop.gtids:
        raise RefusedError("the plan does not say what is executed at the stop, and the logs have GTIDs")
    if mariadb and found.works and stop.gtids and not same(str(found.end), stop.gtids, mariadb=True):
        raise RefusedError(
            "the logs do not end at the stop position of the replay",
            detail=f"they end at {found.end}, the stop is at {stop.gtids}",
        )
    absent = [
        gtid
        for gtid in leg.exclude
        if not (gtid in found.before if mariadb else covers(stop.gtids, gtid, mariadb=False))
    ]
    if absent:
        raise RefusedError(
            f"{', '.join(absent)} cannot be left out: it is not in the logs that are replayed",
            hint="`backupd binlog search` finds the GTIDs of transactions",
        )
    held = found.transactions + found.repeated
    if leg.transactions is not None and found.is_marked and held != leg.transactions:
        raise DamagedError(
            "the binary logs do not match their index",
            [f"{held:,} transactions between start and stop, not {leg.transactions:,}"],
        )


def _refuse_own_id(session: Session, found: Walk, server_ids: Sequence[int]) -> None:
    """A server skips events that carry its own id, silently."""
    own = int(session.scalar("SELECT @@GLOBAL.server_id"))
    if own in found.server_ids or own in server_ids:
        raise RefusedError(
            f"the copy has the server id {own}, which occurs in the logs: it would skip those events",
            hint="start the copy with another server ID",
        )


def _set_zone(session: Session, info: ServerInfo, zone: Zone) -> Iterator[str]:
    """Let sessions begin with the zone that those of the source began with; gives what is doubtful about zones."""
    if zone.doubt:
        yield zone.doubt
    if name := global_zone(info.variables):
        if session.scalar("SELECT CONVERT_TZ('2020-01-01', '+00:00', %s)", name) is None:
            yield (
                f"the source's time_zone is {name!r}, which the copy does not know (its tables of time zones lack "
                "it): values of NOW() and similar functions in statements of the binary logs may be shifted"
            )
        else:
            session.execute("SET GLOBAL time_zone = %s", name)


def _ran_until(leg: Leg) -> datetime | None:
    """Until when scheduled events ran at the source, as far as this leg shows."""
    last = leg.found.last_at
    if not leg.found.works or leg.info.variables.get("event_scheduler", "ON") != "ON":
        return None
    return leg.stop.at or (datetime.fromtimestamp(last, UTC) if last else None)


def _refuse_unequal(leg: Leg, before: str, executed: str, counted: int) -> None:
    """Is everything executed that should be, and nothing else?"""
    mariadb, found = leg.mariadb, leg.found
    expected = found.transactions - len(leg.exclude)
    wanted = plus(before, leg.stop.gtids or (str(found.end) if mariadb else ""), mariadb=mariadb)
    problems = []
    if not same(executed, wanted, mariadb=mariadb):
        problems.append(f"it has executed {executed or 'nothing'}, not {wanted or 'nothing'}")
    # More are no harm where no GTID is there twice, which the applier was asked to see to: workers in each other's way
    # try again, and the server counts that, too.
    if (mariadb or not found.is_by_gtid) and found.is_marked and counted < expected:
        problems.append(f"its server counted {counted:,} transactions, and the logs hold {expected:,}")
    if problems:
        raise ServerError(
            "the copy did not reach the target",
            detail="\n".join(problems),
            hint=f"discard this copy; {other_way(narrowed=bool(leg.tables))}",
        )


def _applied(found: Walk, counted: int, exclude: Sequence[str]) -> int:
    """How many transactions, without those that were tried twice."""
    return min(counted, found.transactions - len(exclude)) if found.mariadb else counted

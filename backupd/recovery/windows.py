"""Windows: the moments that a server can be recovered to, and what interrupts them. Pure.

A window begins at the moment of a backup that a replay can begin from and reaches as far as the logs behind it are
archived without a hole. How far that is, was confirmed when the server was asked ("everything committed by then is in
here"). Only where it never was, the latest commit in the logs tells, itself excluded, since others of that very moment
may be missing. A backup that nothing can be replayed on is a window of one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from backupd.model.backup.record import BackupRecord
from backupd.model.clock import format_time
from backupd.model.errors import RefusedError
from backupd.model.server.facts import Position, Version, no_roll_forward
from backupd.model.server.logs import Branch, Run
from backupd.recovery.branches import Histories
from backupd.recovery.route import RouteLeg, way
from backupd.recovery.runs import last_of, place_of

_INSTANT = timedelta(microseconds=1)
_SKEW = timedelta(seconds=10)
"""Two hosts of ours may differ by so much, and reading a catalog may take as long. What was confirmed at a moment that
is further ahead was told by a clock that was wrong, and says nothing."""
_TRIES = 8
REPLAY_STOPS = "a restore to a later moment stops at the first change"
"""In a warning of a backup: binary logs are replayed onto it only as long as they do not change some of its tables."""

Repeats = Callable[[RouteLeg], bool]
"""Does a leg repeat, at its beginning, something that is executed where the copy stands? Only the index tells."""


def nobody_knows(_leg: RouteLeg) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Window:
    """All moments from ``begin`` to ``end``, both included. ``branch``: "" where that of its ``base`` (a backup) is not
    known. ``destinations``: where a base and logs of it lie; each alone may reach less far. ``conditions``: what makes
    the logs inside doubtful. ``run``: those logs, None for a backup alone."""

    begin: datetime
    end: datetime
    reason_end: str
    branch: str
    base: BackupRecord
    run: Run | None
    destinations: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()

    def holds(self, moment: datetime) -> bool:
        return self.begin <= moment <= self.end


def complete_until(run: Run, now: datetime) -> datetime | None:
    """The moment by which everything that was committed is in ``run``; None where nothing tells.

    A session may stamp its transactions with any time, so one stamp shows nothing of when the archive ends: what was
    confirmed counts, and where something was, nothing else does. Where the server was never asked (the catalog was made
    anew from a destination) the latest stamp has to do. One in the future is certainly none of a commit; and when a
    segment was stored, which would bound it closer, no run knows.
    """
    if run.confirmed_at is not None:
        return min(run.confirmed_at, now) if run.confirmed_at <= now + _SKEW else None
    return run.last_at - _INSTANT if run.last_at is not None and run.last_at <= now else None


def abandoned(histories: Histories, latest: Window) -> str:
    """Why ``latest``, the last of all windows, is not of the server's present history; "" where it is, as far as is
    known."""
    present = histories.current
    if present is None or latest.branch == present.id or (not latest.branch and latest.begin >= present.noticed_at):
        return ""
    return (
        f"this is not the server's present history: since {format_time(present.noticed_at)} it goes on as branch "
        f"{present.id} ({present.reason}), of which nothing can be restored yet; take a full backup now: "
        f"backupd backup {present.server} --kind full"
    )


def windows(
    histories: Histories, bases: Sequence[BackupRecord], *, now: datetime, repeats: Repeats = nobody_knows
) -> tuple[Window, ...]:
    """In the order of their ends, those of the server's present history last.

    ``bases``: restorable backups of the server, by time. ``repeats`` is asked of the files of a server that took over
    where nothing was executed before the first of them: they lead on only if they repeat what both servers share.
    """
    found: list[Window] = []
    open_at: dict[tuple[str, int, int], int] = {}
    latest: Window | None = None
    for base in bases:
        if latest is not None and latest.run is not None and latest.begin <= base.finished_at <= latest.end:
            continue
        latest = _of(histories, base, now)
        if latest.run is not None:
            key = (latest.run.branch, latest.run.first_number, latest.run.first_pos)
            number = open_at.setdefault(key, len(found))
            if number < len(found) and latest.begin <= found[number].end:
                latest = found[number] = replace(found[number], begin=min(found[number].begin, latest.begin))
                continue
        found.append(latest)
    _widen_across_forks(histories, found, now, repeats)
    rank = {branch.id: number for number, branch in enumerate(histories.branches)}
    return tuple(
        sorted(
            found,
            key=lambda window: (
                rank[window.branch] if window.branch else _branch_by_time(histories, window.end),
                window.end,
            ),
        )
    )


def _branch_by_time(histories: Histories, moment: datetime) -> int:
    return max((number for number, branch in enumerate(histories.branches) if branch.noticed_at <= moment), default=0)


def _of(histories: Histories, base: BackupRecord, now: datetime) -> Window:
    branch = histories.branch_of(base)
    place = place_of(base.position)
    run = histories.run_at(branch.id, place) if branch is not None and place is not None else None
    if branch is None or run is None or not_rolled(base):
        return Window(
            base.finished_at,
            base.finished_at,
            _why_a_point(histories, base, branch),
            branch.id if branch else "",
            base,
            None,
        )
    end, reason = _end(histories, branch, run, now)
    return Window(base.finished_at, max(end, base.finished_at), reason, branch.id, base, run, conditions=run.remarks)


def not_rolled(base: BackupRecord) -> str:
    """Why no binary log is replayed onto ``base``, whatever is archived; "" where it is."""
    return no_roll_forward(base.flavour, Version.parse(base.server_version)) if base.server_version else ""


def stops_replay(base: BackupRecord) -> tuple[str, ...]:
    """What ``base`` itself says of tables whose changes no replay onto it can make."""
    return tuple(warning for warning in base.warnings if REPLAY_STOPS in warning)


def _why_a_point(histories: Histories, base: BackupRecord, branch: Branch | None) -> str:
    if why := not_rolled(base):
        return why
    if not histories.branches:
        return "no binary logs are archived"
    if not base.position.file:
        return "the server wrote no binary log"
    if branch is None:
        return "it is not certain which history of the server this backup is of, so nothing is replayed on it"
    return f"the binary log is not archived at {base.position.file}:{base.position.pos}, where it would go on"


def _end(histories: Histories, branch: Branch, run: Run, now: datetime) -> tuple[datetime, str]:
    """Until when a run reaches, and why no further."""
    end = complete_until(run, now) or datetime.min.replace(tzinfo=now.tzinfo)
    there = f"{branch.file(run.last_number)}:{run.last_pos}"
    following = histories.run_after(branch.id, last_of(run))
    if following is not None:
        resumes = f"{branch.file(following.first_number)}:{following.first_pos}"
        if following.first_at is not None:  # the earliest time there, which a session may have set into the past
            end = min(end, max(following.first_at, run.last_at or following.first_at))
        return end, f"gap: the binary logs between {there} and {resumes} are not there"
    later = histories.next_of(branch)
    if later is not None:
        return min(end, later.noticed_at), (
            f"the server's history went on as branch {later.id} ({later.reason}); this one is archived up to {there}"
        )
    if run.confirmed_at is None:
        return end, f"archived up to {there}; the server was not asked whether that was all"
    if run.confirmed_at > now + _SKEW:
        return end, (
            f"archived up to {there}; until when that is everything was told by a clock that was wrong "
            f"({format_time(run.confirmed_at)})"
        )
    return end, f"everything committed by then is archived, up to {there}"


def _widen_across_forks(histories: Histories, found: list[Window], now: datetime, repeats: Repeats) -> None:
    """Branches can be entered from a backup of one they descend from, too."""
    for branch in histories.branches[1:]:
        line = histories.descent(branch)
        runs = histories.runs(branch.id)
        if len(line) < 2 or not runs:
            continue
        run = runs[0]
        base = _entrance(histories, found, line, run, repeats)
        if base is None:
            continue
        begin = max(base.finished_at, histories.since(branch) or branch.noticed_at)
        end, reason = _end(histories, branch, run, now)
        if end < begin:
            continue
        crossing = Window(begin, end, reason, branch.id, base, run, conditions=run.remarks)
        inside = [window for window in found if window.run is run and window.begin <= end]
        found[:] = [window for window in found if window not in inside]
        found.append(replace(crossing, begin=min([begin, *(window.begin for window in inside)])))


def _entrance(
    histories: Histories, found: Sequence[Window], line: Sequence[Branch], run: Run, repeats: Repeats
) -> BackupRecord | None:
    """The newest backup of an ancestor from which all of ``run`` can be replayed."""
    branch = line[-1]
    stop = Position(branch.file(run.last_number), run.last_pos, run.gtids_after)
    ancestors = {ancestor.id: ancestor for ancestor in line[:-1]}
    candidates = [window for window in found if window.run is not None and window.branch in ancestors]
    for window in sorted(candidates, key=lambda window: window.begin, reverse=True)[:_TRIES]:
        home = histories.branch_of(window.base)
        if home is None:
            continue
        try:
            legs = way(histories, window.base.position, home, branch, stop)
        except RefusedError:
            continue
        if all(repeats(leg) for leg in legs if leg.repeats):
            return window.base
    return None

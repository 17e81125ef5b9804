"""The timeline of a server: which moments are recoverable, from where, what interrupts them, and what was promised.
Pure: values in, values out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise
from sys import maxsize
from typing import Any

from backupd.model.acknowledged import Acknowledged
from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import Branch, FilePosition, Gap, Run
from backupd.model.document import Document, json_key
from backupd.model.proof import Proof
from backupd.model.server_facts import Position
from backupd.model.text import format_time
from backupd.recovery.chains import dumps, restorable
from backupd.recovery.restorable import Restorability
from backupd.recovery.runs import Histories, file_position, first_of, last_of, parted
from backupd.recovery.windows import Repeats, Window, abandoned, goes_on, nobody_knows, stops_replay, windows


@dataclass(frozen=True, slots=True)
class Objectives:
    """What the policy promises; None where it promises nothing."""

    rpo: timedelta | None = None
    rto: timedelta | None = None

    def rpo_kept(self, lost: timedelta | None, *, young: bool) -> bool | None:
        """``lost``: what would be, None for everything. None without an objective, and before the first backup is due
        (``young``)."""
        if self.rpo is None or (lost is None and young):
            return None
        return lost is not None and lost <= self.rpo

    def rto_kept(self, predicted: timedelta | None) -> bool | None:
        """None without an objective, and where nothing shows how long a restore takes."""
        return None if self.rto is None or predicted is None else predicted <= self.rto


@dataclass(frozen=True, slots=True)
class Reach(Document):
    """How far one destination alone goes: to ``latest`` (None: nothing can be restored from it), that is ``behind``
    what all of them together hold, and ``rpo``: the age of that moment. ``trouble``: why it cannot be read or written,
    or is late, as far as the stream reported; "" where it reported none."""

    name: str
    latest: datetime | None
    behind: timedelta | None = field(metadata=json_key("behind_seconds"))
    rpo: timedelta | None = field(metadata=json_key("rpo_seconds"))
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """``windows`` by branch and time, the one that ends at ``latest`` is the last. ``gaps``: at no destination, or at
    the one that they name. ``predicted_rto``: of a restore to the latest moment; None where there is none.
    ``doubts``: what makes the end of it doubtful by what is recorded; ``warnings``: these, and what the stream says
    now. ``tables_only``: the moments are those to which tables can be restored, out of dumps; the server as a whole
    cannot. ``first_due``: there is no backup, and none was due yet: the first one starts then.
    ``acknowledgement``: since when RPO 0 holds; None where no commit waits for the stream. ``goes_on``: ``latest``
    is followed by what is confirmed next of the present branch; ``onward``: the destinations of which that is so for
    what each of them holds alone."""

    server: str
    now: datetime
    windows: tuple[Window, ...]
    gaps: tuple[Gap, ...]
    destinations: tuple[Reach, ...]
    branches: tuple[Branch, ...]
    last_proof: Proof | None = None
    predicted_rto: timedelta | None = None
    objectives: Objectives = field(default_factory=Objectives)
    doubts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tables_only: bool = False
    first_due: datetime | None = None
    acknowledgement: Acknowledged | None = None
    goes_on: bool = False
    onward: tuple[str, ...] = ()

    @property
    def latest(self) -> datetime | None:
        """The last moment of the server's newest recoverable history, as far as this clock has come."""
        counted = _counted(self.windows, self.now)
        return counted[-1].end if counted else None

    @property
    def rpo(self) -> timedelta | None:
        """How much would be lost if the server were lost now."""
        return None if self.latest is None else max(self.now - self.latest, timedelta())

    @property
    def rpo_kept(self) -> bool | None:
        """Is what would be lost now within the objective? None without one, and before the first backup is due."""
        return self.objectives.rpo_kept(self.rpo, young=self.is_young)

    @property
    def rto_kept(self) -> bool | None:
        """None where no server is ever restored, too."""
        return None if self.tables_only else self.objectives.rto_kept(self.predicted_rto)

    @property
    def is_young(self) -> bool:
        """There is nothing yet, and nothing was due."""
        return self.first_due is not None and self.latest is None

    def branch_ends(self) -> Iterator[tuple[Branch, datetime | None]]:
        """Each branch with the moment until which it was certainly the server's present; None for the present one."""
        for branch, following in zip(self.branches, [*self.branches[1:], None], strict=False):
            yield branch, (following.since or following.noticed_at) if following is not None else None

    def as_json(self) -> dict[str, Any]:
        """As the REST interface and ``--json`` give it."""
        return {
            "server": self.server,
            "at": format_time(self.now),
            "windows": [window.as_json() for window in self.windows],
            "gaps": [_gap_json(gap) for gap in self.gaps],
            "latest": _time(self.latest),
            "tables_only": self.tables_only,
            "first_due": _time(self.first_due),
            "warnings": list(self.warnings),
            "acknowledgement": self.acknowledgement.as_json() if self.acknowledgement else None,
            "destinations": [reach.as_json() for reach in self.destinations],
            "branches": [
                {
                    "id": branch.id,
                    "reason": str(branch.reason),
                    "from": format_time(branch.noticed_at),
                    "to": _time(end),
                    "parent": branch.parent,
                    "fork": branch.fork.as_json() if branch.fork else None,
                }
                for branch, end in self.branch_ends()
            ],
            "last_proof": self.last_proof.as_json() if self.last_proof else None,
            "objectives": {
                "rpo": _seconds(self.objectives.rpo),
                "rto": _seconds(self.objectives.rto),
                "achieved_rpo": _seconds(self.rpo),
                "predicted_rto": _seconds(self.predicted_rto),
                "rpo_kept": self.rpo_kept,
                "rto_kept": self.rto_kept,
                "kept": self.rpo_kept is not False and self.rto_kept is not False,
            },
        }


def timeline(
    server: str,
    backups: Iterable[BackupRecord],
    branches: Iterable[Branch],
    runs: Iterable[Run],
    gaps: Iterable[Gap] = (),
    *,
    now: datetime,
    proofs: Iterable[Proof] = (),
    predicted_rto: timedelta | None = None,
    objectives: Objectives | None = None,
    troubles: Mapping[str, str] | None = None,
    doubts: Iterable[str] = (),
    warnings: Iterable[str] = (),
    destinations: Iterable[str] = (),
    repeats: Repeats = nobody_knows,
    by_dumps: bool = False,
    first_due: datetime | None = None,
    acknowledgement: Acknowledged | None = None,
) -> Timeline:
    """``backups``, ``runs``: of all destinations, those of other servers are left out. ``predicted_rto``: of a restore
    to the latest moment (restore.planning.planner determines it). ``troubles``: of destinations, ``doubts``: of what is
    recorded, ``warnings``: of the stream. ``destinations``: shown though they hold nothing.
    ``repeats``: see ``windows``. ``by_dumps``: only dumps are taken of it, so where no physical backup can be restored
    the moments are those of tables."""
    backups = tuple(backups)
    own_gaps = [gap for gap in gaps if gap.server == server]
    pieces = parted([run for run in runs if run.server == server], own_gaps)
    known = [branch for branch in branches if branch.server == server]
    usable = restorable(backup for backup in backups if backup.server == server)
    tables_only = by_dumps and not usable
    if tables_only:
        usable = dumps(backup for backup in backups if backup.server == server)
    held = _held(usable)
    holders = [name for destinations in held.values() for name in sorted(destinations)]
    names = list(dict.fromkeys([*holders, *(run.destination for run in pieces), *destinations]))
    together = Histories(known, pieces)
    found = windows(together, usable, now=now, repeats=repeats)
    known = [replace(branch, since=together.since(branch)) for branch in together.branches]
    alone = {name: Histories(known, [run for run in pieces if run.destination == name]) for name in names}
    reached = {
        name: windows(alone[name], [backup for backup in usable if name in held[backup.id]], now=now, repeats=repeats)
        for name in names
    }
    reaches = [_reach(name, reached[name], found, now, (troubles or {}).get(name, "")) for name in names]
    doubts = (*_future(usable, now), *_stops(usable, found), *_abandoned(together, found), *doubts)
    return Timeline(
        server=server,
        now=now,
        windows=tuple(_placed(found, reached, held)),
        gaps=tuple(_gaps(together, alone, own_gaps, now)),
        destinations=tuple(reaches),
        branches=tuple(known),
        last_proof=max(
            (proof for proof in proofs if proof.server == server), key=lambda proof: proof.finished_at, default=None
        ),
        predicted_rto=predicted_rto,
        objectives=objectives or Objectives(),
        doubts=doubts,
        warnings=(*doubts, *_warnings(reaches, troubles or {}, warnings)),
        tables_only=tables_only,
        first_due=first_due,
        acknowledgement=acknowledgement,
        goes_on=_goes_on(together, found, now),
        onward=tuple(name for name in names if _goes_on(alone[name], reached[name], now)),
    )


def _future(backups: Iterable[BackupRecord], now: datetime) -> Iterator[str]:
    """Of backups that ended later than ``now``."""
    for backup in backups:
        if backup.finished_at > now:
            yield (
                f"{backup.id} ended in the future ({format_time(backup.finished_at)}); backupd ignores it for the RPO. "
                "Check the clock of this host"
            )


def _stops(backups: Sequence[BackupRecord], found: Sequence[Window]) -> Iterator[str]:
    """Of the backup from which a restore to the latest moment begins."""
    newest = max(backups, key=lambda backup: (backup.finished_at, backup.id), default=None)
    if newest is not None and found and found[-1].run is not None:
        yield from (f"{newest.id}: {warning}" for warning in stops_replay(newest))


def _abandoned(histories: Histories, found: Sequence[Window]) -> Iterator[str]:
    if found and (why := abandoned(histories, found[-1])):
        yield f"recoverable up to {format_time(found[-1].end)}, but {why}"


def _warnings(reaches: Sequence[Reach], troubles: Mapping[str, str], told: Iterable[str]) -> Iterator[str]:
    yield from told
    yield from (f"destination {name}: {trouble}" for name, trouble in troubles.items())
    last = [reach for reach in reaches if reach.behind == timedelta(0)]
    if last and all(reach.trouble for reach in last):
        yield f"the latest point in time is recoverable only from {', '.join(reach.name for reach in last)}"


def _held(usable: Sequence[BackupRecord]) -> Mapping[str, frozenset[str]]:
    """Where each backup is with everything that it builds on, undamaged."""
    walk = Restorability({backup.id: backup for backup in usable}.get, lambda backup: backup.whole_at)
    return {backup.id: walk.of(backup).destinations for backup in usable}


def _placed(
    found: Iterable[Window], reached: Mapping[str, Sequence[Window]], held: Mapping[str, frozenset[str]]
) -> Iterator[Window]:
    """With the destinations that have, alone, a part of each window."""
    parts: dict[tuple[str, str], list[tuple[datetime, datetime]]] = {}
    for name, inner in reached.items():
        for window in inner:
            if window.run is not None:
                parts.setdefault((window.branch, name), []).append((window.begin, window.end))
    for spans in parts.values():
        spans.sort()
    for window in found:
        if window.run is None:
            names = sorted(held[window.base.id])
        else:
            names = [name for name in reached if _meets(parts.get((window.branch, name), ()), window)]
        yield replace(window, destinations=tuple(names))


def _meets(spans: Sequence[tuple[datetime, datetime]], window: Window) -> bool:
    index = bisect_right(spans, (window.end, window.end)) - 1
    return index >= 0 and spans[index][1] >= window.begin


def _counted(found: Sequence[Window], now: datetime) -> Sequence[Window]:
    """Those that show what would be lost: what begins later than ``now`` was dated by a clock that was wrong, or is,
    and counts only where there is nothing else."""
    return [window for window in found if window.begin <= now] or found


def _goes_on(histories: Histories, found: Sequence[Window], now: datetime) -> bool:
    counted = _counted(found, now)
    return bool(counted) and goes_on(histories, counted[-1])


def _reach(name: str, alone: Sequence[Window], together: Sequence[Window], now: datetime, trouble: str) -> Reach:
    alone, together = _counted(alone, now), _counted(together, now)
    if not alone or not together:
        return Reach(name, None, None, None, trouble)
    last = alone[-1]
    end = last.end
    same = [window for window in together if window.branch == last.branch]
    if not any(window.holds(end) for window in same):  # what was asked of another destination is known of all of them
        end = max((window.end for window in same if last.begin <= window.end <= end), default=end)
    return Reach(name, end, max(together[-1].end - end, timedelta()), max(now - end, timedelta()), trouble)


def _gaps(together: Histories, alone: Mapping[str, Histories], recorded: Sequence[Gap], now: datetime) -> Iterator[Gap]:
    """By branch and position: those at no destination, with the reason that was recorded, then those of one alone."""
    for branch in together.branches:
        told = [gap for gap in recorded if gap.branch == branch.id]
        everywhere = list(_holes(together, branch, "", now))
        for hole in everywhere:
            reason = next((gap for gap in told if _touch(gap, hole)), None)
            yield replace(hole, reason=reason.reason, noticed_at=reason.noticed_at) if reason else hole
        yield from (gap for gap in told if _stands_alone(together, gap, everywhere))
        known = {(hole.after, hole.before) for hole in everywhere}
        for name, histories in alone.items():
            yield from (hole for hole in _holes(histories, branch, name, now) if (hole.after, hole.before) not in known)


def _holes(histories: Histories, branch: Branch, destination: str, now: datetime) -> Iterator[Gap]:
    where = f"at {destination}" if destination else "at any destination"
    for one, other in pairwise(histories.runs(branch.id)):
        after = Position(branch.file(one.last_number), one.last_pos, one.gtids_after)
        before = Position(branch.file(other.first_number), other.first_pos, other.gtids_before)
        why = f"the binary logs between them are missing {where}"
        yield Gap(branch.server, branch.id, destination, after, before, one.last_at, other.first_at, why, now)


def _touch(one: Gap, other: Gap) -> bool:
    return _begin(one) <= _finish(other) and _begin(other) <= _finish(one)


def _begin(gap: Gap) -> FilePosition:
    return file_position(gap.after) or (0, 0)


def _finish(gap: Gap) -> FilePosition:
    return (file_position(gap.before) if gap.before else None) or (maxsize, 0)


def _stands_alone(histories: Histories, gap: Gap, holes: Sequence[Gap]) -> bool:
    """A recorded gap that no hole between runs shows, and that is not closed: at an end of what is archived."""
    runs = histories.runs(gap.branch)
    if not runs or _begin(gap) < first_of(runs[0]) or any(_touch(gap, hole) for hole in holes):
        return False
    return not any(first_of(run) <= _begin(gap) and _finish(gap) <= last_of(run) for run in runs)


def _gap_json(gap: Gap) -> dict[str, Any]:
    return {
        "after": gap.after.as_json(),
        "before": gap.before.as_json() if gap.before else None,
        "reason": gap.reason,
        "from": _time(gap.from_at),
        "to": _time(gap.to_at),
        "branch": gap.branch,
        "destination": gap.destination,
    }


def _time(moment: datetime | None) -> str | None:
    return format_time(moment) if moment is not None else None


def _seconds(span: timedelta | None) -> float | None:
    return span.total_seconds() if span is not None else None

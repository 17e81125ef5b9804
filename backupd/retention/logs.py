"""Which archived binary logs stay: pure decisions, file by file.

Logs stay while a backup that needs them does: from the file on in which its place lies, in its own branch and in every
branch that forks off later. ``binlogs: all`` (the default) says that every kept backup needs them, ``binlogs: window``
that only those of the recovery window do, and that a backup outside of it is one moment. What a person keeps, what is
being restored or built on, and the newest restorable and newest proved backup need them in either case. Only the
beginning of a branch ever goes, so no hole appears in what stays; of the branch that the server is on, nothing goes
unless a backup on it needs what follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from backupd.model.binlog import Branch
from backupd.model.text import format_time
from backupd.retention.values import BinlogRun, LogPlace, RunDecision, Stored

SKEW = timedelta(days=1)
"""A log is older than a backup whose place is not known only when it is so much older: two clocks are compared."""

NOTHING = 1 << 62
"""A first file that no log has: none of the branch is needed."""


def decide(runs: Iterable[BinlogRun], needing: Sequence[Stored], branches: Sequence[Branch]) -> list[RunDecision]:
    """``needing``: the backups that logs are kept for; at least one. A run of which a part goes is told as two."""
    by_place = first_files(needing, branches)
    found: list[RunDecision] = []
    for run in runs:
        if run.place is None:
            found.append(_by_time(run, needing))
            continue
        first, why = by_place.get(run.branch, First(0, "nothing tells who needs it"))
        unsure = next(
            (backup for backup in needing if backup.place is None and run.last_at >= backup.started_at - SKEW), None
        )
        if unsure is not None:
            found.append(
                RunDecision(
                    run,
                    keep=True,
                    reason=f"the place of {unsure.id} in the binary logs is not certain, so it may need it",
                )
            )
        elif run.last < first:
            found.append(RunDecision(run, keep=False, reason=_gone(why, first)))
        elif run.first >= first:
            found.append(RunDecision(run, keep=True, reason=why))
        else:
            base = min(
                (b.started_at for b in needing if b.place is not None and b.place.branch == run.branch),
                default=run.first_at,
            )
            border = min(max(base, run.first_at), run.last_at)
            before = replace(run, last=first - 1, last_at=border, bytes=0)
            after = replace(run, first=first, first_at=border)
            found += [
                RunDecision(before, keep=False, reason=_gone(why, first)),
                RunDecision(after, keep=True, reason=why),
            ]
    return found


def _gone(reason: str, first: int) -> str:
    if first == NOTHING:
        return reason
    return f"no backup that stays needs what is before file {first}: {reason}"


def _by_time(run: BinlogRun, needing: Sequence[Stored]) -> RunDecision:
    base = min(needing, key=lambda backup: (backup.started_at, backup.id))
    since = f"{base.id}, which began at {format_time(base.started_at)}"
    if run.last_at >= base.started_at:
        return RunDecision(run, keep=True, reason=f"it is needed to go on from {since}")
    return RunDecision(run, keep=False, reason=f"it ended before {since}, the oldest backup to go on from")


class First(NamedTuple):
    """The first file of a branch that is needed, and why."""

    number: int
    reason: str


def first_files(needing: Sequence[Stored], branches: Sequence[Branch]) -> Mapping[str, First]:
    """By id of each branch (oldest first in ``branches``)."""
    found: dict[str, First] = {}
    for branch in branches:
        numbers = [
            (number, backup.id)
            for backup in needing
            if backup.place is not None and (number := needed(backup.place, branch.id, branches)) is not None
        ]
        if numbers:
            number, backup_id = min(numbers)
            found[branch.id] = First(number, f"it is needed to go on from {backup_id}")
        elif branch is branches[-1]:
            found[branch.id] = First(0, "the server is on this branch, and no backup here begins on it yet")
        else:
            found[branch.id] = First(NOTHING, "no backup that stays lies on this branch or on one that it came from")
    return found


def needed(place: LogPlace, branch_id: str, branches: Sequence[Branch]) -> int | None:
    """The first file of a branch that a backup at ``place`` needs; None where it needs none of it."""
    if place.branch == branch_id:
        return place.number
    by_id = {branch.id: branch for branch in branches}
    home = by_id.get(place.branch)
    if (
        home is not None
        and place.number < home.first_number
        and any(one.parent == branch_id and one.names_go_on for one in _line(home, by_id))
    ):
        return place.number  # the earlier files of its own sequence of names are those of the branch before
    for one in _line(by_id.get(branch_id), by_id):
        if one.fork is None:
            return None  # nothing is replayed across a fork that is not known
        if one.parent == place.branch:
            number = one.fork.file.rpartition(".")[2]
            # A fork of which only the GTID is known may lie anywhere.
            return None if number.isdecimal() and int(number) < place.number else 0
    return None


def _line(branch: Branch | None, by_id: Mapping[str, Branch]) -> Iterator[Branch]:
    """A branch and those that it came from, but for the first of all."""
    seen: set[str] = set()
    while branch is not None and branch.parent is not None and branch.id not in seen:
        seen.add(branch.id)
        yield branch
        branch = by_id.get(branch.parent)

"""Branches: which of a server's histories a backup belongs to, and how they descend from each other. Pure.

A place in a binary log means something only together with its branch, and a GTID may repeat over time. So a backup's
branch is taken from everything that is recorded (when it was taken, its place, what it had executed, who the server
was), and where one of these speaks against it, or nothing speaks for it, the backup is on none: it is a point then,
restored as it is, and nothing is replayed on it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise

from backupd.model.backup.record import BackupRecord
from backupd.model.errors import UnknownNameError
from backupd.model.server.logs import Branch, Run
from backupd.recovery.runs import Place, executed, first_of, joined, last_of, place_of, replayable_from, same_state


class Histories:
    """Branches of one server with their archived runs, ready to be asked many times.

    ``branches``: in the order in which they were noticed; the last one is the server's present. ``runs``: of all
    destinations, or of the one that is asked about.
    """

    def __init__(self, branches: Iterable[Branch], runs: Iterable[Run]) -> None:
        self.branches = tuple(sorted(branches, key=lambda branch: (branch.noticed_at, branch.id)))
        self._by_id = {branch.id: branch for branch in self.branches}
        self._noticed = [branch.noticed_at for branch in self.branches]
        self._runs: dict[str, list[Run]] = {}
        for run in joined(runs):
            self._runs.setdefault(run.branch, []).append(run)
        self._starts = {name: [first_of(run) for run in found] for name, found in self._runs.items()}
        self._since: dict[str, datetime | None] = {branch.id: branch.since for branch in self.branches[:1]}
        for before, branch in pairwise(self.branches):
            signs = [before.noticed_at, branch.since, self._last_sign(before, branch.noticed_at)]
            self._since[branch.id] = max(sign for sign in signs if sign is not None)

    @property
    def server(self) -> str:
        """Its name, for what people are told to call."""
        return self.branches[0].server if self.branches else "SERVER"

    @property
    def current(self) -> Branch | None:
        return self.branches[-1] if self.branches else None

    def branch(self, branch_id: str) -> Branch:
        """Raises UnknownNameError naming those that there are."""
        found = self._by_id.get(branch_id)
        if found is None:
            raise UnknownNameError(
                f"this server has no branch {branch_id!r}",
                detail="\n".join(f"{b.id}: {b.reason}, since {b.noticed_at:%Y-%m-%d %H:%M:%SZ}" for b in self.branches),
                hint=f"leave out @branch for the present one; `backupd timeline {self.server}` shows them all",
            )
        return found

    def since(self, branch: Branch) -> datetime | None:
        """Until when the branch before was certainly the server's present; None for the first one.

        A branch says that itself, but whoever noticed it may have known old things only (a spool that was put back):
        what was noticed and confirmed of the branch before counts, too.
        """
        return self._since[branch.id]

    def runs(self, branch_id: str) -> Sequence[Run]:
        """In log order, without a place in two of them."""
        return self._runs.get(branch_id, ())

    def run_at(self, branch_id: str, place: Place) -> Run | None:
        """The run that a replay from ``place`` begins in: it holds the place, and its file from the first byte."""
        starts = self._starts.get(branch_id, ())
        index = bisect_right(starts, place) - 1
        if index < 0:
            return None
        run = self._runs[branch_id][index]
        return run if replayable_from(run) <= place <= last_of(run) else None

    def run_after(self, branch_id: str, place: Place) -> Run | None:
        """The first run that begins after ``place``."""
        starts = self._starts.get(branch_id, ())
        index = bisect_right(starts, place)
        return self._runs[branch_id][index] if index < len(starts) else None

    def descent(self, branch: Branch) -> tuple[Branch, ...]:
        """The branches that ``branch`` came from, oldest first, itself last; only those with known forks between."""
        line = [branch]
        while line[-1].parent is not None and line[-1].fork is not None:
            parent = self._by_id.get(line[-1].parent)
            if parent is None or parent in line:
                break
            line.append(parent)
        return tuple(reversed(line))

    def next_of(self, branch: Branch) -> Branch | None:
        """The branch that the server was on after ``branch``."""
        index = self.branches.index(branch) + 1
        return self.branches[index] if index < len(self.branches) else None

    def branch_of(self, backup: BackupRecord) -> Branch | None:
        """The branch that a backup's position is on; None where that is not certain."""
        place = place_of(backup.position)
        candidates = self._at_the_time(backup) if place is not None else []
        if place is None or len(candidates) != 1:
            return None
        branch = candidates[0]
        other_server = backup.server_uuid and branch.server_uuid and backup.server_uuid != branch.server_uuid
        other_file = branch.basename != backup.position.file.rpartition(".")[0] or place[0] < branch.first_number
        if other_server or other_file or not self._executed_fits(branch, place, backup.position.gtid):
            return None
        if backup.started_at < branch.noticed_at and not self._was_there_before(branch, place, backup):
            return None
        return branch

    def _at_the_time(self, backup: BackupRecord) -> list[Branch]:
        """The branches that the server may have been on while the backup was taken. Two histories of different servers
        are told apart by their identity."""
        index = max(bisect_right(self._noticed, backup.started_at) - 1, 0)
        found = [*self.branches[index : index + 1]]
        for later in self.branches[index + 1 :]:
            certain = self.since(later)
            if certain is not None and backup.finished_at <= certain:
                break
            found.append(later)
            if backup.finished_at < later.noticed_at:
                break
        identities = {branch.server_uuid for branch in found}
        if len(found) > 1 and backup.server_uuid and "" not in identities and len(identities) == len(found):
            found = [branch for branch in found if branch.server_uuid == backup.server_uuid]
        return found

    def _last_sign(self, branch: Branch, until: datetime) -> datetime | None:
        """When a branch was certainly the server's present, by what was confirmed of it."""
        return max(
            (
                run.confirmed_at
                for run in self.runs(branch.id)
                if run.confirmed_at is not None and run.confirmed_at <= until
            ),
            default=None,
        )

    def _executed_fits(self, branch: Branch, place: Place, gtids: str) -> bool:
        """Does what the backup had executed fit the logs around its place? Where neither tells, it does."""
        if not gtids:
            return True
        starts = self._starts.get(branch.id, ())
        index = bisect_right(starts, place) - 1
        if index >= 0:
            run = self._runs[branch.id][index]
            if run.gtids_before and not executed(gtids, run.gtids_before):
                return False
            if place < last_of(run):
                if run.gtids_after and not executed(run.gtids_after, gtids):
                    return False
            elif run.gtids_after and not executed(gtids, run.gtids_after):
                return False
        following = self.run_after(branch.id, place)
        return following is None or not following.gtids_before or executed(following.gtids_before, gtids)

    def _was_there_before(self, branch: Branch, place: Place, backup: BackupRecord) -> bool:
        """Was a backup that is older than the first look at its branch taken of these very files?

        It was when they held transactions already as it began, or when they begin with exactly what it had executed.
        Where its file was begun while it ran, its GTIDs lie between those at the beginning of the files and at their
        end, and the files held transactions already when it ended: after a RESET these numbers would be given again
        only later. Else they may be younger ones of the same names.
        """
        if branch is not self.branches[0] and backup.server_uuid != branch.server_uuid:
            return False
        run = self.run_at(branch.id, place)
        if run is None:
            return False
        if run.first_at is not None and run.first_at <= backup.started_at:
            return True
        gtids = backup.position.gtid
        if not gtids:
            return False
        if place[0] == run.first_number and same_state(gtids, run.gtids_before):
            return True
        in_time = run.first_at is not None and run.first_at <= backup.finished_at
        return (
            in_time
            and bool(run.gtids_before)
            and executed(gtids, run.gtids_before)
            and executed(run.gtids_after, gtids)
        )


def branch_of(backup: BackupRecord, branches: Iterable[Branch], runs: Iterable[Run]) -> Branch | None:
    """The branch that a backup is on; None where that is not certain. For many backups: ``Histories``."""
    return Histories(branches, runs).branch_of(backup)

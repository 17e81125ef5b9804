"""Doing what ``transfer.bringback`` found: one key after the other becomes again what it was."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from backupd.model.errors import BackupdError, DamagedError, ForbiddenError, RefusedError
from backupd.model.job import Progress, Report
from backupd.model.text import Clock
from backupd.transfer.guards.erase import each
from backupd.transfer.guards.holds import Backup
from backupd.transfer.guards.marks import withdraw
from backupd.transfer.records.inventory import read
from backupd.transfer.sweep.clean_up_lease import unswept
from backupd.transfer.versions.recover_versions import MARKER, Found, Return
from storage.contract import layout
from storage.contract.destination import Destination, VersionedDestination, as_versioned


@dataclass(frozen=True, slots=True)
class Returned:
    """``keys``: what is seen again; ``failed``: by key, what is not, or is not believed, and why, and marks that could
    not be withdrawn; ``unmarked``: the backups whose mark of deletion was."""

    keys: tuple[str, ...]
    failed: dict[str, str] = field(default_factory=dict)
    unmarked: tuple[Backup, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "keys": list(self.keys),
            "failed": self.failed,
            "unmarked": [{"server": server, "backup": backup_id} for server, backup_id in self.unmarked],
        }


def bring_back(destination: Destination, found: Found, *, clock: Clock, report: Report) -> Returned:
    """While it runs nobody removes anything there. What fails for one key is told, and the others go on.

    Raises ForbiddenError naming the right that is missing, BusyError while somebody removes, RefusedError where the
    marker does not come back: without it the place is none of ours.
    """
    place = as_versioned(destination)
    if place is None:
        raise RefusedError(f"destination {destination.name} keeps no versions")
    work = _Work(place, found.returns, report)
    marker = [one for one in found.returns if one.kind == MARKER]
    work.run(marker)
    if why := work.failed.get(layout.REPOSITORY) or found.lost.get(layout.REPOSITORY):
        raise RefusedError(
            f"the marker of destination {destination.name} does not come back",
            detail=why,
            hint="nothing else was touched",
        )
    with unswept(destination, clock=clock) as lease:
        work.unmark(destination, found, clock)  # first: whatever is interrupted brings nothing back for a sweep to take
        for _kind, group in groupby(found.returns[len(marker) :], key=lambda one: one.kind):
            lease.assert_held()
            work.run(list(group))
    return work.judged(destination, found)


class _Work:
    def __init__(self, place: VersionedDestination, returns: Sequence[Return], report: Report) -> None:
        self._place, self._report = place, report
        self._all = (sum(one.size for one in returns), len(returns))
        self._lock = threading.Lock()
        self._bytes = 0
        self._denied = False
        self._done: dict[str, int] = {}
        self._unmarked: list[Backup] = []
        self.failed: dict[str, str] = {}

    def run(self, returns: Sequence[Return]) -> None:
        each(self._one, returns)

    def unmark(self, destination: Destination, found: Found, clock: Clock) -> None:
        """Withdraw the marks of deletion that do not stand."""

        def one(owner: Backup) -> None:
            try:
                withdraw(destination, *owner, clock())
            except BackupdError as error:
                with self._lock:
                    self.failed[layout.mark_key(*owner)] = f"this mark of deletion stands yet: {_line(error)}"
                return
            with self._lock:
                self._unmarked.append(owner)

        each(one, found.marks)

    def judged(self, destination: Destination, found: Found) -> Returned:
        """A look at what is seen now, and at whether the manifests among it are believed."""
        waiting = dict(self._done)
        for info in destination.list(""):
            if waiting.get(info.key) == info.size:
                del waiting[info.key]
        for key in waiting:
            self.failed[key] = "it was brought back, and is still not seen: run the command again"
        for server, backup_id in found.backups():
            manifest = read(destination, server, backup_id)
            if manifest is not None and isinstance(manifest.header, DamagedError):
                self.failed[layout.manifest_key(server, backup_id)] = _line(manifest.header)
        return Returned(
            tuple(key for key in self._done if key not in self.failed), self.failed, tuple(sorted(self._unmarked))
        )

    def _one(self, one: Return) -> None:
        if self._denied:
            return  # what one may not do, none may
        try:
            self._place.bring_back(one.version, one.above)
        except ForbiddenError:
            self._denied = True
            raise
        except BackupdError as error:
            with self._lock:
                self.failed[one.key] = _line(error)
            return
        with self._lock:
            self._done[one.key] = one.size
            self._bytes += one.size
            told = Progress("bring back", self._bytes, self._all[0], len(self._done), self._all[1])
        self._report(told)


def _line(error: BackupdError) -> str:
    if isinstance(error, DamagedError) and error.damages:
        return error.damages[0]
    return error.line

"""How fast each phase went lately: the ground under a plan's estimate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sqlalchemy import Table, and_, select

from backupd.catalog.base.database import Database
from backupd.catalog.base.phases import phases_from
from backupd.catalog.base.tables import jobs, proofs, restores
from backupd.model.backup.proof import Phase
from backupd.model.job import JobState

SAMPLES = 20
"""Runs of each sort that are looked at, newest first: old hardware should be forgotten."""

OF_TABLES = ("extracted", "loaded", "handed_over")
_WHOLE = "/%"
"""Restores of whole servers have the path of a data directory; those of tables tell which ones, and where to."""
_TELLING = 4 * 1024 * 1024
"""Bytes of rows from which on a speed means something: below, it is the time that starting takes."""
_SHORTEST = 0.001
"""Seconds below which a phase says nothing about speed."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What is known of one phase.

    ``bytes_per_second``: the median over runs that moved bytes, None when none did. ``seconds``: the median
    duration. ``samples``: runs counted. ``server``: whose runs they are, None when the server has none of its own
    and those of all servers were taken. ``start``, of ``rolled_forward``: the median duration of runs that replayed
    next to nothing, which is what the applier takes to begin; the speed is that of the others, without it. None: no
    such run.
    """

    phase: str
    bytes_per_second: float | None
    seconds: float
    samples: int
    server: str | None
    start: float | None = None

    def estimate(self, size: int) -> float:
        """Seconds that this phase takes for ``size`` bytes; without a rate, its median duration."""
        return size / self.bytes_per_second if self.bytes_per_second else self.seconds


class Rates:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, server: str) -> Mapping[str, Rate]:
        """Rates by phase name, from the server's own successful runs; phases it never ran, from all servers' runs."""
        return {**rates(self._phases(None), None), **rates(self._phases(server), server)}

    def of_tables(self, server: str) -> Mapping[str, Rate]:
        """Rates of what only restores of tables do (``OF_TABLES``), likewise. Their other phases work on next to
        nothing and say nothing about a whole server."""
        of_tables = and_(restores.c.state == str(JobState.SUCCEEDED), restores.c.datadir.not_like(_WHOLE))
        found = {}
        for whose in (None, server):
            phases = [
                phase
                for phase in self._recent(restores, of_tables, whose)
                if phase.name in OF_TABLES and phase.bytes >= _TELLING
            ]
            found.update(rates(phases, whose))
        return found

    def _phases(self, server: str | None) -> list[Phase]:
        succeeded = str(JobState.SUCCEEDED)
        found: list[Phase] = []
        # A failed test restore still fetched and prepared at a true speed only up to its failing phase, whose time
        # means nothing; so only good ends count.
        for table, state, values in (
            (jobs, jobs.c.state, (succeeded, str(JobState.PARTIAL))),
            (proofs, proofs.c.outcome, ("proved", "restored")),
        ):
            found.extend(self._recent(table, state.in_(values), server))
        whole = and_(restores.c.state == succeeded, restores.c.datadir.like(_WHOLE))
        return [*found, *self._recent(restores, whole, server)]

    def _recent(self, table: Table, good: Any, server: str | None) -> Iterable[Phase]:
        query = select(table.c.phases).where(good).order_by(table.c.finished_at.desc()).limit(SAMPLES)
        if server is not None:
            query = query.where(table.c.server == server)
        with self._database.read() as connection:
            return [phase for column in connection.execute(query).scalars() for phase in phases_from(column)]


def rates(phases: Iterable[Phase], server: str | None) -> dict[str, Rate]:
    """Medians by phase name."""
    grouped: dict[str, list[Phase]] = {}
    for phase in phases:
        grouped.setdefault(phase.name, []).append(phase)
    found = {}
    for name, group in grouped.items():
        if name == "rolled_forward":
            found[name] = _replay_rate(group, server)
            continue
        speeds = [phase.bytes / phase.seconds for phase in group if phase.bytes > 0 and phase.seconds >= _SHORTEST]
        found[name] = Rate(
            phase=name,
            bytes_per_second=median(speeds) if speeds else None,
            seconds=median(phase.seconds for phase in group),
            samples=len(group),
            server=server,
        )
    return found


def _replay_rate(group: Sequence[Phase], server: str | None) -> Rate:
    """How fast the applier starts is no speed, and what it takes with little to do is no time that grows."""
    little = [phase.seconds for phase in group if phase.bytes < _TELLING]
    start = median(little) if little else None
    speeds = [
        phase.bytes / max(phase.seconds - (start or 0.0), _SHORTEST) for phase in group if phase.bytes >= _TELLING
    ]
    return Rate(
        phase="rolled_forward",
        bytes_per_second=median(speeds) if speeds else None,
        seconds=median(phase.seconds for phase in group),
        samples=len(group),
        server=server,
        start=start,
    )

"""The service's part of replication: sees that something is lacking at a destination, and queues a job that does it.

It looks at the catalog only. A job is queued for a server and a destination when a backup came or went, when something
that failed is due again, when the service has started, and each hour in any case; one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from backupd.app.context.incidents import Incidents
from backupd.app.context.settings import ServerSettings
from backupd.app.context.wiring import Wiring
from backupd.app.copies.protection import look as look_at_protection
from backupd.app.runtime.periodic import Lookout
from backupd.catalog.jobs import OPEN
from backupd.model.backup_record import BackupRecord, BackupState
from backupd.model.hold import EVERY_SERVER, HoldKind
from backupd.model.job import JobKind, JobRecord, JobState
from backupd.model.text import new_id

EVERY = timedelta(seconds=10)
HOURLY = timedelta(hours=1)
LEG = "replicate/"
"""What the leg of its jobs begins with; the name of the destination follows."""


class ReplicaWatch(Lookout):
    """Looks at every server."""

    def __init__(self) -> None:
        super().__init__("replication", EVERY)
        self._seen: dict[tuple[str, str], frozenset[str]] = {}
        self._queued: dict[tuple[str, str], datetime] = {}
        self._incidents: Incidents | None = None

    def _names(self, wiring: Wiring) -> Iterable[str]:
        return wiring.settings.servers

    def _look(self, wiring: Wiring, name: str, now: datetime) -> None:
        server = wiring.settings.server(name)
        if not server.usable:
            return
        if self._incidents is None:
            self._incidents = Incidents(wiring.catalog)
        known = wiring.catalog.backups.list(server.name)
        _forget_former(wiring, server, known)
        paused = {hold.server for hold in wiring.catalog.holds.all() if hold.kind is HoldKind.PAUSE}
        if not paused & {server.name, EVERY_SERVER}:
            for place in server.required:
                self._consider(wiring, server.name, place, _unverified(known, place), now, always=False)
            for place in server.others:
                lacking = _unverified(known, place) | _absent(known, place)
                self._consider(wiring, server.name, place, lacking, now, always=True)
        look_at_protection(wiring, self._incidents, server.name, now)

    def _consider(
        self, wiring: Wiring, server: str, place: str, lacking: frozenset[str], now: datetime, *, always: bool
    ) -> None:
        """``always``: also when nothing is known to be lacking, since binary logs may be."""
        pair = (server, place)
        last = self._queued.get(pair)
        hourly = (always or bool(lacking)) and (last is None or abs(now - last) >= HOURLY)
        news = bool(lacking - self._seen.get(pair, frozenset()))
        retry = _retry_at(wiring, server, place) if always else None
        again = retry is not None and retry <= now
        if not (hourly or news or again):
            return
        if any(
            job.arguments.get("destination") == place
            for job in wiring.catalog.jobs.list(server, kind=JobKind.REPLICATE, state=OPEN)
        ):
            return  # it may have begun before the news: they stay news until it is over
        wiring.catalog.jobs.enqueue(job_for(server, place, now))
        self._queued[pair], self._seen[pair] = now, lacking


def job_for(server: str, place: str, now: datetime) -> JobRecord:
    return JobRecord(
        id=new_id(now),
        kind=JobKind.REPLICATE,
        server=server,
        state=JobState.QUEUED,
        queued_at=now,
        leg=f"{LEG}{place}",
        arguments={"destination": place},
    )


def _forget_former(wiring: Wiring, server: ServerSettings, known: tuple[BackupRecord, ...]) -> None:
    """Nothing is expected any more at a place that the policy does not name among the others now."""
    own = {record.id for record in known}
    for row in wiring.catalog.replications.list():
        if row.backup_id in own and row.destination not in server.others:
            wiring.catalog.replications.forget(row.destination, [row.backup_id])


def _absent(records: tuple[BackupRecord, ...], place: str) -> frozenset[str]:
    return frozenset(
        record.id
        for record in records
        if record.state is BackupState.COMPLETE and all(copy.destination != place for copy in record.copies)
    )


def _unverified(records: tuple[BackupRecord, ...], place: str) -> frozenset[str]:
    return frozenset(
        record.id
        for record in records
        for copy in record.copies
        if copy.destination == place and copy.state == str(BackupState.COMPLETE) and copy.verified_at is None
    )


def _retry_at(wiring: Wiring, server: str, place: str) -> datetime | None:
    """When what fails there is tried again; None where nothing does."""
    mine = {record.id for record in wiring.catalog.backups.list(server)}
    return min(
        (
            row.not_before
            for row in wiring.catalog.replications.list(place)
            if row.backup_id in mine and row.not_before is not None
        ),
        default=None,
    )

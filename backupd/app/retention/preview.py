"""What the rules of a policy say about the backups at each destination: read from the catalog, decided by
`backupd.retention.decisions`.

Nothing here changes anything; ``backupd.app.retention.retention`` acts on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from types import MappingProxyType
from zoneinfo import ZoneInfo

from backupd.app.context.wiring import Wiring
from backupd.app.retention.deletion import (
    DELETED,
)
from backupd.app.retention.holds import holds_of, kept_anywhere
from backupd.app.retention.log_retention import Archive, archive, settled
from backupd.model.backup_record import BackupRecord, BackupState, Copy
from backupd.model.errors import BackupdError, NotFoundError
from backupd.model.job import JobKind, JobState
from backupd.model.manifest import Stats
from backupd.model.proof import FAILED, PROVED
from backupd.model.thaw import GIB, MONTH_DAYS
from backupd.recovery.lineage import lineages, strangers
from backupd.retention.decisions import solve
from backupd.retention.values import Decisions, Minimum, Stored, View
from backupd.transfer.guards.holds_and_marks import Backup, Kept
from backupd.transfer.sweep.collection import living_intents, living_pins
from policies.schema import Keep
from storage.contract.destination import Destination


def may_come(record: BackupRecord, place: str, by_id: Mapping[str, BackupRecord]) -> bool:
    """Was it never at ``place``, and can it come there, with all that it builds on?"""
    if record.state_at(place):
        return False
    one: BackupRecord | None = record
    seen: set[str] = set()
    while one is not None and one.id not in seen:
        seen.add(one.id)
        if one.state is not BackupState.COMPLETE or not any(copy.state == "complete" for copy in one.copies):
            return False
        if one.parent is None:
            return True
        one = by_id.get(one.parent)
    return False


def minimum_of(wiring: Wiring, copy: Copy, stats: Stats) -> Minimum | None:
    """Of a copy at a destination whose storage class has a minimum storage time; None for any other.

    It counts from when the copy was stored. Objects that it shares with earlier backups were stored before, and those
    that it shares with later ones stay: so it is over by then at the latest, and costs at most what is told.
    """
    settings = wiring.settings
    if copy.destination not in settings.destinations:
        return None
    storage_class = settings.destinations[copy.destination].kept_in(logs=False)
    prices = settings.configuration.archive.prices.as_prices()
    time = prices.minimum(storage_class)
    if not time:
        return None
    monthly = prices.per_gib_month.get(storage_class)
    per_day = None if monthly is None else stats.bytes_stored / GIB * monthly / MONTH_DAYS
    return Minimum(storage_class, copy.stored_at + time, per_day, prices.currency)


def logs_minimum(wiring: Wiring, place: str) -> tuple[str, timedelta] | None:
    """The storage class that complete binary logs lie in at a destination, and its minimum storage time."""
    settings = wiring.settings
    if place not in settings.destinations:
        return None
    storage_class = settings.destinations[place].kept_in(logs=True)
    time = settings.configuration.archive.prices.as_prices().minimum(storage_class)
    return (storage_class, time) if time else None


def preview(wiring: Wiring, server: str, *, now: datetime, future: Sequence[Stored] = ()) -> tuple[Decisions, ...]:
    """What the rules say, one for each destination; changes nothing. ``future``: backups that do not exist yet, as if
    every destination held them.

    Raises NotFoundError for a server that is neither configured nor has any backup.
    """
    records = wiring.catalog.backups.list(server, foreign=True)
    if server not in wiring.settings.servers and not records:
        wiring.settings.server(server)
    logs = archive(wiring, server, records)
    return tuple(
        decide(wiring, server, name, records, now, logs, future=future)
        for name in destinations_holding(wiring, server, records)
    )


def foresee(
    wiring: Wiring, server: str, place: str, *, now: datetime, future: Sequence[Stored], sources: Collection[str]
) -> Decisions:
    """What the rules of ``place`` would say, did it hold the backups ``future``, too, and the binary logs of
    ``sources``; changes nothing."""
    records = wiring.catalog.backups.list(server, foreign=True)
    logs = archive(wiring, server, records)
    here = tuple(replace(run, destination=place) for run in logs.runs if run.destination in {place, *sources})
    return decide(wiring, server, place, records, now, replace(logs, runs=here), future=future, awaiting=False)


def destinations_holding(wiring: Wiring, server: str, records: Iterable[BackupRecord]) -> tuple[str, ...]:
    """Where the server's backups go by its policy, then where else the catalog knows some."""
    names: list[str] = []
    if server in wiring.settings.servers:
        settings = wiring.settings.server(server)
        names += [*settings.required, *settings.others]
    names += sorted({copy.destination for record in records for copy in record.copies})
    return tuple(dict.fromkeys(names))


def opened(wiring: Wiring, name: str) -> Destination:
    """The repository at a destination. Raises NotFoundError where there is none, DestinationError."""
    destination = wiring.destination(name)
    if not destination.is_initialised():
        raise NotFoundError(f"destination {name} is no repository", hint="is its file system mounted?")
    return destination


def _rules(wiring: Wiring, server: str, place: str) -> tuple[Keep | None, str, str]:
    """What the policy keeps at a destination, its time zone, and why there are no rules where nothing is configured."""
    settings = wiring.settings
    zone = settings.configuration.timezone
    if server not in settings.servers:
        return None, zone, f"server {server} is not configured any more, so what is left of it is kept"
    if place not in settings.destinations:
        return None, zone, f"destination {place} is not configured any more, so it keeps everything"
    policy = settings.server(server).policy
    return policy.retention.get(place), policy.timing.timezone or zone, ""


def decide(
    wiring: Wiring,
    server: str,
    place: str,
    records: Sequence[BackupRecord],
    now: datetime,
    logs: Archive,
    *,
    future: Sequence[Stored] = (),
    awaiting: bool = True,
    missing: Mapping[str, Collection[Backup]] = MappingProxyType({}),
) -> Decisions:
    """What the rules of the destination ``place`` say about ``records``, every backup of ``server`` that the catalog
    knows. ``future``: backups besides, as if they were there; ``awaiting``: what is being read or built on, or is not
    yet where it has to be copied, stays; ``missing``: by destination, backups that the catalog expects there and that
    have no manifest. Raises CatalogError."""
    keep, zone, unconfigured = _rules(wiring, server, place)
    reading, building = _in_use(wiring, server, place) if awaiting else (frozenset[str](), frozenset[str]())
    kept = kept_anywhere(wiring)
    view = View(
        server,
        place,
        (*_stored(wiring, server, place, records, kept, logs), *future),
        runs=logs.at(place, records),
        branches=logs.branches,
        being_read=reading,
        built_on=building,
        unconfigured=unconfigured,
        hold="; ".join(hold.text for hold in holds_of(kept, server)),
        logs_minimum=logs_minimum(wiring, place),
        awaited=_awaited(wiring, server, place, records, now, logs, missing) if awaiting else {},
    )
    return settled(wiring, solve(view, keep, now=now, zone=ZoneInfo(zone)), logs.branches)


def as_if_there(records: Sequence[BackupRecord], candidates: Iterable[BackupRecord], logs: Archive) -> list[Stored]:
    """``candidates``, of all the ``records`` of a server, as a destination would have them that does not yet."""
    lineage = lineages(tuple(records))
    strange = {name for one in strangers(records) for name in one.backups}
    return [
        Stored(
            record.id,
            record.kind,
            record.parent,
            record.started_at,
            record.finished_at,
            pinned=record.pinned,
            bytes=record.stats.bytes_stored,
            place=logs.places.get(record.id),
            table_set=record.table_set,
            missing=record.not_dumped,
            lineage=lineage[record.id],
            strange=record.id in strange,
            doubtful=bool(record.doubtful),
        )
        for record in candidates
    ]


def _stored(
    wiring: Wiring, server: str, place: str, records: Sequence[BackupRecord], kept: Kept, logs: Archive
) -> tuple[Stored, ...]:
    """The copies at ``place``, with everything that the rules ask about them."""
    proved, restored = _proofs(wiring, server)
    here = [(record, copy) for record in records for copy in record.copies if copy.destination == place]
    stored = as_if_there(records, [record for record, _copy in here], logs)
    return tuple(
        replace(
            one,
            usable=copy.state == "complete",
            pinned=(server, record.id) in kept.backups,
            proved_at=proved.get(record.id),
            restored_at=restored.get(record.id),
            marked=copy.state == DELETED or record.state is BackupState.DELETED,
            minimum=minimum_of(wiring, copy, record.stats),
            strange=one.strange or record.foreign,
        )
        for one, (record, copy) in zip(stored, here, strict=True)
    )


def _awaited(
    wiring: Wiring,
    server: str,
    place: str,
    records: Sequence[BackupRecord],
    now: datetime,
    logs: Archive,
    missing: Mapping[str, Collection[Backup]],
) -> dict[str, str]:
    """Backups at ``place`` that another destination of the policy would keep, and has not got, or lost (``missing``:
    it is copied there again from here, and only then can the rules let it go there): by id, why."""
    if server not in wiring.settings.servers or not (settings := wiring.settings.server(server)).usable:
        return {}
    records = [record for record in records if not record.foreign]
    here = {record.id for record in records if record.state_at(place) == "complete"}
    lost = {
        name: f"it is missing at {other}, and is copied there again"
        for other in (*settings.required, *settings.others)
        if other != place
        for owner, name in missing.get(other, ())
        if owner == server and name in here
    }
    late: dict[str, list[str]] = {}
    for other in settings.others:
        if other != place and other in wiring.settings.destinations:
            for name in _kept_when_copied(wiring, server, other, records, here, now, logs):
                late.setdefault(name, []).append(other)
    return lost | {name: f"it is not yet at {' and '.join(others)}, which keeps it" for name, others in late.items()}


def _kept_when_copied(
    wiring: Wiring,
    server: str,
    place: str,
    records: Sequence[BackupRecord],
    sources: Collection[str],
    now: datetime,
    logs: Archive,
) -> list[str]:
    """Ids of the backups that ``place`` lacks, and would keep if all of these were copied there, sorted; none where it
    lacks nothing of ``sources``."""
    by_id = {record.id: record for record in records}
    lacking = [record for record in records if may_come(record, place, by_id)]
    if not any(record.id in sources for record in lacking):
        return []
    future = as_if_there(records, lacking, logs)
    said = decide(wiring, server, place, records, now, logs, future=future, awaiting=False)
    return sorted({decision.backup.id for decision in said.kept} & {record.id for record in lacking})


def _proofs(wiring: Wiring, server: str) -> tuple[dict[str, datetime], dict[str, datetime]]:
    """When each backup was last proved, and when it was last restored and found good with or without a witness. A later
    ``failed`` takes both back; a test that never came to a verdict says nothing."""
    proved: dict[str, datetime] = {}
    restored: dict[str, datetime] = {}
    revoked: set[str] = set()
    for proof in wiring.catalog.proofs.list(server):  # newest first
        if proof.outcome == FAILED:
            revoked.add(proof.backup_id)
        elif proof.is_good and proof.backup_id not in revoked:
            restored.setdefault(proof.backup_id, proof.finished_at)
            if proof.outcome == PROVED:
                proved.setdefault(proof.backup_id, proof.finished_at)
    return proved, restored


def _in_use(wiring: Wiring, server: str, place: str) -> tuple[frozenset[str], frozenset[str]]:
    """Ids that restores read, or that are being thawed for one, and that running backups build on. Nothing where the
    destination cannot be asked: then nothing can be marked there either."""
    try:
        destination = opened(wiring, place)
        now = wiring.clock()
        reading = {name for lease in living_pins(destination, now) for owner, name in lease.backups if owner == server}
        reading |= {
            part
            for job in wiring.catalog.jobs.list(server, kind=JobKind.THAW, state=JobState.WAITING)
            for part in job.arguments["parts"]
        }
        building = {name for lease in living_intents(destination, now) for name in lease.parents}
    except BackupdError:
        return frozenset(), frozenset()
    return frozenset(reading), frozenset(building)

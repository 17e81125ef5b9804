"""Reading again what is stored of one server at one destination, in rotation, and what the catalog learns from it.

What is in an archive storage class cannot be read in rotation; a sample of it is thawed now and then, and read. Which
one is under way is in the catalog's events. Asking costs money, so one that is being thawed is not asked for again, and
the cheapest tier is taken.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from backupd.app.context.incidents import Pair
from backupd.app.context.trust import settle_tampering
from backupd.app.context.wiring import Wiring, worker_count
from backupd.app.copies.repairs import mend
from backupd.app.metacopies import signed_heads as heads
from backupd.app.reconcile.backup_records import soundness
from backupd.app.verify.log_check import verify_logs
from backupd.app.verify.rotation import Rotation, due, read_since
from backupd.model.backup_record import BackupState
from backupd.model.errors import BackupdError, DestinationError, NotFoundError, ObjectMissingError
from backupd.model.event import Event, Severity
from backupd.model.job import Report
from backupd.model.manifest import Header
from backupd.model.text import format_size
from backupd.model.thaw import TIERS
from backupd.process.throttle import Unlimited
from backupd.transfer.records.manifests import backup_ids, read
from backupd.transfer.scrub import Damage, Due, always, scrub, share_of
from backupd.transfer.thaw import ask
from storage.contract import layout, objects
from storage.contract.destination import ArchiveDestination, ColdState, Destination, Tier, as_archive


@dataclass(frozen=True, slots=True)
class Read:
    """What one run found at one destination: ids of ``backups``, how many ``objects``, ``bytes`` and ``binlogs`` were
    read, every damage with what became of it. ``cold``: how many objects lie in an archive class, where only the
    place's own checksum could be compared; ``unseen``: how many of them have none; ``sample``: what is said of the one
    that is thawed to be read; ``unbound``: backups that are not bound to what they tell in the clear."""

    backups: tuple[str, ...]
    objects: int
    bytes: int
    damages: tuple[Damage, ...]
    binlogs: int
    cold: int = 0
    unseen: int = 0
    sample: str = ""
    unbound: tuple[str, ...] = ()


def scrub_server(wiring: Wiring, destination: Destination, server: str, rotation: Rotation, report: Report) -> Read:
    """Read the shares whose turn it is; damage is put right from other destinations where they can, and quarantined
    and marked where not."""
    begun = wiring.clock()
    done = wiring.catalog.scrubs.done(server, destination.name)
    shares = due(done, rotation, begun)
    key = pending(wiring, destination, server)
    taken = layout.name_in(key) if key is not None else ""
    turn: Due = always if rotation.is_whole else (lambda name: share_of(name) in shares or name == taken)
    workers = worker_count(8)
    headers, damages = _headers(destination, server)
    scrubbed = scrub(destination, headers, report=report, workers=workers, due=turn)
    names = {header.backup_id for header in headers} | {name for item in damages for name in item.backups}
    found = _still_there(
        destination, server, (*damages, *scrubbed.damages, *_missing(wiring, destination, server, names))
    )
    logs, count = verify_logs(wiring, destination, server, report=report, workers=workers, due=turn)
    found = _quarantined(wiring, destination, mend(wiring, destination, server, headers, (*found, *logs.damages)))
    wiring.catalog.scrubs.record(server, destination.name, shares, begun)
    complete = begun if rotation.is_whole else read_since({**done, **dict.fromkeys(shares, begun)})
    _record(wiring, destination, headers, found, complete, unseen=set(scrubbed.unseen))
    _release(destination, headers, found, turn)
    if all(damage.repaired_from for damage in found):
        heads.settle(wiring, destination, server)
    else:
        heads.is_rolled_back(wiring, destination, server)
    settle_tampering(
        wiring.catalog,
        wiring.clock,
        destination.name,
        server,
        (
            damage.key
            for damage in found
            if not damage.repaired_from and damage.key.rpartition("/")[2] in (layout.MANIFEST, layout.SEGMENT)
        ),
    )
    told = sample(wiring, destination, server, key, scrubbed.cold, {damage.key for damage in found})
    return Read(
        tuple(sorted(names)),
        scrubbed.objects + logs.objects,
        scrubbed.bytes + logs.bytes,
        found,
        count,
        len(scrubbed.cold) + len(logs.cold),
        len(scrubbed.unseen) + len(logs.unseen),
        told,
        tuple(header.backup_id for header in headers if not header.is_bound),
    )


def _headers(destination: Destination, server: str) -> tuple[list[Header], list[Damage]]:
    headers: list[Header] = []
    damages: list[Damage] = []
    for owner in backup_ids(destination, server):
        found = read(destination, *owner)
        if found is None:
            continue
        if isinstance(found.header, Header):
            headers.append(found.header)
        else:
            damages.append(Damage(destination.name, layout.manifest_key(*owner), found.header.detail, (owner[1],)))
    return headers, damages


def _missing(wiring: Wiring, destination: Destination, server: str, seen: Collection[str]) -> list[Damage]:
    """Backups that the catalog expects at ``destination`` and whose manifest is not there."""
    return [
        Damage(destination.name, layout.manifest_key(record.server, record.id), "missing", (record.id,))
        for record in wiring.catalog.backups.list(server, foreign=True)
        if record.state is not BackupState.DELETED
        and record.id not in seen
        and record.state_at(destination.name) not in ("", "deleted")
    ]


def _still_there(destination: Destination, server: str, damages: Iterable[Damage]) -> tuple[Damage, ...]:
    """Without what belongs only to backups that were deleted while they were being read."""
    found = list(damages)
    if not found:
        return ()
    present = {backup_id for _server, backup_id in backup_ids(destination, server)}
    return tuple(
        damage for damage in found if set(damage.backups) & present or damage.key.endswith(f"/{layout.MANIFEST}")
    )


def _quarantined(wiring: Wiring, destination: Destination, damages: Iterable[Damage]) -> tuple[Damage, ...]:
    """Put damaged objects that nothing could repair into quarantine, where the destination can still be written."""
    told = []
    for damage in damages:
        if damage.key.startswith(layout.OBJECTS) and not damage.repaired_from:
            try:
                objects.quarantine(destination, layout.name_in(damage.key), damage.problem, wiring.clock())
            except DestinationError as error:
                damage = replace(damage, problem=f"{damage.problem}; not put into quarantine: {error.message}")  # noqa: PLW2901  the same damage, told better
        told.append(damage)
    return tuple(told)


def _record(
    wiring: Wiring,
    destination: Destination,
    headers: Sequence[Header],
    damages: Sequence[Damage],
    complete: datetime | None,
    *,
    unseen: Collection[str],
) -> None:
    """What the catalog learns of the copies. ``complete``: since when everything there was read at least once."""
    hit = {name for damage in damages if not damage.repaired_from for name in damage.backups}
    mended = {name for damage in damages if damage.repaired_from for name in damage.backups} - hit
    for name in sorted(hit):
        _mark_damaged(wiring, name, destination.name)
    blind = {
        header.backup_id
        for header in headers
        if unseen and any(layout.object_key(item.name) in unseen for item in header.objects)
    }
    for header in headers:
        name = header.backup_id
        if name in hit:
            continue
        if complete is not None and name not in blind and _stored_before(wiring, name, destination.name, complete):
            _mark_verified(wiring, name, destination.name, complete)
        elif name in mended:
            _mark_mended(wiring, header, destination)


def _release(destination: Destination, headers: Iterable[Header], damages: Iterable[Damage], turn: Due) -> None:
    """Objects that were read again and are good need no quarantine."""
    bad = {layout.name_in(damage.key) for damage in damages if damage.key and not damage.repaired_from}
    held = objects.quarantined(destination)
    if not held:
        return
    # What is in quarantine is read whatever turn it is.
    read_now = {item.name for header in headers for item in header.objects if item.name in held or turn(item.name)}
    for name in held & read_now - bad:
        # On a destination that cannot be written the note stays; it costs room, and must not hide what was found.
        with contextlib.suppress(DestinationError):
            objects.release(destination, name)


def _stored_before(wiring: Wiring, backup_id: str, place: str, moment: datetime) -> bool:
    """Was the copy there by then, and is nothing newer known of it?"""
    try:
        record = wiring.catalog.backups.get(backup_id)
    except NotFoundError:
        return False  # a backup that the catalog does not know yet: fsck says so
    return any(
        copy.destination == place
        and copy.stored_at <= moment
        and (copy.verified_at is None or copy.verified_at <= moment)
        for copy in record.copies
    )


def _mark_damaged(wiring: Wiring, backup_id: str, destination: str) -> None:
    try:
        wiring.catalog.backups.mark_copy_damaged(backup_id, destination)
        record = wiring.catalog.backups.get(backup_id)
    except NotFoundError:
        return  # as above
    if record.state is BackupState.COMPLETE and all(copy.state != "complete" for copy in record.copies):
        wiring.catalog.backups.set_state(backup_id, BackupState.DAMAGED)


def _mark_verified(wiring: Wiring, backup_id: str, destination: str, at: datetime) -> None:
    with contextlib.suppress(NotFoundError):  # as above
        wiring.catalog.backups.mark_copy_verified(backup_id, destination, at)
        _follow(wiring, backup_id)


def _mark_mended(wiring: Wiring, header: Header, destination: Destination) -> None:
    """A copy whose damages are put right is whole again, as far as anybody knows."""
    with contextlib.suppress(NotFoundError):
        record = wiring.catalog.backups.get(header.backup_id)
        if record.state_at(destination.name) == "damaged":
            state = soundness(destination, header.server, header.backup_id)
            wiring.catalog.backups.set_copy_state(header.backup_id, destination.name, state)


def _follow(wiring: Wiring, backup_id: str) -> None:
    record = wiring.catalog.backups.get(backup_id)
    if record.state is BackupState.DAMAGED and any(copy.state == "complete" for copy in record.copies):
        wiring.catalog.backups.set_state(backup_id, BackupState.COMPLETE)


SAMPLE = Pair("cold-sample-thawing", "cold-sample-read")

_YEAR = timedelta(days=365)


def pending(wiring: Wiring, destination: Destination, server: str) -> str | None:
    """The key of the sample that was asked for and not read yet."""
    last = wiring.catalog.events.last(server, (SAMPLE.broken, SAMPLE.mended), destination.name)
    return last.detail if last is not None and last.kind == SAMPLE.broken else None


def sample(
    wiring: Wiring,
    destination: Destination,
    server: str,
    key: str | None,
    cold: Collection[str],
    wrong: Collection[str],
) -> str:
    """Go on with the sample ``key`` (see ``pending``) after a run, or ask for one where it is time; what to say of it,
    if anything. ``cold``: keys that this run could not read; ``wrong``: those that it found damaged."""
    archive = as_archive(destination)
    if archive is None:
        return ""
    try:
        if key is None:
            return _begin(wiring, archive, server, cold)
        state = archive.coldness(key).state
    except ObjectMissingError:
        return _end(wiring, archive, server, key or "", "was removed before it could be read")
    if key in cold and state is not ColdState.THAWING:
        return _ask(wiring, archive, server, key)  # it went cold again before anybody read it
    if key in cold:
        return f"{destination.name}: {key} is being thawed, to be read as a sample"
    return _end(wiring, archive, server, key, "is damaged" if key in wrong else "was read, and is as it was stored")


def _begin(wiring: Wiring, archive: ArchiveDestination, server: str, cold: Collection[str]) -> str:
    policy = wiring.settings.server(server).policy if server in wiring.settings.servers else None
    count = policy.verify.cold_sample if policy is not None and policy.verify is not None else 0
    if not count or not cold:
        return ""
    last = wiring.catalog.events.last(server, (SAMPLE.broken, SAMPLE.mended), archive.name)
    if last is not None and wiring.clock() - last.at < _YEAR / count:
        return ""
    salt = f"{wiring.clock():%Y%m%d}"
    return _ask(wiring, archive, server, min(cold, key=lambda one: hashlib.sha256(f"{salt} {one}".encode()).digest()))


def _ask(wiring: Wiring, archive: ArchiveDestination, server: str, key: str) -> str:
    settings = wiring.settings.configuration.archive
    prices = settings.prices.as_prices()
    found = archive.coldness(key)
    known = prices.retrieval.get(found.storage_class, {})
    tier = next((one for one in TIERS if one in known), settings.tier)
    problem = ""
    try:
        for batch in ask(archive, [key], Tier(tier), settings.days, now=wiring.clock(), pace=Unlimited()):
            problem = batch[0].problem
    except BackupdError as error:
        problem = error.message
    if problem:
        return f"{archive.name}: {key} could not be thawed as a sample: {problem}"
    cost = prices.cost(found.storage_class, tier, 1, found.size, settings.days)
    price = "" if cost is None else f", about {cost:.4f} {prices.currency}"
    text = (
        f"{archive.name}: {key} ({format_size(found.size)}) is thawed at the tier {tier}{price}, to be read as a sample"
    )
    wiring.catalog.events.add(
        Event(wiring.clock(), SAMPLE.broken, Severity.INFO, text, server=server, subject=archive.name, detail=key)
    )
    return text


def _end(wiring: Wiring, archive: ArchiveDestination, server: str, key: str, what: str) -> str:
    text = f"{archive.name}: {key}, thawed as a sample, {what}"
    wiring.catalog.events.add(
        Event(wiring.clock(), SAMPLE.mended, Severity.INFO, text, server=server, subject=archive.name, detail=key)
    )
    return text

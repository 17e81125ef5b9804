"""The catalog's rows of backups against the manifests at a destination.

Backups that a destination holds and the catalog does not know are taken in: the manifests are the truth. Whether they
are ours is another question. What shows it is the manifest's digest that a run wrote into the catalog right before its
commit, or a signature that is believed here. Where neither does, a backup is *foreign*: shown, and meant by nothing but
its own id, until somebody adopts it.

Copies that the catalog knows and the destination does not hold any more, though nobody here removed them, count as
damaged.

Also what taking a backup of any kind begins and ends with: times that are in order, and the row of what was committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from backupd.alerts.conditions import Key
from backupd.alerts.rules import FOREIGN, LOST, NOT_OURS
from backupd.app.context.trust import report_tampering
from backupd.app.context.wiring import Wiring
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy
from backupd.model.document import Document, made_of
from backupd.model.errors import (
    BackupdError,
    KeyUnusableError,
    NotFoundError,
    RefusedError,
    TamperedError,
    UnknownNameError,
)
from backupd.model.event import Severity
from backupd.model.manifest import BodyFacts, Header, encode_header
from backupd.model.server_facts import Position
from backupd.model.text import format_duration
from backupd.recovery.chains import strangers
from backupd.transfer.deletion import is_whole, marks
from backupd.transfer.holds_and_locks import is_marked, kept_at
from backupd.transfer.records.authenticity import SignedDestination
from backupd.transfer.records.manifests import backup_ids, get_bytes, load_body, load_header, read
from policies.document import suggestion
from storage import layout
from storage.destination import Destination

if TYPE_CHECKING:
    from backupd.backup.commit import BackupSpec

STRANGE_HINT = (
    "names of servers must be unique among the installations that share a destination: rename the server in one "
    "of them, or give it another destination; until then no rule deletes those backups, and only "
    "`--to backup:ID` restores one of them here"
)
_COMPLETE, _DAMAGED = str(BackupState.COMPLETE), str(BackupState.DAMAGED)
_CLOSED = "imported from its manifest; its position is unknown, because no private key was available to decrypt it"

T = TypeVar("T")


def adopt_unknown(wiring: Wiring, destination: Destination, server: str | None = None) -> list[str]:
    """Write a row for every backup with an intact manifest at ``destination`` that has none, or none for this copy;
    gives their ids.

    Such a backup was committed by a process that died before it could write the row, or by somebody else. Damaged
    manifests are reported by fsck. A backup of another server that has the same name is taken in, too, and reported: it
    can be restored by its id.
    """
    adopted = []
    taken: set[str] = set()
    deleted, kept = marks(destination), kept_at(destination).backups
    there = backup_ids(destination, server)
    known = {one.id for one in wiring.catalog.backups.placed(destination.name, [name for _server, name in there])}
    for owner in there:
        if owner[1] in known:
            continue
        found = read(destination, *owner)
        if found is None or not isinstance(found.header, Header):
            continue
        row = wiring.catalog.backups.find(owner[1])  # whoever copies it may have recorded that meanwhile
        if row is not None and row.state_at(destination.name):
            continue
        try:
            _adopt(wiring, destination, found.header, deleted=owner in deleted, pinned=owner in kept)
        except TamperedError as error:
            report_tampering(wiring.catalog, wiring.clock, destination.name, *owner, error)
            continue
        adopted.append(owner[1])
        known.add(owner[1])
        taken.add(owner[0])
    for name in sorted(taken | ({server} if server is not None else set())):
        report_strangers(wiring, name)
        report_foreign(wiring, name)
    return adopted


def report_foreign(wiring: Wiring, server: str) -> None:
    """Say, once, that backups are there that nobody here took, and when there are none any more."""
    found = [one for one in wiring.catalog.backups.foreign(server) if one.state is not BackupState.DELETED]
    key = Key(NOT_OURS, server)
    if not found:
        wiring.settle(looked={key: f"there is no foreign backup of {server} any more"})
        return
    destinations = sorted({copy.destination for one in found for copy in one.copies})
    wiring.alert(
        key,
        Severity.WARNING,
        f"{len(found)} backups of {server} at {', '.join(destinations)} were not taken by this installation",
        detail=", ".join(one.id for one in found),
        hint="retention, test restores and restores ignore them. If they are yours (restored catalog, replaced "
        "host): backupd catalog adopt ID. If not, find out who writes to the destination",
    )


@dataclass(frozen=True, slots=True)
class Adopted(Document):
    """``bound``: does its clear manifest agree with the sealed one? None where no private key is here to look."""

    id: str
    server: str
    bound: bool | None


def adopt(wiring: Wiring, names: Sequence[str]) -> tuple[Adopted, ...]:
    """From now on these backups (ids, or servers: all foreign ones of theirs) count as taken by this installation.

    Raises NotFoundError, RefusedError for one that is not foreign; and where the first good copy of one is not what was
    found there, or is not what was sealed, TamperedError or DamagedError; then nothing is adopted.
    """
    foreign = {one.id: one for one in wiring.catalog.backups.foreign()}
    chosen: dict[str, BackupRecord] = {}
    for name in names:
        some = [one for one in foreign.values() if name in (one.id, one.server)]
        if not some and name not in wiring.settings.servers:
            try:
                wiring.catalog.backups.get(name)
            except NotFoundError as error:
                known = [*(one.id for one in wiring.catalog.backups.every(foreign=True)), *wiring.settings.servers]
                raise UnknownNameError(
                    f"there is no backup or server {name}{suggestion(name, known)}",
                    hint="`backupd backups` lists those that are known",
                ) from error
            raise RefusedError(f"backup {name} is not foreign", hint="`backupd backups` shows the foreign ones")
        chosen |= {one.id: one for one in some}
    looked = [Adopted(one.id, one.server, _looked(wiring, one)) for one in chosen.values()]
    for one in looked:
        wiring.catalog.backups.adopt(one.id)
    for server in sorted({one.server for one in looked}):
        report_foreign(wiring, server)
    return tuple(looked)


def _looked(wiring: Wiring, record: BackupRecord) -> bool | None:
    """See ``Adopted.bound``. Raises for a backup of which no copy is as it should be."""

    def read(destination: Destination, header: Header) -> bool | None:
        if wiring.settings.restore is None:
            return None
        load_body(destination, header, wiring.unsealer())
        return header.is_bound

    try:
        return of_first_copy(wiring, record, read)
    except KeyUnusableError:
        return None


def of_first_copy(wiring: Wiring, record: BackupRecord, read: Callable[[Destination, Header], T]) -> T:
    """What is read of a copy, and of the first one of which it can be. Raises NotFoundError, the first reason where
    there is none, and KeyUnusableError at once: what one copy is sealed for all are."""
    errors: list[BackupdError] = []
    for copy in record.copies:
        try:
            destination = wiring.destination(copy.destination)
            return read(destination, load_header(destination, record.server, record.id))
        except KeyUnusableError:
            raise
        except BackupdError as error:
            errors.append(error)
    raise errors[0] if errors else NotFoundError(f"no destination holds backup {record.id}")


def report_strangers(wiring: Wiring, server: str) -> None:
    """Say, once, that backups of another server are stored under the name of ``server``, and when they are gone."""
    records = wiring.catalog.backups.list(server, foreign=True)
    found = [one for one in strangers(records) if not one.former and not one.apart]
    key = Key(FOREIGN, server)
    if not found:
        wiring.settle(looked={key: f"there is no backup of another server under the name {server} any more"})
        return
    wiring.alert(
        key,
        Severity.ERROR,
        "; ".join(one.words(server) for one in found),
        detail="\n".join(f"{one.uuid}: {', '.join(one.backups)}" for one in found),
        hint=STRANGE_HINT,
    )


def soundness(destination: Destination, server: str, backup_id: str) -> str:
    """The state of an unmarked copy, by what is at the destination: what was found out about it before (quarantine)
    counts whatever became of the catalog."""
    return str(BackupState.COMPLETE if is_whole(destination, server, backup_id) else BackupState.DAMAGED)


def _adopt(wiring: Wiring, destination: Destination, header: Header, *, deleted: bool, pinned: bool) -> None:
    state = str(BackupState.DELETED) if deleted else soundness(destination, header.server, header.backup_id)
    copy = Copy(destination.name, state, header.finished_at)
    try:
        wiring.catalog.backups.add_copy(header.backup_id, copy)
    except NotFoundError:
        record = record_of_manifest(wiring, destination, header, copy, pinned=pinned)
        wiring.catalog.backups.add(replace(record, foreign=not is_ours(wiring, destination, record)))
    else:
        wiring.catalog.backups.set_copy_state(header.backup_id, destination.name, state)


def is_ours(wiring: Wiring, destination: Destination, record: BackupRecord) -> bool:
    """Is it shown that this installation took (or adopted) what was found at ``destination``?"""
    return wiring.catalog.backups.committed(record.id) == record.found or (
        isinstance(destination, SignedDestination) and destination.vouches(record.server)
    )


def record_of_manifest(
    wiring: Wiring, destination: Destination, header: Header, copy: Copy, *, pinned: bool
) -> BackupRecord:
    """The row of a backup by its manifest alone. Where no private key opens the body, it has no position and no
    flavour, and a warning says why. Raises TamperedError where the body was sealed with another manifest."""
    facts: BodyFacts | None = None
    warnings: tuple[str, ...] = (_CLOSED,)
    if wiring.settings.restore is not None:
        try:
            facts = load_body(destination, header, wiring.unsealer()).facts
        except TamperedError:
            raise
        except BackupdError as error:
            warnings = (f"{_CLOSED}: {error.message}",)
        else:
            warnings = facts.warnings
    row = _row(header, facts, warnings, (copy,))
    found = hashlib.sha256(encode_header(header)).hexdigest()
    return replace(row, state=BackupState(copy.state), pinned=pinned, found=found)


def record_of(spec: BackupSpec, header: Header, facts: BodyFacts, warnings: tuple[str, ...]) -> BackupRecord:
    """The row of a backup that was committed just now."""
    copies = tuple(Copy(d.name, "complete", header.finished_at) for d in spec.destinations)
    missing = None if facts.inventory is None else tuple(name.shown for name in facts.missing)
    manifest = hashlib.sha256(encode_header(header)).hexdigest()
    return replace(_row(header, facts, warnings, copies), missing=missing, manifest=manifest)


def _row(header: Header, facts: BodyFacts | None, warnings: tuple[str, ...], copies: tuple[Copy, ...]) -> BackupRecord:
    """What the row of a backup has from its manifest. ``facts``: of the body, None where no key opens it."""
    return made_of(
        BackupRecord,
        header,
        id=header.backup_id,
        kind=BackupKind(header.kind),
        state=BackupState.COMPLETE,
        position=facts.position if facts else Position(),
        upstream=facts.receipts.upstream if facts else None,
        flavour=str(facts.server.flavour) if facts else "",
        server_version=str(facts.server.version) if facts else "",
        tool_version=str(facts.tool.version) if facts else "",
        warnings=warnings,
        member=facts.member if facts else None,
        copies=copies,
        node=facts.node if facts else None,
    )


def find_lost(wiring: Wiring, target: Destination, server: str) -> tuple[BackupRecord, ...]:
    """Backups of ``server`` of which the catalog knows a copy at ``target``, where their manifests are not, nor a mark;
    each after what it builds on. Their copies count as damaged from then on, and an event reports those that are new.
    One listing. Raises DestinationError, CatalogError."""
    known = wiring.catalog.backups.list(server)  # before the listing: a row comes after its manifest
    there = {name for _server, name in backup_ids(target, server)}
    gone = [
        record
        for record in sorted(known, key=lambda one: (one.finished_at, one.id))
        if record.id not in there
        and record.state_at(target.name) in (_COMPLETE, _DAMAGED)
        and not is_marked(target, server, record.id)
    ]
    news = [record.id for record in gone if record.state_at(target.name) == _COMPLETE]
    for name in news:
        wiring.catalog.backups.set_copy_state(name, target.name, _DAMAGED)
    if news:
        wiring.note(
            LOST.broken,
            Severity.ERROR,
            f"{len(news)} backups of {server} disappeared from {target.name}; backupd did not delete them",
            server=server,
            subject=target.name,
            detail="\n".join(news),
            hint=f"backupd copies them again from another destination; to copy them now: backupd replicate {server} "
            f"--to {target.name}. Find out what deleted them: a lifecycle rule of the bucket, or another holder of its "
            "credentials",
        )
    return tuple(gone)


def behind(wiring: Wiring, server: str) -> timedelta:
    """How far this host's clock is before the end of the newest backup, normally not at all.

    The recorded times of the next backup follow that one: their order must survive a clock that was set back. Leases
    and tombstones go by the clock itself, which is the same for everybody here.
    """
    last = max((record.finished_at for record in wiring.catalog.backups.list(server)), default=None)
    now = wiring.clock()
    return timedelta(0) if last is None or now > last else last + timedelta(seconds=1) - now


def clock_warning(late: timedelta) -> tuple[str, ...]:
    """What to say of a clock that is ``behind``."""
    if not late:
        return ()
    text = f"this host's clock is {format_duration(late.total_seconds())} before the end of the newest backup"
    return (f"{text}: the recorded times of this one follow that one, not the clock",)


def add_row(wiring: Wiring, spec: BackupSpec, record: BackupRecord) -> None:
    """Write the row of a backup that was committed just now. Between its manifest and its row another process may have
    taken it in; then its row gives way to this one, which knows more, where every destination has the very manifest
    that was stored.

    Raises RefusedError where one has another manifest of that id, DestinationError.
    """
    try:
        wiring.catalog.backups.add(record)
    except RefusedError:
        key = layout.manifest_key(record.server, record.id)
        for destination in spec.destinations:
            try:
                found = hashlib.sha256(get_bytes(destination, key)).hexdigest()
                difference = "" if found == record.manifest else f"SHA-256 {found} where {record.manifest} was stored"
            except TamperedError as error:
                difference = error.detail
            if difference:
                raise RefusedError(
                    f"backup {record.id} is in the catalog already, and its manifest at destination "
                    f"{destination.name} differs from the one just stored",
                    detail=difference,
                    hint="find out who else writes there, then take the backup again",
                ) from None
        known = wiring.catalog.backups.get(record.id)
        copies = {copy.destination: copy for copy in (*known.copies, *record.copies)}
        wiring.catalog.backups.add(replace(record, copies=tuple(copies.values()), pinned=known.pinned), replace=True)

"""Backups that a destination holds and the catalog does not know: the manifests are the truth, so they are taken in."""

from __future__ import annotations

from backupd.app.incidents import Incidents, Pair
from backupd.app.wiring import Wiring
from backupd.model.backup import BackupKind, BackupRecord, BackupState, Copy
from backupd.model.errors import BackupdError, NotFoundError
from backupd.model.event import Event, Severity
from backupd.model.manifest import Header
from backupd.model.server import Position
from backupd.recovery.lineage import strangers
from backupd.transfer.inventory import backup_ids, read
from backupd.transfer.keeping import kept_at
from backupd.transfer.manifestio import load_body
from backupd.transfer.remove import is_whole, marks
from storage.destination import Destination

FOREIGN = Pair("foreign-backups", "foreign-backups-gone")
STRANGE_HINT = ("names of servers must be unique among the installations that share a place: rename the server in one "
                "of them, or give it a place of its own; until then no rule deletes those backups, and only "
                "`--to backup:ID` restores one of them here")
_CLOSED = "taken in from its manifest; its position is unknown, because no private key was at hand to open the body"


def adopt_unknown(wiring: Wiring, destination: Destination, server: str | None = None) -> list[str]:
    """Write a row for every backup with an intact manifest at ``destination`` that has none, or none for this copy;
    gives their ids.

    Such a backup was committed by a process that died before it could write the row. Of damaged manifests fsck tells.
    One of another server that has the same name is taken in, too, and told: it can be restored by its id.
    """
    adopted = []
    taken: set[str] = set()
    deleted, kept = marks(destination), kept_at(destination).backups
    for owner in backup_ids(destination, server):
        if _is_known(wiring, owner[1], destination.name):
            continue
        found = read(destination, *owner)
        if found is None or not isinstance(found.header, Header):
            continue
        _adopt(wiring, destination, found.header, deleted=owner in deleted, pinned=owner in kept)
        adopted.append(owner[1])
        taken.add(owner[0])
    for name in sorted(taken | ({server} if server is not None else set())):
        tell_strangers(wiring, name)
    return adopted


def tell_strangers(wiring: Wiring, server: str) -> None:
    """Say, once, that backups of another server lie under the name of ``server``, and when they are gone."""
    records = wiring.catalog.backups.list(server)
    found = [one for one in strangers(records) if not one.former and not one.apart]
    incidents, now = Incidents(wiring.catalog), wiring.clock()
    if not found:
        incidents.mended(FOREIGN, Event(now, FOREIGN.mended, Severity.INFO, server=server,
                                        message=f"no backup of another server lies under the name {server} any more"))
        return
    incidents.broken(FOREIGN, Event(
        now, FOREIGN.broken, Severity.ERROR, server=server, message="; ".join(one.words(server) for one in found),
        detail="\n".join(f"{one.uuid}: {', '.join(one.backups)}" for one in found), hint=STRANGE_HINT))


def soundness(destination: Destination, server: str, backup_id: str) -> str:
    """The state of an unmarked copy, by what is at the destination: what was found out about it before (quarantine)
    counts whatever became of the catalog."""
    return str(BackupState.COMPLETE if is_whole(destination, server, backup_id) else BackupState.DAMAGED)


def _is_known(wiring: Wiring, backup_id: str, destination: str) -> bool:
    try:
        record = wiring.catalog.backups.get(backup_id)
    except NotFoundError:
        return False
    return any(copy.destination == destination for copy in record.copies)


def _adopt(wiring: Wiring, destination: Destination, header: Header, *, deleted: bool, pinned: bool) -> None:
    state = str(BackupState.DELETED) if deleted else soundness(destination, header.server, header.backup_id)
    copy = Copy(destination.name, state, header.finished_at)
    try:
        wiring.catalog.backups.add_copy(header.backup_id, copy)
    except NotFoundError:
        wiring.catalog.backups.add(record_of_manifest(wiring, destination, header, copy, pinned=pinned))
    else:
        wiring.catalog.backups.set_copy_state(header.backup_id, destination.name, state)


def record_of_manifest(wiring: Wiring, destination: Destination, header: Header, copy: Copy, *, pinned: bool,
                       ) -> BackupRecord:
    """The row of a backup by its manifest alone. Where no private key opens the body, it has no position and no
    flavour, and a warning says why."""
    position, flavour, server_version, tool_version = Position(), "", "", ""
    warnings: tuple[str, ...] = (_CLOSED,)
    if wiring.settings.restore is not None:
        try:
            facts = load_body(destination, header, wiring.unsealer()).facts
        except BackupdError as error:
            warnings = (f"{_CLOSED}: {error.message}",)
        else:
            position, warnings = facts.position, facts.warnings
            flavour, server_version = str(facts.server.flavour), str(facts.server.version)
            tool_version = str(facts.tool.version)
    return BackupRecord(
        id=header.backup_id, server=header.server, kind=BackupKind(header.kind),
        state=BackupState(copy.state), parent=header.parent,
        started_at=header.started_at, finished_at=header.finished_at, stats=header.stats, position=position,
        flavour=flavour, server_version=server_version, tool_version=tool_version, pinned=pinned, warnings=warnings,
        copies=(copy,), from_lsn=header.from_lsn, to_lsn=header.to_lsn, server_uuid=header.server_uuid,
        reason=header.reason, table_set=header.table_set, tables_missing=header.tables_missing)

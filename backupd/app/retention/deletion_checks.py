"""May this backup be deleted? What keeps it: a hold, a pin, a running backup that builds on it, or that nothing else of
its server can be restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backupd.app.context.wiring import Wiring
from backupd.app.retention.holds import holds_of, kept_anywhere
from backupd.model.backup_record import EVERY_SERVER, BackupKind, BackupRecord, BackupState
from backupd.model.errors import BackupdError, RefusedError
from backupd.recovery.chains import lineages
from backupd.transfer.deletion import restorable_at
from backupd.transfer.holds_and_locks import Kept
from backupd.transfer.leases import living_intents
from backupd.transfer.records.manifests import read
from storage.destination import Destination


def require_may_go(wiring: Wiring, victims: Sequence[BackupRecord], others: Sequence[BackupRecord]) -> None:
    """Raises RefusedError when one of ``victims`` has to stay; ``others``: what the server has besides."""
    kept = kept_anywhere(wiring, victims[0].server)
    intents = [
        lease
        for destination in dict.fromkeys(one for victim in victims for one in destinations_of(wiring, victim))
        for lease in living_intents(destination, wiring.clock())
    ]
    needed_by = {parent: lease.id for lease in intents for parent in lease.parents}
    if (refusal := _refusal(victims, kept, needed_by)) is not None:
        raise refusal
    # The catalog alone may be wrong in both directions, so the destinations are asked.
    if any(_is_somewhere(wiring, victim) for victim in victims) and not any(
        _is_restorable(wiring, other) for other in _stand_ins(victims, others)
    ):
        raise _last_one(victims)


def _refusal(victims: Sequence[BackupRecord], kept: Kept, needed_by: Mapping[str, str]) -> RefusedError | None:
    """What of holds, keeps and running backups (``needed_by``: theirs, by the backup that they build on) is against the
    deletion. Pure."""
    server = victims[0].server
    for hold in holds_of(kept, server):
        return RefusedError(
            f"nothing of {server} is deleted: {hold.text}",
            hint=f"`backupd hold {hold.server if hold.server != EVERY_SERVER else '--all'} --release` allows it again",
        )
    for victim in victims:
        if (victim.server, victim.id) in kept.backups:
            return RefusedError(
                f"backup {victim.id} is kept (`backupd backups keep`)",
                hint=f"`backupd backups keep {victim.id} --release` releases it",
            )
        if victim.foreign:
            return RefusedError(
                f"backup {victim.id} is foreign: nothing shows that this installation took it",
                hint=f"if it is yours: backupd catalog adopt {victim.id}; then it can be deleted",
            )
        if victim.id in needed_by:
            return RefusedError(
                f"backup {victim.id} is needed by {needed_by[victim.id]}, which is being written",
                hint=f"wait for it to end, or cancel it: backupd jobs cancel {needed_by[victim.id]}",
            )
    return None


def _stand_ins(victims: Sequence[BackupRecord], others: Sequence[BackupRecord]) -> list[BackupRecord]:
    """Those of ``others`` that replace every one of ``victims``, if they can be restored. Pure."""
    lineage = lineages((*victims, *others))
    return [
        other
        for other in others
        if not other.foreign
        and all(_replaces(other, victim) and (lineage[victim.id] or not lineage[other.id]) for victim in victims)
    ]


def _last_one(victims: Sequence[BackupRecord]) -> RefusedError:
    server = victims[0].server
    what = victims[-1].id if len(victims) == 1 else ids_of(victims)
    kind = "backup" if any(victim.kind is not BackupKind.LOGICAL for victim in victims) else "dump of its tables"
    return RefusedError(
        f"backup {what} is the only restorable {kind} of {server}: the last one is kept",
        hint=f"take another one first: backupd backup {server} {_another(victims)}",
    )


def _another(victims: Sequence[BackupRecord]) -> str:
    """Options for a backup that replaces ``victims``."""
    sets = {victim.table_set for victim in victims}
    if any(victim.kind is not BackupKind.LOGICAL for victim in victims) or len(sets) > 1:
        return "--kind full"
    return "--kind logical" + "".join(f" --set {name}" for name in sets if name)


def _replaces(other: BackupRecord, victim: BackupRecord) -> bool:
    """A dump may lack tables, so it replaces dumps of the same tables only."""
    if other.doubtful or (other.missing and not victim.missing):
        return False
    if other.kind is not BackupKind.LOGICAL:
        return True
    same = victim.kind is BackupKind.LOGICAL and victim.table_set == other.table_set
    return same and (not other.tables_missing or bool(victim.tables_missing))


def _is_somewhere(wiring: Wiring, record: BackupRecord) -> bool:
    return any(
        read(destination, record.server, record.id) is not None for destination in destinations_of(wiring, record)
    )


def _is_restorable(wiring: Wiring, record: BackupRecord) -> bool:
    """Complete by the catalog, and whole and unmarked at one destination at least, with everything it builds on."""
    if record.state is not BackupState.COMPLETE:
        return False
    for destination in destinations_of(wiring, record):
        try:
            if restorable_at(destination, record.server, record.id):
                return True
        except BackupdError:
            continue  # a destination that cannot be reached does not vouch for anything
    return False


def destinations_of(wiring: Wiring, record: BackupRecord) -> list[Destination]:
    """Where it is stored, without destinations that are not configured any more."""
    return [
        wiring.destination(copy.destination)
        for copy in record.copies
        if copy.destination in wiring.settings.destinations
    ]


def ids_of(records: Sequence[BackupRecord]) -> str:
    return ", ".join(record.id for record in records)

"""Chains, a full backup and the increments that build on it, and which backups are under a server's name. Pure.

Chains are linear in what they are given. Parents are named by their ids and by nothing else: log sequence numbers of
some tools stay the same over several increments, and times follow a clock.

The name of a server is all that a destination files backups by. Where two installations share a destination and each
calls a server by the same name, the backups of both are there side by side; only the server's own uuid distinguishes
them. A backup is our own when its uuid is that of one that this installation made. A server that was replaced or
restored has another uuid from then on, and both are ours.

But who answers under a name may be another server by mistake (a wrong port, a name that resolves elsewhere). So one
with a new uuid has to show whose history it goes on from (``judge``); of one that does not, the backups are kept
``apart``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.binlog import MariadbGtids, covers
from backupd.model.errors import DamagedError, NotFoundError
from backupd.model.server_facts import STRANGER, Identity, Verdict
from backupd.recovery.restorable import Restorability, climb
from backupd.recovery.runs import holder_of_each


def chain_of(backup_id: str, backups: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    """What a restore of ``backup_id`` needs: the full backup first, ``backup_id`` last.

    Raises NotFoundError naming the parent that is not among ``backups`` (or ``backup_id`` itself), DamagedError for
    parents that lead round in a circle or to another server.
    """
    by_id = {backup.id: backup for backup in backups}
    if backup_id not in by_id:
        raise NotFoundError(f"there is no backup {backup_id}", hint="`backupd backups` lists the known ones")

    def parent_of(child_id: str) -> str | None:
        child = by_id[child_id]
        if child.kind is not BackupKind.PHYSICAL_INCREMENTAL:
            return None
        parent = by_id.get(child.parent or "")
        if parent is None:
            raise NotFoundError(
                f"backup {child.id} builds on {child.parent or 'a backup that is not named'}, which is missing",
                hint="choose another backup; `backupd fsck` shows why",
            )
        if wrong := _wrong_parent(child, parent):
            raise DamagedError(f"backup {backup_id} cannot be restored", [wrong], hint="choose another backup")
        return parent.id

    members = [by_id[one] for one in climb(backup_id, parent_of)]
    if (first := members[-1]).kind is BackupKind.PHYSICAL_INCREMENTAL:
        wrong = f"{first.id} builds on {first.parent}, which builds on it"
        raise DamagedError(f"backup {backup_id} cannot be restored", [wrong], hint="choose another backup")
    return tuple(reversed(members))


def _wrong_parent(child: BackupRecord, parent: BackupRecord) -> str:
    if parent.server != child.server:
        return f"{child.id} of {child.server} builds on {parent.id}, which is of {parent.server}"
    if parent.kind is BackupKind.LOGICAL:
        return f"{child.id} builds on {parent.id}, which is a logical backup"
    return ""


def restorable(backups: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    """Complete physical backups whose every parent is complete, too, with one destination that holds them all and has
    none of them marked deleted, and none of them doubtful or foreign; oldest first. A copy that is known to be damaged
    counts: the others may fill in."""
    by_id = {backup.id: backup for backup in backups}
    walk = Restorability(by_id.get, _to_begin_with)
    return tuple(sorted((one for one in by_id.values() if walk.of(one).destinations), key=_order))


def _to_begin_with(backup: BackupRecord) -> frozenset[str]:
    """Where a copy is of a backup that a server may be restored from."""
    fits = backup.state is BackupState.COMPLETE and backup.kind is not BackupKind.LOGICAL
    return _destinations(backup) if fits and not backup.doubtful and not backup.foreign else frozenset()


def dumps(backups: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    """Complete logical backups that one destination holds, oldest first: those of the set without a name, which is the
    server's main one, or, where there is none, of all sets. Out of them tables are restored, never a server."""
    listed = [
        b
        for b in backups
        if b.state is BackupState.COMPLETE and b.kind is BackupKind.LOGICAL and _destinations(b) and not b.foreign
    ]
    return tuple(sorted([b for b in listed if not b.table_set] or listed, key=_order))


def _destinations(backup: BackupRecord) -> frozenset[str]:
    return frozenset(copy.destination for copy in backup.copies if copy.state != "deleted")


def dependants(backup_id: str, backups: Iterable[BackupRecord]) -> tuple[BackupRecord, ...]:
    """Everything that cannot be restored without ``backup_id``, however many steps away, oldest first."""
    children = _children(backups)
    found: dict[str, BackupRecord] = {}
    pending = list(children.get(backup_id, ()))
    while pending:
        child = pending.pop()
        if child.id not in found and child.id != backup_id:
            found[child.id] = child
            pending += children.get(child.id, ())
    return tuple(sorted(found.values(), key=_order))


def _children(backups: Iterable[BackupRecord]) -> dict[str, list[BackupRecord]]:
    """Increments by the backup they build on, oldest first."""
    children: dict[str, list[BackupRecord]] = {}
    for backup in sorted(backups, key=_order):
        if backup.kind is BackupKind.PHYSICAL_INCREMENTAL and backup.parent is not None:
            children.setdefault(backup.parent, []).append(backup)
    return children


def _order(backup: BackupRecord) -> tuple[object, ...]:
    return backup.finished_at, backup.id


@dataclass(frozen=True, slots=True)
class Strange:
    """Backups under our server's name of a server with another uuid, which this installation never backed up, or which
    answered under the name and is kept ``apart`` until somebody accepts it.

    ``former``: all of them ended before the first of ours, as after a rebuild of the catalog of a server that was
    replaced; otherwise two servers live under one name.
    """

    uuid: str
    ours: str
    backups: tuple[str, ...]
    former: bool
    apart: bool = False

    def words(self, server: str) -> str:
        """Which backups are of which other server, in words."""
        count = (
            f"{len(self.backups)} backups under the name {server} are"
            if len(self.backups) > 1
            else f"backup {self.backups[0]} under the name {server} is"
        )
        return f"{count} of server {self.uuid}; ours is {self.ours}"


def strangers(records: Iterable[BackupRecord]) -> tuple[Strange, ...]:
    """Of one server; nothing where this installation made no backup of it, so that nobody can tell."""
    everything = sorted(records, key=lambda record: (record.finished_at, record.id))
    made = [record for record in everything if _is_of_here(record) and record.server_uuid and not record.apart]
    apart = {record.server_uuid for record in everything if record.apart}
    if not made:
        if not apart:
            return ()
        made = [record for record in everything if record.server_uuid and not record.apart]
    ours = {record.server_uuid for record in made}
    found: dict[str, list[BackupRecord]] = {}
    for record in everything:
        if record.server_uuid and record.server_uuid not in ours:
            found.setdefault(record.server_uuid, []).append(record)
    begun = min((record.finished_at for record in everything if record.server_uuid in ours), default=None)
    ours_now = made[-1].server_uuid if made else "not among them"
    return tuple(
        Strange(
            uuid,
            ours_now,
            tuple(record.id for record in some),
            apart=uuid in apart,
            former=uuid not in apart and begun is not None and some[-1].finished_at < begun,
        )
        for uuid, some in sorted(found.items())
    )


def _is_of_here(record: BackupRecord) -> bool:
    """Did this installation make it, or was it taken from a member of a group, which are different servers?"""
    return bool(record.manifest) or record.member is not None


def lineages(records: Sequence[BackupRecord]) -> dict[str, str]:
    """Of each backup (by id) of one server: whose it is, so that none of one stands in for one of another. "" is ours,
    and whatever nobody can tell apart from that; else the uuid."""
    known = {record.server_uuid for record in records if record.server_uuid}
    ours = {record.server_uuid for record in records if record.server_uuid and _is_of_here(record) and not record.apart}
    if len(known - ours) + bool(ours) < 2:
        return {record.id: "" for record in records}
    return {record.id: "" if record.server_uuid in ours else record.server_uuid for record in records}


def standing_aside(records: Sequence[BackupRecord], *, latest: bool) -> tuple[Strange, ...]:
    """Those whose backups a target does not mean, unless it names one of them: none of a stranger is ever the
    ``latest``, and a moment is one of a former server only."""
    return tuple(one for one in strangers(records) if latest or not one.former)


@dataclass(frozen=True, slots=True)
class Met:
    """A server that answered. ``executed``: every transaction that it holds, of MariaDB the last one of each server in
    each domain. ``restored_from``: the name of the server of whose backup its data directory was made, "" where that is
    not known. ``same_log``: its binary log holds the bytes that ours held right before the position of the newest
    backup, or those that the stream copied last, and it answers where ours did. ``forked``: its binary log was compared
    with the archived one, and the position where both part is known.
    ``kin``: of MariaDB, its binary log holds transactions that are here, with the same tables and commit times.
    ``same_cluster``: it is a node of the Galera cluster whose node was here before, and has committed all that is
    known of that."""

    uuid: str
    server_id: int
    mariadb: bool
    executed: str = ""
    restored_from: str = ""
    same_log: bool = False
    forked: bool = False
    kin: bool = False
    same_cluster: bool = False


@dataclass(frozen=True, slots=True)
class Archived:
    """What is known of a server's history. ``gtids``: executed at the last position that is archived; ``server_id``: of
    the server that was there then, 0 where that is not known."""

    gtids: str = ""
    server_id: int = 0


def judge(server: str, known: Sequence[Identity], met: Met, archived: Archived) -> tuple[Verdict, str]:
    """What a server is that answered under the name ``server``, and why. ``known``: those that answered before.

    The absence of evidence is none: who does not show that it goes on from what is here is a stranger.
    """
    ours = [one for one in known if not one.is_stranger]
    same = next((one for one in ours if one.uuid == met.uuid), None)
    if same is not None:
        return same.verdict, same.evidence
    own = next(
        (
            why
            for holds, why in (
                (not ours, "the first server that answered under this name"),
                (met.restored_from == server, f"its data directory was restored from a backup of {server}"),
                (met.same_log, "its binary log holds what was backed up or streamed last"),
                (met.same_cluster, "it is a node of the same Galera cluster, and nodes of one cluster are one history"),
            )
            if holds
        ),
        "",
    )
    if own:
        return Verdict.OWN, own
    if met.forked:
        return Verdict.FAILOVER, "its binary log goes on from a known position of the archived one"
    if why := _lacks(met, archived):
        return Verdict.STRANGER, why
    if met.mariadb and not met.kin:
        return Verdict.STRANGER, (
            f"it has the GTIDs of the last archived transactions ({archived.gtids[:200]}), which any MariaDB server "
            "may have given, and its binary log does not show the same transactions (a replica keeps them with "
            "log_slave_updates)"
        )
    return Verdict.FAILOVER, f"it holds the last archived transaction ({archived.gtids[:200]})"


def _lacks(met: Met, archived: Archived) -> str:
    """Why it is not shown that a server holds what was archived last; "" when it is."""
    if not archived.gtids:
        return "nothing with a GTID is archived or backed up that it could be asked for"
    if not met.executed:
        return "it has no GTIDs by which its history could be known again"
    try:
        if not met.mariadb:
            held = covers(met.executed, archived.gtids, mariadb=False)
        elif _is_twin(met, archived):
            # No server replicates from one of its own number.
            return f"it has the same server_id {met.server_id}, so it is no replica, and its history is another one"
        else:
            held = all(
                map(holder_of_each(met.executed, mariadb=True), str(MariadbGtids.parse(archived.gtids)).split(","))
            )
    except ValueError:
        return f"the last archived transactions ({archived.gtids[:200]}) are none of its kind of server"
    return "" if held else f"it lacks the last archived transactions ({archived.gtids[:200]})"


def _is_twin(met: Met, archived: Archived) -> bool:
    """Has it the number of the server that was there before? Where that is not known, those who wrote last have it."""
    writers = {number for number, _sequence in MariadbGtids.parse(archived.gtids).last.values()}
    return met.server_id == archived.server_id if archived.server_id else met.server_id in writers


def strangers_by_backups(records: Iterable[BackupRecord]) -> dict[str, str]:
    """For a catalog that is made anew: uuids of strangers, by what their backups say (see ``STRANGER``), with that. One
    that was accepted has a newer backup that does not say it."""
    newest: dict[str, BackupRecord] = {}
    for record in sorted(records, key=lambda record: (record.finished_at, record.id)):
        if record.server_uuid:
            newest[record.server_uuid] = record
    return {uuid: record.reason for uuid, record in newest.items() if record.reason.startswith(STRANGER)}

"""Who answers under a server's name: compared at every contact, so that a wrong port, a name that resolves elsewhere or
a failover is noticed, and the backups and binary logs of a stranger are kept apart until somebody accepts it."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backupd.alerts.conditions import Key
from backupd.alerts.rules import CHANGED
from backupd.app.context.settings import ServerSettings, spool_folder
from backupd.app.context.wiring import Wiring
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState
from backupd.model.binlog import Branch, BranchReason, covers
from backupd.model.errors import BackupdError, NotFoundError, RefusedError
from backupd.model.event import Severity
from backupd.model.server_facts import (
    PRIMARY,
    STRANGER,
    Flavour,
    Identity,
    Role,
    ServerInfo,
    Verdict,
    WsrepState,
)
from backupd.model.text import format_time
from backupd.recovery.chains import Archived, Met, judge, strangers_by_backups
from backupd.recovery.runs import holder_of_each, last_of

if TYPE_CHECKING:
    from backupd.backup.finding import Finding
    from backupd.engine.server.binary_logs import SourceState
    from backupd.engine.sql.client import Connection, Session

FAILOVER = "server-failover"
_NOTED = timedelta(minutes=1)
"""Between two notes of when a server answered last, where no other one did meanwhile."""


_SAMPLED = timedelta(days=1)
"""How old a look at another node may be by which its cluster is known."""
_STALL = 20.0
"""Seconds after which a copy of another server's log of which nothing comes is given up."""


def accept_hint(server: str) -> str:
    """What to do about a stranger."""
    return (
        f"check host, port and socket of {server} in the configuration; to accept this server: backupd server accept "
        f"{server}"
    )


def meet(
    wiring: Wiring, server: str, session: Session, info: ServerInfo, *, adopt: bool = True, member: str = ""
) -> Identity | None:
    """Compare the server that answers in ``session`` with those that answered under the name ``server`` before, keep
    what was found, and say so where it is a stranger or has taken over. None where it reports no uuid. Without
    ``adopt`` the first one of all is not kept, and None: whoever only looks does not decide which server is meant.
    ``member``: of the group ``server``, through which it is reached: members are different servers of one history.

    Raises CatalogError, ServerError; RefusedError for a copy of our data directory: its backups would say to be ours.
    """
    from backupd.engine.server.wsrep import probe_wsrep
    from backupd.engine.sql.dialect import dialect_of
    from restore.datadir.staging import restored_by

    known = known_of(wiring, server)
    address = session.connection.address
    if dialect_of(info.flavour, info.version).keeps_uuid_in_datadir and _has_moved(known, info.server_uuid, address):
        archived, executed = _archived(wiring, server, known).gtids, _executed(session, info, mariadb=False)
        if archived and executed and not covers(executed, archived, mariadb=False):
            copied = _copied(
                wiring,
                server,
                known,
                f"{info.server_uuid} at {address}",
                address,
                f"lacks the last archived transactions ({archived[:200]})",
            )
            raise stranger_refused(copied, "backupd does nothing on it")
    if (found := _same(wiring, server, info.server_uuid, known, address)) is not None:
        return found
    if not info.server_uuid or (not known and not adopt):
        return None
    mariadb = info.flavour is Flavour.MARIADB
    same_log, kin = _by_spool(wiring, server, session, known) if known else (False, False)
    met = Met(
        info.server_uuid,
        info.server_id,
        mariadb,
        _executed(session, info, mariadb=mariadb),
        kin=kin,
        restored_from=_restored_from(wiring, restored_by(Path(info.datadir))),
        same_log=same_log or (_is_at_home(known, address) and _has_same_log(wiring, server, info)),
        same_cluster=info.role is Role.NODE and _is_same_cluster(wiring, server, probe_wsrep(session), known, address),
    )
    return _keep(wiring, server, known, met, address, member)


def meet_stream(
    wiring: Wiring, server: str, state: SourceState, branch: Branch, address: str, *, member: str = ""
) -> Identity | None:
    """As ``meet``, for the server whose binary log was just seen to be ``branch``, byte for byte where that was
    streamed before. MariaDB makes its uuid from a network address and the port: a restart may change it. Raises
    CatalogError."""
    known = known_of(wiring, server)
    if (
        not state.mariadb
        and branch.reason in (BranchReason.LOST_TAIL, BranchReason.UNKNOWN)
        and _has_moved(known, state.server_uuid, address)
    ):
        return _copied(
            wiring,
            server,
            known,
            branch.id,
            address,
            "its binary log lacks the end of the archived one; it is listed by its branch ID",
        )
    if (found := _same(wiring, server, state.server_uuid, known, address)) is not None or not state.server_uuid:
        return found
    forked = took_over(branch, state.server_uuid, is_at_home=_is_at_home(known, address))
    goes_on = branch.server_uuid != state.server_uuid and any(
        one.uuid == branch.server_uuid and not one.is_stranger for one in known
    )
    met = Met(
        state.server_uuid,
        state.server_id,
        state.mariadb,
        state.history,
        forked=forked,
        same_log=goes_on,
        restored_from=_restored_from(wiring, state.marker),
        same_cluster=branch.reason is BranchReason.NODE_CHANGED and _is_shown(wiring, member or server, branch),
    )
    return _keep(wiring, server, known, met, address, member)


def took_over(branch: Branch, uuid: str, *, is_at_home: bool) -> bool:
    """Does ``branch``, which the stream began with the server ``uuid``, go on from a known position of what was
    archived of a server with another uuid? A log that has lost its tail shows it only at the address where the known
    one was (``is_at_home``: it crashed, and MariaDB may change its uuid with a restart): elsewhere it may be a server
    that was made from the same image, whose log is equal up to where the two part."""
    if branch.server_uuid != uuid or branch.fork is None:
        return False
    return branch.reason in (BranchReason.FAILOVER, BranchReason.NODE_CHANGED) or (
        branch.reason is BranchReason.LOST_TAIL and is_at_home
    )


def known_of(wiring: Wiring, server: str) -> tuple[Identity, ...]:
    """Those that answered before; in a catalog that is older than this comparison, those of whom there are backups or
    binary logs. Raises CatalogError."""
    found = wiring.catalog.identities.of(server)
    if found:
        return found
    recall(wiring, server)
    return wiring.catalog.identities.of(server)


def recall(wiring: Wiring, server: str) -> None:
    """Keep whose backups and binary logs there are already, where nothing is kept yet of who answered."""
    records = wiring.catalog.backups.list(server)
    made = [record for record in records if record.manifest] or records
    uuids = {record.server_uuid for record in made} | {
        branch.server_uuid for branch in wiring.catalog.binlogs.branches(server)
    }
    strange, now = strangers_by_backups(records), wiring.clock()
    for uuid in sorted(uuids - {""} - {one.uuid for one in wiring.catalog.identities.of(server)}):
        verdict = Verdict.STRANGER if uuid in strange else Verdict.OWN
        wiring.catalog.identities.put(
            Identity(
                server,
                uuid,
                verdict,
                now,
                now,
                evidence=strange.get(uuid, f"there are backups or binary logs of it under the name {server}"),
            )
        )


def _is_same_cluster(
    wiring: Wiring, server: str, node: WsrepState | None, known: Sequence[Identity], address: str
) -> bool:
    """Is it a node of the cluster whose node was backed up last, which goes on (Primary) and has committed all that the
    backup holds? Where no backup says which cluster that is, its stream and other members that are known do."""
    if node is None or node.status != PRIMARY:
        return False
    backed_up = [one.node for one in wiring.catalog.backups.list(server) if one.node is not None and not one.apart]
    if backed_up:
        last = backed_up[0]
        same = node.position.uuid == last.uuid and node.position.seqno >= last.seqno
    else:
        same = node.position.uuid in _clusters(wiring, server, known, address)
    return same and not _is_of_a_copy(wiring, node)


def _clusters(wiring: Wiring, name: str, known: Sequence[Identity], address: str) -> set[str]:
    """Of which clusters the servers were that are known, but for who answers at ``address`` now."""
    from backupd.binlog.spool_files import Spool

    ours = [one for one in known if not one.is_stranger]
    found: set[str] = set()
    try:
        seen = Spool(spool_folder(wiring.settings, name)).seen()
    except BackupdError:
        seen = None
    if seen is not None and seen.cluster and seen.server_uuid in {one.uuid for one in ours}:
        found.add(seen.cluster)
    server = wiring.settings.server(name)
    for member in server.ways:
        try:
            there = server.through(member).connection().address
        except BackupdError:
            continue
        if there != address and any(one.address == there for one in ours):
            samples = wiring.catalog.nodes.of(member, wiring.clock() - _SAMPLED)
            found |= {one.uuid for one in samples[-1:]}
    return found


def _is_shown(wiring: Wiring, way: str, branch: Branch) -> bool:
    """Is the branch of another node one of the same cluster? The uuid alone does not show that where no transaction
    does: a cluster that was made of a copy has it, too."""
    from backupd.engine.server.wsrep import probe_wsrep

    if branch.fork is None:
        with suppress(BackupdError), wiring.settings.reached(way).connection().connect() as session:
            node = probe_wsrep(session)
            return node is None or not _is_of_a_copy(wiring, node)
    return True


def _is_of_a_copy(wiring: Wiring, node: WsrepState) -> bool:
    """Is it in a cluster of its own that was made of a copy of ours, whose uuid it has? The nodes that are known are
    asked: it is together with none, and apart from one."""
    from backupd.engine.server.wsrep import probe_wsrep

    apart = False
    for name in wiring.catalog.nodes.servers():
        try:
            with wiring.settings.reached(name).connection().connect() as session:
                other = probe_wsrep(session)
        except BackupdError:
            continue
        if other is None or (other.node == node.node and other.incoming == node.incoming):
            continue  # itself, under another name
        if set(other.incoming) & set(node.incoming):
            return False
        apart = apart or node.is_apart_from(other)
    return apart


def _is_at_home(known: Sequence[Identity], address: str) -> bool:
    """Did the server that is meant answer there? A copy of its data directory, whose log is equal up to where both
    part, answers elsewhere."""
    return any(one.address == address for one in known if not one.is_stranger)


def _has_moved(known: Sequence[Identity], uuid: str, address: str) -> bool:
    """Does a server that reports the known ``uuid`` answer where none of ours did? MySQL keeps it in its data
    directory, so that a copy of that reports it, too. One that an operator accepted there counts as ours."""
    ours = [one for one in known if not one.is_stranger]
    return any(one.uuid == uuid and one.address for one in ours) and not any(address == one.address for one in ours)


def _copied(wiring: Wiring, server: str, known: Sequence[Identity], name: str, address: str, why: str) -> Identity:
    """Keep that a copy of our data directory answers, as ``name``, and say so."""
    evidence = (
        f"it has the server_uuid of the known server, which answered at another address, and {why}: a copy of its data "
        "directory, or the same server with older data"
    )
    found = _noted(wiring, server, known, name, Verdict.STRANGER, address=address, evidence=evidence)
    _told_stranger(wiring, found, [one.uuid for one in known if not one.is_stranger])
    return found


def _noted(
    wiring: Wiring, server: str, known: Sequence[Identity], uuid: str, verdict: Verdict, **more: Any
) -> Identity:
    """The row of a server that answers now, written."""
    now = wiring.clock()
    since = next((one.since for one in known if one.uuid == uuid), now)
    found = Identity(server, uuid, verdict, since, now, **more)
    wiring.catalog.identities.put(found)
    return found


def _told_stranger(wiring: Wiring, found: Identity, ours: Sequence[str]) -> None:
    wiring.alert(
        Key(CHANGED, found.server),
        Severity.ERROR,
        _words(found, ours),
        detail=f"known under this name: {', '.join(ours)}",
        hint=accept_hint(found.server),
    )


def _same(wiring: Wiring, server: str, uuid: str, known: Sequence[Identity], address: str) -> Identity | None:
    """The row of a server that is known to be the right one. What a stranger left open is over then."""
    found = next((one for one in known if one.uuid == uuid and not one.is_stranger), None)
    if found is None:
        return None
    now = wiring.clock()
    if (
        abs(now - found.seen_at) > _NOTED
        or found.address != address
        or any(one.seen_at > found.seen_at for one in known)
    ):
        found = replace(found, seen_at=now, address=address)
        wiring.catalog.identities.put(found)
    wiring.settle(looked={Key(CHANGED, server): f"the server that is known as {server} answers again: {uuid}"})
    return found


def _keep(wiring: Wiring, server: str, known: Sequence[Identity], met: Met, address: str, member: str = "") -> Identity:
    verdict, why = judge(server, known, met, _archived(wiring, server, known))
    if member and verdict is Verdict.FAILOVER:  # nobody took over: members are there side by side
        verdict, why = Verdict.OWN, f"it is reached as the member {member}, and {why}"
    found = _noted(wiring, server, known, met.uuid, verdict, server_id=met.server_id, evidence=why, address=address)
    ours = [one.uuid for one in known if not one.is_stranger]
    if found.is_stranger:
        _told_stranger(wiring, found, ours)
        return found
    wiring.settle(looked={Key(CHANGED, server): f"{met.uuid} is {server}: {why}"})
    if verdict is Verdict.FAILOVER:
        wiring.note(
            FAILOVER,
            Severity.WARNING,
            f"another server answers under the name {server} at {address}: {met.uuid}; {why}",
            server=server,
            subject=met.uuid,
            detail=f"before it was {', '.join(ours)}",
            hint="no acceptance is needed: it continues as a branch of the same history; take a full backup now",
        )
    return found


def _words(found: Identity, ours: Sequence[str]) -> str:
    return (
        f"{STRANGER}: {found.server} at {found.address} is server {found.uuid}, the known one is "
        f"{', '.join(ours)}; {found.evidence}"
    )


def reason_of(found: Identity | None) -> str:
    """Why a backup of it is kept apart; "" where it is not. The backup's manifest says so, too."""
    if found is None or not found.is_stranger:
        return ""
    return f"{STRANGER}: {found.uuid}; {found.evidence}"


def problem_of(found: Identity | None, record: BackupRecord) -> BackupdError | None:
    """What there is to say of a backup that is whole, but of another server than the one that is meant."""
    if found is None or not found.is_stranger:
        return None
    return RefusedError(
        f"backup {record.id} was taken from a different server than {record.server}: no retention rule counts it, and "
        f"only --to backup:{record.id} restores it",
        detail=_detail(found),
        hint=accept_hint(record.server),
    )


def stranger_refused(found: Identity, what: str) -> RefusedError:
    """``what``: is not done with a stranger, and why."""
    return RefusedError(f"{STRANGER}: {what}", detail=_detail(found), hint=accept_hint(found.server))


def refuse_stranger(wiring: Wiring, server: str, connection: Connection, what: str) -> None:
    """Raises RefusedError where another server than the one that is meant answers; ``what``: see ``stranger_refused``.
    Raises CatalogError, ServerError, too."""
    from backupd.engine.server.probe import examine

    with connection.connect() as session:
        met = meet(wiring, server, session, examine(session, tolerant=True).info, adopt=False)
    if met is not None and met.is_stranger:
        raise stranger_refused(met, what)


def refuse_strange_member(server: ServerSettings, found: Identity | None) -> None:
    """Raises RefusedError where a server answers as a member of a group and does not show that it is one."""
    if server.member and found is not None and found.is_stranger:
        raise stranger_refused(found, f"nothing shows that {server.member} has the history of {server.name}")


def finding_of(found: Identity | None, server: str) -> list[Finding]:
    """What `backupd check` says."""
    from backupd.backup.finding import error, fine

    if found is None:
        return []
    if found.is_stranger:
        return [
            error("identity", f"{STRANGER}: {found.uuid} at {found.address}; {found.evidence}", accept_hint(server))
        ]
    return [fine("identity", f"{found.uuid} is {server}: {found.evidence}")]


def _detail(found: Identity) -> str:
    return f"{found.uuid} at {found.address}: {found.evidence}"


def accept(wiring: Wiring, server: str, by: str) -> Identity:
    """The stranger that answered last is ``server`` from now on, with its backups and binary logs. Raises NotFoundError
    for a server that is not configured, RefusedError where no stranger answered."""
    wiring.settings.server(server)
    known = known_of(wiring, server)
    strangers = sorted((one for one in known if one.is_stranger), key=lambda one: one.seen_at)
    if not strangers:
        raise RefusedError(
            f"cannot accept {server}: backupd has seen no other server under this name",
            detail="\n".join(f"{one.uuid}: {one.evidence}" for one in known),
            hint=f"to compare the server that answers now: backupd check {server}",
        )
    for one in strangers[:-1]:  # a copy of the data directory is known by its address, and by its branch
        if one.address and one.address == strangers[-1].address:
            wiring.catalog.identities.accept(one, by)
    found = wiring.catalog.identities.accept(
        replace(strangers[-1], evidence=f"accepted by {by} at {format_time(wiring.clock())}: {strangers[-1].evidence}"),
        by,
    )
    wiring.settle(looked={Key(CHANGED, server): f"{found.uuid} was accepted as {server} by {by}"})
    return found


def own_branches(wiring: Wiring, server: str) -> tuple[Branch, ...]:
    """The branches of the archived binary logs that are of the server itself: not those of a stranger, nor of one that
    nobody has compared yet. Raises CatalogError."""
    branches = wiring.catalog.binlogs.branches(server)
    known = wiring.catalog.identities.of(server)
    if not known:
        return branches
    verdicts = {one.uuid: one for one in known}
    begun = min(one.since for one in known)

    def is_own(branch: Branch) -> bool:
        found = verdicts.get(branch.id) or verdicts.get(branch.server_uuid)
        if found is None:
            return not branch.server_uuid or branch.noticed_at <= begun
        return not found.is_stranger

    return tuple(branch for branch in branches if is_own(branch))


def kept_apart(wiring: Wiring, server: str) -> tuple[str, ...]:
    """What a timeline says of strangers."""
    found = [one for one in wiring.catalog.identities.of(server) if one.is_stranger]
    if not found:
        return ()
    backups = Counter(record.server_uuid for record in wiring.catalog.backups.list(server))
    streamed = {branch.server_uuid for branch in wiring.catalog.binlogs.branches(server)}
    return tuple(
        f"another server, {one.uuid}, answered under this name between {format_time(one.since)} and "
        f"{format_time(one.seen_at)}: {backups[one.uuid]} backups"
        f"{' and the binary logs' if one.uuid in streamed else ''} of it are kept separate and not shown here"
        for one in found
        if backups[one.uuid] or one.uuid in streamed
    )


# --- evidence


def _executed(session: Session, info: ServerInfo, *, mariadb: bool) -> str:
    if mariadb:
        found = session.query("SELECT @@GLOBAL.gtid_binlog_state, @@GLOBAL.gtid_slave_pos")[0]
        return ",".join(str(one) for one in found if one)
    if info.gtid_mode == "off":
        return ""
    return str(session.scalar("SELECT @@GLOBAL.gtid_executed") or "").replace("\n", "")


def _restored_from(wiring: Wiring, marker: str) -> str:
    """The server of whose backup a data directory was made by a restore of this installation."""
    try:
        return wiring.catalog.restores.get(marker).server if marker else ""
    except NotFoundError:
        return ""


def _archived(wiring: Wiring, server: str, known: Sequence[Identity]) -> Archived:
    """The last position of the server's own history, in its binary logs or its backups, whichever is newer."""
    ours = sorted((one for one in known if not one.is_stranger), key=lambda one: one.seen_at)
    uuids = {one.uuid for one in ours}
    positions = [
        (record.finished_at, record.position.gtid)
        for record in wiring.catalog.backups.list(server)
        if record.server_uuid in uuids and record.position.gtid
    ]
    branches = [branch for branch in own_branches(wiring, server) if branch.server_uuid in uuids]
    if branches:
        runs = [run for run in wiring.catalog.binlogs.runs(server) if run.branch == branches[-1].id]
        if runs:
            last = max(runs, key=last_of)
            gtids = branches[-1].executed(last.gtids_after)
            positions.append((last.confirmed_at or last.last_at or branches[-1].noticed_at, gtids))
    return Archived(max(positions)[1] if positions else "", ours[-1].server_id if ours else 0)


def _by_spool(wiring: Wiring, server: str, session: Session, known: Sequence[Identity]) -> tuple[bool, bool]:
    """By the newest file of our own stream: does the binary log of this server hold it byte for byte, at an address
    where ours was; and is it, of MariaDB, that of a replica of ours? What cannot be read shows nothing."""
    from backupd.binlog.connection_start import first_shared, is_kin, shared_until
    from backupd.binlog.continuity import Comparison
    from backupd.binlog.session import fetch
    from backupd.binlog.spool_files import Spool
    from backupd.engine.receiver.receiver import connection_id
    from backupd.engine.server.binary_logs import BinlogSource

    ours = [one for one in known if not one.is_stranger]
    try:
        spool = Spool(spool_folder(wiring.settings, server))
        newest = spool.newest()
        if newest is None or spool.branches()[-1].server_uuid not in {one.uuid for one in ours}:
            return False, False
        source = BinlogSource(session.connection)
        state = source.look()
        number = first_shared(newest.path, state, source.previous_gtids) if state.mariadb else None
        with tempfile.TemporaryDirectory(prefix="compared-", dir=wiring.settings.spool) as folder:

            def copy(name: str) -> Path:
                taken = connection_id(server, wiring.identity_key().hex(), source.connected_ids())
                return fetch(
                    session.connection,
                    Spool(Path(folder)),
                    name,
                    connection_id=taken,
                    stall=_STALL,
                    cancel=threading.Event(),
                )

            if _is_at_home(ours, source.address) and any(
                log.name == newest.name and log.size >= newest.size for log in state.logs
            ):
                with newest.path.open("rb") as kept, copy(newest.name).open("rb") as fresh:
                    if Comparison(kept, fresh).go_on() >= newest.size:
                        return True, False
            if number is None:
                return False, False
            shared = shared_until(spool, newest, holder_of_each(state.history, mariadb=True))
            return False, is_kin([file.path for file in shared], state, number, copy)
    except (BackupdError, OSError):
        return False, False


def _has_same_log(wiring: Wiring, server: str, info: ServerInfo) -> bool:
    """Does the server's binary log hold the bytes that it held right before the position of our newest physical
    backup?"""
    from backupd.engine.server.binary_logs import missing_evidence
    from backupd.model.manifest import Header
    from backupd.transfer.records.manifests import read

    if not info.log_bin:
        return False
    newest = next(
        (
            record
            for record in wiring.catalog.backups.list(server, state=BackupState.COMPLETE)
            if record.kind is not BackupKind.LOGICAL and not record.apart and record.position.file
        ),
        None,
    )
    for name in [copy.destination for copy in newest.copies] if newest is not None else []:
        try:
            found = read(wiring.destination(name), server, newest.id) if newest is not None else None
        except BackupdError:
            continue  # another copy may show it; without any, there is no such evidence
        if found is not None and isinstance(found.header, Header) and found.header.landmarks is not None:
            return newest is not None and not missing_evidence(
                info, newest.position, found.header.landmarks.log, wiring.identity_key()
            )
    return False

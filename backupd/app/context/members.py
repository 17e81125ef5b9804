"""The members of a group, asked at the beginning of a run: who is taken, in which order, and why."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from backupd.app.context.server_identity import own_branches
from backupd.app.context.settings import ServerSettings, spool_folder
from backupd.app.context.wiring import Wiring
from backupd.backup.server_checks import elsewhere, proxy_between
from backupd.binlog.gtid_position import position_of
from backupd.binlog.spool_files import Spool
from backupd.catalog.session import Catalog
from backupd.engine.member_probe import has_received, log_end, probe_member, silence_of
from backupd.engine.physical.live_datadir import is_folder
from backupd.engine.sql.client import Session
from backupd.model.backup_record import BackupKind, Member
from backupd.model.errors import BackupdError, ConfigurationError, RefusedError, ServerError
from backupd.model.server_facts import Position
from backupd.model.text import format_time
from backupd.process.folders import read_plain
from backupd.recovery.members import Candidate, Choice, Compared, Preference, Rules, choose

NOTHING: Mapping[str, str] = {}
_COMES = 10.0
"""Seconds that the stream may take to copy what the member had."""
_PAUSE = 0.5
_MYSQL = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\Z")
"""A server_uuid; server_uid of MariaDB, which keeps none in its data directory, is another text."""
_SAYS = re.compile(rb"^server-uuid=([0-9A-Fa-f-]{36})\s*$", re.MULTILINE)
_ARRIVES = 5.0
"""Seconds that what the source has written may take to its replica: to receive it, not to apply it."""
_ASKED = 5.0
"""Seconds that a member may take to answer before another one is taken."""


def members_away(wiring: Wiring, server: ServerSettings, *, job_id: str = "") -> dict[str, str]:
    """Members that other jobs than ``job_id`` have taken out of rotation, with that in words. Raises CatalogError."""
    return {
        name: f"backup job {absence.job_id} has taken it out of rotation since {format_time(absence.since)}"
        for name in server.ways
        if (absence := wiring.catalog.absences.of(name)) is not None and absence.job_id != job_id
    }


def refuse_left_history(catalog: Catalog, server: ServerSettings) -> None:
    """Raises RefusedError for a group with members of which there are backups or binary logs under their own names,
    where the configuration does not say that these stay there. Raises CatalogError."""
    for name in server.ways:
        count, branches = len(catalog.backups.list(name)), catalog.binlogs.branches(name)
        if (count or branches) and name not in server.config.former_servers:
            raise RefusedError(
                f"{name} is a member of {server.name}, and has {count} backups{' and binary logs' if branches else ''} "
                "under its own name, which are not part of the history of the group",
                hint=f"to go on with them, name the group {name} and the member otherwise; to leave them where they "
                f"are, name {name} in former_servers of {server.name}",
            )


def members_compared(wiring: Wiring, server: ServerSettings) -> Callable[[Candidate], Compared]:
    """What the comparisons of a member with its source show now. Raises CatalogError."""
    from backupd.model.consistency import ConsistencyVerdict, consistency_of  # a server that is no group needs none

    checks = wiring.catalog.consistency_checks.list(server.name)
    max_age, now = server.policy.consistency.checksum.max_age, wiring.clock()
    words = {ConsistencyVerdict.CLEAN: Compared.EQUAL, ConsistencyVerdict.DIFFERENT: Compared.DIFFERENT}

    def compared(member: Candidate) -> Compared:
        of_member = [one for one in checks if one.replica == member.name]
        verdict = consistency_of(member.name, of_member, max_age, now, present=member.data).verdict
        return words.get(verdict, Compared.UNKNOWN)

    return compared


def not_compared(_member: Candidate) -> Compared:
    """Where nobody asks for that."""
    return Compared.UNKNOWN


def candidates(
    server: ServerSettings,
    away: Mapping[str, str] = NOTHING,
    compared: Callable[[Candidate], Compared] = not_compared,
) -> tuple[Candidate, ...]:
    """Every member of a group, as it is found now, in the order of the configuration."""
    with ThreadPoolExecutor(max_workers=max(len(server.ways), 1), thread_name_prefix="member") as pool:
        return tuple(
            replace(
                one,
                away=away.get(one.name, ""),
                compared=compared(one) if one.is_replica else Compared.UNKNOWN,
            )
            for one in pool.map(partial(_asked, server), server.ways)
        )


def sure_candidates(
    server: ServerSettings, away: Mapping[str, str], compared: Callable[[Candidate], Compared]
) -> tuple[Candidate, ...]:
    """As ``candidates``, and what a replica says of its lag is compared with its source: a receiver whose source is
    gone or hangs says nothing of that until slave_net_timeout, and the lag is 0 then."""
    found = candidates(server, away, compared)
    with ThreadPoolExecutor(max_workers=max(len(found), 1), thread_name_prefix="member") as pool:
        return tuple(pool.map(partial(_heard, server, found), found))


def _heard(server: ServerSettings, members: Sequence[Candidate], one: Candidate) -> Candidate:
    if one.trouble or one.stopped or not one.is_replica:
        return one
    by_id: dict[int, list[Candidate]] = {number: [] for number in one.follows}
    for other in members:
        if other.identity is not None and other is not one and other.identity.server_id in by_id:
            by_id[other.identity.server_id].append(other)
    lost = [other.name for other in members if other.trouble]
    try:
        with _briefly(server, one.name) as session:
            for sources in by_id.values():  # the nodes of a cluster have one server_id
                if len(sources) == 1 and (why := _not_received(server, sources[0], session)):
                    return replace(one, stopped=f"the lag of {one.name} is unknown: {why}")
            if all(by_id.values()):
                return one
            silent = silence_of(session, expected=not lost)
    except (ServerError, ConfigurationError) as error:
        return Candidate(one.name, trouble=f"it cannot be asked: {one_line(error)}")
    if lost:
        return replace(one, unheard=f"its source may be {' or '.join(lost)}, which cannot be asked", silent=silent)
    return replace(one, unheard="nothing comes from its source", silent=silent) if silent else one


def _not_received(server: ServerSettings, source: Candidate, replica: Session) -> str:
    """What a replica lacks of the log of its source, although it had the time to receive it; "" for nothing, and where
    the source does not say where its log ends."""
    number = source.identity.server_id if source.identity is not None else 0
    try:
        with _briefly(server, source.name) as session:
            end = log_end(session)
    except (ServerError, ConfigurationError):
        return ""
    if end is None:
        return ""
    deadline = time.monotonic() + _ARRIVES
    while not has_received(replica, number, end):
        if time.monotonic() > deadline:
            return f"it has not received {end.file}:{end.pos}, where the log of {source.name} was {_ARRIVES:.0f} s ago"
        time.sleep(_PAUSE / 2)
    return ""


@contextmanager
def _briefly(server: ServerSettings, member: str) -> Iterator[Session]:
    connection = server.through(member).connection()
    with replace(connection, connect_timeout=_ASKED, answer_timeout=_ASKED).connect() as session:
        yield session


def rules_of(server: ServerSettings, *, here: bool = False, needs_log: bool = False, stay: str = "") -> Rules:
    """What a run of a group asks of its member, as the configuration says."""
    config = server.config
    return Rules(Preference(config.prefer), config.max_lag, here=here, needs_log=needs_log, stay=stay)


def choices(wiring: Wiring, server: ServerSettings, kind: BackupKind, job_id: str) -> tuple[Choice, ...]:
    """The members for a backup of this kind. Raises RefusedError where none can be taken, with every reason, and as
    ``refuse_left_history``; CatalogError."""
    refuse_left_history(wiring.catalog, server)
    stay = ""
    if kind is BackupKind.PHYSICAL_INCREMENTAL:
        records = wiring.catalog.backups.list(server.name)
        physical = [one for one in records if one.kind is not BackupKind.LOGICAL and not one.apart]
        stay = max(physical, key=lambda one: (one.finished_at, one.id)).server_uuid if physical else ""
    rules = rules_of(server, here=kind is not BackupKind.LOGICAL, stay=stay)
    away = members_away(wiring, server, job_id=job_id)
    found = choose(sure_candidates(server, away, members_compared(wiring, server)), rules)
    if all(one.left for one in found):
        raise none_left(server, found)
    return found


def streamed_member(wiring: Wiring, server: ServerSettings) -> ServerSettings:
    """The group through the member whose binary log is streamed: what is read of another one has no position there.
    Raises RefusedError, CatalogError."""
    branches = own_branches(wiring, server.name)
    uuid = branches[-1].server_uuid if branches else ""
    found = choose(candidates(server), rules_of(server, needs_log=True, stay=uuid))
    first = next((one for one in found if not one.left), None)
    if first is None or first.found is None or first.found.identity is None:
        raise none_left(server, found)
    if uuid and first.found.identity.uuid != uuid:
        raise RefusedError(
            f"the member of {server.name} whose binary log is streamed cannot be asked: {uuid}",
            detail="\n".join(f"{one.name}: {one.reason}" for one in found),
            hint="the next try asks again; another member is streamed after failover_after",
        )
    return server.through(first.name, first.reason)


def none_left(server: ServerSettings, found: Sequence[Choice], failed: Sequence[tuple[str, str]] = ()) -> RefusedError:
    """No member of the group is taken."""
    lines = [*failed, *((one.name, one.reason) for one in found if one.left)]
    return RefusedError(
        f"no member of {server.name} can be taken",
        detail="\n".join(f"{name}: {why}" for name, why in lines) or "no member is in a file that is read",
        hint=f"correct one of these, and take the backup again; `backupd check {server.name}` shows every member",
    )


def member_at(wiring: Wiring, server: ServerSettings, uuid: str, position: Position) -> Member | None:
    """What the backup through a member records of it. ``uuid``: of the server that it was taken from, ``position``:
    where that was in its binary log. Where the log of the group is streamed from another member, the place there is
    found by the GTIDs, and waited for: it comes to both at its own pace."""
    if not server.member:
        return None
    plain = Member(server.member, server.because)
    folder, deadline = spool_folder(wiring.settings, server.name), time.monotonic() + _COMES
    while True:
        try:
            spool = Spool(folder)
            branches = spool.branches()
            if not branches or branches[-1].server_uuid in ("", uuid):
                return plain
            if (there := position_of(spool, position.gtid)) is not None:
                return replace(plain, log=there, log_server=branches[-1].server_uuid)
        except (BackupdError, OSError):
            break
        if not position.gtid or time.monotonic() > deadline:
            break
        time.sleep(_PAUSE)
    why = "its position in the binary log of the group is not known, so nothing is replayed onto it"
    return replace(plain, reason=f"{plain.reason}; {why}")


def _asked(server: ServerSettings, name: str) -> Candidate:
    try:
        with _briefly(server, name) as session:
            found = probe_member(session, name)
            version = str(session.scalar("SELECT @@GLOBAL.version_comment"))
            if proxy := proxy_between(session, version):
                return Candidate(name, trouble=proxy)
            return replace(found, elsewhere=next(_elsewhere(session, found), ""))
    except (ServerError, ConfigurationError) as error:
        return Candidate(name, trouble=f"it cannot be asked: {one_line(error)}")


def _elsewhere(session: Session, found: Candidate) -> Iterator[str]:
    if found.identity is None:
        return
    if far := elsewhere(session, found.identity.hostname):
        yield far
    elif not is_folder(Path(found.identity.datadir)):
        yield f"its data directory {found.identity.datadir} cannot be reached from this host"
    elif _is_of_mysql(found) and _owner(found.identity.datadir) not in ("", found.identity.uuid.lower()):
        # Hosts may have one name, and a container's folder is another one out here.
        yield f"{found.identity.datadir} on this host is the data directory of another server"


def _is_of_mysql(found: Candidate) -> bool:
    return found.identity is not None and _MYSQL.match(found.identity.uuid) is not None


def _owner(datadir: str) -> str:
    """The uuid of the MySQL server whose data directory this is; "" where it does not say."""
    try:
        said = _SAYS.search(read_plain(Path(datadir) / "auto.cnf", 4096))
    except OSError:
        return ""
    return said[1].decode().lower() if said else ""


def one_line(error: BackupdError) -> str:
    """What failed, with the first line of its detail."""
    detail = error.detail.splitlines()
    return f"{error.message} ({detail[0]})" if detail else error.message

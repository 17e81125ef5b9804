"""Does a replica hold what its source does? Checks of all tables on a schedule, and what a backup is told before it is
taken: a backup of a replica is worth what that replica is worth.

The source of a replica is the configured server that the replica itself names: which one that is shows its uuid
(MySQL) or its server id (MariaDB), asked for when it is needed, for roles change.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import ERRANT_TRANSACTIONS, INCONSISTENT_REPLICA
from backupd.app.context.members import one_line
from backupd.app.context.settings import ServerSettings, spool_unusable
from backupd.app.context.wiring import JobRun, Result, Wiring
from backupd.backup.finding import Finding, fine, from_error, warning
from backupd.backup.finding import Severity as Level
from backupd.engine.binlog.errant_statements import ErrantReport, look_for_errant, report_errant
from backupd.engine.consistency import PROGRAM, compare, missing_privileges, resume, uses_tool
from backupd.engine.member_probe import compared_server
from backupd.engine.server.errant import GtidState, errant_among, incomparable, read_gtids
from backupd.engine.server.probe import read_dialect
from backupd.engine.server.replication import ReplicaStatus, read_replicas, unordered
from backupd.engine.sql.client import DEFAULT_PORT, Connection, Session, is_denied
from backupd.model.backup_record import ERRANT, INCONSISTENT
from backupd.model.consistency import (
    NOBODY,
    ComparedServer,
    Consistency,
    ConsistencyCheck,
    ConsistencyVerdict,
    ServerConsistency,
    consistency_of,
)
from backupd.model.errors import (
    BackupdError,
    BusyError,
    ConfigurationError,
    RefusedError,
    ServerError,
    ToolError,
)
from backupd.model.event import Severity
from backupd.model.proof import Phase
from backupd.model.server_facts import Role
from backupd.model.text import new_id

_PAUSED = "paused"
"""Folder of the spool: see ``_noted``."""
_FAILS = (ServerError, ToolError, RefusedError, ConfigurationError)
"""What a member fails with whose replication, account or tool is at fault: it is left out, and the others go on."""
_NAMED = 10
"""Tables, or transactions, that a sentence names."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What a backup of a replica has to say of it: ``flags`` of the record, and ``warnings``."""

    flags: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def perform_check(wiring: Wiring, run: JobRun) -> Result:
    """The job: see ``check_consistency``. That a table differs is an incident of its own, and what was never compared
    is shown as unchecked, so that no event of the job reports either."""
    begun = time.monotonic()
    found = check_consistency(wiring, run)
    left_out = [one for one in found if one.trouble]
    lines = [
        *(f"{one.replica} was not compared: {one.trouble}" for one in left_out),
        *(f"{one.replica}: {name}: {how}" for one in found for name, how in {**one.different, **one.unchecked}.items()),
    ]
    problem = None
    if lines:
        differ, left = sum(len(one.different) for one in found), sum(len(one.unchecked) for one in found)
        members = f"; not compared at all: {', '.join(one.replica for one in left_out)}" if left_out else ""
        problem = BackupdError(
            f"{differ} tables differ from the source's and {left} were not compared{members}",
            detail="\n".join(lines),
            hint=f"backupd consistency {run.job.server} shows what all checks together say",
        )
    phases = (Phase("consistency", time.monotonic() - begun),)
    return Result(found[-1].id, 0, phases, problem, partial=True, accepted=True, reported=True)


def check_consistency(wiring: Wiring, run: JobRun) -> tuple[ConsistencyCheck, ...]:
    """Compare every replica that ``run.job.server`` means (itself, or those of its members that replicate) with its
    source, table by table, and keep what was found; of a member that cannot be compared, that and why.

    Raises RefusedError where none of them replicates from a configured server, a check of it runs already, or no member
    can be compared; ToolError, ServerError, CancelledError."""
    server = wiring.settings.server(run.job.server)
    seconds = server.policy.consistency.checksum.max_duration.total_seconds()
    pairs: list[tuple[ServerSettings, ServerSettings]] = []
    troubles: list[tuple[ServerSettings, BackupdError]] = []
    for one in _ways(wiring, server):
        try:
            sources = _only_source(wiring, one)
        except _FAILS as error:
            if not server.is_group:
                raise
            troubles.append((one, error))
            continue
        pairs += [(one, source) for source in sources]
        if not sources:
            wiring.catalog.consistency_checks.forget_failed(one.name, name_of(one))
    if not pairs and not troubles:
        raise RefusedError(
            f"{server.name} does not replicate from another server, so there is nothing to compare it with",
            hint="a consistency check compares a replica with its source; SHOW REPLICA STATUS on it says whether it is "
            "one",
        )
    made = []
    for one, source in pairs:
        run.check()
        try:
            made.append(_checked(wiring, one, source, run, seconds))
        except _FAILS as error:
            if not server.is_group or isinstance(error, BusyError):
                raise
            troubles.append((one, error))
    run.fence()
    failed = tuple(_not_compared(wiring, one, error) for one, error in troubles)
    if not made:
        kind = ServerError if any(isinstance(error, ServerError) for _one, error in troubles) else RefusedError
        raise kind(
            f"no member of {server.name} could be compared with its source",
            detail="\n".join(f"{one.replica}: {one.trouble}" for one in failed),
            hint=next((error.hint for _one, error in troubles if error.hint), ""),
        )
    return (*made, *failed)


def _not_compared(wiring: Wiring, one: ServerSettings, error: BackupdError) -> ConsistencyCheck:
    """Kept, so that nothing that was found of it before counts as clean."""
    now = wiring.clock()
    check = ConsistencyCheck(
        id=new_id(now),
        server=one.name,
        replica=name_of(one),
        source="",
        tool="",
        started_at=now,
        finished_at=now,
        trouble=one_line(error),
    )
    wiring.catalog.consistency_checks.add(check)
    return check


def _checked(
    wiring: Wiring, one: ServerSettings, source: ServerSettings, run: JobRun, seconds: float
) -> ConsistencyCheck:
    name, other = name_of(one), name_of(source)
    with wiring.locked(f"consistency-{other}", f"a consistency check on {other} is running already"):
        of_replica, of_source = one.restore_connection(), source.restore_connection()
        _resume_left(wiring, name, of_replica)
        begun, compared = wiring.clock(), _server_at(one.connection())
        found = compare(
            of_source,
            of_replica,
            run.context(wiring),
            seconds=seconds,
            pausing=lambda: _noted(wiring, name),
        )
        errant = look_for_errant(one.connection(), [source.connection()])
        if not _server_at(one.connection()).may_be(compared):
            raise RefusedError(
                f"another server answers as {name} than when the check began: what was compared counts for neither",
                hint="run the check again",
            )
    run.check()
    check = ConsistencyCheck(
        id=new_id(wiring.clock()),
        server=one.name,
        replica=name,
        source=other,
        tool=found.tool,
        started_at=begun,
        finished_at=wiring.clock(),
        equal=found.equal,
        different=found.different,
        unchecked=found.unchecked,
        errant=tuple(errant.detail.splitlines()),
        errant_unchecked=errant.unchecked,
        replica_uuid=compared.uuid,
        replica_made=compared.made,
    )
    run.fence()
    wiring.catalog.consistency_checks.add(check)
    _report_errant(wiring, one, errant, run.job.id)
    _report_tables(wiring, one, state_of(wiring, one, compared), run.job.id)
    return check


def _server_at(connection: Connection) -> ComparedServer:
    with connection.connect() as session:
        return compared_server(session, read_dialect(session))


def state_of(wiring: Wiring, server: ServerSettings, present: ComparedServer = NOBODY) -> Consistency:
    """What the checks of a server, or of the member that it is reached through, show now. ``present``: the one that
    answers, as far as that is known. Raises CatalogError."""
    name = name_of(server)
    checks = [one for one in wiring.catalog.consistency_checks.list(server.name) if one.replica == name]
    max_age = server.policy.consistency.checksum.max_age
    return consistency_of(name, checks, max_age, wiring.clock(), _present_since(wiring, server), present)


def _present_since(wiring: Wiring, server: ServerSettings) -> datetime | None:
    """When the server that is there now answered first, where it took the place of another one: a replica that was made
    anew is none that was compared. Of a member of a group that is not known by its name."""
    if server.is_group or server.member:
        return None
    known = [one for one in wiring.catalog.identities.of(server.name) if not one.is_stranger]
    if len(known) < 2:
        return None
    present = max(known, key=lambda one: one.seen_at)
    return present.since if any(one.since < present.since for one in known) else None


def _seen_last(wiring: Wiring, server: ServerSettings) -> ComparedServer:
    """Who answered last as this member of a group, as far as that is known."""
    try:
        address = server.connection().address if server.member else ""
    except (ServerError, ConfigurationError):
        address = ""
    met = [one for one in wiring.catalog.identities.of(server.name) if address and one.address == address]
    return ComparedServer(max(met, key=lambda one: one.seen_at).uuid) if met else NOBODY


def view(wiring: Wiring, server_name: str) -> ServerConsistency:
    """What is known of a server without asking it. Raises NotFoundError."""
    server = wiring.settings.server(server_name)
    checks = wiring.catalog.consistency_checks.list(server_name)
    max_age, now = server.policy.consistency.checksum.max_age, wiring.clock()
    replicas = sorted({one.replica for one in checks}) or [server_name]
    since = _present_since(wiring, server)
    seen = {name: _seen_last(wiring, server.through(name)) for name in replicas if name in server.ways}
    states = [
        consistency_of(
            name, [one for one in checks if one.replica == name], max_age, now, since, seen.get(name, NOBODY)
        )
        for name in replicas
    ]
    return ServerConsistency(server_name, tuple(states), checks)


def pass_gate(wiring: Wiring, server: ServerSettings, session: Session, role: Role, run: JobRun) -> Gate:
    """Before a backup of ``server``, to which ``session`` is open, as what it is now: what is known of it as a replica.
    Nothing where it replicates from nobody.

    Raises RefusedError where its tables differ and the policy refuses that; ServerError when it is gone."""
    if role is not Role.REPLICA and not wiring.catalog.consistency_checks.list(server.name, limit=1):
        return Gate()
    flags: list[str] = []
    warnings: list[str] = []
    found = ErrantReport()
    try:
        statuses = _statuses(session)
    except ServerError as error:  # it may be one whose threads do not run
        if not is_denied(error):
            raise
        warnings.append(f"whether {name_of(server)} holds what its source does is not known: {error.detail}")
    else:
        if role is not Role.REPLICA:
            _report_no_replica(wiring, server, run.job.id)
            return Gate()
        found = _errant_of(wiring, server, session, statuses)
        _report_errant(wiring, server, found, run.job.id)
    if found.found:
        flags.append(ERRANT)
        warnings.append(
            f"{name_of(server)} has executed transactions that its source has not: "
            + "; ".join(found.detail.splitlines()[:_NAMED])
        )
    elif found.unchecked:
        warnings.append(f"whether {name_of(server)} has errant transactions is not known: {found.unchecked}")
    if why := unordered(session, read_dialect(session)):
        warnings.append(f"no replica of the source of {name_of(server)} can be made of this backup: {why}")
    checksum = server.policy.consistency.checksum
    state = state_of(wiring, server, compared_server(session, read_dialect(session)))
    if state.verdict is ConsistencyVerdict.DIFFERENT:
        if checksum.action == "refuse":
            raise RefusedError(
                f"no backup of {name_of(server)} is taken: {state.why}",
                detail="\n".join(f"{name}: {how}" for name, how in state.different.items()),
                hint="repair the replica (pt-table-sync, or make it anew), then: "
                f"backupd consistency {server.name} --check; the policy refuses it (consistency.checksum.action)",
            )
        flags.append(INCONSISTENT)
        warnings.append(state.words)
    elif state.verdict is ConsistencyVerdict.UNCHECKED and checksum.schedule is not None:
        warnings.append(state.words)
    return Gate(tuple(flags), tuple(warnings))


def findings(wiring: Wiring, server: ServerSettings) -> Iterator[Finding]:
    """Of ``check``: can the comparisons that the policy schedules be done, with the accounts that do them? ``server``:
    as it is reached, of a group through one member."""
    if server.policy.consistency.checksum.schedule is None:
        return
    subject = "consistency"
    try:
        sources = _only_source(wiring, server)
        if not sources:
            yield fine(subject, f"{name_of(server)} replicates from nobody, so there is nothing to compare it with")
        for source in sources:
            with source.restore_connection().connect() as there, server.restore_connection().connect() as here:
                by_tool = uses_tool(read_dialect(there))
                if by_tool and shutil.which(wiring.settings.programs.get(PROGRAM, PROGRAM)) is None:
                    yield warning(subject, f"there is no {PROGRAM} here", "install percona-toolkit")
                lacks = missing_privileges(there, here)
            for one, missing in zip((source, server), lacks, strict=True):
                which = "source" if one is source else "replica"
                if missing:
                    yield warning(
                        subject,
                        f"the account on {name_of(one)} (the {which}) lacks what a consistency check needs: "
                        f"{', '.join(missing)}",
                        f"grant these to the account of restore_defaults_file of {one.name}, or set that",
                    )
                else:
                    yield fine(subject, f"the account on {name_of(one)} (the {which}) may do a consistency check")
    except (ServerError, ConfigurationError, RefusedError) as error:
        yield replace(from_error(subject, error), severity=Level.WARNING)


# -- who is whose source


def name_of(server: ServerSettings) -> str:
    """Of the server that is reached: the member of a group, or the server itself."""
    return server.member or server.name


def _ways(wiring: Wiring, server: ServerSettings) -> Iterator[ServerSettings]:
    """A server as it is reached: of a group, through each of its members."""
    return (one for one in wiring.settings.ways() if one.name == server.name)


def _statuses(session: Session) -> tuple[ReplicaStatus, ...]:
    return read_replicas(session, read_dialect(session))


def _sources(wiring: Wiring, one: ServerSettings) -> Iterator[ServerSettings]:
    """The configured servers that ``one`` replicates from. Raises RefusedError for one that is not configured,
    ServerError."""
    with one.connection().connect() as session:
        for status in _statuses(session):
            found = source_of(wiring, one, status)
            if found is None:
                raise RefusedError(
                    f"the source of {name_of(one)} is {status.source_host}:{status.source_port}, which is no "
                    "configured server that can be reached",
                    hint="add it to the configuration (an address and an account; as a member of a group, or with a "
                    "policy)",
                )
            yield found


def _only_source(wiring: Wiring, one: ServerSettings) -> list[ServerSettings]:
    """None where it replicates from nobody. Raises as ``_sources``; RefusedError where there are several: each lacks
    the tables of the others, and that would count as a difference."""
    found = list(_sources(wiring, one))
    if len(found) > 1:
        raise RefusedError(
            f"{name_of(one)} replicates from several servers ({', '.join(map(name_of, found))}): backupd compares a "
            "replica with one source that has all of its tables",
            hint="run pt-table-checksum by hand on each source for its own tables (--databases)",
        )
    return found


def source_of(wiring: Wiring, one: ServerSettings, status: ReplicaStatus) -> ServerSettings | None:
    """The configured server that a replication connection of ``one`` means, which answers now. None where none does."""
    for other in _candidates(wiring, one, status):
        with contextlib.suppress(ServerError, ConfigurationError):
            connection = other.connection()
            with connection.connect() as session:
                known = session.variables("server_id", "server_uuid", "port")
            if status.source_uuid and known.get("server_uuid"):
                if known["server_uuid"] == status.source_uuid:
                    return other
                continue
            same_port = int(known.get("port") or 0) == status.source_port or _is_at(other, status)
            if status.source_id == int(known.get("server_id") or 0) and same_port:
                return other
    return None


def _candidates(wiring: Wiring, one: ServerSettings, status: ReplicaStatus) -> list[ServerSettings]:
    """Who may be the source, the likeliest first: members of the same group, servers at that address, those that are
    known by their uuid or id, and servers of this host."""
    others = [other for other in wiring.settings.ways() if name_of(other) != name_of(one)]
    known = {
        identity.server
        for identity in wiring.catalog.identities.all()
        if (identity.uuid == status.source_uuid if status.source_uuid else identity.server_id == status.source_id)
    }

    def rank(other: ServerSettings) -> int:
        wanted = (other.name == one.name, _is_at(other, status), other.name in known, not other.config.host)
        return wanted.index(True) if True in wanted else len(wanted)

    return sorted((other for other in others if rank(other) < 4), key=rank)


def _is_at(other: ServerSettings, status: ReplicaStatus) -> bool:
    config = other.config
    return bool(config.host) and (config.host, config.port or DEFAULT_PORT) == (status.source_host, status.source_port)


# -- errant transactions


def _errant_of(
    wiring: Wiring, server: ServerSettings, session: Session, statuses: tuple[ReplicaStatus, ...]
) -> ErrantReport:
    """Compared with all sources; where one of them cannot be asked, with the other members of the group."""
    state = read_gtids(session)  # before its sources
    sources = [source_of(wiring, server, status) for status in statuses]
    reached = [source for source in sources if source is not None]
    if len(reached) == len(statuses):
        return look_for_errant(server.connection(), [source.connection() for source in reached])
    others: list[GtidState] = []
    for other in _ways(wiring, server):
        if name_of(other) != name_of(server):
            with contextlib.suppress(ServerError, ConfigurationError), other.connection().connect() as there:
                others.append(read_gtids(there))
    missing = next(
        f"{status.source_host}:{status.source_port}"
        for status, source in zip(statuses, sources, strict=True)
        if source is None
    )
    if not others:
        return ErrantReport(unchecked=f"its source {missing} is not configured, or cannot be asked")
    written = {status.source_uuid.lower() or str(status.source_id) for status in statuses}
    return report_errant(session, state, errant_among(state, others, written), incomparable(state, others))


def _report_errant(wiring: Wiring, server: ServerSettings, found: ErrantReport, job_id: str) -> None:
    key = Key(ERRANT_TRANSACTIONS, server.name, name_of(server))
    if found.found:
        message = f"{name_of(server)} has executed transactions that its source has not: " + "; ".join(
            map(str, found.found[:_NAMED])
        )
        wiring.settle(Condition(key, Severity.WARNING, message, found.detail, found.hint, job_id))
    elif not found.unchecked:
        wiring.settle(looked={key: f"{name_of(server)} has no errant transactions any more"}, job_id=job_id)


def _report_tables(wiring: Wiring, server: ServerSettings, state: Consistency, job_id: str) -> None:
    key = Key(INCONSISTENT_REPLICA, server.name, name_of(server))
    if state.different:
        wiring.settle(
            Condition(
                key,
                Severity.ERROR,
                f"{state.replica} differs from its source: {state.why}",
                "\n".join(f"{name}: {how}" for name, how in state.different.items()),
                f"repair it (pt-table-sync, or make the replica anew), then: backupd consistency {server.name} "
                "--check; until then its backups are marked inconsistent-source, or refused "
                "(consistency.checksum.action)",
                job_id,
            )
        )
    else:
        over = f"no table of {state.replica} is known to differ any more: it is {state.verdict}"
        wiring.settle(looked={key: over}, job_id=job_id)


def _report_no_replica(wiring: Wiring, server: ServerSettings, job_id: str) -> None:
    """A replica that was promoted: nothing compares it any more, and what it holds is what counts."""
    name = name_of(server)
    keys = (Key(ERRANT_TRANSACTIONS, server.name, name), Key(INCONSISTENT_REPLICA, server.name, name))
    wiring.settle(looked=dict.fromkeys(keys, f"{name} is no replica any more"), job_id=job_id)


# -- an applier that is paused


@contextlib.contextmanager
def _noted(wiring: Wiring, replica: str) -> Iterator[None]:
    """While the applier of ``replica`` is paused, a note in the spool says so: should this process die, the service,
    or the next check, starts it again."""
    note = _note(wiring, replica)
    with wiring.locked(f"paused-{replica}", f"the replication of {replica} is paused by another check"):
        try:
            note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            note.touch()
        except OSError as error:
            raise spool_unusable(wiring.settings.spool, error) from error
        yield
        note.unlink(missing_ok=True)  # what the block raises leaves it: perhaps the applier could not be started


def _note(wiring: Wiring, replica: str) -> Path:
    return wiring.settings.spool / _PAUSED / replica


def _resume_left(wiring: Wiring, replica: str, connection: Connection) -> None:
    note = _note(wiring, replica)
    if note.exists():
        with wiring.locked(f"paused-{replica}", f"the replication of {replica} is paused by a check that goes on"):
            resume(connection)
            note.unlink(missing_ok=True)


def resume_paused(wiring: Wiring) -> None:
    """Start the appliers that a check which was killed left paused. Those of a check that goes on are left alone.
    Quiet where a server cannot be reached: the note stays, and the next look tries again."""
    folder = wiring.settings.spool / _PAUSED
    for note in sorted(folder.iterdir()) if folder.is_dir() else ():
        with contextlib.suppress(BackupdError):
            _resume_left(wiring, note.name, wiring.settings.reached(note.name).restore_connection())

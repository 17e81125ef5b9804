"""Errant transactions: what a replica has executed and its source has not.

A replica that is a member of a group, or was promoted once, or was written to by hand, holds transactions of its own.
Its data is then not its source's, and a server that takes over from it, or is made of its backup, gives them to
everybody else, or asks for them where they have been purged.

MySQL: both servers have a set of GTIDs, and what is errant is the difference of the two. MariaDB: a replica's own log
says the last transaction of each server in each domain (``gtid_binlog_state``), and a position names all that came
before it in its domain; so what is compared is ``domain-server``, not the domain, in which a later transaction of the
source hides an earlier one of the replica. How many transactions are behind such a pair is not known: numbers are given
out by domain, so those of one server have holes.

The replica is read first and its source afterwards, or whatever is committed and replicated in between would seem to be
errant. Our own statements never make any: each session of ours that writes on a replica does so with sql_log_bin = 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from backupd.engine.server.probe import flavour_of
from backupd.engine.sql.client import Session
from backupd.engine.sql.dialect import dialect_of
from backupd.model.binlog import MysqlGtids
from backupd.model.server_facts import Flavour, Version

Ends = dict[tuple[int, int], int]
"""The last number of each server in each domain."""

_SHOWN = 20
"""Transactions that an advice names one by one."""


@dataclass(frozen=True, slots=True)
class GtidState:
    """What a server has executed. ``executed``: MySQL's gtid_executed, MariaDB's gtid_binlog_state; ``received``: of
    MariaDB, gtid_slave_pos, what it got from elsewhere and need not have in its own log. ``why``: it has no GTIDs that
    could be compared, and this is the reason."""

    mariadb: bool
    server_id: int
    uuid: str
    executed: str = ""
    received: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Errant:
    """Transactions of one origin: a server's UUID (with ``:tag`` where there is one), or of MariaDB ``domain-server``.

    ``gtids``: which, in the family's own writing; of MariaDB the first and the last number that they may have, since
    those in between need not all exist. ``own``: they were written on the replica itself.
    """

    origin: str
    gtids: str
    first: int
    last: int
    own: bool

    def __str__(self) -> str:
        return f"{self.gtids} ({'written on it' if self.own else f'written by {self.origin}'})"


def read_gtids(session: Session) -> GtidState:
    """What the server has executed by now. Raises ServerError."""
    variables = session.variables(
        "version", "version_comment", "server_id", "server_uuid", "server_uid", "gtid_mode", "log_bin"
    )
    flavour = flavour_of(variables.get("version", ""), variables.get("version_comment", ""))
    dialect = dialect_of(flavour, Version.parse(variables["version"]))
    mariadb = flavour is Flavour.MARIADB
    state = GtidState(mariadb, int(variables.get("server_id", "0")), variables.get(dialect.uid, ""))
    if mariadb:
        executed, received = session.query("SELECT @@GLOBAL.gtid_binlog_state, @@GLOBAL.gtid_slave_pos")[0]
        why = "" if _is_on(variables, "log_bin") else "it writes no binary log, so what was written on it has no GTIDs"
        return replace(state, executed=_flat(executed), received=_flat(received), why=why)
    if not _is_on(variables, "gtid_mode"):
        return replace(state, why=f"its gtid_mode is {variables.get('gtid_mode', 'OFF')}")
    return replace(state, executed=_flat(session.scalar(dialect.executed_gtid)))


def errant(replica: GtidState, sources: Sequence[GtidState]) -> tuple[Errant, ...]:
    """What ``replica`` has and none of ``sources`` (all servers that it replicates from). Pure; it is empty, too, where
    a state says why it cannot be compared (``incomparable``)."""
    if incomparable(replica, sources):
        return ()
    if replica.mariadb:
        return tuple(_of_mariadb(replica, sources))
    known = MysqlGtids()
    for source in sources:
        known = known.plus(MysqlGtids.parse(source.executed))
    return tuple(_of_mysql(replica, MysqlGtids.parse(replica.executed).minus(known)))


def as_received(state: GtidState) -> GtidState:
    """A replica of MariaDB that writes no binary log, by what it received from its source: all that its GTIDs say of
    it. What was written on the replica itself has none."""
    return replace(state, executed=state.received, why="") if state.mariadb and state.why else state


def own_numbers(replica: GtidState, sources: Sequence[GtidState]) -> tuple[str, ...]:
    """GTIDs of MariaDB with the server id of ``replica`` that one of ``sources`` has executed: events with its own id
    are not applied by a replica. Pure."""
    if not replica.mariadb:
        return ()
    return tuple(
        f"{domain}-{server}-{last}"
        for source in sources
        for (domain, server), last in sorted((ends(source.executed) | ends(source.received)).items())
        if server == replica.server_id
    )


def errant_among(member: GtidState, others: Sequence[GtidState], sources: Iterable[str]) -> tuple[Errant, ...]:
    """What ``member`` has and none of ``others``, as long as the source cannot be asked. ``sources``: UUID, or server
    id of MariaDB, of each server that is a source of theirs: one member may be further ahead than the others in what
    these wrote."""
    written = frozenset(sources)
    return tuple(
        one
        for one in errant(member, others)
        if (one.origin.rpartition("-")[2] if member.mariadb else one.origin.partition(":")[0]) not in written
    )


def incomparable(replica: GtidState, sources: Sequence[GtidState]) -> str:
    """Why the transactions of ``replica`` cannot be compared with those of ``sources``; empty where they can."""
    if replica.why:
        return f"the replica cannot be compared: {replica.why}"
    if not sources:
        return "no source of it can be asked"
    if why := next((source.why for source in sources if source.why), ""):
        return f"its source cannot be compared: {why}"
    if any(source.mariadb is not replica.mariadb for source in sources):
        return "one of the two is MariaDB and the other one is not: their GTIDs have nothing in common"
    return ""


def advice(found: Sequence[Errant], *, mariadb: bool) -> str:
    """What to do about errant transactions, for people."""
    first = (
        "find out what they changed and undo that on the replica, or do the same on the source; a consistency check "
        "shows whether both are equal. Then "
    )
    if mariadb:
        return (
            f"{first}let the replica's log forget them: where no server replicates from it, RESET MASTER on the "
            "replica. Its own binary log ends there, so take a full backup of it afterwards"
        )
    names = [f"{one.origin}:{number}" for one in found for number in range(one.first, one.last + 1)][: _SHOWN + 1]
    said = " ".join(f"SET GTID_NEXT='{name}'; BEGIN; COMMIT;" for name in names[:_SHOWN])
    rest = "" if len(names) <= _SHOWN else f" and so on for each number of {', '.join(one.gtids for one in found)},"
    return f"{first}inject them as empty transactions on the source: {said}{rest} SET GTID_NEXT='AUTOMATIC';"


def _is_on(variables: dict[str, str], name: str) -> bool:
    return variables.get(name, "").upper() in ("ON", "1")


def _flat(value: object) -> str:
    return re.sub(r"\s+", "", str(value or ""))


def _of_mysql(replica: GtidState, left: MysqlGtids) -> Iterator[Errant]:
    own = replica.uuid.lower()
    for origin, intervals in sorted(left.runs.items()):
        # The source has the numbers between two runs: one entry for each run.
        for first, last in intervals:
            gtids = str(MysqlGtids({origin: ((first, last),)}))
            yield Errant(origin, gtids, first, last, own=origin.partition(":")[0] == own)


def _of_mariadb(replica: GtidState, sources: Sequence[GtidState]) -> Iterator[Errant]:
    known: Ends = {}
    positions: dict[int, int] = {}
    logged: set[int] = set()
    for source in sources:
        executed, received = ends(source.executed), ends(source.received)
        logged |= {domain for domain, _server in executed}
        for (domain, server), last in (*executed.items(), *received.items()):
            known[domain, server] = max(known.get((domain, server), 0), last)
        for (domain, _server), last in received.items():
            positions[domain] = max(positions.get(domain, 0), last)
    for (domain, server), last in sorted(ends(replica.executed).items()):
        first = known.get((domain, server), 0) + 1
        if last < first:
            continue
        own = server == replica.server_id
        if not own and domain not in logged and last <= positions.get(domain, 0):
            # The source was made of a backup, or logs nothing of what it gets: its position is all that it knows.
            continue
        name = f"{domain}-{server}"
        gtids = f"{name}-{last}" if first == last else f"{name}-{first} to {name}-{last}"
        yield Errant(name, gtids, first, last, own=own)


def ends(text: str) -> Ends:
    """The last number of each server in each of MariaDB's domains. Raises ValueError."""
    found: Ends = {}
    for member in filter(None, text.split(",")):
        parts = member.split("-")
        if len(parts) != 3 or not all(map(str.isdecimal, parts)):
            raise ValueError(f"{member[:120]!r} is not a GTID of MariaDB")
        domain, server, number = map(int, parts)
        found[domain, server] = max(found.get((domain, server), 0), number)
    return found

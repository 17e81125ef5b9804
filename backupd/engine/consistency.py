"""Does a replica hold the rows of its source? Two ways of comparing both, and one answer.

``checksum`` runs pt-table-checksum on the source: it sums up each chunk of each table in a statement that the replica
executes, too, at the same place of its log, so that neither has to stand still. What was found is read out of the
tool's table at the replica, and compared with the list of tables that we make ourselves: what the tool left out is
``unchecked``, and so is a table of which it did not do every chunk.

Measured with percona-toolkit 3.2.1 of Debian: exit status 16 means differences, and the bits beside it that something
was left out; tables whose names have characters outside Latin-1 it leaves out without a word, and those with a quote or
without an index that can be used with one; by itself it finds
members by ports and ``report_host``, so they are named in a table (DSNs) instead; ``mysql.event`` and
``mysql.gtid_slave_pos`` always differ, so the system schemas are left out. It needs statements of MySQL that 8.4
removed.

``compare`` is for servers on which it does not run: checksums of all tables at the source in one snapshot, and at the
replica in one of the very same GTIDs, for which its applier pauses for a moment. Without GTIDs the place in the
source's log says the same of a replica that follows by file and position (``at_one_position``).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from backupd.engine.server.accounts import Grants, read_grants
from backupd.engine.server.probe import read_dialect
from backupd.engine.server.replication import Words, read_replica, read_replicas
from backupd.engine.sql.client import Connection, Session
from backupd.engine.sql.dialect import Dialect
from backupd.engine.sql.tables import SYSTEM_SCHEMAS, Table, definitions, list_tables
from backupd.engine.witness import MomentWitness
from backupd.model.binlog import MysqlGtids, covers
from backupd.model.errors import CancelledError, RefusedError, ToolError
from backupd.model.job import Progress
from backupd.model.proof import Witness
from backupd.model.server_facts import Flavour, Position, Version
from backupd.model.table import TableName
from backupd.process.command import Command
from backupd.process.pipeline import Completed, run
from backupd.process.run_context import RunContext
from backupd.process.runtime import option_file

PROGRAM = "pt-table-checksum"
WITNESS = "witness"
SCHEMA = "percona"
"""Where the tool keeps its table of checksums, and we the one that names the replicas."""
_MEMBERS = f"`{SCHEMA}`.`backupd_members`"
_SUMS = f"`{SCHEMA}`.`checksums`"
_SETS_FORMAT = (("SYSTEM_VARIABLES_ADMIN", "SUPER"), ("BINLOG ADMIN", "SUPER"))
"""Who may set binlog_format in a session, in MySQL and in MariaDB."""
_DIFFERENCES, _LEFT_OUT = 16, 32 | 64
_FIRST_WITHOUT = Version(8, 4)
"""Of MySQL and Percona Server: it has no SHOW SLAVE HOSTS, and the tool ends."""
_ARRIVES = 60.0
"""Seconds that the last checksums may need to the replica, after the tool itself has waited for them."""
_PAUSE = 30.0
"""Seconds that the replica's applier may be paused to reach the moment of the source's snapshot."""
_LOOK = 0.2
_REASONS = 20
_ALTERED = "it was made, altered or replaced meanwhile"
_RESULT = re.compile(r"\S+ +(\d+) +\d+ +\d+ +-?\d+ +\d+ +(\d+) +[\d.]+ (.+)")
"""A line of the tool's answer: errors, chunks that were skipped, the table."""
_SKIPPED = re.compile(r"Skipping table (.+?) because (.+)|Cannot checksum table (.+?): (.+?)(?: at \S+ line \d+\.)?$")


@dataclass(frozen=True, slots=True)
class Compared:
    """What is known of each table of our list, by its quoted name. ``different``: in which way; ``unchecked``: why
    nothing is known."""

    equal: tuple[str, ...] = ()
    different: Mapping[str, str] = field(default_factory=dict)
    unchecked: Mapping[str, str] = field(default_factory=dict)
    tool: str = ""
    """What compared them: the name of the tool, or ``witness``."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Of one table at the replica: how many chunks there are, how many of them differ, how many have no sum yet, and by
    how many rows the replica has more (or fewer)."""

    count: int
    different: int
    pending: int
    rows: int


def compare(
    source: Connection,
    replica: Connection,
    context: RunContext,
    *,
    seconds: float,
    pausing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Compared:
    """Compare ``replica`` with ``source``, which it replicates from; ``seconds``: the longest that it may take;
    ``pausing``: as of ``at_one_gtid``.

    Raises RefusedError where neither way of comparing is possible, ToolError, ServerError, CancelledError."""
    with source.connect() as session, replica.connect() as other:
        by_tool = uses_tool(read_dialect(session))
        for one in (session, other):
            if not sees_all(read_grants(one)):
                raise RefusedError(
                    f"the account at {one.connection.address} may not read every table (SELECT ON *.*): one that it "
                    "does not see would count as compared",
                    hint="backupd check names the privileges that a consistency check needs",
                )
    if by_tool:
        return checksum(source, replica, context, seconds=seconds)
    return at_one_gtid(source, replica, context, seconds=seconds, pausing=pausing)


def uses_tool(dialect: Dialect) -> bool:
    """Of the source: does ``compare`` use pt-table-checksum there, and not our own witness?"""
    return dialect.flavour is Flavour.MARIADB or dialect.version < _FIRST_WITHOUT


def sees_all(grants: Grants) -> bool:
    """Does a list of tables that this account is given have every table?"""
    hidden = (schema for schema, names in grants.revoked.items() if "SELECT" in names)
    return grants.allow("SELECT") and not set(hidden) - {*SYSTEM_SCHEMAS}


def missing_privileges(source: Session, replica: Session) -> tuple[list[str], list[str]]:
    """What the accounts of a source and of its replica lack for ``compare``, as GRANT says it. Raises ServerError."""
    lacks = []
    by_tool = uses_tool(read_dialect(source))
    for session in (source, replica):
        dialect, grants = read_dialect(session), read_grants(session)
        wanted = [] if sees_all(grants) else ["SELECT ON *.*"]
        alone: list[tuple[str, ...]] = [(dialect.replica_privilege,), (dialect.monitor_privilege,)]
        if by_tool and session is source:
            alone += [("PROCESS",), ("REPLICATION SLAVE",), _SETS_FORMAT[dialect.flavour is Flavour.MARIADB]]
            if dialect.replica_privilege == "SLAVE MONITOR":  # SHOW SLAVE HOSTS of MariaDB since it has that
                alone += [("REPLICATION MASTER ADMIN", "SUPER")]
            tables = ("SELECT", "INSERT", "UPDATE", "DELETE", "CREATE")
            wanted += [f"{name} ON {SCHEMA}.*" for name in tables if not grants.allow(name, SCHEMA)]
        elif not by_tool:
            alone += [("RELOAD",)]
            alone += [("REPLICATION_SLAVE_ADMIN", "SUPER")] if session is replica else []
        wanted += [f"{names[0]} ON *.*" for names in alone if not any(map(grants.allow, names))]
        lacks.append(list(dict.fromkeys(wanted)))
    return lacks[0], lacks[1]


# -- pt-table-checksum


def checksum(source: Connection, replica: Connection, context: RunContext, *, seconds: float) -> Compared:
    """By the tool. It writes on the source, into a schema of its own, and that replicates. Raises as ``compare``;
    RefusedError where the source is a replica itself: what is written on it would be errant there."""
    with source.connect() as session:
        if above := read_replicas(session, read_dialect(session)):
            raise RefusedError(
                f"the source at {source.address} is itself a replica (of {above[0].source_host}:"
                f"{above[0].source_port}): {PROGRAM} writes on the source, and that would be errant transactions there",
                hint="run pt-table-checksum by hand on the source at the top: its checksums reach every replica",
            )
        before, marks = _names(session), definitions(session)
        begun = session.scalar("SELECT UTC_TIMESTAMP()")
    with option_file(source.option_groups()) as of_source, option_file(replica.option_groups()) as of_replica:
        with source.connect() as session:
            _name_members(session, f"F={of_replica}")
        context.report(Progress("checksum", note=PROGRAM, waits=True))
        done = run(
            command(str(of_source), context.programs.get(PROGRAM, PROGRAM)),
            timeout=seconds,
            check=False,
            log=context.log,
            on_stderr=partial(_report, context),
            cancel=context.cancel,
        )
    with source.connect() as session, replica.connect() as other:  # anew: the tool may have taken hours
        for one in (session, other):
            one.execute("SET SESSION time_zone = '+00:00'")
        chunks, sums = _arrived(session, other, begun)
        theirs, after = _names(other), _names(session)
        now = definitions(session)
    # What was made or dropped meanwhile may be on one of the two only.
    ours = {name for name in after if name in before or name in theirs}
    theirs = {name for name in theirs if name in after or name not in before}
    # Another table may have taken the name of one whose chunks were compared.
    altered = {f"{name.schema}.{name.table}": _ALTERED for name, mark in now.items() if marks.get(name) != mark}
    said = whole(done.stdout) - altered.keys()
    found = judge(ours, theirs, chunks, sums, skipped={**_skipped(done.stderr), **altered}, whole=said)
    _refuse_failed(done, found)
    return found


def command(option_file_: str, program: str = PROGRAM) -> Command:
    """The tool's call: it reads where the source is, and the account, from the option file."""
    return Command(
        (
            program,
            "--config=/dev/null",
            "--no-version-check",
            "--no-check-binlog-format",
            f"--replicate={SCHEMA}.checksums",
            f"--ignore-databases=mysql,sys,information_schema,performance_schema,{SCHEMA}",
            f"--recursion-method=dsn=D={SCHEMA},t=backupd_members",
            "--progress=time,10",
            f"F={option_file_}",
        )
    )


def listed(session: Session) -> list[Table]:
    """The tables that both servers should hold alike. Raises ServerError."""
    return [
        table
        for table in list_tables(session)
        if not table.is_system and not table.is_sequence and table.name.schema != SCHEMA
    ]


def _names(session: Session) -> set[TableName]:
    return {table.name for table in listed(session)}


def judge(
    ours: set[TableName],
    theirs: set[TableName],
    done: Mapping[TableName, int],
    sums: Mapping[TableName, Chunks],
    *,
    skipped: Mapping[str, str],
    whole: Collection[str],
) -> Compared:
    """What the checksums say of each table. ``ours`` and ``theirs``: the tables of source and replica; ``done``: chunks
    at the source; ``skipped``: what the tool said of tables that it left out, by name; ``whole``: those of which it did
    every chunk, for a chunk that it skipped is on neither side. Pure."""
    equal: list[str] = []
    different: dict[str, str] = {}
    unchecked: dict[str, str] = {}
    for name in sorted(ours | theirs):
        chunks = sums.get(name)
        if name not in theirs:
            different[str(name)] = "is missing on the replica"
        elif name not in ours:
            different[str(name)] = "is on the replica only"
        elif chunks is not None and chunks.different:
            rows = f", {abs(chunks.rows)} rows {'more' if chunks.rows > 0 else 'fewer'}" if chunks.rows else ""
            different[str(name)] = f"{chunks.different} of {chunks.count} chunks differ{rows}"
        elif name not in done:
            unchecked[str(name)] = skipped.get(f"{name.schema}.{name.table}", _left_out(name))
        elif (
            chunks is None or chunks.pending or chunks.count < done[name] or f"{name.schema}.{name.table}" not in whole
        ):
            unchecked[str(name)] = skipped.get(f"{name.schema}.{name.table}", "not every chunk of it was compared")
        else:
            equal.append(str(name))
    return Compared(tuple(equal), different, unchecked, PROGRAM)


def _name_members(session: Session, dsn: str) -> None:
    """Write which replica there is where the tool looks for it: nothing in it is a secret."""
    session.execute(f"CREATE DATABASE IF NOT EXISTS `{SCHEMA}`")
    session.execute(
        f"CREATE TABLE IF NOT EXISTS {_MEMBERS} "
        "(id INT NOT NULL PRIMARY KEY, parent_id INT, dsn VARCHAR(255) NOT NULL) ENGINE=InnoDB"
    )
    # The tool connects to whatever is listed, with the source's account.
    session.execute(f"DELETE FROM {_MEMBERS}")  # noqa: S608 - a constant
    session.execute(f"INSERT INTO {_MEMBERS} VALUES (1, NULL, %s)", dsn)  # noqa: S608 - a constant


def _report(context: RunContext, line: str) -> None:
    context.report(Progress("checksum", note=" ".join(line.split())[:200], waits=True))


def _arrived(session: Session, other: Session, begun: object) -> tuple[dict[TableName, int], dict[TableName, Chunks]]:
    """Chunks at the source, and at the replica once as many have arrived there, or no more time is left."""
    known = {str(row[0]).lower() for row in session.query(f"SHOW COLUMNS FROM {_SUMS}")}
    prefix = "source" if "source_cnt" in known else "master"
    done = {
        TableName(str(schema), str(table)): int(count)
        for schema, table, count in session.query(
            f"SELECT db, tbl, COUNT(*) FROM {_SUMS} WHERE ts >= %s GROUP BY db, tbl",  # noqa: S608 - a constant
            begun,
        )
    }
    deadline = time.monotonic() + _ARRIVES
    while True:
        sums = _chunks(other, prefix, begun)
        behind = any(name not in sums or sums[name].pending or sums[name].count < count for name, count in done.items())
        if not behind or time.monotonic() > deadline:
            return done, sums
        time.sleep(_LOOK)


def _chunks(session: Session, prefix: str, begun: object) -> dict[TableName, Chunks]:
    count, crc = f"{prefix}_cnt", f"{prefix}_crc"
    differs = f"this_cnt <> {count} OR this_crc <> {crc} OR (this_crc IS NULL) <> ({crc} IS NULL)"
    rows = session.query(
        f"SELECT db, tbl, COUNT(*), COALESCE(SUM({differs}), 0), SUM({count} IS NULL), "  # noqa: S608 - constants
        f"COALESCE(SUM(CAST(this_cnt AS SIGNED) - CAST({count} AS SIGNED)), 0) "
        f"FROM {_SUMS} WHERE ts >= %s GROUP BY db, tbl",
        begun,
    )
    return {TableName(str(row[0]), str(row[1])): Chunks(*map(int, row[2:])) for row in rows}


def whole(answer: bytes) -> frozenset[str]:
    """The tables that the tool says it did without an error and without skipping a chunk. Pure."""
    good: set[str] = set()
    bad: set[str] = set()
    for line in answer.splitlines():
        try:
            text = line.decode()
        except UnicodeDecodeError:
            text = line.decode("latin-1")
        if match := _RESULT.fullmatch(text):
            (bad if int(match[1]) or int(match[2]) else good).add(match[3])
    return frozenset(good - bad)


def _skipped(said: str) -> dict[str, str]:
    """What the tool said of tables that it left out."""
    found = {}
    for line, following in pairwise([*said.splitlines(), ""]):
        if match := _SKIPPED.search(line):
            name, why = filter(None, match.groups())
            why = f"{why} {following}" if why.endswith(":") else why
            found[name] = f"{PROGRAM} left it out: {' '.join(why.split())[:300]}"
    return found


def _left_out(name: TableName) -> str:
    """Why the tool says nothing at all of a table."""
    try:
        f"{name.schema}{name.table}".encode("latin-1")
    except UnicodeEncodeError:
        return f"{PROGRAM} does not read names with such characters"
    return f"{PROGRAM} left it out"


def _refuse_failed(done: Completed, found: Compared) -> None:
    """What the tool's exit says beyond what its table shows must never be lost: raises ToolError."""
    left = done.returncode & ~(_DIFFERENCES | _LEFT_OUT)
    compared = bool(found.equal or found.different)
    if done.returncode < 0 or done.returncode > 255 or (left and not (left == 1 and compared)):
        raise ToolError(
            f"{PROGRAM} failed with exit status {done.returncode}",
            detail="\n".join(done.stderr.splitlines()[-_REASONS:]),
            hint=f"its account needs SELECT on all tables, all rights on {SCHEMA}.*, PROCESS, REPLICATION SLAVE, "
            "REPLICATION CLIENT and the right to set binlog_format on the source, and SELECT on the replica",
        )
    if done.returncode & _DIFFERENCES and not found.different:
        raise ToolError(
            f"{PROGRAM} reports differences (exit status {done.returncode}), and {SCHEMA}.checksums on the replica "
            "shows none",
            detail="\n".join(done.stderr.splitlines()[-_REASONS:]),
        )


# -- our own witness, at one GTID


def at_one_gtid(
    source: Connection,
    replica: Connection,
    context: RunContext,
    *,
    seconds: float,
    pausing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Compared:
    """By checksums of all tables on both servers, in snapshots of the same GTIDs. The replica's applier is paused until
    it stands where the source's snapshot was opened, half a minute at most; everything is read while it goes on.
    ``pausing``: entered for as long as it is paused, so that somebody else resumes it should this process die. Raises
    as ``compare``."""
    with contextlib.ExitStack() as stack:
        at_source = stack.enter_context(MomentWitness(source, include=_is_shared, clock=context.clock))
        with _paused(replica, pausing) as applier:
            at_source.open()
            applier.go_on_until(at_source.position.gtid, context)
            at_replica = stack.enter_context(MomentWitness(replica, include=_is_shared, clock=context.clock))
            at_replica.open()
        with source.connect() as session, replica.connect() as other:
            later = str(session.scalar(read_dialect(session).executed_gtid) or "")
            _refuse_other_moment(at_source.position, at_replica.position, later)
            ours, theirs = _names(session), _names(other)
        share = seconds / 2
        one = at_source.read(server="source", max_seconds=share, report=context.report)
        two = at_replica.read(server="replica", max_seconds=share, report=context.report)
    return judge_witnesses(ours, theirs, one, two)


def at_one_position(source: Connection, replica: Connection, context: RunContext, *, seconds: float) -> Compared:
    """As ``at_one_gtid``, of a replica that follows its source by file and position: its applier is paused until it has
    applied exactly what the source's log held at the snapshot. Raises as ``compare``."""
    with contextlib.ExitStack() as stack:
        at_source = stack.enter_context(MomentWitness(source, include=_is_shared, clock=context.clock))
        with _paused(replica, contextlib.nullcontext) as applier:
            at_source.open()
            applier.go_on_to(at_source.position, context)
            at_replica = stack.enter_context(MomentWitness(replica, include=_is_shared, clock=context.clock))
            at_replica.open()
        with source.connect() as session, replica.connect() as other:
            ours, theirs = _names(session), _names(other)
        one = at_source.read(server="source", max_seconds=seconds / 2, report=context.report)
        two = at_replica.read(server="replica", max_seconds=seconds / 2, report=context.report)
    return judge_witnesses(ours, theirs, one, two)


def judge_witnesses(ours: set[TableName], theirs: set[TableName], one: Witness, other: Witness) -> Compared:
    """What two witnesses of the same moment say of each table, of the source (``one``) and the replica. ``ours`` and
    ``theirs``: their tables. Pure."""
    equal: list[str] = []
    different: dict[str, str] = {}
    unchecked: dict[str, str] = {}
    for name in map(str, sorted(ours | theirs)):
        here, there = one.checksums.get(name), other.checksums.get(name)
        if here is None or there is None:
            lost = "" if name in one.uncovered or name in other.uncovered else "made or dropped meanwhile"
            unchecked[name] = one.uncovered.get(name) or other.uncovered.get(name) or lost
        elif here != there:
            different[name] = f"its checksum is {there} where the source has {here}"
        else:
            equal.append(name)
    for name in sorted({str(table) for table in ours ^ theirs} & unchecked.keys()):
        if name in (one.definitions or {}).get("table", {}) or name in (other.definitions or {}).get("table", {}):
            del unchecked[name]
            different[name] = f"is on the {'source' if TableName.parse(name) in ours else 'replica'} only"
    return Compared(tuple(equal), different, unchecked, WITNESS)


def _is_shared(name: TableName) -> bool:
    return name.schema != SCHEMA


class _Applier:
    """The applier of a replica that was running and is paused."""

    def __init__(self, session: Session, dialect: Dialect) -> None:
        self._session, self._dialect = session, dialect

    def go_on_until(self, gtids: str, context: RunContext) -> None:
        """Apply what is missing of ``gtids``, and no more. Raises RefusedError when that takes too long."""
        self._go_on("SQL_AFTER_GTIDS = %s", (gtids,), lambda: self._has(gtids), context)

    def go_on_to(self, position: Position, context: RunContext) -> None:
        """Apply what the source's log holds before ``position``, and no more. Raises RefusedError when that takes too
        long, or the replica is beyond it."""
        words = Words.of(self._dialect.flavour, self._dialect.version)
        word = words.source if words.replica == "REPLICA" else "MASTER"  # as START SLAVE of MySQL before 8.0.26 has it
        place = (position.file, position.pos)
        self._go_on(f"{word}_LOG_FILE = %s, {word}_LOG_POS = %s", place, lambda: self._applied() == place, context)

    def _go_on(self, until: str, values: Sequence[str | int], has: Callable[[], bool], context: RunContext) -> None:
        replica = Words.of(self._dialect.flavour, self._dialect.version).replica
        deadline = time.monotonic() + _PAUSE
        if not has():
            self._session.execute(f"START {replica} SQL_THREAD UNTIL {until}", *values)
        while not has():
            if context.is_cancelled():
                raise CancelledError("the consistency check was stopped on request")
            if time.monotonic() > deadline:
                raise RefusedError(
                    f"the replica at {self._session.connection.address} did not apply what its source had executed "
                    f"within {_PAUSE:.0f} seconds",
                    hint="check its replication, and run the check when it has caught up",
                )
            time.sleep(_LOOK / 4)
        self._session.execute(f"STOP {replica} SQL_THREAD")

    def _applied(self) -> tuple[str, int]:
        found = read_replica(self._session, self._dialect)
        return (found.applied.file, found.applied.pos) if found is not None else ("", 0)

    def _has(self, gtids: str) -> bool:
        return covers(str(self._session.scalar(self._dialect.executed_gtid) or ""), gtids, mariadb=False)


@contextlib.contextmanager
def _paused(replica: Connection, pausing: Callable[[], AbstractContextManager[None]]) -> Iterator[_Applier]:
    """Stop the applier for the block, and start it again whatever happens; ``pausing`` ends with an exception only
    where it may not run again. Raises RefusedError where it does not run now, or is behind on purpose: it is left so,
    and ``pausing`` is not entered."""
    with replica.connect() as session:
        dialect = read_dialect(session)
        running = [one for one in read_replicas(session, dialect) if one.is_running]
        if len(running) != 1 or running[0].is_delayed:
            raise RefusedError(
                f"the replica at {replica.address} cannot be compared: "
                + ("it is behind its source on purpose" if running else "its replication does not run"),
                hint="SHOW REPLICA STATUS on it says why",
            )
        words = Words.of(dialect.flavour, dialect.version)
        trouble: BaseException | None = None
        with pausing():
            session.execute(f"STOP {words.replica} SQL_THREAD")
            try:
                yield _Applier(session, dialect)
            except BaseException as error:  # noqa: BLE001 - it is raised again, once the applier runs
                trouble = error
            resume(replica)
        if trouble is not None:
            raise trouble


def resume(replica: Connection) -> None:
    """Start the applier, also where it runs. Raises ServerError."""
    with replica.connect() as session:
        dialect = read_dialect(session)
        session.execute(f"START {Words.of(dialect.flavour, dialect.version).replica} SQL_THREAD")


def _refuse_other_moment(source: Position, replica: Position, later: str) -> None:
    """Raises RefusedError where the replica's snapshot is not of what the source's holds. ``later``: what the source
    has executed by now; what the replica has of its own is none of that."""
    if not source.gtid or not replica.gtid:
        raise RefusedError(
            "one of the two servers has no GTIDs in its snapshot, so nothing shows that both are of one moment",
            hint="turn on gtid_mode and log_bin on both",
        )
    held, wanted = MysqlGtids.parse(replica.gtid), MysqlGtids.parse(source.gtid)
    over = held.minus(wanted)
    if not held.covers(wanted) or not over.minus(MysqlGtids.parse(later)).covers(over):
        raise RefusedError(
            f"the replica's snapshot is not of the moment of the source's: {over or wanted.minus(held)}",
            hint="run the check again",
        )

"""One physical backup: capture, pack, and the commit in one last step; and who was slow, the source or one of the
destinations.

Knows no catalog: everything it needs is in its spec, everything it found is in its outcome. Landmarks are what a backup
records of the server besides its data, so that the next one can tell whether it may build on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from backupd.backup.commit import BackupSpec, Captured, making
from backupd.backup.server_checks import lost_words, rocks_words
from backupd.engine.cluster_load import NodeWatch
from backupd.engine.physical.capture import (
    Capture,
    CaptureRequest,
    Data,
    End,
    Hole,
    PhysicalTool,
    Remove,
    Rename,
    Stock,
)
from backupd.engine.physical.imported_tables import imported_tables, newest_table
from backupd.engine.physical.tablefiles import table_of
from backupd.engine.server.binary_logs import current_lsn, gtid_at, keyed, layout_of, log_digest, mute
from backupd.engine.server.probe import ROCKSDB
from backupd.engine.sql.client import Connection, Session
from backupd.model.backup_record import BackupKind
from backupd.model.errors import TablesChangedError, ToolError
from backupd.model.job import Progress, Report
from backupd.model.manifest import BodyFacts, Entry, Header, Landmarks
from backupd.model.server_facts import (
    UNKNOWN_SEQNO,
    Evidence,
    Flavour,
    NodeFacts,
    NodeLoad,
    Receipts,
    Role,
    ServerInfo,
    WsrepState,
)
from backupd.model.table import TableName
from backupd.model.text import few, format_duration, format_size
from backupd.process.run_context import RunContext, Stopwatch
from backupd.transfer.dedup import Fanout, Load
from backupd.transfer.parts import Packed, Packer

REDO_NAMES = frozenset({"ib_logfile0", "xtrabackup_logfile"})
"""What the physical tools call the redo log that they copied while they ran."""
LONG_SECONDS = 60.0
"""A run that was over sooner says nothing about a destination, and annoys nobody."""
FACTOR = 3.0
"""So many times slower than the source counts as slow."""

NO_LIMITS: Mapping[str, int] = MappingProxyType({})
LIMITED = 0.7
"""From this share of its max_upload on it is the limit that holds a destination back."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one backup: ``size`` bytes of plaintext that the source delivered in ``source_seconds`` of waiting for it,
    ``redo`` of them its copied redo log, ``new`` bytes to store at each of the destinations (``loads``)."""

    size: int
    source_seconds: float
    redo: int
    new: int
    loads: tuple[Load, ...]

    @property
    def source_rate(self) -> float:
        """Bytes a second that the source would deliver to somebody who never makes it wait."""
        return self.size / max(self.source_seconds, 1e-9)


def redo_size(entries: Iterable[Entry]) -> int:
    """Bytes of redo log among ``entries``."""
    return sum(entry.size for entry in entries if entry.path in REDO_NAMES)


def slow_destinations(
    speeds: Speeds, *, seconds: float, prepare_seconds: float, limits: Mapping[str, int] = NO_LIMITS
) -> tuple[str, ...]:
    """A warning for each destination that held the backup up: its own rate is less than a third of what it would need
    to keep up with the source, and it was busy for at least half of the time (else something between was slower, such
    as sealing). Nothing for runs of up to a minute (``seconds``).

    ``prepare_seconds``: how long preparing this backup for a restore is estimated to take. ``limits``: max_upload of
    those that have one, in bytes a second.
    """
    if seconds <= LONG_SECONDS or not speeds.size:
        return ()
    # What is stored is compressed, and partly there already: so many bytes of it go with each byte of the source.
    needed = speeds.source_rate * speeds.new / speeds.size
    return tuple(
        f"{_blamed(load, limits.get(load.destination))} where {format_size(needed)}/s would keep up "
        f"with the source ({format_size(speeds.source_rate)}/s before compression); the redo log copied "
        f"meanwhile has {format_size(speeds.redo)}, and preparing this backup will take about "
        f"{format_duration(prepare_seconds)}"
        for load in speeds.loads
        if load.bytes and load.rate * FACTOR < needed and load.seconds * 2 >= seconds
    )


def _blamed(load: Load, limit: int | None) -> str:
    if limit is not None and load.rate >= limit * LIMITED:
        return (
            f"max_upload of destination {load.destination} ({format_size(limit)}/s) limited this backup: "
            f"{format_size(load.rate)}/s were sent"
        )
    return f"destination {load.destination} is slow: it accepted {format_size(load.rate)}/s"


_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ServerPosition:
    """Where a server is: its log sequence number, and the highest id of a table. None: not known."""

    lsn: int | None
    table: int | None


def current_position(connection: Connection) -> ServerPosition:
    """Raises ServerError."""
    with connection.connect() as session:
        return ServerPosition(lsn=current_lsn(session), table=newest_table(session))


def landmarks_of(
    connection: Connection, info: ServerInfo, before: ServerPosition, receipts: Receipts, key: bytes
) -> Landmarks:
    """The landmarks of a backup that was captured since ``before``; ``key`` hides what its log held.

    Raises ToolError when a table was imported while the tool ran, ServerError.
    """
    with connection.connect() as session:
        table = newest_table(session)
        if before.table is not None and before.lsn is not None:
            _refuse_imports(session, table=before.table, lsn=before.lsn)
        else:
            table = None
    return Landmarks(log=_digest(info, receipts, key), table=table, last_lsn=receipts.last_lsn, layout=layout_of(info))


def _refuse_imports(session: Session, *, table: int, lsn: int) -> None:
    try:
        tables = imported_tables(session, newer_than=table, lsn=lsn)
    except OSError as error:
        raise ToolError(
            f"a table that was created while the backup ran cannot be read: {error.strerror}",
            detail=str(error.filename),
            hint="backupd must run as a user who may read the datadir",
        ) from error
    if tables:
        raise ToolError(
            "a tablespace was imported while the backup ran, so it may hold the table as it was before",
            detail=", ".join(tables),
            hint="take the backup again when no IMPORT TABLESPACE runs",
        )


def _digest(info: ServerInfo, receipts: Receipts, key: bytes) -> str:
    """ "" when the next increment will find no evidence in the binary log; it says so then."""
    if mute(info) or not receipts.position.file:
        return ""
    try:
        return keyed(log_digest(info, receipts.position), key)
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True, slots=True)
class Parent:
    """What an increment builds on: ``chain`` are backup ids, the full one first; it begins at the ``to_lsn`` of the
    last."""

    chain: tuple[str, ...]
    to_lsn: int

    @property
    def backup_id(self) -> str:
        """The backup that the increment follows."""
        return self.chain[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalSpec(BackupSpec):
    """Every decision about one physical backup. ``workdir``: an empty private folder for the tool. ``parent`` makes it
    an increment. ``spool``: a folder on a disk, for a tool that must copy the server first. ``restored_by``: the
    restore that the data directory came from. ``lost``: by engine, tables that the tool leaves out and no logical
    backup takes. ``repeats``: how often the backup may still be taken again; where it may not, one that lacks tables
    without transactions is kept as what it is."""

    tool: PhysicalTool
    workdir: Path
    parallel: int = 1
    parent: Parent | None = None
    spool: Path | None = None
    restored_by: str = ""
    lost: Mapping[str, Sequence[TableName]] = field(default_factory=dict)
    repeats: int = 0

    @property
    def kind(self) -> BackupKind:
        """Full, or an increment where there is a parent."""
        return BackupKind.PHYSICAL_INCREMENTAL if self.parent else BackupKind.PHYSICAL_FULL


@dataclass(frozen=True, slots=True)
class PhysicalOutcome:
    """A committed backup: the manifest's header and facts, and how fast the source and each destination were."""

    header: Header
    facts: BodyFacts
    speeds: Speeds


def execute(
    spec: PhysicalSpec, context: RunContext, *, on_stderr: Callable[[str], None] | None = None
) -> PhysicalOutcome:
    """Take the backup and commit it at every destination. On any error nothing is committed and what was stored is
    taken back; raises the error that began the trouble, TablesChangedError where taking the backup again may help.
    ``on_stderr`` gets what the tool prints."""
    with making(spec, parents=spec.parent.chain if spec.parent else (), clock=context.clock) as made:
        waited = Stopwatch()
        before = current_position(spec.connection) if spec.tool.takes_increments else None
        with NodeWatch(spec.connection) as watch:
            capture, packed = _capture(spec, made.fanout, waited, context, on_stderr)
        stock, receipts = capture.stock(), with_gtid(spec, capture.receipts())
        refuse_incomplete(stock, increment=spec.parent is not None, repeats=spec.repeats)
        context.report(Progress("commit", packed.size, packed.size, len(packed.entries), len(packed.entries)))
        captured = Captured(
            spec.kind,
            capture.tool,
            receipts,
            parent=spec.parent.backup_id if spec.parent else None,
            landmarks=_landmarks(spec, capture, before) if before else None,
            lost=sum(map(len, spec.lost.values())),
            inventory=stock.inventory,
            missing=tuple(table.name for table in stock.missing),
            warnings=(*(lost_words(engine, names) for engine, names in spec.lost.items()), *words_of(stock)),
            node=node_facts(watch.first, stock.node, watch.load) if watch.first is not None else None,
        )
        header, facts = made.commit(captured, packed, context.fence)
        return PhysicalOutcome(
            header,
            facts,
            Speeds(packed.size, waited.waited, redo_size(packed.entries), header.stats.bytes_new, made.fanout.loads),
        )


def with_gtid(spec: PhysicalSpec, receipts: Receipts) -> Receipts:
    """With the GTID of the backup's position. A node of a Galera cluster whose nodes have server ids of their own knows
    none of its own (gtid_current_pos), so that the tool tells none: its log does. Raises ServerError."""
    position, info = receipts.position, spec.info
    if info.role is not Role.NODE or info.flavour is not Flavour.MARIADB or position.gtid or not position.file:
        return receipts
    with spec.connection.connect() as session:
        return replace(receipts, position=replace(position, gtid=gtid_at(session, position)))


def node_facts(node: WsrepState, locked: WsrepState | None, load: NodeLoad | None) -> NodeFacts:
    """Of a backup of ``node``, which was as ``locked`` says while its provider was paused; None: nobody asked then, and
    a proof will find out where the backup is."""
    found = locked is not None and locked.position.seqno != UNKNOWN_SEQNO
    position = locked.position if locked is not None and found else node.position
    return NodeFacts(
        cluster=node.name,
        node=node.node,
        uuid=position.uuid,
        seqno=position.seqno if found else UNKNOWN_SEQNO,
        evidence=str(Evidence.LOCK) if found else "",
        gtid_mode=node.gtid_mode,
        gtid_domain=node.gtid_domain,
        load=load,
    )


def refuse_incomplete(stock: Stock, *, increment: bool, repeats: int) -> None:
    """Raises TablesChangedError for a backup that must not be kept: an increment that cannot be prepared; one that
    lacks a table of InnoDB, whose redo log names it, so that no prepare ends well; and as long as it may be taken again
    (``repeats``) one that lacks any."""
    if increment and stock.swapped:
        raise TablesChangedError(
            f"tables exchanged their names while the increment was taken: {_shown(map(_table_of, stock.swapped))}",
            hint="such an increment cannot be prepared: take a full backup (--kind full)",
            as_full=True,
        )
    innodb = [table.name for table in stock.missing if table.engine.lower() == "innodb"]
    if innodb or (stock.missing and repeats):
        names = innodb or [table.name for table in stock.missing]
        raise TablesChangedError(
            f"the tool left out {_count(len(names))} that the server had at the backup's position: {_shown(names)}",
            detail="they were dropped and created again, or renamed, while the tool ran",
            hint="take the backup at a time when these tables are not dropped or renamed",
        )


def words_of(stock: Stock) -> tuple[str, ...]:
    """What to say of a backup that is kept."""
    words: list[str] = []
    if stock.missing:
        names = _shown(table.name for table in stock.missing)
        words.append(
            f"this backup lacks {_count(len(stock.missing))} that were dropped and created again or renamed while it "
            f"was taken: {names}"
        )
    if stock.inventory is None:
        words.append(
            "the backup's tables were not compared with the server's at the backup's position:"
            f" {stock.problem or 'no list could be made'}"
        )
    if rocks := [table.name for table in stock.inventory or () if table.engine == ROCKSDB]:
        words.append(rocks_words(rocks))
    return tuple(words)


def _count(tables: int) -> str:
    return f"{tables} table{'' if tables == 1 else 's'}"


def _table_of(stem: str) -> TableName:
    return table_of(stem.partition("#P#")[0])


def _shown(names: Iterable[TableName]) -> str:
    return few(dict.fromkeys(name.shown for name in names), _SHOWN)


def _capture(
    spec: PhysicalSpec, fanout: Fanout, waited: Stopwatch, context: RunContext, on_stderr: Callable[[str], None] | None
) -> tuple[Capture, Packed]:
    meter = _Meter(context.report, 0 if spec.parent else spec.info.data_bytes)
    request = CaptureRequest(
        connection=spec.connection,
        workdir=spec.workdir,
        parallel=spec.parallel,
        incremental_lsn=spec.parent.to_lsn if spec.parent else None,
        on_stderr=on_stderr,
        replica=spec.info.role is Role.REPLICA,
        log=context.log,
        cancel=context.cancel,
        spool=spec.spool,
    )
    with Packer(fanout, workers=spec.workers) as packer, spec.tool.capture(request) as capture:
        for event in waited.over(capture.events()):
            match event:
                case Data():
                    spec.throttle.take(len(event.payload))
                    packer.data(event.path, event.offset, event.payload)
                    meter.add(len(event.payload))
                case Hole():
                    packer.hole(event.path, event.offset, event.length)
                case End():
                    packer.end(event.path)
                    meter.ended(event.path)
                case Remove():
                    packer.remove(event.path)
                case Rename():
                    packer.rename(event.path, event.to)
        packed = packer.finish()
        if packer.moved:
            fanout.relink(packed.entries)
    return capture, packed


def _landmarks(spec: PhysicalSpec, capture: Capture, before: ServerPosition) -> Landmarks:
    found = landmarks_of(spec.connection, spec.info, before, capture.receipts(), spec.identity_key)
    return replace(found, restore=spec.restored_by)


class _Meter:
    """Counts what has been captured; the total is the server's own estimate and grows when it was too low. 0: nobody
    knows how much will come."""

    def __init__(self, report: Report, expected: int) -> None:
        self._report, self._expected = report, expected
        self._bytes = self._files = 0

    def add(self, size: int) -> None:
        self._bytes += size
        self._tell("")

    def ended(self, path: str) -> None:
        self._files += 1
        self._tell(path)

    def _tell(self, note: str) -> None:
        total = max(self._expected, self._bytes) if self._expected else None
        self._report(Progress("copy", self._bytes, total, self._files, note=note))

"""One physical backup: capture, pack, and the commit in one last step.

Knows no catalog: everything it needs is in its spec, everything it found is in its outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from threading import Event

from backupd.backup.landmarks import Place, here, landmarks_of
from backupd.backup.speed import Speeds, Stopwatch, redo_size
from backupd.engine.client import Connection
from backupd.engine.physical import Capture, CaptureRequest, Data, End, Hole, PhysicalTool, Remove, Rename
from backupd.model.backup import BackupKind
from backupd.model.clock import Clock
from backupd.model.errors import BackupdError, DestinationError
from backupd.model.manifest import (
    CODEC,
    Body,
    BodyFacts,
    Header,
    Landmarks,
    Stats,
    StoredObject,
    encode_body,
    objects_digest,
)
from backupd.model.progress import Progress, Report
from backupd.model.server import Role, ServerInfo
from backupd.process.throttle import Throttle, Unlimited
from backupd.transfer.fanout import Fanout, known_everywhere
from backupd.transfer.intent import Intent
from backupd.transfer.known import confirm, load_known
from backupd.transfer.manifestio import commit_header, described, put_bytes
from backupd.transfer.pack import Packed, Packer
from backupd.transfer.seal import Sealer
from storage import layout
from storage.destination import Destination
from storage.throttled import throttled


@dataclass(frozen=True, slots=True)
class Documents:
    """The texts beside a backup: ``runbook`` is stored in the clear, ``unpack`` is sealed."""

    runbook: bytes
    unpack: bytes


@dataclass(frozen=True, slots=True)
class Parent:
    """What an increment builds on: ``chain`` are backup ids, the full one first; it begins at the ``to_lsn`` of the
    last."""

    chain: tuple[str, ...]
    to_lsn: int

    @property
    def backup_id(self) -> str:
        return self.chain[-1]


@dataclass(frozen=True, slots=True)
class PhysicalSpec:
    """Every decision about one backup, taken before it starts. ``workdir``: an empty private folder for the tool.
    ``behind``: how far the clock stands before the newest backup; added to the recorded times, so that they are in
    order. ``parent`` makes it an increment. ``reason``: why this kind is taken when another was due. ``config`` gives
    the configuration of the server's host. ``throttle``: what is read from the server passes it; ``send`` makes one for
    each destination, for what is stored there. ``spool``: a folder on a disk, for a tool that must copy the server
    first. ``restored_by``: the restore that the data directory came from."""

    backup_id: str
    server: str
    connection: Connection
    info: ServerInfo
    tool: PhysicalTool
    destinations: tuple[Destination, ...]
    recipients: tuple[str, ...]
    gnupg_home: Path
    identity_key: bytes
    workdir: Path
    started_at: datetime
    documents: Callable[[Body, Header], Documents]
    behind: timedelta = timedelta(0)
    level: int = 1
    workers: int = 2
    parallel: int = 1
    warnings: tuple[str, ...] = ()
    parent: Parent | None = None
    reason: str = ""
    config: Callable[[], bytes] | None = None
    throttle: Throttle = field(default_factory=Unlimited)
    send: Callable[[], Throttle] = Unlimited
    spool: Path | None = None
    restored_by: str = ""

    @property
    def kind(self) -> BackupKind:
        return BackupKind.PHYSICAL_INCREMENTAL if self.parent else BackupKind.PHYSICAL_FULL


@dataclass(frozen=True, slots=True)
class PhysicalOutcome:
    header: Header
    facts: BodyFacts
    speeds: Speeds


def execute(
    spec: PhysicalSpec,
    *,
    clock: Clock,
    report: Report,
    on_stderr: Callable[[str], None] | None = None,
    cancel: Event | None = None,
    fence: Callable[[], None] = lambda: None,
    log: Path | None = None,
) -> PhysicalOutcome:
    """Take the backup and commit it at every destination. On any error nothing is committed and what was stored is
    taken back; raises the error that began the trouble.

    ``cancel``: set it to stop the tool. ``fence`` is called right before the commit and raises when somebody else has
    taken the job meanwhile. ``log``: file for what the tool prints."""
    sealer = Sealer(spec.recipients, spec.gnupg_home, level=spec.level)
    parents = spec.parent.chain if spec.parent else ()
    with Intent(spec.destinations, spec.server, spec.backup_id, parents=parents, clock=clock) as intent:
        known = known_everywhere([load_known(d, spec.server) for d in spec.destinations])
        slowed = [throttled(destination, put=spec.send()) for destination in spec.destinations]
        fanout = Fanout(slowed, sealer=sealer, identity_key=spec.identity_key, known=known,
                        tree=layout.tree_name(spec.server, spec.backup_id))
        side_files: list[StoredObject] = []
        begun: list[str] = []
        try:
            sealed_config = sealer.seal(spec.config()) if spec.config else None
            waited = Stopwatch()
            place = here(spec.connection) if spec.tool.takes_increments else None
            capture, packed = _capture(spec, fanout, waited, report, on_stderr, cancel, log)
            report(Progress("commit", packed.size, packed.size, len(packed.entries), len(packed.entries)))
            landmarks = _landmarks(spec, capture, place) if place else None
            header, facts = _commit(spec, capture, packed, fanout, sealer, sealed_config, landmarks, intent, clock,
                                    side_files, begun, fence)
            return PhysicalOutcome(header, facts, Speeds(
                packed.size, waited.seconds, redo_size(packed.entries), header.stats.bytes_new, fanout.loads))
        except BaseException as error:
            leftovers = _discard_side_files(spec, side_files) + fanout.discard(committed=bool(begun))
            if leftovers and isinstance(error, BackupdError):
                error.add_note(f"could not clean up, the next run will: {leftovers[0].message}")
            raise


def _capture(
    spec: PhysicalSpec,
    fanout: Fanout,
    waited: Stopwatch,
    report: Report,
    on_stderr: Callable[[str], None] | None,
    cancel: Event | None,
    log: Path | None,
) -> tuple[Capture, Packed]:
    meter = _Meter(report, 0 if spec.parent else spec.info.data_bytes)
    request = CaptureRequest(connection=spec.connection, workdir=spec.workdir, parallel=spec.parallel,
                             incremental_lsn=spec.parent.to_lsn if spec.parent else None,
                             on_stderr=on_stderr, replica=spec.info.role is Role.REPLICA, log=log, cancel=cancel,
                             spool=spec.spool)
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


def _landmarks(spec: PhysicalSpec, capture: Capture, place: Place) -> Landmarks:
    return replace(landmarks_of(spec.connection, spec.info, place, capture.receipts()), restore=spec.restored_by)


def _commit(
    spec: PhysicalSpec,
    capture: Capture,
    packed: Packed,
    fanout: Fanout,
    sealer: Sealer,
    sealed_config: bytes | None,
    landmarks: Landmarks | None,
    intent: Intent,
    clock: Clock,
    side_files: list[StoredObject],
    begun: list[str],
    fence: Callable[[], None],
) -> tuple[Header, BodyFacts]:
    new = {stored.name: stored for stored in fanout.new_objects}
    objects = _referenced(packed, {**new, **{stored.name: stored for stored in fanout.reused_objects}})
    receipts = capture.receipts()
    facts = BodyFacts(
        backup_id=spec.backup_id, position=receipts.position, server=spec.info, tool=capture.tool, receipts=receipts,
        objects_digest=objects_digest(objects), warnings=spec.warnings,
        parent=spec.parent.backup_id if spec.parent else None)
    body = Body(facts, packed.entries)
    stats = Stats(
        bytes_source=packed.size, bytes_stored=sum(o.size for o in objects),
        bytes_new=sum(o.size for o in objects if o.name in new), files=len(packed.entries),
        files_linked=packed.linked)
    sealed_body = sealer.seal(b"".join(encode_body(body)))
    nothing = StoredObject("", 0, "")
    header = Header(
        backup_id=spec.backup_id, server=spec.server, kind=str(spec.kind),
        parent=spec.parent.backup_id if spec.parent else None, from_lsn=receipts.from_lsn, to_lsn=receipts.to_lsn,
        server_uuid=spec.info.server_uuid, reason=spec.reason, tool=capture.tool.name,
        started_at=spec.started_at, finished_at=clock() + spec.behind, recipients=sealer.recipients, stats=stats,
        objects=objects,
        body=described(layout.BODY, sealed_body), unpack=nothing, runbook=nothing, codec=CODEC,
        config=described(layout.CONFIG, sealed_config) if sealed_config else None, landmarks=landmarks)
    documents = spec.documents(body, header)
    sealed_unpack = sealer.seal(documents.unpack)
    header = replace(header, unpack=described(layout.UNPACK, sealed_unpack),
                     runbook=described(layout.RUNBOOK, documents.runbook))
    side_files += header.side_files
    contents = {layout.BODY: sealed_body, layout.UNPACK: sealed_unpack, layout.RUNBOOK: documents.runbook,
                **({layout.CONFIG: sealed_config} if sealed_config else {})}
    folder = layout.backup_folder(spec.server, spec.backup_id)
    for destination in spec.destinations:
        for stored in header.side_files:
            put_bytes(destination, folder + stored.name, contents[stored.name])
        missing = confirm(destination, objects)
        if missing:
            raise DestinationError(
                f"{len(missing)} objects vanished from destination {destination.name} while the backup ran",
                detail="\n".join(missing[:20]), hint="run the backup again: what is missing will be stored afresh")
    fanout.publish()
    # Before, lest somebody who took us for dead is just cleaning up after us; after, because only an intent that
    # outlived the commit proves that nobody did.
    intent.assert_held()
    fence()
    for destination in spec.destinations:
        begun.append(destination.name)  # from here on a manifest of ours may have been seen
        commit_header(destination, header)
    intent.assert_held()
    return header, facts


def _referenced(packed: Packed, stored: Mapping[str, StoredObject]) -> tuple[StoredObject, ...]:
    names = sorted({name for entry in packed.entries for name in entry.objects})
    return tuple(stored[name] for name in names)


def _discard_side_files(spec: PhysicalSpec, side_files: list[StoredObject]) -> list[BackupdError]:
    """The manifests first: should this end half way, no manifest names what is already gone."""
    errors: list[BackupdError] = []
    for destination in spec.destinations:
        try:
            if side_files:
                destination.delete(layout.manifest_key(spec.server, spec.backup_id))
            for stored in side_files:
                destination.delete(layout.backup_folder(spec.server, spec.backup_id) + stored.name)
        except BackupdError as error:
            errors.append(error)
    return errors


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

"""One physical backup: capture, pack, and the commit in one last step.

Knows no catalog: everything it needs is in its spec, everything it found is in its outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from threading import Event

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
    Stats,
    StoredObject,
    encode_body,
    objects_digest,
)
from backupd.model.progress import Progress, Report
from backupd.model.server import Role, ServerInfo
from backupd.transfer.fanout import Fanout, known_everywhere
from backupd.transfer.intent import Intent
from backupd.transfer.known import confirm, load_known
from backupd.transfer.manifestio import commit_header, described, put_bytes
from backupd.transfer.pack import Packed, Packer
from backupd.transfer.seal import Sealer
from storage import layout
from storage.destination import Destination


@dataclass(frozen=True, slots=True)
class Documents:
    """The texts beside a backup: ``runbook`` is stored in the clear, ``unpack`` is sealed."""

    runbook: bytes
    unpack: bytes


@dataclass(frozen=True, slots=True)
class PhysicalSpec:
    """Every decision about one backup, taken before it starts. ``workdir``: an empty private folder for the tool.
    ``behind``: how far the clock stands before the newest backup; added to the recorded times, so that they are in
    order."""

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


@dataclass(frozen=True, slots=True)
class PhysicalOutcome:
    header: Header
    facts: BodyFacts


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
    with Intent(spec.destinations, spec.server, spec.backup_id, clock=clock) as intent:
        known = known_everywhere([load_known(d, spec.server) for d in spec.destinations])
        fanout = Fanout(spec.destinations, sealer=sealer, identity_key=spec.identity_key, known=known,
                        tree=layout.tree_name(spec.server, spec.backup_id))
        side_files: list[StoredObject] = []
        try:
            capture, packed = _capture(spec, fanout, report, on_stderr, cancel, log)
            report(Progress("commit", packed.size, packed.size, len(packed.entries), len(packed.entries)))
            return _commit(spec, capture, packed, fanout, sealer, intent, clock, side_files, fence)
        except BaseException as error:
            leftovers = _discard_side_files(spec, side_files) + fanout.discard(committed=bool(side_files))
            if leftovers and isinstance(error, BackupdError):
                error.add_note(f"could not clean up, the next run will: {leftovers[0].message}")
            raise


def _capture(
    spec: PhysicalSpec,
    fanout: Fanout,
    report: Report,
    on_stderr: Callable[[str], None] | None,
    cancel: Event | None,
    log: Path | None,
) -> tuple[Capture, Packed]:
    meter = _Meter(report, spec.info.data_bytes)
    request = CaptureRequest(connection=spec.connection, workdir=spec.workdir, parallel=spec.parallel,
                             on_stderr=on_stderr, replica=spec.info.role is Role.REPLICA, log=log, cancel=cancel)
    with Packer(fanout, workers=spec.workers) as packer, spec.tool.capture(request) as capture:
        for event in capture.events():
            match event:
                case Data():
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


def _commit(
    spec: PhysicalSpec,
    capture: Capture,
    packed: Packed,
    fanout: Fanout,
    sealer: Sealer,
    intent: Intent,
    clock: Clock,
    side_files: list[StoredObject],
    fence: Callable[[], None],
) -> PhysicalOutcome:
    new = {stored.name: stored for stored in fanout.new_objects}
    objects = _referenced(packed, {**new, **{stored.name: stored for stored in fanout.reused_objects}})
    receipts = capture.receipts()
    facts = BodyFacts(
        backup_id=spec.backup_id, position=receipts.position, server=spec.info, tool=capture.tool, receipts=receipts,
        objects_digest=objects_digest(objects), warnings=spec.warnings)
    body = Body(facts, packed.entries)
    stats = Stats(
        bytes_source=packed.size, bytes_stored=sum(o.size for o in objects),
        bytes_new=sum(o.size for o in objects if o.name in new), files=len(packed.entries),
        files_linked=packed.linked)
    sealed_body = sealer.seal(b"".join(encode_body(body)))
    nothing = StoredObject("", 0, "")
    header = Header(
        backup_id=spec.backup_id, server=spec.server, kind=str(BackupKind.PHYSICAL_FULL), parent=None,
        started_at=spec.started_at, finished_at=clock() + spec.behind, recipients=sealer.recipients, stats=stats,
        objects=objects,
        body=described(layout.BODY, sealed_body), unpack=nothing, runbook=nothing, codec=CODEC)
    documents = spec.documents(body, header)
    sealed_unpack = sealer.seal(documents.unpack)
    header = replace(header, unpack=described(layout.UNPACK, sealed_unpack),
                     runbook=described(layout.RUNBOOK, documents.runbook))
    side_files += [header.body, header.unpack, header.runbook]
    contents = {layout.BODY: sealed_body, layout.UNPACK: sealed_unpack, layout.RUNBOOK: documents.runbook}
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
        commit_header(destination, header)
    intent.assert_held()
    return PhysicalOutcome(header, facts)


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
    """Counts what has been captured; the total is the server's own estimate and grows when it was too low."""

    def __init__(self, report: Report, expected: int) -> None:
        self._report, self._expected = report, expected
        self._bytes = self._files = 0

    def add(self, size: int) -> None:
        self._bytes += size
        self._report(Progress("copy", self._bytes, max(self._expected, self._bytes), self._files))

    def ended(self, path: str) -> None:
        self._files += 1
        self._report(Progress("copy", self._bytes, max(self._expected, self._bytes), self._files, note=path))

"""How any backup comes into being: an intent, packed entries, and the commit in one last step.

What was captured is somebody else's business; this is the order in which it is stored, looked at and committed, and
what is taken back when something goes wrong before the end.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from backupd.model.backup_record import BackupKind, Member, Stats
from backupd.model.errors import BackupdError, DestinationError, RefusedError
from backupd.model.manifest import (
    CODEC,
    Body,
    BodyFacts,
    Header,
    Landmarks,
    StoredObject,
    bound,
    encode_header,
    objects_digest,
)
from backupd.model.server_facts import NodeFacts, Position, Receipts, ServerInfo, Tool
from backupd.model.table import BaseTable, DumpFacts, TableName
from backupd.model.text import Clock
from backupd.process.throttle import Throttle, Unlimited
from backupd.transfer.dedup import Fanout, confirm, known_everywhere, load_known
from backupd.transfer.holds_and_locks import lengthen_all
from backupd.transfer.leases import Intent
from backupd.transfer.parts import Packed
from backupd.transfer.records.encryption import Sealer
from backupd.transfer.records.manifests import body_limit, described, put_bytes
from storage import layout
from storage.destination import Destination
from storage.throttle_and_breaker import throttled

if TYPE_CHECKING:
    from backupd.engine.sql.client import Connection


@dataclass(frozen=True, slots=True)
class Documents:
    """The texts beside a backup: ``runbook`` is stored in the clear, ``unpack`` is sealed."""

    runbook: bytes
    unpack: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupSpec:
    """What is decided about a backup of any kind before it starts.

    ``behind``: how far the clock is behind the newest backup; added to the recorded times, so that they are in
    order. ``reason``: why this kind is taken when another was due. ``flags``: as of ``BackupRecord``. ``config`` gives
    the configuration of the server's host. ``member``: which member of a group it is taken from, for the position that
    was found. ``announce`` hears of the SHA-256 of the manifest right before it is committed. ``throttle``: what is
    read from the server passes it; ``send`` makes one for each destination, for what is stored there.
    """

    backup_id: str
    server: str
    connection: Connection
    info: ServerInfo
    destinations: tuple[Destination, ...]
    recipients: tuple[str, ...]
    gnupg_home: Path
    identity_key: bytes
    started_at: datetime
    documents: Callable[[Body, Header], Documents]
    behind: timedelta = timedelta(0)
    level: int = 1
    workers: int = 2
    warnings: tuple[str, ...] = ()
    reason: str = ""
    flags: tuple[str, ...] = ()
    config: Callable[[], bytes] | None = None
    member: Callable[[Position], Member | None] = lambda _position: None
    announce: Callable[[str], None] = lambda _manifest: None
    throttle: Throttle = field(default_factory=Unlimited)
    send: Callable[[], Throttle] = Unlimited


@dataclass(frozen=True, slots=True)
class Captured:
    """What was captured, besides the entries. ``parent``: the backup that it builds on. ``lost``: how many tables it
    leaves out that no other backup has. ``inventory``, ``missing``, ``node``: see ``BodyFacts``."""

    kind: BackupKind
    tool: Tool
    receipts: Receipts
    parent: str | None = None
    landmarks: Landmarks | None = None
    dump: DumpFacts | None = None
    lost: int = 0
    inventory: tuple[BaseTable, ...] | None = None
    missing: tuple[TableName, ...] = ()
    warnings: tuple[str, ...] = ()
    node: NodeFacts | None = None


class Making:
    """A backup that is being made; see ``making``. Whatever is packed goes through ``fanout``."""

    def __init__(self, spec: BackupSpec, intent: Intent, sealer: Sealer, parents: Sequence[str], clock: Clock) -> None:
        known = known_everywhere([load_known(d, spec.server) for d in spec.destinations])
        self._spec, self._intent, self._sealer, self._clock = spec, intent, sealer, clock
        self._parents, self._since = parents, clock()
        slowed = [throttled(destination, put=spec.send()) for destination in spec.destinations]
        tree = layout.tree_name(spec.server, spec.backup_id)
        self.fanout = Fanout(slowed, sealer=sealer, identity_key=spec.identity_key, known=known, tree=tree)
        self._side_files: list[StoredObject] = []
        self._begun = False
        self._sealed_config: bytes | None = None

    def seal_config(self) -> None:
        """Keep the configuration of the server's host, where the spec gives it. Raises ToolError."""
        self._sealed_config = self._sealer.seal(self._spec.config()) if self._spec.config else None

    def commit(self, captured: Captured, packed: Packed, fence: Callable[[], None]) -> tuple[Header, BodyFacts]:
        """Store the side files, look at every object, lock what is there already, and write the manifests, last of all.

        ``fence`` is called right before them and raises when somebody else has taken the job meanwhile.
        """
        spec, fanout = self._spec, self.fanout
        fanout.forget({name for entry in packed.entries for name in entry.objects})
        header, facts, contents = self._documents(captured, packed)
        self._side_files += header.side_files
        folder = layout.backup_folder(spec.server, spec.backup_id)
        for destination in spec.destinations:
            for stored in header.side_files:
                put_bytes(destination, folder + stored.name, contents[stored.name])
            missing = confirm(destination, header.objects)
            if missing:
                raise DestinationError(
                    f"{len(missing)} objects vanished from destination {destination.name} while the backup ran",
                    detail="\n".join(missing[:20]),
                    hint="run the backup again: it stores the missing objects",
                )
        new = {layout.object_key(stored.name) for stored in fanout.new_objects}
        new |= {folder + stored.name for stored in header.side_files}
        for destination in spec.destinations:
            lengthen_all(destination, header, self._parents, self._since, stored=new)
        fanout.publish()
        # Before, lest somebody who took us for dead is just cleaning up after us; after, because only an intent that
        # outlived the commit proves that nobody did.
        self._intent.assert_held()
        fence()
        manifest = encode_header(header)
        spec.announce(hashlib.sha256(manifest).hexdigest())
        for destination in spec.destinations:
            self._begun = True  # from here on a manifest of ours may have been seen
            # The commit: from here on the backup exists at this destination.
            destination.put(layout.manifest_key(header.server, header.backup_id), io.BytesIO(manifest))
        self._intent.assert_held()
        return header, facts

    def discard(self) -> list[BackupdError]:
        """Take back what was stored; gives the errors met."""
        return self._discard_side_files() + self.fanout.discard(committed=self._begun)

    # -- inside

    def _documents(self, captured: Captured, packed: Packed) -> tuple[Header, BodyFacts, Mapping[str, bytes]]:
        """Header, facts, and the content of every side file by its name."""
        spec, sealer = self._spec, self._sealer
        new = {stored.name: stored for stored in self.fanout.new_objects}
        objects = _referenced(packed, {**new, **{stored.name: stored for stored in self.fanout.reused_objects}})
        receipts, dump = captured.receipts, captured.dump
        facts = BodyFacts(
            backup_id=spec.backup_id,
            position=receipts.position,
            server=spec.info,
            tool=captured.tool,
            receipts=receipts,
            objects_digest=objects_digest(objects),
            warnings=(*spec.warnings, *captured.warnings),
            parent=captured.parent,
            dump=dump,
            inventory=captured.inventory,
            member=spec.member(receipts.position),
            missing=captured.missing,
            node=captured.node,
        )
        body = Body(facts, packed.entries)
        stats = Stats(
            bytes_source=packed.size,
            bytes_stored=sum(o.size for o in objects),
            bytes_new=sum(o.size for o in objects if o.name in new),
            files=len(packed.entries),
            files_linked=packed.linked,
        )
        nothing = StoredObject("", 0, "")
        header = Header(
            backup_id=spec.backup_id,
            server=spec.server,
            kind=str(captured.kind),
            parent=captured.parent,
            from_lsn=receipts.from_lsn,
            to_lsn=receipts.to_lsn,
            server_uuid=spec.info.server_uuid,
            reason=spec.reason,
            flags=spec.flags,
            tool=captured.tool.name,
            started_at=spec.started_at,
            finished_at=self._clock() + spec.behind,
            recipients=sealer.recipients,
            stats=stats,
            objects=objects,
            body=nothing,
            unpack=nothing,
            runbook=nothing,
            codec=CODEC,
            config=described(layout.CONFIG, self._sealed_config) if self._sealed_config else None,
            landmarks=captured.landmarks,
            table_set=dump.table_set if dump else "",
            tables_missing=len(dump.failed) if dump else captured.lost + len(captured.missing),
        )
        documents = spec.documents(body, header)
        sealed_unpack = sealer.seal(documents.unpack)
        unpack, runbook = described(layout.UNPACK, sealed_unpack), described(layout.RUNBOOK, documents.runbook)
        header, plain = bound(replace(header, unpack=unpack, runbook=runbook), body)
        sealed_body = sealer.seal(plain)
        header = replace(header, body=described(layout.BODY, sealed_body))
        if body_limit(header) < len(plain):
            raise RefusedError(
                f"the list of files of backup {spec.backup_id} has {len(plain)} bytes, more than the "
                f"{body_limit(header)} that a restore reads",
                hint="back up fewer files at once; a file of terabytes of zeros may be the cause",
            )
        contents = {
            layout.BODY: sealed_body,
            layout.UNPACK: sealed_unpack,
            layout.RUNBOOK: documents.runbook,
            **({layout.CONFIG: self._sealed_config} if self._sealed_config else {}),
        }
        return header, facts, contents

    def _discard_side_files(self) -> list[BackupdError]:
        """The manifests first: should this end half way, no manifest names what is already gone."""
        spec = self._spec
        errors: list[BackupdError] = []
        for destination in spec.destinations:
            try:
                if self._side_files:
                    destination.delete(layout.manifest_key(spec.server, spec.backup_id))
                for stored in self._side_files:
                    destination.delete(layout.backup_folder(spec.server, spec.backup_id) + stored.name)
            except BackupdError as error:
                errors.append(error)
        return errors


@contextmanager
def making(spec: BackupSpec, *, parents: Sequence[str] = (), clock: Clock) -> Iterator[Making]:
    """Hold an intent at every destination while the block captures, packs and commits. On any error nothing is
    committed and what was stored is taken back; raises the error that began the trouble.

    ``parents``: ids of everything that the backup builds on.
    """
    sealer = Sealer(spec.recipients, spec.gnupg_home, level=spec.level)
    with Intent(spec.destinations, spec.server, spec.backup_id, parents=parents, clock=clock) as intent:
        made = Making(spec, intent, sealer, parents, clock)
        try:
            made.seal_config()
            yield made
        except BaseException as error:
            leftovers = made.discard()
            if leftovers and isinstance(error, BackupdError):
                error.add_note(f"clean-up failed, the next run repeats it: {leftovers[0].message}")
            raise


def _referenced(packed: Packed, stored: Mapping[str, StoredObject]) -> tuple[StoredObject, ...]:
    names = sorted({name for entry in packed.entries for name in entry.objects})
    return tuple(stored[name] for name in names)

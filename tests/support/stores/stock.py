"""Backups as a finished run leaves them, without sealing: what lies at a destination is all that counts here."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from backupd.model.backup_record import Sighting, Stats
from backupd.model.manifest import (
    Body,
    BodyFacts,
    Entry,
    Header,
    Part,
    StoredObject,
    encode_header,
    objects_digest,
)
from backupd.model.server_facts import Position, Receipts, Tool, Version
from backupd.transfer.holds_and_locks import Mark
from storage import layout, objects
from storage.destination import Destination, as_tree
from tests.support.catalog.samples import server_info

START = datetime(2026, 11, 21, 4, 0, 0, tzinfo=UTC)


def believed(found: Mapping[tuple[str, str], Mark]) -> dict[tuple[str, str], Sighting]:
    """As if this installation had put all these marks, at the times that they say."""
    return {owner: Sighting(note.at, ours=True) for owner, note in found.items()}


def wanted(found: Mapping[tuple[str, str], Mark]) -> dict[tuple[str, str], Sighting]:
    """As if a person had asked for it, too."""
    return {owner: Sighting(note.at, ours=True, confirmed=True) for owner, note in found.items()}


class FakeClock:
    """Stands until it is moved."""

    def __init__(self, now: datetime = START) -> None:
        self.now = now
        self._lock = threading.Lock()

    def __call__(self) -> datetime:
        with self._lock:
            return self.now

    def move(self, **delta: float) -> None:
        with self._lock:
            self.now += timedelta(**delta)


def backup_id(number: int) -> str:
    """Ids whose order is that of their numbers."""
    return f"20261121T{number // 3600 % 24:02d}{number // 60 % 60:02d}{number % 60:02d}Z-{number:08x}"


def sealed(content: bytes) -> bytes:
    return b"sealed " + content


def named(content: bytes) -> StoredObject:
    """The object that holds ``content``: its identity is that of the content, as with dedup."""
    return objects.named(hashlib.sha256(content).hexdigest(), sealed(content))


def put(destination: Destination, key: str, content: bytes) -> None:
    destination.put(key, io.BytesIO(content))


def commit_header(destination: Destination, header: Header) -> None:
    put(destination, layout.manifest_key(header.server, header.backup_id), encode_header(header))


@dataclass
class Stock:
    """A server's backups at one destination. ``bodies`` is what a private key would open."""

    destination: Destination
    server: str = "shop"
    kind: str = "physical-full"
    bodies: dict[str, Body] = field(default_factory=dict)

    def header(self, number: int, items: tuple[StoredObject, ...], parent: int | None = None) -> Header:
        def side(name: str, content: bytes) -> StoredObject:
            return StoredObject(name, len(content), hashlib.sha256(content).hexdigest())

        return Header(
            backup_id=backup_id(number),
            server=self.server,
            kind=self.kind if parent is None else "physical-incremental",
            parent=None if parent is None else backup_id(parent),
            started_at=START,
            finished_at=START,
            recipients=("A" * 40,),
            stats=Stats(1, 1, 1, 1, 0),
            objects=items,
            body=side(layout.BODY, b"body"),
            unpack=side(layout.UNPACK, b"unpack"),
            runbook=side(layout.RUNBOOK, b"runbook"),
        )

    def add(self, number: int, files: Mapping[str, bytes], *, parent: int | None = None, commit: bool = True) -> Header:
        """Store, link, publish and commit backup ``number`` of ``files``, one part each."""
        name = backup_id(number)
        tree = as_tree(self.destination)
        entries: list[Entry] = []
        found: dict[str, StoredObject] = {}
        for path, content in files.items():
            item = found.setdefault(named(content).name, named(content))
            objects.store(self.destination, item, sealed(content))
            digest = hashlib.sha256(content).hexdigest()
            entries.append(Entry(path, len(content), digest, parts=(Part(item.name, len(content), digest),)))
            if tree is not None:
                tree.link(layout.object_key(item.name), layout.tree_name(self.server, name), layout.tree_path(path))
        put(self.destination, layout.body_key(self.server, name), b"body")
        put(self.destination, layout.unpack_key(self.server, name), b"unpack")
        put(self.destination, layout.runbook_key(self.server, name), b"runbook")
        header = self.header(number, tuple(found.values()), parent)
        if commit:
            if tree is not None and files:
                tree.publish(layout.tree_name(self.server, name))
            commit_header(self.destination, header)
        self.bodies[name] = Body(facts(name, header), tuple(entries))
        return header

    def body(self, header: Header) -> Body:
        return self.bodies[header.backup_id]


def facts(name: str, header: Header) -> BodyFacts:
    version = Version(10, 11, 6)
    info = server_info(version=version, version_text="10.11.6", datadir="/d", log_bin=False, position=Position())
    return BodyFacts(
        backup_id=name,
        position=Position(),
        server=info,
        tool=Tool("t", "/t", version, "10.11.6"),
        receipts=Receipts("full-backuped", 0, 1, 1, Position(), "10.11.6", "10.11.6"),
        objects_digest=objects_digest(header.objects),
    )


def pool(destination: Destination) -> set[str]:
    return {layout.name_in(info.key) for info in destination.list(layout.OBJECTS)}


def everything(destination: Destination) -> set[str]:
    return {info.key for info in destination.list("")}

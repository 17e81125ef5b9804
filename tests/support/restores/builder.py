"""Backups made in the shortest way from a folder of files: real gpg, real objects, a real manifest."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import zstandard

from backupd.model.backup_record import Stats
from backupd.model.errors import KeyUnusableError
from backupd.model.manifest import (
    Body,
    BodyFacts,
    Entry,
    Header,
    Part,
    StoredObject,
    bound,
    encode_header,
    objects_digest,
)
from backupd.model.server_facts import Position, Receipts, ServerInfo, Tool, Version
from backupd.transfer.records.encryption import Unsealer
from storage import layout
from storage.destination import Destination
from tests.support.catalog.samples import server_info
from tests.support.keys import Keys

BACKUP_ID = "20261121T020000Z-7f3a9c01"
STARTED = datetime(2026, 11, 21, 2, tzinfo=UTC)


def gpg_seal(keys: Keys, plain: bytes) -> bytes:
    return subprocess.run(
        [
            "gpg",
            "--homedir",
            str(keys.public_home),
            "--batch",
            "--quiet",
            "--trust-model",
            "always",
            "--compress-algo",
            "none",
            "--encrypt",
            "-r",
            keys.fingerprint,
        ],
        input=zstandard.ZstdCompressor().compress(plain),
        check=True,
        capture_output=True,
    ).stdout


class GpgOpener(Unsealer):
    """What unsealing is, without any of the care: for tests of those who use it."""

    def __init__(self, keys: Keys) -> None:
        self._home = keys.secret_home

    def unseal(self, stored: bytes, *, limit: int) -> bytes:
        done = subprocess.run(
            ["gpg", "--homedir", str(self._home), "--batch", "--quiet", "--decrypt"],
            input=stored,
            check=False,
            capture_output=True,
        )
        if done.returncode != 0:
            raise KeyUnusableError("no key", detail=done.stderr.decode())
        return zstandard.ZstdDecompressor().decompress(done.stdout, max_output_size=limit)


class Builder:
    """Seals files into objects and remembers what a manifest needs. ``part`` and ``tiny`` in bytes."""

    def __init__(
        self,
        keys: Keys,
        *,
        part: int = 64 * 1024,
        tiny: int = 512,
        seal: Callable[[Keys, bytes], bytes] = gpg_seal,
    ) -> None:
        self._keys = keys
        self._part, self._tiny = part, tiny
        self._seal = seal
        self.sealed: dict[str, bytes] = {}
        self.stored: dict[str, StoredObject] = {}
        self._known: dict[str, StoredObject] = {}

    def _store(self, plain: bytes) -> StoredObject:
        identity = hashlib.sha256(b"identity" + plain).hexdigest()
        if identity not in self._known:
            sealed = self._seal(self._keys, plain)
            digest = hashlib.sha256(sealed).hexdigest()
            item = StoredObject(layout.object_name(identity, digest), len(sealed), digest)
            self._known[identity] = self.stored[item.name] = item
            self.sealed[item.name] = sealed
        return self._known[identity]

    def entries(self, files: Mapping[str, bytes], sparse: Sequence[str] = ()) -> list[Entry]:
        found: list[Entry] = []
        tiny = {path: content for path, content in files.items() if len(content) < self._tiny}
        if tiny:
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for path, content in sorted(tiny.items()):
                    info = tarfile.TarInfo(path)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
            name = self._store(packed.getvalue()).name
            found += [
                Entry(path, len(content), hashlib.sha256(content).hexdigest(), bundle=name)
                for path, content in tiny.items()
            ]
        for path, content in files.items():
            if path not in tiny:
                slices = [content[at : at + self._part] for at in range(0, len(content), self._part)]
                parts = tuple(
                    Part(self._store(piece).name, len(piece), hashlib.sha256(piece).hexdigest()) for piece in slices
                )
                found.append(
                    Entry(
                        path,
                        len(content),
                        hashlib.sha256(content).hexdigest(),
                        parts=parts,
                        sparse=path in sparse,
                    )
                )
        return sorted(found, key=lambda entry: entry.path)

    def manifest(
        self,
        entries: Sequence[Entry],
        *,
        info: ServerInfo | None = None,
        receipts: Receipts | None = None,
        server: str = "shop",
        backup_id: str = BACKUP_ID,
        parent: str | None = None,
    ) -> tuple[Header, Body]:
        objects = tuple(self.stored[name] for name in sorted({name for e in entries for name in e.objects}))
        position = receipts.position if receipts else Position("bin.000001", 4, "0-1-1")
        receipts = receipts or Receipts("full-backuped", 0, 1, 1, position, "10.11.19", "10.11.19")
        facts = BodyFacts(
            backup_id=backup_id,
            position=position,
            server=info or server_info(),
            tool=Tool("mariadb-backup", "/usr/bin/mariadb-backup", Version(10, 11, 19), "10.11.19"),
            receipts=receipts,
            objects_digest=objects_digest(objects),
            parent=parent,
        )
        body = Body(facts, tuple(entries))
        nothing = StoredObject(layout.RUNBOOK, 0, hashlib.sha256(b"").hexdigest())
        size = sum(entry.size for entry in entries)
        stored = sum(item.size for item in objects)
        return self.sealed_for(
            Header(
                backup_id=backup_id,
                server=server,
                kind="physical-incremental" if parent else "physical-full",
                parent=parent,
                from_lsn=receipts.from_lsn,
                to_lsn=receipts.to_lsn,
                started_at=STARTED,
                finished_at=STARTED,
                recipients=(self._keys.fingerprint,),
                objects=objects,
                body=nothing,
                stats=Stats(size, stored, stored, len(entries), 0),
                unpack=replace(nothing, name=layout.UNPACK),
                runbook=nothing,
            ),
            body,
        ), body

    def sealed_for(self, header: Header, body: Body) -> Header:
        """``header`` with ``body`` sealed and bound to it."""
        header, plain = bound(header, body)
        sealed = self._seal(self._keys, plain)
        self.sealed[layout.BODY] = sealed
        return replace(header, body=StoredObject(layout.BODY, len(sealed), hashlib.sha256(sealed).hexdigest()))

    def put(self, destination: Destination, header: Header, side_files: Mapping[str, bytes] | None = None) -> None:
        for item in header.objects:
            destination.put(layout.object_key(item.name), io.BytesIO(self.sealed[item.name]))
        folder = layout.backup_folder(header.server, header.backup_id)
        for name, content in {layout.BODY: self.sealed[layout.BODY], **(side_files or {})}.items():
            destination.put(folder + name, io.BytesIO(content))
        destination.put(layout.manifest_key(header.server, header.backup_id), io.BytesIO(encode_header(header)))


def files_below(folder: Path) -> dict[str, bytes]:
    """Every regular file by its relative path."""
    found = {}
    for root, _folders, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found

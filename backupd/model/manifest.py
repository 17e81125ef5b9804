"""The manifest: the document that *is* a backup.

Two documents make one manifest. The **header** is stored in the clear: ids, object names, sizes and digests of the
stored bytes, enough to scrub, copy and collect without a private key. The **body** is sealed: paths, plaintext
digests, positions and what is known of the server. The header records the stored digest of the body, and is written
last of all.

The header's encoding is canonical JSON (sorted keys, no spaces, ASCII, newline at the end) with its own SHA-256 in
``checksum``; a header that does not re-encode to the very same bytes is damaged, so any flipped bit is noticed.
The body's encoding is JSON lines: one line of facts, then one line per entry, so that it streams.

Since version 2 the body holds the digest of the header (``header_digest``), so that no word of the clear half can be
another one than what was sealed: whoever can write to a destination but has no public key can neither date a backup
anew nor file it under another server. Version 1 bound the list of objects and the parent only.
docs/decisions/format.md.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from backupd.model.backup_record import Member, Stats
from backupd.model.document import DOCUMENT_LIMIT, HIDDEN, Document, check_fields, json_key, parsed
from backupd.model.errors import DamagedError, NewerFormatError
from backupd.model.server_facts import NodeFacts, Position, Receipts, ServerInfo, Tool
from backupd.model.table import BaseTable, DumpFacts, TableName

FORMAT = "backupd-manifest/"
"""Header and body begin with it; the version follows."""
KINDS = frozenset({"physical-full", "physical-incremental", "logical"})
"""The values of ``model.backup.BackupKind``."""
VERSION = 2
"""What is written. Every version from 1 on is read."""
CODEC = "zstd+openpgp"
PART_SIZE = 16 * 1024 * 1024
"""Bytes of plaintext in one part; the last part of an entry is shorter."""
BUNDLE_LIMIT = 16 * 1024
"""Entries below this many bytes are bundled."""
PLAIN_LIMIT = 4 * PART_SIZE
"""Most bytes of plaintext that anything in the pool, or a part of a binary log, may open to, whatever is said of it:
with room for a bundle of many tiny files, or one long line of an index."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as it is at a destination. ``sha256`` and ``size`` (bytes) are of the stored, sealed bytes."""

    name: str
    size: int
    sha256: str

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "size": self.size, "sha256": self.sha256}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StoredObject:
        return cls(name=str(data["name"]), size=int(data["size"]), sha256=str(data["sha256"]))


@dataclass(frozen=True, slots=True)
class Landmarks(Document):
    """By what the next increment knows that the server still goes on from this backup.

    ``log``: keyed digest of the binary log right before the backup's position, "" when there was none to read.
    ``table``: the highest id of an InnoDB table, None when not known. ``last_lsn``: up to where the redo log was
    copied. ``restore``: the restore that the data directory came from, "" for none. ``layout``: digests of settings
    that decide which files there are, by name.
    """

    log: str = ""
    table: int | None = None
    last_lsn: int = 0
    restore: str = ""
    layout: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Header(Document):
    """The clear part. ``from_lsn`` to ``to_lsn``: what the tool copied, 0 where it has no such numbers; an increment
    begins where its ``parent`` ends. ``server_uuid``: of the source. ``reason``: why this kind was taken when another
    was due. ``config``: the configuration of the source's host, where it was taken. ``tool``: the name of the tool that
    took it, since no other one can go on from there. ``landmarks``: None where no increment can build on this backup,
    and in manifests that are older than they. Of a logical backup: ``table_set``, the policy's set that was dumped, and
    ``tables_missing``, how many tables of it could not be; of a physical one: how many it leaves out that were in no
    logical one either. ``body_size``: bytes of the unsealed body, 0 in version 1. ``flags``: as of
    ``BackupRecord``. ``version``: of the format.
    """

    backup_id: str = field(metadata=json_key("backup"))
    server: str
    kind: str
    parent: str | None
    started_at: datetime
    finished_at: datetime
    recipients: tuple[str, ...]
    stats: Stats
    objects: tuple[StoredObject, ...]
    body: StoredObject
    unpack: StoredObject
    runbook: StoredObject
    codec: str = CODEC
    from_lsn: int = 0
    to_lsn: int = 0
    server_uuid: str = ""
    reason: str = ""
    config: StoredObject | None = None
    tool: str = ""
    landmarks: Landmarks | None = field(default=None, metadata=json_key(later=True))
    table_set: str = field(default="", metadata=HIDDEN)
    tables_missing: int = field(default=0, metadata=HIDDEN)
    body_size: int = field(default=0, metadata=json_key(later=True))
    flags: tuple[str, ...] = field(default=(), metadata=HIDDEN)
    version: int = field(default=VERSION, metadata=HIDDEN)

    @property
    def is_bound(self) -> bool:
        """Does its body show whether a word of it was changed?"""
        return self.version > 1

    @property
    def side_files(self) -> tuple[StoredObject, ...]:
        """What is beside the header in the backup's folder."""
        return (self.body, self.unpack, self.runbook, *((self.config,) if self.config else ()))


@dataclass(frozen=True, slots=True)
class Part:
    """A slice of an entry: which object holds it, and size (bytes) and SHA-256 of its plaintext."""

    object: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of the backup. Either ``parts`` in order, or ``bundle`` (object name; the tar member is ``path``).

    ``path`` is relative with forward slashes. ``sparse``: the source had holes; restore leaves holes for zero blocks.
    """

    path: str
    size: int
    sha256: str
    parts: tuple[Part, ...] = ()
    bundle: str = ""
    sparse: bool = False

    @property
    def objects(self) -> tuple[str, ...]:
        return (self.bundle,) if self.bundle else tuple(part.object for part in self.parts)


@dataclass(frozen=True, slots=True)
class BodyFacts(Document):
    """Everything of the body but the entries. ``objects_digest`` binds the body to its header's object list, ``parent``
    to the backup that it builds on. ``dump``: of a logical backup. ``inventory``: of a physical one, every table that
    the server had at its position; None where no list could be made, and in manifests that are older than it.
    ``missing``: those of them that the backup does not hold. ``header``: the digest of the header that belongs to it,
    "" in version 1. ``node``: of a physical backup of a Galera node. ``member``: of a group, None in other manifests
    and in those that are older than groups."""

    backup_id: str = field(metadata=json_key("backup"))
    position: Position
    server: ServerInfo
    tool: Tool
    receipts: Receipts
    objects_digest: str
    warnings: tuple[str, ...] = ()
    parent: str | None = None
    dump: DumpFacts | None = field(default=None, metadata=json_key(later=True))
    inventory: tuple[BaseTable, ...] | None = field(default=None, metadata=json_key(later=True))
    member: Member | None = field(default=None, metadata=json_key(later=True))
    missing: tuple[TableName, ...] = field(default=(), metadata=HIDDEN)
    header: str = field(default="", metadata=HIDDEN)
    node: NodeFacts | None = field(default=None, metadata=json_key(later=True))

    @property
    def version(self) -> int:
        """Of the format."""
        return VERSION if self.header else 1


_OPTIONAL = ("dump", "inventory", "member", "node")
"""Facts that are left out where there are none: then the document is the one that earlier versions wrote."""


@dataclass(frozen=True, slots=True)
class Body:
    facts: BodyFacts
    entries: tuple[Entry, ...]


def objects_digest(objects: Iterable[StoredObject]) -> str:
    """SHA-256 over the sorted object list: the sealed body carries it, so a swapped clear list is noticed."""
    digest = hashlib.sha256()
    for item in sorted(objects, key=lambda o: o.name):
        digest.update(f"{item.name} {item.size} {item.sha256}\n".encode("ascii"))
    return digest.hexdigest()


def version_of(written: object, form: str, newest: int, where: str) -> int:
    """The version of a document that says that it is ``stated`` and belongs to the ``form``. Raises ValueError,
    NewerFormatError."""
    name, slash, number = str(written).rpartition("/")
    if name + slash != form or re.fullmatch("[1-9][0-9]{0,8}", number) is None:
        raise ValueError(f"format {str(written)[:120]!r} is not known to this version")
    if int(number) > newest:
        raise NewerFormatError(where, str(written))
    return int(number)


def _digest(written: object) -> str:
    if not isinstance(written, str) or len(written) != hashlib.sha256().digest_size * 2:
        raise ValueError(f"{str(written)[:120]!r} is no SHA-256")
    return written


def _canonical(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n").encode("ascii")


def encode_header(header: Header) -> bytes:
    document = _document(header)
    return _canonical({**document, "checksum": hashlib.sha256(_canonical(document)).hexdigest()})


def header_digest(header: Header) -> str:
    """SHA-256 over everything that a header states but what it states of its own body, in the encoding in which it is
    stored (without ``checksum``)."""
    document = _document(header)
    del document["body"]
    return hashlib.sha256(_canonical(document)).hexdigest()


def _document(header: Header) -> dict[str, Any]:
    document = {"format": f"{FORMAT}{header.version}", **header.as_json()}
    if header.landmarks is None:  # without them, the document is the one that earlier versions wrote
        del document["landmarks"]
    if header.table_set or header.tables_missing:
        document["logical"] = {"set": header.table_set, "missing": header.tables_missing}
    if not header.is_bound:
        del document["body_size"]
    if header.flags:
        document["flags"] = list(header.flags)
    return document


def decode_header(raw: bytes, *, where: str = "manifest") -> Header:
    """Read a stored header. Raises DamagedError naming ``where`` when a single byte is not as written, NewerFormatError
    where it is of a later version than any that is known here."""
    try:
        document = parsed(raw.decode("ascii"), limit=DOCUMENT_LIMIT)
        checksum = document.pop("checksum")  # every version has it: a later one is not a damaged one
        if hashlib.sha256(_canonical(document)).hexdigest() != checksum:
            raise ValueError("its checksum does not match its content")
        version = version_of(document["format"], FORMAT, VERSION, where)
        logical = document.get("logical", {})
        header = replace(
            Header.from_json(document),
            table_set=logical.get("set", ""),
            tables_missing=int(logical.get("missing", 0)),
            flags=tuple(map(str, document.get("flags", ()))),
            version=version,
        )
        for part in (header, header.stats, *([header.landmarks] if header.landmarks is not None else [])):
            check_fields(part)
        if header.kind not in KINDS:
            raise ValueError(f"its kind is {header.kind[:120]!r}")
        if encode_header(header) != raw:
            raise ValueError("its bytes differ from what was written")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(
            f"{where} is damaged", [f"{where}: {error}"], hint="restore from another destination's copy of this backup"
        ) from error
    return header


def encode_entry(entry: Entry) -> dict[str, Any]:
    line: dict[str, Any] = {"path": entry.path, "size": entry.size, "sha256": entry.sha256}
    if entry.parts:
        line["parts"] = [[part.object, part.size, part.sha256] for part in entry.parts]
    if entry.bundle:
        line["bundle"] = entry.bundle
    if entry.sparse:
        line["sparse"] = True
    return line


def decode_entry(line: dict[str, Any]) -> Entry:
    return Entry(
        path=line["path"],
        size=int(line["size"]),
        sha256=line["sha256"],
        parts=tuple(Part(o, int(s), h) for o, s, h in line.get("parts", ())),
        bundle=line.get("bundle", ""),
        sparse=bool(line.get("sparse", False)),
    )


def bound(header: Header, body: Body) -> tuple[Header, bytes]:
    """The unsealed body that is bound to ``header``, and the header that states its size. All that is left to add to
    that is ``body``, how the sealed one is stored."""
    entries = b"".join(json.dumps(encode_entry(entry), sort_keys=True).encode() + b"\n" for entry in body.entries)
    count = len(body.entries)
    size = len(encode_facts(replace(body.facts, header=hashlib.sha256().hexdigest()), count)) + len(entries)
    header = replace(header, body_size=size)
    return header, encode_facts(replace(body.facts, header=header_digest(header)), count) + entries


def encode_facts(facts: BodyFacts, entries: int) -> bytes:
    first = {"format": f"{FORMAT}{facts.version}", **facts.as_json(), "entries": entries}
    for name in _OPTIONAL:
        if first[name] is None:
            del first[name]
    if facts.missing:
        first["missing"] = [[name.schema, name.table] for name in facts.missing]
    if facts.header:
        first["header"] = facts.header
    return json.dumps(first, sort_keys=True).encode() + b"\n"


def decode_body(raw: bytes, *, where: str = "manifest body") -> Body:
    """Read an unsealed body. Raises DamagedError naming ``where``."""
    try:
        first = parsed(raw[: raw.find(b"\n") + 1])
        version = version_of(first["format"], FORMAT, VERSION, where)
        lines = raw.count(b"\n")  # before anything is made of them: a line end costs an attacker nothing
        if lines != first["entries"] + 1:
            raise ValueError(f"{lines - 1} entries where {first['entries']} were written")
        with io.BytesIO(raw) as stream:
            stream.readline()
            entries = tuple(decode_entry(parsed(line)) for line in stream)
        if empty := [name for name in _OPTIONAL if first.get(name, True) is None]:
            raise ValueError(f"its {empty[0]} is empty")
        facts = replace(
            BodyFacts.from_json(first),
            missing=tuple(TableName(str(schema), str(table)) for schema, table in first.get("missing", ())),
            header=_digest(first["header"]) if version > 1 else "",
        )
    except (AttributeError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedError(
            f"{where} is damaged", [f"{where}: {error}"], hint="restore from another destination's copy of this backup"
        ) from error
    return Body(facts=facts, entries=entries)

"""The documents of a backup at a destination: writing them (side files first, the manifest last), reading, listing.

A destination holds the backups that have a manifest, and no others.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from backupd.model.document import DOCUMENT_LIMIT, opened_limit
from backupd.model.errors import ArchivedError, DamagedError, NotFoundError, ObjectMissingError, TamperedError
from backupd.model.manifest import (
    Body,
    BodyFacts,
    Header,
    StoredObject,
    decode_body,
    decode_header,
    header_digest,
    objects_digest,
)
from storage import layout, objects
from storage.destination import Destination, read_whole

if TYPE_CHECKING:
    from backupd.transfer.records.encryption import Unsealer

BODY_LIMIT = 4 * 1024**3
"""Most bytes an unsealed body may have; about 16 million entries."""
_ELSEWHERE = "restore from another destination's copy of this backup"


def described(name: str, content: bytes) -> StoredObject:
    """``content`` as it will be at a destination under the side-file name ``name``."""
    return StoredObject(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())


def put_bytes(destination: Destination, key: str, content: bytes) -> None:
    """Store ``content`` under ``key``, in place of what is there. Raises DestinationError."""
    with io.BytesIO(content) as stream:
        destination.put(key, stream)


def get_bytes(destination: Destination, key: str) -> bytes:
    """A clear document. Raises DamagedError for one that is longer than any of ours."""
    return read_whole(destination, key, limit=DOCUMENT_LIMIT)


def get_document(destination: Destination, key: str) -> bytes:
    """What everything else is known by: a manifest, a description of binary logs, a proof. Raises DamagedError, too,
    where a rule of the destination has moved it, or its signature, into an archive class: that makes this one
    unreadable, and no other."""
    where = f"{destination.name}: {key}"
    try:
        return get_bytes(destination, key)
    except ArchivedError as error:
        raise DamagedError(
            f"{where} cannot be read: it is in an archive class",
            [
                (
                    f"{where}: a rule of the bucket moved it to an archive class: limit the rule to objects/, thaw "
                    "this file there, and copy it onto itself in the standard class"
                )
            ],
            hint="use another destination's copy",
        ) from error


def load_header(destination: Destination, server: str, backup_id: str) -> Header:
    """The clear half. Raises NotFoundError when there is no such backup here, DamagedError naming the key."""
    key = layout.manifest_key(server, backup_id)
    try:
        raw = get_document(destination, key)
    except ObjectMissingError as error:
        raise NotFoundError(
            f"destination {destination.name} holds no backup {backup_id} of {server}",
            detail=f"{destination.name}:{key} is missing",
            hint="`backupd backups` lists the backups and their destinations",
        ) from error
    return decode_of(raw, f"{destination.name}:{key}", server, backup_id)


def decode_of(raw: bytes, where: str, server: str, backup_id: str) -> Header:
    """A manifest, which has to be that of this backup and to name objects by their names: others turn its words into
    keys. Raises DamagedError naming ``where``."""
    header = decode_header(raw, where=where)
    problem = ""
    if (header.server, header.backup_id) != (server, backup_id):
        problem = f"it belongs to {header.backup_id} of {header.server}"
    elif strange := next((item.name for item in header.objects if not layout.is_object_name(item.name)), ""):
        problem = f"it names an object {strange[:120]!r}, which is not an object name"
    if problem:
        raise DamagedError(f"{where} is damaged", [f"{where}: {problem}"], hint=_ELSEWHERE)
    return header


def load_side_file(destination: Destination, header: Header, stored: StoredObject) -> bytes:
    """One of the header's side files, still sealed. Raises DamagedError unless size and digest are as recorded."""
    return objects.fetch_side(destination, layout.backup_folder(header.server, header.backup_id) + stored.name, stored)


def body_limit(header: Header) -> int:
    """Most bytes that the unsealed body may have: what was sealed, and never so many that little stored becomes much
    memory."""
    limit = min(BODY_LIMIT, opened_limit(header.body.size))
    return min(limit, header.body_size) if header.is_bound else limit


def load_body(destination: Destination, header: Header, unsealer: Unsealer) -> Body:
    """The sealed half, opened and checked against its header. Raises DamagedError, KeyUnusableError, and TamperedError
    where the header is not the one that was sealed with it."""
    where = f"{destination.name}:{layout.body_key(header.server, header.backup_id)}"
    raw = unsealer.unseal(load_side_file(destination, header, header.body), limit=body_limit(header))
    body = decode_body(raw, where=where)
    problem = _contradiction(header, body.facts)
    if problem:
        raise TamperedError(f"{where} does not belong to its manifest", [f"{where}: {problem}"], hint=_ELSEWHERE)
    return body


def _contradiction(header: Header, facts: BodyFacts) -> str:
    """Why these two do not belong together; "" where they do."""
    if facts.backup_id != header.backup_id:
        return f"it was sealed for backup {facts.backup_id}"
    if facts.version != header.version:
        return f"it was sealed in version {facts.version} of the format, and the clear manifest says {header.version}"
    if facts.objects_digest != objects_digest(header.objects):
        return "the object list in the clear is not the one that was sealed"
    if header.is_bound and facts.header != header_digest(header):
        return (
            "the clear manifest is not the one that was sealed with it: somebody changed its server, kind, times, "
            "positions or sizes"
        )
    return ""


class Committed(NamedTuple):
    """A manifest as it was found. ``header`` is the error where it cannot be read."""

    server: str
    backup_id: str
    header: Header | DamagedError


def backup_ids(destination: Destination, server: str | None = None) -> list[tuple[str, str]]:
    """(server, id) of every committed backup, oldest first within a server. Reads no manifest."""
    prefix = layout.SERVERS if server is None else f"{layout.SERVERS}{server}/"
    found = (layout.backup_of(info.key) for info in destination.list(prefix) if _is_manifest(info.key))
    return [owner for owner in found if owner is not None]


def committed(destination: Destination) -> Iterator[Committed]:
    """Every committed backup, marked deleted or not."""
    for server, backup_id in backup_ids(destination):
        if (found := read(destination, server, backup_id)) is not None:
            yield found


def read(destination: Destination, server: str, backup_id: str) -> Committed | None:
    """One manifest, or None when there is no such backup (any more)."""
    key = layout.manifest_key(server, backup_id)
    where = f"{destination.name}: {key}"
    header: Header | DamagedError
    try:
        header = decode_of(get_document(destination, key), where, server, backup_id)
    except ObjectMissingError:
        return None
    except DamagedError as error:
        header = error
    return Committed(server, backup_id, header)


def _is_manifest(key: str) -> bool:
    return key.endswith("/" + layout.MANIFEST)

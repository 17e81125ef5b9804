"""Which backups a destination holds: those with a manifest, and no others."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from backupd.model.errors import DamagedError, ObjectMissingError
from backupd.model.manifest import Header, decode_header
from backupd.transfer.records.manifests import get_document
from storage.contract import layout
from storage.contract.destination import Destination


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


def committed(destination: Destination, *, skip: Collection[tuple[str, str]] = ()) -> Iterator[Committed]:
    """Every committed backup, marked deleted or not. ``skip``: manifests (server, id) not to read again."""
    for server, backup_id in backup_ids(destination):
        if (server, backup_id) not in skip and (found := read(destination, server, backup_id)) is not None:
            yield found


def read(destination: Destination, server: str, backup_id: str) -> Committed | None:
    """One manifest, or None when there is no such backup (any more)."""
    key = layout.manifest_key(server, backup_id)
    where = f"{destination.name}: {key}"
    header: Header | DamagedError
    try:
        header = decode_header(get_document(destination, key), where=where)
        problem = _problem(header, server, backup_id)
        if problem:
            header = DamagedError(f"{where} is damaged", [f"{where}: {problem}"])
    except ObjectMissingError:
        return None
    except DamagedError as error:
        header = error
    return Committed(server, backup_id, header)


def _problem(header: Header, server: str, backup_id: str) -> str:
    """What is wrong with a manifest that is well formed: others turn its words into keys."""
    if (header.server, header.backup_id) != (server, backup_id):
        return f"it belongs to {header.backup_id} of {header.server}"
    strange = next((item.name for item in header.objects if not layout.is_object_name(item.name)), None)
    return "" if strange is None else f"it names an object {strange[:120]!r}, which no object is called"


def _is_manifest(key: str) -> bool:
    return key.endswith("/" + layout.MANIFEST)

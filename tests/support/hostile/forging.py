"""What somebody does who can write to a place: edits a clear document, and seals what he likes with the public key."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from backupd.model.manifest import Body, Header, bound, decode_header, encode_header
from backupd.transfer.records.encryption import Sealer, Unsealer
from backupd.transfer.records.manifests import described, load_body
from storage import layout
from storage.filesystem import FilesystemDestination
from tests.support.e2e.house import House


def edited(manifest: Path, **changes: Any) -> None:
    """Other values and a right checksum. It needs no key."""
    document = {**json.loads(manifest.read_bytes()), **changes}
    del document["checksum"]
    document["checksum"] = hashlib.sha256(_canonical(document)).hexdigest()
    manifest.write_bytes(_canonical(document))


def _canonical(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n").encode()


def moved(source: House, name: str, backup_id: str, target: House, server: str) -> Path:
    """A whole backup of ``name`` filed under ``server`` at the other repository; its manifest there."""
    shutil.copytree(source.repository / "objects", target.repository / "objects", dirs_exist_ok=True)
    folder = target.repository / "servers" / server / backup_id
    shutil.copytree(source.repository / "servers" / name / backup_id, folder)
    return folder / "manifest.json"


def forged(house: House, server: str, backup_id: str, change: Callable[[Header, Body], tuple[Header, Body]]) -> None:
    """The manifest and the body of a backup replaced by others that belong together, sealed with the public key. (The
    true body is opened with the private one, which only saves the work of making a like one.)"""
    folder = house.repository / "servers" / server / backup_id
    header = decode_header((folder / "manifest.json").read_bytes())
    body = load_body(FilesystemDestination("local", house.repository), header, Unsealer(house.keys.secret_home))
    header, plain = bound(*change(header, body))
    sealed = Sealer([house.keys.fingerprint], house.keys.public_home).seal(plain)
    (folder / layout.BODY).write_bytes(sealed)
    (folder / "manifest.json").write_bytes(encode_header(replace(header, body=described(layout.BODY, sealed))))

"""The configuration that was kept with a backup: what is in it, and getting it out."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backupd.app.context.wiring import Wiring
from backupd.app.keys.key_dependence import require_keys
from backupd.app.metacopies.tar_extraction import Member, extract, member_of
from backupd.backup.host_files import LARGEST_SUM
from backupd.model.errors import BackupdError, DamagedError, KeyUnusableError, NotFoundError, RefusedError
from backupd.transfer.records.manifests import load_header, load_side_file

_LIMIT = 2 * LARGEST_SUM
"""Bytes that may come out: what is collected, and what the tar adds to it."""


@dataclass(frozen=True, slots=True)
class Contents:
    """``written``: files that were written, when that was asked; ``left_out``: sentences on what was not."""

    backup_id: str
    members: tuple[Member, ...]
    written: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "backup": self.backup_id,
            "members": [member.as_json() for member in self.members],
            "written": [str(path) for path in self.written],
            "left_out": list(self.left_out),
        }


def show(wiring: Wiring, backup_id: str, out: Path | None = None) -> Contents:
    """List what was kept; with ``out``, an empty or missing folder, also write it there, for its owner's eyes only.

    Raises NotFoundError when the backup has none, KeyUnusableError, DamagedError, RefusedError for ``out``.
    """
    found = _members(_opened(wiring, backup_id), backup_id)
    members = tuple(member for member, _ in found)
    if out is None:
        return Contents(backup_id, members)
    try:
        written, left_out = extract(found, out)
    except OSError as error:
        raise RefusedError(
            f"the configuration cannot be written to {out}: {error.strerror}",
            hint="name an empty folder of yours, with room",
        ) from error
    return Contents(backup_id, members, written, left_out)


def _opened(wiring: Wiring, backup_id: str) -> bytes:
    record = wiring.catalog.backups.get(backup_id)
    errors: list[BackupdError] = []
    for copy in record.copies:
        try:
            destination = wiring.destination(copy.destination)
            header = load_header(destination, record.server, record.id)
            if header.config is None:
                raise NotFoundError(
                    f"no configuration was kept with backup {backup_id}",
                    hint="backups of this version keep it; look at a newer one",
                )
            return wiring.unsealer().unseal(load_side_file(destination, header, header.config), limit=_LIMIT)
        except KeyUnusableError:
            require_keys(wiring, record.server, [backup_id])
            raise
        except BackupdError as error:
            errors.append(error)
    raise errors[0] if errors else NotFoundError(f"no destination holds backup {backup_id}")


def _members(raw: bytes, backup_id: str) -> list[tuple[Member, bytes]]:
    """What a tar holds, with the content of files. Raises DamagedError."""
    found = []
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            for info in tar:
                if info.size < 0:  # the next member would be this one again, for ever
                    raise tarfile.ReadError(f"{info.name} has less than no bytes")
                member = member_of(info)
                file = tar.extractfile(info) if member.kind == "file" else None
                found.append((member, file.read() if file else b""))
    except (tarfile.TarError, ValueError, RecursionError) as error:  # the latter two for headers that are nonsense
        raise DamagedError(f"the configuration of backup {backup_id} cannot be read", [str(error)]) from error
    return found

"""The configuration that was kept with a backup: what is in it, and getting it out."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from backupd.app.dependence import require_keys
from backupd.app.wiring import Wiring
from backupd.backup.hostfiles import FILES
from backupd.model.errors import BackupdError, DamagedError, KeyUnusableError, NotFoundError, RefusedError
from backupd.transfer.manifestio import load_header, load_side_file

_LIMIT = 1024**3
"""Bytes of an opened artefact; collecting stops far below."""


@dataclass(frozen=True, slots=True)
class Member:
    """``kind``: ``file``, ``folder`` or ``link`` (to ``target``). ``mode`` and ``owner``: as on the source's host."""

    name: str
    kind: str
    size: int
    mode: int
    owner: str
    target: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "size": self.size, "mode": f"{self.mode:04o}",
                "owner": self.owner, "target": self.target}


@dataclass(frozen=True, slots=True)
class Contents:
    """``written``: files that were written, when that was asked; ``left_out``: sentences on what was not."""

    backup_id: str
    members: tuple[Member, ...]
    written: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"backup": self.backup_id, "members": [member.as_json() for member in self.members],
                "written": [str(path) for path in self.written], "left_out": list(self.left_out)}


def show(wiring: Wiring, backup_id: str, out: Path | None = None) -> Contents:
    """List what was kept; with ``out``, an empty or missing folder, also write it there, for its owner's eyes only.

    Raises NotFoundError when the backup has none, KeyUnusableError, DamagedError, RefusedError for ``out``.
    """
    raw = _opened(wiring, backup_id)
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            infos = tar.getmembers()
            members = tuple(_member(info) for info in infos)
            if out is None:
                return Contents(backup_id, members)
            files = {info.name: _content(tar, info) for info in infos if info.isreg()}
    except tarfile.TarError as error:
        raise DamagedError(f"the configuration of backup {backup_id} cannot be read", [str(error)]) from error
    try:
        return _extract(Contents(backup_id, members), files, out)
    except OSError as error:
        raise RefusedError(f"the configuration cannot be written to {out}: {error.strerror}",
                           hint="name an empty folder of yours, with room") from error


def _opened(wiring: Wiring, backup_id: str) -> bytes:
    record = wiring.catalog.backups.get(backup_id)
    errors: list[BackupdError] = []
    for copy in record.copies:
        try:
            destination = wiring.destination(copy.destination)
            header = load_header(destination, record.server, record.id)
            if header.config is None:
                raise NotFoundError(f"no configuration was kept with backup {backup_id}",
                                    hint="backups of this version keep it; look at a newer one")
            return wiring.unsealer().unseal(load_side_file(destination, header, header.config), limit=_LIMIT)
        except KeyUnusableError:
            require_keys(wiring, record.server, [backup_id])
            raise
        except BackupdError as error:
            errors.append(error)
    raise errors[0] if errors else NotFoundError(f"no destination holds backup {backup_id}")


def _member(info: tarfile.TarInfo) -> Member:
    kind = "link" if info.issym() else "folder" if info.isdir() else "file"
    return Member(info.name, kind, info.size, info.mode, info.uname or str(info.uid), info.linkname)


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(info)
    return file.read() if file is not None else b""


def _extract(contents: Contents, files: Mapping[str, bytes], out: Path) -> Contents:
    """Folders, then files, and links last, so that nothing is ever written through one."""
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise RefusedError(f"{out} is not empty", hint="name a new folder: what lies there is never overwritten")
    written: list[Path] = []
    left_out: list[str] = []
    names = {member.name for member in contents.members}
    for member in sorted(contents.members, key=lambda one: (("folder", "file", "link").index(one.kind), one.name)):
        inside = PurePosixPath(member.name)
        if inside.is_absolute() or ".." in inside.parts or not inside.parts:
            left_out.append(f"{member.name} is not written: its path leads out of the folder")
            continue
        path = out / inside
        _folders(out, inside if member.kind == "folder" else inside.parent)
        if member.kind == "file":
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(files[member.name])
        elif member.kind == "link":
            target = _within(member)
            if target not in names:
                left_out.append(f"{member.name} is not written: it is a link to {member.target}, which was not kept")
                continue
            path.symlink_to(os.path.relpath(target, inside.parent))
        if member.kind != "folder":
            written.append(path)
    return Contents(contents.backup_id, contents.members, tuple(written), tuple(left_out))


def _folders(out: Path, inside: PurePosixPath) -> None:
    for folder in (*reversed(inside.parents), inside):
        (out / folder).mkdir(mode=0o700, exist_ok=True)


def _within(member: Member) -> str:
    """The member that a link leads to: an absolute target is one of the source's host, not of this one."""
    start = FILES if member.target.startswith("/") else str(PurePosixPath(member.name).parent)
    return os.path.normpath(f"{start}/{member.target}")

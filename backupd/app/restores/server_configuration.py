"""The configuration of a database server that was kept with a backup: what is in it, and taking it out.

Somebody else may have made the tar that it is kept in: nothing is ever created outside the named folder.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from backupd.app.backup_records import of_first_copy
from backupd.app.context.keys import require_keys
from backupd.app.context.wiring import Wiring
from backupd.backup.host_configuration import FILES, LARGEST_SUM
from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.errors import DamagedError, KeyUnusableError, NotFoundError, RefusedError
from backupd.model.manifest import Header
from backupd.transfer.records.manifests import load_side_file
from storage.destination import Destination

_OF_THE_MEMBER = frozenset({errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EILSEQ})
"""Errors that say something of one member's name; all others are of the folder or its disk."""
_LIMIT = 2 * LARGEST_SUM
"""Bytes that may come out: what is collected, and what the tar adds to it."""


@dataclass(frozen=True, slots=True)
class Member(Document):
    """``kind``: ``file``, ``folder`` or ``link`` (to ``target``), else what it is that we never make ourselves.
    ``mode`` and ``owner``: as on the source's host."""

    name: str
    kind: str
    size: int
    mode: int = field(metadata=HIDDEN)
    owner: str
    target: str = ""

    @property
    @computed("mode", after="size")
    def permissions(self) -> str:
        """``mode`` in octal."""
        return f"{self.mode:04o}"


_KINDS: tuple[tuple[str, Callable[[tarfile.TarInfo], bool]], ...] = (
    ("link", tarfile.TarInfo.issym),
    ("folder", tarfile.TarInfo.isdir),
    ("hard link", tarfile.TarInfo.islnk),
    ("pipe", tarfile.TarInfo.isfifo),
    ("device", tarfile.TarInfo.isdev),
    ("sparse file", tarfile.TarInfo.issparse),
    ("file", tarfile.TarInfo.isreg),
)


def member_of(info: tarfile.TarInfo) -> Member:
    """The header of a tar's member as a ``Member``."""
    kind = next((kind for kind, is_one in _KINDS if is_one(info)), "member of unknown type")
    return Member(
        info.name,
        kind,
        info.size,
        info.mode,
        info.uname or str(info.uid),
        info.linkname if info.issym() or info.islnk() else "",
    )


@dataclass(frozen=True, slots=True)
class Contents(Document):
    """``written``: files that were written, when that was asked; ``left_out``: sentences on what was not."""

    backup_id: str = field(metadata=json_key("backup"))
    members: tuple[Member, ...]
    written: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()


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
            hint="name an empty folder that you can write to, with enough free space",
        ) from error
    return Contents(backup_id, members, written, left_out)


def _opened(wiring: Wiring, backup_id: str) -> bytes:
    def read(destination: Destination, header: Header) -> bytes:
        if header.config is None:
            raise NotFoundError(
                f"no server configuration was stored with backup {backup_id}",
                hint="choose a newer backup: this version stores it with each backup",
            )
        return wiring.unsealer().unseal(load_side_file(destination, header, header.config), limit=_LIMIT)

    record = wiring.catalog.backups.get(backup_id)
    try:
        return of_first_copy(wiring, record, read)
    except KeyUnusableError:
        require_keys(wiring, record.server, [backup_id])
        raise


def _members(raw: bytes, backup_id: str) -> list[tuple[Member, bytes]]:
    """What a tar holds, with the content of files. Raises DamagedError."""
    found = []
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            for info in tar:
                if info.size < 0:  # the next member would be this one again, for ever
                    raise tarfile.ReadError(f"{info.name} has a negative size")
                member = member_of(info)
                file = tar.extractfile(info) if member.kind == "file" else None
                found.append((member, file.read() if file else b""))
    except (tarfile.TarError, ValueError, RecursionError) as error:  # the latter two for headers that are nonsense
        raise DamagedError(f"the configuration of backup {backup_id} cannot be read", [str(error)]) from error
    return found


def extract(members: Iterable[tuple[Member, bytes]], out: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Write folders, then files, and links last, for the eyes of ``out``'s owner only.

    Gives the files and links that were written, and sentences on what was not. Raises RefusedError when ``out`` is
    not empty, OSError.
    """
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if os.listdir(root):  # noqa: PTH208  # the folder that was opened, whatever has its name by now
            raise RefusedError(f"{out} is not empty", hint="name a new folder: existing files are never overwritten")
        work = _Extraction(root)
        work.take(sorted(members, key=lambda pair: (pair[0].kind != "folder", pair[0].name)))
    finally:
        os.close(root)
    return tuple(out / name for name in work.written), tuple(work.left_out)


class _Extraction:
    """``root``: a descriptor of the folder. Each member is created in a folder that was opened from there, name by
    name, without following links. A link is made only to what was really written."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._there: dict[str, None] = {}
        self.written: list[str] = []
        self.left_out: list[str] = []

    def take(self, members: Iterable[tuple[Member, bytes]]) -> None:
        links: dict[str, list[Member]] = {}
        for member, content in members:
            if member.kind == "folder":
                self._create(member, lambda parent, name: os.close(_folder(parent, name)))
            elif member.kind == "file":
                self._create(member, _file(content))
            elif member.kind == "link":
                links.setdefault(_within(member), []).append(member)
            else:
                self._leave(member, f"it is a {member.kind}")
        found = list(self._there)
        for name in found:  # it grows: a link may lead to a link
            for link in links.pop(name, ()):
                if self._create(link, _link(link, name)):
                    found.append(str(PurePosixPath(link.name)))
        for target, left in links.items():
            out = target.split("/", 1)[0] == ".."
            for link in left:
                self._leave(
                    link,
                    f"it is a link to {link.target}, which "
                    + ("is outside of the folder" if out else "was not written"),
                )

    def _create(self, member: Member, create: Callable[[int, str], None]) -> bool:
        inside = PurePosixPath(member.name)
        if inside.is_absolute() or ".." in inside.parts or not inside.parts:
            return self._leave(member, "its path leads out of the folder")
        if "\0" in member.name:
            return self._leave(member, "no file can have that name")
        parent = os.dup(self._root)
        try:
            for part in inside.parts[:-1]:
                above, parent = parent, _folder(parent, part)
                os.close(above)
            create(parent, inside.name)
        except OSError as error:
            if error.errno not in _OF_THE_MEMBER:
                raise
            return self._leave(member, f"its path is taken or impossible ({error.strerror})")
        finally:
            os.close(parent)
        self._there[str(inside)] = None
        if member.kind != "folder":
            self.written.append(str(inside))
        return True

    def _leave(self, member: Member, why: str) -> bool:
        self.left_out.append(f"{member.name} is not written: {why}")
        return False


def _folder(parent: int, name: str) -> int:
    """A descriptor of the folder ``name``, made when it is missing; never of what a link leads to."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode=0o700, dir_fd=parent)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)


def _file(content: bytes) -> Callable[[int, str], None]:
    def create(parent: int, name: str) -> None:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)

    return create


def _link(member: Member, target: str) -> Callable[[int, str], None]:
    where = os.path.relpath(f"/{target}", f"/{PurePosixPath(member.name).parent}")
    return lambda parent, name: os.symlink(where, name, dir_fd=parent)


def _within(member: Member) -> str:
    """The name of what a link leads to: an absolute target is one of the source's host, not of this one."""
    start = FILES if member.target.startswith("/") else str(PurePosixPath(member.name).parent)
    return os.path.normpath(f"{start}/{member.target}")

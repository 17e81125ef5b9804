"""Files of this host as members of a tar: with their modes, owners and times, equal files giving equal bytes.

Nothing here fails for a file's sake: what cannot be taken is told in ``warnings`` (somebody should act) or in ``notes``
(worth knowing when it is unpacked).
"""

from __future__ import annotations

import contextlib
import grp
import io
import os
import pwd
import stat
import tarfile
from pathlib import Path

from backupd.engine.sql.option_files import read_option_file
from backupd.model.text import format_size

FILES = "host/files"
"""In front of the absolute path of each file."""
LARGEST_FILE = 8 * 1024**2
LARGEST_SUM = 64 * 1024**2
MOST_MEMBERS = 20_000
NAMED = 20
"""So many files that are left out are named, the others counted."""
_KINDS = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe", stat.S_IFBLK: "a device", stat.S_IFCHR: "a device"}


class HostFiles:
    """Collects members in any order; ``tar`` gives them sorted by name."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self._members: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
        self._room = LARGEST_SUM
        self._full = False
        self._left_out, self._others = 0, ""

    def text(self, name: str, text: str) -> None:
        """A document of ours. It belongs to nobody and has no time, so that equal text is an equal member."""
        content = text.encode("utf-8", "backslashreplace")
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), 0o600
        self._members[name] = (member, content)

    def option_file(self, path: Path) -> None:
        """A file of the server with everything that it includes. Its absence is told."""
        read = read_option_file(path, ())
        for problem in read.problems:
            self.warnings.append(f"option file {problem}")
        for file in dict.fromkeys((path, *read.files, *(Path(problem.file) for problem in read.problems))):
            if os.path.lexists(file):
                self.add(file)

    def add(self, path: Path) -> None:
        """A file or folder with all that is in it; a link with what it leads to. Its absence is told."""
        waiting = [path]  # folders may be nested deeper than calls
        while waiting:
            waiting += reversed(self._one(waiting.pop()))

    def tar(self) -> bytes:
        """The archive (GNU format, not compressed) of all that was collected."""
        output = io.BytesIO()
        # GNU's format takes names of any length and bytes.
        with tarfile.open(
            fileobj=output, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
        ) as tar:
            for _, (member, content) in sorted(self._members.items()):
                tar.addfile(member, io.BytesIO(content))
        return output.getvalue()

    def _one(self, path: Path) -> list[Path]:
        """Take what ``path`` names; gives what belongs to it: where a link leads to, what is in a folder."""
        name = _member_name(path)
        if name in self._members or not self._has_room(path):
            return []
        try:
            found = path.lstat()
            kind = stat.S_IFMT(found.st_mode)
            if kind == stat.S_IFLNK:
                target = path.readlink()
                self._put(name, found, tarfile.SYMTYPE, link=str(target))
                return [Path(os.path.normpath(path.parent / target))]
            if kind == stat.S_IFDIR:
                inside = sorted(entry.name for entry in os.scandir(path))
                self._put(name, found, tarfile.DIRTYPE)
                return [child for entry in inside if not self._leads_to_folder(child := path / entry)]
            if kind == stat.S_IFREG:
                self._file(path, name)
            else:
                self.notes.append(f"{path} is not kept: it is {_KINDS.get(kind, 'no file')}")
        except OSError as error:
            self.warnings.append(f"{path} is not kept: {error.strerror}")
        return []

    def _leads_to_folder(self, child: Path) -> bool:
        """A link to a folder inside a folder stays a link: it may lead to the whole disk."""
        if not (child.is_symlink() and child.is_dir()):
            return False
        self._put(_member_name(child), child.lstat(), tarfile.SYMTYPE, link=str(child.readlink()))
        self.notes.append(f"{child} is kept as a link; the folder it leads to is kept only if it is named itself")
        return True

    def _file(self, path: Path, name: str) -> None:
        # Not blocking and not following: it may have become a pipe or a link since it was looked at.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                self.notes.append(f"{path} is not kept: it is no file")
                return
            limit = min(LARGEST_FILE, self._room)
            content = file.read(limit + 1) if found.st_size <= limit else b""
        if len(content) > limit or found.st_size > limit:
            self._leave_out(path, max(found.st_size, len(content)))
            return
        self._room -= len(content)
        self._put(name, found, tarfile.REGTYPE, content)

    def _leave_out(self, path: Path, size: int) -> None:
        self._left_out += 1
        if self._left_out <= NAMED:
            why = (
                f"{format_size(size)} is more than the {format_size(LARGEST_FILE)} of one file"
                if size > LARGEST_FILE
                else f"with its {format_size(size)} all would be more than {format_size(LARGEST_SUM)}"
            )
            self.warnings.append(f"{path} is not kept: {why}")
            return
        if self._others:
            self.warnings.remove(self._others)
        self._others = (
            f"{self._left_out - NAMED} more files are not kept, for the same reasons: name folders of "
            "configuration, none of data"
        )
        self.warnings.append(self._others)

    def _has_room(self, path: Path) -> bool:
        if len(self._members) < MOST_MEMBERS:
            return True
        if not self._full:
            self.warnings.append(f"{path} and what comes after it are not kept: more than {MOST_MEMBERS} files")
        self._full = True
        return False

    def _put(self, name: str, found: os.stat_result, kind: bytes, content: bytes = b"", *, link: str = "") -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.size = kind, link, len(content)
        member.mode, member.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
        member.uid, member.gid = found.st_uid, found.st_gid
        with contextlib.suppress(KeyError):  # an id without a name stays a number
            member.uname = pwd.getpwuid(found.st_uid).pw_name
        with contextlib.suppress(KeyError):
            member.gname = grp.getgrgid(found.st_gid).gr_name
        self._members[name] = (member, content)


def _member_name(path: Path) -> str:
    return FILES + os.path.normpath(Path("/") / path)

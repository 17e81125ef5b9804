"""Writing in folders that belong to another user: never through a link that was laid there, and into no file that was.

Who owns a folder may put a symbolic link in the place of any name in it, at any moment. So each name is made anew
(``O_EXCL``), or looked up once without following (``O_NOFOLLOW``) and changed as what was found then.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PRIVATE = 0o600


@contextmanager
def _folder(path: Path, flags: int = os.O_NOFOLLOW) -> Iterator[int]:
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_anew(path: Path, content: bytes, *, owner: tuple[int, int] | None = None, mode: int = PRIVATE) -> None:
    """Put a new file in the place of whatever is called so, and give it to ``owner`` (user, group). The folder itself
    must not be a symbolic link. Raises OSError."""
    with _folder(path.parent) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        descriptor = os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE,
                             dir_fd=folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if owner is not None:
                os.fchown(descriptor, *owner)
            os.fchmod(descriptor, mode)  # whatever the umask is, and after the owner


def open_to_append(path: Path, *, owner: tuple[int, int] | None = None) -> int:
    """A descriptor that writes at the end of a file, which is made where there is none. Raises OSError, also for
    anything but a file with this one name."""
    with _folder(path.parent) as folder:
        descriptor = os.open(path.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
                             | os.O_CLOEXEC, PRIVATE, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(f"{path} is no file of its own: somebody put a link or a device there")
        if owner is not None:
            os.fchown(descriptor, *owner)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_plain(path: Path) -> bool:
    """Is it a file with no other name? Ask of what was taken out of another's folder. Raises OSError."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1


def give(path: Path, owner: tuple[int, int], mode: int | None = None) -> None:
    """Let what is called ``path`` belong to ``owner`` (user, group), and have ``mode``; of a symbolic link the link
    itself, which has no mode. Raises OSError."""
    with _folder(path.parent, 0) as folder:
        give_in(folder, path.name, owner, mode)


def give_in(folder: int, name: str, owner: tuple[int, int], mode: int | None = None) -> None:
    """The same of ``name`` in the folder that the descriptor is of."""
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISLNK(found.st_mode):
            os.chown(name, *owner, dir_fd=folder, follow_symlinks=False)
            return
        itself = Path(f"/proc/self/fd/{descriptor}")  # what was found, whatever has that name by now
        if (found.st_uid, found.st_gid) != owner:
            os.chown(itself, *owner)
        if mode is not None and stat.S_IMODE(found.st_mode) != mode:
            itself.chmod(mode)
    finally:
        os.close(descriptor)

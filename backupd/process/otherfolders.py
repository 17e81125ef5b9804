"""Folders that belong to another user: never writing through a link that was laid there, nor into a file that was, and
reading nothing but files.

Who owns a folder may put a symbolic link in the place of any name in it, at any moment. So each name is made anew
(``O_EXCL``), or looked up once without following (``O_NOFOLLOW``) and changed as what was found then. Where links are
to be followed, as in the data directory of a living server, root does it with the powers of that user (``powers_of``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import pwd
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from backupd.process.command import find_account

PRIVATE = 0o600
_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "loongarch64": 159, "ppc64le": 81, "s390x": 206}
"""Number of the system call; the C library's function changes every thread."""
_SET_DEATH_SIGNAL, _GET_DEATH_SIGNAL, _GET_DUMPABLE, _SET_DUMPABLE = 1, 2, 3, 4
_C = ctypes.CDLL(None, use_errno=True)


@contextmanager
def powers_of(user: str | None) -> Iterator[None]:
    """Whatever this thread opens, makes or removes in the block, it does as ``user`` (as of Command; None: ourselves)
    could: where that one does not come, neither do we. Only root can be somebody else; who is not goes on as he is.
    Start no program and no thread inside. Raises OSError, ConfigurationError for an unknown user."""
    if user is None or os.geteuid() != 0:
        yield
        return
    account = find_account(user)
    groups = [account.pw_gid] if ":" in user else os.getgrouplist(user, account.pw_gid)
    own = os.getgroups()
    parent, at_its_end, dumpable = os.getppid(), _death_signal(), _C.prctl(_GET_DUMPABLE, 0, 0, 0, 0)
    _set_groups(groups)
    try:
        _C.setfsgid(account.pw_gid)
        _C.setfsuid(account.pw_uid)  # the kernel takes what root may do with files away with it, and gives it back
        if acting_uid() != account.pw_uid:
            raise PermissionError(errno.EPERM, f"this process may not become {user}")
        yield
    finally:
        _C.setfsuid(os.geteuid())
        _C.setfsgid(os.getegid())
        _set_groups(own)
        # Both are taken from a thread that becomes somebody else (prctl(2)).
        _C.prctl(_SET_DUMPABLE, dumpable, 0, 0, 0)
        _C.prctl(_SET_DEATH_SIGNAL, at_its_end, 0, 0, 0)
        if at_its_end and os.getppid() != parent:
            os.kill(os.getpid(), at_its_end)


def _death_signal() -> int:
    """Which signal this thread gets when its parent ends; 0 for none."""
    found = ctypes.c_int()
    _C.prctl(_GET_DEATH_SIGNAL, ctypes.byref(found), 0, 0, 0)
    return found.value


@contextmanager
def as_its_owner(folder: Path) -> Iterator[None]:
    """``powers_of`` whom ``folder`` belongs to, for a folder that this one fills. Raises OSError."""
    found = folder.stat()
    with powers_of(f"{found.st_uid}:{found.st_gid}"):
        yield


def acting_uid() -> int:
    """As whom this thread looks at files: see ``powers_of``."""
    return int(_C.setfsuid(-1))  # -1 is nobody: the system call changes nothing, and says who it is


def _set_groups(groups: Sequence[int]) -> None:
    number = _SETGROUPS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"files of others are not read as root on a {platform.machine()}")
    if _C.syscall(number, len(groups), (ctypes.c_uint32 * len(groups))(*groups)) != 0:
        raise OSError(ctypes.get_errno(), "the groups of this thread cannot be changed")


def open_plain(path: Path, *, follow: bool = False) -> int:
    """A descriptor that reads a file; pipes and devices are not even opened. ``follow``: where a link leads to one.
    Raises OSError."""
    found = os.open(path, os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(found)


def read_plain(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """A small file; one of more than ``limit`` bytes is none. Raises OSError."""
    with open(open_plain(path, follow=follow), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
    return content


@contextmanager
def _folder(path: Path, flags: int = os.O_NOFOLLOW) -> Iterator[int]:
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_anew(path: Path, content: bytes, *, owner: tuple[int, int] | None = None, mode: int = PRIVATE) -> None:
    """Put a new file in the place of whatever is called so, on the disk, and give it to ``owner`` (user, group). The
    folder itself must not be a symbolic link. Raises OSError."""
    with _folder(path.parent) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        descriptor = os.open(
            path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE, dir_fd=folder
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if owner is not None:
                os.fchown(descriptor, *owner)
            os.fchmod(descriptor, mode)  # whatever the umask is, and after the owner
            os.fsync(descriptor)


def open_to_append(path: Path, *, owner: tuple[int, int] | None = None) -> int:
    """A descriptor that writes at the end of a file, which is made where there is none. Raises OSError, also for
    anything but a file with this one name."""
    with _folder(path.parent) as folder:
        descriptor = os.open(
            path.name,
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            PRIVATE,
            dir_fd=folder,
        )
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


def user_words(uid: int) -> str:
    """``user mysql``; ``uid 1001`` of one that this machine does not know."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"uid {uid}"


def closed_words(path: Path) -> str:
    """Whose ``path`` is, and its mode: ``/etc/db1.cnf is of user root, with mode 0600``."""
    try:
        found = path.stat()
    except OSError:  # it leads to where we do not come
        found = path.lstat()
    return f"{path} is of {user_words(found.st_uid)}, with mode {stat.S_IMODE(found.st_mode):04o}"

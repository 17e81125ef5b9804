"""Files and folders that outlive a kill, a power cut and another user's tricks.

* Folders for the time of one job, that the next job removes when this one was killed. Who works in such a folder holds
  a lock on it; where nobody does, its owner is dead.
* Files that a power cut leaves whole: the old content or the new one, and names that stay.
* Folders that belong to another user: never writing through a link that was laid there, nor into a file that was, and
  reading nothing but files. Who owns a folder may replace any name in it by a symbolic link, at any moment. So
  each name is made anew (``O_EXCL``), or looked up once without following (``O_NOFOLLOW``) and changed as what was
  found then. Where links are to be followed, as in the data directory of a living server, root does it with the powers
  of that user (``powers_of``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import pwd
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from backupd.process.command import find_account

PASSABLE = 0o711
"""Others may pass through to a path that they were given, and list nothing."""


def make_passable(folder: Path) -> None:
    """Make ``folder`` if needed, and let others pass through it, whatever the umask is, where it is ours.

    Raises OSError.
    """
    folder.mkdir(mode=PASSABLE, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o011 != 0o011:
        folder.chmod(status.st_mode & 0o7777 | 0o011)


@contextlib.contextmanager
def locked_folder(folder: Path, *, mode: int = PASSABLE) -> Iterator[Path]:
    """Make ``folder``, hold its lock, and remove it with everything in it at the end. Raises OSError."""
    descriptor = _locked(folder, mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked(folder: Path, mode: int) -> int:
    """Make and lock it. Between the two somebody may take it for a dead one's, and remove it: then once more."""
    while True:
        folder.mkdir(mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            os.fchmod(descriptor, mode)  # whatever the umask is
            return descriptor
        os.close(descriptor)


def remove_dead(
    base: Path, prefix: str, *, condemned: Callable[[Path], bool] = lambda _folder: True
) -> tuple[str, ...]:
    """Remove the folders in ``base`` that begin with ``prefix``, that nobody holds and that are ``condemned``, which is
    asked while they are locked. Gives their names."""
    removed = []
    for folder in sorted(base.glob(f"{prefix}*")):
        # It may be no folder of ours, just removed, or somebody's.
        with (
            contextlib.suppress(OSError),
            opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as descriptor,
        ):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if condemned(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder.name)
    return tuple(removed)


def write_private(path: Path, content: bytes) -> None:
    """Write a file of ours (0600) and wait for the disk. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file by one with this content, so that a kill leaves the old or the new one. Raises OSError."""
    fresh = path.with_name(f"{path.name}.new")
    write_private(fresh, content)
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names that were added, moved or removed in ``folder`` durable. Raises OSError."""
    with opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


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
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
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
def opened(path: Path, flags: int, mode: int = PRIVATE) -> Iterator[int]:
    """A descriptor of what ``os.open`` opens with these ``flags``, closed at the end. Raises OSError."""
    descriptor = os.open(path, os.O_CLOEXEC | flags, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _folder(path: Path, flags: int = os.O_NOFOLLOW) -> contextlib.AbstractContextManager[int]:
    return opened(path, os.O_PATH | os.O_DIRECTORY | flags)


def write_anew(path: Path, content: bytes, *, owner: tuple[int, int] | None = None, mode: int = PRIVATE) -> None:
    """Write a new file, on the disk, which replaces whatever is called so, and give it to ``owner`` (user, group). The
    folder must not be a symbolic link. Raises OSError."""
    with _folder(path.parent) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path.name, flags, PRIVATE, dir_fd=folder)
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
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path.name, flags, PRIVATE, dir_fd=folder)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise OSError(f"{path} is not a regular file: it was replaced by a link or a device")
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
    """Let what is called ``path`` belong to ``owner`` (user, group), and have ``mode``; of a symbolic link, the
    link, which has no mode. Raises OSError."""
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


def digest_of(path: Path, start: int, end: int) -> str:
    """SHA-256 of those bytes of a file, as far as it has them."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while start < end and (chunk := file.read(min(1024 * 1024, end - start))):
            start += len(chunk)
            digest.update(chunk)
    return digest.hexdigest()

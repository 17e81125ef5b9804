"""Memory of this process: what the C library keeps of it instead of giving it back, and who may look at it."""

from __future__ import annotations

import contextlib
import ctypes
import resource

_MMAP_THRESHOLD = -3
"""The parameter of glibc's ``mallopt``."""
_LARGE = 1024 * 1024
_PR_SET_DUMPABLE = 4


def hide_memory() -> None:
    """Rows and passphrases are in it: from now on it is written into no core dump, nor is that of what is started; and
    nobody but root reads it, or traces this process, not even another process of the same user.

    The limit alone does not do: a kernel that pipes core dumps into a program does not look at it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def return_large_blocks() -> None:
    """From now on blocks of a MiB and more go back to the system as soon as they are free.

    By itself glibc takes every large block that is freed for a sign that more will follow, and keeps blocks of that
    size, up to 32 MiB, in the arena of each thread. Parts of a backup are that large and pass through several threads:
    a logical backup took 207 MiB at its peak instead of 166, a physical one 218 instead of 199. Other C libraries have
    no such parameter and are left as they are.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)

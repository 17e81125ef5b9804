"""Memory that the C library keeps instead of giving it back."""

from __future__ import annotations

import contextlib
import ctypes

_MMAP_THRESHOLD = -3
"""The parameter of glibc's ``mallopt``."""
_LARGE = 1024 * 1024


def return_large_blocks() -> None:
    """From now on blocks of a MiB and more go back to the system as soon as they are free.

    By itself glibc takes every large block that is freed for a sign that more will follow, and keeps blocks of that
    size, up to 32 MiB, in the arena of each thread. Parts of a backup are that large and pass through several threads:
    a logical backup took 207 MiB at its peak instead of 166, a physical one 218 instead of 199. Other C libraries have
    no such parameter and are left as they are.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)

"""The key under which plaintext is recognised again. Losing it costs only dedup: the next backup stores all anew."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from backupd.model.errors import RefusedError

KEY_SIZE = 32


def identity_key(path: Path) -> bytes:
    """Read the key in ``path``, making it (0600, 32 random bytes) where there is none. Safe for two at once.

    Raises RefusedError when the file is not a key of ours, or cannot be read or made.
    """
    try:
        key = _read_or_make(path)
    except OSError as error:
        raise _unusable(path, error) from error
    if len(key) != KEY_SIZE:
        raise RefusedError(
            f"{path} is not an identity key: {len(key)} bytes where {KEY_SIZE} were expected",
            hint="move it away; the next backup makes a new key and stores everything once more",
        )
    return key


def _unusable(path: Path, error: OSError) -> RefusedError:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = f"make room for the folder {path.parent}, then try again"
    elif error.errno == errno.EISDIR:
        hint = "a folder lies where the key belongs: move it away; the next backup makes a new key"
    else:
        hint = f"this user must be able to read {path} and to write into {path.parent}"
    return RefusedError(f"the identity key {path} cannot be used: {reason}", hint=hint)


def _read_or_make(path: Path) -> bytes:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        fresh = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(KEY_SIZE))
                file.flush()
                os.fsync(file.fileno())
            # A hard link, not a rename: the first of two wins and both read the same key.
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        finally:
            fresh.unlink()
    return path.read_bytes()

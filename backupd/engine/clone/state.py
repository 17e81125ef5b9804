"""What the files of a stopped MySQL server tell of themselves, without starting it.

InnoDB writes the log sequence number of a clean shutdown into the first page of the system tablespace (8 bytes, big
endian, at FIL_PAGE_FILE_FLUSH_LSN = 26), and the last checkpoint into the redo log: two blocks at 512 and 1536 of a
file, the number 8 bytes into the block. From 8.0.30 on the redo log is files ``#innodb_redo/#ib_redoN``, of which the
unused ones end in ``_tmp``; before, ``ib_logfile0``. After a clean shutdown both numbers are the same; any other pair
means files of different moments, or a server that did not come to its end.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

from backupd.model.errors import OTHER_BACKUP, ToolError
from backupd.process.folders import open_plain

_FLUSHED_AT = 26
_CHECKPOINTS = (512, 1536)
_LSN_IN_BLOCK = 8
_HEADER = 2048


def system_tablespace(variables: Mapping[str, str]) -> str:
    """The first file of the system tablespace, as ``innodb_data_file_path`` names it."""
    return Path(variables.get("innodb_data_file_path", "").split(":")[0].strip() or "ibdata1").name


def flushed_lsn(base: Path, system: str) -> int:
    """The log sequence number at which the server of ``base`` was shut down; ``system``: its system tablespace.

    Raises ToolError when there is none.
    """
    try:
        with os.fdopen(open_plain(base / system), "rb") as file:
            page = file.read(_FLUSHED_AT + 8)
    except FileNotFoundError:
        page = b""
    if len(page) < _FLUSHED_AT + 8:
        raise ToolError(
            f"{base / system} is not there or empty: this is no complete copy of a server", hint=OTHER_BACKUP
        )
    return int(struct.unpack_from(">Q", page, _FLUSHED_AT)[0])


def checkpoint_lsn(base: Path) -> int:
    """The last checkpoint in the redo log of ``base``. Raises ToolError when it has none."""
    files = [path for path in base.glob("#innodb_redo/#ib_redo*") if not path.name.endswith("_tmp")]
    files += [path for path in base.glob("ib_logfile0") if path.is_file()]
    found = 0
    for path in files:
        with os.fdopen(open_plain(path), "rb") as file:  # whose it was may have put a pipe in its place
            header = file.read(_HEADER)
        for block in _CHECKPOINTS:
            if len(header) == _HEADER:
                found = max(found, int(struct.unpack_from(">Q", header, block + _LSN_IN_BLOCK)[0]))
    if not found:
        raise ToolError(f"{base} has no readable redo log: this is no complete copy of a server", hint=OTHER_BACKUP)
    return found

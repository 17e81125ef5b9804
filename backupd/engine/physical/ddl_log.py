"""The log of changed definitions that MariaDB keeps while a backup runs (``ddl.log``), from which mariadb-backup learns
which tables of MyISAM, Aria and the like it has to copy again, rename or remove.

Measured with 10.11.19: the tool stops reading at the first EXCHANGE PARTITION, exit code 0 and "completed OK!". A table
that it had copied before, and that is dropped and made again, renamed or altered behind that, is in the backup as it
was. A line is: time, what, engine, partitioned, schema, table, id, and the same from the engine on for the other table.
"""

from __future__ import annotations

from pathlib import Path

from backupd.engine.physical.tablefiles import OF_ENGINE
from backupd.engine.sql.filenames import decode_file_name
from backupd.model.table import TableName
from backupd.process.folders import read_plain

_NAME = "ddl.log"
_MOST = 256 * 1024 * 1024
_UNREAD = "EXCHANGE_PARTITION"
_WHAT, _FIRST, _OTHER, _SIZE = 1, 2, 7, 5


def unread_changes(datadir: Path) -> tuple[TableName, ...]:
    """Tables of engines other than InnoDB that the log names where mariadb-backup reads no more. Raises OSError."""
    try:
        text = read_plain(datadir / _NAME, _MOST).decode("utf-8", "replace")
    except FileNotFoundError:
        return ()  # a server that keeps none
    lines = [line.split("\t") for line in text.split("\n")]
    first = next((at for at, fields in enumerate(lines) if fields[_WHAT:_FIRST] == [_UNREAD]), len(lines))
    found = (fields[at : at + _SIZE] for fields in lines[first:] for at in (_FIRST, _OTHER))
    return tuple(
        dict.fromkeys(
            TableName(decode_file_name(one[2]), decode_file_name(one[3]))
            for one in found
            if len(one) > 3 and one[0].lower() in OF_ENGINE
        )
    )

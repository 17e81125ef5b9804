"""Files that an import of tablespaces left in the data directory of a server, because it was killed on the way.

Measured with MySQL 9.7.4: dropping the table, and even its schema, leaves them there. Then no schema of that name can
be made (error 3678), no table of that name either (1813), and the server does not start when another tablespace has the
number of such a file. MariaDB 10.11.19 removes those that have the names of tables.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path

from backupd.engine.physical.tablefiles import owner_of
from backupd.engine.sql.client import Session
from backupd.engine.sql.filenames import decode_file_name
from backupd.model.table import TableName
from backupd.process.folders import as_its_owner

WAITING = ".backupd"
"""Behind the names of files that are copied and not yet imported."""
_OF_TABLES = (".ibd", ".cfg")


def remove_strays(session: Session, schema: str) -> tuple[Path, ...]:
    """Remove what imports left in the folder of ``schema``: files of tables that the server does not have, and the
    folder, where it does not have the schema either. Those that this user may not remove are returned. The account must
    see all tables of the schema, and nobody may be creating any there meanwhile. Raises ServerError."""
    if not session.connection.socket:
        return ()
    datadir = Path(str(session.scalar("SELECT @@GLOBAL.datadir")))
    known = {
        TableName(schema, str(name))
        for (name,) in session.query("SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s", schema)
    }
    gone = not session.query("SELECT 1 FROM information_schema.SCHEMATA WHERE SCHEMA_NAME = %s", schema)
    left = []
    with contextlib.suppress(OSError, ValueError), as_its_owner(datadir):  # who may not look there put nothing there
        for folder in [one for one in datadir.iterdir() if decode_file_name(one.name) == schema]:
            for file in _strays(folder, known):
                try:
                    file.unlink(missing_ok=True)
                except OSError:
                    left.append(file)
            if gone:
                with contextlib.suppress(OSError):  # whatever else lies there is none of ours
                    folder.rmdir()
    return tuple(left)


def _strays(folder: Path, known: set[TableName]) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        if not stat.S_ISREG(file.lstat().st_mode):
            continue
        owner = owner_of(f"{folder.name}/{file.name}")
        if file.name.endswith(WAITING) or (file.suffix in _OF_TABLES and owner is not None and owner not in known):
            yield file

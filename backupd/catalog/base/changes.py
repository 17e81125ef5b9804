"""Whether anybody has written to the catalog since one last asked."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from backupd.catalog.base.database import Database


class Changes:
    """For one thread at a time; holds a connection of its own until it is closed. SQLite tells such a connection when
    another one has committed, without reading a row (https://www.sqlite.org/pragma.html#pragma_data_version);
    PostgreSQL has nothing like it."""

    def __init__(self, database: Database) -> None:
        self._file = Path(database.name) if database.sqlite else None
        self._connection: sqlite3.Connection | None = None

    def version(self) -> int | None:
        """Another number than before when something was written; None where that cannot be told."""
        if self._file is None:
            return None
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(
                    f"{self._file.absolute().as_uri()}?mode=ro",
                    uri=True,
                    timeout=0,
                    isolation_level=None,
                    check_same_thread=False,
                )
            row = self._connection.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            self.close()  # whoever reads the catalog itself says what is wrong with it
            return None
        return int(row[0])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

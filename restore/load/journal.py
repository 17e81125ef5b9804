"""What a load has done so far, in a table of the staging schema: rows and their entry here are one transaction.

One row per table and one per file of rows, found by the SHA-256 of their path in the folder. Whoever loads holds a
named lock of the server, and so does each of its sessions: when a process was killed, the server may go on with its
last statement for a while, and the next one waits for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from backupd.engine.sql.client import Session, error_code
from backupd.model.errors import BusyError, ServerError
from backupd.model.table import quote_name

TABLE = "backupd_load"
_NO_SUCH_THREAD = 1094
DYING = 3
"""Seconds that the server may take to notice that a killed process is gone."""
_PATIENCE = 60.0
"""Seconds for the sessions of a killed process to end; they are asked to."""
_CREATE = """
CREATE TABLE IF NOT EXISTS {journal} (
  id BINARY(32) NOT NULL PRIMARY KEY, path TEXT NOT NULL, state VARCHAR(16) NOT NULL, size BIGINT NOT NULL,
  position BIGINT NOT NULL, row_count BIGINT NOT NULL, digest CHAR(64) NOT NULL, begun DATETIME NOT NULL
) ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE utf8mb4_bin COMMENT = 'what backupd has loaded here so far'
"""


class State(StrEnum):
    """Of a table: about to be created; taking rows; complete but for its keys; complete. Files are ``FILE``."""

    MAKING = "making"
    LOADING = "loading"
    FILLED = "filled"
    DONE = "done"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Entry:
    """``position``: bytes of a file that are loaded, ``digest`` their SHA-256; of a table that of its definition.
    ``rows``: how many came out of it."""

    path: str
    state: State
    size: int
    position: int = 0
    rows: int = 0
    digest: str = ""


class Journal:
    """Of one load. ``schema``: the staging schema that holds it."""

    def __init__(self, schema: str) -> None:
        self.schema = schema
        self._table = quote_name(schema, TABLE)

    def create(self, session: Session) -> None:
        session.execute(_CREATE.format(journal=self._table))

    def read(self, session: Session) -> Mapping[str, Entry]:
        """By path."""
        rows = session.query(f"SELECT path, state, size, position, row_count, digest FROM {self._table}")  # noqa: S608
        return {
            str(path): Entry(str(path), State(state), int(size), int(position), int(count), str(digest))
            for path, state, size, position, count, digest in rows
        }

    def write(self, session: Session, *entries: Entry) -> None:
        """Add or replace."""
        for entry in entries:
            session.execute(
                f"REPLACE INTO {self._table} VALUES (UNHEX(%s), %s, %s, %s, %s, %s, %s, UTC_TIMESTAMP())",  # noqa: S608
                _key(entry.path),
                entry.path,
                str(entry.state),
                entry.size,
                entry.position,
                entry.rows,
                entry.digest,
            )

    def position(self, session: Session, path: str) -> int | None:
        """How far a file is loaded; inside of a transaction nobody else can go on with it until that ends."""
        found = session.scalar(
            f"SELECT position FROM {self._table} WHERE id = UNHEX(%s) FOR UPDATE",  # noqa: S608
            _key(path),
        )
        return None if found is None else int(found)

    def advance(self, session: Session, path: str, position: int, rows: int, digest: str) -> None:
        """``rows`` more came out of the file, up to ``position``."""
        session.execute(
            f"UPDATE {self._table} SET position = %s, row_count = row_count + %s, digest = %s "  # noqa: S608
            "WHERE id = UNHEX(%s)",
            position,
            rows,
            digest,
            _key(path),
        )

    def set_state(self, session: Session, path: str, state: State, rows: int = 0) -> None:
        session.execute(
            f"UPDATE {self._table} SET state = %s, row_count = %s WHERE id = UNHEX(%s)",  # noqa: S608
            str(state),
            rows,
            _key(path),
        )

    def forget(self, session: Session, *paths: str) -> None:
        for path in paths:
            session.execute(f"DELETE FROM {self._table} WHERE id = UNHEX(%s)", _key(path))  # noqa: S608

    # -- who is at it

    def claim(self, session: Session, most_workers: int) -> None:
        """Be the only one; ends what a killed process left running. Held until ``session`` is closed.

        Raises BusyError, ServerError.
        """
        if not session.scalar("SELECT GET_LOCK(%s, %s)", self._lock(), DYING):
            raise self._busy(session)
        deadline = time.monotonic() + _PATIENCE
        for left in self._left(session, most_workers):
            if time.monotonic() > deadline:
                raise BusyError(
                    f"the server is still at work for an earlier load into {self.schema}",
                    detail=f"its connection {left} does not end",
                    hint="SHOW PROCESSLIST tells what it does; repeat the command when it has ended",
                )
            try:
                session.execute(f"KILL {left}")
            except ServerError as error:
                if error_code(error) != _NO_SUCH_THREAD:
                    raise
            time.sleep(0.05)

    def release(self, session: Session) -> None:
        """Others may claim it now, before the server has noticed that ``session`` is closed."""
        with contextlib.suppress(ServerError):  # a lost session holds nothing
            session.scalar("SELECT RELEASE_LOCK(%s)", self._lock())

    def claim_worker(self, session: Session, number: int) -> None:
        """Mark ``session`` as one that may be writing here. Raises BusyError."""
        if not session.scalar("SELECT GET_LOCK(%s, 10)", self._lock(number)):
            raise self._busy(session)

    def _busy(self, session: Session) -> BusyError:
        holder = session.scalar("SELECT IS_USED_LOCK(%s)", self._lock())
        return BusyError(
            f"somebody is loading into {self.schema} right now",
            detail=f"connection {holder} of the server" if holder else "",
            hint="wait for that restore to end, or end it; then repeat the command",
        )

    def _left(self, session: Session, most_workers: int) -> Iterator[int]:
        """Connections of workers as long as there are any."""
        for number in range(most_workers):
            while (found := session.scalar("SELECT IS_USED_LOCK(%s)", self._lock(number))) is not None:
                yield int(found)

    def _lock(self, worker: int | None = None) -> str:
        return lock_name(self.schema) + ("" if worker is None else f".{worker}")


def lock_name(schema: str) -> str:
    """The server's lock of whoever loads into ``schema``; such names are at most 64 characters long."""
    return "backupd." + hashlib.sha256(schema.encode("utf-8", "surrogateescape")).hexdigest()[:40]


def _key(path: str) -> str:
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()

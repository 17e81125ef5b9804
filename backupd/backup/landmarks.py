"""What a backup records of the server besides its data, so that the next one can tell whether it may build on it."""

from __future__ import annotations

from dataclasses import dataclass

from backupd.engine.physical.imported_tables import imported_tables, newest_table
from backupd.engine.server.history import current_lsn, keyed, layout_of, log_digest, mute
from backupd.engine.sql.client import Connection, Session
from backupd.model.errors import ToolError
from backupd.model.manifest import Landmarks
from backupd.model.server_facts import Receipts, ServerInfo


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server stands: its log sequence number, and the highest id of a table. None: not known."""

    lsn: int | None
    table: int | None


def here(connection: Connection) -> Place:
    """Raises ServerError."""
    with connection.connect() as session:
        return Place(lsn=current_lsn(session), table=newest_table(session))


def landmarks_of(connection: Connection, info: ServerInfo, before: Place, receipts: Receipts, key: bytes) -> Landmarks:
    """The landmarks of a backup that was captured since ``before``; ``key`` hides what its log held.

    Raises ToolError when a table was imported while the tool ran, ServerError.
    """
    with connection.connect() as session:
        table = newest_table(session)
        if before.table is not None and before.lsn is not None:
            _refuse_imports(session, table=before.table, lsn=before.lsn)
        else:
            table = None
    return Landmarks(log=_digest(info, receipts, key), table=table, last_lsn=receipts.last_lsn, layout=layout_of(info))


def _refuse_imports(session: Session, *, table: int, lsn: int) -> None:
    try:
        tables = imported_tables(session, newer_than=table, lsn=lsn)
    except OSError as error:
        raise ToolError(
            f"a table that was made while the backup ran cannot be read: {error.strerror}",
            detail=str(error.filename),
            hint="backupd must run as a user who may read the datadir",
        ) from error
    if tables:
        raise ToolError(
            "a tablespace was imported while the backup ran, so it may hold the table as it was before",
            detail=", ".join(tables),
            hint="take the backup again when no IMPORT TABLESPACE runs",
        )


def _digest(info: ServerInfo, receipts: Receipts, key: bytes) -> str:
    """ "" when the next increment will find no evidence in the binary log; it says so then."""
    if mute(info) or not receipts.position.file:
        return ""
    try:
        return keyed(log_digest(info, receipts.position), key)
    except (OSError, ValueError):
        return ""

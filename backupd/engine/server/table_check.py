"""Looking at tables before they are read: those that the server cannot open, and those of engines that crashes damage.

``CHECK TABLE ... QUICK`` reads the index and compares the sizes of the files; nobody writes to the table meanwhile, nor
would while it is dumped. Of large tables only those are looked at that were not closed properly or are marked as
damaged (``FAST``), which takes no time. Measured on MariaDB 10.11: FAST misses a data file that was cut off behind the
server's back, and ``SELECT`` then gives fewer rows or an error, by luck; QUICK finds it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from backupd.engine.sql.client import Session
from backupd.engine.sql.tables import Table
from backupd.model.errors import CancelledError, ServerError
from backupd.model.table import TableName

CRASH_UNSAFE = frozenset({"MyISAM", "Aria", "ARCHIVE", "CSV"})
LARGE = 1 << 30
"""Bytes from which on a table is looked at only where its own mark asks for it."""
LOCK_SECONDS = 5
"""How long one table may be waited for."""

_GOOD = ("ok", "table is already up to date")


def check(
    session: Session,
    tables: Iterable[Table],
    *,
    repair: bool = False,
    tell: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Mapping[TableName, str]:
    """Why each damaged one of ``tables`` cannot be read, in the server's words; nothing for the others. Only those of
    engines that crashes damage are looked at, and those that the server cannot open.

    ``repair``: repair what is damaged, which may cost rows and needs INSERT on it; ``tell`` gets a sentence about each
    that was. Nothing of it is written to the binary log. Raises ServerError when the server went away, CancelledError.
    """
    found: dict[TableName, str] = {}
    with session.connection.connect() as own:
        # A look that MariaDB ends for its length would speak for a damaged table; MySQL ends only SELECTs so.
        own.execute(f"SET SESSION lock_wait_timeout = {LOCK_SECONDS} /*M!100101 , max_statement_time = 0 */")
        for table in tables:
            if cancel is not None and cancel.is_set():
                raise CancelledError("cancelled while the tables were checked")
            if table.engine and table.engine not in CRASH_UNSAFE:
                continue
            fast = " FAST" if table.size > LARGE else ""
            damage, _said = _ask(own, f"CHECK TABLE {table.name}{fast} QUICK")
            if damage and repair:
                still, said = _ask(own, f"REPAIR NO_WRITE_TO_BINLOG TABLE {table.name}")
                if not still and tell is not None:
                    tell(f"{table.name.shown} was damaged ({damage}) and was repaired: {said or 'no rows were lost'}")
                damage = f"{damage}; it cannot be repaired: {still}" if still else ""
            if damage:
                found[table.name] = damage
    return found


def _ask(session: Session, statement: str) -> tuple[str, str]:
    """What is wrong, in the server's words, empty when nothing is; and what else it says."""
    try:
        rows = session.query(statement)
    except ServerError as error:
        session.ping()
        return error.detail, ""
    said = [(str(kind).lower(), str(text)) for _table, _operation, kind, text in rows]
    words = "; ".join(dict.fromkeys(text for kind, text in said if kind in ("error", "warning")))
    if any(kind == "status" and text.lower() in _GOOD for kind, text in said):
        return "", words
    if all(kind == "note" for kind, _text in said):  # an engine that has no such statement
        return "", ""
    return words or "; ".join(text for _kind, text in said), ""

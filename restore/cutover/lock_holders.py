"""Who keeps others from tables."""

from __future__ import annotations

from collections.abc import Iterable

from backupd.engine.sql.client import Session, error_code, is_denied
from backupd.model.errors import ServerError
from backupd.model.table import TableName

_METADATA = """
SELECT t.PROCESSLIST_ID, t.PROCESSLIST_USER, t.PROCESSLIST_HOST, MAX(t.PROCESSLIST_TIME),
       LEFT(COALESCE(MAX(t.PROCESSLIST_INFO), MAX(t.PROCESSLIST_COMMAND)), 100),
       CONCAT(m.OBJECT_SCHEMA, '.', m.OBJECT_NAME)
FROM performance_schema.metadata_locks m JOIN performance_schema.threads t ON t.THREAD_ID = m.OWNER_THREAD_ID
WHERE m.OBJECT_TYPE = 'TABLE' AND m.LOCK_STATUS = 'GRANTED' AND t.PROCESSLIST_ID <> CONNECTION_ID()
  AND (m.OBJECT_SCHEMA, m.OBJECT_NAME) IN ({tables})
GROUP BY 1, 2, 3, 6 ORDER BY 4 DESC LIMIT 10
"""
_PLUGIN = """
SELECT p.ID, p.USER, p.HOST, p.TIME, LEFT(COALESCE(p.INFO, p.COMMAND), 100), CONCAT(m.TABLE_SCHEMA, '.', m.TABLE_NAME)
FROM information_schema.METADATA_LOCK_INFO m JOIN information_schema.PROCESSLIST p ON p.ID = m.THREAD_ID
WHERE p.ID <> CONNECTION_ID() AND (m.TABLE_SCHEMA, m.TABLE_NAME) IN ({tables}) ORDER BY p.TIME DESC LIMIT 10
"""
_TRANSACTIONS = "SELECT trx_mysql_thread_id FROM information_schema.INNODB_TRX ORDER BY trx_started"
_SHOWN = 10
_NOT_HERE = frozenset({1109, 1146})
"""No such table: a plugin that is not loaded, a performance schema that is not there."""


def lock_holders(session: Session, tables: Iterable[TableName]) -> tuple[str, ...]:
    """In words, whoever holds locks of ``tables``, as far as the server tells this account; where it does not tell
    locks, whoever has an open transaction. Raises ServerError."""
    names = [part for name in tables for part in (name.schema, name.table)]
    pairs = ", ".join(["(%s, %s)"] * (len(names) // 2))
    for query in (_METADATA, _PLUGIN):
        if rows := _asked(session, query.format(tables=pairs), *names):
            return tuple(
                f"{table} is held by connection {number} of {user}@{host}, {seconds} s: {info}"
                for number, user, host, seconds, info, table in rows
            )
    there = {int(row["Id"]): row for row in session.records("SHOW PROCESSLIST", shown=True)}
    open_ones = [
        there[number] for (number,) in _asked(session, _TRANSACTIONS) if number in there and number != session.thread_id
    ]
    return tuple(
        f"open transaction: connection {row['Id']} of {row['User']}@{row['Host']}, {row['Time']} s: "
        f"{row['Info'] or row['Command']}"
        for row in open_ones[:_SHOWN]
    )


def _asked(session: Session, query: str, *names: str) -> list[tuple[object, ...]]:
    try:
        return session.query(query, *names, shown=True)
    except ServerError as error:
        if not (is_denied(error) or error_code(error) in _NOT_HERE):
            raise
        return []

"""Changes that bypass the binary log: sessions that turned it off for themselves (sql_log_bin = 0).

MySQL shows it for every session that is connected. MariaDB does not; where its performance schema is on, statements
that touched the variable since the server's start are seen, of whatever session. Without the performance schema
nothing is seen, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from backupd.engine.sql.client import Session, error_code, is_denied
from backupd.engine.sql.dialect import Dialect
from backupd.model.errors import ServerError
from backupd.model.server_facts import Flavour

_SESSIONS = """
SELECT DISTINCT t.PROCESSLIST_USER FROM performance_schema.variables_by_thread v
JOIN performance_schema.threads t ON t.THREAD_ID = v.THREAD_ID
WHERE v.VARIABLE_NAME = 'sql_log_bin' AND v.VARIABLE_VALUE IN ('OFF', '0') AND t.TYPE = 'FOREGROUND'
AND t.PROCESSLIST_USER IS NOT NULL AND t.PROCESSLIST_USER <> 'event_scheduler' AND t.PROCESSLIST_ID <> CONNECTION_ID()
"""
_STATEMENTS = """
SELECT DIGEST_TEXT, SUM(COUNT_STAR), MIN(FIRST_SEEN), MAX(LAST_SEEN)
FROM performance_schema.events_statements_summary_by_digest WHERE DIGEST_TEXT LIKE 'SET %sql_log_bin%'
GROUP BY DIGEST_TEXT
"""
_OURS = "SET SESSION `sql_log_bin` = ?"
"""As the snapshot of a witness says it, on MariaDB; written by somebody else it is not told apart."""
_UNKNOWN = (1109, 1142, 1146)
"""No such table, or not for this account."""


def unlogged(session: Session, dialect: Dialect) -> Iterator[str]:
    """One sentence for each trace that the server shows. Raises ServerError when it went away."""
    mariadb = dialect.flavour is Flavour.MARIADB
    users = [] if mariadb else sorted(str(row[0]) for row in _asked(session, _SESSIONS))
    if users:
        yield (
            f"sessions of {', '.join(users)} have turned the binary log off for themselves (sql_log_bin = 0): what "
            "they change is in no replay"
        )
    for text, count, first, last in _asked(session, _STATEMENTS):
        said = str(text).strip()
        if not mariadb or said != _OURS:
            yield (
                f"sql_log_bin was set by {count} statements ({said}), first at {first:%Y-%m-%d %H:%M:%S}, last "
                f"at {last:%Y-%m-%d %H:%M:%S} of the server's clock: what a session changes while it is 0 is in no "
                "replay"
            )


def _asked(session: Session, sql: str) -> list[tuple[object, ...]]:
    try:
        return session.query(sql)
    except ServerError as error:
        if not is_denied(error) and error_code(error) not in _UNKNOWN:
            raise
        return []

"""How long has the oldest statement of somebody else been running? So that a backup can step back for it.

Whatever runs under our own account is ours: the tools' SELECTs are long because tables are large, and to wait for them
would be to wait for ourselves. So would it be with a statement that waits for a lock: an ALTER TABLE that our snapshot
keeps waiting begins only when the backup has ended.
"""

from __future__ import annotations

import re

from backupd.engine.pressure.gauges import Gauges, Reading
from backupd.engine.pressure.long_statements import running
from backupd.engine.server.grants import read_grants
from backupd.engine.sql.client import Connection, Session
from backupd.model.errors import BackupdError

_WAITS = re.compile(r"Waiting for .*(?:lock|flush)", re.IGNORECASE)


class QueryGauge:
    """Seconds that the oldest statement has been running that is not our account's and waits for no lock; none: 0.
    Keeps one session open."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._session: Session | None = None
        self._ours = ""

    def read(self) -> Reading:
        try:
            if self._session is None:
                self._session = self._connection.connect()
                self._ours = str(self._session.scalar("SELECT SUBSTRING_INDEX(USER(), '@', 1)"))
            others = [
                one for one in running(self._session, 0) if one.user != self._ours and not _WAITS.match(one.state)
            ]
        except BackupdError as error:
            self.close()
            return Reading(None, f"whether long statements run is unknown: {error.detail or error.message}")
        if not others:
            return Reading(0.0, "nobody else runs a statement")
        return Reading(float(others[0].seconds), f"a statement of {others[0]}")

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def query_gauges(connection: Connection) -> Gauges:
    """Raises ServerError when the server cannot be asked at all."""
    with connection.connect() as session:
        sees_all = read_grants(session).allow("PROCESS")
    lacking = "limits.long_queries: without the privilege PROCESS the account sees no statements but its own"
    return Gauges((QueryGauge(connection),)) if sees_all else Gauges(warnings=(lacking,))

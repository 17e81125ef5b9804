"""A statement of one session that waits for the locks which another one holds."""

from __future__ import annotations

import threading

from backupd.engine.sql.client import Session
from backupd.model.errors import ServerError


class Renaming:
    """Takes over ``session`` and closes it in ``join``."""

    def __init__(self, session: Session, statement: str) -> None:
        self._session = session
        self._statement = statement
        self._error: ServerError | None = None
        self._thread = threading.Thread(target=self._run, name="rename", daemon=True)

    def queue(self, holder: Session) -> None:
        """Returns when it stands in line, or ended. Raises ServerError."""
        number = self._session.thread_id
        self._thread.start()
        while self._thread.is_alive():
            # Not out of information_schema: MySQL's has no answer while one statement there is no valid UTF-8.
            if any(
                row["Id"] == number and "waiting" in str(row["State"]).lower()
                for row in holder.records("SHOW PROCESSLIST", shown=True)
            ):
                return
            self._thread.join(0.002)

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()
        self._session.close()

    def check(self) -> None:
        """Raises ServerError."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._session.execute(self._statement)
        except ServerError as error:
            self._error = error

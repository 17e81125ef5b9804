"""Where a hand-over remembers what it is doing: a table in the staging schema, so that the next call can settle it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from backupd.engine.sql.client import Session
from backupd.model.table import TableName, quote_name
from restore.cutover.goals import HandedOver
from restore.cutover.plan import Plan

TABLE = "backupd_handover"
_PRESENT = "SELECT 1 FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
_READ = "SELECT id, plan, result FROM {table} ORDER BY id"
_BEGIN = "REPLACE INTO {table} VALUES (%s, %s, NULL)"
_FINISH = "UPDATE {table} SET result = %s WHERE id = %s"
_FORGET = "DELETE FROM {table} WHERE id = %s"


@dataclass(frozen=True, slots=True)
class Entry:
    """``result`` None: not finished."""

    key: str
    plan: Plan
    result: HandedOver | None


class Journal:
    """Of the hand-overs out of one staging schema, each under its key."""

    def __init__(self, session: Session, schema: str) -> None:
        self._session = session
        self._schema = schema
        self._table = TableName(schema, TABLE)

    def through(self, session: Session) -> Journal:
        """The same one, written by another session."""
        return Journal(session, self._schema)

    def create(self) -> None:
        """If it is not there. Raises ServerError."""
        self._session.execute(
            f"CREATE TABLE IF NOT EXISTS {self._table} (id CHAR(64) CHARACTER SET ascii PRIMARY KEY, "
            f"plan LONGTEXT NOT NULL, result LONGTEXT) CHARACTER SET utf8mb4 ENGINE = InnoDB"
        )

    def entries(self) -> tuple[Entry, ...]:
        """Raises ServerError."""
        if not self._session.query(_PRESENT, self._table.schema, self._table.table):
            return ()
        return tuple(
            Entry(str(key), Plan.from_text(plan), HandedOver.from_json(json.loads(result)) if result else None)
            for key, plan, result in self._session.query(_READ.format(table=self._table))
        )

    def begin(self, key: str, plan: Plan) -> None:
        """Raises ServerError."""
        self._session.execute(_BEGIN.format(table=self._table), key, plan.as_text())

    def finish(self, key: str, result: HandedOver) -> None:
        """Raises ServerError."""
        self._session.execute(_FINISH.format(table=self._table), json.dumps(result.as_json()), key)

    def forget(self, key: str) -> None:
        """After everything was put back. Raises ServerError."""
        self._session.execute(_FORGET.format(table=self._table), key)

    @staticmethod
    def lock_name(schema: str) -> str:
        """Of the server's lock that whoever hands over out of ``schema`` holds."""
        return f"backupd/{quote_name(schema)}"[:64]

"""Rows of witnesses: what the source's tables looked like at a position."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Select, delete, insert, select

from backupd.catalog.backups.backups import position_columns
from backupd.catalog.base.database import Database
from backupd.catalog.base.tables import witnesses
from backupd.model.backup.proof import Witness
from backupd.model.errors import NotFoundError
from backupd.model.server.facts import Position


class Witnesses:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, witness_id: str, witness: Witness, *, backup_id: str | None = None) -> None:
        """Record a witness; ``backup_id`` when it was read in the very moment of that backup. Same id: replaced."""
        with self._database.write() as connection:
            connection.execute(delete(witnesses).where(witnesses.c.id == witness_id))
            connection.execute(
                insert(witnesses).values(
                    id=witness_id,
                    server=witness.server,
                    backup_id=backup_id,
                    taken_at=witness.taken_at,
                    **position_columns(witness.position),
                    seconds=witness.seconds,
                    # as_json rounds the seconds for readers; what is kept is exact
                    payload={**witness.as_json(), "seconds": witness.seconds},
                )
            )

    def get(self, witness_id: str) -> Witness:
        """Raises NotFoundError."""
        found = self._first(_newest().where(witnesses.c.id == witness_id))
        if found is None:
            raise NotFoundError(f"there is no witness {witness_id}")
        return found

    def latest(self, server: str) -> Witness | None:
        return self._first(_newest().where(witnesses.c.server == server))

    def of_backup(self, backup_id: str) -> Witness | None:
        """The witness that was read in the moment of this backup."""
        return self._first(_newest().where(witnesses.c.backup_id == backup_id))

    def at_position(self, server: str, position: Position) -> Witness | None:
        """The newest witness of exactly this place in the binary log.

        File and offset decide where the server writes a binary log. Without one (empty file) the GTID does, and
        with neither nothing can be said: None.
        """
        query = _newest().where(witnesses.c.server == server)
        if position.file:
            return self._first(
                query.where(witnesses.c.position_file == position.file, witnesses.c.position_pos == position.pos)
            )
        if position.gtid:
            return self._first(query.where(witnesses.c.position_gtid == position.gtid))
        return None

    def between(
        self,
        server: str,
        since: datetime,
        until: datetime,
        *,
        limit: int | None = None,
    ) -> tuple[Witness, ...]:
        """Those that were taken from ``since`` to ``until``, both included, newest first; with backups or not."""
        query = (
            _newest()
            .where(witnesses.c.server == server, witnesses.c.taken_at >= since, witnesses.c.taken_at <= until)
            .limit(limit)
        )
        with self._database.read() as connection:
            payloads: list[object] = [row[0] for row in connection.execute(query)]
        return tuple(Witness.from_json(payload) for payload in payloads if isinstance(payload, dict))

    def ids(self, server: str) -> tuple[str, ...]:
        """Of all that are known, oldest first."""
        with self._database.read() as connection:
            return tuple(
                connection.scalars(
                    select(witnesses.c.id)
                    .where(witnesses.c.server == server)
                    .order_by(witnesses.c.taken_at, witnesses.c.id)
                )
            )

    def backup_of(self, witness_id: str) -> str | None:
        """The backup in whose very moment it was read. Raises NotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(select(witnesses.c.backup_id).where(witnesses.c.id == witness_id)).first()
        if row is None:
            raise NotFoundError(f"there is no witness {witness_id}")
        return row[0] if row[0] is None else str(row[0])

    def forget_before(self, server: str, moment: datetime) -> None:
        """Remove those of no backup that are older."""
        with self._database.write() as connection:
            connection.execute(
                delete(witnesses).where(
                    witnesses.c.server == server, witnesses.c.backup_id.is_(None), witnesses.c.taken_at < moment
                )
            )

    def forget(self, backup_id: str) -> None:
        """Remove the witnesses of a backup that is gone."""
        with self._database.write() as connection:
            connection.execute(delete(witnesses).where(witnesses.c.backup_id == backup_id))

    def _first(self, query: Select[tuple[object]]) -> Witness | None:
        with self._database.read() as connection:
            payload = connection.execute(query.limit(1)).scalar()
        return Witness.from_json(payload) if isinstance(payload, dict) else None


def _newest() -> Select[tuple[object]]:
    return select(witnesses.c.payload).order_by(witnesses.c.taken_at.desc(), witnesses.c.id.desc())

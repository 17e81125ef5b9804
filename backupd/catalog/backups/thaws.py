"""Rows of thaws: what each job of that kind has asked out of an archive class, object by object."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, delete, func, insert, select, update
from sqlalchemy.engine import RowMapping

from backupd.catalog.base.database import Database
from backupd.catalog.base.tables import jobs, thaws
from backupd.catalog.work.jobs import insert_jobs
from backupd.model.job import JobRecord
from backupd.model.thaw import ThawCount, Thawing, ThawItem, ThawState

_ROWS = 1000
_CHANGING = ("tier", "state", "requested_at", "expected_at", "ready_until", "message")


class Thaws:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, job: JobRecord, items: Iterable[ThawItem]) -> None:
        """Record a job together with everything that it has to ask for."""
        rows = [_columns(item) for item in items]
        with self._database.write() as connection:
            insert_jobs(connection, [job])
            for start in range(0, len(rows), _ROWS):
                connection.execute(insert(thaws), rows[start : start + _ROWS])

    def of(
        self,
        thaw_id: str,
        *,
        state: ThawState | Collection[ThawState] | None = None,
        part: str | None = None,
        limit: int | None = None,
    ) -> tuple[ThawItem, ...]:
        """In the order in which they were to be asked for, as far as parts tell."""
        query = select(thaws).where(thaws.c.thaw_id == thaw_id)
        if state is not None:
            states = {state} if isinstance(state, ThawState) else state
            query = query.where(thaws.c.state.in_([str(one) for one in states]))
        if part is not None:
            query = query.where(thaws.c.part == part)
        with self._database.read() as connection:
            rows = connection.execute(query.order_by(thaws.c.destination, thaws.c.key).limit(limit)).mappings()
            return tuple(_item(row) for row in rows)

    def count(self, thaw_id: str) -> Thawing:
        grouped = (
            select(
                thaws.c.part,
                thaws.c.destination,
                thaws.c.state,
                func.count().label("objects"),
                func.sum(thaws.c.size).label("bytes"),
                func.max(thaws.c.expected_at).label("expected_at"),
                func.min(thaws.c.ready_until).label("ready_until"),
            )
            .where(thaws.c.thaw_id == thaw_id)
            .group_by(thaws.c.part, thaws.c.destination, thaws.c.state)
            .order_by(thaws.c.part, thaws.c.destination, thaws.c.state)
        )
        with self._database.read() as connection:
            found = connection.execute(grouped).mappings()
            return Thawing(
                thaw_id,
                tuple(
                    ThawCount(
                        row["part"],
                        row["destination"],
                        ThawState(row["state"]),
                        row["objects"],
                        int(row["bytes"]),
                        row["expected_at"],
                        row["ready_until"],
                    )
                    for row in found
                ),
            )

    def record(self, items: Sequence[ThawItem]) -> None:
        """Write down how these stand now; what they are of does not change."""
        change = (
            update(thaws)
            .where(
                thaws.c.thaw_id == bindparam("of_thaw"),
                thaws.c.destination == bindparam("of_destination"),
                thaws.c.key == bindparam("of_key"),
            )
            .values({name: bindparam(f"new_{name}") for name in _CHANGING})
        )
        if items:
            with self._database.write() as connection:
                connection.execute(
                    change,
                    [
                        {
                            "of_thaw": item.thaw_id,
                            "of_destination": item.destination,
                            "of_key": item.key,
                            **{f"new_{name}": value for name, value in _columns(item).items() if name in _CHANGING},
                        }
                        for item in items
                    ],
                )

    def raise_tier(self, thaw_id: str, tier: str, arguments: Mapping[str, Any]) -> int:
        """Everything that is not there yet is to be asked for at ``tier``, which the job's ``arguments`` name from now
        on; how much that is. What is under way keeps the tier that it was asked for at until a faster one is taken."""
        ours = thaws.c.thaw_id == thaw_id
        with self._database.write() as connection:
            asked = connection.execute(
                update(thaws)
                .where(ours, thaws.c.state.in_([str(ThawState.THAWING), str(ThawState.RAISED)]))
                .values(state=str(ThawState.RAISED))
            ).rowcount
            new = connection.execute(
                update(thaws).where(ours, thaws.c.state == str(ThawState.WANTED)).values(tier=tier)
            ).rowcount
            connection.execute(update(jobs).where(jobs.c.id == thaw_id).values(arguments=dict(arguments)))
            return int(asked + new)

    def forget(self) -> int:
        """Remove rows whose job is forgotten."""
        with self._database.write() as connection:
            return int(connection.execute(delete(thaws).where(thaws.c.thaw_id.not_in(select(jobs.c.id)))).rowcount)


def _columns(item: ThawItem) -> dict[str, Any]:
    return {column.name: getattr(item, column.name) for column in thaws.columns} | {"state": str(item.state)}


def _item(row: RowMapping) -> ThawItem:
    return ThawItem(**{**row, "state": ThawState(row["state"])})

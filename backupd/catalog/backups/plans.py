"""Rows of plans: what a restore would do, as somebody was shown it, to be started by its id for a while."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import delete, insert, select

from backupd.catalog.base.database import Database
from backupd.catalog.base.people_tables import plans
from backupd.model.clock import format_time
from backupd.model.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """``request``: what was asked for, and ``document``: the plan for that, both as JSON."""

    id: str
    server: str
    made_at: datetime
    made_by: str
    expires_at: datetime
    request: Mapping[str, Any]
    document: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {
            **self.document,
            "id": self.id,
            "server": self.server,
            "made_at": format_time(self.made_at),
            "made_by": self.made_by,
            "expires_at": format_time(self.expires_at),
            "request": dict(self.request),
        }


class Plans:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, plan: StoredPlan, now: datetime) -> None:
        """Those that have expired go."""
        with self._database.write() as connection:
            connection.execute(delete(plans).where(plans.c.expires_at <= now))
            connection.execute(
                insert(plans).values(
                    id=plan.id,
                    server=plan.server,
                    made_at=plan.made_at,
                    made_by=plan.made_by,
                    expires_at=plan.expires_at,
                    request=dict(plan.request),
                    document=dict(plan.document),
                )
            )

    def get(self, plan_id: str, now: datetime) -> StoredPlan:
        """Raises NotFoundError, also for one that has expired."""
        with self._database.read() as connection:
            row = (
                connection.execute(select(plans).where(plans.c.id == plan_id, plans.c.expires_at > now))
                .mappings()
                .first()
            )
        if row is None:
            raise NotFoundError(
                f"there is no plan {plan_id[:80]}, or it has expired", hint="make the plan again, and start that one"
            )
        return StoredPlan(**row)

"""Rows of proofs: one for each test restore, good or bad. They outlive the backups that they proved."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import delete, insert, select, update
from sqlalchemy.engine import RowMapping

from backupd.catalog.base.database import Database
from backupd.catalog.base.pages import EVER, Listed, Span, cursor_of, page
from backupd.catalog.base.phases import phases_from, phases_json
from backupd.catalog.base.tables import proofs
from backupd.model.backup.proof import WITHDRAWN, Check, Proof
from backupd.model.errors import NotFoundError


class Proofs:
    """Every method is one transaction and raises CatalogError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, proof: Proof) -> None:
        """Record a proof; one of the same id is replaced."""
        with self._database.write() as connection:
            connection.execute(delete(proofs).where(proofs.c.id == proof.id))
            connection.execute(
                insert(proofs).values(
                    id=proof.id,
                    server=proof.server,
                    backup_id=proof.backup_id,
                    target=proof.target,
                    outcome=proof.outcome,
                    started_at=proof.started_at,
                    finished_at=proof.finished_at,
                    phases=phases_json(proof.phases),
                    checks=[check.as_json() for check in proof.checks],
                    tables_compared=proof.tables_compared,
                    error=proof.error,
                    warnings=list(proof.warnings),
                    older=proof.older,
                    tables_present=proof.tables_present,
                    not_looked_at=proof.not_looked_at,
                    withdrawn=proof.withdrawn,
                )
            )

    def withdraw(self, proof_id: str, why: str) -> None:
        """It does not count any more. Quiet when it is gone."""
        with self._database.write() as connection:
            connection.execute(update(proofs).where(proofs.c.id == proof_id).values(outcome=WITHDRAWN, withdrawn=why))

    def get(self, proof_id: str) -> Proof:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            row = connection.execute(select(proofs).where(proofs.c.id == proof_id)).mappings().first()
        if row is None:
            raise NotFoundError(f"there is no proof {proof_id}")
        return _proof(row)

    def list(
        self,
        server: str | None = None,
        *,
        backup_id: str | None = None,
        outcome: str | None = None,
        limit: int | None = None,
    ) -> tuple[Proof, ...]:
        """Newest first."""
        query = select(proofs).order_by(proofs.c.finished_at.desc(), proofs.c.id.desc()).limit(limit)
        for column, wanted in ((proofs.c.server, server), (proofs.c.backup_id, backup_id), (proofs.c.outcome, outcome)):
            if wanted is not None:
                query = query.where(column == wanted)
        with self._database.read() as connection:
            return tuple(_proof(row) for row in connection.execute(query).mappings())

    def page(
        self,
        servers: Collection[str] | None = None,
        *,
        backup_id: str | None = None,
        outcome: str | None = None,
        span: Span = EVER,
        limit: int = 100,
        after: str | None = None,
    ) -> Listed[Proof]:
        """One page of the list; ``servers`` None: of all; ``span``: when they were finished. Raises UsageError for what
        is no cursor."""
        query = span.of(page(select(proofs), proofs.c.finished_at, proofs.c.id, after, limit), proofs.c.finished_at)
        if servers is not None:
            query = query.where(proofs.c.server.in_(servers))
        for column, wanted in ((proofs.c.backup_id, backup_id), (proofs.c.outcome, outcome)):
            if wanted is not None:
                query = query.where(column == wanted)
        with self._database.read() as connection:
            found = [_proof(row) for row in connection.execute(query).mappings()]
        return Listed.of(found, limit, lambda proof: cursor_of(proof.finished_at, proof.id))

    def latest(self, server: str, *, outcome: str | None = None) -> Proof | None:
        return next(iter(self.list(server, outcome=outcome, limit=1)), None)


def _proof(row: RowMapping) -> Proof:
    return Proof(
        id=row["id"],
        server=row["server"],
        backup_id=row["backup_id"],
        target=row["target"],
        outcome=row["outcome"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        phases=phases_from(row["phases"]),
        checks=tuple(Check(c["name"], c["outcome"], c["detail"]) for c in row["checks"]),
        tables_compared=row["tables_compared"],
        error=row["error"],
        warnings=tuple(row["warnings"] or ()),
        older=bool(row["older"]),
        tables_present=row["tables_present"],
        not_looked_at=row["not_looked_at"],
        withdrawn=row["withdrawn"],
    )

"""What shows that backups are good: proofs of test restores, the witnesses that they are compared with, and the checks
whether a replica that was backed up holds what its source does."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    ColumnElement,
    Float,
    Index,
    Integer,
    String,
    Table,
    delete,
    select,
    text,
    update,
)

from backupd.catalog.database import Rows
from backupd.catalog.row_mapping import (
    EVER,
    FreeText,
    Listed,
    Span,
    UtcTime,
    metadata,
    narrowed,
    page,
    position_fields,
    row_of,
)
from backupd.model.errors import NotFoundError, unknown
from backupd.model.proof import WITHDRAWN, Proof, Witness

if TYPE_CHECKING:
    from backupd.model.consistency import ConsistencyCheck

proofs = Table(
    "proofs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("backup_id", String(64), nullable=False),
    Column("target", FreeText, nullable=False),
    Column("outcome", String(32), nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("finished_at", UtcTime, nullable=False),
    Column("phases", JSON, nullable=False),
    Column("checks", JSON, nullable=False),
    Column("tables_compared", Integer, nullable=False),
    Column("error", FreeText, nullable=False),
    Column("warnings", JSON),
    Column("older", Boolean),
    Column("tables_present", Integer, nullable=False, server_default="0"),
    Column("not_looked_at", Integer, nullable=False, server_default="0"),
    Column("withdrawn", FreeText, nullable=False, server_default=text("''")),
    Column("flags", JSON, nullable=False, server_default=text("'[]'")),
    Index(None, "server", "finished_at"),
    Index(None, "backup_id"),
)


witnesses = Table(
    "witnesses",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("backup_id", String(64)),
    Column("taken_at", UtcTime, nullable=False),
    *position_fields(),
    Column("seconds", Float, nullable=False),
    Column("payload", JSON, nullable=False),
    Index(None, "server", "taken_at"),
    Index(None, "backup_id"),
)


consistency_checks = Table(
    "consistency_checks",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("replica", String(64), nullable=False),
    Column("source", FreeText, nullable=False),
    Column("tool", String(32), nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("finished_at", UtcTime, nullable=False),
    Column("equal", JSON, nullable=False),
    Column("different", JSON, nullable=False),
    Column("unchecked", JSON, nullable=False),
    Column("errant", JSON, nullable=False),
    Column("errant_unchecked", FreeText, nullable=False),
    Column("replica_uuid", String(64), nullable=False, server_default=text("''")),
    Column("replica_made", String(64), nullable=False, server_default=text("''")),
    Column("trouble", FreeText, nullable=False, server_default=text("''")),
    Index(None, "server", "finished_at"),
)


class ConsistencyChecks(Rows):
    """Comparisons of replicas with their sources."""

    KEPT = 10
    """Of each replica: what an older one found, a newer one has found again, or says that it could not look."""

    def add(self, check: ConsistencyCheck) -> None:
        """Record a check, and forget those of its replica that are too many; but not the last one that compared a table
        which no newer one did. One of the same id is replaced."""
        self._put(consistency_checks, row_of(consistency_checks, check))
        known = [one for one in self.list(check.server) if one.replica == check.replica]
        seen: set[str] = set()
        for number, one in enumerate(known):
            compared = {*one.equal, *one.different}
            if number >= self.KEPT and compared <= seen:
                self._do(delete(consistency_checks).where(consistency_checks.c.id == one.id))
            seen |= compared

    def forget_failed(self, server: str, replica: str) -> None:
        """That ``replica`` could not be compared says nothing any more: it is none."""
        ours = (consistency_checks.c.server == server, consistency_checks.c.replica == replica)
        self._do(delete(consistency_checks).where(*ours, consistency_checks.c.trouble != ""))

    def list(self, server: str, *, limit: int | None = None) -> tuple[ConsistencyCheck, ...]:
        """Newest first."""
        from backupd.model.consistency import ConsistencyCheck  # what does not look at checks need not load them

        query = select(consistency_checks).where(consistency_checks.c.server == server)
        ordered = query.order_by(consistency_checks.c.finished_at.desc(), consistency_checks.c.id.desc())
        return self._records(ConsistencyCheck, ordered.limit(limit))


class Proofs(Rows):
    """Proofs: one for each test restore, good or bad. They outlive the backups that they proved."""

    def add(self, proof: Proof) -> None:
        """Record a proof; one of the same id is replaced."""
        self._put(proofs, row_of(proofs, proof))

    def withdraw(self, proof_id: str, why: str) -> None:
        """It does not count any more. Quiet when it is gone."""
        self._do(update(proofs).where(proofs.c.id == proof_id).values(outcome=WITHDRAWN, withdrawn=why))

    def get(self, proof_id: str) -> Proof:
        """Raises NotFoundError."""
        if (found := self._record(Proof, select(proofs).where(proofs.c.id == proof_id))) is None:
            raise unknown("proof", proof_id, lists="proofs")
        return found

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
        query = narrowed(query, (proofs.c.server, server), (proofs.c.backup_id, backup_id), (proofs.c.outcome, outcome))
        return self._records(Proof, query)

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
        query = narrowed(
            select(proofs), (proofs.c.server, servers), (proofs.c.backup_id, backup_id), (proofs.c.outcome, outcome)
        )
        read = partial(self._records, Proof)
        return page(read, span.of(query, proofs.c.finished_at), proofs.c.finished_at, after, limit)

    def latest(self, server: str) -> Proof | None:
        """The newest proof of ``server``."""
        return next(iter(self.list(server, limit=1)), None)


class Witnesses(Rows):
    """Witnesses: what the source's tables looked like at a position."""

    def add(self, witness_id: str, witness: Witness, *, backup_id: str | None = None) -> None:
        """Record a witness; ``backup_id`` when it was read in the very moment of that backup. Same id: replaced."""
        # as_json rounds the seconds for readers; what is kept is exact
        payload = {**witness.as_json(), "seconds": witness.seconds}
        self._put(witnesses, row_of(witnesses, witness, id=witness_id, backup_id=backup_id, payload=payload))

    def get(self, witness_id: str) -> Witness:
        """Raises NotFoundError."""
        if (found := self._first(witnesses.c.id == witness_id)) is None:
            raise NotFoundError(f"there is no witness {witness_id}")
        return found

    def latest(self, server: str) -> Witness | None:
        """The newest witness of ``server``."""
        return self._first(witnesses.c.server == server)

    def of_backup(self, backup_id: str) -> Witness | None:
        """The witness that was read in the moment of this backup."""
        return self._first(witnesses.c.backup_id == backup_id)

    def between(
        self, server: str, since: datetime, until: datetime, *, limit: int | None = None
    ) -> tuple[Witness, ...]:
        """Those that were taken from ``since`` to ``until``, both included, newest first; with backups or not."""
        taken = witnesses.c.taken_at
        return self._newest(limit, witnesses.c.server == server, taken >= since, taken <= until)

    def ids(self, server: str) -> tuple[str, ...]:
        """Of all that are known, oldest first."""
        query = select(witnesses.c.id).where(witnesses.c.server == server)
        return tuple(self._scalars(query.order_by(witnesses.c.taken_at, witnesses.c.id)))

    def backup_of(self, witness_id: str) -> str | None:
        """The backup in whose very moment it was read. Raises NotFoundError."""
        found = self._scalars(select(witnesses.c.backup_id).where(witnesses.c.id == witness_id))
        if not found:
            raise NotFoundError(f"there is no witness {witness_id}")
        backup_id: str | None = found[0]
        return backup_id

    def forget_before(self, server: str, moment: datetime) -> None:
        """Remove those of no backup that are older."""
        self._do(
            delete(witnesses).where(
                witnesses.c.server == server, witnesses.c.backup_id.is_(None), witnesses.c.taken_at < moment
            )
        )

    def forget(self, backup_id: str) -> None:
        """Remove the witnesses of a backup that is gone."""
        self._do(delete(witnesses).where(witnesses.c.backup_id == backup_id))

    def _first(self, which: ColumnElement[bool]) -> Witness | None:
        return next(iter(self._newest(1, which)), None)

    def _newest(self, limit: int | None, *which: ColumnElement[bool]) -> tuple[Witness, ...]:
        query = select(witnesses.c.payload).where(*which).limit(limit)
        found = self._scalars(query.order_by(witnesses.c.taken_at.desc(), witnesses.c.id.desc()))
        return tuple(map(Witness.from_json, found))

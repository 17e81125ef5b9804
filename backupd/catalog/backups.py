"""Backups and their copies, the servers they were taken of, and servers that a backup took out of rotation.

Nothing points to ``backups`` with a foreign key but its own copies: a proof outlives the backup that it proved, and
a rebuild may meet an increment before its parent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    ForeignKey,
    Index,
    Select,
    String,
    Table,
    case,
    delete,
    exists,
    false,
    insert,
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
    put_row,
    record_of,
    row_of,
)
from backupd.model.backup_record import BackupKind, BackupRecord, BackupState, Copy
from backupd.model.errors import NotFoundError, RefusedError, unknown
from backupd.model.server_facts import Identity, Verdict

backups = Table(
    "backups",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("server", String(64), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("state", String(32), nullable=False),
    Column("parent", String(64)),
    Column("started_at", UtcTime, nullable=False),
    Column("finished_at", UtcTime, nullable=False),
    Column("bytes_source", BigInteger, nullable=False),
    Column("bytes_stored", BigInteger, nullable=False),
    Column("bytes_new", BigInteger, nullable=False),
    Column("files", BigInteger, nullable=False),
    Column("files_linked", BigInteger, nullable=False),
    *position_fields(),
    Column("flavour", String(32), nullable=False),
    Column("server_version", FreeText, nullable=False),
    Column("tool_version", FreeText, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("warnings", JSON, nullable=False),
    Column("from_lsn", BigInteger, nullable=False, server_default="0"),
    Column("to_lsn", BigInteger, nullable=False, server_default="0"),
    Column("server_uuid", FreeText, nullable=False, server_default=text("''")),
    Column("reason", FreeText, nullable=False, server_default=text("''")),
    Column("table_set", String(64), nullable=False, server_default=text("''")),
    Column("tables_missing", BigInteger, nullable=False, server_default="0"),
    Column("manifest", String(64), nullable=False, server_default=text("''")),
    Column("missing", JSON(none_as_null=True)),
    Column("doubtful", FreeText, nullable=False, server_default=text("''")),
    Column("found", String(64), nullable=False, server_default=text("''")),
    Column("foreign", Boolean, nullable=False, server_default=false()),
    Index(None, "server", "finished_at"),
)


commits = Table(
    "commits",
    metadata,
    Column("backup_id", String(64), primary_key=True),
    Column("manifest", String(64), nullable=False),
)
"""Every backup that is ours, by its manifest: written right before it is committed, or when it is adopted. It outlives
the row in ``backups``, which a run that died never wrote, or which goes with a destination that is not configured."""


identities = Table(
    "identities",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("uuid", String(64), primary_key=True),
    Column("verdict", String(16), nullable=False),
    Column("server_id", BigInteger, nullable=False),
    Column("evidence", FreeText, nullable=False),
    Column("address", FreeText, nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("seen_at", UtcTime, nullable=False),
    Column("accepted_by", FreeText, nullable=False),
)
"""Who answered under a server's name; see ``recovery.lineage``."""


copies = Table(
    "copies",
    metadata,
    Column("backup_id", String(64), ForeignKey("backups.id", ondelete="CASCADE"), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("state", String(32), nullable=False),
    Column("stored_at", UtcTime, nullable=False),
    Column("verified_at", UtcTime),
)


absences = Table(
    "absences",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("job_id", String(64), nullable=False),
    Column("since", UtcTime, nullable=False),
    Column("after", FreeText, nullable=False),
)
"""Servers that a backup took out of rotation, and the program that brings each back; gone once that has run."""


_CHUNK = 500
"""Ids in one statement: SQLite allows 32,766 values, older builds 999."""


class Backups(Rows):
    """Backups and their copies."""

    def add(self, record: BackupRecord, *, replace: bool = False) -> None:
        """Record a committed backup and its copies, all or nothing.

        ``replace`` is for rebuilding: an older row of the same id gives way. Without it a second row raises
        RefusedError.
        """
        with self._database.write() as connection:
            if replace:
                connection.execute(delete(backups).where(backups.c.id == record.id))
            elif connection.scalar(select(exists().where(backups.c.id == record.id))):
                raise RefusedError(f"backup {record.id} is in the catalog already")
            connection.execute(insert(backups).values(row_of(backups, record)))
            if (digest := record.manifest or record.found) and not record.foreign:
                _commit(connection, record.id, digest)
            if record.copies:
                connection.execute(
                    insert(copies), [row_of(copies, copy, backup_id=record.id) for copy in record.copies]
                )

    def get(self, backup_id: str) -> BackupRecord:
        """Raises NotFoundError."""
        if (found := self.find(backup_id)) is None:
            raise _not_found(backup_id)
        return found

    def find(self, backup_id: str) -> BackupRecord | None:
        """None where there is none."""
        return next(iter(self._found(select(backups).where(backups.c.id == backup_id))), None)

    def list(
        self,
        server: str | None = None,
        *,
        kind: BackupKind | None = None,
        state: BackupState | None = None,
        limit: int | None = None,
        foreign: bool = False,
    ) -> tuple[BackupRecord, ...]:
        """Newest first. Without ``state`` every state is listed, deleted ones too; only with ``foreign`` those that are
        that, so that nobody counts on one without having asked for it."""
        query = select(backups).order_by(backups.c.finished_at.desc(), backups.c.id.desc()).limit(limit)
        query = narrowed(query, (backups.c.server, server), (backups.c.kind, kind), (backups.c.state, state))
        return self._found(query if foreign else query.where(~backups.c.foreign))

    def page(
        self,
        servers: Collection[str] | None = None,
        *,
        kind: BackupKind | None = None,
        state: BackupState | None = None,
        span: Span = EVER,
        limit: int = 100,
        after: str | None = None,
    ) -> Listed[BackupRecord]:
        """One page of the list; ``servers`` None: of all; ``span``: when they were finished. Raises UsageError for what
        is no cursor."""
        query = narrowed(select(backups), (backups.c.server, servers), (backups.c.kind, kind), (backups.c.state, state))
        return page(self._found, span.of(query, backups.c.finished_at), backups.c.finished_at, after, limit)

    def servers(self) -> tuple[str, ...]:
        """Every server that has a row, also those that are no longer configured."""
        return tuple(self._scalars(select(backups.c.server).distinct().order_by(backups.c.server)))

    def set_state(self, backup_id: str, state: BackupState) -> None:
        """Raises NotFoundError."""
        self._change(backup_id, state=str(state))

    def set_missing(self, backup_id: str, missing: Sequence[str], doubtful: str) -> None:
        """What a look at its files told; see ``BackupRecord``. Raises NotFoundError."""
        self._change(backup_id, missing=list(missing), doubtful=doubtful)

    def announce(self, backup_id: str, manifest: str) -> None:
        """A run of this installation is about to commit the backup, with a manifest of this SHA-256."""
        with self._database.write() as connection:
            _commit(connection, backup_id, manifest)

    def committed(self, backup_id: str) -> str:
        """The SHA-256 of the manifest of a backup that a run of this installation committed, or was about to, or that
        was adopted, whether it has a row or not; "" for any other."""
        return self._scalar(select(commits.c.manifest).where(commits.c.backup_id == backup_id)) or ""

    def digest(self, backup_id: str) -> str:
        """The SHA-256 of its manifest, "" where it is not known."""
        rows = self._rows(select(backups.c.manifest, backups.c.found).where(backups.c.id == backup_id))
        return rows[0].manifest or rows[0].found if rows else ""

    def adopt(self, backup_id: str) -> None:
        """From now on it counts as one of this installation's own. Raises NotFoundError."""
        with self._database.write() as connection:
            found = connection.scalar(select(backups.c.found).where(backups.c.id == backup_id))
            if found is None:
                raise _not_found(backup_id)
            connection.execute(update(backups).where(backups.c.id == backup_id).values(foreign=False))
            _commit(connection, backup_id, found)

    def pin(self, backup_id: str, *, pinned: bool = True) -> None:
        """Keep the backup whatever retention says, or no longer. Raises NotFoundError."""
        self._change(backup_id, pinned=pinned)

    def remove(self, backup_id: str) -> None:
        """Forget the backup and its copies. Quiet when it is gone already."""
        self._do(delete(backups).where(backups.c.id == backup_id))

    def add_copy(self, backup_id: str, copy: Copy) -> None:
        """Record that a destination holds the backup; an older row of it is replaced. Raises NotFoundError."""
        with self._database.write() as connection:
            if not connection.scalar(select(exists().where(backups.c.id == backup_id))):
                raise _not_found(backup_id)
            put_row(connection, copies, row_of(copies, copy, backup_id=backup_id))

    def remove_copy(self, backup_id: str, destination: str) -> None:
        """Quiet when there is none."""
        self._do(delete(copies).where(_is_copy(backup_id, destination)))

    def mark_copy_verified(self, backup_id: str, destination: str, now: datetime) -> None:
        """Every byte of the copy was read and is as it was stored. Raises NotFoundError."""
        self._change_copy(backup_id, destination, state=_unless_deleted("complete"), verified_at=now)

    def mark_copy_damaged(self, backup_id: str, destination: str) -> None:
        """``verified_at`` stays: it tells until when the copy was good. Raises NotFoundError."""
        self._change_copy(backup_id, destination, state=_unless_deleted("damaged"))

    def set_copy_state(self, backup_id: str, destination: str, state: str) -> BackupState:
        """``state``: complete, damaged or deleted. The backup follows: it is deleted when every copy is, else complete
        when one is, else damaged; gives what it is now. Raises NotFoundError."""
        with self._database.write() as connection:
            _update_copy(connection, backup_id, destination, state=state)
            states = set(connection.scalars(select(copies.c.state).where(copies.c.backup_id == backup_id)))
            whole = next(
                one for one in (BackupState.COMPLETE, BackupState.DAMAGED, BackupState.DELETED) if str(one) in states
            )
            connection.execute(update(backups).where(backups.c.id == backup_id).values(state=str(whole)))
        return whole

    def _found(self, query: Select[Any]) -> tuple[BackupRecord, ...]:
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
            found, strangers = _copies_of(connection, [row["id"] for row in rows]), _strangers(connection)
        return tuple(
            record_of(
                BackupRecord,
                row,
                copies=tuple(found.get(row["id"], ())),
                apart=(row["server"], row["server_uuid"]) in strangers,
            )
            for row in rows
        )

    def _change(self, backup_id: str, **values: Any) -> None:
        if not self._do(update(backups).where(backups.c.id == backup_id).values(**values)):
            raise _not_found(backup_id)

    def _change_copy(self, backup_id: str, destination: str, **values: Any) -> None:
        with self._database.write() as connection:
            _update_copy(connection, backup_id, destination, **values)


def _commit(connection: Connection, backup_id: str, manifest: str) -> None:
    put_row(connection, commits, {"backup_id": backup_id, "manifest": manifest})


def _unless_deleted(state: str) -> Any:
    """A copy that is marked deleted stays so, whatever is found out about its bytes."""
    return case((copies.c.state == str(BackupState.DELETED), str(BackupState.DELETED)), else_=state)


def _update_copy(connection: Connection, backup_id: str, destination: str, **values: Any) -> None:
    if not connection.execute(update(copies).where(_is_copy(backup_id, destination)).values(**values)).rowcount:
        raise NotFoundError(
            f"the catalog knows no copy of backup {backup_id} at {destination}",
            hint="`backupd fsck` compares the catalog with the destinations",
        )


def _is_copy(backup_id: str, destination: str) -> Any:
    return (copies.c.backup_id == backup_id) & (copies.c.destination == destination)


def _not_found(backup_id: str) -> NotFoundError:
    return unknown("backup", backup_id, lists="backups")


def _strangers(connection: Connection) -> frozenset[tuple[str, str]]:
    """Name and uuid of each server that answered under a name that is not shown to be its own."""
    query = select(identities.c.server, identities.c.uuid).where(identities.c.verdict == str(Verdict.STRANGER))
    return frozenset((row.server, row.uuid) for row in connection.execute(query))


def _copies_of(connection: Connection, ids: Sequence[str]) -> Mapping[str, list[Copy]]:
    found: dict[str, list[Copy]] = {}
    for start in range(0, len(ids), _CHUNK):
        query = select(copies).where(copies.c.backup_id.in_(ids[start : start + _CHUNK])).order_by(copies.c.destination)
        for row in connection.execute(query).mappings():
            found.setdefault(row["backup_id"], []).append(record_of(Copy, row))
    return found


class Identities(Rows):
    """Identities: which database servers answered under each server's name."""

    def of(self, server: str) -> tuple[Identity, ...]:
        """In the order in which they were first met."""
        return tuple(one for one in self.all() if one.server == server)

    def all(self) -> tuple[Identity, ...]:
        """Every identity, by server, then by when it answered first."""
        query = select(identities).order_by(identities.c.server, identities.c.since, identities.c.uuid)
        return self._records(Identity, query)

    def put(self, identity: Identity) -> None:
        """One that was known is replaced."""
        self._put(identities, row_of(identities, identity))

    def accept(self, identity: Identity, by: str) -> Identity:
        """From now on it is the server of that name."""
        accepted = replace(identity, verdict=Verdict.OWN, accepted_by=by)
        self.put(accepted)
        return accepted


@dataclass(frozen=True, slots=True)
class Absence:
    """``job_id``: the backup for which ``server`` is away; ``after``: the program that brings it back, "" for none."""

    server: str
    job_id: str
    since: datetime
    after: str = ""


class Absences(Rows):
    """Absences: servers that a backup took out of rotation, until the program that brings them back has run."""

    def begin(self, absence: Absence) -> None:
        """A server is away once: an absence that was not ended goes on under the name of the new one."""
        self._put(absences, row_of(absences, absence))

    def end(self, server: str, job_id: str) -> bool:
        """Was it still there under the name of this job?"""
        return bool(self._do(delete(absences).where(absences.c.server == server, absences.c.job_id == job_id)))

    def of(self, server: str) -> Absence | None:
        """The absence of ``server``, None where it is in rotation."""
        return self._record(Absence, select(absences).where(absences.c.server == server))

    def all(self) -> tuple[Absence, ...]:
        """Every server that is away, by name."""
        return self._records(Absence, select(absences).order_by(absences.c.server))

"""Backups and their copies, the servers they were taken of, and servers that a backup took out of rotation.

Nothing points to ``backups`` with a foreign key but its own copies: a proof outlives the backup that it proved, and
a rebuild may meet an increment before its parent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    case,
    delete,
    exists,
    insert,
    literal_column,
    select,
    tuple_,
    update,
)

from backupd.catalog.database import Rows
from backupd.catalog.row_mapping import (
    EVER,
    Listed,
    Span,
    among,
    narrowed,
    page,
    put_row,
    reader,
    row_of,
)
from backupd.catalog.tables.backups import (
    Amounts,
    absences,
    backups,
    changing,
    commits,
    copies,
    counted_stock,
    identities,
    kept_stock,
    stock_added,
    write_stock,
)
from backupd.catalog.tables.changes import changed
from backupd.model.backup_record import Ancestor, BackupKind, BackupRecord, BackupState, Copy
from backupd.model.errors import NotFoundError, RefusedError, unknown
from backupd.model.server_facts import Identity, NodeFacts, Verdict

_CHUNK = 500
"""Ids in one statement: SQLite allows 32,766 values, older builds 999."""
_BATCH = 1000
"""Rows in memory where all of them are passed through."""

Batch = tuple[BackupRecord, ...]
Owner = tuple[str, str]
"""(server, backup id)"""


@dataclass(frozen=True, slots=True)
class Placed:
    """A copy at one destination: of which backup, the states of the backup and of the copy, and since when it is
    there."""

    server: str
    id: str
    state: BackupState
    copy: str
    stored_at: datetime

    @property
    def owner(self) -> Owner:
        """The backup."""
        return self.server, self.id

    @property
    def is_deleted(self) -> bool:
        """Is the copy on its way out, or the whole backup?"""
        return BackupState.DELETED in (self.state, self.copy)


class Backups(Rows):
    """Backups and their copies."""

    def add(self, record: BackupRecord, *, replace: bool = False) -> None:
        """Record a committed backup and its copies, all or nothing.

        ``replace`` is for rebuilding: an older row of the same id gives way. Without it a second row raises
        RefusedError.
        """
        with self._database.write() as connection:
            if replace:
                with changing(connection, record.id):
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
            stock_added(connection, record.server, record.id)

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
        server: str,
        *,
        kind: BackupKind | None = None,
        state: BackupState | None = None,
        limit: int | None = None,
        foreign: bool = False,
    ) -> tuple[BackupRecord, ...]:
        """Of one server, newest first. Without ``state`` every state is listed, deleted ones too; only with ``foreign``
        those that are that, so that nobody counts on one without having asked for it."""
        query = select(backups).where(backups.c.server == server).order_by(*_NEWEST).limit(limit)
        query = narrowed(query, (backups.c.kind, kind), (backups.c.state, state))
        return self._found(query if foreign else query.where(~backups.c.foreign))

    def every(self, *, foreign: bool = False) -> Iterator[BackupRecord]:
        """Of all servers, newest first; a batch of them is in memory at a time. ``foreign``: as with ``list``."""
        return chain.from_iterable(self.batches(foreign=foreign))

    def batches(self, servers: Collection[str] | None = None, *, foreign: bool = False) -> Iterator[Batch]:
        """Of these servers, or of all, newest first, as many at a time as one statement reads."""
        query = narrowed(select(backups), (backups.c.server, servers)).order_by(*_NEWEST).limit(_BATCH)
        query = query if foreign else query.where(~backups.c.foreign)
        found = self._found(query)
        while found:
            yield found
            found = self._found(query.where(_KEY.op("<")((found[-1].finished_at, found[-1].id))))

    def by_ids(self, ids: Collection[str]) -> tuple[BackupRecord, ...]:
        """Those of them that there are, foreign ones too."""
        return tuple(
            record for chunk in chunks(ids) for record in self._found(select(backups).where(backups.c.id.in_(chunk)))
        )

    def lines(self, ids: Collection[str]) -> tuple[BackupRecord, ...]:
        """These and what they build on, however many steps away, foreign ones too."""
        queries = (select(backups).where(_in_lines_of(chunk)) for chunk in chunks(ids))
        return tuple({record.id: record for query in queries for record in self._found(query)}.values())

    def family(self, record: BackupRecord) -> tuple[BackupRecord, ...]:
        """The backup, all that it builds on, and those built on it directly; no foreign ones."""
        built_on_it = select(backups).where(backups.c.server == record.server, backups.c.parent == record.id)
        found = (*self.lines([record.id]), *self._found(built_on_it.order_by(*_NEWEST)))
        return tuple({one.id: one for one in found if not one.foreign}.values())

    def lineage(self, ids: Collection[str]) -> Iterator[Ancestor]:
        """The same as ``lines`` but for foreign ones, and of each only what its protection depends on."""
        for chunk in chunks(ids):
            good = (copies.c.state == str(BackupState.COMPLETE)) & copies.c.verified_at.is_not(None)
            query = (
                select(backups.c.server, backups.c.id, backups.c.kind, backups.c.parent, copies.c.destination)
                .join(copies, (copies.c.backup_id == backups.c.id) & good, isouter=True)
                .where(_in_lines_of(chunk), ~backups.c.foreign)
                .order_by(backups.c.id)
            )
            with self._database.read() as connection:
                for _id, same in groupby(connection.execute(query), key=attrgetter("id")):
                    first, *others = same
                    destinations = frozenset(one.destination for one in (first, *others)) - {None}
                    yield Ancestor(first.server, first.id, first.kind, first.parent, destinations)

    def foreign(self, server: str | None = None) -> tuple[BackupRecord, ...]:
        """Those that nobody here took or adopted, of one server or of all, newest first."""
        query = narrowed(select(backups).where(backups.c.foreign), (backups.c.server, server))
        return self._found(query.order_by(*_NEWEST))

    def pinned(self, server: str) -> frozenset[str]:
        """Ids of those of a server that are kept whatever retention says."""
        return frozenset(self._scalars(select(backups.c.id).where(backups.c.server == server, backups.c.pinned)))

    def is_any_taken(self) -> bool:
        """Is there one that a run of this installation took?"""
        return bool(self._scalar(select(exists().where(backups.c.manifest != "", ~backups.c.foreign))))

    # -- what is at a destination

    def any_at(self, destination: str) -> bool:
        """Is a copy known there, in whatever state?"""
        return bool(self._scalar(select(exists().where(copies.c.destination == destination))))

    def newest_at(self, destination: str) -> BackupRecord | None:
        """The newest one of which a complete copy is known there, whatever server it is of; foreign ones do not
        count."""
        if not self.any_at(destination):
            return None  # without looking at every backup
        whole = (copies.c.destination == destination) & (copies.c.state == str(BackupState.COMPLETE))
        query = select(backups).join(copies, (copies.c.backup_id == backups.c.id) & whole).where(~backups.c.foreign)
        return next(iter(self._found(query.order_by(*_NEWEST).limit(1))), None)

    def destinations_of(self, server: str | None = None) -> tuple[str, ...]:
        """Where copies are known of a server, or of any, but for foreign backups, by name."""
        query = select(copies.c.destination).distinct().join(backups).where(~backups.c.foreign)
        return tuple(self._scalars(narrowed(query, (backups.c.server, server)).order_by(copies.c.destination)))

    def at(self, destination: str, server: str | None = None) -> Iterator[Placed]:
        """Copies of one server or of all that are known there, by id, foreign ones too; a batch of them is in memory at
        a time."""
        query = narrowed(placed_at(destination), (backups.c.server, server)).order_by(copies.c.backup_id).limit(_BATCH)
        found = self._records(Placed, query)
        while found:
            yield from found
            found = self._records(Placed, query.where(copies.c.backup_id > found[-1].id))

    def deleted_at(self, destination: str, server: str | None = None) -> tuple[Placed, ...]:
        """Copies there, of one server or of all, that are on their way out, or whose backup is."""
        gone: ColumnElement[str] = literal_column("'deleted'")  # no parameter, so that the indexes of the few serve
        query = narrowed(placed_at(destination), (backups.c.server, server))
        marked = self._records(Placed, query.where(copies.c.state == gone))
        of_these = select(backups.c.id).where(backups.c.state == gone)
        others = query.where(copies.c.backup_id.in_(of_these), copies.c.state != gone)
        return (*marked, *self._records(Placed, others))

    def placed(self, destination: str, ids: Collection[str], *, offered: bool = False) -> tuple[Placed, ...]:
        """The copies of these backups that are known there; ``offered``: that are not on their way out."""
        query = placed_at(destination)
        if offered:
            query = query.where(copies.c.state != str(BackupState.DELETED))
        return tuple(
            one for chunk in chunks(ids) for one in self._records(Placed, query.where(copies.c.backup_id.in_(chunk)))
        )

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

    def stock(self, server: str) -> tuple[dict[str, Amounts], dict[str, Amounts]]:
        """What each destination has of a server: as it is kept, and as counted from the copies."""
        with self._database.read() as connection:
            return kept_stock(connection, server), counted_stock(connection, server)

    def recount(self, server: str) -> None:
        """Keep what is counted from the copies of a server."""
        with self._database.write() as connection:
            changed(connection, server)  # whoever changes it waits, or was before
            write_stock(connection, server, counted_stock(connection, server))

    def set_state(self, backup_id: str, state: BackupState) -> None:
        """Raises NotFoundError."""
        self._change(backup_id, state=str(state))

    def set_missing(self, backup_id: str, missing: Sequence[str], doubtful: str) -> None:
        """What a check of its files found; see ``BackupRecord``. Raises NotFoundError."""
        self._change(backup_id, missing=list(missing), doubtful=doubtful)

    def set_node(self, backup_id: str, node: NodeFacts) -> None:
        """What is known of the node that it is of. Raises NotFoundError."""
        self._change(backup_id, node=asdict(node))

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
            with changing(connection, backup_id, loses=False):
                connection.execute(update(backups).where(backups.c.id == backup_id).values(foreign=False))
            _commit(connection, backup_id, found)

    def pin(self, backup_id: str, *, pinned: bool = True) -> None:
        """Keep the backup whatever retention says, or no longer. Raises NotFoundError."""
        if not self._do(update(backups).where(backups.c.id == backup_id).values(pinned=pinned)):
            raise _not_found(backup_id)

    def remove(self, backup_id: str) -> None:
        """Forget the backup and its copies. Quiet when it is gone already."""
        with self._database.write() as connection, changing(connection, backup_id):
            connection.execute(delete(backups).where(backups.c.id == backup_id))

    def add_copy(self, backup_id: str, copy: Copy) -> None:
        """Record that a destination holds the backup; an older row of it is replaced. Raises NotFoundError."""
        with self._database.write() as connection:
            if not connection.scalar(select(exists().where(backups.c.id == backup_id))):
                raise _not_found(backup_id)
            with changing(connection, backup_id):
                put_row(connection, copies, row_of(copies, copy, backup_id=backup_id))

    def remove_copy(self, backup_id: str, destination: str) -> None:
        """Forget a copy, and with the last one the backup. Quiet when there is none."""
        with self._database.write() as connection, changing(connection, backup_id):
            connection.execute(delete(copies).where(_is_copy(backup_id, destination)))
            left = exists().where(copies.c.backup_id == backup_id)
            connection.execute(delete(backups).where(backups.c.id == backup_id, ~left))

    def mark_copy_verified(self, backup_id: str, destination: str, now: datetime) -> None:
        """Every byte of the copy was read and is as it was stored. Raises NotFoundError."""
        good = _unless_deleted("complete")
        with self._database.write() as connection, changing(connection, backup_id, loses=False):
            _update_copy(connection, backup_id, destination, state=good, verified_at=now)

    def mark_copy_damaged(self, backup_id: str, destination: str) -> None:
        """``verified_at`` stays: until then the copy was good. Raises NotFoundError."""
        with self._database.write() as connection, changing(connection, backup_id):
            _update_copy(connection, backup_id, destination, state=_unless_deleted("damaged"))

    def set_copy_state(self, backup_id: str, destination: str, state: str) -> BackupState:
        """``state``: complete, damaged or deleted. The backup follows: it is deleted when every copy is, else complete
        when one is, else damaged; gives what it is now. Raises NotFoundError."""
        with self._database.write() as connection, changing(connection, backup_id):
            _update_copy(connection, backup_id, destination, state=state)
            states = set(connection.scalars(select(copies.c.state).where(copies.c.backup_id == backup_id)))
            whole = next(
                one for one in (BackupState.COMPLETE, BackupState.DAMAGED, BackupState.DELETED) if str(one) in states
            )
            connection.execute(update(backups).where(backups.c.id == backup_id).values(state=str(whole)))
        return whole

    def _found(self, query: Select[Any]) -> tuple[BackupRecord, ...]:
        with self._database.read() as connection:
            result = connection.execute(query).mappings()
            read, rows = reader(BackupRecord, result.keys(), "copies", "apart"), result.all()
            found = _copies_of(connection, [row["id"] for row in rows])
            strangers = _strangers(connection, {row["server"] for row in rows})
        return tuple(
            read(
                row,
                copies=tuple(found.get(row["id"], ())),
                apart=(row["server"], row["server_uuid"]) in strangers,
            )
            for row in rows
        )

    def _change(self, backup_id: str, **values: Any) -> None:
        with self._database.write() as connection, changing(connection, backup_id):
            if not connection.execute(update(backups).where(backups.c.id == backup_id).values(**values)).rowcount:
                raise _not_found(backup_id)


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


_KEY = tuple_(backups.c.finished_at, backups.c.id)
_NEWEST = (backups.c.finished_at.desc(), backups.c.id.desc())


def _in_lines_of(ids: Collection[str]) -> ColumnElement[bool]:
    """Is it one of these, or something that they build on?"""
    line = select(backups.c.id, backups.c.parent).where(backups.c.id.in_(ids)).cte("line", recursive=True)
    line = line.union(select(backups.c.id, backups.c.parent).join(line, backups.c.id == line.c.parent))
    return backups.c.id.in_(select(line.c.id))


def placed_at(destination: str) -> Select[Any]:
    """Copies there, with the columns of ``Placed``."""
    return (
        select(backups.c.server, backups.c.id, backups.c.state, copies.c.state.label("copy"), copies.c.stored_at)
        .join(copies, copies.c.backup_id == backups.c.id)
        .where(copies.c.destination == destination)
    )


def chunks(ids: Collection[str]) -> Iterator[Sequence[str]]:
    """As many of ``ids`` at a time as one statement takes."""
    found = sorted(set(ids))
    for start in range(0, len(found), _CHUNK):
        yield found[start : start + _CHUNK]


def _strangers(connection: Connection, servers: Collection[str]) -> frozenset[tuple[str, str]]:
    """Name and uuid of each server that answered under one of these names and is not shown to be its own."""
    query = select(identities.c.server, identities.c.uuid).where(identities.c.verdict == str(Verdict.STRANGER))
    return frozenset(
        (row.server, row.uuid)
        for chunk in chunks(servers)
        for row in connection.execute(query.where(identities.c.server.in_(chunk)))
    )


def _copies_of(connection: Connection, ids: Sequence[str]) -> Mapping[str, list[Copy]]:
    found: dict[str, list[Copy]] = {}
    query = select(copies).where(among(copies.c.backup_id, ids, connection.dialect.name))
    rows = connection.execute(query.order_by(copies.c.destination)).mappings()
    read = reader(Copy, rows.keys())
    for row in rows:
        found.setdefault(row["backup_id"], []).append(read(row))
    return found


_TELLING = ("verdict", "evidence", "address")
"""Columns that standings are made of; the others move with every contact."""
_MET = select(identities).order_by(identities.c.server, identities.c.since, identities.c.uuid)


class Identities(Rows):
    """Identities: which database servers answered under each server's name."""

    def of(self, server: str) -> tuple[Identity, ...]:
        """In the order in which they were first met."""
        return self._records(Identity, _MET.where(identities.c.server == server))

    def all(self) -> tuple[Identity, ...]:
        """Every identity, by server, then by when it answered first."""
        return self._records(Identity, _MET)

    def put(self, identity: Identity) -> None:
        """One that was known is replaced."""
        row = row_of(identities, identity)
        same = (identities.c.server == identity.server) & (identities.c.uuid == identity.uuid)
        with self._database.write() as connection:
            known = connection.execute(select(identities).where(same)).mappings().first()
            if known is None or any(known[name] != row[name] for name in _TELLING):
                changed(connection, identity.server)
            put_row(connection, identities, row)

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

    def all(self, servers: Collection[str] | None = None) -> tuple[Absence, ...]:
        """Every server that is away, or those of ``servers``, by name."""
        query = narrowed(select(absences), (absences.c.server, servers))
        return self._records(Absence, query.order_by(absences.c.server))

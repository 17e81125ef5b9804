"""What the catalog knows of each destination: copies that are there and to be made, objects to be thawed, what was read
again, marks of deletion, and how far it was behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    Index,
    Integer,
    Select,
    String,
    Table,
    bindparam,
    delete,
    exists,
    func,
    insert,
    not_,
    select,
    update,
)
from sqlalchemy.engine import RowMapping

from backupd.catalog.backups import Owner, Placed, placed_at
from backupd.catalog.database import Rows
from backupd.catalog.jobs import insert_jobs
from backupd.catalog.row_mapping import (
    FreeText,
    UtcTime,
    among,
    metadata,
    narrowed,
    put_row,
    record_of,
    records,
    row_of,
)
from backupd.catalog.tables.backups import backups, copies
from backupd.catalog.tables.jobs import jobs
from backupd.model.backup_record import BackupState, Sighting
from backupd.model.document import Document, json_key
from backupd.model.job import JobRecord
from backupd.model.thaw import ThawCount, Thawing, ThawItem, ThawState

replications = Table(
    "replications",
    metadata,
    Column("backup_id", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("not_before", UtcTime),
    Column("since", UtcTime, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
    Column("bytes_total", BigInteger, nullable=False),
    Column("bytes_done", BigInteger, nullable=False),
    Column("message", FreeText, nullable=False),
)
"""Backups that are not at a destination yet where they belong. Rows of those that have arrived are gone."""


thaws = Table(
    "thaws",
    metadata,
    Column("thaw_id", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("key", String(512), primary_key=True),
    Column("part", String(64), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("storage_class", String(32), nullable=False),
    Column("tier", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("requested_at", UtcTime),
    Column("expected_at", UtcTime),
    Column("ready_until", UtcTime),
    Column("message", FreeText, nullable=False),
    Index(None, "thaw_id", "state"),
)
"""Objects that a job, ``thaw_id``, asks for out of an archive class. The same object may be in several."""


scrubs = Table(
    "scrubs",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("share", Integer, primary_key=True, autoincrement=False),
    Column("done_at", UtcTime, nullable=False),
)
"""When each share of what is stored of a server was last read again at a destination. Shares below 0 are samples out of
archive classes."""


marks = Table(
    "marks",
    metadata,
    Column("destination", String(64), primary_key=True),
    Column("server", String(64), primary_key=True),
    Column("backup_id", String(64), primary_key=True),
    Column("since", UtcTime, nullable=False),
    Column("stored_at", UtcTime),
    Column("ours", Boolean, nullable=False),
    Column("confirmed", Boolean, nullable=False),
)
"""Marks of deletion at destinations, as this installation recorded them. ``since`` by its clock; ``stored_at`` as
the destination says, None until it was asked."""


deposits = Table(
    "deposits",
    metadata,
    Column("destination", String(64), primary_key=True),
    Column("key", String(512), primary_key=True),
    Column("sha256", String(64), nullable=False),
)
"""What this installation put of proofs and witnesses at destinations."""


binlog_lags = Table(
    "binlog_lags",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("hour", UtcTime, primary_key=True),
    Column("seconds", Float, nullable=False),
    Column("at", UtcTime, nullable=False),
)


WAITING, COPYING, FAILING = "waiting", "copying", "failing"

_R = replications.c


@dataclass(frozen=True, slots=True)
class Replication(Document):
    """``state``: waiting, copying, or failing: then ``message`` says why, ``attempts`` how often in a row, and it is
    tried again at ``not_before``. ``since``: when it was found missing. ``bytes_done`` of ``bytes_total`` stored bytes,
    in the last attempt."""

    backup_id: str = field(metadata=json_key("backup"))
    destination: str
    state: str
    attempts: int
    not_before: datetime | None
    since: datetime
    updated_at: datetime
    bytes_total: int = 0
    bytes_done: int = 0
    message: str = ""


_WAITING = select(replications).order_by(_R.destination, _R.backup_id.desc())


def _is(backup_id: str, destination: str) -> tuple[ColumnElement[bool], ...]:
    return _R.backup_id == backup_id, _R.destination == destination


class Replications(Rows):
    """Replications: backups that are not at a destination yet where they belong. None is forgotten before it has
    arrived, or does not belong there any more."""

    def list(self, destination: str | None = None) -> tuple[Replication, ...]:
        """By destination, newest backup first."""
        return self._records(Replication, narrowed(_WAITING, (_R.destination, destination)))

    def of(self, server: str, destination: str | None = None) -> tuple[Replication, ...]:
        """Of the backups of one server, but for foreign ones, in the same order."""
        query = _WAITING.join(backups, backups.c.id == _R.backup_id).where(~backups.c.foreign)
        return self._records(Replication, narrowed(query, (backups.c.server, server), (_R.destination, destination)))

    def due(self, now: datetime) -> frozenset[tuple[str, str]]:
        """Servers and destinations of whose backups one is to be tried again by now."""
        query = select(backups.c.server, _R.destination).join(replications, backups.c.id == _R.backup_id)
        return frozenset((row[0], row[1]) for row in self._rows(query.where(_R.not_before <= now).distinct()))

    def of_backup(self, backup_id: str) -> tuple[Replication, ...]:
        """Of one backup, by destination."""
        return self._records(Replication, _WAITING.where(_R.backup_id == backup_id))

    def not_of_others(self, server: str, destination: str) -> tuple[str, ...]:
        """The backups that are expected at the destination and are no other server's, the newest first: those of this
        one, those that are foreign, and those that the catalog does not know any more."""
        other = exists().where(backups.c.id == _R.backup_id, backups.c.server != server, ~backups.c.foreign)
        query = select(_R.backup_id).where(_R.destination == destination, ~other).order_by(_R.backup_id.desc())
        return tuple(self._scalars(query))

    def expect(self, destination: str, sizes: Mapping[str, int], now: datetime) -> None:
        """Backups (id: stored bytes) that belong there from now on; what is known of one already stays."""
        with self._database.write() as connection:
            known = {name for name in sizes if connection.scalar(select(exists().where(*_is(name, destination))))}
            rows = [
                row_of(replications, Replication(name, destination, WAITING, 0, None, now, now, bytes_total=size))
                for name, size in sizes.items()
                if name not in known
            ]
            if rows:
                connection.execute(insert(replications), rows)

    def copying(self, backup_id: str, destination: str, done: int, total: int, now: datetime) -> None:
        """The backup is being copied to the destination."""
        self._change(backup_id, destination, state=COPYING, bytes_done=done, bytes_total=total, updated_at=now)

    def failing(self, backup_id: str, destination: str, now: datetime, *, not_before: datetime, message: str) -> None:
        """An attempt failed; the next one not before ``not_before``."""
        self._change(
            backup_id,
            destination,
            state=FAILING,
            attempts=_R.attempts + 1,
            not_before=not_before,
            message=message,
            updated_at=now,
        )

    def forget(self, destination: str, ids: Collection[str]) -> None:
        """They have arrived, or do not belong there any more."""
        with self._database.write() as connection:
            for name in ids:
                connection.execute(delete(replications).where(*_is(name, destination)))

    def _change(self, backup_id: str, destination: str, **values: Any) -> None:
        self._do(update(replications).where(*_is(backup_id, destination)).values(**values))


_CHUNK = 500
"""Shares in one statement: SQLite allows 32,766 values, older builds 999."""


class Scrubs(Rows):
    """Scrubs: when each share of what is stored was last read again."""

    def done(self, server: str, destination: str) -> Mapping[int, datetime]:
        """When each share was last read; those that never were are missing."""
        query = select(scrubs.c.share, scrubs.c.done_at).where(
            scrubs.c.server == server, scrubs.c.destination == destination
        )
        return {row.share: row.done_at for row in self._rows(query)}

    def record(self, server: str, destination: str, shares: Iterable[int], now: datetime) -> None:
        """These shares have just been read."""
        found = sorted(set(shares))
        if not found:
            return
        with self._database.write() as connection:
            for start in range(0, len(found), _CHUNK):
                connection.execute(
                    delete(scrubs).where(
                        scrubs.c.server == server,
                        scrubs.c.destination == destination,
                        scrubs.c.share.in_(found[start : start + _CHUNK]),
                    )
                )
            connection.execute(
                insert(scrubs),
                [{"server": server, "destination": destination, "share": share, "done_at": now} for share in found],
            )


Backup = tuple[str, str]
"""(server, backup id)"""
_LISTING = timedelta(minutes=15)
"""So long a list of marks may take until it is looked at."""


class Marks(Rows):
    """Marks of deletion: what this installation recorded of those at a destination.

    Whoever may put files there can put a mark with any time in it, and say that a person wanted it. A row begins when
    the mark was put from here, or was first seen here.
    """

    def look(self, destination: str, there: Mapping[Backup, datetime], now: datetime) -> dict[Backup, Sighting]:
        """What is known of each mark that is ``there`` now, with the times at which they were stored, as the
        destination says. What was not known is seen for the first time; so is one that was stored at another time than
        the one that was known. What is not there any more is forgotten, but for a mark that was put just now: another
        host may have put it after ``there`` was listed."""
        with self._database.read() as connection:
            rows = _rows(connection, destination)
        if all(owner in rows and rows[owner]["stored_at"] == stored for owner, stored in there.items()) and (
            len(rows) == len(there)
        ):
            return {owner: record_of(Sighting, row) for owner, row in rows.items()}
        with self._database.write() as connection:
            rows = _rows(connection, destination)
            for owner in rows.keys() - there.keys():
                if rows[owner]["stored_at"] is None or now - rows[owner]["since"] >= _LISTING:
                    connection.execute(delete(marks).where(_is_mark(destination, owner)))
            for owner, stored in there.items():
                row = rows.get(owner)
                if row is not None and row["stored_at"] is None:
                    connection.execute(update(marks).where(_is_mark(destination, owner)).values(stored_at=stored))
                elif row is None or row["stored_at"] != stored:
                    _put(connection, destination, owner, Sighting(now), stored)
            known = _rows(connection, destination)
            return {owner: record_of(Sighting, known[owner]) for owner in there}

    def take(self, destination: str, owner: Backup, now: datetime, *, stored: datetime | None, confirmed: bool) -> None:
        """The rules, or with ``confirmed`` a person, want the backup gone. ``stored``: when the mark that is there was
        stored, as the destination says; None where there is none yet. The time of a known one stays."""
        with self._database.write() as connection:
            row = _rows(connection, destination).get(owner)
            known = Sighting(now)
            if row is not None and stored is not None and row["stored_at"] in (None, stored):
                known = record_of(Sighting, row)
            known = replace(known, ours=True, confirmed=confirmed or known.confirmed)
            _put(connection, destination, owner, known, stored)

    def forget(self, destination: str, owner: Backup) -> None:
        """It is wanted again."""
        self._do(delete(marks).where(_is_mark(destination, owner)))


def _is_mark(destination: str, owner: Backup) -> ColumnElement[bool]:
    return (marks.c.destination == destination) & (marks.c.server == owner[0]) & (marks.c.backup_id == owner[1])


def _rows(connection: Connection, destination: str) -> dict[Backup, RowMapping]:
    found = connection.execute(select(marks).where(marks.c.destination == destination)).mappings()
    return {(row["server"], row["backup_id"]): row for row in found}


def _put(connection: Connection, destination: str, owner: Backup, known: Sighting, stored: datetime | None) -> None:
    server, backup_id = owner
    key = {"destination": destination, "server": server, "backup_id": backup_id}
    put_row(connection, marks, row_of(marks, known, **key, stored_at=stored))


_MANY = 500


class Deposits(Rows):
    """Deposits: the digests of the stored bytes of proofs and witnesses that this installation put at destinations."""

    def at(self, destination: str) -> dict[str, str]:
        """SHA-256 (64 hex) by key."""
        query = select(deposits.c.key, deposits.c.sha256).where(deposits.c.destination == destination)
        return {row.key: row.sha256 for row in self._rows(query)}

    def put(self, destination: str, key: str, sha256: str) -> None:
        """Record what was put at the destination; the same key again: replaced."""
        self._put(deposits, {"destination": destination, "key": key, "sha256": sha256})

    def forget(self, destination: str, keys: Collection[str]) -> None:
        """Remove the records of these keys; unknown ones are passed over."""
        todo = sorted(keys)
        with self._database.write() as connection:
            for start in range(0, len(todo), _MANY):
                connection.execute(
                    delete(deposits).where(
                        (deposits.c.destination == destination) & deposits.c.key.in_(todo[start : start + _MANY])
                    )
                )


_ROWS = 1000
_CHANGING = ("tier", "state", "requested_at", "expected_at", "ready_until", "message")


class Thaws(Rows):
    """Thaws: what each job of that kind has asked out of an archive class, object by object."""

    def begin(self, job: JobRecord, items: Iterable[ThawItem]) -> None:
        """Record a job together with everything that it has to ask for."""
        rows = [row_of(thaws, item) for item in items]
        with self._database.write() as connection:
            insert_jobs(connection, [job])
            for start in range(0, len(rows), _ROWS):
                connection.execute(insert(thaws), rows[start : start + _ROWS])

    def of(
        self,
        thaw_id: str,
        *,
        state: ThawState | Collection[ThawState] | None = None,
        limit: int | None = None,
    ) -> tuple[ThawItem, ...]:
        """In the order in which they were to be asked for, by destination and key."""
        query = select(thaws).order_by(thaws.c.destination, thaws.c.key).limit(limit)
        return self._records(ThawItem, narrowed(query, (thaws.c.thaw_id, thaw_id), (thaws.c.state, state)))

    def count(self, thaw_id: str) -> Thawing:
        """Objects and bytes of a thaw by part, destination and state."""
        grouped = (
            select(
                thaws.c.part,
                thaws.c.destination,
                thaws.c.state,
                func.count().label("objects"),
                func.sum(thaws.c.size).cast(BigInteger).label("bytes"),
                func.max(thaws.c.expected_at).label("expected_at"),
                func.min(thaws.c.ready_until).label("ready_until"),
            )
            .where(thaws.c.thaw_id == thaw_id)
            .group_by(thaws.c.part, thaws.c.destination, thaws.c.state)
            .order_by(thaws.c.part, thaws.c.destination, thaws.c.state)
        )
        return Thawing(thaw_id, self._records(ThawCount, grouped))

    def record(self, items: Sequence[ThawItem]) -> None:
        """Record the state of these; what they are of does not change."""
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
                            **{
                                f"new_{name}": value for name, value in row_of(thaws, item).items() if name in _CHANGING
                            },
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
        return self._do(delete(thaws).where(thaws.c.thaw_id.not_in(select(jobs.c.id))))


class Lags(Rows):
    """Lags: of each hour the longest that a destination was behind its server."""

    def note(self, server: str, destination: str, seconds: float, at: datetime) -> None:
        """Recorded where it is the worst of its hour so far."""
        hour = at.replace(minute=0, second=0, microsecond=0)
        here = (
            (binlog_lags.c.server == server) & (binlog_lags.c.destination == destination) & (binlog_lags.c.hour == hour)
        )
        with self._database.write() as connection:
            known = connection.scalar(select(binlog_lags.c.seconds).where(here))
            if known is None:
                lag = {"server": server, "destination": destination, "hour": hour, "seconds": seconds, "at": at}
                connection.execute(insert(binlog_lags).values(lag))
            elif seconds > known:
                connection.execute(update(binlog_lags).where(here).values(seconds=seconds, at=at))

    def worst(self, server: str, since: datetime) -> dict[str, float]:
        """Of each destination the most seconds it was behind in any hour since then: the RPO that was achieved."""
        begin = since.replace(minute=0, second=0, microsecond=0)
        query = (
            select(binlog_lags.c.destination, func.max(binlog_lags.c.seconds).label("worst"))
            .where(binlog_lags.c.server == server, binlog_lags.c.hour >= begin)
            .group_by(binlog_lags.c.destination)
        )
        return {row.destination: row.worst for row in self._rows(query)}

    def forget(self, before: datetime) -> None:
        """Remove hours that began before then."""
        self._do(delete(binlog_lags).where(binlog_lags.c.hour < before))


_PAIRS = 450
"""Backups, by a server and an id each, in one statement; see ``chunks``."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Copies that are known at a destination and not found there. ``missing``: those of the servers that were asked
    about; ``others``: how many of any other server."""

    missing: tuple[Placed, ...] = ()
    others: int = 0


class Inventory(Rows):
    """Copies of backups that are known to be at a destination."""

    def servers(self, destination: str) -> frozenset[str]:
        """Those of which a copy is known there, in whatever state."""
        query = select(backups.c.server).distinct().join(copies, copies.c.backup_id == backups.c.id)
        return frozenset(self._scalars(query.where(copies.c.destination == destination)))

    def absent(self, destination: str, present: Collection[Owner], servers: Collection[str]) -> Absent:
        """The copies that are known there, and not on their way out, of all backups but those that are ``present``, of
        which all belong to ``servers``. They are counted, and rows are read only of those servers that lack some."""
        of_all = _counted_at(destination, func.count())
        count = _counted_at(destination, backups.c.server, func.count()).group_by(backups.c.server)
        name, there = backups.c.server + "/" + backups.c.id, frozenset(present)
        owners = sorted(there)
        left: Counter[str] = Counter()
        with self._database.read() as connection:
            for start in range(0, len(owners), _PAIRS):
                pairs = owners[start : start + _PAIRS]
                ids, names = [one for _server, one in pairs], ["/".join(one) for one in pairs]
                known = count.where(backups.c.id.in_(ids), name.in_(names))
                left.subtract({row[0]: row[1] for row in connection.execute(known)})
            total = connection.execute(of_all).scalar_one()
            if total + left.total() == 0:
                return Absent()
            known_there = 0
            for server in servers:
                number = connection.execute(of_all.where(_of_server(server))).scalar_one()
                known_there += number
                left[server] += number
            query = placed_at(destination).where(*_alive_at(destination))
            missing = [
                one
                for server in sorted(name for name, number in left.items() if number)
                for one in records(connection, Placed, query.where(_of_server(server)))
                if one.owner not in there
            ]
            return Absent(tuple(missing), total - known_there)

    def others(
        self,
        destination: str,
        servers: Collection[str],
        *,
        after: str = "",
        before: datetime | None = None,
        limit: int,
    ) -> tuple[Placed, ...]:
        """The first copies, by id ``after`` this one, that are known there, and not on their way out, of other servers
        than these; stored ``before`` then."""
        query = placed_at(destination).where(
            *_alive_at(destination),
            not_(among(backups.c.server, servers, self._database.engine.dialect.name)),
            copies.c.backup_id > after,
        )
        if before is not None:
            query = query.where(copies.c.stored_at < before)
        return self._records(Placed, query.order_by(copies.c.backup_id).limit(limit))


def _of_server(server: str) -> ColumnElement[bool]:
    """Of a copy: its backup is one of this server. By the index of servers: joined to ``backups`` and compared there,
    SQLite passes through all that the destination holds."""
    return copies.c.backup_id.in_(select(backups.c.id).where(backups.c.server == server))


def _alive_at(destination: str) -> tuple[Any, ...]:
    """Of a backup and a copy of it: it is there, and neither is on its way out."""
    deleted = str(BackupState.DELETED)
    return copies.c.destination == destination, copies.c.state != deleted, backups.c.state != deleted


def _counted_at(destination: str, *what: Any) -> Select[Any]:
    """``what`` of the copies there that are not on their way out."""
    return (
        select(*what)
        .select_from(backups.join(copies, copies.c.backup_id == backups.c.id))
        .where(*_alive_at(destination))
    )

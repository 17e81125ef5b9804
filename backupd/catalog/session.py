"""An open catalog, the way in: one object per sort of row; and which catalog it is.

A catalog as one file: every row of one moment in an SQLite file, whatever database the catalog lives in. And back: the
history in such a file that no destination tells of (jobs, events, schedules ...) taken into a catalog. Which catalog it
is stays with every copy of it; one that was made anew, after a loss, is another.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from sqlalchemy import Column, Connection, Integer, Select, String, Table, insert, select, tuple_

from backupd.catalog.alerts import Cursors, Events, IncidentRows, Messages, events
from backupd.catalog.backups import Absences, Backups, Identities, identities
from backupd.catalog.binlogs import Binlogs
from backupd.catalog.database import WANTED, Changes, Database, catalog_url, current, is_file
from backupd.catalog.destinations import Deposits, Lags, Marks, Replications, Scrubs, Thaws, binlog_lags
from backupd.catalog.jobs import Holds, Jobs, Schedules, holds, jobs, schedules
from backupd.catalog.leader import Watch
from backupd.catalog.overview import Glances
from backupd.catalog.people import Audit, Challenges, Requests, Sessions, Tokens, audit, challenges
from backupd.catalog.proofs import Proofs, Witnesses, proofs, witnesses
from backupd.catalog.restores import Plans, Rates, Restores, restores
from backupd.catalog.row_mapping import metadata
from backupd.model.backup_record import HoldKind
from backupd.model.errors import CatalogError

identity = Table(
    "identity",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("id", String(12), nullable=False),
)
"""One row: which catalog this is, among all that its installation ever had."""

every_table = metadata
"""All tables of the catalog: this module imports every module that declares some."""


_BATCH = 250
_FINISHED = (jobs, restores)
"""Of these only what has ended: nobody is at the rest any more."""
_HISTORY = (jobs, restores, challenges, schedules, binlog_lags, proofs, witnesses, holds, identities)
"""Tables whose rows are told apart by their keys."""


def take_history(source: Database, target: Database) -> int:
    """Rows of ``source`` that ``target`` lacks and that only a catalog knows; how many they were. Both have the form
    that this program knows. What was running in ``source`` is left out, and so are its holds, which destinations tell
    of."""
    count = 0
    for table in _HISTORY:
        with source.read() as there:
            for batch in _batches(there, select(table)):
                wanted = [row for row in batch if _counts(table, row)]
                with target.write() as here:
                    count += _insert_missing(here, table, wanted)
    return count + _take_events(source, target) + _take_audit(source, target)


def _counts(table: Table, row: dict[str, Any]) -> bool:
    if table is holds:
        return bool(row["kind"] == str(HoldKind.PAUSE))
    return table not in _FINISHED or row["finished_at"] is not None


def _insert_missing(here: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> int:
    keys = tuple(table.primary_key.columns)
    asked = [tuple(row[key.name] for key in keys) for row in rows]
    found = {tuple(row) for row in here.execute(select(*keys).where(tuple_(*keys).in_(asked)))} if rows else set()
    new = [row for row in rows if tuple(row[key.name] for key in keys) not in found]
    if new:
        here.execute(insert(table), new)
    return len(new)


def _take_events(source: Database, target: Database) -> int:
    """Events have numbers that mean nothing elsewhere: they are the same when moment, kind and subject are."""
    count = 0
    same = (events.c.at, events.c.kind, events.c.subject)
    with source.read() as there:
        for batch in _batches(there, select(events).order_by(events.c.number)):
            with target.write() as here:
                known = {
                    tuple(row)
                    for row in here.execute(select(*same).where(events.c.at.in_([row["at"] for row in batch])))
                }
                new = [
                    {name: value for name, value in row.items() if name != events.c.number.name}
                    for row in batch
                    if (row["at"], row["kind"], row["subject"]) not in known
                ]
                if new:
                    here.execute(insert(events), new)
                count += len(new)
    return count


def _take_audit(source: Database, target: Database) -> int:
    """The audit goes over as it was written, where none was begun yet: in between, its entries would not follow from
    each other."""
    count = 0
    with source.read() as there, target.write() as here:
        if here.execute(select(audit.c.number).limit(1)).first() is not None:
            return 0
        for batch in _batches(there, select(audit).order_by(audit.c.number)):
            here.execute(insert(audit), batch)
            count += len(batch)
    return count


def _copy_file(database: Database, target: Path) -> None:
    with database.read() as connection, closing(sqlite3.connect(target)) as copy:
        ours = cast("sqlite3.Connection", connection.connection.driver_connection)
        try:
            ours.backup(copy)
            _make_one_file(copy)
        except sqlite3.Error as error:
            raise CatalogError(
                f"the catalog {database.name} cannot be copied to {target}", detail=str(error)
            ) from error


def _make_one_file(copy: sqlite3.Connection) -> None:
    copy.execute("PRAGMA journal_mode = DELETE")  # else some of it lies in a second file


def _copy_rows(database: Database, target: Path) -> None:
    from backupd.catalog.migrations import bring_up_to_date  # dear to import, and hardly ever needed

    copy = Database(f"sqlite:///{target}")
    try:
        bring_up_to_date(copy, every_table.tables)
        # Repeatable read: all tables as they are at one moment, while others go on writing.
        with (
            database.errors(),
            database.engine.connect().execution_options(isolation_level="REPEATABLE READ") as there,
            there.begin(),
            copy.write() as here,
        ):
            for table in every_table.sorted_tables:
                for batch in _batches(there, select(table)):
                    here.execute(insert(table), batch)
    finally:
        copy.close()
    with closing(sqlite3.connect(target)) as file:
        _make_one_file(file)


def _batches(connection: Connection, query: Select[Any]) -> Iterator[list[dict[str, Any]]]:
    rows = iter(connection.execution_options(yield_per=_BATCH).execute(query).mappings())
    while batch := [dict(row) for row in islice(rows, _BATCH)]:
        yield batch


class Catalog:
    """An open catalog; a context manager. Threads may share it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.name = database.name
        self.backups = Backups(database)
        self.jobs = Jobs(database)
        self.restores = Restores(database)
        self.proofs = Proofs(database)
        self.witnesses = Witnesses(database)
        self.rates = Rates(database)
        self.identities = Identities(database)
        self.events = Events(database)
        self.challenges = Challenges(database)
        self.holds = Holds(database)
        self.schedules = Schedules(database)
        self.scrubs = Scrubs(database)
        self.binlogs = Binlogs(database)
        self.lags = Lags(database)
        self.marks = Marks(database)
        self.deposits = Deposits(database)
        self.thaws = Thaws(database)
        self.replications = Replications(database)
        self.watch = Watch(database)
        self.glances = Glances(database)
        self.incidents = IncidentRows(database)
        self.messages = Messages(database)
        self.cursors = Cursors(database)
        self.plans = Plans(database)
        self.absences = Absences(database)
        self.tokens = Tokens(database)
        self.sessions = Sessions(database)
        self.audit = Audit(database)
        self.requests = Requests(database)

    def integrity(self) -> list[str]:
        """What the database finds wrong with itself, one line each. Reads everything; for `backupd fsck`."""
        return self._database.integrity()

    def changes(self) -> Changes:
        """Whether anybody writes from now on."""
        return Changes(self._database)

    def identity(self) -> str:
        """Which catalog this is: 12 hex digits that its copies have, too, and one made after its loss has not."""
        with self._database.write() as connection:
            found = connection.execute(select(identity.c.id)).scalar()
            if found is None:  # drawn when it is first asked for
                found = secrets.token_hex(6)
                connection.execute(insert(identity).values(number=1, id=found))
            return str(found)

    def write_snapshot(self, target: Path) -> None:
        """All of it, as it is at one moment, to a new SQLite file: what is kept of a catalog elsewhere. ``target`` must
        not exist yet. Raises CatalogError, OSError."""
        copy = _copy_file if self._database.sqlite else _copy_rows
        copy(self._database, target)

    def take_history(self, older: Catalog) -> int:
        """What ``older`` knows of jobs, events, schedules, challenges, proofs, witnesses, pauses and the audit, and
        this one does not; how many rows that was."""
        return take_history(older._database, self._database)

    def close(self) -> None:
        """Close the database; nothing of this object works afterwards."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def open_catalog(url: str, *, make: bool = True) -> Catalog:
    """Open the catalog at ``sqlite:////PATH`` or ``postgresql://...``, made (with ``make``) or upgraded first where
    needed.

    Raises CatalogError naming the file or server: damaged, read-only, newer than this program, out of reach.
    """
    database = Database(url, make=make)
    try:
        _bring_up_to_date(database)
    except BaseException:
        database.close()
        raise
    return Catalog(database)


def catalog_name(url: str) -> str:
    """How messages call it: a path, or a URL without its password. Raises CatalogError for what is no address."""
    found = catalog_url(url)
    return str(found.database) if found.drivername == "sqlite" else found.render_as_string(hide_password=True)


def is_there(url: str) -> bool:
    """Is there a catalog at ``url``? Makes none. Raises CatalogError where that cannot be asked."""
    database = Database(url, make=False)
    try:
        if database.sqlite:
            return is_file(Path(database.name))
        with database.read() as connection:
            return current(connection) is not None
    finally:
        database.close()


def upgrade(url: str, *, make: bool = True) -> tuple[str | None, str]:
    """Bring a catalog's tables up to date and close it; gives the revision before (None: it was empty) and after.
    ``make``: also one that is not there.

    Two processes may do it at once. Raises CatalogError.
    """
    database = Database(url, make=make)
    try:
        return _bring_up_to_date(database)
    finally:
        database.close()


def _bring_up_to_date(database: Database) -> tuple[str | None, str]:
    with database.read() as connection:
        if current(connection) == WANTED:
            return WANTED, WANTED
    from backupd.catalog.migrations import bring_up_to_date  # dear to import, and hardly ever needed

    return bring_up_to_date(database, every_table.tables)

"""An open catalog, the way in: one object per sort of row; and which catalog it is.

Which catalog it is stays with every copy of it; one that was made anew, after a loss, is another.
"""

from __future__ import annotations

import secrets
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import insert, select

from backupd.catalog.database import WANTED, Changes, Database, catalog_url, current, identity, is_file

if TYPE_CHECKING:
    from backupd.catalog.alerts import Cursors, Events, IncidentRows, Messages
    from backupd.catalog.backups import Absences, Backups, Identities
    from backupd.catalog.binlogs import Binlogs
    from backupd.catalog.destinations import Deposits, Inventory, Lags, Marks, Replications, Scrubs, Thaws
    from backupd.catalog.hosts import Hosts, Watch
    from backupd.catalog.jobs import Jobs, Schedules
    from backupd.catalog.overview import Glances
    from backupd.catalog.people import Audit, Challenges, Holds, Requests, Sessions, Tokens
    from backupd.catalog.proofs import ConsistencyChecks, Proofs, Witnesses
    from backupd.catalog.restores import Plans, Rates, Rejoins, Restores
    from backupd.catalog.standings import Nodes, Standings


class _Rows:
    """The rows of one sort, by the annotated class of a module that is imported when they are first asked for: no
    command needs all of them."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __set_name__(self, owner: type[Catalog], name: str) -> None:
        self._name, self._kind = name, owner.__annotations__[name]

    def __get__(self, catalog: Catalog, _owner: type[Catalog]) -> Any:
        kind = getattr(import_module(f"backupd.catalog.{self._module}"), self._kind)
        return vars(catalog).setdefault(self._name, kind(catalog.database))


def _of(module: str) -> Any:
    return _Rows(module)


class Catalog:
    """An open catalog; a context manager. Threads may share it."""

    backups: Backups = _of("backups")
    jobs: Jobs = _of("jobs")
    restores: Restores = _of("restores")
    proofs: Proofs = _of("proofs")
    witnesses: Witnesses = _of("proofs")
    consistency_checks: ConsistencyChecks = _of("proofs")
    rates: Rates = _of("restores")
    identities: Identities = _of("backups")
    events: Events = _of("alerts")
    challenges: Challenges = _of("people")
    holds: Holds = _of("people")
    schedules: Schedules = _of("jobs")
    scrubs: Scrubs = _of("destinations")
    binlogs: Binlogs = _of("binlogs")
    inventory: Inventory = _of("destinations")
    lags: Lags = _of("destinations")
    marks: Marks = _of("destinations")
    deposits: Deposits = _of("destinations")
    thaws: Thaws = _of("destinations")
    replications: Replications = _of("destinations")
    watch: Watch = _of("hosts")
    hosts: Hosts = _of("hosts")
    glances: Glances = _of("overview")
    standings: Standings = _of("standings")
    nodes: Nodes = _of("standings")
    rejoins: Rejoins = _of("restores")
    incidents: IncidentRows = _of("alerts")
    messages: Messages = _of("alerts")
    cursors: Cursors = _of("alerts")
    plans: Plans = _of("restores")
    absences: Absences = _of("backups")
    tokens: Tokens = _of("people")
    sessions: Sessions = _of("people")
    audit: Audit = _of("people")
    requests: Requests = _of("people")

    def __init__(self, database: Database) -> None:
        self.database = database
        self.name = database.name

    def integrity(self) -> list[str]:
        """What the database finds wrong, one line each. Reads everything; for `backupd fsck`."""
        return self.database.integrity()

    def changes(self) -> Changes:
        """Whether anybody writes from now on."""
        return Changes(self.database)

    def identity(self) -> str:
        """Which catalog this is: 12 hex digits that its copies have, too, and one made after its loss has not."""
        with self.database.write() as connection:
            found = connection.execute(select(identity.c.id)).scalar()
            if found is None:  # drawn when it is first asked for
                found = secrets.token_hex(6)
                connection.execute(insert(identity).values(number=1, id=found))
            return str(found)

    def write_snapshot(self, target: Path) -> None:
        """All of it, as it is at one moment, to a new SQLite file: what is kept of a catalog elsewhere. ``target`` must
        not exist yet. Raises CatalogError, OSError."""
        from backupd.catalog.snapshot import copy_file, copy_rows

        copy = copy_file if self.database.sqlite else copy_rows
        copy(self.database, target)

    def take_history(self, older: Catalog) -> int:
        """What ``older`` knows of jobs, events, schedules, challenges, proofs, witnesses, pauses and the audit, and
        this one does not; how many rows that was."""
        from backupd.catalog.snapshot import take_history

        return take_history(older.database, self.database)

    def close(self) -> None:
        """Close the database; nothing of this object works afterwards."""
        self.database.close()

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
    from backupd.catalog.migrations import bring_up_to_date  # slow to import, and hardly ever needed
    from backupd.catalog.snapshot import every_table

    return bring_up_to_date(database, every_table.tables)

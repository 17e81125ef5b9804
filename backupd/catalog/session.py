"""Which catalog this is: one that was made anew, after a loss, is another.

The way in: an open catalog with one object per sort of row.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from backupd.catalog.alerts import Cursors, Events, IncidentRows, Messages
from backupd.catalog.backups import Absences, Backups, Identities
from backupd.catalog.base.database import WANTED, Changes, Database, catalog_url, current, is_file
from backupd.catalog.base.leader import Watch
from backupd.catalog.binlogs import Binlogs
from backupd.catalog.destinations import Deposits, Lags, Marks, Replications, Scrubs, Thaws
from backupd.catalog.jobs import Holds, Jobs, Schedules
from backupd.catalog.overview import Glances
from backupd.catalog.people import Audit, Challenges, Requests, Sessions, Tokens
from backupd.catalog.proofs import Proofs, Witnesses
from backupd.catalog.restores import Plans, Rates, Restores
from backupd.catalog.snapshot import every_table, identity_of, take_history, write_snapshot


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
        return identity_of(self._database)

    def write_snapshot(self, target: Path) -> None:
        """All of it, as it is at one moment, to a new SQLite file: what is kept of a catalog elsewhere."""
        write_snapshot(self._database, target)

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
    from backupd.catalog.base.migrations import bring_up_to_date  # dear to import, and hardly ever needed

    return bring_up_to_date(database, every_table.tables)

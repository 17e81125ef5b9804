"""Copies of lost catalogs at a destination: opened, brought to this version's form, and what only they know taken
over.

Nothing in them is believed that the destination itself contradicts: they are older than what lies there. Each catalog
that an installation ever had counts, since one that was made anew after a loss knows nothing of what was before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from backupd.app.context.document_records import told_tampered
from backupd.app.context.wiring import Wiring
from backupd.app.metacopies.catalog_copies import own_copies
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.backup_record import BackupRecord, BackupState
from backupd.model.document import opened_limit
from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    CatalogError,
    DamagedError,
    KeyUnusableError,
    NotFoundError,
    ObjectMissingError,
    RefusedError,
    TamperedError,
)
from backupd.model.text import format_time, new_id
from backupd.process.folders import locked_folder, remove_dead
from backupd.recovery.runs import first_of, last_of
from backupd.transfer.records.authenticity import SignedDestination
from storage.contract import layout
from storage.contract.destination import Destination

_FOLDER = "lost-"
REBUILT = "catalog-rebuilt"


def lost_catalogs(
    wiring: Wiring,
    destination: Destination,
    tell: Callable[[str], None],
) -> Iterator[tuple[datetime, Catalog]]:
    """Of each catalog that kept copies there the newest that can be used, opened, with its time; newest first. It is
    gone when the next one is asked for. Those that cannot be used are told in words, and older ones taken instead.

    Raises RefusedError for the spool, DestinationError."""
    found = [
        (*copy, info.key)
        for info in own_copies(destination, layout.CATALOGS)
        if (copy := layout.copy_of(info.key)) is not None
    ]
    done: set[str] = set()
    closed: set[str] = set()
    spool = wiring.settings.spool
    try:
        remove_dead(spool, _FOLDER)
        for moment, maker, key in sorted(found, reverse=True):
            if maker in done:
                continue
            with locked_folder(spool / f"{_FOLDER}{new_id(wiring.clock())}", mode=0o700) as folder:
                try:
                    with _opened(wiring, destination, key, folder / "catalog.db") as catalog:
                        done.add(maker)
                        yield moment, catalog
                except (ArchivedError, DamagedError, KeyUnusableError, ObjectMissingError) as error:
                    if maker not in closed:
                        tell(_unusable(destination, key, error))
                    if isinstance(error, KeyUnusableError):
                        closed.add(maker)  # of many copies for the same key, one is told
    except OSError as error:
        raise RefusedError(
            f"the spool {spool} cannot be used: {error.strerror or error}",
            hint="make room there; the copy of the lost catalog is opened in it",
        ) from error


def _unusable(destination: Destination, key: str, error: BackupdError) -> str:
    what = f"a copy of the lost catalog cannot be used: {destination.name}: {key}: {error.message}"
    return f"{what} ({error.detail})" if error.detail and "\n" not in error.detail else what


@contextmanager
def _opened(wiring: Wiring, destination: Destination, key: str, file: Path) -> Iterator[Catalog]:
    with destination.get(key) as stream:
        wiring.unsealer().unseal_file(stream, file, limit=opened_limit(destination.stat(key).size))
    try:
        catalog = open_catalog(f"sqlite:///{file}")
    except CatalogError as error:
        raise DamagedError("it is no catalog of ours", [error.message]) from error
    with catalog:
        try:
            wrong = catalog.integrity()
        except CatalogError as error:
            wrong = [error.message]
        if wrong:
            raise DamagedError("it is a damaged catalog", wrong[:1])
        yield catalog


class Succession:
    """What the copies of lost catalogs know, taken into the catalog, one after the other, newest first: what was said
    before by a newer one counts. ``name``: the destination, ``there``: what has a manifest there. ``missing``: of which
    backups one says that they are whole there, and no manifest is, and in words; ``altered``: of which the manifest is
    another one than it knows."""

    def __init__(self, wiring: Wiring, name: str, there: Collection[str]) -> None:
        self._wiring, self._name, self._there = wiring, name, there
        self._told: set[str] = set()
        self._complete = False
        self.missing: dict[str, str] = {}
        self.altered: dict[str, str] = {}

    def take(self, moment: datetime, older: Catalog) -> int:
        """How many rows of history came of it."""
        for record in older.backups.list():
            if record.id not in self._told:
                self._told.add(record.id)
                _amend(self._wiring, record, self._name)
                self._compare(moment, record)
                if not self._complete and record.id not in self._there and _was_whole(record, self._name):
                    self.missing[record.id] = (
                        f"{self._name}: backup {record.id} of {record.server} is missing: the copy of the catalog of "
                        f"{format_time(moment)} knows it as complete there, and has heard of no deletion"
                    )
        # What it lacked when it was rebuilt itself was told then, and what it lacks since was deleted.
        self._complete |= any(event.subject == self._name for event in older.events.list(kind=REBUILT))
        for server in older.binlogs.servers():
            _logs(self._wiring, older, server, self._name)
        return self._wiring.catalog.take_history(older)

    def _compare(self, moment: datetime, older: BackupRecord) -> None:
        """The manifest's digest that its run wrote down with what was found. Where the copy is signed, it is what
        counts from now on: of another destination that which it knows is believed."""
        backups = self._wiring.catalog.backups
        try:
            record = backups.get(older.id)
        except NotFoundError:
            return  # not there, or not taken in
        if not older.manifest or record.manifest:
            return
        if isinstance(self._wiring.destination(self._name), SignedDestination):
            backups.add(replace(record, manifest=older.manifest), replace=True)
        if older.manifest != record.found:
            key = layout.manifest_key(record.server, record.id)
            why = (
                f"its SHA-256 is {record.found}, and the copy of the catalog of {format_time(moment)} knows it as "
                f"{older.manifest}"
            )
            error = TamperedError(
                f"{self._name}: {key} is not what was stored",
                [f"{self._name}: {key}: {why}"],
                hint="another destination may have the true one: backupd catalog rebuild --into-existing --from NAME",
            )
            told_tampered(self._wiring.catalog, self._wiring.clock, self._name, record.server, record.id, error)
            self.altered[record.id] = error.detail


def _was_whole(record: BackupRecord, name: str) -> bool:
    return record.state is not BackupState.DELETED and any(
        copy.destination == name and copy.state == BackupState.COMPLETE for copy in record.copies
    )


def _amend(wiring: Wiring, older: BackupRecord, destination: str) -> None:
    """What was said about a backup, and when its copy was last found whole; of one that the destination has."""
    backups = wiring.catalog.backups
    try:
        record = backups.get(older.id)
    except NotFoundError:
        return  # deleted since
    said = older.warnings if older.flavour else record.warnings
    verified = {copy.destination: copy.verified_at for copy in older.copies}
    copies = tuple(
        replace(copy, verified_at=verified[destination])
        if copy.destination == destination and copy.verified_at is None and verified.get(destination)
        else copy
        for copy in record.copies
    )
    if (said, copies) != (record.warnings, record.copies):
        backups.add(replace(record, warnings=said, copies=copies), replace=True)


def _logs(wiring: Wiring, older: Catalog, server: str, destination: str) -> None:
    """Up to when the logs are known to be complete, and why some are missing."""
    binlogs = wiring.catalog.binlogs
    branches = {branch.id for branch in binlogs.branches(server)}
    runs, now = binlogs.runs(server, destination), wiring.clock()
    for run in older.binlogs.runs(server, destination):
        place = last_of(run)
        # Logs that are gone since would make it a false promise.
        whole = any(
            one.branch == run.branch and first_of(one) <= first_of(run) and place <= last_of(one) for one in runs
        )
        beyond = [one for one in runs if one.branch == run.branch and last_of(one) >= place]
        # Logs that came since tell more by their own stamps, which count for nothing beside what was confirmed.
        later = [
            *(one.confirmed_at for one in beyond),
            *(one.last_at for one in beyond if last_of(one) > place and one.last_at and one.last_at <= now),
        ]
        if (
            run.confirmed_at is not None
            and whole
            and all(moment is None or moment < run.confirmed_at for moment in later)
        ):
            binlogs.confirm(server, destination, run.branch, place, run.confirmed_at)
    for gap in older.binlogs.gaps(server):
        if gap.branch in branches and gap.destination in ("", destination):
            binlogs.add_gap(gap)

"""Copies of a lost catalog at a destination: opened, brought to this version's form, and what only they know taken
over.

Nothing in them is believed that the destination itself contradicts: they are older than what lies there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime

from backupd.app.bootstrap import own_copies
from backupd.app.wiring import Wiring
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.backup import BackupRecord
from backupd.model.errors import CatalogError, DamagedError, NotFoundError, RefusedError
from backupd.model.ids import new_id
from backupd.process.folders import locked_folder, remove_dead
from backupd.recovery.runs import first_of, last_of
from storage import layout
from storage.destination import Destination

_FOLDER = "lost-"


def lost_catalogs(wiring: Wiring, destination: Destination) -> Iterator[tuple[datetime, Catalog]]:
    """Of each installation that kept copies there the newest one, opened, with its time; it is gone when the next one
    is asked for. Raises DamagedError, KeyUnusableError, RefusedError for the spool."""
    newest: dict[str, tuple[datetime, str]] = {}
    for info in own_copies(destination, layout.CATALOGS):
        copy = layout.copy_of(info.key)
        if copy is not None:
            newest[copy[1]] = (copy[0], info.key)
    spool = wiring.settings.spool
    try:
        remove_dead(spool, _FOLDER)
        for moment, key in sorted(newest.values()):
            with locked_folder(spool / f"{_FOLDER}{new_id(wiring.clock())}", mode=0o700) as folder:
                file = folder / "catalog.db"
                with destination.get(key) as stream:
                    wiring.unsealer().unseal_file(stream, file)
                try:
                    catalog = open_catalog(f"sqlite:///{file}")
                except CatalogError as error:
                    where = f"{destination.name}: {key}"
                    raise DamagedError(f"{where} is no catalog of ours", [f"{where}: {error}"]) from error
                with catalog:
                    yield moment, catalog
    except OSError as error:
        raise RefusedError(f"the spool {spool} cannot be used: {error.strerror or error}",
                           hint="make room there; the copy of the lost catalog is opened in it") from error


def take_over(wiring: Wiring, older: Catalog, destination: str) -> int:
    """Add to the catalog what ``older`` knows and nothing at ``destination`` tells; how many rows of history."""
    for record in older.backups.list():
        _amend(wiring, record, destination)
    for server in older.binlogs.servers():
        _logs(wiring, older, server, destination)
    return wiring.catalog.take_history(older)


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
        if copy.destination == destination and copy.verified_at is None and verified.get(destination) else copy
        for copy in record.copies)
    if (said, copies) != (record.warnings, record.copies):
        backups.add(replace(record, warnings=said, copies=copies), replace=True)


def _logs(wiring: Wiring, older: Catalog, server: str, destination: str) -> None:
    """Up to when the logs are known to be complete, and why some are missing."""
    binlogs = wiring.catalog.binlogs
    branches = {branch.id for branch in binlogs.branches(server)}
    runs = binlogs.runs(server, destination)
    for run in older.binlogs.runs(server, destination):
        place = last_of(run)
        # Logs that are gone since would make it a false promise.
        whole = any(one.branch == run.branch and first_of(one) <= first_of(run) and place <= last_of(one)
                    for one in runs)
        known = [one.confirmed_at for one in runs if one.branch == run.branch and one.confirmed_at is not None
                 and last_of(one) >= place]
        if run.confirmed_at is not None and whole and all(moment < run.confirmed_at for moment in known):
            binlogs.confirm(server, destination, run.branch, place, run.confirmed_at)
    for gap in older.binlogs.gaps(server):
        if gap.branch in branches and gap.destination in ("", destination):
            binlogs.add_gap(gap)

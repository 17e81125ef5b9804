"""Which backups survive what happens to a single destination.

A backup is *protected* when enough verified copies, of it and of all that it builds on, are at enough destinations away
from the site; see ``copy_verification``.

What is stored beside a backup (its details, its runbook) is read here, too, from the first copy that can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import PROTECTION
from backupd.app.context.destination_identity import identities
from backupd.app.context.incidents import Incidents
from backupd.app.context.wiring import Wiring
from backupd.model.backup_record import Ancestor, BackupDetail, BackupRecord, BackupState
from backupd.model.event import Severity
from backupd.model.text import format_duration, format_size, format_time
from backupd.recovery.restorable import M, Restorability
from policies.policy import Protection


def with_protection(wiring: Wiring, records: Iterable[BackupRecord]) -> list[BackupRecord]:
    """``records`` with what the policies of their servers say about their copies now."""
    return ProtectionOfBatches(wiring).of(list(records))


class ProtectionOfBatches:
    """Says of one batch of backups after the other, newest first, what the policies of their servers say about their
    copies. What a batch builds on is kept for the batches that follow, and let go when it was listed itself."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring, self._sites = wiring, sites_of(wiring)
        self._known: dict[str, Ancestor | None] = {}

    def of(self, records: Sequence[BackupRecord]) -> list[BackupRecord]:
        """The same backups, with that. Raises CatalogError."""
        known = self._known
        known |= {record.id: None if record.foreign else Ancestor.of(record) for record in records}
        self._read({record.parent for record in records if record.parent is not None} - known.keys())
        servers = {record.server for record in records}
        walks = {server: self._walk(server) for server in servers}
        wanted = {server: protection_of(self._wiring, server) for server in servers}
        described = [
            replace(
                record,
                protected=record.state is BackupState.COMPLETE
                and is_protected(
                    Ancestor.of(record),
                    # A walk that has seen another installation's backup would take it for one to build on.
                    self._walk(record.server) if record.foreign else walks[record.server],
                    wanted[record.server],
                    self._sites,
                ),
            )
            for record in records
        ]
        for record in records:
            del known[record.id]
        return described

    def _read(self, ids: Collection[str]) -> None:
        self._known |= dict.fromkeys(ids)
        self._known |= {one.id: one for one in self._wiring.catalog.backups.lineage(ids)}

    def _walk(self, server: str) -> Restorability[Ancestor]:
        return Restorability(self._finder(server), self._repositories)

    def _finder(self, server: str) -> Callable[[str], Ancestor | None]:
        """Another server's backup is none that this one could be restored with."""

        def find(backup_id: str) -> Ancestor | None:
            if backup_id not in self._known:
                self._read([backup_id])
            found = self._known[backup_id]
            return found if found is not None and found.server == server else None

        return find

    def _repositories(self, backup: Ancestor) -> frozenset[str]:
        return self._sites.of(backup.verified)


@dataclass(frozen=True, slots=True)
class Sites:
    """The repositories that count: of each configured destination which one it is, and which of them are ``away`` from
    the site. Two names of one repository are one, and a name that is no longer configured is none."""

    repositories: Mapping[str, str]
    away: frozenset[str]

    def of(self, destinations: Iterable[str]) -> frozenset[str]:
        """Which repositories these names are."""
        return frozenset(self.repositories[name] for name in destinations if name in self.repositories)


def is_protected(record: M, walk: Restorability[M], wanted: Protection, sites: Sites) -> bool:
    """``walk``: over the backups of the same server (``verified``)."""
    repositories = walk.of(record).destinations
    return len(repositories) >= wanted.copies and len(repositories & sites.away) >= wanted.off_site


def verified(records: Iterable[BackupRecord], sites: Sites) -> Restorability[BackupRecord]:
    """Finds the repositories that hold a backup and all that it builds on, verified. ``records``: all of one server."""
    by_id = {record.id: record for record in records}
    return Restorability(by_id.get, lambda record: sites.of(Ancestor.of(record).verified))


def sites_of(wiring: Wiring) -> Sites:
    """By the configuration, and by what the catalog knows of which names are one destination. Raises CatalogError."""
    repositories, configured = identities(wiring), wiring.settings.destinations
    here = {repositories[name] for name, one in configured.items() if name in repositories and not one.is_off_site}
    return Sites(repositories, frozenset(repositories.values()) - here)


def protection_of(wiring: Wiring, server: str) -> Protection:
    """Of its policy; the defaults where the server is no longer configured, or its policy is broken."""
    if server in wiring.settings.servers and (found := wiring.settings.server(server)).usable:
        return found.policy.protection
    return Protection.model_validate({})


def look(wiring: Wiring, incidents: Incidents, server: str, now: datetime) -> datetime | None:
    """Report, once, that backups of a server do not become protected in time, and when they are again. Gives the next
    moment at which another backup has waited for too long; None without one. Raises CatalogError."""
    records = [record for record in wiring.catalog.backups.list(server) if record.state is BackupState.COMPLETE]
    wanted, sites = protection_of(wiring, server), sites_of(wiring)
    walk = verified(records, sites)
    newest = sorted(records, key=lambda one: (one.finished_at, one.id), reverse=True)
    due = next((one for one in newest if one.finished_at <= now - wanted.within), None)
    good = next((one for one in newest if is_protected(one, walk, wanted, sites)), None)
    following = min((moment for one in newest if (moment := one.finished_at + wanted.within) > now), default=None)
    key = Key(PROTECTION, server)
    if due is None:
        incidents.settle(now, looked={key: f"no backup of {server} has waited too long for its protection any more"})
        return following
    if good is not None and good.finished_at >= due.finished_at:
        well = f"backups of {server} are protected again: {good.id} is verified at enough destinations"
        incidents.settle(now, looked={key: well})
        return following
    repositories = walk.of(due).destinations
    span = format_duration(wanted.within.total_seconds())
    last = f"the last one that is: {good.id}" if good is not None else "none is"
    incidents.settle(
        now,
        Condition(
            key,
            Severity.WARNING,
            message=f"backup {due.id} of {server} ended more than {span} ago and is not protected: verified copies are "
            f"at {len(repositories)} of {wanted.copies} destinations, {len(repositories & sites.away)} of "
            f"{wanted.off_site} off-site "
            f"({last})",
            detail="\n".join(_standing(wiring, due)),
            hint=f"backupd replicate {server} copies and verifies now; protection: in the policy sets the requirement",
        ),
    )
    return following


def _standing(wiring: Wiring, record: BackupRecord) -> list[str]:
    lines = []
    for copy in record.copies:
        when = f"verified {format_time(copy.verified_at)}" if copy.verified_at else "not verified yet"
        lines.append(f"{copy.destination}: {copy.state}, {when}")
    for row in wiring.catalog.replications.of_backup(record.id):
        part = f" ({format_size(row.bytes_done)} of {format_size(row.bytes_total)})" if row.bytes_done else ""
        lines.append(f"{row.destination}: {row.state}{part}{f': {row.message}' if row.message else ''}")
    return lines


def detail(wiring: Wiring, backup_id: str) -> BackupDetail:
    """Raises NotFoundError, and the first reason where no copy can be read."""
    from backupd.app.backup_records import of_first_copy

    (record,) = with_protection(wiring, [wiring.catalog.backups.get(backup_id)])
    return of_first_copy(
        wiring,
        record,
        lambda _destination, header: BackupDetail(
            record, len(header.objects), header.recipients, header.codec, header.is_bound, header.runbook.sha256
        ),
    )


def runbook(wiring: Wiring, backup_id: str) -> str:
    """How to restore it by hand. Raises as ``detail`` does."""
    from backupd.app.backup_records import of_first_copy
    from backupd.transfer.records.manifests import load_side_file

    return of_first_copy(
        wiring,
        wiring.catalog.backups.get(backup_id),
        lambda destination, header: load_side_file(destination, header, header.runbook).decode(),
    )

"""A catalog made again from what is stored at one destination, whatever became of the catalog and of all other
destinations. And what was hidden or overwritten at a destination with versions, found and brought back.

What is stored is the truth: manifests, descriptions of binary logs, marks, holds and keeps. It needs no private key.
With one, positions come from the sealed bodies and proofs from their documents, and what only a catalog ever knows
(jobs, events, schedules, up to when an idle server's logs were complete) from the newest copies of the lost one.
Nothing in these copies counts that the destination itself contradicts: they are older. Each catalog that an
installation ever had counts, since one that was made after a loss knows nothing of what was before.

One backup, or a thousand binary logs, is one transaction: a rebuild that was killed is begun again with ``merge``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from backupd.app.backup_records import is_ours, record_of_manifest
from backupd.app.binlogs.log_records import Reconciliation
from backupd.app.context.server_identity import recall
from backupd.app.context.settings import spool_unusable
from backupd.app.context.trust import CatalogRecords, report_tampering
from backupd.app.context.wiring import Wiring, worker_count
from backupd.app.metacopies.catalog_copies import own_copies
from backupd.app.verify.scrubbing import is_at_work
from backupd.catalog.session import Catalog, open_catalog
from backupd.model.backup_record import BackupRecord, BackupState, Copy, HoldKind
from backupd.model.document import Document, json_key, opened_limit
from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    CatalogError,
    DamagedError,
    KeyUnusableError,
    ObjectMissingError,
    RefusedError,
    TamperedError,
    UsageError,
)
from backupd.model.event import Severity
from backupd.model.job import Progress, Report
from backupd.model.manifest import Header
from backupd.model.text import format_time, new_id
from backupd.process.folders import locked_folder, remove_dead
from backupd.recovery.runs import first_of, last_of
from backupd.transfer import log_segments as segments
from backupd.transfer.collection import unfinished
from backupd.transfer.dedup import Presence
from backupd.transfer.deletion import marks
from backupd.transfer.holds_and_locks import Kept, kept_at
from backupd.transfer.leases import intents
from backupd.transfer.records import proofs as proofdoc
from backupd.transfer.records.authenticity import SignedDestination
from backupd.transfer.records.manifests import backup_ids, read
from backupd.transfer.records.proofs import KeptWitness
from backupd.transfer.recover_versions import Found, Returned, bring_back, find
from storage import layout, objects
from storage.destination import Destination, as_versioned

_FOLDER = "lost-"
REBUILT = "catalog-rebuilt"
_AT_ONCE = 8
_BATCH = 64

Answer = TypeVar("Answer")


@dataclass(slots=True)
class Rebuilt(Document):
    """How many of each were taken in; it grows until all is. ``damaged``: backups that cannot be restored from there;
    ``closed``: how many backups have no position, because no private key opened them; ``catalog_of``: from when the
    copies of the lost catalog are that were used; ``history``: rows that came from them; ``problems``: what could not
    be read, or is not what was stored, in words. ``bound``, ``unbound``: of how many backups what they say in the
    clear was compared with what was sealed, and of how many (format 1) nothing shows whether it was changed; of those
    that are ``closed`` nobody knows. ``foreign``: ids of those that were not adopted. ``heads``: what the head of each
    server says at each destination; why one may have been turned back is a problem. ``elsewhere``: which backups one
    destination has and another one does not.
    """

    destination: str
    backups: int = 0
    damaged: tuple[str, ...] = ()
    closed: int = 0
    branches: int = 0
    segments: int = 0
    proofs: int = 0
    witnesses: int = 0
    holds: int = 0
    catalog_of: tuple[datetime, ...] = ()
    history: int = 0
    problems: tuple[str, ...] = ()
    bound: int = 0
    unbound: int = 0
    foreign: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


def rebuild(wiring: Wiring, name: str, report: Report, *, merge: bool = False, adopt: bool = False) -> Rebuilt:
    """Fill the catalog from destination ``name``. Into one that knows backups or binary logs already only with
    ``merge``, which adds what it lacks and changes what it says of this destination's copies.

    Who names a destination after a loss means that what is stored there is his. A catalog that has taken backups itself
    knows which are: with ``adopt`` those that it does not know count as ours, too, else they are foreign.

    Raises NotFoundError, RefusedError, DestinationError when the destination cannot be reached, CatalogError.
    """
    destination = wiring.destination(name)
    if not destination.is_initialised():
        raise RefusedError(
            f"destination {name} holds no backups: it is empty, or not a repository",
            hint="check that it is mounted, and that path, bucket and prefix are right." + if_deleted(destination),
        )
    if not merge and (wiring.catalog.backups.servers() or wiring.catalog.binlogs.servers()):
        raise RefusedError(
            f"the catalog {wiring.catalog.name} is not empty",
            hint="to add what it lacks, after an interrupted rebuild or from a second destination: --into-existing",
        )
    with wiring.locked("rebuild", "another process is rebuilding the catalog"), wiring.removing():
        taken_here = wiring.catalog.backups.is_any_taken()
        return _Rebuild(wiring, destination, report, adopt=adopt or not taken_here).run()


class _Rebuild:
    def __init__(self, wiring: Wiring, destination: Destination, report: Report, *, adopt: bool) -> None:
        self._wiring, self._destination, self._report, self._adopts = wiring, destination, report, adopt
        self._opens = wiring.settings.restore is not None
        self._done = Rebuilt(destination.name)

    def run(self) -> Rebuilt:
        wiring, destination, done = self._wiring, self._destination, self._done
        kept = kept_at(destination)
        owners = backup_ids(destination)
        self._backups(owners, kept)
        self._logs()
        if self._opens:
            self._proofs()
        for hold in kept.holds.values():
            wiring.catalog.holds.set(hold.server, HoldKind.HOLD, hold.reason, hold.set_by, hold.since)
        done.holds = len(kept.holds)
        succession = Succession(wiring, destination.name, {backup_id for _server, backup_id in owners})
        if self._opens:
            for moment, older in lost_catalogs(wiring, destination, self._problem_found):
                done.history += succession.take(moment, older)
                done.catalog_of += (moment,)
        for server in {*wiring.catalog.backups.servers(), *wiring.catalog.binlogs.servers()}:
            recall(wiring, server)  # after the copies of the catalog, which know more of it than backups do
        for found in (*succession.missing.values(), *succession.altered.values(), *self._headless(succession.missing)):
            self._problem_found(found)
        wiring.note(
            REBUILT,
            Severity.WARNING,
            f"the catalog was rebuilt from destination {destination.name}: {done.backups} backups, {done.segments} "
            "binary logs",
            subject=destination.name,
            detail="\n".join(done.problems[:50]),
            hint="to check what is stored there: backupd verify",
        )
        return done

    def _problem_found(self, text: str) -> None:
        self._done.problems += (text,)

    # -- backups

    def _backups(self, owners: list[tuple[str, str]], kept: Kept) -> None:
        """Every manifest, several at a time; no more than a batch is in memory."""
        presence = Presence(self._destination)
        dying = marks(self._destination)

        def look(owner: tuple[str, str]) -> BackupRecord | None:
            return self._look(owner, presence, deleted=owner in dying, pinned=owner in kept.backups)

        for done, record in enumerate(_answers(look, owners), 1):
            if record is not None:
                self._add(record)
            if done % _BATCH == 0 or done == len(owners):
                self._report(Progress("rebuild", files_done=done, files_total=len(owners), note="backups"))

    def _look(self, owner: tuple[str, str], presence: Presence, *, deleted: bool, pinned: bool) -> BackupRecord | None:
        """The row of one backup by what the destination holds; None, and a problem reported, where it holds nothing."""
        found = read(self._destination, *owner)
        if found is None:
            return None
        header = found.header
        if not isinstance(header, Header):
            self._problem_found(header.detail or header.message)
            return None
        copy = Copy(self._destination.name, str(BackupState.COMPLETE), header.finished_at)
        try:
            record = record_of_manifest(self._wiring, self._destination, header, copy, pinned=pinned)
        except TamperedError as error:
            report_tampering(self._wiring.catalog, self._wiring.clock, self._destination.name, *owner, error)
            self._problem_found(f"{error.detail}: it was not imported")
            return None
        self._done.bound += bool(record.flavour) and header.is_bound
        self._done.unbound += not header.is_bound
        problem = self._problem(header, presence, opened=bool(record.flavour))
        if problem:
            self._problem_found(f"{self._destination.name}: backup {header.backup_id}: {problem}")
        state = BackupState.DELETED if deleted else BackupState.DAMAGED if problem else BackupState.COMPLETE
        return replace(record, state=state, copies=(replace(copy, state=str(state)),))

    def _problem(self, header: Header, presence: Presence, *, opened: bool) -> str:
        """Why it cannot be restored from here; "" where nothing shows that. Reads no object, and the body unless it was
        ``opened`` already, which compares its digest."""
        missing = [item.name for item in header.objects if not presence.holds(item)]
        if missing:
            return f"{len(missing)} of its {len(header.objects)} objects are missing or known to be damaged"
        folder = layout.backup_folder(header.server, header.backup_id)
        there = {info.key: info.size for info in self._destination.list(folder)}
        for item in header.side_files:
            if there.get(folder + item.name) != item.size:
                return f"its {item.name} is missing or has another size"
        if opened:
            return ""
        try:
            return objects.problem(self._destination, folder + header.body.name, header.body)
        except ArchivedError:
            return f"its {header.body.name} is in an archive class: thaw it there, and copy it back"

    def _add(self, record: BackupRecord) -> None:
        self._done.backups += 1
        self._done.closed += not record.flavour
        if record.state is BackupState.DAMAGED:
            self._done.damaged += (record.id,)
        backups = self._wiring.catalog.backups
        (copy,) = record.copies
        known = backups.find(record.id)
        if known is None:
            foreign = not (self._adopts or is_ours(self._wiring, self._destination, record))
            backups.add(replace(record, foreign=foreign))
            if foreign:
                self._done.foreign += (record.id,)
            return
        ours = {one.destination: one for one in known.copies}
        before = ours.get(copy.destination)
        ours[copy.destination] = replace(copy, verified_at=before.verified_at if before is not None else None)
        # What no key opened before gives no position.
        better = known if known.flavour else replace(record, manifest=known.manifest)
        backups.add(
            replace(
                better,
                copies=tuple(ours.values()),
                pinned=known.pinned or record.pinned,
                foreign=known.foreign and not self._adopts,
            ),
            replace=True,
        )
        backups.set_copy_state(record.id, copy.destination, copy.state)

    def _headless(self, reported: Collection[str]) -> list[str]:
        """Backups of which there are files but no manifest, and that nobody is writing; without ``reported`` ones."""
        busy = {owner for lease in intents(self._destination) for owner in lease.backups}
        trees, sides = unfinished(self._destination)
        owners = {
            owner for key in (*trees, *(info.key for info in sides)) if (owner := layout.backup_of(key)) is not None
        }
        return [
            f"{self._destination.name}: backup {backup_id} of {server} has no manifest: it was removed, or the backup "
            "or its deletion was interrupted"
            for server, backup_id in sorted(owners - busy)
            if backup_id not in reported
        ]

    # -- the rest

    def _logs(self) -> None:
        """Branches and segments, through what brings any catalog into line."""
        keys = (info.key for info in self._destination.list(layout.BINLOGS))
        owners = filter(None, (layout.branch_of(key) or layout.segment_of(key) for key in keys))
        for server in dict.fromkeys(str(owner[0]) for owner in owners):
            self._report(Progress("rebuild", note=f"binary logs of {server}"))
            settled = Reconciliation(self._wiring.catalog, self._destination, server, self._wiring.clock).settle(
                at_work=is_at_work(self._wiring, server)
            )
            self._done.branches += settled.branches
            self._done.segments += settled.added
        for found in segments.branches(self._destination):
            if isinstance(found, DamagedError):
                self._problem_found(found.detail or found.message)

    def _proofs(self) -> None:
        unsealer = self._wiring.unsealer()
        catalog = self._wiring.catalog

        def opened(owner: tuple[str, str]) -> tuple[proofdoc.Kept, str] | BackupdError | None:
            try:
                return proofdoc.load(self._destination, *owner, unsealer)
            except (DamagedError, KeyUnusableError) as error:
                return error

        for found in _answers(opened, list(proofdoc.listed(self._destination))):
            if isinstance(found, BackupdError):
                self._problem_found(found.detail or found.message)
            elif found is not None:
                kept, digest = found
                if isinstance(kept, KeptWitness):
                    catalog.witnesses.add(kept.id, kept.witness, backup_id=kept.backup_id)
                    self._done.witnesses += 1
                else:
                    catalog.proofs.add(kept)
                    self._done.proofs += 1
                catalog.deposits.put(self._destination.name, layout.proof_key(kept.server, kept.id), digest)


def _answers(look: Callable[[tuple[str, str]], Answer], owners: list[tuple[str, str]]) -> Iterator[Answer]:
    """Of ``look`` to each, several at a time, since each waits for gpg and for the network; in order, so that parents
    come first. No more than a batch is in memory."""
    for start in range(0, len(owners), _BATCH):
        with ThreadPoolExecutor(max_workers=worker_count(_AT_ONCE), thread_name_prefix="rebuild") as pool:
            yield from pool.map(look, owners[start : start + _BATCH])


# -- copies of lost catalogs


def lost_catalogs(
    wiring: Wiring, destination: Destination, report: Callable[[str], None]
) -> Iterator[tuple[datetime, Catalog]]:
    """Of each catalog that kept copies there the newest that can be used, opened, with its time; newest first. It is
    gone when the next one is asked for. Those that cannot be used are reported in words, and older ones taken instead.

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
                        report(_unusable(destination, key, error))
                    if isinstance(error, KeyUnusableError):
                        closed.add(maker)  # of many copies for the same key, one is reported
    except OSError as error:
        hint = "make room there; the copy of the lost catalog is opened in it"
        raise spool_unusable(spool, error, hint) from error


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
        raise DamagedError("it is not a catalog of backupd", [error.message]) from error
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
        self._seen: set[str] = set()
        self._complete = False
        self.missing: dict[str, str] = {}
        self.altered: dict[str, str] = {}

    def take(self, moment: datetime, older: Catalog) -> int:
        """How many rows of history came of it."""
        for record in older.backups.every():
            if record.id not in self._seen:
                self._seen.add(record.id)
                _amend(self._wiring, record, self._name)
                self._compare(moment, record)
                whole = record.state is not BackupState.DELETED and record.state_at(self._name) == BackupState.COMPLETE
                if not self._complete and record.id not in self._there and whole:
                    self.missing[record.id] = (
                        f"{self._name}: backup {record.id} of {record.server} is missing: the copy of the catalog of "
                        f"{format_time(moment)} knows it as complete there, and no deletion is recorded"
                    )
        # What it lacked when it was rebuilt itself was reported then, and what it lacks since was deleted.
        self._complete |= any(event.subject == self._name for event in older.events.list(kind=REBUILT))
        for server in older.binlogs.servers():
            _logs(self._wiring, older, server, self._name)
        return self._wiring.catalog.take_history(older)

    def _compare(self, moment: datetime, older: BackupRecord) -> None:
        """The manifest's digest that its run wrote down with what was found. Where the copy is signed, it is what
        counts from now on: of another destination that which it knows is believed."""
        backups = self._wiring.catalog.backups
        record = backups.find(older.id)
        if record is None or not older.manifest or record.manifest:
            return  # it is not there, was not taken in, or nothing is to be compared
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
                hint="another destination may hold the original: backupd catalog rebuild --into-existing --from NAME",
            )
            report_tampering(self._wiring.catalog, self._wiring.clock, self._name, record.server, record.id, error)
            self.altered[record.id] = error.detail


def _amend(wiring: Wiring, older: BackupRecord, destination: str) -> None:
    """What was said about a backup, and when its copy was last found whole; of one that the destination has."""
    backups = wiring.catalog.backups
    record = backups.find(older.id)
    if record is None:
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
        end = last_of(run)
        # Logs that are gone since would make it a false promise.
        whole = any(one.branch == run.branch and first_of(one) <= first_of(run) and end <= last_of(one) for one in runs)
        beyond = [one for one in runs if one.branch == run.branch and last_of(one) >= end]
        # Logs that came since show more by their own stamps, which count for nothing beside what was confirmed.
        later = [
            *(one.confirmed_at for one in beyond),
            *(one.last_at for one in beyond if last_of(one) > end and one.last_at and one.last_at <= now),
        ]
        if (
            run.confirmed_at is not None
            and whole
            and all(moment is None or moment < run.confirmed_at for moment in later)
        ):
            binlogs.confirm(server, destination, run.branch, end, run.confirmed_at)
    for gap in older.binlogs.gaps(server):
        if gap.branch in branches and gap.destination in ("", destination):
            binlogs.add_gap(gap)


# -- versions


@dataclass(frozen=True, slots=True)
class RecoveredVersions(Document):
    """``done`` is None where it was only looked."""

    destination: str
    found: Found = field(metadata=json_key(inline=True))
    done: Returned | None = None

    @property
    def ok(self) -> bool:
        """Is nothing lost, and did everything come back that was tried?"""
        return not self.found.lost and (self.done is None or not self.done.failed)


def versions_to_recover(wiring: Wiring, name: str, since: datetime) -> RecoveredVersions:
    """What would come back: of what the catalog knows, what is as it knows it. Changes nothing."""
    if since > wiring.clock():
        raise UsageError(
            "--since is in the future", hint="give the time after which deletions and overwrites are to be undone"
        )
    return RecoveredVersions(name, find(wiring.destination(name), since, CatalogRecords(wiring.catalog, wiring.clock)))


def if_deleted(destination: Destination) -> str:
    """What else to do about a destination that seems to be empty."""
    if as_versioned(destination) is None:
        return ""
    return f" If somebody deleted it: `backupd recover-versions {destination.name} --since TIME` shows its versions"


def recover_versions(wiring: Wiring, name: str, since: datetime, report: Report) -> RecoveredVersions:
    """Bring it back. Nothing of this installation removes anything meanwhile. What it knew of marks that are withdrawn
    is forgotten."""
    looked = versions_to_recover(wiring, name, since)
    if looked.found.is_nothing:
        return looked
    with wiring.removing():
        done = bring_back(wiring.destination(name), looked.found, clock=wiring.clock, report=report)
        for owner in done.unmarked:
            wiring.catalog.marks.forget(name, owner)
    return RecoveredVersions(name, looked.found, done)

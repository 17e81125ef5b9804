"""Applying retention rules: what no rule keeps is marked at its destination, and goes after the grace period, by a
sweep of that destination: one after the rules of however many servers.

It runs after each successful backup, once a day, and on demand; never after a failed one. Each destination is decided
separately. Nothing is marked beyond the mass-deletion limit (``backupd.transfer.deletion_limit``) unless a person
confirmed it: an empty or changed policy must not cost a history.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice

from backupd.app.backup_records import adopt_unknown
from backupd.app.context.access import audit, service_actor
from backupd.app.context.destination_identity import require_single
from backupd.app.context.wiring import JobRun, Wiring
from backupd.app.retention.decisions import needed
from backupd.app.retention.deletion import (
    MISSING_HINT,
    confirm,
    expected_at,
    mark_copy,
    own,
    reconcile,
    sweep_locked,
    unconfirmed,
)
from backupd.app.retention.preview import (
    destinations_holding,
    first_needed,
    opened,
    stock_of,
    waiting_for,
)
from backupd.app.retention.rules import BinlogRun, Decisions, Stored
from backupd.app.runtime.clock_check import careful
from backupd.model.backup_record import BackupRecord
from backupd.model.binlog import Branch, SegmentRecord
from backupd.model.document import HIDDEN, Document, json_key
from backupd.model.errors import BackupdError, DamagedError, DestinationFullError, LockedError, RefusedError
from backupd.model.event import Severity
from backupd.model.text import format_size
from backupd.recovery.restorable import members_of
from backupd.transfer import log_segments as segments
from backupd.transfer.collection import Missing
from backupd.transfer.deletion import marked
from backupd.transfer.deletion_limit import is_most
from backupd.transfer.holds_and_locks import each
from backupd.transfer.leases import living_pins
from backupd.transfer.records.manifests import backup_ids
from storage.destination import Capability, Destination

REFUSED = "retention-refused"
_MANY = 3
_QUIET = timedelta(days=1)
"""The same refusal is reported once in this time."""
_BATCH = 200
"""Segments that are removed between two looks at who reads."""
_ROW = 8
"""Segments that are removed at once. A process that dies on the way may leave this many out of order."""


def refuse_mass(wiring: Wiring, found: Iterable[tuple[Destination, Decisions]], run: JobRun) -> None:
    """Raises RefusedError, with an event for each destination, when ``found`` would let go of too much."""
    refused = [
        (decisions, excess)
        for destination, decisions in found
        if (excess := _excess_of_server(decisions) or _excess_of_day(wiring, destination, decisions))
    ]
    if not refused:
        return
    server = refused[0][0].server
    hint = f"review them: backupd retention {server}; to expire them: backupd retention {server} --apply --really"
    for decisions, excess in refused:
        names = [one.backup.id for one in decisions.expired] or stranded(decisions)
        _report_refused(wiring, decisions, run, excess, ", ".join(names), hint)
    raise RefusedError(
        "retention was not applied: it would delete more than half of the backups at once, or more than the daily "
        "limit",
        detail="\n".join(excess for _decisions, excess in refused),
        hint=hint,
    )


def _excess_of_server(decisions: Decisions) -> str:
    """What to say when the rules let go of most of what one server has at the destination; else empty. Pure."""
    server, where, going = decisions.server, f"at destination {decisions.destination}", len(decisions.expired)
    alive = sum(not decision.backup.marked for decision in decisions.backups)
    if is_most(going, alive, backups=going):
        return f"{going} of {alive} backups of {server} {where} would expire at once"
    if points := stranded(decisions):
        return f"the binary logs that {len(points)} remaining backups of {server} {where} need would be deleted at once"
    return ""


def _excess_of_day(wiring: Wiring, destination: Destination, decisions: Decisions) -> str:
    """What to say when all that rules let go at this destination within a day, of any server and by any installation,
    would be too much with these; else empty."""
    if not decisions.expired:
        return ""
    limit, present = wiring.settings.deletion_limit, backup_ids(destination)
    rules = unconfirmed(wiring, destination)
    rules |= {(decisions.server, one.backup.id): wiring.clock() for one in decisions.expired}
    if not limit.exceeded_by(rules, present):
        return ""
    return (
        f"{len(decisions.expired)} backups of {decisions.server} at destination {decisions.destination} would "
        f"expire, and with what other rules marked there within a day that is {limit.worst_day(rules, present)} of "
        f"{len(present)} backups; the limit is {limit.limit(len(present))} (retention.brake in the configuration)"
    )


def report_stopped(wiring: Wiring, decisions: Decisions, run: JobRun) -> None:
    """An event when a hold, or being the newest proved chain, keeps what the rules would expire."""
    if not decisions.stopped:
        return
    count, server = len(decisions.stopped), decisions.server
    if decisions.hold:
        why, hint = f"a hold keeps {count} backups", f"to release it: backupd hold {server} --release"
    else:
        why = f"the newest proved chain keeps {count} backups"
        hint = f"prove a newer backup: backupd test-restore {server}"
    _report_refused(
        wiring,
        decisions,
        run,
        f"{why} of {server} at destination {decisions.destination} that the rules would expire",
        "\n".join([*([decisions.hold] if decisions.hold else []), ", ".join(decisions.stopped)]),
        hint,
    )


def _report_refused(wiring: Wiring, decisions: Decisions, run: JobRun, message: str, detail: str, hint: str) -> None:
    server, destination, before = decisions.server, decisions.destination, wiring.clock() - _QUIET
    for event in wiring.catalog.events.list(server=server, kind=REFUSED, limit=10):
        if event.at > before and (event.subject, event.message, event.detail) == (destination, message, detail):
            return
    wiring.note(
        REFUSED,
        Severity.WARNING,
        message,
        server=server,
        subject=destination,
        detail=detail,
        hint=hint,
        job_id=run.job.id,
    )


REASON = "retention: "
"""What the reason of a mark begins with that the rules put."""


@dataclass(frozen=True, slots=True)
class Applied(Document):
    """``marked``: ids per destination; ``cleared``: what went of the binary logs; ``held``: what was left alone, and
    why."""

    marked: dict[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)
    held: tuple[str, ...] = field(default=(), kw_only=True)
    cleared: dict[str, Cleared] = field(default_factory=dict, kw_only=True, metadata=json_key("binlogs"))
    decisions: tuple[Decisions, ...] = field(metadata=json_key("destinations"))


def apply(wiring: Wiring, server: str, run: JobRun, *, really: bool = False) -> Applied:
    """Mark what expired; a sweep removes it when it is due. ``really``: also when it is more than half of all there is,
    and what another destination keeps and has not got yet.

    Raises RefusedError (with an event) when it is too much at once, and whatever keeps it from a destination (where
    backups are missing that the catalog expects: DamagedError), after the others were done.
    """
    with wiring.removing():
        troubles: list[BackupdError] = []
        opened: list[Destination] = []
        held: list[str] = []
        known = wiring.catalog.backups.list(server, foreign=True)
        for name in destinations_holding(wiring, server, known):
            run.check()
            if name not in wiring.settings.destinations:
                held.append(f"everything at {name}: this destination is no longer configured")
                continue
            try:
                opened.append(_brought_up_to_date(wiring, name, server))
            except BackupdError as error:
                if any(record.state_at(name) for record in known):
                    troubles.append(error)
        missing = {
            destination.name: expected_at(wiring, destination)(backup_ids(destination), [server])
            for destination in opened
        }
        gone = {name: one.backups for name, one in missing.items()}
        stock = replace(stock_of(wiring, server, careful(wiring.catalog, wiring.clock())), missing=gone)
        decided = [(destination, stock.decide(destination.name, awaiting=not really)) for destination in opened]
        if not really:
            refuse_mass(wiring, decided, run)
        expired: dict[str, tuple[str, ...]] = {}
        cleared: dict[str, Cleared] = {}
        for destination, decisions in decided:
            run.check()
            run.fence()
            if lacks := missing[destination.name]:
                # The rules would count on what is not there. The sweep that follows reports it and collects nothing.
                troubles.append(_out_of_sight(destination, lacks))
                continue
            report_stopped(wiring, decisions, run)
            expired[destination.name] = _mark_expired(
                wiring, destination, decisions, stock.records, run, confirmed=really
            )
            cleared[destination.name] = clear(wiring, destination, decisions, run)
            held += cleared[destination.name].held
        if troubles:
            raise troubles[0]
        return Applied(
            tuple(decisions for _destination, decisions in decided), marked=expired, held=tuple(held), cleared=cleared
        )


def make_room(wiring: Wiring, destination_name: str, needed_bytes: int, run: JobRun) -> bool:
    """Apply the rules of every server at a full destination, as if the run that filled it did not exist, and sweep what
    they expired without waiting for the grace period, the oldest chain first, until ``needed_bytes`` are free (0: all
    of it). What a person marked waits as ever. Is there room now that was not there before?

    Where nobody knows how much room there is, only what is due anyway is removed.
    """
    with wiring.removing():
        destination = opened(wiring, destination_name)
        require_single(wiring, destination)
        adopt_unknown(wiring, destination)
        reconcile(wiring, destination)
        # First of all what the failed run left: a mark needs room, too.
        swept = sweep_locked(wiring, destination)
        removed = swept.backups
        if swept.missing:
            return bool(removed)  # no object may go
        if Capability.SPACE not in destination.capabilities:
            return bool(removed)  # nobody knows when to stop, so nothing goes before its time
        decided: list[Decisions] = []
        logs = 0
        for server in wiring.catalog.backups.servers():
            run.check()
            stock = stock_of(wiring, server, careful(wiring.catalog, wiring.clock()))
            decisions = stock.decide(destination_name)
            try:
                refuse_mass(wiring, [(destination, decisions)], run)
            except RefusedError:
                continue  # reported as an event; the other servers may have enough to give
            report_stopped(wiring, decisions, run)
            _mark_expired(wiring, destination, decisions, stock.records, run)
            logs += clear(wiring, destination, decisions, run).bytes
            decided.append(decisions)
        waived: list[str] = []
        for chain in _expired_chains(wiring, destination):
            if needed_bytes and _free(destination) >= needed_bytes:
                break
            run.check()
            waived += sweep_locked(wiring, destination, at_once=chain).backups
            logs += sum(clear(wiring, destination, decisions, run).bytes for decisions in decided)
        if waived:
            wiring.note(
                "grace-waived",
                Severity.WARNING,
                f"destination {destination_name} was full: backupd removed {len(waived)} expired backups "
                "before the end of their grace period",
                server=run.job.server,
                subject=destination_name,
                job_id=run.job.id,
                detail=", ".join(waived),
                hint=f"give {destination_name} more room, or keep less there",
            )
        # What the failed run itself left behind was collected, too, and is no room that was not there before.
        return _free(destination) >= needed_bytes if needed_bytes else bool(removed or waived or logs)


def relieve(wiring: Wiring, error: DestinationFullError, run: JobRun) -> None:
    """After a run that failed for lack of room: make some, so that it can be tried again. Raises DestinationFullError
    that says what to do when nothing may be deleted."""
    if make_room(wiring, error.destination, 0, run):
        return
    if Capability.SPACE not in wiring.destination(error.destination).capabilities:
        raise DestinationFullError(
            f"destination {error.destination} is full; it reports no free space",
            detail=f"{error.message}\nbackupd keeps the grace period of the expired backups, because it cannot measure "
            "the freed space",
            destination=error.destination,
            hint=f"raise the quota of {error.destination}, or shorten its rules in the policy; `backupd backups delete "
            "ID --now` removes a backup that is not needed",
        ) from error
    lines = []
    for server in wiring.catalog.backups.servers():
        decisions = stock_of(wiring, server, wiring.clock()).decide(error.destination)
        lines += [f"{server}: {one.backup.id} stays: {one.reasons[0]}" for one in decisions.kept[:_MANY]]
        lines += [f"{server}: and {len(decisions.kept) - _MANY} more"] if len(decisions.kept) > _MANY else []
        if decisions.expired:
            lines.append(
                f"{server}: the rules expire {len(decisions.expired)}, which is more than half at once; to apply them: "
                f"backupd retention {server} --apply --really"
            )
    raise DestinationFullError(
        f"destination {error.destination} is full, and nothing there may be deleted",
        detail="\n".join([error.message, *lines]),
        destination=error.destination,
        hint=f"give {error.destination} more room, or shorten its rules in the policy (`backupd retention "
        f"{run.job.server}` shows why each backup is kept); to remove one now: backupd backups delete ID --now",
    ) from error


def _out_of_sight(destination: Destination, missing: Missing) -> DamagedError:
    return DamagedError(
        f"the rules were not applied at destination {destination.name}: {missing.count} backups that the catalog "
        "expects there have no manifest",
        [f"{name} of {server}" for server, name in sorted(missing.backups)],
        hint=MISSING_HINT,
    )


def _expired_chains(wiring: Wiring, destination: Destination) -> list[frozenset[tuple[str, str]]]:
    """What the rules of this installation have marked here, by the full backup it builds on, the oldest first."""
    expired = [owner for owner, note in own(wiring, destination).items() if note.reason.startswith(REASON)]
    by_id = {record.id: record for record in wiring.catalog.backups.lines([name for _server, name in expired])}
    chains: dict[str, set[tuple[str, str]]] = {}
    for owner in expired:
        record = by_id.get(owner[1])
        chains.setdefault(members_of(record, by_id)[0].id if record else owner[1], set()).add(owner)
    order = sorted(chains, key=lambda root: (by_id[root].finished_at if root in by_id else wiring.clock(), root))
    return [frozenset(chains[root]) for root in order]


def _free(destination: Destination) -> int:
    space = destination.space()
    return space.free if space is not None else 0


def _brought_up_to_date(wiring: Wiring, name: str, server: str) -> Destination:
    """The catalog may be wrong in both directions, so the destination is asked first."""
    destination = opened(wiring, name)
    require_single(wiring, destination)
    reconcile(wiring, destination, server)
    adopt_unknown(wiring, destination, server)
    return destination


def _mark_expired(
    wiring: Wiring,
    destination: Destination,
    decisions: Decisions,
    records: Iterable[BackupRecord],
    run: JobRun,
    *,
    confirmed: bool = False,
) -> tuple[str, ...]:
    """Newest first, so that what builds on another is marked before it. What the catalog calls deleted and nobody has
    marked, because the process died, is marked now; its grace period begins. ``confirmed``: that many at once are
    right, and those that were marked before, too."""
    by_id = {record.id: record for record in records}
    gone = []
    for decision in decisions.expired:
        name, why = decision.backup.id, "; ".join(decision.reasons)
        if mark_copy(wiring, destination, by_id[name], REASON + why, confirmed=confirmed):
            gone.append(name)
            audit(
                wiring,
                service_actor(),
                "backup-expired",
                server=decisions.server,
                subject=name,
                detail=f"marked at {destination.name} by {run.job.kind} {run.job.id}: {why}",
            )
    if confirmed:
        confirm(wiring, destination, decisions.server)
    notes = marked(destination, decisions.server)
    for decision in decisions.backups:
        name = decision.backup.id
        if decision.backup.marked and not decision.keep and (decisions.server, name) not in notes:
            mark_copy(wiring, destination, by_id[name], "its deletion was begun and not finished")
    return tuple(gone)


@dataclass(frozen=True, slots=True)
class Cleared(Document):
    """``held``: why something stayed that was to go."""

    segments: int = 0
    bytes: int = 0
    held: tuple[str, ...] = field(default=(), metadata=HIDDEN)

    @property
    def text(self) -> str:
        """How many binary logs were removed, and their size."""
        return f"{self.segments} archived binary logs were deleted ({format_size(self.bytes)})"


def clear(wiring: Wiring, destination: Destination, decisions: Decisions, run: JobRun) -> Cleared:
    """Remove what ``decisions`` let go, oldest first, but what backups need that are still there (marked or not), and
    what a restore reads that began meanwhile. The caller holds the lock of removals. Raises DestinationError."""
    server, name = decisions.server, destination.name
    present = {record.id for record in wiring.catalog.backups.list(server) if record.state_at(name)}
    left = replace(decisions, backups=tuple(one for one in decisions.backups if one.backup.id in present))
    clearing = _Clearing(wiring, destination, left, wiring.catalog.binlogs.branches(server), run)
    for branch in clearing.branches:
        clearing.clear(branch)
    done = Cleared(clearing.segments, clearing.bytes, tuple(clearing.held))
    if done.segments:
        audit(
            wiring,
            service_actor(),
            "binlogs-removed",
            server=server,
            subject=run.job.id,
            detail=f"at {name}: {done.text}",
        )
    return done


@dataclass(slots=True)
class _Clearing:
    """``decisions``: about the backups that are still there, and all binary logs."""

    wiring: Wiring
    destination: Destination
    decisions: Decisions
    branches: Sequence[Branch]
    run: JobRun
    segments: int = 0
    bytes: int = 0
    held: list[str] = field(default_factory=list)

    def clear(self, branch: Branch) -> None:
        going = [one.run for one in self.decisions.runs if not one.keep and one.run.branch == branch.id]
        limit, held = _limit(going, self.decisions, self.branches)
        self.held += held
        if limit is None:
            return
        name, binlogs = self.destination.name, self.wiring.catalog.binlogs
        found = (
            record
            for record in binlogs.each_segment(branch.server, branch.id, to_position=(limit, 0))
            if name in record.destinations
        )
        while batch := list(islice(found, _BATCH)):
            self.run.check()
            self.run.fence()
            if reader := self._reader(branch, limit):
                self.held.append(f"binary logs of branch {branch.id}: restore {reader} reads here")
                return
            gone, lock = _remove_rows(self.destination, branch.server, batch)
            binlogs.drop_segments(branch.server, [record.key for record in gone], name)
            self.segments += len(gone)
            self.bytes += sum(record.destinations[name].stored for record in gone)
            if lock is not None:
                self.held.append(f"binary logs of branch {branch.id} may not be removed yet: {lock.line}")
                return

    def _reader(self, branch: Branch, limit: int) -> str:
        """The restore that began since the decision was made and may need what is about to go; empty when none does."""
        known = {one.backup.id: one.backup for one in self.decisions.backups}
        for lease in living_pins(self.destination, self.wiring.clock()):
            for owner, backup_id in lease.backups:
                if owner == branch.server and self._may_need(known.get(backup_id), branch, limit):
                    return lease.id
        return ""

    def _may_need(self, backup: Stored | None, branch: Branch, limit: int) -> bool:
        if backup is None or backup.log_position is None:
            return True
        number = needed(backup.log_position, branch.id, self.branches)
        return number is not None and number < limit


def _limit(
    going: Sequence[BinlogRun], decisions: Decisions, branches: Sequence[Branch]
) -> tuple[int | None, list[str]]:
    """The first file of a branch that stays, None when all of it does."""
    limit: int | None = None
    for one in sorted(going, key=lambda run: run.first):
        waits = waiting_for(one, decisions, branches)
        number = first_needed(one, waits, branches) if waits is not None else one.last + 1
        if number > one.first:
            limit = number
        if waits is not None:
            return limit, [f"binary logs {one.name}: {waits.id} needs them and can still be undeleted"]
    return limit, []


def _remove_rows(
    destination: Destination, server: str, batch: Sequence[SegmentRecord]
) -> tuple[list[SegmentRecord], LockedError | None]:
    """Those that are gone, the oldest first; and what kept the next ones."""

    def remove(record: SegmentRecord) -> LockedError | None:
        try:
            segments.remove(destination, server, record.key)
        except LockedError as error:
            return error
        return None

    gone: list[SegmentRecord] = []
    for start in range(0, len(batch), _ROW):
        row = batch[start : start + _ROW]
        locks = each(remove, row, workers=_ROW)
        gone += [record for record, lock in zip(row, locks, strict=True) if lock is None]
        if (kept := next((lock for lock in locks if lock is not None), None)) is not None:
            return gone, kept
    return gone, None


def stranded(decisions: Decisions) -> tuple[str, ...]:
    """The kept backups whose logs would go, where these are too many of the server's logs at once: nothing that happens
    as time goes by, but a rule that was changed. Pure."""
    going = [one.run for one in decisions.runs if not one.keep]
    found = tuple(
        decision.backup.id for decision in decisions.kept if any(_is_in(decision.backup, run) for run in going)
    )
    total = sum(one.run.bytes for one in decisions.runs)
    return found if is_most(sum(run.bytes for run in going), total, backups=len(found)) else ()


def _is_in(backup: Stored, run: BinlogRun) -> bool:
    position = backup.log_position
    return position is not None and position.branch == run.branch and run.first <= position.number <= run.last

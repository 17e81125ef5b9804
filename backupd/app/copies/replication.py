"""Bringing one destination up to date for one server: missing copies are made, and copies are read again.

To one of the ``others`` go backups, binary logs, holds and keeps; the copies at a required one, which were stored by
the backups themselves, are only verified. What could not be copied stays in the catalog and is tried again after
growing pauses without end. One event says when that begins, and one when it is over; the same for a destination that is
too slow for the backups that are taken.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from backupd.alerts.conditions import Key
from backupd.alerts.rules import LOST, REPLICATION, SLOW
from backupd.app.backup_records import adopt_unknown, find_lost
from backupd.app.context.wiring import JobRun, Wiring, worker_count
from backupd.app.copies.log_copies import LogsCopied, copies_of
from backupd.app.copies.missing_copies import Wanted, above, opened, sources, wanted
from backupd.app.copies.repairs import Examined, damaged, verify_copies
from backupd.app.retention.deletion import reconcile, sweep_destination
from backupd.backup.physical import LIMITED, LONG_SECONDS
from backupd.model.backup_record import BackupRecord, BackupState, Copy, HoldKind
from backupd.model.errors import (
    BackupdError,
    BusyError,
    CatalogError,
    DamagedError,
    DestinationError,
    KeyUnusableError,
    NotFoundError,
    RefusedError,
    ToolError,
)
from backupd.model.event import Severity
from backupd.model.job import Progress
from backupd.model.manifest import Header
from backupd.model.text import format_duration, format_size
from backupd.transfer.copies import Copied, Order, TreePaths, replicate
from backupd.transfer.holds_and_locks import kept_at, put_hold, put_keep
from backupd.transfer.records.manifests import load_body
from backupd.transfer.relay import PAUSES
from storage import layout
from storage.destination import Destination, as_tree

FIRST_PAUSE = timedelta(minutes=1)
LONGEST_PAUSE = timedelta(hours=1)
_NOTED = 5.0
"""Seconds between two notes of how far a copy is."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """What became of one destination. ``copied``: in the order in which they arrived; ``declined``: what its own rules
    would not keep, with why; ``waiting``: what is still lacking, by id, with why; ``lost``: ids of copies that had
    vanished, though nobody here removed them; ``damaged``: of those that are not whole now; ``problem``: what ended
    it."""

    server: str
    destination: str
    copied: tuple[Copied, ...] = ()
    declined: tuple[tuple[str, str], ...] = ()
    waiting: dict[str, str] = field(default_factory=dict)
    logs: LogsCopied = field(default_factory=LogsCopied)
    examined: Examined = field(default_factory=Examined)
    lost: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    problem: BackupdError | None = None

    @property
    def bytes(self) -> int:
        """Bytes that were sent, of backups and binary logs."""
        return sum(one.sent for one in self.copied) + self.logs.bytes

    @property
    def rate(self) -> float:
        """Bytes a second of the backups that were copied, 0 where none was."""
        seconds = sum(one.seconds for one in self.copied)
        return sum(one.sent for one in self.copied) / seconds if seconds else 0.0

    @property
    def ok(self) -> bool:
        """Is everything at the destination that belongs there, whole?"""
        return self.trouble is None

    @property
    def trouble(self) -> BackupdError | None:
        """Everything that is not as it should be, as one error."""
        if self.problem is not None:
            return self.problem
        if self.logs.failure is not None:
            return self.logs.failure
        if left := [str(damage) for damage in self.examined.damages if not damage.repaired_from]:
            return DamagedError(
                f"copies at {self.destination} are damaged",
                left,
                hint="to repair it from another copy: backupd verify",
            )
        lines = [*(f"{name}: {why}" for name, why in self.waiting.items()), *self.logs.troubles]
        if broken := [name for name in self.damaged if name not in self.waiting]:
            return DamagedError(
                f"copies at {self.destination} are damaged",
                [*(f"{self.destination}: {name}: its copy is damaged" for name in broken), *lines],
                hint="to repair it from another copy: backupd verify; a full backup stores everything again",
            )
        if not lines:
            return None
        return BackupdError(
            f"not everything of {self.server} could be copied to {self.destination}",
            detail="\n".join(lines),
            hint=f"backupd retries automatically; to list the damage: backupd verify {self.server}",
        )

    def as_json(self) -> dict[str, Any]:
        """The document of `backupd replicate --json`: sizes in bytes, ``seconds``, ``rate`` in bytes a second."""
        error = self.trouble
        return {
            "server": self.server,
            "destination": self.destination,
            "ok": self.ok,
            "copied": [
                {
                    "backup": one.header.backup_id,
                    "bytes": one.sent,
                    "objects": one.objects,
                    "present": one.present,
                    "seconds": round(one.seconds, 3),
                    "rate": round(one.rate),
                    "remarks": list(one.remarks),
                }
                for one in self.copied
            ],
            "declined": [{"backup": name, "reason": why} for name, why in self.declined],
            "waiting": [{"backup": name, "reason": why} for name, why in self.waiting.items()],
            "binlogs": {
                "segments": self.logs.segments,
                "bytes": self.logs.bytes,
                "dropped": self.logs.dropped,
                "lacking": self.logs.lacking,
                "troubles": list(self.logs.troubles),
            },
            "verified": list(self.examined.verified),
            "troubles": list(self.examined.troubles),
            "damages": [damage.as_json() for damage in self.examined.damages],
            "lost": list(self.lost),
            "damaged": list(self.damaged),
            "error": str(error) if error is not None else None,
        }


def bring_up_to_date(
    wiring: Wiring, server_name: str, destination: str, run: JobRun, *, pauses: Sequence[float] = PAUSES
) -> Replicated:
    """Copy to ``destination`` what belongs there and is not, and verify the copies there.

    Raises NotFoundError for a server or destination that is not one of the policy, BusyError when another process is
    at it, CatalogError, CancelledError. What a destination or stored bytes keep from being done is in the result.
    """
    server = wiring.settings.server(server_name)
    if destination not in server.required and destination not in server.others:
        raise NotFoundError(
            f"policy {server.policy_name} of {server_name} does not name destination {destination}",
            hint=f"it names {', '.join((*server.required, *server.others))}",
        )
    with wiring.locked(
        f"replicate-{server_name}-{destination}", f"another process is already copying {server_name} to {destination}"
    ):
        one = _Round(wiring, server_name, destination, run, pauses)
        done = one.copy_and_verify(copies=destination in server.others)
        _report(wiring, done)
        report_speed(
            wiring,
            server_name,
            destination,
            sum(copy.sent for copy in done.copied),
            sum(copy.seconds for copy in done.copied),
        )
        return done


class _Round:
    """One server, one destination, once."""

    def __init__(self, wiring: Wiring, server: str, destination: str, run: JobRun, pauses: Sequence[float]) -> None:
        self._wiring, self._server, self._destination, self._run, self._pauses = (
            wiring,
            server,
            destination,
            run,
            pauses,
        )
        self._done = Replicated(server, destination)

    def copy_and_verify(self, *, copies: bool) -> Replicated:
        try:
            target = opened(self._wiring, self._destination)
            adopt_unknown(self._wiring, target, self._server)
            with self._wiring.removing(wait=False) as held:
                if held:  # whoever removes now does it, too
                    reconcile(self._wiring, target, self._server)
            failed = self._bring_back(target)
            if copies:
                self._copy(target, failed)
            examined = verify_copies(
                self._wiring,
                target,
                self._server,
                report=self._run.report,
                check=self._run.check,
                fresh=frozenset().union(*(one.stored for one in self._done.copied)),
            )
            self._done = replace(
                self._done,
                waiting=failed,
                examined=examined,
                damaged=tuple(
                    record.id for record in damaged(self._wiring.catalog.backups.list(self._server), self._destination)
                ),
            )
        except (DestinationError, RefusedError) as error:
            if isinstance(error, BusyError):
                raise
            self._done = replace(self._done, problem=error)
            if copies:
                self._expect([source.name for source in sources(self._wiring, self._server, self._destination)])
                self._all_wait(error)
        return self._done

    # -- copying

    def _bring_back(self, target: Destination) -> dict[str, str]:
        """Copy again what is lost there; what could not be, with why."""
        lost, failed = find_lost(self._wiring, target, self._server), dict[str, str]()
        self._done = replace(self._done, lost=tuple(record.id for record in lost))
        found = sources(self._wiring, self._server, self._destination) if lost else []
        for record in lost:
            self._run.check()
            try:
                self._one(target, found, record, failed)
            except (DamagedError, DestinationError, RefusedError, NotFoundError, ToolError) as error:
                failed[record.id] = error.line
                if not _is_there(target):
                    raise
        return failed

    def _copy(self, target: Destination, failed: dict[str, str]) -> None:
        found = sources(self._wiring, self._server, self._destination)
        self._keep(target)
        lacking = self._expect([source.name for source in found])
        for record in lacking.backups:
            self._run.check()
            try:
                self._one(target, found, record, failed)
            except DestinationError as error:
                self._fails(record, error, failed)
                if not _is_there(target):
                    raise
            except (DamagedError, RefusedError, NotFoundError, ToolError) as error:
                self._fails(record, error, failed)
        self._done = replace(self._done, waiting=failed, declined=lacking.declined)
        self._logs(target, found)

    def _expect(self, names: Sequence[str]) -> Wanted:
        """What has to be copied is in the catalog before it is begun, and what has not is not any more."""
        wiring, destination = self._wiring, self._destination
        lacking = wanted(wiring, self._server, destination, names)
        expected = {record.id for record in lacking.backups}
        # Where no source can be reached nobody knows what belongs there, so what was expected stays so.
        rows = wiring.catalog.replications.not_of_others(self._server, destination) if names else ()
        gone = [name for name in rows if name not in expected]
        self._report_lost(gone, dict(lacking.declined))
        wiring.catalog.replications.forget(destination, gone)
        wiring.catalog.replications.expect(
            destination, {record.id: record.stats.bytes_stored for record in lacking.backups}, wiring.clock()
        )
        return lacking

    def _report_lost(self, gone: Sequence[str], declined: Collection[str]) -> None:
        """Of those that are not expected any more: which were deleted before they came."""
        wiring, destination = self._wiring, self._destination
        records = {record.id: record for record in wiring.catalog.backups.by_ids(gone) if not record.foreign}
        lost = [
            name
            for name in gone
            if name not in declined
            and (
                name not in records
                or (records[name].state is BackupState.DELETED and not records[name].state_at(destination))
            )
        ]
        if lost:
            wiring.note(
                "replication-lost",
                Severity.ERROR,
                f"{len(lost)} backups were deleted before they could be copied to {destination}",
                server=self._server,
                subject=destination,
                job_id=self._run.job.id,
                detail=", ".join(lost),
                hint="if one is only marked as deleted, `backupd backups undelete ID` restores it, and backupd then "
                "copies it",
            )

    def _one(
        self, target: Destination, found: Sequence[Destination], record: BackupRecord, failed: dict[str, str]
    ) -> None:
        wiring, run = self._wiring, self._run
        line = above(record, wiring.catalog.backups.list(self._server))
        if broken := next((name for name in line if name in failed), None):
            raise RefusedError(f"it builds on {broken}, which could not be copied")
        holding = {copy.destination for copy in record.copies if copy.state == str(BackupState.COMPLETE)}
        order = Order(
            self._server,
            record.id,
            run.job.id,
            line,
            workers=worker_count(),
            pauses=self._pauses,
            fence=run.fence,
            tree_paths=self._paths(target),
        )
        copied = self._copied([one for one in found if one.name in holding], target, order)
        wiring.catalog.backups.add_copy(record.id, Copy(self._destination, str(BackupState.COMPLETE), wiring.clock()))
        wiring.catalog.replications.forget(self._destination, [record.id])
        if record.pinned:
            put_keep(target, self._server, record.id, wiring.clock())
        if copied is not None:
            self._done = replace(self._done, copied=(*self._done.copied, copied))

    def _copied(self, found: Sequence[Destination], target: Destination, order: Order) -> Copied | None:
        report = _Noting(self._wiring, self._run, order.backup_id, self._destination)

        def copy() -> Copied | None:
            return replicate(found, target, order, clock=self._wiring.clock, report=report, check=self._run.check)

        try:
            return copy()
        except BusyError:  # objects that somebody began to remove: once they are gone, they are sent again
            sweep_destination(self._wiring, target, wait=False)
            return copy()

    def _paths(self, target: Destination) -> TreePaths | None:
        """Names in trees, where a private key is at hand that opens them."""
        if self._wiring.settings.restore is None or as_tree(target) is None:
            return None
        unsealer = self._wiring.unsealer()

        def paths(header: Header) -> Sequence[tuple[str, str]] | None:
            try:  # the body has just been copied, and compared on its way
                return list(layout.tree_links(load_body(target, header, unsealer).entries))
            except KeyUnusableError:
                return None

        return paths

    def _fails(self, record: BackupRecord, error: BackupdError, failed: dict[str, str]) -> None:
        failed[record.id] = error.line
        self._done = replace(self._done, waiting=failed)
        self._put_off([record.id], error)

    def _all_wait(self, error: BackupdError) -> None:
        """The destination is out of reach: nothing is forgotten, though nobody can ask what is there."""
        rows = self._wiring.catalog.replications.of(self._server, self._destination)
        late = [row.backup_id for row in rows if row.backup_id not in self._done.waiting]
        self._put_off(late, error)
        self._done = replace(self._done, waiting={**self._done.waiting, **dict.fromkeys(late, error.line)})

    def _put_off(self, backups: Sequence[str], error: BackupdError) -> None:
        now = self._wiring.clock()
        rows = {row.backup_id: row for row in self._wiring.catalog.replications.of(self._server, self._destination)}
        for name in backups:
            attempts = rows[name].attempts if name in rows else 0
            self._wiring.catalog.replications.failing(
                name, self._destination, now, not_before=now + pause_after(attempts), message=error.line
            )

    def _keep(self, target: Destination) -> None:
        """Holds and keeps count at a destination by what is written there."""
        there = kept_at(target).holds
        for hold in self._wiring.catalog.holds.of(self._server, HoldKind.HOLD):
            if hold.server not in there:
                put_hold(target, hold)

    # -- binary logs

    def _logs(self, target: Destination, found: Sequence[Destination]) -> None:
        names = [source.name for source in found]
        first = wanted(self._wiring, self._server, self._destination, names).first_logs
        moved = 0

        def add(size: int) -> None:
            nonlocal moved
            moved += size
            self._run.report(Progress("replicate-binlogs", moved, note=f"to {self._destination}"))

        copies = copies_of(self._wiring, self._server, target, check=self._run.check, moved=add)
        self._done = replace(self._done, logs=copies.step(found, first))


class _Noting:
    """A report that is also written down, now and then."""

    def __init__(self, wiring: Wiring, run: JobRun, backup_id: str, destination: str) -> None:
        self._wiring, self._run, self._backup, self._destination = wiring, run, backup_id, destination
        self._next = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        self._run.report(progress)
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _NOTED
        try:
            self._wiring.catalog.replications.copying(
                self._backup, self._destination, progress.bytes_done, progress.bytes_total or 0, self._wiring.clock()
            )
        except CatalogError:
            return  # a report must not raise; the next one says it again, and the end of the copy asks the catalog


def pause_after(attempts: int) -> timedelta:
    """How long to wait after ``failures`` in a row, and this one."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * (1 << min(attempts, 10)))


def _is_there(target: Destination) -> bool:
    """Did a source fail, or one object, rather than the target as a whole?"""
    try:
        return target.is_initialised()
    except DestinationError:
        return False


def _report(wiring: Wiring, done: Replicated) -> None:
    """One event when it begins to fail, one when it is over."""
    failing, lost = (Key(kind, done.server, done.destination) for kind in (REPLICATION, LOST))
    error = done.trouble
    if error is None:
        well = f"{done.destination} has everything of {done.server} again"
        wiring.settle(looked={failing: well, lost: well})
        return
    what = f"{done.destination} is not up to date for {done.server}"
    if done.waiting:
        what = f"{len(done.waiting)} backups of {done.server} are not at {done.destination}"
    lines = [
        error.message,
        *([error.detail] if error.detail else []),
        *(f"{name}: {why}" for name, why in list(done.waiting.items())[:20]),
    ]
    wiring.alert(
        failing,
        Severity.ERROR,
        f"{what}: {error.message}",
        detail="\n".join(dict.fromkeys(lines)),
        hint=error.hint or "backupd retries with increasing intervals; other work continues meanwhile",
    )


def rate_text(copied: Copied) -> str:
    """``1.2 GiB in 5m 3s, 4.1 MiB/s``"""
    return (
        f"{format_size(copied.sent)} in {format_duration(copied.seconds)}, {format_size(copied.rate)}/s"
        if copied.sent
        else "nothing was missing"
    )


_LOOKED_AT = timedelta(days=14)

_LEAST = timedelta(hours=1)
"""Backups that were all taken within it say nothing about how many are to come."""


def needed_rate(records: Iterable[BackupRecord]) -> float | None:
    """New bytes a second that the backups of the last two weeks brought; None where there are too few of them."""
    found = sorted(records, key=lambda record: record.finished_at)
    found = [record for record in found if found[-1].finished_at - record.finished_at <= _LOOKED_AT]
    if not found or (length := found[-1].finished_at - found[0].finished_at) < _LEAST:
        return None
    return sum(record.stats.bytes_new for record in found[1:]) / length.total_seconds()


def report_speed(wiring: Wiring, server: str, destination: str, sent: int, seconds: float) -> None:
    """``sent`` bytes of backups were copied to ``destination`` in ``seconds``: one event when new backups bring more
    than that, and one when they do not any more. Copies of less than a minute are quick enough whatever their rate.
    Raises CatalogError."""
    needed = needed_rate(wiring.catalog.backups.list(server))
    if not sent or needed is None:
        return
    key, rate = Key(SLOW, server, destination), sent / max(seconds, 1e-9)
    if seconds <= LONG_SECONDS or rate >= needed:
        wiring.settle(looked={key: f"copies of {server} to {destination} keep up with its backups again"})
        return
    configured = wiring.settings.destinations.get(destination)
    limit = configured.max_upload if configured is not None else None
    brought = f"the backups of the last two weeks brought {format_size(needed)}/s"
    if limit is not None and rate >= limit * LIMITED:
        message = (
            f"max_upload of {destination} ({format_size(limit)}/s) is too low for the copies of {server}: {brought}"
        )
        first = f"raise max_upload of {destination}"
    else:
        message = (
            f"{destination} is too slow for {server}: the last copies took {format_size(sent)} in "
            f"{format_duration(seconds)} ({format_size(rate)}/s), and {brought}"
        )
        first = "check its connection"
    wiring.alert(
        key,
        Severity.WARNING,
        message,
        hint=f"it falls behind further with every backup: {first}, copy fewer of them there (retention of that "
        "destination), or take backups less often",
    )

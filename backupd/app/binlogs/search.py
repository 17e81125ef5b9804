"""The search of `backupd binlog search`: transactions in the archived binary logs of one server, by the tables that
they changed, by time and by GTID.

A segment that no destination gives is an error: a search gives first what the others hold, then it fails.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, TypedDict, Unpack

from backupd.app.binlogs.transactions import Indexes
from backupd.app.context.access import require_known
from backupd.app.context.wiring import Wiring
from backupd.model.binlog import Change, ChangeKind, Segment, SegmentRecord, Transaction
from backupd.model.errors import DamagedError, DestinationError, NotFoundError, UnknownNameError, UsageError
from backupd.model.text import format_time
from policies.document import suggestion

_BEGINNING = ("", 0, -1)


class TooLongError(UsageError):
    """A search was not over in time: less has to be searched."""

    problem_type = "search-too-long"


@dataclass(frozen=True, slots=True)
class Found:
    """A transaction and its position: in ``file`` of ``branch``, within ``segment``. ``changes``: those of its
    changes that were searched for; ``target``: what `backupd restore --to` takes to stop right before it."""

    transaction: Transaction
    file: str
    branch: str
    segment: Segment
    changes: tuple[Change, ...]
    target: str

    @property
    def cursor(self) -> str:
        """For ``search``, to go on after it."""
        return f"{self.branch}:{self.segment.number}:{self.transaction.start}"

    def as_json(self) -> dict[str, Any]:
        """As `binlog search --json` and REST give it; positions in bytes."""
        one = self.transaction
        return {
            "at": format_time(one.at),
            "precise": one.precise,
            "gtid": one.gtid,
            "file": self.file,
            "pos": one.start,
            "end": one.end,
            "branch": self.branch,
            "server_id": one.server_id,
            "changes": [
                {"schema": change.schema, "table": change.name, "kind": str(change.kind), "rows": change.rows}
                for change in one.changes
            ],
            "statement": one.statement or None,
            "state": one.state or None,
            "restore_before": self.target,
        }


@dataclass(frozen=True, slots=True)
class Wanted:
    """``tables``: patterns of ``schema.table`` with ``*`` and ``?``; without a dot, of a table in any schema."""

    tables: tuple[str, ...] = ()
    kinds: frozenset[ChangeKind] = frozenset()
    since: datetime | None = None
    until: datetime | None = None
    gtid: str | None = None
    beyond: tuple[str, int, int] = field(default=_BEGINNING)
    """A branch, and a position in it: nothing up to there."""

    def changes_of(self, one: Transaction) -> tuple[Change, ...] | None:
        """Those that are looked for; None for a transaction that is not."""
        if (self.since is not None and one.at < self.since) or (self.until is not None and one.at > self.until):
            return None
        if self.gtid is not None and one.gtid.lower() != self.gtid.lower():
            return None
        found = tuple(change for change in one.changes if self._is(change))
        return found if found or not (self.tables or self.kinds) else None

    def file(self, branch: str) -> int:
        """The number of the first file of ``branch`` that is looked at."""
        return self.beyond[1] if branch == self.beyond[0] else 0

    def first(self, record: SegmentRecord) -> int:
        """The first byte of its file that is looked at."""
        return self.beyond[2] + 1 if (record.key.branch, record.key.number) == self.beyond[:2] else 0

    def _is(self, change: Change) -> bool:
        if self.kinds and change.kind not in self.kinds:
            return False
        return not self.tables or any(
            fnmatchcase(f"{change.schema}.{change.name}" if "." in pattern else change.name, pattern)
            for pattern in self.tables
        )


class Query(TypedDict, total=False):
    """``tables``, ``kinds``, ``since``, ``until``, ``gtid``: see ``Wanted``. ``limit``: the most transactions;
    ``branch``: only this one; ``after``: the cursor of one that was found, only those behind it; ``seconds``: how long
    the search may take to the last of them."""

    tables: Sequence[str]
    kinds: Sequence[ChangeKind]
    since: datetime | None
    until: datetime | None
    gtid: str | None
    limit: int | None
    branch: str | None
    after: str | None
    seconds: float | None


def search(wiring: Wiring, server: str, **query: Unpack[Query]) -> Iterator[Found]:
    """Transactions in log order, the oldest branch first.

    Raises NotFoundError for a server or branch without binary logs, UsageError for what is no GTID and what is no
    cursor, TooLongError, ConfigurationError or KeyUnusableError without the private key, and after everything else
    DamagedError or DestinationError when some segments could not be read.
    """
    branch, after = query.get("branch"), query.get("after")
    require_known(wiring, server)
    known = [one.id for one in wiring.catalog.binlogs.branches(server)]
    if branch is not None and branch not in known:
        raise UnknownNameError(
            f"no binary log of branch {branch} of {server} is archived{suggestion(branch, known)}",
            hint=f"`backupd timeline {server}` lists the branches",
        )
    if not known:
        raise NotFoundError(
            f"no binary log of {server} is archived", hint=f"`backupd binlog status {server}` shows what is archived"
        )
    branches = [one for one in known if branch in (None, one)]
    beyond = _cursor(after, branches) if after is not None else _BEGINNING
    branches = branches[branches.index(beyond[0]) :] if beyond[0] else branches
    wanted = Wanted(
        tuple(query.get("tables", ())),
        frozenset(query.get("kinds", ())),
        query.get("since"),
        query.get("until"),
        query.get("gtid"),
        beyond,
    )
    return _found(wiring, server, branches, known[-1], wanted, query.get("limit"), query.get("seconds"))


def _cursor(after: str, branches: Sequence[str]) -> tuple[str, int, int]:
    branch, _, position = after.partition(":")
    number, _, start = position.partition(":")
    if branch not in branches or not all(
        word.isascii() and word.isdigit() and len(word) < 16 for word in (number, start)
    ):
        raise UsageError(
            f"{after[:80]!r} is not a cursor", hint="take it from the previous page, or begin again without one"
        )
    return branch, int(number), int(start)


def _found(
    wiring: Wiring,
    server: str,
    branches: Sequence[str],
    current: str,
    wanted: Wanted,
    limit: int | None,
    seconds: float | None,
) -> Iterator[Found]:
    indexes = Indexes(wiring)
    failures: list[DamagedError | DestinationError] = []
    count = 0
    deadline = None if seconds is None else time.monotonic() + seconds

    def in_time(record: SegmentRecord) -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise _too_long(record, count, seconds)

    for record, first in _segments(wiring, server, branches, wanted):
        in_time(record)
        try:
            for one in indexes.transactions(record):
                in_time(record)
                changes = wanted.changes_of(one) if one.start >= first else None
                if changes is None:
                    continue
                yield Found(
                    one, record.segment.file, record.key.branch, record.segment, changes, _target(one, record, current)
                )
                count += 1
                if count == limit:
                    return
        except (DamagedError, DestinationError) as error:
            failures.append(error)
    if failures:
        message = f"{len(failures)} pieces of the archive could not be read: transactions may be missing in this list"
        lines = [error.line for error in failures]
        if any(isinstance(error, DamagedError) for error in failures):
            raise DamagedError(message, lines, hint=failures[0].hint)
        raise DestinationError(message, detail="\n".join(lines), hint=failures[0].hint)


def _too_long(record: SegmentRecord, count: int, seconds: float | None) -> TooLongError:
    segment = record.segment
    begun = f", which begins at {format_time(segment.first_at)}" if segment.first_at is not None else ""
    return TooLongError(
        f"the search did not finish within {seconds:g} seconds",
        detail=f"it had reached {segment.file} of branch {record.key.branch}{begun}, and had found {count} "
        "transactions",
        hint="narrow it with since and until; the command line has no time limit: backupd binlog search "
        f"{segment.server}",
    )


def _target(one: Transaction, record: SegmentRecord, current: str) -> str:
    target = f"before-gtid:{one.gtid}" if one.gtid else f"{record.segment.file}:{one.start}"
    return target if record.key.branch == current else f"{target}@{record.key.branch}"


def _segments(
    wiring: Wiring, server: str, branches: Sequence[str], wanted: Wanted
) -> Iterator[tuple[SegmentRecord, int]]:
    """Each with the first of its bytes that no segment before it has covered."""
    binlogs = wiring.catalog.binlogs
    if wanted.gtid is not None:
        try:
            held = binlogs.holding_gtid(server, wanted.gtid)
        except ValueError as error:
            raise UsageError(f"{wanted.gtid!r} is no GTID of {server}: {error}") from error
        yield from (
            (record, wanted.first(record))
            for record in held
            if record.key.branch in branches
            and record.segment.transactions
            and record.key.number >= wanted.file(record.key.branch)
        )
        return
    for name in branches:
        found = binlogs.each_segment(
            server, name, from_position=(wanted.file(name), 0), since=wanted.since, until=wanted.until
        )
        for _number, of_file in groupby(found, key=lambda record: record.key.number):
            reached = 0
            for record in of_file:
                if record.key.end > reached:
                    if record.segment.transactions and record.key.end > (first := wanted.first(record)):
                        yield record, max(reached, first)
                    reached = record.key.end

"""What a plan knows of archived binary logs: branches, runs and gaps as values, and a resolver for what only the index
of the transactions tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from backupd.model.binlog import Branch, Gap, Run, SegmentKey, Stop
from backupd.recovery.runs import Place
from backupd.recovery.windows import RouteLeg


@dataclass(frozen=True, slots=True)
class Material:
    """What a leg replays. ``segments`` in log order, without a hole, from the first byte of the file that holds the
    start. ``size`` in bytes and ``transactions`` between start and stop, at most; ``repeated``: how many of them are
    executed at the start already, by their GTIDs; ``unended``: how many files before the last one have no segment that
    ends them. ``remarks`` of the segments; ``by_statements``: how many of them hold data changes that were written as
    statements."""

    segments: tuple[SegmentKey, ...]
    size: int
    transactions: int
    server_ids: tuple[int, ...]
    repeated: int = 0
    unended: int = 0
    remarks: tuple[str, ...] = ()
    by_statements: int = 0


class TargetResolver(Protocol):
    """Answers about one server's archive, from the catalog's rows and the sealed indexes. Places are of the branch that
    is named, ends excluded.

    Every method raises DestinationError, DamagedError or KeyUnusableError where an index cannot be read.
    """

    def stop_for_time(self, branch: str, start: Place, end: Place, moment: datetime, since: datetime) -> Stop | None:
        """Before the first transaction, in log order, in ``[start, end)`` that committed later than ``moment``; None
        when none did. ``since``: everything there committed later than this, by our clock; it tells false times (see
        ``recovery.stamps``). ``at`` of the Stop is None when it is at ``start``."""

    def stop_for_gtid(self, branch: str, gtid: str, *, before: bool) -> Stop | None:
        """Right behind the very transaction that ``gtid`` names, whatever numbers came before it; of a set the first
        place where all of it is executed. With ``before`` the place where the transaction begins. None when the
        branch's own files do not hold it, and do not begin with exactly that executed either."""

    def later_before(self, branch: str, place: Place, moment: datetime, since: datetime) -> Stop | None:
        """Before the first transaction, in log order, in front of ``place`` that carries a time later than ``moment``;
        of those behind the last one that carries ``since`` or an earlier time. None where none does."""

    def stop_for_position(self, branch: str, number: int, pos: int) -> Stop | None:
        """That place, with what is executed there. None when it is not archived. Raises RefusedError when it lies
        inside a transaction, naming where that begins and ends."""

    def doubts(self, branch: str, start: Place, stop: Place, end: Place, moment: datetime) -> tuple[str, ...]:
        """In words, of a stop for a time: transactions behind ``stop`` of which the log does not tell that they were
        later (stamps of whole seconds, or earlier ones: a clock that went back), and those before it with a later
        stamp."""

    def repeats(self, leg: RouteLeg) -> bool:
        """Does the first transaction of the leg's files that is executed at its start lie in them? False where their
        index cannot be read here."""

    def material(self, leg: RouteLeg, stop: Stop) -> Material:
        """What lies between the leg's start and ``stop``, through its spans."""


@dataclass(frozen=True, slots=True)
class History:
    """Everything that is archived of one server. ``resolver`` is asked about this server only."""

    branches: Sequence[Branch]
    runs: Sequence[Run]
    gaps: Sequence[Gap]
    resolver: TargetResolver

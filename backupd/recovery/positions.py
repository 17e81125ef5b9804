"""Where in a binary log what was committed after a moment begins, and what is executed at a position there. Pure.

Times: some are false. A session may stamp what it commits with any time (SET timestamp), and a statement that ran for
long carries the time at which it began. What the log's order contradicts is not believed; what then lies right at the
moment's place may belong to either side of it and is left out, so that a restore to the moment before a mistake never
holds the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from backupd.model.gtid import MariadbGtids, MysqlGtids, plus

AHEAD = timedelta(days=1)
"""More than clocks and time zones of servers are ever wrong by."""
BACK = timedelta(hours=1)
"""So far may a time lie behind one that is in front of it in the log: longer does hardly a statement run."""
APART = timedelta(minutes=10)
"""Times that are less apart may be turned round by statements that ran for long."""
_TIMES = 10

_T = TypeVar("_T")


@dataclass
class Cut(Generic[_T]):
    """Give it what is in the log, in the log's order. ``since``: everything there was committed later than this, by
    another host's clock. ``first``: where what was committed after ``moment`` begins, None: nowhere so far; ``last``:
    the latest time in front of it.

    A time that lies ahead is false where as many times behind it go on from what was in front of it; for one after
    ``moment`` it takes ten times as many, since a clock that was set back and sessions that overtake each other must
    not bring a mistake back.
    """

    moment: datetime
    since: datetime
    first: _T | None = None
    last: datetime | None = None
    _later: int = 0
    _earliest: datetime | None = None
    _against: int = 0
    _low: datetime | None = None
    _jumped: int = 0
    _behind: int = 0

    @property
    def floor(self) -> datetime:
        """An earlier time is not believed here."""
        least = self.since - AHEAD
        return least if self.last is None else max(least, self.last - BACK)

    @property
    def is_cut(self) -> bool:
        """Does something that is believed lie behind the moment?"""
        return self._later > 0

    def take(self, item: _T, at: datetime, latest: datetime) -> None:
        """``latest``: when it was archived, or it is now: a day after that nothing can have been committed."""
        if self._goes_on_below(at):
            self.believe(at)
        elif at > latest + AHEAD or at < self.floor:
            if latest > self.moment:
                self.first = self.first or item
            elif not self._later:
                self.first = None  # archived by then
        elif at > self.moment:
            self.first = self.first or item
            self.skip(1, at)
        elif not self._later:
            self._believe_next(at)
        else:
            self.take_earlier(1, at, at)

    def take_earlier(self, count: int, first: datetime, last: datetime) -> None:
        """As many behind something later, with times from ``first`` to ``last``, none of which is after the moment."""
        if (self.last is None or first >= self.last) and self._earliest is not None and self._earliest - last > APART:
            self._against += count
            if self._against >= _TIMES * self._later:
                self.believe(last)

    def believe(self, at: datetime | None) -> None:
        """Everything so far belongs before the moment, and ``at`` is the latest time of it."""
        self.first, self._earliest, self._later, self._against = None, None, 0, 0
        self.last, self._low = at, None

    def skip(self, count: int, earliest: datetime) -> None:
        """As many carry a later time than the moment."""
        self._later += count
        self._earliest = earliest if self._earliest is None else min(self._earliest, earliest)

    def _believe_next(self, at: datetime) -> None:
        if self.last is not None and at > self.last + BACK:
            self._low, self._jumped, self._behind = self.last, 0, 0
        self._jumped += 1
        self.first, self.last = None, at if self.last is None else max(self.last, at)

    def _goes_on_below(self, at: datetime) -> bool:
        """Does it show, with others, that the time by which ``last`` went on by more than an hour was false?"""
        if self._later or self._low is None or not self._low <= at < self.floor:
            return False
        self._behind += 1
        return self._behind >= self._jumped


def state_after(before: str, gtids: Iterable[str], *, mariadb: bool) -> str:
    """Everything that is executed when ``gtids`` were, in this order, after ``before``."""
    found = [gtid for gtid in gtids if gtid]
    if not found:
        return before
    if mariadb:
        last = {gtid.partition("-")[0]: gtid for gtid in found}
        return plus(before, ",".join(last.values()), mariadb=True)
    return plus(before, str(MysqlGtids.parse(",".join(found))), mariadb=False)


def holder(executed: str, *, mariadb: bool) -> Callable[[str], bool]:
    """Tells whether a transaction is among ``executed``."""
    if mariadb:
        state = MariadbGtids.parse(executed)
        return lambda gtid: bool(gtid) and state.covers(MariadbGtids.parse(gtid))
    known = MysqlGtids.parse(executed)
    return lambda gtid: bool(gtid) and known.covers(MysqlGtids.parse(gtid))


def in_order(before: str, after: str, transactions: int) -> bool:
    """MariaDB: do the numbers of the domains grow by one with each of the ``transactions`` between two states? Where
    they do not, a number can be anywhere: servers that are not in strict mode take what they are given."""
    known = MariadbGtids.parse(before).last
    grown = sum(number - known.get(domain, (0, 0))[1] for domain, (_, number) in MariadbGtids.parse(after).last.items())
    return grown == transactions


class Missing:
    """What of ``wanted`` (MySQL) is not executed yet, one transaction after the other."""

    def __init__(self, before: str, wanted: str) -> None:
        missing = MysqlGtids.parse(wanted).minus(MysqlGtids.parse(before))
        self._runs, self._left = missing.runs, missing.count

    @property
    def nothing(self) -> bool:
        """Is all that was wanted executed by now?"""
        return not self._left

    def executed(self, gtid: str) -> None:
        """Note that this transaction was executed; one that was not missing, or has no GTID, changes nothing."""
        if not gtid:
            return
        source, _, number = gtid.lower().rpartition(":")
        if any(first <= int(number) <= last for first, last in self._runs.get(source, ())):
            self._left -= 1

"""What is executed at a place in a binary log, one transaction after the other. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from backupd.model.server.gtid import MariadbGtids, MysqlGtids, plus


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
        return not self._left

    def executed(self, gtid: str) -> None:
        if not gtid:
            return
        source, _, number = gtid.lower().rpartition(":")
        if any(first <= int(number) <= last for first, last in self._runs.get(source, ())):
            self._left -= 1

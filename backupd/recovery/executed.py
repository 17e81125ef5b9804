"""What is executed at a place in a binary log, one transaction after the other. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from backupd.model.gtid import MariadbGtids, MysqlGtids, plus


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


class Missing:
    """What of ``wanted`` is not executed yet, one transaction after the other.

    Of MariaDB the very transactions that are named: another server's may have the same number, on another branch.
    """

    def __init__(self, before: str, wanted: str, *, mariadb: bool) -> None:
        self._named: dict[int, tuple[int, int]] | None = None
        self._runs: dict[str, tuple[tuple[int, int], ...]] = {}
        self._left = 0
        if mariadb:
            done = MariadbGtids.parse(before).last
            asked = MariadbGtids.parse(wanted).last
            self._named = {domain: gtid for domain, gtid in asked.items()
                           if domain not in done or (done[domain] != gtid and done[domain][1] <= gtid[1])}
        else:
            missing = MysqlGtids.parse(wanted).minus(MysqlGtids.parse(before))
            self._runs, self._left = dict(missing.runs), missing.count

    @property
    def nothing(self) -> bool:
        return not self._left if self._named is None else not self._named

    def executed(self, gtid: str) -> None:
        if not gtid:
            return
        if self._named is not None:
            for domain, done in MariadbGtids.parse(gtid).last.items():
                if self._named.get(domain) == done:
                    del self._named[domain]
            return
        source, _, number = gtid.lower().rpartition(":")
        if any(first <= int(number) <= last for first, last in self._runs.get(source, ())):
            self._left -= 1



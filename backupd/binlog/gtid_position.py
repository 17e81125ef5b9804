"""Where in the spool a server had executed exactly some GTIDs: the position of a backup of another member."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from backupd.binlog.spool_files import LastOf, Spool
from backupd.binlog.spool_repair import read
from backupd.model.binlog import FIRST_EVENT, MariadbGtids, MysqlGtids, Transaction, covers
from backupd.model.server_facts import Position

_LOOKS_BACK = 4
"""At most so many of the newest files are read."""


def position_of(spool: Spool, gtids: str) -> Position | None:
    """Where exactly ``gtids`` are executed, in the newest files of the spool; None where that is in none of them, or
    other transactions are executed there. Raises OSError."""
    branches = spool.branches()
    if not branches or not gtids:
        return None
    branch = branches[-1]
    for file in reversed([file for file in spool.files() if file.branch == branch.id][-_LOOKS_BACK:]):
        passed: list[Transaction] = []
        found = read(file.path, passed.append)
        before = branch.executed(found.gtids_before)
        at = _reached(before, gtids, passed, mariadb=branch.flavour == "mariadb")
        if at is not None:
            return Position(file.name, at or FIRST_EVENT, gtids)
        if before and not covers(before, gtids, mariadb=branch.flavour == "mariadb"):
            return None  # it is in no earlier file
    return None


def parted_in(gone: LastOf, after: str, has: Callable[[str], bool], *, mariadb: bool) -> Position | None:
    """The last position that the archive shares with another server (``has``), where that is in a file that has left
    the spool; ``after``: what was executed at its end. None where both share all of it, or it is not known."""
    passed = gone.transactions
    at = next((index for index, one in enumerate(passed) if not has(one.gtid)), 0)
    before = before_all(after, passed[at:], passed[:at], mariadb=mariadb) if at else None
    return Position(gone.name, passed[at].start, before) if before else None


def before_all(after: str, dropped: Sequence[Transaction], kept: Sequence[Transaction], *, mariadb: bool) -> str | None:
    """What was executed before ``dropped``, with which ``after`` was; ``kept``: those right before them. None where
    that is not known. Pure."""
    if not all(one.gtid for one in dropped):
        return None
    if not mariadb:
        return str(MysqlGtids.parse(after).minus(MysqlGtids.parse(",".join(one.gtid for one in dropped))))
    state, last = dict(MariadbGtids.parse(after).last), dict[int, tuple[int, int]]()
    for one in kept:
        if one.gtid:
            _moved(last, one.gtid)
    for domain in {domain for one in dropped for domain in MariadbGtids.parse(one.gtid).last}:
        if domain not in last:
            return None
        state[domain] = last[domain]
    return str(MariadbGtids(state))


def _reached(before: str, wanted: str, passed: Sequence[Transaction], *, mariadb: bool) -> int | None:
    """The end of the transaction with which exactly ``wanted`` is executed, where ``before`` was at the beginning; 0:
    at the beginning. None where it never is."""
    if mariadb:
        goal, state = dict(MariadbGtids.parse(wanted).last), dict(MariadbGtids.parse(before).last)
        ends = [0]
        if state != goal:
            ends = [one.end for one in passed if _moved(state, one.gtid) == goal]
        return next(iter(ends), None)
    whole, begun = MysqlGtids.parse(wanted), MysqlGtids.parse(before)
    missing = whole.minus(begun).count
    needed = passed[:missing]
    exact = whole.covers(begun) and len(needed) == missing and all(_is_of(whole, one.gtid) for one in needed)
    if not exact:
        return None
    return needed[-1].end if needed else 0


def _moved(state: dict[int, tuple[int, int]], gtid: str) -> dict[int, tuple[int, int]]:
    state |= MariadbGtids.parse(gtid).last
    return state


def _is_of(whole: MysqlGtids, gtid: str) -> bool:
    return bool(gtid) and whole.covers(MysqlGtids.parse(gtid))

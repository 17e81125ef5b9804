"""Is another MariaDB server's binary log that of a replica of the one before?

Its GTIDs alone do not show that: a domain, a server_id and a number, which two servers that know nothing of each other
give as well. (Those of MySQL hold the uuid of the server that gave them.) So transactions that both have by their GTIDs
are compared: a replica that keeps its log (log_slave_updates) writes the same tables and the same commit times.

Measured with MariaDB 10.11.19, its replicas with and without parallel threads: the time is the same, but of a
transaction of several statements, for which the replica writes the time of the last one, not of COMMIT; so it may be
earlier there, and is never later. XA transactions and rows of statements are as in the source's log.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from backupd.binlog.history.continuity import first_covered, holder
from backupd.binlog.history.evidence import head_of
from backupd.binlog.spool.readable import read
from backupd.engine.logclient.source import SourceState
from backupd.model.binlog import Transaction

_FILES = 4
"""At most so many of the other server's files are copied, from the first that begins within what is here backwards."""
_COMMITTING = timedelta(seconds=2)
"""Between the last statement and COMMIT, of the last transaction that both have: where two histories that began alike
have parted, their times are further from each other."""


def history_of(path: Path, has: Callable[[str], bool], *, mariadb: bool) -> tuple[str, Transaction | None]:
    """What is archived up to the end of a file, as ``continuity.holder`` reads it; the first transaction that the
    server (``has``) lacks."""
    head = head_of(path)
    members = {tuple(member.split("-")[:2]): member for member in (head.gtids if head else ())}
    unshared: list[Transaction] = []

    def look(transaction: Transaction) -> None:
        if mariadb and transaction.gtid:
            members[tuple(transaction.gtid.split("-")[:2])] = transaction.gtid
        if not unshared and not has(transaction.gtid):
            unshared.append(transaction)

    found = read(path, look)
    return (",".join(members.values()) if mariadb else found.gtids_after), unshared[0] if unshared else None


def first_shared(ours: Path, state: SourceState, previous: Callable[[str], str | None]) -> int | None:
    """Number of the newest file of another MariaDB server that begins within ``ours``, by its GTIDs; None without one.
    ``previous``: as of ``continuity``. Raises OSError, and what ``previous`` raises."""
    history, _unshared = history_of(ours, holder(state.history, mariadb=True), mariadb=True)
    return first_covered(state, history, previous)


def is_kin(ours: Path, state: SourceState, number: int, fetch: Callable[[str], Path]) -> bool:
    """Does the other server's log (``state``) hold transactions of the file ``ours``, and are all of these the same?
    ``number``: its newest file that begins within ``ours``; ``fetch``: copies one. Raises OSError, and what ``fetch``
    raises."""
    here: dict[str, Transaction] = {}
    there: list[Transaction] = []

    def keep(one: Transaction) -> None:
        if one.gtid:
            here[one.gtid] = one

    def find(one: Transaction) -> None:
        if one.gtid in here:
            there.append(one)

    read(ours, keep)
    for log in [log for log in reversed(state.logs) if log.number <= number][:_FILES]:
        read(fetch(log.name), find)
        if there:
            break  # the ones before it are older
    pairs = [(here[one.gtid], one) for one in there]
    return (
        bool(pairs)
        and all(_is_same(*pair) for pair in pairs)
        and any(_second(mine) == _second(other) for mine, other in pairs)
        and _second(pairs[-1][0]) - _second(pairs[-1][1]) <= _COMMITTING
    )


def _is_same(here: Transaction, there: Transaction) -> bool:
    return here.server_id == there.server_id and _tables(here) == _tables(there) and _second(there) <= _second(here)


def _tables(one: Transaction) -> set[tuple[str, str]]:
    return {(change.schema, change.name) for change in one.changes}


def _second(one: Transaction) -> datetime:
    return one.at.replace(microsecond=0)

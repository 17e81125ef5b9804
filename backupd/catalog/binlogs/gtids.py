"""In which segment of a branch a transaction lies, by the sets of executed ones at both ends of each segment.

What is executed only grows along a branch, so the file is found by halving. Only where a server of MariaDB lets the
numbers of a domain go back (not in strict mode) every segment has to be looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, func, select

from backupd.catalog.base.log_tables import binlog_segments
from backupd.model.server.gtid import covers
from backupd.model.server.logs import SegmentKey

_S = binlog_segments.c
_BATCH = 5_000
_WHAT = (_S.number, _S.start_pos, _S.end_pos, _S.gtids_before, _S.gtids_after)


def place_of_gtid(
    connection: Connection,
    branch: int,
    branch_id: str,
    gtid: str,
    *,
    mariadb: bool,
) -> SegmentKey | None:
    """The longest segment that ``gtid`` lies in. Raises ValueError for what is no GTID."""
    covers("", gtid, mariadb=mariadb)
    first, last = (connection.scalar(select(end(_S.number)).where(_S.branch == branch)) for end in (func.min, func.max))
    if first is None or last is None:
        return None
    low, high = first, last
    while low < high:
        middle = (low + high) // 2
        row = _furthest(connection, branch, middle)
        if row is None or covers(row.gtids_after, gtid, mariadb=mariadb):
            high = middle
        else:
            low = row.number + 1
    found = _furthest(connection, branch, low)
    if found is not None and (key := _within(_file(connection, branch, found.number), gtid, branch_id, mariadb)):
        return key
    if mariadb:
        everything = select(*_WHAT).where(_S.branch == branch).order_by(_S.number, _S.start_pos)
        return _within(connection.execute(everything.execution_options(yield_per=_BATCH)), gtid, branch_id, mariadb)
    return None


def _furthest(connection: Connection, branch: int, number: int) -> Any:
    """Of the first file from ``number`` on, what ends last."""
    following = select(func.min(_S.number)).where(_S.branch == branch, _S.number >= number).scalar_subquery()
    return connection.execute(
        select(*_WHAT).where(_S.branch == branch, _S.number == following).order_by(_S.end_pos.desc()).limit(1)
    ).first()


def _file(connection: Connection, branch: int, number: int) -> Iterable[Any]:
    return connection.execute(select(*_WHAT).where(_S.branch == branch, _S.number == number)).all()


def _within(rows: Iterable[Any], gtid: str, branch_id: str, mariadb: bool) -> SegmentKey | None:
    found = [
        SegmentKey(branch_id, row.number, row.start_pos, row.end_pos)
        for row in rows
        if covers(row.gtids_after, gtid, mariadb=mariadb) and not covers(row.gtids_before, gtid, mariadb=mariadb)
    ]
    return max(found, key=lambda key: (key.number, key.end - key.start), default=None)

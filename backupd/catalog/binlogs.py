"""Archived binary logs: branches, segments and their copies, runs, gaps, and how far each destination has come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Select, Text, cast, delete, exists, func, insert, select, update

from backupd.catalog.database import Rows
from backupd.catalog.row_mapping import row_of, write_row
from backupd.catalog.tables import binlogs as binlogruns
from backupd.catalog.tables.binlogs import (
    binlog_branches,
    binlog_copies,
    binlog_gaps,
    binlog_segments,
    binlog_streams,
    branch_from,
    branch_row,
    copy_of,
    same_piece,
    segment_columns,
    segment_of,
)
from backupd.catalog.tables.changes import changed
from backupd.model.binlog import (
    Branch,
    CopyState,
    Ending,
    FilePosition,
    Gap,
    Run,
    Segment,
    SegmentKey,
    SegmentRecord,
    covers,
)
from backupd.model.errors import NotFoundError

_BATCH = 5_000


COMPLETE, DAMAGED = "complete", "damaged"

_S, _C = binlog_segments.c, binlog_copies.c


class Binlogs(Rows):
    """Binary logs.

    Runs are kept up to date in the transaction that changes segments. "Log order" is by file number, then start, the
    longer of two segments with the same start first.
    """

    # -- branches

    def add_branch(self, branch: Branch) -> None:
        """What was known of the same branch gives way."""
        with self._database.write() as connection:
            write_row(connection, binlog_branches, branch_row(branch), key=("server", "id"))
            changed(connection, branch.server)

    def branches(self, server: str) -> tuple[Branch, ...]:
        """Oldest first."""
        query = (
            select(binlog_branches)
            .where(binlog_branches.c.server == server)
            .order_by(binlog_branches.c.noticed_at, binlog_branches.c.id)
        )
        with self._database.read() as connection:
            return tuple(map(branch_from, connection.execute(query).mappings()))

    def servers(self) -> tuple[str, ...]:
        """Every server that has a branch, also those that are no longer configured."""
        return tuple(self._scalars(select(binlog_branches.c.server).distinct().order_by(binlog_branches.c.server)))

    # -- segments

    def digest(self, server: str, key: SegmentKey) -> str:
        """SHA-256 of the plain bytes of a segment, "" where it is not known."""
        query = (
            select(_S.sha256)
            .join(binlog_branches, binlog_branches.c.number == _S.branch)
            .where(
                binlog_branches.c.server == server,
                binlog_branches.c.id == key.branch,
                _S.number == key.number,
                _S.start_pos == key.start,
                _S.end_pos == key.end,
            )
        )
        return self._scalar(query) or ""

    def in_pieces(self, server: str, branch: str) -> frozenset[int]:
        """The numbers of the files of which more than one segment is known."""
        query = (
            select(_S.number)
            .join(binlog_branches, binlog_branches.c.number == _S.branch)
            .where(binlog_branches.c.server == server, binlog_branches.c.id == branch)
            .group_by(_S.number)
            .having(func.count() > 1)
        )
        return frozenset(self._scalars(query))

    def add_segment(self, segment: Segment, destination: str, stored: int, at: datetime) -> None:
        """Record that ``destination`` holds the segment in ``stored`` sealed bytes; the same again changes nothing but
        the copy. A piece whose file turns out to end with it becomes the whole of it, wherever it is stored. Raises
        NotFoundError when the branch was never added."""
        self.add_segments([(segment, stored)], destination, at)

    def add_segments(self, found: Iterable[tuple[Segment, int]], destination: str, at: datetime) -> None:
        """The same for several, all or none: each with its sealed bytes."""
        with self._database.write() as connection:
            for server, group in sorted(_by_server(found).items()):
                _in_turn(connection, server)
                before = binlogruns.starts(connection, server)
                repaired = [one for one, stored in group if _add(connection, one, destination, stored, at)]
                # A run that goes on is followed by itself.
                if repaired or binlogruns.starts(connection, server) != before:
                    changed(connection, server)

    def drop_segments(
        self, server: str, keys: Iterable[SegmentKey], destination: str, *, stored_by: datetime | None = None
    ) -> tuple[SegmentKey, ...]:
        """They are not at ``destination`` any more; a segment without any copy is forgotten. Unknown ones are passed
        over, and with ``stored_by`` those that were stored there later. Gives those whose copy was forgotten."""
        dropped: list[SegmentKey] = []
        with self._database.write() as connection:
            _in_turn(connection, server)
            for number, found in _by_branch(connection, server, keys).items():
                whole = {key for key in found if _is_whole(connection, number, key)}
                here = _C.destination == destination
                if stored_by is not None:
                    here &= _C.stored_at <= stored_by
                gone = [
                    key
                    for key in found
                    if connection.execute(delete(binlog_copies).where(_is_copy(number, key), here)).rowcount
                ]
                for key in gone:
                    connection.execute(
                        delete(binlog_segments).where(_is(number, key), ~exists().where(_is_copy(number, key)))
                    )
                binlogruns.removed(connection, number, whole.intersection(gone), destination)
                dropped += gone
            if dropped:
                changed(connection, server)
        return tuple(dropped)

    def mark_damaged(self, server: str, key: SegmentKey, destination: str) -> None:
        """The copy is not what was stored: no run there holds it any more. Raises NotFoundError."""
        with self._database.write() as connection:
            _in_turn(connection, server)
            number = _branch(connection, server, key.branch)
            if _spoil(connection, number, key, destination) and _is_whole(connection, number, key):
                binlogruns.removed(connection, number, [key], destination)
            changed(connection, server)

    def mark_verified(self, server: str, keys: Iterable[SegmentKey], destination: str, at: datetime) -> None:
        """Every byte of these copies was read and is as it was stored. Unknown ones are passed over."""
        with self._database.write() as connection:
            _in_turn(connection, server)
            for number, found in _by_branch(connection, server, keys).items():
                for key in found:
                    here = _is_copy(number, key) & (_C.destination == destination)
                    was = connection.scalar(select(_C.state).where(here))
                    connection.execute(update(binlog_copies).where(here).values(state=COMPLETE, verified_at=at))
                    if was == DAMAGED:
                        (record,) = _records(connection, server, select(binlog_segments).where(_is(number, key)))
                        binlogruns.added(
                            connection, number, record.segment, destination, record.destinations[destination].stored
                        )
                        changed(connection, server, loses=False)

    def segments(
        self,
        server: str,
        branch: str,
        *,
        from_position: FilePosition | None = None,
        to_position: FilePosition | None = None,
    ) -> tuple[SegmentRecord, ...]:
        """In log order, those that hold something of ``[from_position, to_position)``: pieces, and whole files beside
        them. An unknown branch has none."""
        with self._database.read() as connection:
            query = _select(connection, server, branch, from_position, to_position)
            return tuple(_records(connection, server, query)) if query is not None else ()

    def each_segment(
        self,
        server: str,
        branch: str,
        *,
        from_position: FilePosition | None = None,
        to_position: FilePosition | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Iterator[SegmentRecord]:
        """The same one by one, however many there are; of those in which something may have committed between ``since``
        and ``until``. Several short transactions: what is added meanwhile after the position reached is seen, too."""
        position = from_position
        while True:
            with self._database.read() as connection:
                query = _select(connection, server, branch, position, to_position)
                if query is None:
                    return
                if since is not None:
                    query = query.where(_S.last_at >= since)
                if until is not None:
                    query = query.where(_S.first_at <= until)
                found = list(_records(connection, server, query.limit(_BATCH)))
            # A batch ends with a file, so that nothing of it is given twice.
            last = found[-1].key.number if len(found) == _BATCH else None
            whole = [record for record in found if record.key.number != last]
            if last is not None and not whole:
                raise AssertionError(f"{_BATCH} segments of one file")
            yield from whole
            if last is None:
                return
            position = (last, 0)

    def remarks(self, server: str, branch: str, first: int, last: int) -> frozenset[str]:
        """Of all segments of files ``first`` to ``last``, without reading them one by one."""
        words = cast(_S.remarks, Text)
        with self._database.read() as connection:
            files = (_S.branch == _known_branch(connection, server, branch), _S.number >= first, _S.number <= last)
            found = connection.scalars(select(words).where(*files, words != "[]").distinct()).all()
        return frozenset(word for text in found for word in json.loads(text))

    def stored_bytes(self, server: str, branch: str, destination: str, first: int, last: int) -> int:
        """Sealed bytes at ``destination`` of files ``first`` to ``last``, pieces beside whole files counted too."""
        with self._database.read() as connection:
            number = _known_branch(connection, server, branch)
            files = (_C.branch == number, _C.number >= first, _C.number <= last)
            return int(connection.scalar(select(func.sum(_C.stored)).where(*files, _C.destination == destination)) or 0)

    def holding(self, server: str, branch: str, number: int, pos: int) -> SegmentRecord | None:
        """The segment that holds the byte at ``pos``, the whole file before a piece; where ``pos`` is the end of all
        there is of the file, the one that ends there."""
        with self._database.read() as connection:
            query = _select(connection, server, branch, (number, max(pos - 1, 0)), (number, pos + 1))
            found = [] if query is None else list(_records(connection, server, query))
        inside = [record for record in found if record.key.start <= pos < record.key.end]
        ending = [record for record in found if record.key.end == pos]
        return max(inside or ending, key=lambda record: record.segment.size, default=None)

    def holding_gtid(self, server: str, gtid: str) -> tuple[SegmentRecord, ...]:
        """Of each branch the segment that holds the transaction, by the executed sets at both ends of each segment.

        Several branches may have one: ids repeat after a restore. Raises ValueError for what is no GTID.
        """
        with self._database.read() as connection:
            found: list[SegmentRecord] = []
            for row in connection.execute(
                select(binlog_branches).where(binlog_branches.c.server == server).order_by(binlog_branches.c.number)
            ).mappings():
                branch = branch_from(row)
                key = segment_of_gtid(connection, row["number"], branch.id, gtid, mariadb=branch.flavour == "mariadb")
                if key is not None:
                    query = select(binlog_segments).where(_is(row["number"], key))
                    found += _records(connection, server, query)
            return tuple(found)

    # -- runs, confirmed positions, gaps

    def runs(self, server: str, destination: str | None = None) -> tuple[Run, ...]:
        """Oldest branch first, then by destination, in log order."""
        with self._database.read() as connection:
            return binlogruns.read(connection, server, destination)

    def any_at(self, destination: str) -> bool:
        """Are binary logs known there, of whichever server?"""
        return bool(self._scalar(select(binlogruns.any_at(destination))))

    def confirm(self, server: str, destination: str, branch: str, position: FilePosition, at: datetime) -> None:
        """Everything that the server had committed by ``at`` (its clock and ours) is at ``destination``: ``position``
        was the end of its log then. Where nothing is stored yet, or what is stored does not reach it (any more), that
        means nothing. Raises NotFoundError for an unknown branch."""
        with self._database.write() as connection:
            if not binlogruns.confirm(connection, _branch(connection, server, branch), destination, position, at):
                changed(connection, server)

    def add_gap(self, gap: Gap) -> None:
        """Replaces what was known of a gap after the same position, but for when it was noticed."""
        with self._database.write() as connection:
            write_row(connection, binlog_gaps, row_of(binlog_gaps, gap), once=("noticed_at",))
            changed(connection, gap.server)

    def remove_gap(self, gap: Gap) -> None:
        """What was missing was found. Quiet when it is gone already."""
        row = row_of(binlog_gaps, gap)
        this = (key == row[key.name] for key in binlog_gaps.primary_key.columns)
        with self._database.write() as connection:
            if connection.execute(delete(binlog_gaps).where(*this)).rowcount:
                changed(connection, gap.server)

    def gaps(self, server: str) -> tuple[Gap, ...]:
        """By branch, in the order in which they were noticed."""
        query = (
            select(binlog_gaps)
            .where(binlog_gaps.c.server == server)
            .order_by(binlog_gaps.c.branch, binlog_gaps.c.noticed_at, binlog_gaps.c.after_file, binlog_gaps.c.after_pos)
        )
        return self._records(Gap, query)

    # -- the stream's own state

    def stream_state(self, server: str) -> tuple[Mapping[str, Any], datetime] | None:
        """The status that the streaming process recorded last, and when; None when it never did."""
        rows = self._rows(select(binlog_streams).where(binlog_streams.c.server == server))
        return (rows[0].status, rows[0].updated_at) if rows else None

    def set_stream_state(self, server: str, status: Mapping[str, Any], at: datetime) -> None:
        """Record the status of the stream of ``server``; it replaces the former one."""
        self._put(binlog_streams, {"server": server, "status": dict(status), "updated_at": at})


def _by_server(found: Iterable[tuple[Segment, int]]) -> dict[str, list[tuple[Segment, int]]]:
    named: dict[str, list[tuple[Segment, int]]] = {}
    for segment, stored in found:
        named.setdefault(segment.server, []).append((segment, stored))
    return named


def _in_turn(connection: Connection, server: str) -> None:
    """Until the transaction ends nobody else writes about logs of this server: a stream, a copy to another destination
    and `verify` may at once, and each folds runs by what it sees. SQLite has one writer."""
    if connection.dialect.name == "postgresql":
        own = select(binlog_branches.c.number).where(binlog_branches.c.server == server)
        connection.execute(own.order_by(binlog_branches.c.number).with_for_update()).all()


def _add(connection: Connection, segment: Segment, destination: str, stored: int, at: datetime) -> bool:
    """Does it more than go on with what is there? It does where it replaces a damaged copy, and after a hole."""
    number = _branch(connection, segment.server, segment.branch)
    same = _is(number, segment.key)
    ending = connection.scalar(select(_S.ending).where(same))
    if ending is None:
        connection.execute(insert(binlog_segments).values(**segment_columns(number, segment)))
    elif ending == Ending.OPEN and segment.is_final:
        connection.execute(update(binlog_segments).where(same).values(**segment_columns(number, segment)))
        for name, size in connection.execute(
            select(_C.destination, _C.stored).where(
                _is_copy(number, segment.key), _C.destination != destination, _C.state == COMPLETE
            )
        ).all():
            binlogruns.added(connection, number, segment, name, size)
    here = _is_copy(number, segment.key) & (_C.destination == destination)
    known = connection.scalar(select(_C.state).where(here))
    values = {"state": COMPLETE, "stored": stored, "stored_at": at, "verified_at": None}
    if known is None:
        connection.execute(
            insert(binlog_copies).values(**_key_columns(number, segment.key), destination=destination, **values)
        )
    else:
        connection.execute(update(binlog_copies).where(here).values(**values))
    if known != COMPLETE or ending == Ending.OPEN:
        binlogruns.added(connection, number, segment, destination, stored)
    return known != COMPLETE and (known is not None or not _goes_on(connection, number, segment, destination))


def _goes_on(connection: Connection, branch: int, segment: Segment, destination: str) -> bool:
    """Is what the log holds right before ``segment`` at ``destination``?"""
    if segment.start:
        before = (_C.number == segment.number) & (_C.end_pos == segment.start)
    else:
        before = (_C.number == segment.number - 1) & (_S.ending != str(Ending.OPEN))
    its = (_S.branch == _C.branch) & (_S.number == _C.number) & (_S.start_pos == _C.start_pos)
    here = (_C.branch == branch) & (_C.destination == destination) & (_C.state == COMPLETE)
    found = select(_C.number).where(here, before, its, _S.end_pos == _C.end_pos).limit(1)
    return connection.scalar(found) is not None


def _branch(connection: Connection, server: str, branch: str) -> int:
    number = _known_branch(connection, server, branch)
    if number is None:
        raise NotFoundError(
            f"the catalog knows no branch {branch} of {server}",
            hint="`backupd fsck --repair` imports it from the destinations",
        )
    return number


def _known_branch(connection: Connection, server: str, branch: str) -> int | None:
    return connection.scalar(
        select(binlog_branches.c.number).where(binlog_branches.c.server == server, binlog_branches.c.id == branch)
    )


def _by_branch(connection: Connection, server: str, keys: Iterable[SegmentKey]) -> dict[int, list[SegmentKey]]:
    named: dict[str, list[SegmentKey]] = {}
    for key in keys:
        named.setdefault(key.branch, []).append(key)
    found = {_known_branch(connection, server, branch): group for branch, group in named.items()}
    return {number: group for number, group in found.items() if number is not None}


def _key_columns(branch: int, key: SegmentKey) -> dict[str, Any]:
    return {"branch": branch, "number": key.number, "start_pos": key.start, "end_pos": key.end}


def _is(branch: int, key: SegmentKey) -> Any:
    return (_S.branch == branch) & (_S.number == key.number) & (_S.start_pos == key.start) & (_S.end_pos == key.end)


def _is_copy(branch: int, key: SegmentKey) -> Any:
    return (_C.branch == branch) & (_C.number == key.number) & (_C.start_pos == key.start) & (_C.end_pos == key.end)


def _is_whole(connection: Connection, branch: int, key: SegmentKey) -> bool:
    """Is it the whole of a file?"""
    return key.start == 0 and bool(connection.scalar(select(exists().where(_is(branch, key), _S.ending != "open"))))


def _spoil(connection: Connection, branch: int, key: SegmentKey, destination: str) -> bool:
    """Was it good until now? Raises NotFoundError."""
    here = _is_copy(branch, key) & (_C.destination == destination)
    before = connection.scalar(select(_C.state).where(here))
    if before is None:
        raise NotFoundError(
            f"the catalog knows no copy of {key} at {destination}",
            hint="`backupd fsck` compares the catalog with the destinations",
        )
    connection.execute(update(binlog_copies).where(here).values(state=DAMAGED))
    return bool(before != DAMAGED)


def _select(
    connection: Connection,
    server: str,
    branch: str,
    from_position: FilePosition | None,
    to_position: FilePosition | None,
) -> Select[Any] | None:
    number = _known_branch(connection, server, branch)
    if number is None:
        return None
    query = select(binlog_segments).where(_S.branch == number).order_by(_S.number, _S.start_pos, _S.end_pos.desc())
    if from_position is not None:
        query = query.where(
            _S.number >= from_position[0], (_S.number > from_position[0]) | (_S.end_pos > from_position[1])
        )
    if to_position is not None:
        query = query.where(_S.number <= to_position[0], (_S.number < to_position[0]) | (_S.start_pos < to_position[1]))
    return query


def _records(connection: Connection, server: str, query: Select[Any]) -> Iterator[SegmentRecord]:
    """Rows of segments in their order, with all their copies."""
    wanted = query.subquery()
    rows = connection.execute(
        select(
            wanted,
            binlog_branches.c.id.label("branch_id"),
            _C.destination,
            _C.state,
            _C.stored,
            _C.stored_at,
            _C.verified_at,
        )
        .join(binlog_branches, binlog_branches.c.number == wanted.c.branch)
        .outerjoin(binlog_copies, same_piece(wanted.c, _C))
        .order_by(wanted.c.number, wanted.c.start_pos, wanted.c.end_pos.desc(), _C.destination)
    ).mappings()
    segment: Segment | None = None
    piece: tuple[Any, ...] = ()
    copies: dict[str, CopyState] = {}
    for row in rows:
        found = row["branch_id"], row["number"], row["start_pos"], row["end_pos"]
        if found != piece:  # a row for each copy: the segment is made of the first
            if segment is not None:
                yield _record(segment, copies)
            segment, piece, copies = segment_of(row, server, row["branch_id"]), found, {}
        if row["destination"] is not None:
            copies[row["destination"]] = copy_of(row)
    if segment is not None:
        yield _record(segment, copies)


def _record(segment: Segment, copies: Mapping[str, CopyState]) -> SegmentRecord:
    return SegmentRecord(segment, copies, max((copy.stored for copy in copies.values()), default=0))


_WHAT = (_S.number, _S.start_pos, _S.end_pos, _S.gtids_before, _S.gtids_after)


def segment_of_gtid(
    connection: Connection,
    branch: int,
    branch_id: str,
    gtid: str,
    *,
    mariadb: bool,
) -> SegmentKey | None:
    """The longest segment that holds ``gtid``, by the executed sets at both ends of each segment. Raises ValueError
    for what is no GTID.

    What is executed only grows along a branch, so the file is found by halving. Only where a server of MariaDB lets the
    numbers of a domain go back (not in strict mode) every segment has to be looked at.
    """
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

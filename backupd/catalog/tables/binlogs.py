"""The tables of binary logs, and their rows as values of the model.

Runs of segments, kept up to date within the transaction of the caller.

The table holds runs of whole files: a file that follows the last one of a run extends its row, whatever its length.
Pieces of files are few, and go again once their file is whole; they are folded in by whoever reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    ForeignKeyConstraint,
    Index,
    Integer,
    Select,
    String,
    Table,
    Text,
    and_,
    cast,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    text,
)
from sqlalchemy.engine import RowMapping

from backupd.catalog.row_mapping import FreeText, UtcTime, metadata, record_of, row_of
from backupd.model.binlog import FIRST_EVENT, Branch, CopyState, Ending, Run, Segment, SegmentKey
from backupd.model.server_facts import Position
from backupd.recovery.runs import first_of, follows, last_of, linked, run_of

binlog_branches = Table(
    "binlog_branches",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("server", String(64), nullable=False),
    Column("id", String(64), nullable=False),
    Column("noticed_at", UtcTime, nullable=False),
    Column("reason", String(32), nullable=False),
    Column("server_uuid", FreeText, nullable=False),
    Column("flavour", String(32), nullable=False),
    Column("basename", FreeText, nullable=False),
    Column("first_number", BigInteger, nullable=False),
    Column("since", UtcTime),
    Column("parent", String(64)),
    Column("fork", JSON(none_as_null=True)),
    Column("names_go_on", Boolean, nullable=False),
    Column("note", FreeText, nullable=False),
    Column("baseline", FreeText, nullable=False),
    Index(None, "server", "id", unique=True),
)
"""``number`` replaces (server, id) in the tables below, which have very many rows."""
_ENTRY = "entry"


PIECE = ("branch", "number", "start_pos", "end_pos")
"""Columns that name a segment."""


def _piece() -> tuple[Column[Any], ...]:
    return tuple(Column(name, BigInteger, primary_key=True, autoincrement=False) for name in PIECE)


def same_piece(one: Any, other: Any) -> ColumnElement[bool]:
    """Do the columns of both name the same segment?"""
    return and_(*(one[name] == other[name] for name in PIECE))


LOOSE = text("(binlog_segments.ending = 'open' OR binlog_segments.start_pos > 0)")
"""Segments that are not a whole file. Queries contain this very text: only then the database uses the index of those
segments alone."""


binlog_segments = Table(
    "binlog_segments",
    metadata,
    *_piece(),
    Column("file", FreeText, nullable=False),
    Column("ending", String(16), nullable=False),
    Column("gtids_before", FreeText, nullable=False),
    Column("gtids_after", FreeText, nullable=False),
    Column("transactions", BigInteger, nullable=False),
    Column("first_at", UtcTime),
    Column("last_at", UtcTime),
    Column("precise", Boolean, nullable=False),
    Column("server_ids", JSON, nullable=False),
    Column("flavour", String(32), nullable=False),
    Column("server_version", FreeText, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("remarks", JSON, nullable=False),
    ForeignKeyConstraint(["branch"], ["binlog_branches.number"]),
    Index(None, "branch", "number", "start_pos", "last_at"),
    Index(
        "ix_binlog_segments_loose",
        "branch",
        "number",
        "start_pos",
        # the same for PostgreSQL, as its migration says; said here, it would import that dialect for every command
        sqlite_where=text("ending = 'open' OR start_pos > 0"),
    ),
)


binlog_copies = Table(
    "binlog_copies",
    metadata,
    *_piece(),
    Column("destination", String(64), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("stored", BigInteger, nullable=False),
    Column("stored_at", UtcTime, nullable=False),
    Column("verified_at", UtcTime),
    ForeignKeyConstraint(PIECE, [f"binlog_segments.{name}" for name in PIECE], ondelete="CASCADE"),
)


binlog_runs = Table(
    "binlog_runs",
    metadata,
    Column("branch", BigInteger, primary_key=True, autoincrement=False),
    Column("destination", String(64), primary_key=True),
    Column("first_number", BigInteger, primary_key=True, autoincrement=False),
    Column("last_number", BigInteger, nullable=False),
    Column("last_pos", BigInteger, nullable=False),
    Column("gtids_before", FreeText, nullable=False),
    Column("gtids_after", FreeText, nullable=False),
    Column("first_at", UtcTime),
    Column("last_at", UtcTime),
    Column("size", BigInteger, nullable=False),
    Column("stored", BigInteger, nullable=False),
    Column("segments", BigInteger, nullable=False),
    Column("transactions", BigInteger, nullable=False),
    Column("remarks", JSON, nullable=False),
    Column("ending", String(16), nullable=False),
    ForeignKeyConstraint(["branch"], ["binlog_branches.number"]),
)
"""Whole files only: the few pieces of files that grow are folded in when somebody reads."""


binlog_confirmed = Table(
    "binlog_confirmed",
    metadata,
    Column("branch", BigInteger, primary_key=True, autoincrement=False),
    Column("destination", String(64), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("pos", BigInteger, nullable=False),
    Column("at", UtcTime, nullable=False),
    ForeignKeyConstraint(["branch"], ["binlog_branches.number"]),
)


binlog_gaps = Table(
    "binlog_gaps",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("branch", String(64), primary_key=True),
    Column("destination", String(64), primary_key=True),
    Column("after_file", FreeText, primary_key=True),
    Column("after_pos", BigInteger, primary_key=True, autoincrement=False),
    Column("after_gtid", FreeText, nullable=False),
    Column("before", JSON(none_as_null=True)),
    Column("from_at", UtcTime),
    Column("to_at", UtcTime),
    Column("reason", FreeText, nullable=False),
    Column("noticed_at", UtcTime, nullable=False),
)


binlog_streams = Table(
    "binlog_streams",
    metadata,
    Column("server", String(64), primary_key=True),
    Column("status", JSON, nullable=False),
    Column("updated_at", UtcTime, nullable=False),
)


def branch_row(branch: Branch) -> dict[str, Any]:
    """The row of a branch: its entry is kept with its fork, with which it is the same place."""
    row = row_of(binlog_branches, branch)
    return row if branch.entry is None else row | {"fork": {**(row["fork"] or {}), _ENTRY: branch.entry.as_json()}}


def branch_from(row: RowMapping) -> Branch:
    """What ``branch_row`` made a row of."""
    entry = (row["fork"] or {}).get(_ENTRY)
    return record_of(Branch, row, entry=Position.from_json(entry) if entry is not None else None)


def segment_columns(branch: int, segment: Segment) -> dict[str, Any]:
    """The columns of ``binlog_segments``; ``branch`` is the branch's number."""
    return row_of(binlog_segments, segment, branch=branch, start_pos=segment.start, end_pos=segment.end)


def segment_of(row: RowMapping, server: str, branch: str) -> Segment:
    """The segment in a row of ``binlog_segments`` joined with its branch."""
    return record_of(Segment, row, server=server, branch=branch, start=row["start_pos"], end=row["end_pos"])


def copy_of(row: RowMapping) -> CopyState:
    """The state of a copy, in a row of ``binlog_copies``."""
    return CopyState(row["state"], row["stored"], row["stored_at"], row["verified_at"])


def run_from(row: RowMapping, server: str, branch: str) -> Run:
    """The run in a row of ``binlog_runs``."""
    return record_of(Run, row, server=server, branch=branch, first_pos=0, confirmed_at=None)


_S, _C, _R, _F = binlog_segments.c, binlog_copies.c, binlog_runs.c, binlog_confirmed.c
_COPY = same_piece(_S, _C) & (_C.state == "complete")
_BATCH = 5_000
_OPEN = Ending.OPEN
_WHOLE = (_S.start_pos == 0, _S.ending != "open")


def added(connection: Connection, branch: int, segment: Segment, destination: str, stored: int) -> None:
    """A copy has become complete."""
    if segment.start or not segment.is_final:
        return
    if _part(connection, branch, destination, {segment.number}):
        _join_longest(connection, branch, destination, segment.number)  # it is there in another length already
    else:
        _join(connection, branch, run_of(segment, destination, stored))


def removed(connection: Connection, branch: int, keys: Iterable[SegmentKey], destination: str) -> None:
    """Copies of whole files are gone or damaged; their rows say so already."""
    for number in _part(connection, branch, destination, {key.number for key in keys}):
        _join_longest(connection, branch, destination, number)


def read(connection: Connection, server: str, destination: str | None = None) -> tuple[Run, ...]:
    """Oldest branch first, then by destination, in log order."""
    found: list[Run] = []
    columns = binlog_branches.c
    branches = select(columns.number, columns.id).where(columns.server == server)
    for number, branch in connection.execute(branches.order_by(columns.noticed_at, columns.id)).all():
        parts = _parts(connection, number, server, branch, destination)
        for name in sorted(parts):
            found += _dated(folded(parts[name]), _confirmed(connection, number, name))
    return tuple(found)


def any_at(destination: str) -> ColumnElement[bool]:
    """Is a run known there, of whichever server?"""
    loose = _loose().where(_C.destination == destination)
    return or_(exists().where(_R.destination == destination), loose.exists())


def starts(connection: Connection, server: str) -> frozenset[tuple[int, str, int]]:
    """Branch, destination and first file of each run of whole files: the same as long as runs only go on."""
    own = select(_R.branch, _R.destination, _R.first_number).join(
        binlog_branches, binlog_branches.c.number == _R.branch
    )
    return frozenset(map(tuple, connection.execute(own.where(binlog_branches.c.server == server))))


def confirm(connection: Connection, branch: int, destination: str, position: tuple[int, int], at: datetime) -> bool:
    """One row for each run. A position in the head of the file after the last one stored counts as the end of what is
    stored: a head holds no transaction. Any other position outside the runs is ignored: what it confirms is not at the
    destination (any more). Did nothing but the moment of one run move on?"""
    runs = folded(_parts(connection, branch, "", "", destination).get(destination, ()))
    if not runs:
        return True
    end = last_of(runs[-1])
    if (end[0] + 1, 0) <= position <= (end[0] + 1, FIRST_EVENT):
        position = end
    run = next((one for one in runs if first_of(one) <= position <= last_of(one)), None)
    if run is None:
        return True
    number, pos = position
    here = (_F.branch == branch, _F.destination == destination, _F.number >= run.first_number, _F.number <= number)
    before = [(row.number, row.pos) for row in connection.execute(select(_F.number, _F.pos).where(*here))]
    connection.execute(delete(binlog_confirmed).where(*here))
    connection.execute(
        insert(binlog_confirmed).values(branch=branch, destination=destination, number=number, pos=pos, at=at)
    )
    return len(before) == 1 and first_of(run) < before[0]


# -- what the table holds


def _part(connection: Connection, branch: int, destination: str, numbers: Iterable[int]) -> list[int]:
    """Take files out of the runs that they are in; gives those that were in any."""
    left = sorted(numbers)
    found: list[int] = []
    while left:
        before = (_R.branch == branch, _R.destination == destination, _R.first_number <= left[0])
        query = select(binlog_runs).where(*before).order_by(_R.first_number.desc()).limit(1)
        row = connection.execute(query).mappings().first()
        if row is None or row["last_number"] < left[0]:
            del left[0]
            continue
        inside = [number for number in left if number <= row["last_number"]]
        _forget(connection, row)
        begin = row["first_number"]
        for number in (*inside, row["last_number"] + 1):
            if begin < number:
                _fold(connection, branch, destination, begin, number - 1)
            begin = number + 1
        found += inside
        del left[: len(inside)]
    return found


def _join_longest(connection: Connection, branch: int, destination: str, number: int) -> None:
    here = (*_WHOLE, _S.branch == branch, _C.destination == destination, _S.number == number)
    whole = select(binlog_segments, _C.stored).join(binlog_copies, _COPY).where(*here)
    row = connection.execute(whole.order_by(_S.end_pos.desc()).limit(1)).mappings().first()
    if row is not None:
        _join(connection, branch, run_of(segment_of(row, "", ""), destination, row["stored"]))


def _join(connection: Connection, branch: int, run: Run) -> None:
    """Write the run of one file, as one with those before and after it that it goes on from and to."""
    here = (_R.branch == branch, _R.destination == run.destination)
    beside = (_R.last_number == run.first_number - 1) | (_R.first_number == run.last_number + 1)
    for row in connection.execute(select(binlog_runs).where(*here, beside)).mappings().all():
        other = run_from(row, run.server, run.branch)
        one, two = (other, run) if other.first_number < run.first_number else (run, other)
        if follows(one, two):
            run = linked(one, two)
            _forget(connection, row)
    connection.execute(insert(binlog_runs).values(row_of(binlog_runs, run, branch=branch)))


def _forget(connection: Connection, row: RowMapping) -> None:
    connection.execute(
        delete(binlog_runs).where(
            _R.branch == row["branch"], _R.destination == row["destination"], _R.first_number == row["first_number"]
        )
    )


def _fold(connection: Connection, branch: int, destination: str, first: int, last: int) -> None:
    """Write the run of all files from ``first`` to ``last``, each of which is there."""
    here = (*_WHOLE, _S.branch == branch, _C.destination == destination, _S.number >= first, _S.number <= last)
    source = binlog_segments.join(binlog_copies, _COPY)
    sums = connection.execute(
        select(
            func.count(),
            func.min(_S.first_at),
            func.max(_S.last_at),
            func.sum(_S.end_pos),
            func.sum(_C.stored),
            func.sum(_S.transactions),
        )
        .select_from(source)
        .where(*here)
    ).one()
    if sums[0] != last - first + 1:  # a file twice, in two lengths: the longer one counts
        for run in _refolded(connection, here):
            connection.execute(insert(binlog_runs).values(row_of(binlog_runs, run, branch=branch)))
        return
    words = cast(_S.remarks, Text)
    remarks = connection.execute(
        select(words, func.min(_S.number))
        .select_from(source)
        .where(*here, words != "[]")
        .group_by(words)
        .order_by(func.min(_S.number))
    ).all()
    begin, end = (
        connection.execute(select(binlog_segments).select_from(source).where(*here, _S.number == number))
        .mappings()
        .one()
        for number in (first, last)
    )
    connection.execute(
        insert(binlog_runs).values(
            branch=branch,
            destination=destination,
            first_number=first,
            last_number=last,
            last_pos=end["end_pos"],
            gtids_before=begin["gtids_before"],
            gtids_after=end["gtids_after"],
            first_at=sums[1],
            last_at=sums[2],
            size=int(sums[3]),
            stored=int(sums[4]),
            segments=sums[0],
            transactions=int(sums[5]),
            remarks=list(dict.fromkeys(word for text, _number in remarks for word in json.loads(text))),
            ending=end["ending"],
        )
    )


def _refolded(connection: Connection, here: Sequence[ColumnElement[bool]]) -> Iterator[Run]:
    rows = connection.execute(
        select(binlog_segments, _C.destination, _C.stored)
        .join(binlog_copies, _COPY)
        .where(*here)
        .order_by(_S.number, _S.end_pos.desc())
        .execution_options(yield_per=_BATCH)
    ).mappings()
    run: Run | None = None
    for row in rows:
        part = run_of(segment_of(row, "", ""), row["destination"], row["stored"])
        if run is None or part.first_number != run.last_number:
            if run is not None and not follows(run, part):
                yield run
                run = None
            run = part if run is None else linked(run, part)
    if run is not None:
        yield run


# -- runs of whole files and pieces together


def folded(parts: Iterable[Run]) -> list[Run]:
    """The runs of parts of one branch at one destination; a part within a longer one counts with that."""
    found: list[Run] = []
    for part in sorted(parts, key=lambda run: (*first_of(run), -run.last_number, -run.last_pos, run.ending is _OPEN)):
        if found and last_of(part) <= last_of(found[-1]) and (part.ending is _OPEN or found[-1].ending is not _OPEN):
            continue
        if found and follows(found[-1], part):
            found[-1] = linked(found[-1], part)
        else:
            found.append(part)
    return found


def _parts(
    connection: Connection, branch: int, server: str, name: str, destination: str | None
) -> dict[str, list[Run]]:
    """By destination."""
    whole = select(binlog_runs).where(_R.branch == branch).order_by(_R.first_number)
    loose = _loose(_S.branch == branch)
    if destination is not None:
        whole, loose = whole.where(_R.destination == destination), loose.where(_C.destination == destination)
    found: dict[str, list[Run]] = {}
    for row in connection.execute(whole).mappings():
        found.setdefault(row["destination"], []).append(run_from(row, server, name))
    for row in connection.execute(loose).mappings():
        run = run_of(segment_of(row, server, name), row["destination"], row["stored"])
        found.setdefault(row["destination"], []).append(run)
    return found


def _loose(*where: ColumnElement[bool]) -> Select[Any]:
    """Pieces of files with their complete copies. They are looked up first, and not in the order that a planner may
    choose: they are few among very many."""
    few = select(binlog_segments).where(*where, LOOSE).cte("few").prefix_with("MATERIALIZED")
    copied = same_piece(few.c, _C) & (_C.state == "complete")
    return select(few, _C.destination, _C.stored).join(binlog_copies, copied)


def _confirmed(connection: Connection, branch: int, destination: str) -> list[tuple[int, int, datetime]]:
    here = (_F.branch == branch, _F.destination == destination)
    return [(row.number, row.pos, row.at) for row in connection.execute(select(binlog_confirmed).where(*here))]


def _dated(runs: Iterable[Run], confirmed: Sequence[tuple[int, int, datetime]]) -> Iterator[Run]:
    for run in runs:
        at = max(
            (
                at
                for number, pos, at in confirmed
                if (run.first_number, run.first_pos) <= (number, pos) <= (run.last_number, run.last_pos)
            ),
            default=None,
        )
        yield replace(run, confirmed_at=at)

"""Questions asked of restored data: does every table open, do the policy's statements hold, is it what the
witness saw."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TypeVar

from backupd.engine.client import Connection, Session
from backupd.engine.tables import TableName, list_tables
from backupd.engine.witness import checksums, object_counts
from backupd.model.errors import ServerError
from backupd.model.progress import Progress, Report
from backupd.model.proof import Check, Witness
from backupd.model.server import Position
from restore.planner import same_position

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
CHECK_TABLES = "every table opens (CHECK TABLE)"
CHECKSUMS = "table checksums equal the witness"
OBJECTS = "views, triggers, routines, events and users as the witness counted"
_NAMED = 20

_Answer = TypeVar("_Answer")


def examine(
    connection: Connection,
    *,
    statements: Sequence[str],
    target: datetime,
    witness: Witness | None,
    position: Position,
    workers: int,
    report: Report,
) -> tuple[list[Check], int]:
    """Every check there is; gives the answers and how many tables were compared with the witness."""
    compared_checks, compared = compare_with_witness(connection, witness, position, workers=workers, report=report)
    tables = check_tables(connection, workers=workers, report=report)
    return [tables, *check_sql(connection, statements, target=target), *compared_checks], compared


def check_tables(connection: Connection, *, workers: int, report: Report) -> Check:
    """CHECK TABLE on every table of every schema, the server's own included. Raises ServerError when it goes
    away."""
    with connection.connect() as session:
        tables = [
            t.name
            for t in list_tables(session)
            if t.name.schema not in ("information_schema", "performance_schema") and not t.is_sequence
        ]
    found = [problem for problem in _spread(connection, tables, _check_one, workers, report) if problem]
    wrong = sorted(text for is_error, text in found if is_error)
    remarks = sorted(text for is_error, text in found if not is_error)
    if wrong:
        return Check(CHECK_TABLES, FAILED, f"{len(wrong)} of {len(tables)} tables: {_joined(wrong)}")
    return Check(CHECK_TABLES, PASSED, f"{len(tables)} tables" + (f"; {_joined(remarks)}" if remarks else ""))


def _check_one(session: Session, table: TableName) -> tuple[bool, str] | None:
    """(is it an error, what the server says), None when there is nothing to say."""
    rows = session.query(f"CHECK TABLE {table}")
    said = [(str(kind).lower(), str(text)) for _table, _op, kind, text in rows]
    # "note" is an engine that cannot check, "upgrade" a table of an old version: so it was on the source,
    # too.
    errors = [text for kind, text in said if kind == "error" and "upgrade" not in text.lower()]
    if errors:
        return True, f"{table}: {errors[0]}"
    remarks = [text for kind, text in said if kind in ("warning", "error")]
    return (False, f"{table}: {remarks[0]}") if remarks else None


def check_sql(connection: Connection, statements: Sequence[str], *, target: datetime) -> list[Check]:
    """Each statement passes when the first column of its first row is true (neither 0, empty nor NULL).

    ``{target}`` in a statement stands for the restored moment, put in as a quoted DATETIME literal in UTC;
    the session's time zone is UTC. Statements run one by one in a read-only transaction.
    """
    checks: list[Check] = []
    for statement in statements:
        name = " ".join(statement.split())
        try:
            with connection.connect() as session:
                session.execute("SET time_zone = '+00:00'")
                session.execute("START TRANSACTION READ ONLY")
                rows = session.query(fill_in(statement, target))
        except ServerError as error:
            checks.append(Check(name, FAILED, error.detail or error.message))
            continue
        value = rows[0][0] if rows and rows[0] else None
        checks.append(
            Check(
                name,
                PASSED if _is_true(value) else FAILED,
                f"answered {value!r}" if rows else "answered no row",
            )
        )
    return checks


def fill_in(statement: str, target: datetime) -> str:
    """``statement`` with ``{target}``, also where somebody put quotes around it, as a DATETIME literal in
    UTC."""
    moment = target.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")
    literal = f"'{moment}'"
    for written in ("'{target}'", '"{target}"', "{target}"):
        statement = statement.replace(written, literal)
    return statement


def _is_true(value: object) -> bool:
    if isinstance(value, str | bytes):
        return value not in ("", "0", b"", b"0")
    return bool(value)


def compare_with_witness(
    connection: Connection, witness: Witness | None, position: Position, *, workers: int, report: Report
) -> tuple[list[Check], int]:
    """The checks, and how many tables were compared with the witness of the source.

    Compared only where the witness saw the very position that was restored; else it says so and gives both.
    """
    if witness is None:
        return [Check(CHECKSUMS, SKIPPED, "no witness was taken of this server")], 0
    if not same_position(witness.position, position):
        return [
            Check(
                CHECKSUMS,
                SKIPPED,
                f"the witness was taken at {_place(witness.position)}, restored is {_place(position)}",
            )
        ], 0
    wanted = sorted(TableName.parse(name) for name in witness.checksums)

    def look(session: Session, table: TableName) -> str | None:
        answer = checksums(session, [table])
        name = str(table)
        if name in answer.failed:
            return f"{name}: {answer.failed[name]}"
        expected = witness.checksums[name]
        return None if answer.values[name] == expected else f"{name}: {answer.values[name]}, not {expected}"

    wrong = sorted(p for p in _spread(connection, wanted, look, workers, report) if p)
    compared = len(wanted)
    detail = (
        f"{len(wrong)} of {compared} tables differ: {_joined(wrong)}"
        if wrong
        else f"{compared} tables at {_place(position)}"
    )
    if witness.uncovered:
        detail += f"; not covered by the witness: {len(witness.uncovered)} tables"
    outcome = FAILED if wrong else PASSED if compared else SKIPPED
    return [Check(CHECKSUMS, outcome, detail), _compare_objects(connection, witness)], compared


def _compare_objects(connection: Connection, witness: Witness) -> Check:
    with connection.connect() as session:
        found = object_counts(session)
    kinds = sorted(set(found) & set(witness.objects))
    wrong = [
        f"{found[kind]} {kind}, not {witness.objects[kind]}" for kind in kinds if found[kind] != witness.objects[kind]
    ]
    if wrong:
        return Check(OBJECTS, FAILED, ", ".join(wrong))
    return Check(OBJECTS, PASSED if kinds else SKIPPED, ", ".join(f"{found[kind]} {kind}" for kind in kinds))


def _spread(
    connection: Connection,
    tables: Sequence[TableName],
    look: Callable[[Session, TableName], _Answer],
    workers: int,
    report: Report,
) -> list[_Answer]:
    """Ask about each table, on as many connections as there are workers."""
    waiting: queue.SimpleQueue[TableName] = queue.SimpleQueue()
    for table in tables:
        waiting.put(table)
    lock = threading.Lock()
    done = 0

    def work() -> Iterator[_Answer]:
        nonlocal done
        with connection.connect() as session:
            while True:
                try:
                    table = waiting.get_nowait()
                except queue.Empty:
                    return
                yield look(session, table)
                with lock:
                    done += 1
                    number = done
                report(Progress("verify", files_done=number, files_total=len(tables), note=str(table)))

    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="check") as pool:
        shares = [pool.submit(lambda: list(work())) for _ in range(max(1, min(workers, len(tables))))]
        return [answer for share in shares for answer in share.result()]


def _place(position: Position) -> str:
    if not position.file:
        return "an unknown position (no binary log)"
    return f"{position.file}:{position.pos}" + (f" (GTID {position.gtid})" if position.gtid else "")


def _joined(lines: Sequence[str]) -> str:
    return "; ".join(lines[:_NAMED]) + (f"; and {len(lines) - _NAMED} more" if len(lines) > _NAMED else "")

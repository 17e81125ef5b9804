"""Questions asked of restored data: does every table open, do the policy's statements hold, is it what the
witness saw; and what a test restore proved by them (``verdict``).
"""

from __future__ import annotations

import itertools
import math
import queue
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal
from typing import TypeVar

from backupd.engine.server.launch import OWN_ACCOUNT
from backupd.engine.server.probe import read_dialect
from backupd.engine.server.snapshot import SEQUENCE, TABLE, digests, list_objects
from backupd.engine.sql.client import Connection, Session, error_code
from backupd.engine.sql.tables import list_tables
from backupd.engine.witness import checksums, object_counts
from backupd.model import proof as proofs
from backupd.model.errors import ServerError
from backupd.model.job import Progress
from backupd.model.proof import Check, Tally, Witness
from backupd.model.server_facts import Position
from backupd.model.table import TableName, quote_name
from backupd.process.run_context import RunContext
from restore.planning.starting_backup import same_position

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
CHECK_TABLES = "every table opens (CHECK TABLE)"
CHECKSUMS = "table checksums equal the witness"
LISTED = "every table that the backup lists is known to the server"
DEFINITIONS = "everything the witness names is there, defined as it was"
OBJECTS = "views, triggers, routines, events and users as the witness counted"
CHECK_SECONDS = 300.0
"""The most that one statement of a policy may take."""
_TOO_LATE = (1969, 3024)
"""ER_STATEMENT_TIMEOUT of MariaDB, ER_QUERY_TIMEOUT of MySQL."""
_NUMBER = re.compile(r"\s*[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?\s*")
_NAMED = 20
_WORKERS = 2
"""Where nobody says how many."""
_OWN = quote_name(OWN_ACCOUNT, "localhost")
_LISTED = ("engine ", "a sequence", "not reached within", "the server's history list")
"""How the reasons of old witnesses begin that say nothing against the table."""

_Answer = TypeVar("_Answer")


def examine(
    connection: Connection,
    context: RunContext,
    *,
    statements: Sequence[str],
    target: datetime,
    witness: Witness | None,
    position: Position,
    compared: tuple[Sequence[Check], Tally] | None = None,
) -> tuple[list[Check], Tally]:
    """Every check there is; gives the answers and what was compared with the witness. ``compared``: of a comparison
    that was made before, elsewhere, and is not made again."""
    compared_checks, tally = compared or compare_with_witness(connection, witness, position, context)
    tables = check_tables(connection, context)
    return [tables, *check_sql(connection, statements, target=target), *compared_checks], tally


def check_tables(connection: Connection, context: RunContext) -> Check:
    """CHECK TABLE on every table of every schema, the server's own included. Raises ServerError when it goes
    away."""
    with connection.connect() as session:
        tables = [
            t.name
            for t in list_tables(session)
            if t.name.schema not in ("information_schema", "performance_schema") and not t.is_sequence
        ]
    found = [problem for problem in _spread(connection, tables, _check_one, context) if problem]
    wrong = sorted(text for is_error, text in found if is_error)
    remarks = sorted(text for is_error, text in found if not is_error)
    if wrong:
        return Check(CHECK_TABLES, FAILED, f"{len(wrong)} of {len(tables)} tables: {joined(wrong)}")
    return Check(CHECK_TABLES, PASSED, f"{len(tables)} tables" + (f"; {joined(remarks)}" if remarks else ""))


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


def check_sql(
    connection: Connection, statements: Sequence[str], *, target: datetime, seconds: float = CHECK_SECONDS
) -> list[Check]:
    """Each statement passes when it answers one row whose first column is a number other than 0 within ``seconds``.

    Only numbers count, and booleans, which are numbers in SQL; a text counts when it is written like one. Any other
    text ('yes' as well as 'false') fails, as do NULL, no row, and several rows.

    ``{target}`` in a statement stands for the restored moment, put in as a quoted DATETIME literal in UTC;
    the session's time zone is UTC. Statements run one by one in a read-only transaction.
    """
    checks: list[Check] = []
    for statement in statements:
        name = " ".join(statement.split())
        try:
            with connection.connect() as session:
                session.execute("SET time_zone = '+00:00'")
                read_dialect(session).limit(session, seconds)
                session.execute("START TRANSACTION READ ONLY")
                rows = session.query(fill_in(statement, target))
        except ServerError as error:
            said = error.detail or error.message
            late = error_code(error) in _TOO_LATE
            checks.append(Check(name, FAILED, f"no answer within {seconds:g} s: {said}" if late else said))
            continue
        checks.append(Check(name, *_judged(rows)))
    return checks


def _judged(rows: Sequence[Sequence[object]]) -> tuple[str, str]:
    """(outcome, detail) of what a statement answered."""
    if not rows or not rows[0]:
        return FAILED, "returned no row"
    if len(rows) > 1:
        return FAILED, f"returned {len(rows)} rows: a check must return one row with one number"
    value = rows[0][0]
    number = _number(value)
    if number is None and value is not None:
        return FAILED, f"returned {value!r}, which is not a number: a check must return 0 or another number"
    return PASSED if number else FAILED, f"answered {value!r}"


def fill_in(statement: str, target: datetime) -> str:
    """``statement`` with ``{target}``, also where somebody put quotes around it, as a DATETIME literal in
    UTC."""
    moment = target.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")
    literal = f"'{moment}'"
    for written in ("'{target}'", '"{target}"', "{target}"):
        statement = statement.replace(written, literal)
    return statement


def _number(value: object) -> Decimal | None:
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        return None
    return Decimal(value) if isinstance(value, int | float | Decimal | str) else None


def compare_with_witness(
    connection: Connection, witness: Witness | None, position: Position, context: RunContext
) -> tuple[list[Check], Tally]:
    """The checks, and what was compared with the witness of the source: every table, view, routine ... that it names
    has to be there, whether the witness holds a checksum of it or not.

    Compared only where the witness saw the very position that was restored; else it says so and gives both.
    """
    if witness is None:
        why = "there is no witness between this backup and the target, so there is nothing to compare with"
        return [Check(CHECKSUMS, SKIPPED, why)], Tally()
    if not same_position(witness.position, position):
        why = f"the witness was taken at {_position(witness.position)}, the restored copy is at {_position(position)}"
        return [Check(CHECKSUMS, SKIPPED, why)], Tally()
    wanted = sorted(TableName.parse(name) for name in {*witness.checksums, *witness.rows})

    def look(session: Session, table: TableName) -> str | None:
        name = str(table)
        if name not in witness.checksums:
            return _compare_rows(session, table, witness.rows[name])
        answer = checksums(session, [table])
        if name in answer.failed:
            return f"{name}: {answer.failed[name]}"
        expected = witness.checksums[name]
        return None if answer.values[name] == expected else f"{name}: {answer.values[name]}, not {expected}"

    wrong = sorted(p for p in _spread(connection, wanted, look, context) if p)
    there, tally = _compare_definitions(connection, witness)
    compared = len(wanted)
    detail = (
        f"{len(wrong)} of {compared} tables differ: {joined(wrong)}"
        if wrong
        else f"{len(witness.checksums)} tables at {_position(position)}; {tally}"
    )
    outcome = FAILED if wrong else PASSED if witness.checksums else SKIPPED
    return [Check(CHECKSUMS, outcome, detail), there, _compare_objects(connection, witness)], tally


def _compare_rows(session: Session, table: TableName, expected: int) -> str | None:
    try:
        number = int(session.scalar(f"SELECT COUNT(*) FROM {table}"))  # noqa: S608 - a quoted name
    except ServerError as error:
        session.ping()
        return f"{table}: {error.detail}"
    return None if number == expected else f"{table}: {number} rows, not {expected}"


def _compare_definitions(connection: Connection, witness: Witness) -> tuple[Check, Tally]:
    """Is everything there that the witness names, and defined as it was? Definitions that two versions of a server
    print differently are reported and no failure: nobody knows that they differ."""
    wanted = witness.definitions
    if wanted is None:
        wanted = {TABLE: dict.fromkeys(_named_tables(witness), "")}
    with connection.connect() as session:
        listed = {kind: names - {_OWN} for kind, names in list_objects(session).items()}
        version = str(session.scalar("SELECT @@GLOBAL.version"))
        kinds = {kind: names for kind, names in wanted.items() if kind in listed or not names}
        tables = listed.get(TABLE, frozenset()) | listed.get(SEQUENCE, frozenset())
        if witness.definitions is None:
            listed[TABLE] = tables  # it did not distinguish them
        known = {
            kind: frozenset(name for name, digest in names.items() if digest) & listed.get(kind, frozenset())
            for kind, names in kinds.items()
        }
        found = digests(session, known, seconds=math.inf)
    missing = [
        f"{kind} {name} is not there"
        for kind, names in sorted(kinds.items())
        for name in sorted(names.keys() - listed.get(kind, frozenset()))
    ]
    read = [(kind, name, digest) for kind, names in sorted(found.items()) for name, digest in names.items()]
    unread = [f"{kind} {name}" for kind, name, digest in read if not digest]
    unread += [f"{kind} {name}" for kind in sorted(wanted.keys() - kinds.keys()) for name in sorted(wanted[kind])]
    differing = [(kind, name) for kind, name, digest in read if digest and digest != wanted[kind][name]]
    changed = [f"{kind} {name} is defined differently" for kind, name in differing]
    present = (wanted.get(TABLE, {}).keys() | wanted.get(SEQUENCE, {}).keys()) & tables
    tally = Tally(len(witness.checksums), len(present - witness.checksums.keys()), len(unread))
    wrong = missing if witness.version != version else [*missing, *changed]
    if wrong:
        return Check(DEFINITIONS, FAILED, f"{len(wrong)}: {joined(wrong)}"), tally
    number = sum(map(len, wanted.values()))
    detail = f"{number} objects, {len(read) - len(unread)} definitions compared"
    if changed:
        detail += f"; printed differently by {version} than by the source's {witness.version}: {joined(changed)}"
    if unread:
        detail += f"; not looked at: {joined(unread)}"
    return Check(DEFINITIONS, PASSED, detail), tally


def _named_tables(witness: Witness) -> set[str]:
    """Of a witness without definitions: tables that it listed. What it lost from sight while it read may be gone."""
    return {*witness.checksums, *(name for name, why in witness.uncovered.items() if why.startswith(_LISTED))}


def _compare_objects(connection: Connection, witness: Witness) -> Check:
    with connection.connect() as session:
        found = dict(object_counts(session))
    if connection.user == OWN_ACCOUNT and "users" in found:
        found["users"] -= 1  # of a copy that binary logs are replayed onto: ours, until it is stopped
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
    context: RunContext,
) -> list[_Answer]:
    """Ask about each table, on as many connections as there are workers."""
    workers = max(1, min(context.workers or _WORKERS, len(tables)))
    waiting: queue.SimpleQueue[TableName | None] = queue.SimpleQueue()
    for table in (*tables, *[None] * workers):  # the last ones end a worker each
        waiting.put(table)
    done = itertools.count(1)

    def work(_worker: int) -> list[_Answer]:
        answers = []
        with connection.connect() as session:
            for table in iter(waiting.get, None):
                answers.append(look(session, table))
                context.report(Progress("verify", files_done=next(done), files_total=len(tables), note=str(table)))
        return answers

    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="check") as pool:
        return list(itertools.chain.from_iterable(pool.map(work, range(workers))))


def _position(position: Position) -> str:
    if not position.file:
        return "an unknown position (no binary log)"
    return f"{position.file}:{position.pos}" + (f" (GTID {position.gtid})" if position.gtid else "")


def joined(lines: Sequence[str]) -> str:
    """The first ones in one line, and how many more there are."""
    return "; ".join(lines[:_NAMED]) + (f"; and {len(lines) - _NAMED} more" if len(lines) > _NAMED else "")


def verdict(
    checks: Sequence[Check],
    tally: Tally,
    *,
    error: str = "",
    obstacle: str = "",
    older: bool = False,
    inexact: bool = False,
) -> tuple[str, str]:
    """The outcome of a test restore for its proof, and the error where there is one.

    ``failed`` when a check failed or the data was found damaged (``error``: the whole text), ``undecided`` when
    something else ended the test early (``obstacle``: the whole text), ``inexact`` when the replay may have given other
    rows (a check that failed then says no more than that), ``proved`` when tables were compared with a witness,
    ``restored`` when there was none to compare with or not all of it could be looked at, or when what was restored is
    ``older`` than what is known to exist."""
    detail = "; ".join(f"{check.name}: {check.detail}" for check in checks if check.outcome == FAILED)
    if error or (detail and not inexact):
        return proofs.FAILED, error or detail
    if obstacle:
        return proofs.UNDECIDED, obstacle
    if inexact:
        return proofs.INEXACT, detail
    return proofs.PROVED if tally.equal and not tally.unseen and not older else proofs.RESTORED, ""

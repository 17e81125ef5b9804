"""What a restore of tables is asked for, every decision taken before it begins, and what it reports when it is over.

What can be said of a restore of tables by a look at the server that gets them, before or without loading a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from backupd.engine.server.definitions import TableDefinition
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Session, error_code, is_denied
from backupd.engine.sql.dialect import FIRST_FOR_TABLES, tokens_of
from backupd.model.binlog import ReplaySpec, Transaction
from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.errors import RefusedError, ServerError
from backupd.model.proof import Phase
from backupd.model.server_facts import Position
from backupd.model.table import DumpedTable, Outcome, TableName
from restore.cutover.plan import CutOverResult
from restore.cutover.schema_objects import SchemaObjects
from restore.planning.table_plan import Source, TableGoal, Triggers
from restore.replay.private_replay import RolledForward
from restore.tables.row_difference import SAMPLE, TableDifference

ROWS, TABLESPACE = "rows", "tablespace"


@dataclass(frozen=True, slots=True)
class TablesSpec:
    """``way``: what the tables come out of, by the backups of ``chain`` and ``replay``. ``statements``: of what is
    replayed, the transactions that the index has the text of: they show which other tables are needed. ``goals``: the
    tables by their names at the target, and the names that they get. ``into``: the server's name, "" for SQL files in
    ``sql``. ``whole``: schemas of which all tables were asked for, under their schema's name: what else they have comes
    back, too. ``replace``: may live tables lose their names to them? ``compare``: end before anything is handed over.
    ``keys``: the most that are shown of each table's missing, added and changed rows.
    ``folder``: where copies and rows are kept meanwhile; ``max_bytes``: the most that they may take there, None for
    what is free. ``missing``: of the goals, by their names at the target, those that the backup lacks, and why."""

    restore_id: str
    server: str
    target: str
    way: Source
    chain: tuple[str, ...]
    replay: ReplaySpec | None
    statements: tuple[Transaction, ...]
    goals: tuple[TableGoal, ...]
    into: str
    folder: Path
    sql: Path | None = None
    whole: tuple[str, ...] = ()
    replace: bool = False
    compare: bool = False
    keys: int = SAMPLE
    triggers: Triggers = Triggers.BACKUP
    max_bytes: int | None = None
    missing: Mapping[TableName, str] = field(default_factory=dict)

    @property
    def lacking(self) -> tuple[DumpedTable, ...]:
        """What became of ``missing``."""
        return tuple(DumpedTable(name, Outcome.FAILED, reason=why) for name, why in self.missing.items())


@dataclass(frozen=True, slots=True)
class RestoredTable:
    """``rows`` in the restored table; ``aside``: what the table is called now that had its name before, None where
    there was none; ``difference`` to the live table, None where there is none; ``trouble``: why it was not restored, or
    ""; ``how``: its rows were loaded, or went over with its tablespace."""

    goal: TableGoal
    rows: int | None = None
    aside: TableName | None = None
    difference: TableDifference | None = None
    trouble: str = ""
    how: str = ROWS

    def as_json(self) -> dict[str, Any]:
        """Keys: source, target, rows, how, aside, difference, trouble; null where there is none."""
        return {
            **self.goal.as_json(),
            "rows": self.rows,
            "how": self.how,
            "aside": self.aside.shown if self.aside else None,
            "difference": self.difference.as_json() if self.difference else None,
            "trouble": self.trouble or None,
        }


@dataclass(frozen=True, slots=True)
class TablesOutcome(Document):
    """``into``: the server that got them, "" for SQL files in ``folder``; ``way``: logical or physical; ``position``:
    the position that they are of; ``done``: whether anything was handed over (a mere comparison ends without);
    ``objects``: what became of all else that whole schemas hold; ``inexact``: rows may be others than the source
    had."""

    restore_id: str = field(metadata=json_key("id"))
    server: str
    into: str = field(metadata=json_key(or_null=True))
    target: str
    way: str
    backup_id: str = field(metadata=json_key("backup"))
    position: Position
    phases: tuple[Phase, ...] = field(metadata=json_key(after="objects"))
    tables: tuple[RestoredTable, ...] = field(metadata=json_key(after="replay"))
    done: bool
    folder: Path | None = None
    replay: RolledForward | None = None
    handed_over: CutOverResult | None = field(default=None, metadata=HIDDEN)
    objects: SchemaObjects = field(default_factory=SchemaObjects)
    warnings: tuple[str, ...] = ()
    inexact: bool = field(default=False, metadata=HIDDEN)

    @property
    def is_good(self) -> bool:
        """Is every table there, and all else that was to come, and did no row lose its parent?"""
        return not (self.orphans or self.objects.failed or any(table.trouble for table in self.tables))

    @property
    @computed(after="target")
    def outcome(self) -> str:
        """``restored``, or ``inexact``: they may hold other rows than the source had."""
        return "inexact" if self.inexact else "restored"

    @property
    @computed(after="tables")
    def orphans(self) -> tuple[str, ...]:
        """Rows that lost their parents, in words."""
        return self.handed_over.orphans if self.handed_over else ()

    @property
    @computed(after="orphans")
    def saved(self) -> list[dict[str, str]]:
        """Scripts that give the tables which were renamed aside what they lost."""
        saved = self.handed_over.saved if self.handed_over else ()
        return [{"table": one.table.shown, "aside": one.aside.shown, "script": one.script} for one in saved]

    @property
    @computed(after="phases", digits=3)
    def seconds(self) -> float:
        """Sum of the phases."""
        return sum(phase.seconds for phase in self.phases)


_ENGINES = "SELECT ENGINE FROM information_schema.ENGINES WHERE SUPPORT IN ('YES', 'DEFAULT')"
_UNKNOWN = frozenset({1115, 1273})
"""A character set, a collation."""
_COLLATION = re.compile(r"\w+")


def refuse_old(session: Session, server: str) -> None:
    """Raises RefusedError for a server that tables are not put into; ServerError."""
    dialect = read_dialect(session)
    if not dialect.restores_tables:
        raise RefusedError(
            f"{server} is {dialect.flavour} {dialect.version}: tables can be restored only into {FIRST_FOR_TABLES} and "
            "later",
            hint="write them as SQL files (--sql FOLDER), which the server's own client loads; or restore a whole "
            "backup beside it (--to backup:ID --datadir FOLDER)",
        )


def remarks_on(session: Session, server: str) -> Iterator[str]:
    """Why writing to this server may not be what is wanted. Raises ServerError."""
    if str(session.scalar("SELECT @@GLOBAL.read_only")).upper() not in ("0", "OFF"):
        yield (
            f"{server} is read_only, but this account can write there: the restore creates transactions that its "
            "replication source does not have"
        )
    try:
        status = session.records(read_dialect(session).replica_status)
    except ServerError as error:
        if not is_denied(error):
            raise
        return
    if any(
        str(row.get(name)) in ("Yes", "Connecting")
        for row in status
        for name in ("Slave_IO_Running", "Slave_SQL_Running", "Replica_IO_Running", "Replica_SQL_Running")
    ):
        yield (
            f"{server} replicates from another server: the restore creates transactions that its source does not have, "
            "and later changes from the source may fail"
        )


def unknown_to(session: Session, definitions: Iterable[TableDefinition]) -> Mapping[TableName, str]:
    """The tables that the server cannot make for want of an engine or a collation, and why. Raises ServerError."""
    engines = {str(name).upper() for (name,) in session.query(_ENGINES)}
    knows = cache(partial(_knows, session))
    found = {}
    for definition in definitions:
        if definition.engine and definition.engine.upper() not in engines:
            found[definition.name] = (
                f"the server has no engine {definition.engine}: install its plugin, or write the "
                "table as SQL files (--sql)"
            )
            continue
        unknown = next((name for name in _collations(definition.create) if not knows(name)), "")
        if unknown:
            found[definition.name] = (
                f"the server does not know the collation {unknown}: restore the table into "
                "a server that does, or write it as SQL files (--sql) and change them"
            )
    return found


def _collations(create: str) -> Iterator[str]:
    words = list(tokens_of(create))
    for at, word in enumerate(words[:-1]):
        if word.word == "COLLATE":
            value = words[at + 2 if words[at + 1].text == "=" else at + 1] if at + 2 < len(words) else words[at + 1]
            if _COLLATION.fullmatch(value.text):
                yield value.text.lower()


def _knows(session: Session, collation: str) -> bool:
    """Asked by use: lists have neither aliases nor what fits to more than one character set."""
    try:
        session.query(f"SELECT CONVERT('' USING {collation.partition('_')[0]}) COLLATE {collation}")
    except ServerError as error:
        if error_code(error) not in _UNKNOWN:
            raise
        return False
    return True

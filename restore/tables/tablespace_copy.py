"""Tables that go over as files: out of a private copy into the staging schemas of a server on this host.

They are marked in the journal of the load as tables that are complete, so that ``load`` and all that follows take them
as their own; until then they are marked as tables that are about to be made, which nobody goes on with. Whatever cannot
go over, or fails, is left to be read and loaded as rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from backupd.engine.dump.selection import write_files
from backupd.engine.physical.tablespace_transport import (
    SPARE,
    Imported,
    can_import,
    export_tables,
    import_tables,
    remove_strays,
)
from backupd.engine.server.definitions import TableDefinition, read_tables, write_definition
from backupd.engine.sql.client import Connection, Session
from backupd.model.errors import ServerError
from backupd.model.proof import Phase
from backupd.model.table import DumpedTable, Outcome, TableName, definition_path, quote_name, table_folder
from backupd.process.run_context import RunContext
from restore.cutover import cutover as handoverjournal
from restore.cutover import staging_schema as loadjournal
from restore.cutover.parallel_load import MOST_WORKERS, settings_of
from restore.cutover.staging_schema import Entry, Journal, State, journal_of, own_schemas, staged_table
from restore.tables.outcome import TABLESPACE

_RESERVED = frozenset({SPARE, loadjournal.TABLE, handoverjournal.TABLE})


@dataclass(frozen=True, slots=True)
class CopiedTables:
    """``rows`` of the tables that are there now; ``unfit``: those that were not tried, ``failed``: those that were,
    with why. ``bytes`` of the files that went over."""

    rows: Mapping[TableName, int] = field(default_factory=dict)
    failed: Mapping[TableName, str] = field(default_factory=dict)
    unfit: Mapping[TableName, str] = field(default_factory=dict)
    bytes: int = 0

    @property
    def tables(self) -> tuple[DumpedTable, ...]:
        """What ``load`` receives of the ones that are there: no files to load."""
        return tuple(
            DumpedTable(name, Outcome.DUMPED, "InnoDB", count, tool=TABLESPACE) for name, count in self.rows.items()
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """For people: what was expected to work and did not."""
        return tuple(
            f"{name.shown}: its file could not be imported, so its rows were loaded: {why}"
            for name, why in self.failed.items()
        )


@dataclass(frozen=True, slots=True)
class TablespaceCopier:
    """Takes tables to the server at ``into``. ``staging``: the staging schema of each schema of the source."""

    into: Connection
    staging: Mapping[str, str]

    def copy(self, source: Connection, names: Sequence[TableName], folder: Path, context: RunContext) -> CopiedTables:
        """Copy the tablespaces of those of ``names`` that can be imported, out of a server on which nobody
        writes. Their definitions and triggers are written to ``folder``, in the layout of a logical backup.

        Raises BusyError while somebody loads into the same schemas, RefusedError for schemas that no restore has made,
        ServerError when the server is lost, CancelledError; the next call begins anew, whatever there is.
        """
        begun = time.monotonic()
        source, into = replace(source, answer_timeout=None), replace(self.into, answer_timeout=None)
        journal = Journal(next(iter(self.staging.values())))
        with source.connect() as private, into.connect() as session:
            unfit = can_import(private, session, names)
            definitions, more = _definitions(private, [name for name in names if name not in unfit])
            unfit |= more
            known = journal_of(session, journal.schema)
            if not definitions and not known:
                return CopiedTables(unfit=unfit)
            journal.claim(session, MOST_WORKERS)
            try:
                work = _Copying(private, session, into, journal, self.staging, folder, context)
                own_schemas(session, journal, tuple(self.staging.values()))
                work.clear(names, known)
                done = work.copy(definitions)
            finally:
                journal.release(session)
        if done.rows:
            context.watch.add(Phase("carried", time.monotonic() - begun, done.bytes))
        return replace(done, unfit=unfit)

    def holds(self, tables: Sequence[DumpedTable], folder: Path) -> bool:
        """Are the ``tables`` that an earlier attempt copied, with their definitions in ``folder``, still there and
        complete? Raises ServerError."""
        if not tables:
            return True
        with self.into.connect() as session:
            known = journal_of(session, next(iter(self.staging.values())))
            there = {
                TableName(schema, str(name))
                for schema in self.staging.values()
                for (name,) in session.query(
                    "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s", schema
                )
            }
        return all(
            _staged(table.name, self.staging) in there
            and (entry := known.get(table_folder(table.name))) is not None
            and entry.state is State.DONE
            and entry.rows == table.rows
            and entry.digest == _digest_of(folder / definition_path(table.name))
            for table in tables
        )


@dataclass(frozen=True, slots=True)
class _Copying:
    private: Session
    session: Session
    into: Connection
    journal: Journal
    staging: Mapping[str, str]
    folder: Path
    context: RunContext

    def clear(self, names: Collection[TableName], known: Mapping[str, Entry]) -> None:
        """Nothing is left of what an earlier attempt had carried, or begun to."""
        for setting in settings_of(self.session).statements:
            self.session.execute(setting)
        for name in names:
            entry = known.get(table_folder(name))
            if entry is not None and entry.state in (State.MAKING, State.DONE):
                self.session.execute(f"DROP TABLE IF EXISTS {_staged(name, self.staging)}")
                self.journal.forget(self.session, entry.path)
        for schema in self.staging.values():
            self.session.execute(f"DROP TABLE IF EXISTS {TableName(schema, SPARE)}")
            remove_strays(self.session, schema)

    def copy(self, definitions: Mapping[TableName, TableDefinition]) -> CopiedTables:
        failed: dict[TableName, str] = {}
        for name, definition in definitions.items():
            if why := self._create(name, definition):
                failed[name] = why
        names = [name for name in definitions if name not in failed]
        done = self._import(names) if names else Imported({}, 0, {})
        rows: dict[TableName, int] = {}
        for name in names:
            staged = _staged(name, self.staging)
            if staged in done.failed:
                failed[name] = done.failed[staged]
                self.journal.forget(self.session, table_folder(name))
                continue
            write_files(self.folder, definitions[name])
            rows[name] = done.rows[staged]
            self.journal.set_state(self.session, table_folder(name), State.DONE, rows[name])
        return CopiedTables(rows, failed, bytes=done.bytes)

    def _create(self, name: TableName, definition: TableDefinition) -> str:
        """Make the empty table; why not, or ""."""
        staged, path = _staged(name, self.staging), table_folder(name)
        try:
            fit = staged_table(definition)
        except ValueError as error:
            return str(error)
        self.journal.write(self.session, Entry(path, State.MAKING, 0, digest=_digest(write_definition(definition))))
        self.session.execute(f"USE {quote_name(staged.schema)}")
        try:
            self.session.send(fit.create.encode("utf-8", "surrogateescape"))
        except ServerError as error:
            self.session.ping()
            self.journal.forget(self.session, path)
            return error.detail
        return ""

    def _import(self, names: Sequence[TableName]) -> Imported:
        with contextlib.ExitStack() as stack:
            try:
                exported = stack.enter_context(export_tables(self.private, names))
            except ServerError as error:
                self.private.ping()
                goals = [_staged(name, self.staging) for name in names]
                for staged in goals:
                    self.session.execute(f"DROP TABLE {staged}")
                return Imported({}, 0, dict.fromkeys(goals, error.detail))
            return import_tables(
                self.into,
                [(table, _staged(table.name, self.staging)) for table in exported],
                self.context,
            )


def _definitions(
    private: Session, names: Sequence[TableName]
) -> tuple[Mapping[TableName, TableDefinition], dict[TableName, str]]:
    """Of the tables that can be carried; why the others cannot."""
    found = read_tables(private, names)
    unfit = dict(found.failed)
    for name, definition in found.tables.items():
        if definition.columns.versioned:
            unfit[name] = "it is system-versioned, and an import would discard its history"
        elif name.table.lower() in _RESERVED:
            unfit[name] = "backupd uses this table name in staging schemas"
    return {name: definition for name, definition in found.tables.items() if name not in unfit}, unfit


def _staged(name: TableName, staging: Mapping[str, str]) -> TableName:
    return TableName(staging[name.schema], name.table)


def _digest(definition: bytes) -> str:
    return hashlib.sha256(definition).hexdigest()


def _digest_of(file: Path) -> str:
    try:
        return _digest(file.read_bytes())
    except FileNotFoundError:
        return ""

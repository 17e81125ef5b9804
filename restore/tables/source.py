"""The rows of the tables that a restore is about, brought into a folder in the layout of a logical backup.

Out of a logical backup they are fetched as they are. With a replay, or out of a physical backup, they are read from a
private server that holds next to nothing else, rolled forward to the target.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from backupd.engine.dump.selection import dump_quiet
from backupd.engine.physical.tablespace_transport import Known
from backupd.engine.server.definitions import TableDefinition, read_definition
from backupd.engine.server.probe import uncovered
from backupd.engine.sql.client import Connection
from backupd.engine.sql.tables import list_tables
from backupd.model.document import HIDDEN, Document, made_of
from backupd.model.errors import DamagedError, NotFoundError, RefusedError
from backupd.model.manifest import Entry
from backupd.model.server_facts import Flavour, Position
from backupd.model.table import (
    DumpedTable,
    Outcome,
    TableName,
    TablePattern,
    decode_name,
    definition_path,
    table_folder,
    triggers_path,
)
from backupd.process.folders import write_whole
from backupd.process.run_context import RunContext
from restore.cutover.keys_and_triggers import TableInventory
from restore.cutover.schema_objects import copy_scripts, keep_scripts, remarks
from restore.datadir.occupancy import refuse_full
from restore.fetch.objects import fetch
from restore.fetch.sources import Loaded, Sources, load_chain, load_dump, pinned
from restore.planning.table_plan import Source
from restore.replay.private_replay import RolledForward
from restore.replay.related_tables import relatives
from restore.scratch_server import ScratchSpec, loaded_instance
from restore.subset import SubsetCopy, subset_instance, tables_in
from restore.tables.outcome import TablesSpec
from restore.tables.tablespace_copy import CopiedTables, TablespaceCopier

_MARKER = "extracted.json"
_VOLATILE = "MEMORY"


@dataclass(frozen=True, slots=True)
class Extracted(Document):
    """``folder`` holds the rows and definitions of ``tables``, as they were at ``position`` of a server of that
    ``flavour``. Tables that could not be had are among them, with the reason. ``carried``: of those only the
    definitions, since their rows are in the staging schemas already; schema and name of
    each. ``folder`` is not in the marker that the work folder keeps for the next attempt."""

    flavour: Flavour
    tables: tuple[DumpedTable, ...]
    position: Position
    replay: RolledForward | None = None
    warnings: tuple[str, ...] = ()
    carried: tuple[tuple[str, ...], ...] = ()
    folder: Path = field(default=Path(), metadata=HIDDEN)

    def is_carried(self, table: TableName) -> bool:
        """Are the rows of ``table`` in its staging schema already?"""
        return (table.schema, table.table) in self.carried


def part_of_dump(loaded: Loaded, wanted: Callable[[TableName], bool], schemas: Collection[str] = ()) -> Loaded:
    """A logical backup cut down to the tables that are ``wanted``, with the scripts of their schemas and of
    ``schemas``."""
    schemas = {
        *schemas,
        *(name.schema for entry in loaded.body.entries if (name := _table_of(entry)) is not None and wanted(name)),
    }
    return loaded.cut(
        lambda entry: ((name := _table_of(entry)) is not None and wanted(name)) or _schema_of(entry) in schemas
    )


def extract(
    spec: TablesSpec, folder: Path, sources: Sources, context: RunContext, copier: TablespaceCopier | None = None
) -> Extracted:
    """Bring the tables of ``spec`` into ``folder``, or take what an earlier attempt brought there completely.
    ``copier``: what can go over as files goes with it, out of a physical backup.

    Raises NotFoundError for tables that are not there at the target, and what reading, preparing and replaying raises.
    """
    marker = folder / _MARKER
    if marker.is_file():
        found = replace(Extracted.from_json(json.loads(marker.read_text(encoding="utf-8"))), folder=folder / "rows")
        carried = [table for table in found.tables if found.is_carried(table.name)]
        if copier is None or copier.holds(carried, found.folder):
            return found
        marker.unlink()
    job = _Extraction(spec, folder, sources, context, copier)
    found = job.logical() if spec.way is Source.LOGICAL else job.physical()
    found = replace(found, tables=(*found.tables, *spec.lacking))
    write_whole(marker, json.dumps(found.as_json()).encode())
    return found


class _Extraction:
    def __init__(
        self,
        spec: TablesSpec,
        folder: Path,
        sources: Sources,
        context: RunContext,
        copier: TablespaceCopier | None,
    ) -> None:
        self._spec, self._sources, self._context, self._copier = spec, sources, context, copier
        self._folder, self._rows = folder, folder / "rows"
        self._copied = CopiedTables()
        self._wanted = tuple(goal.source for goal in spec.goals if goal.source not in spec.missing)

    # -- out of a physical backup

    def physical(self) -> Extracted:
        spec, sources = self._spec, self._sources
        chain, _said = load_chain(spec.server, spec.chain, sources)
        lower, there = _lower(chain[-1]), tables_in(chain[-1])

        def needed(known: Known) -> Collection[TableName]:
            return self._needed(known.parents, known.triggers, known.views, known.tables, lower=lower)

        first = self._needed(lambda _name: (), {}, None, there, lower=lower)
        patterns = [TablePattern(str(name)) for name in first]
        with subset_instance(self._scratch(), patterns, sources, self._context, needed=needed) as copy:
            broken = {**self._without_rows(copy.connection, copy.last), **copy.unreadable}
            rolled = copy.roll_forward(lambda _stop: None) if copy.roll_forward else None
            tables = self._read(
                copy.connection, {name: broken[name] for name in self._wanted if name in broken}, self._copier
            )
            said = (*copy.warnings, *self._keep_scripts(copy), *self._copied.remarks)
            return self._extracted(copy.last, tables, rolled, said)

    def _scratch(self) -> ScratchSpec:
        spec = self._spec
        return made_of(ScratchSpec, spec, scratch_id=spec.restore_id, path=spec.folder, accounts=bool(spec.whole))

    def _extracted(
        self, last: Loaded, tables: Sequence[DumpedTable], rolled: RolledForward | None, said: Sequence[str]
    ) -> Extracted:
        facts = last.body.facts
        return Extracted(
            facts.server.flavour,
            tuple(tables),
            rolled.stop.position if rolled else facts.position,
            rolled,
            tuple(said),
            tuple((name.schema, name.table) for name in self._copied.rows),
            self._rows,
        )

    def _without_rows(self, connection: Connection, last: Loaded) -> dict[TableName, str]:
        """Tables of which a physical backup has no more than the definition, and in words why."""
        with connection.connect() as session:
            engines = {table.name: table.engine for table in list_tables(session) if table.name in self._wanted}
        lost = uncovered(engines.values(), last.body.facts.server.flavour, last.header.tool) | {_VOLATILE}
        return {
            name: f"physical backups have no rows of it: they leave out the engine {engine}. Restore it from a logical "
            "backup (--from logical)"
            for name, engine in engines.items()
            if engine in lost
        }

    # -- out of a logical one

    def logical(self) -> Extracted:
        spec, sources = self._spec, self._sources
        loaded, said = load_dump(spec.server, spec.chain[-1], sources)
        facts = loaded.body.facts
        dumped = {table.name: table for table in facts.dump.dumped} if facts.dump else {}
        if spec.replay is None:
            warnings = self._fetch(loaded, self._wanted, self._rows)
            tables = tuple(dumped[name] for name in self._wanted if name in dumped)
            own = {table.position for table in tables if table.position is not None}
            notes = (f"{table.name.shown}: {table.note}" for table in tables if table.note)
            warnings += (*notes, *self._remarks(chosen=True))
            found = self._extracted(loaded, tables, None, (*said, *warnings))
            return replace(found, position=own.pop()) if len(own) == 1 else found
        base = self._folder / "base"
        warnings = self._fetch(loaded, (), base, definitions=True)
        needed = self._needed_of_dump(base, dumped, lower=_lower(loaded))
        warnings += self._fetch(loaded, needed, base)
        there = [dumped[name] for name in needed if name in dumped]
        replay = replace(spec.replay, tables=tuple(str(name) for name in needed))
        with loaded_instance(
            replace(self._scratch(), replay=replay),
            facts.server,
            loaded.header.finished_at,
            base,
            there,
            sources,
            self._context,
        ) as copy:
            if copy.failed:
                raise RefusedError(
                    f"{len(copy.failed)} tables of backup {spec.chain[-1]} cannot be loaded, so nothing can be rolled "
                    "forward",
                    detail="\n".join(f"{name.shown}: {why}" for name, why in copy.failed.items()),
                    hint="choose another backup with --to backup:ID, or read the server's message about that table",
                )
            rolled = copy.roll_forward(lambda _stop: None) if copy.roll_forward else None
            tables = self._read(copy.connection, {})
            copy_scripts(base, self._rows, {name.schema for name in self._wanted})
            shutil.rmtree(base, ignore_errors=True)
            warnings += (*copy.warnings, *self._remarks(chosen=True))
            return self._extracted(loaded, tables, rolled, (*said, *warnings))

    def _fetch(
        self, loaded: Loaded, names: Collection[TableName], folder: Path, *, definitions: bool = False
    ) -> tuple[str, ...]:
        """Bring the files of ``names`` to ``folder``; with ``definitions`` those of every table, but no rows."""
        spec, context = self._spec, self._context
        part = (
            loaded.cut(lambda entry: not _is_data(entry))
            if definitions
            else part_of_dump(loaded, lambda name: name in names, {name.schema for name in names})
        )
        hint = "free some space there, or name another folder in restore.scratch.path"
        refuse_full(folder, part.header.stats.bytes_source, "the tables", hint=hint)
        with (
            context.watch.phase("fetched", part.header.stats.bytes_source),
            pinned(self._sources, spec.restore_id, spec.server, spec.chain[-1:], context) as said,
        ):
            fetched = fetch(part, self._sources, folder, context)
        return (*said, *fetched.repaired)

    def _needed_of_dump(
        self, folder: Path, dumped: Mapping[TableName, DumpedTable], *, lower: bool
    ) -> tuple[TableName, ...]:
        above: dict[TableName, list[TableName]] = defaultdict(list)
        triggers: dict[TableName, str] = {}
        for name in dumped:
            definition = read_files(folder, name)
            for key in definition.foreign_keys:
                if key.acts:  # the copy does without keys that do not
                    above[key.child].append(key.parent)
            if definition.triggers:
                triggers[name] = definition.triggers

        return self._needed(lambda name: above.get(name, ()), triggers, None, tuple(dumped), lower=lower)

    # -- both

    def _needed(
        self,
        parents: Callable[[TableName], Collection[TableName]],
        triggers: Mapping[TableName, str] | None,
        views: Mapping[TableName, str] | None,
        known: Collection[TableName],
        *,
        lower: bool,
    ) -> tuple[TableName, ...]:
        kin = relatives(
            self._wanted, self._spec.statements, parents, triggers=triggers, views=views, known=known, lower_case=lower
        )
        if kin.inseparable:
            raise RefusedError(
                "these tables cannot be rolled forward without all others",
                detail="\n".join(kin.inseparable),
                hint="restore the whole server beside it: --datadir DIR --start",
            )
        return kin.tables if self._spec.replay is not None else self._wanted

    def _keep_scripts(self, copy: SubsetCopy) -> tuple[str, ...]:
        """Of the schemas, beside the rows out of a copy of a physical backup, when all else is read. A client that
        loads SQL files stops at the first view that does not work."""
        said = keep_scripts(
            copy.connection,
            self._rows,
            {name.schema for name in self._wanted},
            self._spec.whole,
            absent=copy.left_out,
            working=self._spec.sql is not None,
        )
        return (*said, *self._remarks(chosen=False))

    def _remarks(self, *, chosen: bool) -> tuple[str, ...]:
        return remarks(
            self._rows,
            self._spec.whole,
            self._spec.chain[-1],
            replayed=self._spec.replay is not None,
            chosen=chosen,
        )

    def _read(
        self, connection: Connection, broken: Mapping[TableName, str], copier: TablespaceCopier | None = None
    ) -> tuple[DumpedTable, ...]:
        """Carry or read what is wanted out of the copy; ``broken`` are not read, and named."""
        with connection.connect() as session:
            inventory = TableInventory.look(session, {name.schema for name in self._wanted})
        missing = [name for name in self._wanted if not inventory.has(name) and name not in broken]
        if missing:
            raise NotFoundError(
                f"{missing[0].shown} does not exist at the target",
                detail=", ".join(name.shown for name in missing),
                hint="it was dropped or renamed by then, or did not exist yet: `backupd binlog search` finds the time",
            )
        context = self._context
        shutil.rmtree(self._rows, ignore_errors=True)
        self._rows.mkdir(mode=0o700)
        names = [name for name in self._wanted if name not in broken]
        if copier is not None and names:
            self._copied = copier.copy(connection, names, self._rows, context)
        with context.watch.phase("extracted"):
            read = dump_quiet(
                connection,
                [name for name in names if name not in self._copied.rows],
                self._rows,
                context,
            )
        return (
            *self._copied.tables,
            *read,
            *(DumpedTable(name, Outcome.FAILED, reason=why) for name, why in broken.items()),
        )


def read_files(folder: Path, name: TableName) -> TableDefinition:
    """The definition of a table, from its files in ``folder``. Raises DamagedError."""
    triggers = folder / triggers_path(name)
    try:
        return read_definition(
            name, (folder / definition_path(name)).read_bytes(), triggers.read_bytes() if triggers.is_file() else b""
        )
    except (OSError, ValueError) as error:
        raise DamagedError(
            f"the definition of {name.shown} is not as a backup has it",
            [str(error)],
            hint="restore from another backup",
        ) from error


def _table_of(entry: Entry) -> TableName | None:
    parts = entry.path.split("/")
    if len(parts) != 4 or parts[0] != "tables":
        return None
    return TableName(decode_name(parts[1]), decode_name(parts[2]))


def _schema_of(entry: Entry) -> str | None:
    parts = entry.path.split("/")
    return decode_name(parts[1]) if len(parts) == 3 and parts[0] == "schemas" else None


def _is_data(entry: Entry) -> bool:
    name = _table_of(entry)
    return name is not None and entry.path.startswith(table_folder(name) + "data-")


def _lower(loaded: Loaded) -> bool:
    return loaded.body.facts.server.variables.get("lower_case_table_names") == "1"

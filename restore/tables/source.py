"""The rows of the tables that a restore is about, brought into a folder in the layout of a logical backup.

Out of a logical backup they are fetched as they are. With a replay, or out of a physical backup, they are read from a
private server that holds next to nothing else, rolled forward to the target.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from backupd.engine.dump.selection import dump_quiet
from backupd.engine.physical.tablespace_transport import Known
from backupd.engine.server.definitions import TableDefinition, read_definition
from backupd.engine.server.probe import uncovered
from backupd.engine.sql.client import Connection
from backupd.engine.sql.tables import ForeignKey, ForeignKeys, list_tables
from backupd.model.errors import DamagedError, NotFoundError, RefusedError
from backupd.model.job import Report
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
from backupd.model.text import Clock
from backupd.process.folders import write_whole
from backupd.transfer.records.sealing import Unsealer
from restore.cutover.keys_and_triggers import TableInventory
from restore.cutover.schema_objects import copy_scripts, keep_scripts, remarks
from restore.fetch.chain import Stopwatch
from restore.fetch.objects import default_workers, fetch
from restore.fetch.sources import Loaded, load_chain, load_dump, pinned
from restore.planning.table_plan import Source
from restore.replay.private_replay import RolledForward
from restore.replay.related_tables import relatives
from restore.scratch_server import ScratchSpec, TableCopySpec, loaded_instance
from restore.subset import SubsetCopy, subset_instance, tables_in
from restore.tables.outcome import TablesSpec
from restore.tables.tablespace_copy import CopiedTables, TablespaceCopier
from storage.destination import Destination

_MARKER = "extracted.json"
_VOLATILE = "MEMORY"


@dataclass(frozen=True, slots=True)
class Extracted:
    """``folder`` holds the rows and definitions of ``tables``, as they were at ``position`` of a server of that
    ``flavour``. Tables that could not be had are among them, with the reason. ``carried``: of those only the
    definitions, since their rows are in the staging schemas already."""

    folder: Path
    flavour: Flavour
    tables: tuple[DumpedTable, ...]
    position: Position
    replay: RolledForward | None = None
    warnings: tuple[str, ...] = ()
    carried: tuple[TableName, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As the marker in the work folder keeps it for the next attempt; without ``folder``."""
        return {
            "flavour": str(self.flavour),
            "tables": [table.as_json() for table in self.tables],
            "position": self.position.as_json(),
            "replay": self.replay.as_json() if self.replay else None,
            "warnings": list(self.warnings),
            "carried": [[name.schema, name.table] for name in self.carried],
        }

    @classmethod
    def from_json(cls, folder: Path, data: Mapping[str, Any]) -> Extracted:
        """Raises KeyError, ValueError for what ``as_json`` did not write."""
        return cls(
            folder,
            Flavour(data["flavour"]),
            tuple(DumpedTable.from_json(one) for one in data["tables"]),
            Position.from_json(data["position"]),
            RolledForward.from_json(data["replay"]) if data["replay"] else None,
            tuple(data["warnings"]),
            tuple(TableName(schema, table) for schema, table in data["carried"]),
        )


def part_of_dump(loaded: Loaded, wanted: Callable[[TableName], bool], schemas: Collection[str] = ()) -> Loaded:
    """A logical backup cut down to the tables that are ``wanted``, with the scripts of their schemas and of
    ``schemas``."""
    schemas = {
        *schemas,
        *(name.schema for entry in loaded.body.entries if (name := _table_of(entry)) is not None and wanted(name)),
    }
    taken = tuple(
        entry
        for entry in loaded.body.entries
        if ((name := _table_of(entry)) is not None and wanted(name)) or _schema_of(entry) in schemas
    )
    return _cut(loaded, taken)


def extract(
    spec: TablesSpec,
    folder: Path,
    *,
    destinations: Sequence[Destination],
    archives: Sequence[Destination],
    unsealer: Unsealer,
    clock: Clock,
    report: Report,
    cancel: Event | None,
    watch: Stopwatch,
    copier: TablespaceCopier | None = None,
) -> Extracted:
    """Bring the tables of ``spec`` into ``folder``, or take what an earlier attempt brought there completely.
    ``copier``: what can go over as files goes with it, out of a physical backup.

    Raises NotFoundError for tables that are not there at the target, and what reading, preparing and replaying raises.
    """
    marker = folder / _MARKER
    if marker.is_file():
        found = Extracted.from_json(folder / "rows", json.loads(marker.read_text(encoding="utf-8")))
        carried = [table for table in found.tables if table.name in found.carried]
        if copier is None or copier.holds(carried, found.folder):
            return found
        marker.unlink()
    job = _Extraction(spec, folder, destinations, archives, unsealer, clock, report, cancel, watch, copier)
    found = job.logical() if spec.way is Source.LOGICAL else job.physical()
    found = replace(found, tables=(*found.tables, *spec.lacking))
    write_whole(marker, json.dumps(found.as_json()).encode())
    return found


class _Extraction:
    def __init__(
        self,
        spec: TablesSpec,
        folder: Path,
        destinations: Sequence[Destination],
        archives: Sequence[Destination],
        unsealer: Unsealer,
        clock: Clock,
        report: Report,
        cancel: Event | None,
        watch: Stopwatch,
        copier: TablespaceCopier | None,
    ) -> None:
        self._spec, self._folder, self._watch, self._copier = spec, folder, watch, copier
        self._copied = CopiedTables()
        self._destinations, self._archives, self._unsealer = destinations, archives, unsealer
        self._clock, self._report, self._cancel = clock, report, cancel
        self._wanted = tuple(goal.source for goal in spec.goals if goal.source not in spec.missing)

    # -- out of a physical backup

    def physical(self) -> Extracted:
        spec = self._spec
        scratch = ScratchSpec(
            scratch_id=spec.restore_id,
            server=spec.server,
            chain=spec.chain,
            path=spec.folder,
            max_bytes=spec.max_bytes,
            memory=spec.memory,
            workers=spec.workers,
            replay=spec.replay,
            templates=spec.templates,
            programs=spec.programs,
            accounts=bool(spec.whole),
            key_files=spec.key_files,
        )
        chain, _said = load_chain(spec.server, spec.chain, self._destinations, self._unsealer)
        lower, there = _lower(chain[-1]), tables_in(chain[-1])

        def needed(known: Known) -> Collection[TableName]:
            return self._needed(known.parents, known.triggers, known.views, known.tables, lower=lower)

        first = self._needed(lambda _name: (), {}, None, there, lower=lower)
        with subset_instance(
            scratch,
            [TablePattern(str(name)) for name in first],
            destinations=self._destinations,
            unsealer=self._unsealer,
            clock=self._clock,
            report=self._report,
            cancel=self._cancel,
            on_phase=self._watch.told,
            archives=self._archives,
            needed=needed,
        ) as copy:
            broken = {**self._without_rows(copy.connection, copy.last), **copy.unreadable}
            rolled = copy.roll_forward(lambda _stop: None) if copy.roll_forward else None
            tables = self._read(
                copy.connection, {name: broken[name] for name in self._wanted if name in broken}, self._copier
            )
            return Extracted(
                self._folder / "rows",
                copy.last.body.facts.server.flavour,
                tables,
                rolled.stop.position if rolled else copy.last.body.facts.position,
                rolled,
                (*copy.warnings, *self._keep_scripts(copy), *self._copied.remarks),
                tuple(self._copied.rows),
            )

    def _without_rows(self, connection: Connection, last: Loaded) -> dict[TableName, str]:
        """Tables of which a physical backup has no more than the definition, and in words why."""
        with connection.connect() as session:
            engines = {table.name: table.engine for table in list_tables(session) if table.name in self._wanted}
        lost = uncovered(engines.values(), last.body.facts.server.flavour, last.header.tool) | {_VOLATILE}
        return {
            name: f"physical backups have no rows of it: they leave out the engine {engine}. Take it out of a "
            "logical one (--from logical)"
            for name, engine in engines.items()
            if engine in lost
        }

    # -- out of a logical one

    def logical(self) -> Extracted:
        spec = self._spec
        loaded, said = load_dump(spec.server, spec.chain[-1], self._destinations, self._unsealer)
        facts = loaded.body.facts
        dumped = {table.name: table for table in facts.dump.dumped} if facts.dump else {}
        if spec.replay is None:
            warnings = self._fetch(loaded, self._wanted, self._folder / "rows")
            tables = tuple(dumped[name] for name in self._wanted if name in dumped)
            own = {table.position for table in tables if table.position is not None}
            place = own.pop() if len(own) == 1 else facts.position
            return Extracted(
                self._folder / "rows",
                facts.server.flavour,
                tables,
                place,
                None,
                (*said, *warnings, *_notes(tables), *self._remarks(chosen=True)),
            )
        base = self._folder / "base"
        warnings = self._fetch(loaded, (), base, definitions=True)
        needed = self._needed_of_dump(base, dumped, lower=_lower(loaded))
        warnings += self._fetch(loaded, needed, base)
        copy_spec = TableCopySpec(
            copy_id=spec.restore_id,
            server=spec.server,
            info=facts.server,
            taken=loaded.header.finished_at,
            path=spec.folder,
            memory=spec.memory,
            max_bytes=spec.max_bytes,
            workers=spec.workers,
            replay=replace(spec.replay, tables=tuple(str(name) for name in needed)),
            templates=spec.templates,
            programs=spec.programs,
        )
        with loaded_instance(
            copy_spec,
            base,
            [dumped[name] for name in needed if name in dumped],
            archives=self._archives,
            unsealer=self._unsealer,
            report=self._report,
            cancel=self._cancel,
            on_phase=self._watch.told,
        ) as copy:
            if copy.failed:
                raise RefusedError(
                    f"{len(copy.failed)} tables of backup {spec.chain[-1]} cannot be loaded, so nothing can be rolled "
                    "forward",
                    detail="\n".join(f"{name.shown}: {why}" for name, why in copy.failed.items()),
                    hint="choose another backup with --to backup:ID, or see what the server says of that table",
                )
            rolled = copy.roll_forward(lambda _stop: None) if copy.roll_forward else None
            tables = self._read(copy.connection, {})
            position = rolled.stop.position if rolled else facts.position
            copy_scripts(base, self._folder / "rows", {name.schema for name in self._wanted})
            shutil.rmtree(base, ignore_errors=True)
            return Extracted(
                self._folder / "rows",
                facts.server.flavour,
                tables,
                position,
                rolled,
                (*said, *warnings, *copy.warnings, *self._remarks(chosen=True)),
            )

    def _fetch(
        self, loaded: Loaded, names: Collection[TableName], folder: Path, *, definitions: bool = False
    ) -> tuple[str, ...]:
        """Bring the files of ``names`` to ``folder``; with ``definitions`` those of every table, but no rows."""
        part = part_of_dump(loaded, lambda name: name in names, {name.schema for name in names})
        if definitions:
            part = _cut(loaded, tuple(entry for entry in loaded.body.entries if not _is_data(entry)))
        _refuse_no_room(part, folder)
        size = part.header.stats.bytes_source
        with (
            self._watch.phase("fetched", size),
            pinned(
                self._destinations,
                self._spec.restore_id,
                [(self._spec.server, self._spec.chain[-1])],
                clock=self._clock,
            ) as said,
        ):
            fetched = fetch(
                part.header,
                part.body,
                self._destinations,
                self._unsealer,
                folder,
                workers=self._spec.workers or default_workers(),
                report=self._report,
                cancelled=self._cancel.is_set if self._cancel else lambda: False,
                whole=loaded.body,
            )
        return (*said, *fetched.repaired)

    def _needed_of_dump(
        self, folder: Path, dumped: Mapping[TableName, DumpedTable], *, lower: bool
    ) -> tuple[TableName, ...]:
        keys: list[ForeignKey] = []
        triggers: dict[TableName, str] = {}
        for name in dumped:
            definition = read_files(folder, name)
            keys += definition.foreign_keys
            if definition.triggers:
                triggers[name] = definition.triggers
        of_child = ForeignKeys(key for key in keys if key.acts)  # the others the copy does without

        def parents(name: TableName) -> list[TableName]:
            return [key.parent for key in of_child.parents(name)]

        return self._needed(parents, triggers, None, tuple(dumped), lower=lower)

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
            self._folder / "rows",
            {name.schema for name in self._wanted},
            self._spec.whole,
            absent=copy.left_out,
            working=self._spec.sql is not None,
        )
        return (*said, *self._remarks(chosen=False))

    def _remarks(self, *, chosen: bool) -> tuple[str, ...]:
        return remarks(
            self._folder / "rows",
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
                f"{missing[0].shown} is not there at the target",
                detail=", ".join(name.shown for name in missing),
                hint="it was dropped or renamed by then, or did not exist yet: `backupd binlog search` tells when",
            )
        rows = self._folder / "rows"
        shutil.rmtree(rows, ignore_errors=True)
        rows.mkdir(mode=0o700)
        names = [name for name in self._wanted if name not in broken]
        if copier is not None and names:
            self._copied = copier.copy(
                connection, names, rows, watch=self._watch, report=self._report, cancel=self._cancel
            )
        size = 0
        with self._watch.phase("extracted", size):
            read = dump_quiet(
                connection,
                [name for name in names if name not in self._copied.rows],
                rows,
                threads=self._spec.workers or 2,
                programs=self._spec.programs,
                report=self._report,
                cancel=self._cancel,
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


def _notes(tables: Sequence[DumpedTable]) -> list[str]:
    return [f"{table.name.shown}: {table.note}" for table in tables if table.note]


def _cut(loaded: Loaded, entries: tuple[Entry, ...]) -> Loaded:
    names = {name for entry in entries for name in entry.objects}
    objects = tuple(stored for stored in loaded.header.objects if stored.name in names)
    stats = replace(
        loaded.header.stats,
        bytes_source=sum(entry.size for entry in entries),
        bytes_stored=sum(stored.size for stored in objects),
        files=len(entries),
    )
    return Loaded(
        replace(loaded.header, stats=stats, objects=objects),
        replace(loaded.body, entries=entries),
        loaded.whole or loaded.body,
    )


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


def _refuse_no_room(part: Loaded, folder: Path) -> None:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    room = os.statvfs(there)
    free, need = room.f_bavail * room.f_frsize, part.header.stats.bytes_source
    if free < need:
        raise RefusedError(
            f"too little room at {there} for the tables: {need:,} bytes needed, {free:,} free",
            hint="free some space there, or name another folder in restore.scratch.path",
        )

"""One logical backup: which tables there are, their definitions, their rows, and what became of each of them.

Trouble is a table's own. One that cannot be read is named and left out; one that was changed, or failed, while its rows
were written is tried once more, and then has a position of its own. Knows no catalog: everything it needs is in its
spec, everything it found is in its outcome.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from backupd.backup.commit import Captured, making
from backupd.backup.dump_intake import together
from backupd.backup.dump_locks import ALTERED, DROPPED, RENAMED, ClearWay, TableWatch
from backupd.backup.dump_pass import DumpSpec, Passed, PassSettings, Wanted, dump
from backupd.engine.dump.insert_files import DumpTable, DumpTool
from backupd.engine.dump.selection import Selection
from backupd.engine.server.accounts import read_grants, unreadable, unseen
from backupd.engine.server.definitions import (
    SchemaScripts,
    TableDefinition,
    read_schema,
    read_tables,
    write_definition,
    write_triggers,
)
from backupd.engine.server.probe import not_a_base
from backupd.engine.sql.client import Session
from backupd.engine.sql.tables import SYSTEM_SCHEMAS, Table, check, hurry, list_tables
from backupd.model.backup_record import BackupKind
from backupd.model.errors import (
    BackupdError,
    CancelledError,
    DestinationError,
    NotFoundError,
    RefusedError,
    ServerError,
    StreamError,
    ToolError,
    UnknownTableError,
)
from backupd.model.job import Progress
from backupd.model.manifest import BodyFacts, Header
from backupd.model.server_facts import Position, Receipts
from backupd.model.table import (
    PREPARED_XA,
    DumpedTable,
    DumpFacts,
    Outcome,
    TableName,
    TablePattern,
    definition_path,
    triggers_path,
)
from backupd.process.run_context import RunContext
from backupd.transfer.parts import Packer
from policies.document import suggestion

_SETTINGS = (
    "character_set_server",
    "collation_server",
    "sql_mode",
    "lower_case_table_names",
    "time_zone",
    "system_time_zone",
    "innodb_page_size",
    "innodb_default_row_format",
    "default_storage_engine",
)
_STEADY = "SELECT ENGINE FROM information_schema.ENGINES WHERE TRANSACTIONS = 'YES'"
_SCHEMAS = "SELECT SCHEMA_NAME FROM information_schema.SCHEMATA"
_BEFORE = "it was dropped before the snapshot was taken"
_SINCE = "it was created while the backup ran"
_SHOWN = 20


def _none_fits(patterns: Sequence[TablePattern], tables: Iterable[Table]) -> UnknownTableError:
    asked = [pattern.text for pattern in patterns]
    near = suggestion(asked[0], (table.name.shown for table in tables if not table.is_system))
    return UnknownTableError(
        f"there is no table to dump: none matches {', '.join(asked)}{near}",
        hint="names are case-sensitive: schema.table, with * for any text; the account sees only "
        "tables on which it has SELECT",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalSpec(DumpSpec):
    """Every decision about one logical backup. ``select``: which of the server's tables; ``whole``: is this schema
    wanted with its views, routines and events? ``include``: the patterns behind both. ``tools``: best first.
    ``long_queries``: statements that run for longer (seconds) are waited for, at most for ``patience`` seconds (0: not
    at all), before commits are blocked. ``by_hand``: somebody named the tables for this one run."""

    select: Callable[[Iterable[Table]], Selection]
    whole: Callable[[str], bool]
    tools: tuple[DumpTool, ...]
    include: tuple[TablePattern, ...] = ()
    table_set: str = ""
    long_queries: float = 60.0
    patience: float = 0.0
    repair: bool = False
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class LogicalOutcome:
    """``dump``: of the facts."""

    header: Header
    facts: BodyFacts
    dump: DumpFacts


def execute(spec: LogicalSpec, context: RunContext) -> LogicalOutcome:
    """Take the backup and commit it at every destination, also when some of the tables could not be dumped. On any
    other error nothing is committed and what was stored is taken back; raises the error that began the trouble."""
    with making(spec, clock=context.clock) as made:
        with Packer(made.fanout, workers=spec.workers, together=together) as packer:
            dumping = _Dumping(spec, packer, context)
            captured, facts = dumping.run()
            packed = packer.finish()
            if packer.moved:
                made.fanout.relink(packed.entries)
        context.report(Progress("commit", packed.size, packed.size, len(packed.entries), len(packed.entries)))
        header, body_facts = made.commit(captured, packed, context.fence)
        return LogicalOutcome(header, body_facts, facts)


class _Dumping:
    """What is found out about tables on the way."""

    def __init__(self, spec: LogicalSpec, packer: Packer, context: RunContext) -> None:
        self._spec, self._packer, self._context = spec, packer, context
        self._way = ClearWay(spec.connection, spec.long_queries, spec.patience, context)
        self._known: set[TableName] = set()
        self._outcomes: dict[TableName, DumpedTable] = {}
        self._definitions: dict[TableName, TableDefinition] = {}
        self._under_way: Mapping[TableName, TableDefinition] = {}
        self._scripts: dict[str, SchemaScripts] = {}
        self._warnings: list[str] = []
        self._prepared: dict[str, None] = {}
        self._renamed: dict[TableName, TableName] = {}
        self._notice = ""
        self._blamed: dict[TableName, DumpTool] = {}
        self._by_tool: Counter[DumpTool] = Counter()
        self._done = self._files = self._expected = 0
        self._steady: frozenset[str] = frozenset()

    def run(self) -> tuple[Captured, DumpFacts]:
        """Raises what makes the backup as a whole impossible."""
        first, wanted = self._pass(())
        self._settle(first, wanted)
        position, blocked = first.position, first.blocked
        again = {name: why for name, why in first.bad.items() if name not in first.early}
        fresh = self._newcomers()
        if again or fresh:
            second = self._again([*again, *fresh], again, position)
            if second is not None and not first.good:
                position = second.position
            blocked = max(blocked, second.blocked if second is not None else 0.0)
        facts = self._facts(blocked)
        tool = self._by_tool.most_common(1)[0][0].tool if self._by_tool else self._spec.tools[0].tool
        info = self._spec.info
        receipts = Receipts(
            backup_type="logical",
            from_lsn=0,
            to_lsn=0,
            last_lsn=0,
            position=position,
            tool_version=str(tool.version),
            server_version=str(info.version),
        )
        return Captured(BackupKind.LOGICAL, tool, receipts, dump=facts, warnings=tuple(self._warnings)), facts

    # -- one pass

    def _pass(self, only: Sequence[TableName]) -> tuple[Passed, Sequence[Wanted]]:
        """Dump everything that is selected, or ``only`` these."""
        spec = self._spec
        self._way.clear()  # what changes while something is waited for later would have to be dumped again
        with contextlib.closing(self._way.listed(lambda: TableWatch(spec.connection))) as watch:
            with spec.connection.connect() as session:
                hurry(session)
                wanted = self._wanted(session, watch, only)
            settings = PassSettings(
                spec=spec,
                context=self._context,
                steady=self._steady,
                ready=self._way.clear,
                opened=self._redefined,
                notice=self._noticed,
            )
            return dump(settings, watch, wanted, self._packer, self._arrived), wanted

    def _wanted(self, session: Session, watch: TableWatch, only: Sequence[TableName]) -> Sequence[Wanted]:
        """Tables whose rows are to be dumped. Of the others it is said what became of them."""
        spec = self._spec
        self._steady = frozenset(str(name) for (name,) in session.query(_STEADY))
        there = self._way.listed(lambda: list_tables(session, strict=True))
        selection = spec.select(there)
        grants = read_grants(session)
        if only:
            chosen = [table for table in selection.taken if table.name in set(only)]
        else:
            chosen = list(selection.taken)
            self._warnings += (*selection.warnings, *unseen(grants, spec.include))
            for name, reason in selection.skipped:
                self._tell(DumpedTable(name, Outcome.SKIPPED, reason=reason))
            if not chosen and not selection.skipped:
                if spec.by_hand:
                    raise _none_fits(spec.include, there)
                raise RefusedError(
                    "there is no table to dump",
                    detail="\n".join(selection.warnings),
                    hint="check logical.tables in the policy and the privileges of the account: it needs SELECT, and "
                    "SHOW VIEW, TRIGGER, EVENT for views, triggers and events",
                )
        self._known |= {table.name for table in chosen}
        self._context.report(Progress("check", files_total=len(chosen)))
        closed = unreadable(session, grants, (table.name for table in chosen))
        report, cancel = self._warnings.append, self._context.cancel
        readable = [table for table in chosen if table.name not in closed]
        broken = {**closed, **check(session, readable, repair=spec.repair, report=report, cancel=cancel)}
        definitions = read_tables(session, [table.name for table in chosen if table.name not in broken])
        self._under_way = definitions.tables
        present = watch.present() if definitions.failed else frozenset()
        found: list[Wanted] = []
        for table in chosen:
            definition = definitions.tables.get(table.name)
            if definition is None:
                why = broken.get(table.name) or definitions.failed[table.name]
                gone = table.name not in broken and table.name not in present
                outcome, reason = (Outcome.SKIPPED, _BEFORE) if gone else (Outcome.FAILED, why)
                self._tell(DumpedTable(table.name, outcome, engine=table.engine, reason=reason))
                continue
            self._definitions[table.name] = definition
            if table.name in selection.bare:
                note = f"its definition only: {selection.bare[table.name]}"
                self._tell(DumpedTable(table.name, Outcome.DUMPED, engine=table.engine, note=note))
                continue
            found += self._with_tools(table, definition)
        self._expected += sum(one.table.size for one in found)
        return found

    def _redefined(self) -> Mapping[TableName, str]:
        """Once the snapshots are open: the tables whose definitions are not those that were read before, and why. What
        is between both readings belongs to the snapshots. Schemas are read only now."""
        stale: dict[TableName, str] = {}
        with self._spec.connection.connect() as session:
            now = read_tables(session, self._under_way)
            for name, before in self._under_way.items():
                definition = now.tables.get(name)
                if definition is None:
                    stale[name] = now.failed[name]
                    continue
                self._definitions[name] = definition
                if not definition.is_like(before):
                    stale[name] = ALTERED
            self._read_schemas(session, (name.schema for name in self._known))
        return stale

    def _with_tools(self, table: Table, definition: TableDefinition) -> list[Wanted]:
        asked = DumpTable(table.name, table.engine, table.size)
        refusals = {tool: tool.refuses(asked, definition.columns) for tool in self._spec.tools}
        # One that failed at it before comes last.
        able = [tool for tool, why in refusals.items() if not why]
        if able:
            tools = sorted(able, key=lambda tool: self._blamed.get(table.name) is tool)
            return [Wanted(table, definition, tuple(tools))]
        words = "; ".join(f"{tool.tool.name}: {why}" for tool, why in refusals.items())
        self._tell(DumpedTable(table.name, Outcome.FAILED, engine=table.engine, reason=words))
        return []

    def _again(self, names: Sequence[TableName], before: Mapping[TableName, str], position: Position) -> Passed | None:
        """Once more those that went wrong, and those that are new; whatever happens here is their trouble alone."""
        nothing_yet = not any(one.outcome is Outcome.DUMPED for one in self._outcomes.values())
        try:
            second, wanted = self._pass(names)
        except (CancelledError, DestinationError, StreamError):  # of the whole backup
            raise
        except BackupdError as error:
            why = f"{error.message}: {error.detail.splitlines()[0]}" if error.detail else error.message
            for name in names:
                engine = self._outcomes[name].engine if name in self._outcomes else ""
                reason = f"{before.get(name, _SINCE)}; and could not be dumped separately: {why}"
                self._tell(DumpedTable(name, Outcome.FAILED, engine=engine, reason=reason))
            return None
        self._settle(second, wanted, before, None if nothing_yet else second.position)
        for name in before.keys() - {one.name for one in wanted} - second.present:
            self._lose(name)
        if second.position != position and second.good and not nothing_yet:
            self._warnings.append(
                f"{len(second.good)} tables were dumped separately after the others and have a later position"
            )
        return second

    def _settle(
        self,
        passed: Passed,
        wanted: Sequence[Wanted],
        before: Mapping[TableName, str] | None = None,
        position: Position | None = None,
    ) -> None:
        self._warnings += passed.trouble
        self._prepared |= dict.fromkeys(passed.prepared)
        self._renamed |= passed.renamed
        self._blamed.update(passed.blamed)
        for one in wanted:
            written = passed.good.get(one.name)
            if written is not None:
                self._by_tool[written.tool] += max(written.bytes, 1)
                why = (before or {}).get(one.name)
                notes = [written.note, f"dumped again, separately: {why}" if why else ""]
                self._tell(
                    DumpedTable(
                        one.name,
                        Outcome.DUMPED,
                        engine=one.table.engine,
                        rows=written.rows,
                        bytes=written.bytes,
                        files=written.files,
                        tool=written.tool.tool.name,
                        note="; ".join(filter(None, notes)),
                        position=position,
                    )
                )
            elif one.name in passed.early:
                self._tell(DumpedTable(one.name, Outcome.SKIPPED, engine=one.table.engine, reason=_BEFORE))
            else:
                self._tell(DumpedTable(one.name, Outcome.FAILED, engine=one.table.engine, reason=passed.bad[one.name]))

    def _newcomers(self) -> list[TableName]:
        """Tables that are selected and were not there at the beginning."""
        try:
            with self._spec.connection.connect() as session:
                hurry(session)
                taken = self._spec.select(list_tables(session, strict=True)).taken
                return [table.name for table in taken if table.name not in self._known]
        except ServerError as error:
            self._warnings.append(
                f"cannot determine whether tables were created while the backup ran: {error.message}: {error.detail}"
            )
            return []

    # -- the end

    def _facts(self, blocked: float) -> DumpFacts:
        """Write what goes with the rows, and sum up."""
        outcomes = [self._outcomes[name] for name in sorted(self._outcomes)]
        dumped = [one for one in outcomes if one.outcome is Outcome.DUMPED]
        failed = [one for one in outcomes if one.outcome is Outcome.FAILED]
        if failed and not dumped:
            raise ToolError(
                f"none of {len(failed)} tables could be dumped",
                detail="\n".join(f"{one.name.shown}: {one.reason}" for one in failed[:_SHOWN]),
                hint="the detail lists the first reasons; nothing of this backup was stored",
            )
        for one in dumped:
            definition = self._definitions[one.name]
            self._write(definition_path(one.name), write_definition(definition))
            self._write(triggers_path(one.name), write_triggers(definition))
        unsteady = sum(1 for one in dumped if one.note and one.rows is not None and one.engine not in self._steady)
        if unsteady:
            self._warnings.append(
                f"{unsteady} tables are of engines without snapshots: their rows may be newer than "
                "the position; ALTER TABLE ... ENGINE=InnoDB gives them one"
            )
        return DumpFacts(
            tables=tuple(outcomes),
            schemas=self._write_schemas({one.name.schema for one in dumped}),
            table_set=self._spec.table_set,
            blocked=round(blocked, 3),
            settings={name: self._spec.info.variables[name] for name in _SETTINGS if name in self._spec.info.variables}
            | self._xa(),
        )

    def _xa(self) -> dict[str, str]:
        if not self._prepared:
            return {}
        self._warnings.append(not_a_base(self._prepared))
        return {PREPARED_XA: "; ".join(self._prepared)}

    def _read_schemas(self, session: Session, used: Iterable[str]) -> None:
        """The scripts of all schemas that are not read yet and are wanted as a whole, or hold one of the tables."""
        spec, wanted = self._spec, set(used)
        present = {str(name) for (name,) in session.query(_SCHEMAS)} - set(SYSTEM_SCHEMAS) - self._scripts.keys()
        for schema in sorted(name for name in present if name in wanted or spec.whole(name)):
            try:
                scripts = read_schema(session, schema, objects=spec.whole(schema))
            except NotFoundError:  # dropped just now, and its tables with it
                continue
            self._warnings += [f"schema {schema}: {why}" for why in scripts.unread]
            self._scripts[schema] = scripts

    def _write_schemas(self, used: set[str]) -> tuple[str, ...]:
        kept = [schema for schema in sorted(self._scripts) if schema in used or self._spec.whole(schema)]
        for schema in kept:
            for path, content in self._scripts[schema].files().items():
                self._write(path, content)
        return tuple(kept)

    def _write(self, path: str, content: bytes) -> None:
        if content:
            self._packer.data(path, 0, memoryview(content))
            self._packer.end(path)

    def _tell(self, table: DumpedTable) -> None:
        self._outcomes[table.name] = table

    def _lose(self, name: TableName) -> None:
        now = self._outcomes.get(self._renamed.get(name, name))
        if now is None or now.outcome is not Outcome.DUMPED:
            self._tell(DumpedTable(name, Outcome.FAILED, engine=self._outcomes[name].engine, reason=DROPPED))
        else:
            self._tell(DumpedTable(name, Outcome.SKIPPED, engine=now.engine, reason=RENAMED.format(now.name.shown)))

    def _arrived(self, table: TableName, size: int) -> None:
        self._done += size
        self._files += 1
        note = f"{table.shown}; {self._notice}" if self._notice else table.shown
        self._context.report(Progress("dump", self._done, max(self._expected, self._done), self._files, note=note))

    def _noticed(self, words: str) -> None:
        self._notice = words

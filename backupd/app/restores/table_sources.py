"""The ways to some tables at a target: out of a logical backup, or out of a physical one, and what each would move."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from backupd.app.binlogs.targets import Targets
from backupd.app.context.server_identity import own_branches
from backupd.app.context.wiring import Wiring
from backupd.app.restores.plan import plan, sources
from backupd.app.restores.request import TableOptions
from backupd.app.restores.thaw_wait import with_thaw
from backupd.app.restores.usable_backups import measured_rates
from backupd.engine.physical.tablefiles import stem_of, table_of
from backupd.engine.server.probe import CLONE
from backupd.engine.sql.dialect import dialect_of
from backupd.model.backup_record import BackupKind
from backupd.model.binlog import ReplaySpec, Transaction
from backupd.model.errors import (
    BackupdError,
    DamagedError,
    DestinationError,
    NotFoundError,
    RefusedError,
)
from backupd.model.server_facts import ServerInfo
from backupd.model.table import PREPARED_XA, Outcome, TableName, TablePattern, fits_any
from backupd.model.text import format_time
from backupd.recovery.windows import not_rolled
from restore.fetch.sources import Loaded, load_chain, load_dump
from restore.planning.inexact_replay import InexactError
from restore.planning.plan import Plan, thaw_step
from restore.planning.table_plan import Candidate, Impossible, Source, TablePlan, choose, goals, no_table
from restore.planning.target import OlderError
from restore.replay.related_tables import Relatives, relatives
from restore.scratch_server import refuse_inexact
from restore.subset import subset_of, tables_in
from restore.tables.source import part_of_dump

_NAMED = 3
"""Tables that are needed besides, of which the reason is shown."""
_INNODB = ".ibd"
_DOUBTFUL = "CREATE ... IF NOT EXISTS created it unless it existed, and the backup does not record whether it did"
_MOST_TRIES = 8
"""Logical backups that are looked at for tables which the newer ones do not hold."""


@dataclass(frozen=True, slots=True)
class Way:
    """A candidate with what its execution needs besides. ``statements``: of the transactions that are replayed, those
    that the index has the text of. ``missing``: tables that a pattern fits and the backup could not take, and why.
    ``objects``: the names of those that are fetched."""

    candidate: Candidate
    wanted: tuple[TableName, ...]
    objects: frozenset[str]
    statements: tuple[Transaction, ...] = ()
    missing: Mapping[TableName, str] = field(default_factory=dict)


def chosen_way(wiring: Wiring, server_name: str, target: str, wanted: TableOptions) -> tuple[TablePlan, Way]:
    """The plan that is best for ``wanted``, and its way. Where an older or inexact one is accepted it
    is taken only where no other is there. Raises the reasons for want of any."""
    search = _Search(wiring, server_name, target, wanted)
    search.refuse_moment()
    if wanted.options.accept_older or wanted.options.accept_inexact:
        try:
            return chosen_way(
                wiring,
                server_name,
                target,
                replace(wanted, options=replace(wanted.options, accept_older=False, accept_inexact=False)),
            )
        except (OlderError, InexactError):
            pass
    ways: list[Way] = []
    impossible: list[Impossible] = []
    for source, look in ((Source.LOGICAL, search.logical), (Source.PHYSICAL, search.physical)):
        if wanted.source not in (None, source):
            continue
        try:
            ways.append(look())
        except (NotFoundError, RefusedError, DamagedError, DestinationError) as error:
            impossible.append(Impossible(source, error))
    names = {name for way in ways for name in way.wanted}
    made = choose([way.candidate for way in ways], impossible, (), measured_rates(wiring, server_name, tables=True))
    way = next(way for way in ways if way.candidate is made.chosen)
    found = goals(sorted({*way.wanted, *way.missing}), wanted.renaming)
    warnings = [
        f"{name.shown} is not in backup {made.base.backup_id}, and is left out: {why}"
        for name, why in way.missing.items()
    ]
    warnings += [
        f"only the other kind of backup holds {name.shown} (--from logical or physical)"
        for name in sorted(names - set(way.wanted))
    ]
    return _with_thaw(wiring, replace(made, goals=found, warnings=(*made.warnings, *warnings)), way, wanted), way


def _with_thaw(wiring: Wiring, made: TablePlan, way: Way, wanted: TableOptions) -> TablePlan:
    """The plan with what has to be thawed for these tables."""
    before = made.base
    base = with_thaw(wiring, before, wiring.catalog.backups.list(before.server), wanted.options, only=way.objects)
    steps = (thaw_step(base.thaw), *made.steps) if base.thaw is not None else made.steps
    said = tuple(text for text in base.warnings if text not in before.warnings)
    return replace(made, chosen=replace(made.chosen, base=base), steps=steps, warnings=(*made.warnings, *said))


def _way(
    source: Source,
    base: Plan,
    found: _Resolved,
    parts: Sequence[Loaded],
    rows: int,
    said: Sequence[str],
    missing: Mapping[TableName, str],
) -> Way:
    """``parts``: what is fetched; ``rows``: bytes of the tables' own; ``said``: warnings of reading it."""
    if base.replay is not None:
        base = replace(base, replay=replace(base.replay, tables=tuple(str(name) for name in found.needed)))
    stored, size = _bytes(parts)
    warnings = (*base.warnings, *said, *found.remarks)
    candidate = Candidate(source, base, found.needed, stored, size, rows, warnings, tuple(missing))
    return Way(candidate, found.wanted, _objects(parts), found.statements, missing)


def _refuse_without_rows(loaded: Loaded, patterns: Sequence[TablePattern]) -> None:
    """Raises NotFoundError for a table, asked for by its name, that a clone has no rows of. Others that a pattern fits
    are named when the restore has found them."""
    if loaded.header.tool != CLONE:
        return
    stems: dict[str, bool] = {}
    for entry in loaded.body.entries:
        if stem := stem_of(entry.path):
            stems[stem] = stems.get(stem, False) or entry.path.endswith(_INNODB)
    bare = {table_of(stem) for stem, rows in stems.items() if not rows}
    for pattern in patterns:
        if pattern.table in bare:
            raise NotFoundError(
                f"backup {loaded.header.backup_id} holds no rows of {pattern.table.shown}: a clone has those of InnoDB "
                "only",
                hint="restore it from a logical backup",
            )


def _without_files(
    loaded: Loaded, there: Collection[TableName], patterns: Sequence[TablePattern]
) -> dict[TableName, str]:
    """Tables that a pattern fits and that have no files of their own, such as RocksDB's, and why they are left out.
    Raises NotFoundError where a pattern fits nothing else."""
    listed = loaded.body.facts.inventory or ()
    found = {
        table.name: f"it is of engine {table.engine or 'unknown'} and has no separate file there, so only a restore "
        "of the whole server brings it back"
        for table in listed
        if table.name not in there and fits_any(table.name, patterns)
    }
    for pattern in patterns:
        only = next((name for name in found if pattern.fits(name)), None)
        if only is not None and not any(map(pattern.fits, there)):
            raise NotFoundError(
                f"{only.shown} cannot be restored separately from backup {loaded.header.backup_id} alone: "
                f"{found[only]}",
                hint="restore it from a logical backup (--from logical), or restore the whole server beside this one "
                "(--datadir DIR)",
            )
    return found


@dataclass(frozen=True, slots=True)
class _Resolved:
    """``wanted``: tables by their names at the target; ``needed`` for that, as far as the logs show. ``doubtful``: what
    is there at the target, too, and cannot be distinguished from the backup, and why."""

    wanted: tuple[TableName, ...]
    needed: tuple[TableName, ...]
    statements: tuple[Transaction, ...]
    remarks: tuple[str, ...]
    doubtful: Mapping[TableName, str]


@dataclass(frozen=True, slots=True)
class _Search:
    """For the tables that are ``wanted`` of ``server`` as they were at ``target``."""

    wiring: Wiring
    server: str
    target: str
    wanted: TableOptions

    def refuse_moment(self) -> None:
        """Raises RefusedError for a moment of a server of which only backups are restored."""
        newest = max(self.wiring.catalog.backups.list(self.server), key=lambda one: one.finished_at, default=None)
        if newest is not None and (why := not_rolled(newest)) and not self.target.startswith("backup:"):
            raise RefusedError(
                f"tables of {newest.flavour} {newest.server_version} can be restored only from a named backup",
                detail=why,
                hint=f"name the backup and write SQL files: --to backup:{newest.id} --sql FOLDER",
            )

    def _plan(self, dumps: frozenset[str] | None) -> Plan:
        """As for the whole server; with ``dumps`` out of a logical backup that is none of these."""
        return plan(
            self.wiring,
            self.server,
            self.target,
            None,
            options=self.wanted.options,
            dumps=dumps,
            cold=False,
            narrowed=True,
        )

    def physical(self) -> Way:
        """Out of the files of a physical backup."""
        base, patterns = self._plan(None), self.wanted.tables
        chain, said = load_chain(self.server, base.chain, sources(self.wiring, base))
        _refuse_without_rows(chain[-1], patterns)
        there, listed = tables_in(chain[-1]), chain[-1].body.facts.inventory
        apart = _without_files(chain[-1], there, patterns)
        before = (*there, *(table.name for table in listed)) if listed is not None else None
        found = self._resolve(there, base, chain[-1].body.facts.server, before)
        needed = frozenset(found.needed)
        cut = subset_of(chain, lambda name: name in needed)
        nothing = subset_of(chain, lambda _name: False)
        rows = max(0, _bytes(cut)[1] - _bytes(nothing)[1])
        return _way(Source.PHYSICAL, base, found, cut, rows, said, {**found.doubtful, **apart})

    def logical(self) -> Way:
        """Out of the newest logical backup before the target that holds all of the tables. With patterns one that lacks
        some of them will do, unless an older one with all of them leads to the same target."""
        if not any(record.kind is BackupKind.LOGICAL for record in self.wiring.catalog.backups.list(self.server)):
            raise NotFoundError(
                f"server {self.server} has no logical backup",
                hint=f"take one: backupd backup {self.server} --kind logical",
            )
        lacking: set[str] = set()
        refused: BackupdError | None = None
        partial: Way | None = None
        for _ in range(_MOST_TRIES):
            try:
                base = self._plan(frozenset(lacking))
                loaded, said = load_dump(self.server, base.backup_id, sources(self.wiring, base))
            except (NotFoundError, RefusedError, DamagedError, DestinationError) as error:
                if partial is not None:
                    break
                raise refused or error from error
            try:
                way = self._dumped(base, loaded, said)
                if not way.missing and (partial is None or base.until is not None):
                    return way
                partial = partial or way
            except (NotFoundError, RefusedError) as error:
                refused = refused or error
            if partial is not None and base.until is None:
                break
            lacking.add(base.backup_id)
        if partial is not None:
            return partial
        raise refused or NotFoundError(f"server {self.server} has no logical backup of these tables")

    def _dumped(self, base: Plan, loaded: Loaded, said: Sequence[str]) -> Way:
        facts = loaded.body.facts
        if facts.dump is None:
            raise NotFoundError(f"backup {base.backup_id} is not a logical backup")
        if base.replay is not None and (names := facts.dump.settings.get(PREPARED_XA)):
            raise RefusedError(
                f"backup {base.backup_id} cannot be rolled forward: XA transactions were prepared at its position, "
                "which it does not hold",
                detail=names,
                hint="physical backups hold them (--from physical); without a replay it can be restored "
                f"(--to backup:{base.backup_id})",
            )
        there = tuple(table.name for table in facts.dump.dumped)
        broken = [
            table for table in facts.dump.tables if table.name not in there and fits_any(table.name, self.wanted.tables)
        ]
        if any(pattern.table == table.name for pattern in self.wanted.tables for table in broken) or (
            broken and not any(fits_any(name, self.wanted.tables) for name in there)
        ):
            first = broken[0]
            raise NotFoundError(
                f"backup {base.backup_id} does not hold {first.name.shown}: {first.reason or first.outcome}",
                detail="\n".join(f"{table.name.shown}: {table.reason or table.outcome}" for table in broken[:20]),
            )
        found = self._resolve(there, base, facts.server)
        needed = frozenset(found.needed)
        if base.replay is not None:
            refuse_inexact([table for table in facts.dump.dumped if table.name in needed], base.replay)
        part = part_of_dump(loaded, lambda name: name in needed)
        rows = sum(table.bytes for table in facts.dump.dumped if table.name in needed)
        missing = {
            table.name: table.reason
            for table in broken
            if table.outcome is Outcome.FAILED and table.name not in found.wanted
        }
        missing |= found.doubtful
        skipped = [
            f"{table.name.shown} was left out of backup {base.backup_id}: {table.reason}"
            for table in broken
            if table.outcome is Outcome.SKIPPED and table.name not in found.wanted
        ]
        found = replace(found, remarks=(*found.remarks, *skipped))
        return _way(Source.LOGICAL, base, found, [part], rows, said, missing)

    def _resolve(
        self, there: Sequence[TableName], base: Plan, info: ServerInfo, before: Sequence[TableName] | None = None
    ) -> _Resolved:
        """Which tables the patterns mean at the target. ``before``: all that the server had when the backup was taken,
        None where that is not known. Raises NotFoundError for a name that means none there, RefusedError where they
        cannot be distinguished from all others."""
        lower = info.variables.get("lower_case_table_names") == "1"
        statements = tuple(self._statements(base.replay, info)) if base.replay else ()
        changed = {TableName(change.schema, change.name) for one in statements for change in one.changes if change.name}
        fitting = [name for name in sorted({*there, *changed}) if fits_any(name, self.wanted.tables)]
        kin = relatives(fitting, statements, lambda _name: (), known=there, before=before, lower_case=lower)
        left = [name for name in fitting if name not in kin.gone]
        names = [name for name in left if name in there or name in kin.made]
        doubtful = {name: _DOUBTFUL for name in left if name in kin.perhaps and name not in there}
        asked = [name for name in doubtful if not names or any(pattern.table == name for pattern in self.wanted.tables)]
        if asked and not kin.inseparable:
            raise NotFoundError(
                f"backup {base.backup_id} does not hold {asked[0].shown}: {_DOUBTFUL}",
                hint="choose a backup from before or after that statement (--to backup:ID)",
            )
        for pattern in self.wanted.tables:
            # Where a statement is known in part only, so is what came of the tables that it names.
            if not any(pattern.fits(name) for name in (left if kin.inseparable else [*names, *doubtful])):
                raise _missing(pattern, base, kin, there)
        if kin.inseparable:
            raise RefusedError(
                "these tables cannot be rolled forward without all others",
                detail="\n".join(kin.inseparable),
                hint="restore the whole server beside it (--datadir DIR --start), or choose a target without a replay: "
                f"backup:{base.backup_id}",
            )
        remarks = [f"{name.shown} is also required: {why}" for name, why in kin.reasons.items()]
        if len(remarks) > _NAMED:
            more = ", ".join(name.shown for name in list(kin.reasons)[_NAMED:])
            remarks = [*remarks[:_NAMED], f"{len(kin.reasons) - _NAMED} more tables are also required: {more}"]
        return _Resolved(
            tuple(names), tuple(dict.fromkeys((*names, *kin.tables))), statements, tuple(remarks), doubtful
        )

    def _statements(self, replay: ReplaySpec, info: ServerInfo) -> Iterator[Transaction]:
        """Raises RefusedError for what no replay can be narrowed down over: MySQL's applier stops at XA transactions
        when it has filters (error 3898)."""
        wiring, dialect = self.wiring, dialect_of(info.flavour, info.version)
        server = wiring.settings.server(self.server)
        targets = Targets(wiring, self.server, own_branches(wiring, self.server), prefer=server.preferred)
        for leg in replay.legs:
            for one in targets.within(leg):
                if one.state and not dialect.filters_xa:
                    raise RefusedError(
                        "single tables cannot be rolled forward over XA transactions on this server",
                        detail=f"{one.gtid or f'byte {one.start}'} of {format_time(one.at)} is one",
                        hint="restore the whole server beside it (--datadir DIR --start) and copy the tables, or "
                        "choose a target without a replay, or one before that transaction",
                    )
                if one.statement:
                    yield one


def _missing(pattern: TablePattern, base: Plan, kin: Relatives, known: Sequence[TableName]) -> NotFoundError:
    only = pattern.table
    if only is not None and only in kin.gone:
        now = kin.gone[only]
        fate = f"it was renamed to {now.shown}" if now else "it was dropped"
        return NotFoundError(
            f"{only.shown} does not exist at the target: {fate} after backup {base.backup_id}",
            hint=f"name {now.shown}, or an earlier target"
            if now
            else "`backupd binlog search SERVER --kind drop` finds the time; restore to a target before it",
        )
    return no_table(str(pattern), known, base.backup_id)


def _objects(chain: Iterable[Loaded]) -> frozenset[str]:
    return frozenset(item.name for loaded in chain for item in loaded.header.objects)


def _bytes(chain: Iterable[Loaded]) -> tuple[int, int]:
    """What has to be fetched, and what that becomes."""
    headers = [loaded.header for loaded in chain]
    stored = {item.name: item.size for header in headers for item in header.objects}
    return sum(stored.values()), sum(header.stats.bytes_source for header in headers)

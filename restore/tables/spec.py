"""Every decision about one restore of tables, taken before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backupd.model.binlog import ReplaySpec, Transaction
from backupd.model.table import DumpedTable, Outcome, TableName
from restore.cutover.cutover import Triggers
from restore.difference.row_difference import SAMPLE
from restore.planning.table_names import TableGoal
from restore.planning.table_plan import Source


@dataclass(frozen=True, slots=True)
class TablesSpec:
    """``way``: what the tables come out of, by the backups of ``chain`` and ``replay``. ``statements``: of what is
    replayed, the transactions that the index has the text of: they tell which other tables are needed. ``goals``: the
    tables by their names at the target, and the names that they get. ``into``: the server's name, "" for SQL files in
    ``sql``. ``whole``: schemas of which all tables were asked for, under their schema's name: what else they have comes
    back, too. ``replace``: may live tables lose their names to them? ``compare``: end before anything is handed over.
    ``keys``: the most that are shown of each table's missing, added and changed rows.
    ``folder``: where copies and rows are kept meanwhile; ``max_bytes``: the most that they may take there, None for
    what is free; ``memory``: most bytes for prepare and for private servers. ``workers``
    0: as many as this machine can use. ``templates``, ``programs``: see ``rollforward.Means``. ``missing``: of the
    goals, by their names at the target, those that the backup lacks, and why. ``key_files``: of
    the configuration."""

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
    memory: int
    sql: Path | None = None
    whole: tuple[str, ...] = ()
    replace: bool = False
    compare: bool = False
    keys: int = SAMPLE
    triggers: Triggers = Triggers.BACKUP
    max_bytes: int | None = None
    workers: int = 0
    templates: Path | None = None
    programs: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[TableName, str] = field(default_factory=dict)
    key_files: Sequence[Path] = ()

    @property
    def lacking(self) -> tuple[DumpedTable, ...]:
        """What became of ``missing``."""
        return tuple(DumpedTable(name, Outcome.FAILED, reason=why) for name, why in self.missing.items())

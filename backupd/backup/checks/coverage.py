"""Tables that the physical backups of a server leave out: are they in a logical one?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from backupd.backup.checks.finding import Finding, fine, warning
from backupd.engine.server.census import ROCKSDB, uncovered
from backupd.engine.sql.tables import Table
from backupd.model.server_facts import Flavour
from backupd.model.table import TableName, TablePattern, fits_any
from backupd.recovery.windows import REPLAY_STOPS
from policies.schema import Logical

SUBJECT = "engines"
REMEDY = (
    "give the policy a logical leg with a schedule of its own: it takes such tables by itself, whatever its "
    "tables.include and max_size say, unless tables.exclude fits them; or move them to InnoDB: ALTER TABLE ... "
    "ENGINE=InnoDB"
)
_NO_SNAPSHOTS = ("MyISAM", "Aria")
_SHOWN = 10
_ROCKS_REMEDY = (
    "name them in tables.include of a logical schedule, so that a dump holds them too; or move them to "
    "InnoDB: ALTER TABLE ... ENGINE=InnoDB"
)


def left_out(tables: Iterable[Table], flavour: Flavour, tool: str) -> dict[str, list[TableName]]:
    """By engine, the tables whose rows are in no physical backup by ``tool`` (its name)."""
    by_engine: dict[str, list[TableName]] = defaultdict(list)
    for table in tables:
        if not table.is_system:
            by_engine[table.engine].append(table.name)
    return {engine: by_engine[engine] for engine in sorted(uncovered(by_engine, flavour, tool))}


def in_no_backup(left: Mapping[str, Sequence[TableName]], logical: Logical | None) -> dict[str, list[TableName]]:
    """By engine, those of ``left`` (see ``left_out``) that the ``logical`` leg of the policy does not take either."""
    lost = {engine: [name for name in names if not _is_dumped(name, logical)] for engine, names in left.items()}
    return {engine: names for engine, names in lost.items() if names}


def lost_words(engine: str, names: Sequence[TableName]) -> str:
    """In words, of ``engine``: which tables (``names``) are in no backup at all."""
    shown = ", ".join(name.shown for name in names[:_SHOWN])
    shown += f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"of engine {engine}, which physical backups leave out, {len(names)} tables are in no backup at all: {shown}"


def rocks_words(names: Sequence[TableName]) -> str:
    """In words: what can not be done with the MyRocks tables ``names``, though physical backups hold them."""
    shown = ", ".join(name.shown for name in names[:_SHOWN])
    shown += f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"the {len(names)} tables of engine {ROCKSDB} are in physical backups, and come back only with a restore "
        "of the whole server as it was at a backup: the private server of a test restore, of a restore of tables "
        "and of a replay does not load that engine, so these backups are never proved, and "
        f"{REPLAY_STOPS} of their rows: {shown}"
    )


def examine_coverage(
    tables: Iterable[Table],
    flavour: Flavour,
    tool: str,
    logical: Logical | None,
) -> Iterator[Finding]:
    """``tool``: the name of the one that takes the physical backups. ``logical``: the policy's logical leg."""
    known = [table for table in tables if not table.is_system]
    left = left_out(known, flavour, tool)
    rocks = [table.name for table in known if table.engine == ROCKSDB]
    if rocks and ROCKSDB not in left:
        yield warning(SUBJECT, rocks_words(rocks), _ROCKS_REMEDY)
    lost = in_no_backup(left, logical)
    for engine, names in left.items():
        if engine in lost:
            yield warning(SUBJECT, lost_words(engine, lost[engine]), REMEDY)
        else:
            yield fine(
                SUBJECT,
                f"physical backups leave out the {len(names)} tables of engine {engine}; all of them "
                "are in logical ones",
            )


def recommend(engines: Mapping[str, int]) -> Iterator[Finding]:
    """What backups of tables without snapshots cannot do. ``engines``: numbers of user tables."""
    old = {engine: engines[engine] for engine in _NO_SNAPSHOTS if engine in engines}
    if old:
        shown = ", ".join(f"{count} of {engine}" for engine, count in old.items())
        yield warning(
            SUBJECT,
            f"tables of engines without snapshots ({shown}): a crash can damage them, a dump may "
            "have newer rows than its position, and a witness compares them only where nothing is "
            "written meanwhile",
            "move them to InnoDB where the application allows: ALTER TABLE ... ENGINE=InnoDB",
        )


def _is_dumped(name: TableName, logical: Logical | None) -> bool:
    """The set without a name takes all such tables that it does not exclude."""
    if logical is None:
        return False
    return any(
        (not table_set or fits_any(name, map(TablePattern.parse, tables.include)))
        and not fits_any(name, map(TablePattern.parse, tables.exclude))
        for table_set, (_cadence, tables) in logical.selections.items()
    )

"""Tables that the physical backups of a server leave out: are they in a logical one?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from backupd.backup.finding import Finding, fine, warning
from backupd.engine.census import uncovered
from backupd.engine.tables import Table
from backupd.model.server import Flavour
from backupd.model.table import TableName, TablePattern, fits_any
from policies.schema import Logical

SUBJECT = "engines"
_SHOWN = 10


def examine_coverage(tables: Iterable[Table], flavour: Flavour, tool: str, logical: Logical | None,
                     ) -> Iterator[Finding]:
    """``tool``: the name of the one that takes the physical backups. ``logical``: the policy's logical leg."""
    by_engine: dict[str, list[TableName]] = defaultdict(list)
    for table in tables:
        if not table.is_system:
            by_engine[table.engine].append(table.name)
    for engine in sorted(uncovered(by_engine, flavour, tool)):
        lost = [name for name in by_engine[engine] if not _is_dumped(name, logical)]
        if not lost:
            yield fine(SUBJECT, f"physical backups leave out the {len(by_engine[engine])} tables of engine {engine}; "
                                "all of them are in logical ones")
            continue
        shown = ", ".join(name.shown for name in lost[:_SHOWN])
        shown += f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        yield warning(SUBJECT, f"of engine {engine}, which physical backups leave out, {len(lost)} tables are in no "
                               f"backup at all: {shown}",
                      "give the policy a logical leg whose tables.include fits them (max_size does not keep them out); "
                      "or move them to InnoDB: ALTER TABLE ... ENGINE=InnoDB")


def _is_dumped(name: TableName, logical: Logical | None) -> bool:
    if logical is None:
        return False
    return any(fits_any(name, map(TablePattern.parse, tables.include))
               and not fits_any(name, map(TablePattern.parse, tables.exclude))
               for _cadence, tables in logical.selections.values())

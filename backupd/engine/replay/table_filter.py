"""A replay narrowed down to some tables, by the servers' own filters.

Rows of other tables are skipped, and so is a statement that changes none of the tables; one that changes any of them is
executed whole, so all tables that it names must be there. Statements about accounts are skipped, too. Those about
routines, scheduled events and servers are no filter's business, and fail where what they mean (a schema, say) is not
there: they are taken out of the served logs. Only where data was logged as statements, which may call routines, those
of the tables' own schemas stay.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase

from backupd.engine.binlog.walk import Walk
from backupd.engine.sql.client import Session
from backupd.model.server_facts import Version
from backupd.model.table import TableName

_SPECIAL = str.maketrans({"\\": "\\\\", "%": "\\%", "_": "\\_"})
_CALLED = frozenset({"PROCEDURE", "FUNCTION", "PACKAGE"})
_BY_CHANNEL = Version(8, 0)


def patterns(tables: Sequence[TableName]) -> tuple[str, ...]:
    """Wild patterns that fit just these tables, and what is done to their schemas.

    Patterns, because with them statements about other schemas are left out: a server asks for the pattern of a table
    without a name.
    """
    schemas = dict.fromkeys(table.schema for table in tables)
    return (
        *(f"{_escaped(table.schema)}.{_escaped(table.table)}" for table in dict.fromkeys(tables)),
        *(f"{_escaped(schema)}." for schema in schemas),
    )


def mistakable(name: TableName) -> str:
    """The same for two tables that a filter may take for each other. Servers compare without regard to case and
    accents, even where names differ by these."""
    plain = unicodedata.normalize("NFKD", f"{name.schema}.{name.table}").casefold()
    return "".join("_" if char == "," else char for char in plain if not unicodedata.combining(char))


def _escaped(name: str) -> str:
    return name.translate(_SPECIAL)


def left_out(found: Walk, tables: Sequence[TableName]) -> Iterator[tuple[Path, int]]:
    """Statements that must not be executed when only ``tables`` are: path and place of each."""
    schemas = {table.schema for table in tables}
    for path, at, routine in found.routines if tables else ():
        called = found.by_statement and routine.kind in _CALLED and not routine.loaded
        if not (called and routine.schema in schemas):
            yield path, at


def skipped_statement(tables: Sequence[TableName]) -> str:
    """One that the filter skips, as short as the shortest that it may replace (``DROP EVENT e``)."""
    names = (TableName(one, other) for one, other in itertools.product(ascii_lowercase, repeat=2))
    free = next(name for name in names if name not in tables)
    return f"TRUNCATE {free.schema}.{free.table}"


def filter_mariadb(session: Session, connection: str, tables: Sequence[TableName]) -> None:
    """Let a replication connection, which is there and stopped, apply these tables only; none: no filter."""
    # A comma stands between two patterns; "_" fits it, too.
    wanted = ",".join(pattern.replace(",", "_") for pattern in patterns(tables))
    session.execute(f"SET GLOBAL `{connection}`.replicate_wild_do_table = %s", wanted)


def filter_mysql(session: Session, channel: str, version: Version, tables: Sequence[TableName]) -> None:
    """The same of a channel of MySQL."""
    wanted = patterns(tables)
    marks = ", ".join(["%s"] * len(wanted))
    of_channel = f" FOR CHANNEL '{channel}'" if version >= _BY_CHANNEL else ""
    session.execute(f"CHANGE REPLICATION FILTER REPLICATE_WILD_DO_TABLE = ({marks}){of_channel}", *wanted)

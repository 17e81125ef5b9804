"""What can be said of a restore of tables by a look at the server that gets them, before or without loading a row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from backupd.engine.schema.definition_text import tokens
from backupd.engine.schema.definitions import TableDefinition
from backupd.engine.server.probe import read_dialect
from backupd.engine.sql.client import Session, error_code, is_denied
from backupd.engine.sql.dialect import FIRST_FOR_TABLES
from backupd.engine.sql.tables import SYSTEM_SCHEMAS
from backupd.model.errors import RefusedError, ServerError
from backupd.model.table import TableName
from restore.cutover.keys_and_triggers import TableInventory

_ENGINES = "SELECT ENGINE FROM information_schema.ENGINES WHERE SUPPORT IN ('YES', 'DEFAULT')"
_UNKNOWN = frozenset({1115, 1273})
"""A character set, a collation."""
_COLLATION = re.compile(r"\w+")


def refuse_old(session: Session, server: str) -> None:
    """Raises RefusedError for a server that tables are not put into; ServerError."""
    dialect = read_dialect(session)
    if not dialect.restores_tables:
        raise RefusedError(
            f"{server} is {dialect.flavour} {dialect.version}: tables are put into {FIRST_FOR_TABLES} and later only",
            hint="write them as SQL files (--sql FOLDER), which the server's own client loads; or restore a whole "
            "backup beside it (--to backup:ID --datadir FOLDER)",
        )


def refuse_unfit(inventory: TableInventory, targets: Sequence[TableName]) -> None:
    """Raises RefusedError for names that no table can get: of the server's own schemas, and of views."""
    if system := [name.shown for name in targets if name.schema.lower() in SYSTEM_SCHEMAS]:
        raise RefusedError(
            f"tables of the server itself are not replaced: {', '.join(system)}",
            hint="restore the whole server, or these tables under other names (--as)",
        )
    if views := [name.shown for name in targets if "VIEW" in inventory.kind(name).upper()]:
        raise RefusedError(
            f"there are views of these names: {', '.join(views)}",
            hint="drop or rename them, or choose other names for the tables (--as)",
        )


def remarks_on(session: Session, server: str) -> Iterator[str]:
    """Why writing to this server may not be what is wanted. Raises ServerError."""
    if str(session.scalar("SELECT @@GLOBAL.read_only")).upper() not in ("0", "OFF"):
        yield (
            f"{server} is read_only, and this account may write there all the same: what is restored becomes "
            "transactions of its own that its source does not have"
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
            f"{server} replicates from another server: what is restored becomes transactions of its own that its "
            "source does not have, and later changes from there may not fit to it"
        )


def unknown_to(session: Session, definitions: Iterable[TableDefinition]) -> Mapping[TableName, str]:
    """The tables that the server cannot make for want of an engine or a collation, and why. Raises ServerError."""
    engines = {str(name).upper() for (name,) in session.query(_ENGINES)}
    known: dict[str, bool] = {}
    found = {}
    for definition in definitions:
        if definition.engine and definition.engine.upper() not in engines:
            found[definition.name] = (
                f"the server has no engine {definition.engine}: install its plugin, or write the "
                "table as SQL files (--sql)"
            )
            continue
        for collation in _collations(definition.create):
            if collation not in known:
                known[collation] = _knows(session, collation)
            if not known[collation]:
                found[definition.name] = (
                    f"the server does not know the collation {collation}: restore the table into "
                    "a server that does, or write it as SQL files (--sql) and change them"
                )
                break
    return found


def _collations(create: str) -> Iterator[str]:
    words = list(tokens(create))
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

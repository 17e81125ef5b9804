"""What replacing a live table by a restored one would change, row by row, computed on the server that has both.

Both are read in one snapshot, without locks, and nothing but counts and a few keys leaves the server. Rows belong
together by a key that both have, and are equal when every column that both store is, to the byte. Where there is no
such key, whole rows are counted: one that occurs three times here and once there is missing twice. Definitions are
compared, too: the same rows in another table are not the same.

How columns are compared (``Common``): which of them, and by which expressions, to the byte.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

from backupd.engine.dump.insert_files import SHAPES
from backupd.engine.server.definitions import Definitions, TableDefinition, read_tables
from backupd.engine.sql.client import Connection, Session
from backupd.model.document import HIDDEN, Document, computed, json_key
from backupd.model.errors import CancelledError, ServerError
from backupd.model.table import TableName, quote_name
from restore.cutover.keys_and_triggers import TableInventory
from restore.tables.definition_difference import definition_differs

_COLUMNS = """
SELECT COLUMN_NAME, DATA_TYPE, COLUMN_TYPE, COALESCE(CHARACTER_SET_NAME, ''), COALESCE(COLLATION_NAME, ''),
       COALESCE(GENERATION_EXPRESSION, '') <> '' OR (EXTRA LIKE '%%GENERATED%%' AND EXTRA NOT LIKE '%%DEFAULT_GEN%%'),
       IS_NULLABLE = 'YES'
FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s ORDER BY ORDINAL_POSITION
"""
_KEYS = """
SELECT INDEX_NAME, COLUMN_NAME, SUB_PART IS NOT NULL FROM information_schema.STATISTICS
WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s AND NON_UNIQUE = 0
ORDER BY INDEX_NAME <> 'PRIMARY', INDEX_NAME, SEQ_IN_INDEX
"""
_TEXTS = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set", "json"})
_CLASSES: Mapping[str, str] = {
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "bit", "year"), "number"),
    **dict.fromkeys(("double", "float"), "float"),
    **dict.fromkeys(_TEXTS, "text"),
    **dict.fromkeys(("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"), "bytes"),
    **dict.fromkeys(SHAPES, "shape"),
}
"""Kinds whose values can be compared with each other; each of the others with itself alone."""

SAMPLE = 20
"""Keys that are shown of rows that are missing, of added ones and of changed ones, unless somebody wants more."""
_LOOK_SECONDS = 0.2
_BOTH = """
SELECT COUNT(*), COALESCE(SUM({absent}), 0), COALESCE(SUM(NOT ({absent}) AND NOT ({same})), 0)
FROM {staged} s LEFT JOIN {live} l {live_index} ON {join}
"""
_ADDED = "SELECT COUNT(*), COALESCE(SUM({absent}), 0) FROM {live} l LEFT JOIN {staged} s {staged_index} ON {join}"
_SAMPLE = "SELECT {columns} FROM {one} LEFT JOIN {other} ON {join} WHERE {where} LIMIT {limit}"
_WHOLE = """
SELECT COALESCE(SUM(here), 0), COALESCE(SUM(there), 0),
       COALESCE(SUM(GREATEST(here - there, 0)), 0), COALESCE(SUM(GREATEST(there - here, 0)), 0)
FROM (SELECT SUM(origin) AS here, SUM(1 - origin) AS there
      FROM (SELECT 1 AS origin, {staged_row} AS content FROM {staged} s
            UNION ALL SELECT 0, {live_row} FROM {live} l) AS both_rows
      GROUP BY content) AS counted
"""


@dataclass(frozen=True, slots=True)
class Field:
    """One column. ``type`` in full, ``kind`` its first word; ``charset`` and ``collation`` empty unless it is text."""

    name: str
    kind: str
    type: str
    charset: str = ""
    collation: str = ""
    generated: bool = False
    nullable: bool = True

    def value(self, alias: str, other: Field) -> str:
        """An expression for what is stored, so that equal to that of ``other`` means the same to the byte."""
        if self.is_text and (self.charset != other.charset or not other.is_text):
            return self.in_bytes(alias)
        column = f"{alias}.{quote_name(self.name)}"
        return f"CONVERT({column} USING binary)" if self.is_text or self.kind in SHAPES else column

    def in_bytes(self, alias: str) -> str:
        """As text in UTF-8. No CAST: beyond max_allowed_packet that makes NULL (MariaDB), and NULL equals NULL."""
        column = f"{alias}.{quote_name(self.name)}"
        if self.kind == "float":  # which is not printed in full
            column += " * 1e0"
        return f"CONVERT({f'CONVERT({column} USING utf8mb4)' if self.is_text else column} USING binary)"

    @property
    def is_text(self) -> bool:
        """Has it a character set?"""
        return self.kind in _TEXTS

    def digest(self, alias: str, other: Field) -> str:
        """A short expression of the same, which is never NULL."""
        value = self.value(alias, other)
        if self.kind in ("float", "bit"):  # a FLOAT is not printed in full
            value += " * 1e0" if self.kind == "float" else " + 0"
        return f"IFNULL(SHA2(CONVERT({value} USING binary), 256), '-')"


@dataclass(frozen=True, slots=True)
class Shape:
    """A table's columns. ``keys``: by its name, the columns of each unique index of whole columns that are never NULL,
    the primary key first."""

    name: TableName
    fields: tuple[Field, ...]
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, session: Session, name: TableName) -> Shape | None:
        """None: there is no such table, or none that the server can open. Raises ServerError."""
        fields = tuple(
            Field(
                str(column), str(kind).lower(), str(full), str(charset), str(collation), bool(generated), bool(nullable)
            )
            for column, kind, full, charset, collation, generated, nullable in session.query(
                _COLUMNS, name.schema, name.table
            )
        )
        if not fields:
            return None
        solid = {field.name for field in fields if not field.nullable and not field.generated}
        indexes: dict[str, list[str]] = {}
        unfit = set()
        for index, column, partly in session.query(_KEYS, name.schema, name.table):
            indexes.setdefault(str(index), []).append(str(column))
            if partly or column not in solid:
                unfit.add(str(index))
        return cls(name, fields, {index: tuple(key) for index, key in indexes.items() if index not in unfit})

    def find(self, name: str) -> Field | None:
        """Names of columns know no case."""
        return next((one for one in self.fields if one.name.lower() == name.lower()), None)


@dataclass(frozen=True, slots=True)
class Common:
    """Of two tables. ``pairs``: the columns that both store, each as (of the restored, of the live one); ``differ``: in
    words, how the columns do; ``remarks``: on how values are compared; ``key``: the columns of a key that both have,
    empty without one, and the names of its index in both."""

    pairs: tuple[tuple[Field, Field], ...]
    differ: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    key: tuple[tuple[Field, Field], ...] = ()
    staged_index: str = ""
    live_index: str = ""

    @classmethod
    def of(cls, staged: Shape, live: Shape) -> Common:
        """What the restored table (``staged``) and the ``live`` one share."""
        pairs, differ, remarks = [], [], []
        for one in staged.fields:
            other = live.find(one.name)
            if other is None:
                differ.append(f"{one.name} is only in the backup")
                continue
            if (one.type, one.collation, one.generated) != (other.type, other.collation, other.generated):
                differ.append(f"{one.name} was {_told(one)}, now {_told(other)}")
            if not one.generated and not other.generated:
                pairs.append((one, other))
                if _class(one) != _class(other):
                    remarks.append(
                        f"{one.name} is compared as text, in which 1 is not 1.00: {one.type} and "
                        f"{other.type} do not hold the same values"
                    )
        differ += [f"{one.name} is only in the live table" for one in live.fields if staged.find(one.name) is None]
        return cls(tuple(pairs), tuple(differ), tuple(remarks), *_common_key(staged, live, pairs))


def same_value(staged: Field, live: Field) -> str:
    """A condition on ``s`` and ``l``: is the value the same? NULL is the same as NULL."""
    if _class(staged) != _class(live):  # as text: what one of both types cannot hold is a difference
        return f"{staged.in_bytes('s')} <=> {live.in_bytes('l')}"
    same = f"{staged.value('s', live)} <=> {live.value('l', staged)}"
    if staged.kind == live.kind == "json":  # as text 1 is not 1.0; beyond max_allowed_packet the text is empty (MySQL)
        same += f" AND s.{quote_name(staged.name)} <=> l.{quote_name(live.name)}"
    if _class(staged) == "float":  # there are two zeros
        same += (
            f" AND (COALESCE(s.{quote_name(staged.name)}, 1) <> 0 OR {staged.in_bytes('s')} <=> {live.in_bytes('l')})"
        )
    return same


def same_key(key: Sequence[tuple[Field, Field]], *, driving: str) -> str:
    """The join of both tables by their key, such that the index of the table that is not ``driving`` (``s`` or ``l``)
    serves it: two rows belong together when that table could not hold both."""
    parts = []
    for staged, live in key:
        one, other = f"s.{quote_name(staged.name)}", f"l.{quote_name(live.name)}"
        if staged.collation != live.collation:
            if driving == "s" and live.charset:
                one = f"CONVERT({one} USING {live.charset}) COLLATE {live.collation}"
            elif driving == "l" and staged.charset:
                other = f"CONVERT({other} USING {staged.charset}) COLLATE {staged.collation}"
        parts.append(f"{one} = {other}")
    return " AND ".join(parts)


def _common_key(
    staged: Shape, live: Shape, pairs: Sequence[tuple[Field, Field]]
) -> tuple[tuple[tuple[Field, Field], ...], str, str]:
    by_name = {one.name.lower(): (one, other) for one, other in pairs}
    live_keys = {frozenset(map(str.lower, key)): index for index, key in reversed(list(live.keys.items()))}
    for index, key in staged.keys.items():
        names = [name.lower() for name in key]
        live_index = live_keys.get(frozenset(names))
        if live_index is not None and by_name.keys() >= set(names):
            found = tuple(by_name[name] for name in names)
            if all(_class(one) == _class(other) for one, other in found):
                return found, index, live_index
    return (), "", ""


def _class(of: Field) -> str:
    return _CLASSES.get(of.kind, of.kind)


def _told(of: Field) -> str:
    words = [of.type, of.collation, "generated" if of.generated else ""]
    return " ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class Pair:
    """A restored table, and the live one whose place it is to take. ``definition``: as the backup has it, with the
    foreign keys and triggers that the staged table has not yet; None: these are not compared. ``triggers``: are they?
    """

    staged: TableName
    live: TableName
    definition: TableDefinition | None = None
    triggers: bool = True


@dataclass(frozen=True, slots=True)
class Keys:
    """Samples of keys, by ``columns``; without a key all are empty."""

    columns: tuple[str, ...] = ()
    missing: tuple[tuple[Any, ...], ...] = ()
    added: tuple[tuple[Any, ...], ...] = ()
    changed: tuple[tuple[Any, ...], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Keys: key, samples; of the keys just some, as text."""
        samples = {"missing": self.missing, "added": self.added, "changed": self.changed}
        shown = {name: [list(map(_shown, key)) for key in keys[:SAMPLE]] for name, keys in samples.items()}
        return {"key": list(self.columns), "samples": shown}


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, (bytes, bytearray)) else str(value)


@dataclass(frozen=True, slots=True)
class TableDifference(Document):
    """Rows that are in the restored table only (``missing`` from the live one), in the live one only (``added`` since),
    in both with other values (``changed``; without a key these are missing and added). ``comparable`` False:
    ``why_not`` says why, and the numbers mean nothing. ``columns_differ``: in words; only what both store is compared.
    ``definition_differs``: likewise, all else of the definitions. ``remarks``: on how the rows were compared."""

    live: TableName = field(metadata=HIDDEN)
    staged_rows: int = field(default=0, metadata=json_key("restored_rows"))
    live_rows: int = 0
    missing: int = 0
    added: int = 0
    changed: int = 0
    keys: Keys = field(default=Keys(), metadata=json_key(inline=True))
    comparable: bool = field(default=True, metadata=json_key(after=""))
    why_not: str = field(default="", metadata=json_key(or_null=True, after="comparable"))
    columns_differ: tuple[str, ...] = ()
    definition_differs: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    @computed("live", after="")
    def live_name(self) -> str:
        """The live table, for people."""
        return self.live.shown

    @property
    @computed()
    def same(self) -> bool:
        """Are rows and definitions?"""
        return (
            self.comparable
            and not (self.missing or self.added or self.changed)
            and not (self.columns_differ or self.definition_differs)
        )


def difference(
    connection: Connection, pairs: Sequence[Pair], cancel: Event, *, sample: int = SAMPLE
) -> tuple[TableDifference, ...]:
    """One for each of ``pairs``, with at most ``sample`` keys of each sort. What cannot be compared does not keep the
    others from being compared.

    Raises CancelledError soon after ``cancel``; ServerError when the server went away.
    """
    with connection.connect() as session:
        _prepare(session)
        inventory = TableInventory.look(session, {name.schema for pair in pairs for name in (pair.staged, pair.live)})
        defined = read_tables(session, {inventory.fold(name) for pair in pairs for name in (pair.staged, pair.live)})
        try:
            with _cancelling(session, cancel):
                session.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
                return tuple(
                    replace(
                        _tell(session, pair, inventory, sample, cancel),
                        definition_differs=tuple(_definitions(pair, inventory, defined)),
                    )
                    for pair in pairs
                )
        except ServerError as error:
            if cancel.is_set():
                raise CancelledError("the comparison was cancelled") from error
            raise


def _definitions(pair: Pair, inventory: TableInventory, defined: Definitions) -> Iterator[str]:
    if _is_view(inventory, pair.live):
        return
    staged, live = (defined.tables.get(inventory.fold(name)) for name in (pair.staged, pair.live))
    if staged is not None and live is not None:
        try:
            yield from definition_differs(staged, live, pair.definition, triggers=pair.triggers)
        except ValueError as error:
            yield f"the definitions could not be compared: {error}"
        return
    for name in (pair.staged, pair.live):
        why = defined.failed.get(inventory.fold(name))
        if why is not None and inventory.has(name):
            yield f"the definition of {name.shown} cannot be read: {why}"


def _is_view(inventory: TableInventory, name: TableName) -> bool:
    return "VIEW" in inventory.kind(name).upper()


def _tell(session: Session, pair: Pair, inventory: TableInventory, sample: int, cancel: Event) -> TableDifference:
    if _is_view(inventory, pair.live):
        return TableDifference(pair.live, comparable=False, why_not="a view has this name on the server, not a table")
    try:
        found = _compare(session, pair, sample)
    except ServerError as error:
        if cancel.is_set():
            raise
        session.ping()
        return TableDifference(pair.live, comparable=False, why_not=error.detail)
    if any("VERSIONED" in inventory.kind(name).upper() for name in (pair.staged, pair.live)):
        return replace(found, remarks=(*found.remarks, "only present rows are compared, not their history"))
    return found


def _compare(session: Session, pair: Pair, sample: int) -> TableDifference:
    staged, live = Shape.read(session, pair.staged), Shape.read(session, pair.live)
    if staged is None or live is None:
        gone = pair.staged if staged is None else pair.live
        return TableDifference(pair.live, comparable=False, why_not=f"there is no table {gone.shown}")
    common = Common.of(staged, live)
    found = TableDifference(pair.live, columns_differ=common.differ, remarks=common.remarks)
    if not common.pairs:
        return replace(found, comparable=False, why_not="the two tables have no common column")
    if common.key:
        return _by_key(session, pair, common, found, sample)
    return _by_rows(session, pair, common, found)


def _by_key(session: Session, pair: Pair, common: Common, found: TableDifference, sample: int) -> TableDifference:
    staged_key = [f"s.{quote_name(field.name)}" for field, _ in common.key]
    live_key = [f"l.{quote_name(field.name)}" for _, field in common.key]
    same = " AND ".join(same_value(one, other) for one, other in common.pairs)
    # A key is never NULL, so a NULL there means that no row was found.
    no_live, no_staged = f"{live_key[0]} IS NULL", f"{staged_key[0]} IS NULL"
    # The statistics of a table that was loaded just now may say that it is empty.
    staged_index, live_index = (
        f"FORCE INDEX ({quote_name(name)})" for name in (common.staged_index, common.live_index)
    )
    from_staged, from_live = same_key(common.key, driving="s"), same_key(common.key, driving="l")
    rows, missing, changed = session.query(
        _BOTH.format(
            absent=no_live, same=same, staged=pair.staged, live=pair.live, live_index=live_index, join=from_staged
        )
    )[0]
    live_rows, added = session.query(
        _ADDED.format(absent=no_staged, staged=pair.staged, live=pair.live, staged_index=staged_index, join=from_live)
    )[0]

    def keys(count: int, columns: Sequence[str], where: str, *, driving: str) -> tuple[tuple[Any, ...], ...]:
        if not count or not sample:
            return ()
        one, other, join = f"{pair.staged} s", f"{pair.live} l {live_index}", from_staged
        if driving == "l":
            one, other, join = f"{pair.live} l", f"{pair.staged} s {staged_index}", from_live
        return tuple(
            session.query(
                _SAMPLE.format(columns=", ".join(columns), one=one, other=other, join=join, where=where, limit=sample)
            )
        )

    return replace(
        found,
        staged_rows=int(rows),
        live_rows=int(live_rows),
        missing=int(missing),
        added=int(added),
        changed=int(changed),
        keys=Keys(
            columns=tuple(field.name for field, _ in common.key),
            missing=keys(int(missing), staged_key, no_live, driving="s"),
            added=keys(int(added), live_key, no_staged, driving="l"),
            changed=keys(int(changed), staged_key, f"NOT ({no_live}) AND NOT ({same})", driving="s"),
        ),
    )


def _by_rows(session: Session, pair: Pair, common: Common, found: TableDifference) -> TableDifference:
    rows, live_rows, missing, added = session.query(
        _WHOLE.format(
            staged=pair.staged,
            live=pair.live,
            staged_row=_row([one.digest("s", other) for one, other in common.pairs]),
            live_row=_row([other.digest("l", one) for one, other in common.pairs]),
        )
    )[0]
    return replace(found, staged_rows=int(rows), live_rows=int(live_rows), missing=int(missing), added=int(added))


def _row(digests: Sequence[str]) -> str:
    return f"SHA2(CONCAT({', '.join(digests)}), 256)"


def _prepare(session: Session) -> None:
    """Long reads that disturb nobody, and see every stored value as it is."""
    limit = next(
        (
            name
            for name in ("max_statement_time", "max_execution_time")  # neither before MySQL 5.7.8
            if session.query("SHOW VARIABLES LIKE %s", name)
        ),
        "",
    )
    session.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    session.execute(
        "SET SESSION sql_mode = '', SESSION time_zone = '+00:00', SESSION lock_wait_timeout = 5"
        + (f", SESSION {limit} = 0" if limit else "")
    )


@contextmanager
def _cancelling(session: Session, cancel: Event) -> Iterator[None]:
    """Ends the statement that runs when ``cancel`` is set."""
    over = Event()
    number, connection = session.thread_id, session.connection

    def watch() -> None:
        while not over.is_set():
            if cancel.wait(_LOOK_SECONDS):
                _kill(connection, number, over)
                return

    watcher = threading.Thread(target=watch, name="cancel", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _kill(connection: Connection, number: int, over: Event) -> None:
    """Again and again, because the statement that was killed may have been the one before."""
    with connection.connect() as killer:
        while not over.is_set():
            try:
                killer.execute(f"KILL QUERY {number}")
            except ServerError:
                return  # it is gone
            over.wait(_LOOK_SECONDS)

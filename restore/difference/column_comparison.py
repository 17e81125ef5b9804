"""How columns of two tables are compared on a server: which of them, and by which expressions, to the byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backupd.engine.sql.client import Session
from backupd.model.table import TableName, quote_name

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
_NUMBERS = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "bit", "year"})
_FLOATS = frozenset({"double", "float"})
_TEXTS = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set", "json"})
_BYTES = frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
_SHAPES = frozenset(
    {
        "geometry",
        "point",
        "linestring",
        "polygon",
        "multipoint",
        "multilinestring",
        "multipolygon",
        "geometrycollection",
        "geomcollection",
    }
)


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
        return f"CONVERT({column} USING binary)" if self.is_text or self.kind in _SHAPES else column

    def in_bytes(self, alias: str) -> str:
        """As text in UTF-8. No CAST: beyond max_allowed_packet that makes NULL (MariaDB), and NULL equals NULL."""
        column = f"{alias}.{quote_name(self.name)}"
        if self.kind == "float":  # which is not printed in full
            column += " * 1e0"
        return f"CONVERT({f'CONVERT({column} USING utf8mb4)' if self.is_text else column} USING binary)"

    @property
    def is_text(self) -> bool:
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
    for word, kinds in (
        ("number", _NUMBERS),
        ("float", _FLOATS),
        ("text", _TEXTS),
        ("bytes", _BYTES),
        ("shape", _SHAPES),
    ):
        if of.kind in kinds:
            return word
    return of.kind


def _told(of: Field) -> str:
    words = [of.type, of.collation, "generated" if of.generated else ""]
    return " ".join(word for word in words if word)

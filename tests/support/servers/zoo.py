"""Tables of every kind: all column types of both flavours with their extremes, and the oddest names a server takes.

``build`` makes them in a schema of its own, ``checksums`` tells the rows of each table apart to the last bit. Neither
uses anything of the product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

from pymysql.connections import Connection

from backupd.model.table import TableName, quote_name
from tests.support.oracle import Sums
from tests.support.servers.server import Server, query

EVERY_BYTE = bytes(range(256))
TEXTS = (
    "",
    "plain",
    'it\'s "quoted" `so` \\ back\\slash',
    "line\nfeed\r\nand\ttab\x00nul\x1aend",
    "ő 漢字 🦆🏳️‍🌈",
    "(1,2),\n(3,4);\nINSERT INTO `t` VALUES",
    "%s %d -- /* */ #",
    " trailing  ",
)
ODD_NAMES = (
    "we ird/..;'",
    ".",
    "..",
    "a.b",
    "x/y",
    "back`tick",
    "new\nline",
    "per%cent",
    "%41",
    "#sql-like",
    "#sql-ib1",
    "quo'te\"s",
    "dollar$",
    "-- dash",
    "漢字テーブル",
    "ő" * 50,
    "漢" * 49,
    "n" * 64,
    "select",
    "back\\slash",
    "tab\there",
    "aé",
    "question?*[a-z]",
    "a#P#p0",
)
"""Names cannot hold characters of four bytes, nor end with a space."""
TWINS = ("Twin", "twin", "TWIN")

_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
_FLOATS = (
    "0",
    "-0e0",
    "1",
    "16777217",
    "16777216",
    "123456.789",
    "-0.1",
    "3.4028234e38",
    "-3.4028234e38",
    "1.17549435e-38",
    "1.4e-45",
    "3.1415927410125732",
    "1e10",
    "NULL",
    "8388609",
    "0.333333333",
)
_DOUBLES = (
    "0",
    "-0e0",
    "1",
    "0.1",
    "1.7976931348623157e308",
    "-1.7976931348623157e308",
    "2.2250738585072014e-308",
    "5e-324",
    "9007199254740993",
    "123456789.12345678",
    "3.141592653589793",
    "1e22",
    "-1e-7",
    "NULL",
    "0.30000000000000004",
)
_GEOMETRIES = (
    "POINT(1 2)",
    "LINESTRING(0 0,1 1,2 5)",
    "POLYGON((0 0,0 10,10 10,10 0,0 0),(1 1,1 2,2 2,2 1,1 1))",
    "MULTIPOINT(1 1,2 2)",
    "MULTILINESTRING((0 0,1 1),(2 2,3 3))",
    "GEOMETRYCOLLECTION(POINT(1 1),LINESTRING(0 0,5 5))",
)
_JSONS = (
    '{"b": [1, 2.5, true, null], "a": {"deep": [[], {}]}, "ő": "🦆"}',
    "[]",
    "null",
    '"text \\" \\\\ \\n \\u0001"',
    "123456789012345678",
    "-0.1",
    "1e300",
    '{"quote\'s": "a\\tb"}',
)


def build(server: Server, schema: str = "zoo", *, big_row: int = 0) -> tuple[TableName, ...]:
    """Create ``schema`` with every table that the server can have, and their names. With ``big_row`` one more,
    ``huge``, with one row whose blob has that many bytes (the server's max_allowed_packet must allow it)."""
    mariadb = server.sequences
    with closing(server.connect()) as connection:
        query(connection, f"CREATE DATABASE {quote_name(schema)} CHARACTER SET utf8mb4")
        query(connection, f"USE {quote_name(schema)}")
        query(
            connection,
            "SET SESSION sql_mode = 'NO_ENGINE_SUBSTITUTION,ALLOW_INVALID_DATES', time_zone = '+00:00', "
            "foreign_key_checks = 1",
        )
        for statement in (*_numbers(), *_moments(), *_shapes(), *_odd_tables(), *_relatives(), *_partitioned()):
            query(connection, statement)
        _fill_strings(connection)
        for statement in _of_mariadb() if mariadb else _of_mysql(server):
            query(connection, statement)
        if mariadb:
            _change_history(connection)
        if big_row:
            _add_big_row(connection, big_row)
    return tables(server, schema)


def tables(server: Server, schema: str = "zoo") -> tuple[TableName, ...]:
    """Every table and sequence of ``schema``."""
    rows = server.query(
        "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_TYPE NOT LIKE '%%VIEW'",
        (schema,),
    )
    return tuple(sorted(TableName(schema, str(row[0])) for row in rows))


def checksums(server: Server, schema: str = "zoo", names: Iterable[str] | None = None) -> dict[str, str]:
    """A digest per table (of ``names``, or all) over all its rows, whatever their order: with the values of generated
    and invisible columns, with the history of versioned tables, with every bit of a FLOAT."""
    wanted = [table.table for table in tables(server, schema)] if names is None else list(names)
    with closing(server.connect()) as connection:
        query(connection, "SET NAMES binary")
        query(connection, "SET SESSION time_zone = '+00:00', sql_mode = ''")
        return Sums({name: _checksum(connection, schema, name) for name in wanted})


def _checksum(connection: Connection[Any], schema: str, name: str) -> str:
    columns = query(
        connection,
        "SELECT COLUMN_NAME, DATA_TYPE FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s "
        "AND TABLE_NAME = %s ORDER BY ORDINAL_POSITION",
        (schema, name),
    )
    kind = query(
        connection,
        "SELECT TABLE_TYPE FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
        (schema, name),
    )[0][0]
    wanted = [_exact(quote_name(_text(column)), _text(data_type)) for column, data_type in columns]
    source = quote_name(schema, name)
    if _text(kind) == "SYSTEM VERSIONED":
        source += " FOR SYSTEM_TIME ALL"
        if not any(_text(column) in ("row_start", "valid_from") for column, _data_type in columns):
            wanted += ["row_start", "row_end"]
    digest = hashlib.sha256()
    for row in sorted(repr(row) for row in query(connection, f"SELECT {', '.join(wanted)} FROM {source}")):
        digest.update(row.encode())
    return digest.hexdigest()


def _exact(column: str, data_type: str) -> str:
    if data_type in ("float", "double"):
        return f"CAST({column} * 1e0 AS CHAR)"
    if data_type == "timestamp":
        return f"CAST({column} AS CHAR)"
    if data_type in ("enum", "set"):
        return f"CONCAT({column} + 0, HEX(CAST({column} AS BINARY)))"
    return f"SHA2(CAST({column} AS BINARY), 256)"


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _numbers() -> Iterator[str]:
    columns = [f"s_{kind} {kind}, u_{kind} {kind} unsigned, z_{kind} {kind}(5) zerofill" for kind in _INTEGERS]
    yield f"CREATE TABLE integers (id int unsigned NOT NULL AUTO_INCREMENT PRIMARY KEY, {', '.join(columns)})"
    low = [f"{-(2 ** (_BITS[kind] - 1))}, 0, 0" for kind in _INTEGERS]
    high = [f"{2 ** (_BITS[kind] - 1) - 1}, {2 ** _BITS[kind] - 1}, {2 ** _BITS[kind] - 1}" for kind in _INTEGERS]
    some = ["-1, 1, 7"] * len(_INTEGERS)
    nulls = ["NULL, NULL, NULL"] * len(_INTEGERS)
    rows = ", ".join(f"(NULL, {', '.join(row)})" for row in (low, high, some, nulls))
    yield f"INSERT INTO integers VALUES {rows}"
    yield "ALTER TABLE integers AUTO_INCREMENT = 1000"
    yield "CREATE TABLE zero_id (id int NOT NULL AUTO_INCREMENT PRIMARY KEY, v int)"
    yield "INSERT INTO zero_id VALUES (5, 5), (-3, -3)"
    yield "UPDATE zero_id SET id = 0 WHERE id = 5"
    yield (
        "CREATE TABLE decimals (id int PRIMARY KEY, a decimal(65,30), b decimal(5,2) unsigned zerofill, "
        "c decimal(65,0), d numeric(10,4))"
    )
    yield (
        "INSERT INTO decimals VALUES (1, 12345678901234567890123456789012345.123456789012345678901234567890, "
        f"7.5, {'9' * 65}, -0.0001), (2, -0.000000000000000000000000000001, 999.99, -{'9' * 65}, 123456.7891), "
        "(3, NULL, NULL, NULL, NULL)"
    )
    yield (
        "CREATE TABLE floats (id int AUTO_INCREMENT PRIMARY KEY, f float, g float(7,2), h float unsigned, "
        "i float(12,8) zerofill, KEY (f))"
    )
    yield f"INSERT INTO floats (f, g, h, i) VALUES {_over(_FLOATS)}"
    yield (
        "CREATE TABLE doubles (id int AUTO_INCREMENT PRIMARY KEY, f double, g double(20,5), h double unsigned, "
        "i double zerofill)"
    )
    yield f"INSERT INTO doubles (f, g, h, i) VALUES {_over(_DOUBLES)}"
    yield "CREATE TABLE bits (id int PRIMARY KEY, a bit(1), b bit(7), c bit(8), d bit(33), e bit(64))"
    yield (
        "INSERT INTO bits VALUES (1, 0, 0, 0, 0, 0), (2, 1, 127, 255, 8589934591, 18446744073709551615), "
        "(3, b'1', 39, 10, 92, 2642), (4, NULL, NULL, NULL, NULL, NULL), (5, 1, 92, 39, 39, 2823543616298320218)"
    )


def _over(values: Iterable[str]) -> str:
    return ", ".join(f"({value}, {value}, ABS({value}), ABS({value}))" for value in values)


def _moments() -> Iterator[str]:
    yield (
        "CREATE TABLE moments (id int AUTO_INCREMENT PRIMARY KEY, d date, t time, t6 time(6), y year, dt datetime, "
        "dt3 datetime(3), dt6 datetime(6), ts timestamp NULL, ts6 timestamp(6) NULL)"
    )
    for row in (
        "'0000-00-00', '00:00:00', '00:00:00', 0, '0000-00-00', '0000-00-00', '0000-00-00', '0000-00-00', '0000-00-00'",
        (
            "'2020-00-00', '-838:59:59', '-838:59:59.000000', 1901, '2020-02-00', '2020-00-00', "
            "'2019-02-30 11:59:59.999999', '1970-01-01 00:00:01', '1970-01-01 00:00:01.000001'"
        ),
        (
            "'9999-12-31', '838:59:59', '838:59:58.999999', 2155, '9999-12-31 23:59:59', '9999-12-31 23:59:59.999', "
            "'9999-12-31 23:59:59.999999', '2038-01-19 03:14:07', '2038-01-19 03:14:07.999999'"
        ),
        (
            "'1000-01-01', '-00:00:01', '-00:00:00.000001', 2000, '1000-01-01', '0001-01-01', '0999-12-31 23:59:59.5', "
            "'2023-03-26 01:30:00', '2023-10-29 00:59:59.123456'"
        ),
        "NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL",
    ):
        yield f"INSERT INTO moments (d, t, t6, y, dt, dt3, dt6, ts, ts6) VALUES ({row})"
    yield (
        "CREATE TABLE zero_stamp (a timestamp NOT NULL DEFAULT '0000-00-00 00:00:00', b date NOT NULL DEFAULT "
        "'0000-00-00')"
    )
    yield "INSERT INTO zero_stamp VALUES (DEFAULT, DEFAULT), ('2024-02-29 12:00:00', '2024-02-29')"


def _shapes() -> Iterator[str]:
    yield "CREATE TABLE shapes (id int AUTO_INCREMENT PRIMARY KEY, g geometry, p point, l linestring)"
    for shape in _GEOMETRIES:
        for srid in (0, 3857):
            yield f"INSERT INTO shapes (g) VALUES (ST_GeomFromText('{shape}', {srid}))"
    yield (
        "INSERT INTO shapes (p, l) VALUES (ST_GeomFromText('POINT(-1.5 1e-7)', 0), "
        "ST_GeomFromText('LINESTRING(1 1,9 9)', 4326))"
    )
    yield "CREATE TABLE shapes_indexed (id int PRIMARY KEY, g geometry NOT NULL, SPATIAL KEY (g))"
    yield "INSERT INTO shapes_indexed VALUES (1, ST_GeomFromText('POINT(39 92)')), (2, ST_GeomFromText('POINT(10 13)'))"


def _fill_strings(connection: Connection[Any]) -> None:
    """Every byte value, every byte in each charset, and texts that look like a dump."""
    query(
        connection,
        "CREATE TABLE strings (id int AUTO_INCREMENT PRIMARY KEY, c char(100), v varchar(300), "
        "l1 varchar(300) CHARACTER SET latin1, u2 varchar(300) CHARACTER SET ucs2, u16 text CHARACTER "
        "SET utf16, sj varchar(50) CHARACTER SET sjis, tt tinytext, tx text, mt mediumtext, lt longtext, "
        "bin1 varchar(50) COLLATE utf8mb4_bin, ascii_ varchar(50) CHARACTER SET ascii)",
    )
    for text in TEXTS:
        bmp = "".join(letter for letter in text if ord(letter) < 0x10000)
        query(
            connection,
            "INSERT INTO strings (c, v, l1, u2, u16, sj, tt, tx, mt, lt, bin1, ascii_) VALUES "
            "(%s, %s, CONVERT(%s USING latin1), %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            (
                text,
                text,
                text,
                bmp,
                text,
                "".join(x for x in text if ord(x) < 128),
                text,
                text,
                text,
                text,
                text,
                "".join(x for x in text if ord(x) < 128),
            ),
        )
    query(connection, "INSERT INTO strings (v, sj) VALUES (NULL, _sjis 0x955c835c)")  # second bytes are backslashes
    query(
        connection,
        "CREATE TABLE bytes (id int AUTO_INCREMENT PRIMARY KEY, b binary(40), vb varbinary(300), tb "
        "tinyblob, bl blob, mb mediumblob, lb longblob, l1 varchar(300) CHARACTER SET latin1)",
    )
    for value in (EVERY_BYTE[::-1], EVERY_BYTE, b"", b"\\", b"'", b"\\'", b"\x00", b"\xff\xfe" * 20, b"NULL", None):
        query(
            connection,
            "INSERT INTO bytes (b, vb, tb, bl, mb, lb, l1) VALUES (%s, %s, %s, %s, %s, %s, "
            "CAST(%s AS CHAR CHARACTER SET latin1))",
            (
                value and value[:40],
                value,
                value and value[:255],
                value,
                value and value * 20,
                value and value * 300,
                value,
            ),
        )
    query(connection, "UPDATE bytes SET l1 = CONVERT(vb USING latin1)")
    query(
        connection,
        "CREATE TABLE choices (id int AUTO_INCREMENT PRIMARY KEY, e enum('', 'a', 'it''s', '0', '2', "
        "'ő') NULL, s set('', 'x', 'y z', 'ő', '1') NULL, u enum('á','b') CHARACTER SET ucs2)",
    )
    for choice, members, wide in (
        ("''", 1, "'á'"),
        ("'a'", 2, "'b'"),
        ("'it''s'", 3, "NULL"),
        ("'0'", 31, "'á'"),
        ("'2'", 16, "'á'"),
        ("0", 0, "0"),
        ("NULL", "NULL", "NULL"),
        ("'ő'", 8, "'b'"),
    ):
        query(connection, f"INSERT INTO choices (e, s, u) VALUES ({choice}, {members}, {wide})")
    query(connection, "CREATE TABLE documents (id int AUTO_INCREMENT PRIMARY KEY, j json, k json NOT NULL)")
    for text in _JSONS:
        query(connection, "INSERT INTO documents (j, k) VALUES (%s, %s)", (text, text))
    query(connection, "INSERT INTO documents (j, k) VALUES (NULL, '{}')")


def _odd_tables() -> Iterator[str]:
    for number, name in enumerate((*ODD_NAMES, *TWINS)):
        column = quote_name(name[:40].strip() or "c")
        yield f"CREATE TABLE {quote_name(name)} (id int PRIMARY KEY, {column} varchar(50))"
        yield f"INSERT INTO {quote_name(name)} VALUES (1, 'name {number}'), (2, NULL)"
    yield "CREATE TABLE empty_one (id int PRIMARY KEY, t text)"
    yield "CREATE TABLE no_key (a int, b varchar(20), KEY (b))"
    yield "INSERT INTO no_key VALUES (1, 'twice'), (1, 'twice'), (NULL, NULL), (NULL, NULL), (2, '')"
    yield "CREATE TABLE covered (a int, b int, KEY (b, a))"
    yield "INSERT INTO covered VALUES (1, 9), (2, 8), (3, 7)"
    yield "CREATE TABLE squeezed (id int PRIMARY KEY, t text) ROW_FORMAT = COMPRESSED KEY_BLOCK_SIZE = 4"
    yield "INSERT INTO squeezed VALUES (1, REPEAT('squeeze ', 2000)), (2, '')"
    yield "CREATE TABLE isam (id int PRIMARY KEY, t text, KEY (t(5))) ENGINE = MyISAM"
    yield "INSERT INTO isam VALUES (1, 'one'), (2, NULL)"
    yield "CREATE TABLE words (id int PRIMARY KEY, t text, FULLTEXT KEY (t))"
    yield "INSERT INTO words VALUES (1, 'a duck quacks'), (2, 'nothing')"
    yield (
        "CREATE TABLE made (id int PRIMARY KEY, a int, v int AS (a * 2) VIRTUAL, s varchar(30) AS (CONCAT('s', a)) "
        "STORED, b double, KEY (v), KEY (s))"
    )
    yield "INSERT INTO made (id, a, b) VALUES (1, 21, 0.1), (2, NULL, 1e300)"
    yield "CREATE TABLE only_made (id int PRIMARY KEY, v int AS (1) VIRTUAL, `order` int, `a,b` int, `%s` int)"
    yield "INSERT INTO only_made (id, `order`, `a,b`, `%s`) VALUES (1, 2, 3, 4)"


def _relatives() -> Iterator[str]:
    yield "CREATE TABLE parents (id int PRIMARY KEY, boss int, FOREIGN KEY (boss) REFERENCES parents (id))"
    yield "INSERT INTO parents VALUES (1, NULL), (2, 1), (3, 3)"
    yield (
        "CREATE TABLE children (id int PRIMARY KEY, parent int, changed int NOT NULL DEFAULT 0, CONSTRAINT kin "
        "FOREIGN KEY (parent) REFERENCES parents (id) ON DELETE CASCADE ON UPDATE CASCADE)"
    )
    yield "CREATE TABLE audit (id int AUTO_INCREMENT PRIMARY KEY, child int, what varchar(20))"
    yield "INSERT INTO children (id, parent) VALUES (10, 1), (11, 2), (12, NULL)"
    yield "CREATE TRIGGER children_before BEFORE INSERT ON children FOR EACH ROW SET NEW.changed = NEW.changed + 1"
    yield (
        "CREATE TRIGGER children_after AFTER INSERT ON children FOR EACH ROW INSERT INTO audit VALUES "
        "(NULL, NEW.id, 'in')"
    )
    yield "INSERT INTO children (id, parent) VALUES (13, 3)"


def _partitioned() -> Iterator[str]:
    yield (
        "CREATE TABLE by_range (id int NOT NULL, d date NOT NULL, t text, PRIMARY KEY (id, d)) PARTITION BY RANGE "
        "(YEAR(d)) (PARTITION p0 VALUES LESS THAN (2000), PARTITION `p odd'1` VALUES LESS THAN (2020), PARTITION p2 "
        "VALUES LESS THAN MAXVALUE)"
    )
    yield "CREATE TABLE by_hash (id int PRIMARY KEY, t text) PARTITION BY HASH (id) PARTITIONS 3"
    yield "CREATE TABLE by_key (id varchar(20) PRIMARY KEY, t text) PARTITION BY KEY (id) PARTITIONS 2"
    yield (
        "CREATE TABLE by_list (a int, t text) PARTITION BY LIST (a) (PARTITION x VALUES IN (1, 2), PARTITION y "
        "VALUES IN (3, NULL))"
    )
    yield (
        "CREATE TABLE by_both (id int, d date) PARTITION BY RANGE (TO_DAYS(d)) SUBPARTITION BY HASH (id) "
        "SUBPARTITIONS 2 (PARTITION p0 VALUES LESS THAN (TO_DAYS('2010-01-01')), PARTITION p1 VALUES LESS THAN "
        "MAXVALUE)"
    )
    yield "INSERT INTO by_range VALUES (3, '2024-01-01', 'c'), (1, '1999-01-01', 'a'), (2, '2010-01-01', 'b')"
    yield "INSERT INTO by_hash VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, NULL)"
    yield "INSERT INTO by_key VALUES ('a', '1'), ('b', '2'), ('ő', '3')"
    yield "INSERT INTO by_list VALUES (1, 'a'), (3, 'b'), (NULL, 'c'), (1, 'a')"
    yield "INSERT INTO by_both VALUES (1, '2000-01-01'), (2, '2020-01-01'), (3, NULL)"


def _of_mariadb() -> Iterator[str]:
    yield (
        "CREATE TABLE hidden (id int PRIMARY KEY, seen int, unseen int INVISIBLE DEFAULT 7, f float INVISIBLE, "
        "g int AS (seen + 1) VIRTUAL INVISIBLE)"
    )
    yield "INSERT INTO hidden (id, seen, unseen, f) VALUES (1, 1, 100, 16777217), (2, 2, NULL, 0.1)"
    yield "CREATE TABLE addresses (id int AUTO_INCREMENT PRIMARY KEY, a inet6, b inet4, c uuid)"
    yield (
        "INSERT INTO addresses (a, b, c) VALUES ('::', '0.0.0.0', '00000000-0000-0000-0000-000000000000'), "
        "('2001:db8::ff00:42:8329', '255.255.255.255', '123e4567-e89b-12d3-a456-426655440000'), "
        "('::ffff:192.0.2.1', '39.92.10.0', 'ffffffff-ffff-ffff-ffff-ffffffffffff'), (NULL, NULL, NULL)"
    )
    yield "CREATE TABLE packed (id int PRIMARY KEY, t text COMPRESSED, v varchar(500) COMPRESSED)"
    yield "INSERT INTO packed VALUES (1, REPEAT('pack ', 1000), REPEAT('x', 500)), (2, NULL, '')"
    yield "CREATE TABLE aria (id int PRIMARY KEY, t text) ENGINE = Aria"
    yield "INSERT INTO aria VALUES (1, 'one'), (2, NULL)"
    yield "CREATE SEQUENCE numbers START WITH 100 INCREMENT BY 10 CACHE 5"
    yield "SELECT NEXT VALUE FOR numbers"
    yield "CREATE SEQUENCE around START WITH 3 MINVALUE 1 MAXVALUE 5 CYCLE NOCACHE"
    for _ in range(5):
        yield "SELECT NEXT VALUE FOR around"
    yield "CREATE TABLE from_sequence (id int PRIMARY KEY DEFAULT NEXT VALUE FOR numbers, t text)"
    yield "INSERT INTO from_sequence (t) VALUES ('a'), ('b')"
    yield "CREATE TABLE versioned (id int PRIMARY KEY, v varchar(30), f float) WITH SYSTEM VERSIONING"
    yield (
        "CREATE TABLE versioned_told (id int PRIMARY KEY, v varchar(30), valid_from timestamp(6) GENERATED ALWAYS "
        "AS ROW START INVISIBLE, valid_to timestamp(6) GENERATED ALWAYS AS ROW END, PERIOD FOR SYSTEM_TIME "
        "(valid_from, valid_to)) WITH SYSTEM VERSIONING"
    )
    yield (
        "CREATE TABLE versioned_parts (id int PRIMARY KEY, v int) WITH SYSTEM VERSIONING PARTITION BY SYSTEM_TIME "
        "(PARTITION p0 HISTORY, PARTITION pn CURRENT)"
    )
    yield (
        "CREATE TABLE periods (id int, a date, b date, PERIOD FOR booked (a, b), UNIQUE (id, booked WITHOUT OVERLAPS))"
    )
    yield "INSERT INTO periods VALUES (1, '2020-01-01', '2020-02-01'), (1, '2020-02-01', '2020-03-01')"


def _change_history(connection: Connection[Any]) -> None:
    for moment, name in enumerate(("versioned", "versioned_told", "versioned_parts") * 2):
        query(connection, f"SET @@timestamp = {1_600_000_000 + moment * 1000}.25")
        columns = "(id, v)"
        query(connection, f"REPLACE INTO {name} {columns} VALUES (1, {moment}), (2, {moment}), ({moment + 10}, 0)")
        query(connection, f"UPDATE {name} SET v = v + 1 WHERE id = 2")
    query(connection, "SET @@timestamp = 1700000000.5")
    for name in ("versioned", "versioned_told", "versioned_parts"):
        query(connection, f"DELETE FROM {name} WHERE id = 1")
    query(connection, "SET @@timestamp = DEFAULT")


def _of_mysql(server: Server) -> Iterator[str]:
    version = str(server.scalar("SELECT VERSION()"))
    if version.startswith("5."):
        return  # knows none of these
    yield "CREATE TABLE hidden (id int PRIMARY KEY, seen int, unseen int DEFAULT 7 INVISIBLE, f float INVISIBLE)"
    yield "INSERT INTO hidden (id, seen, unseen, f) VALUES (1, 1, 100, 16777217), (2, 2, NULL, 0.1)"
    yield "CREATE TABLE computed_key (id int PRIMARY KEY, t varchar(50), KEY ((LOWER(t))))"
    yield "INSERT INTO computed_key VALUES (1, 'ABC'), (2, NULL)"
    yield "CREATE TABLE places (id int PRIMARY KEY, g point NOT NULL SRID 4326, SPATIAL KEY (g))"
    yield (
        "INSERT INTO places VALUES (1, ST_GeomFromText('POINT(47.5 19.05)', 4326)), "
        "(2, ST_GeomFromText('POINT(-90 -180)', 4326))"
    )
    yield "CREATE TABLE multi (id int PRIMARY KEY, j json, KEY ((CAST(j->'$.z' AS UNSIGNED ARRAY))))"
    yield "INSERT INTO multi VALUES (1, '{\"z\": [1, 2, 3]}'), (2, '{}')"
    yield "SET SESSION sql_generate_invisible_primary_key = ON"
    yield "CREATE TABLE generated_key (a int, b text)"
    yield "SET SESSION sql_generate_invisible_primary_key = OFF"
    yield "INSERT INTO generated_key (a, b) VALUES (1, 'x'), (1, 'x'), (2, NULL)"
    if version.startswith("9."):
        yield "CREATE TABLE vectors (id int PRIMARY KEY, v vector(5), w vector(2048))"
        yield "INSERT INTO vectors VALUES (1, TO_VECTOR('[1.5,-0,16777217,0.1,3e38]'), NULL), (2, NULL, NULL)"


def _add_big_row(connection: Connection[Any], size: int) -> None:
    piece = EVERY_BYTE * 4096
    query(connection, "CREATE TABLE huge (id int PRIMARY KEY, before_ varchar(20), b longblob, after_ varchar(20))")
    query(
        connection, "INSERT INTO huge VALUES (1, 'first', '', 'one'), (2, 'big', '', 'two'), (3, 'last', NULL, 'three')"
    )
    query(connection, "UPDATE huge SET b = REPEAT(%s, %s) WHERE id = 2", (piece, max(1, size // len(piece))))

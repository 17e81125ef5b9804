"""Sample data: a shop, a bank, an archive and a schema with names from everywhere. Same seed, same rows."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from typing import Any

from pymysql.connections import Connection

from tests.support.oracle import Sums
from tests.support.servers.server import Server, query, quote_name

MARKER = "PLAINTEXT-MARKER-3f9d2c71"
"""A string that stands in rows of the sample; no stored object may show it."""

ACCOUNTS = 2000
ACCOUNT_BALANCE = 1000
SYSTEM_SCHEMAS = ("information_schema", "performance_schema", "mysql", "sys")
_ROW_BYTES = 1160
"""What a row of a text table takes on disk, measured; only sizes the fill."""
_TEXT_TABLES = ("shop.documents", "shop.messages", "archive.pages", "archive.letters")

_SCHEMA = (
    "CREATE DATABASE shop CHARACTER SET utf8mb4",
    "CREATE DATABASE bank CHARACTER SET utf8mb4",
    "CREATE DATABASE archive CHARACTER SET utf8mb4",
    "CREATE DATABASE `größe 数据` CHARACTER SET utf8mb4",
    "USE shop",  # the seq_1_to_N tables exist in whatever schema is the current one
    """CREATE TABLE shop.customers (
         id INT UNSIGNED PRIMARY KEY AUTO_INCREMENT, name VARCHAR(80) NOT NULL, email VARCHAR(120) NOT NULL,
         created_at DATETIME NOT NULL, UNIQUE (email)) ENGINE=InnoDB""",
    """CREATE TABLE shop.products (
         id INT UNSIGNED PRIMARY KEY AUTO_INCREMENT, title VARCHAR(80) NOT NULL, price DECIMAL(8,2) NOT NULL,
         stock INT NOT NULL DEFAULT 0) ENGINE=InnoDB""",
    """CREATE TABLE shop.orders (
         id BIGINT UNSIGNED PRIMARY KEY AUTO_INCREMENT, customer_id INT UNSIGNED NOT NULL,
         created_at DATETIME(6) NOT NULL, note VARCHAR(200) NOT NULL DEFAULT '', KEY (created_at),
         FOREIGN KEY (customer_id) REFERENCES shop.customers (id) ON DELETE CASCADE) ENGINE=InnoDB""",
    """CREATE TABLE shop.order_lines (
         order_id BIGINT UNSIGNED NOT NULL, line SMALLINT NOT NULL, product_id INT UNSIGNED NOT NULL,
         amount INT NOT NULL, PRIMARY KEY (order_id, line),
         FOREIGN KEY (order_id) REFERENCES shop.orders (id) ON DELETE CASCADE,
         FOREIGN KEY (product_id) REFERENCES shop.products (id)) ENGINE=InnoDB""",
    (
        "CREATE TABLE shop.order_log (id BIGINT PRIMARY KEY AUTO_INCREMENT, order_id BIGINT NOT NULL, "
        "what VARCHAR(20) NOT NULL) ENGINE=InnoDB"
    ),
    """CREATE TABLE shop.sales (
         id INT UNSIGNED NOT NULL, sold_on DATE NOT NULL, amount DECIMAL(10,2) NOT NULL,
         PRIMARY KEY (id, sold_on)) ENGINE=InnoDB PARTITION BY RANGE (YEAR(sold_on)) (
         PARTITION old VALUES LESS THAN (2024), PARTITION `current` VALUES LESS THAN MAXVALUE)""",
    "CREATE TABLE bank.accounts (id INT UNSIGNED PRIMARY KEY, balance BIGINT NOT NULL) ENGINE=InnoDB",
    (
        "CREATE TABLE bank.transfers (id BIGINT UNSIGNED PRIMARY KEY AUTO_INCREMENT, "
        "sender INT UNSIGNED NOT NULL, receiver INT UNSIGNED NOT NULL, amount BIGINT NOT NULL, "
        "KEY (sender)) ENGINE=InnoDB"
    ),
    "CREATE TABLE archive.yearbooks (year SMALLINT PRIMARY KEY, title VARCHAR(100)) ENGINE=Aria",
    "CREATE TABLE archive.postcards (id INT PRIMARY KEY, place VARCHAR(60)) ENGINE=MyISAM",
    "CREATE TABLE `größe 数据`.`таблица` (id INT PRIMARY KEY, wert VARCHAR(100)) ENGINE=InnoDB",
    "CREATE TABLE `größe 数据`.`naïve.tablé $1` (id INT PRIMARY KEY, wert VARCHAR(100)) ENGINE=InnoDB",
)
_TEXT_TABLE = (
    "CREATE TABLE {name} (id INT UNSIGNED PRIMARY KEY, author INT UNSIGNED NOT NULL, "
    "body VARCHAR(1200) NOT NULL, KEY (author)) ENGINE=InnoDB"
)
_PROGRAMS = (
    (
        "CREATE SQL SECURITY INVOKER VIEW shop.order_totals AS "
        "SELECT o.id, o.customer_id, SUM(l.amount * p.price) AS total "
        "FROM shop.orders o JOIN shop.order_lines l ON l.order_id = o.id "
        "JOIN shop.products p ON p.id = l.product_id "
        "GROUP BY o.id, o.customer_id"
    ),
    (
        "CREATE TRIGGER shop.orders_ai AFTER INSERT ON shop.orders FOR EACH ROW "
        "INSERT INTO shop.order_log (order_id, what) VALUES (NEW.id, 'created')"
    ),
    "CREATE FUNCTION shop.with_tax(p DECIMAL(8,2)) RETURNS DECIMAL(8,2) DETERMINISTIC RETURN p * 1.19",
    (
        "CREATE PROCEDURE bank.move(IN s INT UNSIGNED, IN r INT UNSIGNED, IN a BIGINT) "
        "MODIFIES SQL DATA BEGIN "
        "UPDATE bank.accounts SET balance = balance - a WHERE id = s; "
        "UPDATE bank.accounts SET balance = balance + a WHERE id = r; "
        "INSERT INTO bank.transfers (sender, receiver, amount) VALUES (s, r, a); END"
    ),
    "CREATE EVENT shop.forget_logs ON SCHEDULE EVERY 1 SECOND DO DELETE FROM shop.order_log",
    "CREATE EVENT shop.asleep ON SCHEDULE EVERY 1 DAY DISABLE DO DELETE FROM shop.order_log",
    "CREATE USER app@'%' IDENTIFIED BY 'App-s3cret-12'",
    "CREATE USER `read only`@localhost IDENTIFIED BY 'Read-s3cret-34'",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON shop.* TO app@'%'",
    "GRANT SELECT (id, name) ON shop.customers TO `read only`@localhost",
    "GRANT EXECUTE ON PROCEDURE bank.move TO app@'%'",
)
_ROLES = (
    "CREATE ROLE bookkeeping",
    "GRANT SELECT ON bank.* TO bookkeeping",
    "GRANT bookkeeping TO `read only`@localhost",
)
_SEQUENCE = re.compile(r"\bseq_(\d+)_to_(\d+)( [a-z]\b(?!\())?")
_ENGINE = re.compile(r"ENGINE=(\w+)")


def create(server: Server, size: int = 4_000_000, *, seed: int = 1, threads: int = 2, binlog: bool = True) -> None:
    """Create the sample on ``server``: about ``size`` bytes of tables (at least some 2 MB).

    The rows depend on ``size`` and ``seed`` alone. ``binlog=False`` keeps the bulk out of the binary log
    (half the space; such a server cannot feed a replica from its first event on).
    """
    with server.connect() as connection:
        _run(
            connection,
            spoken(
                server,
                *([] if binlog else ["SET sql_log_bin = 0"]),
                *_SCHEMA,
                *(_TEXT_TABLE.format(name=name) for name in _TEXT_TABLES),
                *_small_rows(seed),
            ),
        )
        _fill(server, max(1, size // _ROW_BYTES // len(_TEXT_TABLES)), seed, threads, binlog)
        _run(connection, ["SET sql_log_bin = 1", *_PROGRAMS, *(_ROLES if server.roles else ())])


def spoken(server: Server, *statements: str) -> list[str]:
    """``statements`` in the words of this server: its engines, and its way to count."""

    def engine(match: re.Match[str]) -> str:
        return f"ENGINE={server.engines.get(match[1], match[1])}"

    said = [_ENGINE.sub(engine, statement) for statement in statements]
    return said if server.sequences else [_SEQUENCE.sub(_counted, statement) for statement in said]


def _counted(match: re.Match[str]) -> str:
    """MariaDB's table seq_A_to_B as a derived table that every server understands."""
    first, last = int(match[1]), int(match[2])
    digits = "SELECT 0 n" + "".join(f" UNION ALL SELECT {digit}" for digit in range(1, 10))
    places = range(len(str(last - first)))
    number = " + ".join([str(first), *(f"d{place}.n * {10**place}" for place in places)])
    tables = ", ".join(f"({digits}) d{place}" for place in places)
    return f"(SELECT {number} AS seq FROM {tables} HAVING seq <= {last} ORDER BY seq){match[3] or ' counted'}"


def _small_rows(seed: int) -> list[str]:
    return [
        (
            "INSERT INTO shop.customers (id, name, email, created_at) SELECT seq, CONCAT('Müller ', seq), "
            f"CONCAT('c', seq, '-', LEFT(SHA2(CONCAT({seed}, seq), 256), 32), '@example.com'), "
            "'2026-01-01' + INTERVAL seq MINUTE FROM seq_1_to_1000"
        ),
        (
            "INSERT INTO shop.products (id, title, price, stock) SELECT seq, CONCAT('Product ', seq), "
            f"(CRC32(CONCAT({seed}, seq)) MOD 10000) / 100, 100 FROM seq_1_to_300"
        ),
        (
            "INSERT INTO shop.orders (id, customer_id, created_at, note) SELECT seq, "
            f"1 + CRC32(CONCAT({seed}, 'o', seq)) MOD 1000, '2026-02-01' + INTERVAL seq SECOND, "
            f"IF(seq MOD 100 = 0, '{MARKER}', '') FROM seq_1_to_5000"
        ),
        (
            "INSERT INTO shop.order_lines SELECT o.seq, l.seq, "
            f"1 + CRC32(CONCAT({seed}, o.seq, l.seq)) MOD 300, 1 + (o.seq MOD 5) "
            "FROM seq_1_to_5000 o, seq_1_to_2 l"
        ),
        "INSERT INTO shop.sales SELECT seq, '2022-01-01' + INTERVAL seq DAY, seq / 3 FROM seq_1_to_1500",
        f"INSERT INTO bank.accounts SELECT seq, {ACCOUNT_BALANCE} FROM seq_1_to_{ACCOUNTS}",
        "INSERT INTO archive.yearbooks SELECT seq, CONCAT('Yearbook ', seq) FROM seq_1950_to_2025",
        f"INSERT INTO archive.postcards SELECT seq, CONCAT('{MARKER} ', seq) FROM seq_1_to_500",
        (
            "INSERT INTO `größe 数据`.`таблица` "
            f"SELECT seq, CONCAT('значение ', LEFT(SHA2({seed} + seq, 256), 32)) FROM seq_1_to_500"
        ),
        "INSERT INTO `größe 数据`.`naïve.tablé $1` SELECT seq, CONCAT('né ', seq) FROM seq_1_to_50",
    ]


def _fill(server: Server, rows: int, seed: int, threads: int, binlog: bool) -> None:
    # Half digest (does not compress below 4 bits a character), half prose: like real tables, about 2:1.
    body = (
        f"CONCAT(SHA2(CONCAT('{seed}', '{{name}}', seq), 512), ' ', "
        f"SHA2(CONCAT(seq, 'b{seed}'), 512), ' ', "
        "SHA2(CONCAT(seq, 'c'), 512), ' ', SHA2(CONCAT(seq, 'd'), 512), ' ', "
        f"REPEAT(CONCAT('the quick brown fox ', seq, ' jumps over the lazy dog '), 10), '{MARKER}')"
    )
    work = [(name, first, min(first + 24_999, rows)) for first in range(1, rows + 1, 25_000) for name in _TEXT_TABLES]
    lock = threading.Lock()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            with server.connect(database="shop") as connection:
                query(connection, f"SET sql_log_bin = {int(binlog)}")
                query(connection, "SET unique_checks = 0")
                while not failures:
                    with lock:
                        if not work:
                            return
                        name, first, last = work.pop(0)
                    (statement,) = spoken(
                        server,
                        f"INSERT INTO {name} SELECT seq, seq MOD 1000, {body.format(name=name)} "
                        f"FROM seq_{first}_to_{last}",
                    )
                    query(connection, statement)
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread below
            failures.append(error)

    clients = [threading.Thread(target=run) for _ in range(threads)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if failures:
        raise failures[0]


def create_hostile_names(server: Server) -> list[tuple[str, str]]:
    """Schemas and tables with names that trip programs; returns the (schema, table) pairs, 3 rows each.

    Spaces, quotes, backticks, dots, ``../``, leading dashes, case twins, unicode, and names whose files are
    250 bytes long (every character outside the plain ones takes five bytes on disk).
    """
    names = [
        ("with space", "a table"),
        ("quo'te\"s", "ta`ble"),
        ("dot.ted", "a.b.c"),
        ("../up", "../../etc"),
        ("-dash", "--help"),
        ("Case", "Twin"),
        ("case", "TWIN"),
        ("case", "twin"),
        ("#sharp", "semi;colon$HOME"),
        ("näme", "ünïcode 表"),
        ("case", "-" * 49),
        ("-" * 49, "x" * 64),
        ("new", "t.new"),
        ("case", "a\\b%c*?[x]"),
        ("case", "sales#P#p0"),
        ("ibdata", "ib_logfile0"),
        ("lost+found", "t"),
    ]
    for schema in dict.fromkeys(schema for schema, _ in names):
        server.execute(f"CREATE DATABASE {quote_name(schema)}")
    for number, pair in enumerate(names):
        table = quote_name(*pair)
        server.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, t VARCHAR(50)) ENGINE=InnoDB")
        server.execute(f"INSERT INTO {table} VALUES (1, '{number}-1'), (2, '{number}-2'), (3, '{number}-3')")
    return names


def create_many_tables(server: Server, count: int, schema: str = "many", *, rows: int = 20) -> None:
    """``count`` small tables t00000, t00001, ... in one schema."""
    server.execute(f"CREATE DATABASE {quote_name(schema)}")
    with server.connect(database=schema, autocommit=False) as connection:
        for number in range(count):
            (statement,) = spoken(
                server,
                f"CREATE TABLE t{number:05} (id INT PRIMARY KEY, t VARCHAR(200)) ENGINE=InnoDB "
                f"SELECT seq AS id, CONCAT('{number}-', LEFT(SHA2(seq, 256), 32)) AS t FROM seq_1_to_{rows}",
            )
            query(connection, statement)
        connection.commit()


def _run(connection: Connection[Any], statements: Sequence[str]) -> None:
    for statement in statements:
        query(connection, statement)


# --- looking at all of it


def checksum_everything(connection: Connection[Any]) -> dict[str, int]:
    """CHECKSUM TABLE ... EXTENDED of every base table outside the system schemas, by quoted name."""
    names = [
        quote_name(schema, table)
        for schema, table in query(
            connection,
            "SELECT table_schema, table_name FROM information_schema.tables "
            "WHERE table_type = 'BASE TABLE' AND table_schema NOT IN %s ORDER BY table_schema, table_name",
            (SYSTEM_SCHEMAS,),
        )
    ]
    sums: dict[str, int] = Sums()
    for first in range(0, len(names), 100):
        batch = names[first : first + 100]
        rows = query(connection, f"CHECKSUM TABLE {', '.join(batch)} EXTENDED")
        for name, row in zip(batch, rows, strict=True):
            if row[1] is None:
                raise AssertionError(f"{name} has no checksum")
            sums[name] = int(row[1])
    return sums


def describe_everything(connection: Connection[Any]) -> dict[str, list[str]]:
    """Views, triggers, routines, events (with their state), users and grants, as comparable text."""
    ignored = (SYSTEM_SCHEMAS,)
    found = {
        kind: [" ".join(str(value) for value in row) for row in query(connection, sql, ignored)]
        for kind, sql in {
            "schemas": "SELECT schema_name, default_collation_name FROM information_schema.schemata "
            "WHERE schema_name NOT IN %s ORDER BY 1",
            "views": "SELECT table_schema, table_name, view_definition FROM information_schema.views "
            "WHERE table_schema NOT IN %s ORDER BY 1, 2",
            "triggers": "SELECT trigger_schema, trigger_name, action_statement "
            "FROM information_schema.triggers WHERE trigger_schema NOT IN %s ORDER BY 1, 2",
            "routines": "SELECT routine_schema, routine_name, routine_type, routine_definition "
            "FROM information_schema.routines WHERE routine_schema NOT IN %s ORDER BY 1, 2",
            "events": "SELECT event_schema, event_name, status, event_definition "
            "FROM information_schema.events WHERE event_schema NOT IN %s ORDER BY 1, 2",
        }.items()
    }
    # On MariaDB a role has no host; a MySQL role is an account like others.
    columns = query(connection, "SHOW COLUMNS FROM mysql.user LIKE 'is_role'")
    is_role = "is_role" if columns else "'N'"
    accounts = query(connection, f"SELECT user, host, {is_role} FROM mysql.user ORDER BY 1, 2")
    found["grants"] = [
        line
        for user, host, role in accounts
        for (line,) in query(
            connection,
            "SHOW GRANTS FOR " + (quote_name(user) if role == "Y" else f"{quote_name(user)}@{quote_name(host)}"),
        )
    ]
    return Sums(found)


def digest(sums: dict[str, int]) -> str:
    """One short text for many checksums."""
    return hashlib.sha256(repr(sorted(sums.items())).encode()).hexdigest()[:16]

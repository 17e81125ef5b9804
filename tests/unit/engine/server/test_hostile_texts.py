"""Texts that are no UTF-8, in every column that is read from a server: no error, and kept byte for byte."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pymysql
import pytest

from backupd.engine.server.accounts import read_accounts
from backupd.engine.server.definitions import plain_session, read_schema, read_tables, write_definition, write_triggers
from backupd.engine.server.probe import examine
from backupd.engine.server_load import changing, kill_lock_statements, running, waiting
from backupd.engine.sql.client import Session, readable
from backupd.engine.sql.tables import list_tables
from backupd.model.errors import ServerError
from backupd.model.server_facts import Role
from backupd.model.table import TableName
from restore.cutover.cutover import lock_holders
from restore.cutover.table_swap import await_queued
from tests.support.servers.flavours import BOTH, as_root, as_service, server_of
from tests.support.servers.server import Server

BYTES = bytes(range(256))
CHARSETS = ("latin1", "binary", "utf8mb4")
REFUSED = (1067, 1300, 1366, 1470, 3719, 4088)
"""What servers answer to a name, a comment or a default that is not of its character set: then it is not there."""


@pytest.fixture(scope="module", params=BOTH)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with server_of(request.param) as found:
        found.execute("CREATE DATABASE shop")
        for charset in CHARSETS:
            connection = _raw(found, charset)
            for statement in _objects(charset.encode()):
                _try(connection, statement)
            connection.close()
        yield found


def test_bytes_that_are_no_text_come_and_go_as_they_are(server: Server) -> None:
    with as_root(server).connect() as session:
        for number in range(256):
            statement = f"SELECT SLEEP(0) /* {bytes([number]).decode('latin1')} */".encode("latin1")
            session.send(statement)
        whole = BYTES.decode("utf-8", "surrogateescape")
        session.execute("CREATE TEMPORARY TABLE shop.b (v VARBINARY(600))")
        session.execute("INSERT INTO shop.b VALUES (%s)", whole)
        assert session.scalar("SELECT v FROM shop.b") == BYTES
        assert readable(whole) == BYTES.decode("utf-8", "replace")
        with pytest.raises(ServerError):
            session.query("SELECT * FROM shop.`\udc80\udcff`")
        assert session.scalar("SELECT 1") == 1


def test_nothing_that_runs_there_keeps_a_server_from_being_looked_at(server: Server) -> None:
    with running_statements(server), as_root(server).connect() as session:
        probed = examine(session)
        assert probed.info.role is Role.STANDALONE
        json.dumps(probed.info.as_json(), ensure_ascii=False).encode()
        found = running(session, 0)
        assert len(found) == len(CHARSETS) * 2
        for one in found:
            str(one).encode()
        assert not changing(session)
        assert not waiting(session)
        assert kill_lock_statements(as_service(server)) == 0
        for text in lock_holders(session, [TableName("shop", "latin1d")]):
            text.encode()
        session.execute("CREATE OR REPLACE VIEW shop.other AS SELECT 1")
        session.execute("CREATE TABLE shop.one (id INT)")
        session.execute("LOCK TABLES shop.one WRITE")
        with as_root(server).connect() as other, ThreadPoolExecutor(1) as pool:
            renaming = pool.submit(other.execute, "RENAME TABLE shop.one TO shop.two")
            try:
                await_queued(renaming, other.thread_id, session)
            finally:
                session.execute("UNLOCK TABLES")
            renaming.result()
        session.execute("DROP TABLE shop.two")


def test_definitions_are_kept_byte_for_byte(server: Server) -> None:
    with as_root(server).connect() as session:
        names = [
            table.name for table in list_tables(session) if table.name.schema == "shop" and table.kind == "BASE TABLE"
        ]
        assert len(names) >= 2 * len(CHARSETS) - 1
        found = read_tables(session, names)
        assert not found.failed
        session.execute("CREATE DATABASE again")
        try:
            for name, definition in found.tables.items():
                name.shown.encode()
                session.execute("USE again")
                session.execute("SET SESSION sql_mode = ''")
                session.send(write_definition(definition).partition(b";\n")[2].partition(b";\n")[2][:-2])
                again = TableName("again", name.table)
                assert _created(session, again) == _created(session, name)
                assert write_triggers(definition) or not name.table.endswith("d")
        finally:
            session.execute("DROP DATABASE again")


def test_accounts_views_routines_and_events_are_read(server: Server) -> None:
    with as_root(server).connect() as session:
        info = examine(session).info
        accounts = read_accounts(session, info.flavour, info.version)
        assert "latin1" in accounts.sql
        accounts.sql.encode("utf-8", "surrogateescape")
        files = read_schema(session, "shop").files()
        assert files
        assert any(b"\x80\x81\x82" in content for content in files.values())


@contextmanager
def running_statements(server: Server) -> Iterator[None]:
    """Of each character set one with all bytes, and one with a character across the byte where lists are cut."""
    with ExitStack() as stack:
        numbers = []
        for charset in CHARSETS:
            for text in (BYTES, b"x" * (99 - len("SELECT SLEEP(60) /* ")) + "ü€😀".encode() * 9):
                connection = _raw(server, charset)
                with connection.cursor() as cursor:
                    cursor.execute("SELECT CONNECTION_ID()")
                    ((number,),) = cursor.fetchall()
                numbers.append(int(number))
                thread = threading.Thread(target=_run, args=(connection, b"SELECT SLEEP(60) /* " + text + b" */ + 1"))
                thread.start()
                stack.callback(thread.join)
        looker = _raw(server, "utf8mb4")
        stack.callback(looker.close)
        there = 0
        while there < len(numbers):
            with looker.cursor() as cursor:
                cursor.execute("SHOW PROCESSLIST")
                there = sum(bytes(row[7] or b"").startswith(b"SELECT SLEEP(60)") for row in cursor.fetchall())
        try:
            yield
        finally:
            server.execute(*(f"KILL {number}" for number in numbers))


def _try(connection: pymysql.Connection[pymysql.cursors.Cursor], statement: bytes) -> None:
    try:
        connection.query(statement)
    except pymysql.err.Error as error:
        if error.args[0] not in REFUSED:
            raise


def _run(connection: pymysql.Connection[pymysql.cursors.Cursor], statement: bytes) -> None:
    try:
        connection.query(statement)
    except (pymysql.err.Error, OSError):
        return  # killed


def _raw(server: Server, charset: str) -> pymysql.Connection[pymysql.cursors.Cursor]:
    connection = pymysql.connect(
        unix_socket=str(server.socket),
        user="root",
        autocommit=True,
        use_unicode=False,
        charset="latin1" if charset == "binary" else charset,
    )
    connection.query(f"SET NAMES {charset}")
    return connection


def _objects(label: bytes) -> Iterator[bytes]:
    text = BYTES.replace(b"\\", b"\\\\").replace(b"'", b"\\'").replace(b"\0", b"\\0")
    binary = b"v VARBINARY(600) DEFAULT '" + text + b"', w BINARY(1) DEFAULT x'ff'"
    comment = b" COMMENT '" + text + b"'"
    yield (
        b"CREATE TABLE shop."
        + label
        + b" (id INT PRIMARY KEY"
        + comment
        + b", "
        + binary
        + b", e ENUM('\xe4') CHARSET latin1)"
        + comment
    )
    yield b"CREATE TABLE shop." + label + b"d (id INT PRIMARY KEY, " + binary + b")"
    for first in range(0xA0, 0x100, 24):
        some = bytes(range(first, first + 24))
        yield b"CREATE TABLE shop.`n" + label + some + b"` (`c" + some + b"` INT)"
    yield b"CREATE VIEW shop.v_" + label + b" AS SELECT '" + text + b"' AS a, _binary'" + text + b"' AS b"
    yield b"CREATE PROCEDURE shop.p_" + label + b"() COMMENT '\xe4\xff' SELECT '" + text + b"'"
    yield b"CREATE EVENT shop.e_" + label + b" ON SCHEDULE EVERY 1 DAY COMMENT '\xe4\xff' DO SELECT '" + text + b"'"
    yield (
        b"CREATE TRIGGER shop.t_"
        + label
        + b" BEFORE INSERT ON shop."
        + label
        + b"d FOR EACH ROW SET @a='"
        + text
        + b"'"
    )
    yield b"CREATE USER 'u\xe4\xff\x80" + label + b"'@'localhost' IDENTIFIED BY 'p\xe4\xff'"
    yield b"SET GLOBAL init_connect = 'SET @a=\"\xe4\xff" + label + b"\"'"


def _created(session: Session, name: TableName) -> bytes:
    with plain_session(session) as own:
        return str(own.query(f"SHOW CREATE TABLE {name}")[0][1]).encode("utf-8", "surrogateescape")

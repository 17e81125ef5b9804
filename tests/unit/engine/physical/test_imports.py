"""Tables that come in as files, with the real tool and server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from backupd.backup.physical import current_position, landmarks_of
from backupd.engine.physical.imported_tables import ImportWatch, Removals, has_old_pages, imported_tables, newest_table
from backupd.engine.server.probe import probe, read_dialect
from backupd.engine.sql.client import Connection
from backupd.model.errors import TablesChangedError, ToolError
from backupd.model.server_facts import Position, Receipts
from tests.support.imports import import_tablespace
from tests.support.servers import mysql
from tests.support.servers.backups import take
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer
from tests.support.servers.mysql import MySQLServer

PAGE = 16384


@pytest.fixture(scope="module")
def server() -> Iterator[PrivateServer]:
    with PrivateServer() as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE d",
            "CREATE TABLE d.a (id INT PRIMARY KEY)",
            "INSERT INTO d.a VALUES (1)",
            "CREATE TABLE d.b LIKE d.a",
            "CREATE TABLE d.again LIKE d.a",
        )
        yield server


@pytest.fixture(scope="module")
def other() -> Iterator[MySQLServer]:
    with MySQLServer() as server:
        yield server


def test_a_table_that_the_tool_takes_for_a_dropped_one_makes_the_backup_fail_by_name(
    server: PrivateServer, short_tmp: Path
) -> None:
    server.settle()
    import_tablespace(server, "d", "a", "b")
    server.execute("TRUNCATE TABLE d.again", "CREATE TABLE d.gone LIKE d.a", "DROP TABLE d.gone")
    with pytest.raises(ToolError, match="left out 1 tables that the server has: d/b") as caught:
        take(server, short_tmp / "now")
    assert "in a few minutes" in caught.value.hint
    server.settle()
    assert "d/b.ibd" in take(server, short_tmp / "later").sizes


def test_an_import_while_the_backup_runs_makes_it_fail(server: PrivateServer) -> None:
    connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    receipts = Receipts("full-backuped", 0, 1, 2, Position(), "10.11.19", "10.11.19")
    before = current_position(connection)
    server.execute("CREATE TABLE d.made AS SELECT * FROM d.a")
    server.settle()
    landmarks = landmarks_of(connection, probe(connection), before, receipts, b"key")
    assert landmarks.table is not None
    assert before.table is not None
    assert landmarks.table > before.table
    import_tablespace(server, "d", "a", "b")
    with pytest.raises(ToolError, match="imported while the backup ran") as caught:
        landmarks_of(connection, probe(connection), before, receipts, b"key")
    assert caught.value.detail == "d/b"


def test_while_a_table_has_no_tablespace_no_id_is_the_newest(server: PrivateServer) -> None:
    connection = Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)
    with connection.connect() as session:
        assert newest_table(session) is not None
        server.execute("CREATE TABLE d.empty LIKE d.a", "ALTER TABLE d.empty DISCARD TABLESPACE")
        assert newest_table(session) is None
        own = server.datadir / "d/empty.ibd"
        shutil.copy(server.datadir / "d/a.ibd", own)
        assert newest_table(session) is None, "what lies there is another table's"
        own.unlink()
        server.execute("DROP TABLE d.empty")
        assert newest_table(session) is not None
    server.stop()
    server.start()
    with connection.connect() as session:
        assert newest_table(session) is not None, "after a start the server lists no table before it is used"
        assert imported_tables(session, newer_than=0, lsn=1) == ("d/b",)


def page(lsn: int, size: int = PAGE, flags: int = 0x15, space: int = 7) -> bytes:
    content = bytearray(size)
    content[:4], content[16:24], content[54:58] = b"\1\2\3\4", lsn.to_bytes(8), flags.to_bytes(4)
    content[34:38] = space.to_bytes(4)
    return bytes(content)


def test_pages_that_were_never_written_have_no_age(tmp_path: Path) -> None:
    path = tmp_path / "t.ibd"
    for content, old in (
        (bytes(4 * PAGE), False),  # a new table before its first page is written
        (page(0) + bytes(3 * PAGE), False),  # the same on servers that write the first page at once
        (page(0) + page(200), True),
        (page(200) + page(200) + bytes(PAGE), False),
        (page(200) + page(200) + bytes(PAGE) + page(100), True),
        (page(200) + page(200) + page(101), False),
        (page(200, 4096, 0x27) + page(200, 4096) + page(100, 4096), True),  # ROW_FORMAT=COMPRESSED
        (b"", False),
    ):
        path.write_bytes(content)
        assert has_old_pages(path, lsn=100, page_size=PAGE) is old, content[:64]
    assert not has_old_pages(tmp_path / "gone.ibd", lsn=100, page_size=PAGE)


def test_old_pages_of_its_own_tablespace_are_no_import_where_imports_are_given_a_new_age(tmp_path: Path) -> None:
    path = tmp_path / "t.ibd"
    for content, old in (
        (page(200) + page(200) + page(100), False),
        (page(100) + page(200), False),
        (page(200) + page(200) + page(100, space=8), True),  # of another tablespace
        (page(200) + page(0) + page(200), True),  # without any age
        (page(0) + page(200), False),  # but the first: 5.7 writes that of a rebuilt table so, and again much later
        (page(0, space=8) + page(200), True),
    ):
        path.write_bytes(content)
        assert has_old_pages(path, lsn=100, page_size=PAGE, own=7) is old, content[:64]


def redo(records: bytes) -> bytes:
    """An xtrabackup_logfile that holds ``records``."""
    blocks = (records[at : at + 496].ljust(496, b"\0") for at in range(0, len(records), 496))
    return bytes(2048) + b"".join(b"H" * 12 + block + b"T" * 4 for block in blocks)


def removal(number: bytes, path: str, kind: bytes = b"\xa3") -> bytes:
    name = path.encode() + b"\0"
    return kind + number + b"\0" + len(name).to_bytes(2) + name


@pytest.mark.parametrize("step", [1, 512, 700, 1 << 20])
def test_removals_are_found_in_the_redo_log_wherever_blocks_and_payloads_end(step: int) -> None:
    records = b"".join(
        (
            b"x" * 480,
            removal(b"\x18", "./d/b.ibd"),
            b"y" * 960,
            removal(b"\x81\x23", "./d/c.ibd", b"\x23"),
            removal(b"\xc1\x00\x00", f"/srv/{'far/' * 80}d/e.ibd"),
            removal(b"\xe1\x00\x00\x01", "./d/e.ibd"),
            removal(b"\xf0\x10\x00\x00\x02", "./d/f.ibd"),
            removal(b"\x19", "./d/a.ibd", b"\x37"),  # the name of a tablespace, and no removal
            b"\xa3\x1a\x00\x00\x0c./d/a.ibd\x00",
        )
    )  # another length
    content = memoryview(redo(records))
    found = Removals()
    for at in range(0, len(content), step):
        found.take(content[at : at + step])
    assert found.spaces == {0x18, 0x123, 0x10000, 0x1000001, 0x10000002}


@pytest.mark.skipif(bool(mysql.why_not()), reason=mysql.why_not() or "it can run")
def test_truncating_and_rebuilding_on_mysql_is_no_import_and_an_import_is_wholly_younger(other: MySQLServer) -> None:
    server = other
    rows = ", ".join(f"({number}, REPEAT('x', 200))" for number in range(2000))
    server.execute(
        "CREATE DATABASE d",
        *(
            statement
            for name in ("source", "empty", "rebuilt", "imported")
            for statement in (
                f"CREATE TABLE d.{name} (id INT PRIMARY KEY, t VARCHAR(250), KEY (t)) ENGINE=InnoDB",
                f"INSERT INTO d.{name} VALUES {rows}",
            )
        ),
    )
    connection = Connection(socket=str(server.socket), user="root")
    server.stop()
    server.start()  # everything is on the disk
    with connection.connect() as session:
        newest = newest_table(session)
        (status,) = session.query("SHOW ENGINE INNODB STATUS")
    lsn = int(str(status[2]).partition("Log sequence number")[2].split()[0])
    assert newest is not None
    server.execute(
        "TRUNCATE TABLE d.empty",
        "INSERT INTO d.empty VALUES (1, 'y')",
        "ALTER TABLE d.rebuilt ENGINE=InnoDB",
        "CREATE TABLE d.fresh LIKE d.source",
    )
    import_tablespace(server, "d", "source", "imported")
    server.execute("CREATE DATABASE other", "RENAME TABLE d.rebuilt TO other.rebuilt")
    with connection.connect() as session:
        assert newest_table(session) is not None, "each table has its file"
    server.stop()
    server.start()
    size = int(str(server.scalar("SELECT @@innodb_page_size")))
    with connection.connect() as session:
        assert imported_tables(session, newer_than=newest, lsn=lsn) == ()
    content = (server.datadir / "d/imported.ibd").read_bytes()
    pages = [content[at : at + size] for at in range(0, len(content), size)]
    assert len(pages) > 20
    assert all(int.from_bytes(one[16:24]) > lsn for one in pages if any(one)), "an increment holds every page"


@pytest.mark.skipif(bool(mysql.why_not()), reason=mysql.why_not() or "it can run")
def test_what_the_redo_log_would_take_from_a_backup_is_named_and_what_only_looks_like_it_is_not(
    other: MySQLServer,
) -> None:
    server = other
    server.execute(
        "CREATE DATABASE n",
        *(
            statement
            for name in ("source", "imported", "discarded", "forged", "emptied", "again")
            for statement in (
                f"CREATE TABLE n.{name} (id INT PRIMARY KEY) ENGINE=InnoDB",
                f"INSERT INTO n.{name} VALUES (1)",
            )
        ),
    )
    server.restart()  # everything is on the disk
    with Connection(socket=str(server.socket), user="root").connect() as session:
        rows = session.query(f"SELECT NAME, SPACE FROM information_schema.{read_dialect(session).innodb_tables}")
        numbers = {str(name): int(space) for name, space in rows}
        watches = [ImportWatch(session)]
        server.execute("DROP TABLE n.again", "CREATE TABLE n.again LIKE n.source", "TRUNCATE TABLE n.emptied")
        import_tablespace(server, "n", "source", "imported", on_the_way=lambda: watches.append(ImportWatch(session)))
        server.execute("ALTER TABLE n.discarded DISCARD TABLESPACE")
        watches.append(ImportWatch(session))
        removed = ("imported", "discarded", "forged", "again")
        content = redo(b"".join(removal(bytes([numbers[f"n/{name}"]]), f"./n/{name}.ibd") for name in removed))
        for watch, payload, named in (
            (watches[0], content, "n.discarded, n.imported"),
            (watches[1], redo(b""), "n.imported"),
        ):
            watch.redo(memoryview(payload))
            watch.look(session)
            with pytest.raises(TablesChangedError) as caught:
                watch.refuse()
            assert caught.value.message.endswith(f"imported or discarded while the backup ran: {named}")
        watches[2].redo(memoryview(content))
        watches[2].look(session)
        watches[2].refuse()

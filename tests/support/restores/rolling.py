"""Sources whose logs are replayed, copies that they are replayed onto, and what both hold."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pymysql.cursors import DictCursor

from backupd.engine.binlog.hole import begin_behind_hole
from backupd.engine.binlog.scan import scan
from backupd.engine.relay_logs import Leg
from backupd.engine.server.launch import LaunchedServer, ServerConfig
from backupd.engine.server.probe import probe
from backupd.engine.sql.client import Connection
from backupd.model.binlog import ReplayMethod, Stop
from backupd.model.server_facts import Position, ServerInfo
from backupd.process.run_context import RunContext
from restore.replay.private_replay import replay_config
from restore.replay.replay import Replayed, replay
from tests.support import sample
from tests.support.oracle import Sums
from tests.support.servers import mysql
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server, quote_name
from tests.support.stores.folders import give_to_database, make_short_directory

Ask = Callable[[str], Sequence[Sequence[Any]]]
OWN = "('mysql', 'information_schema', 'performance_schema', 'sys')"


@dataclass(frozen=True)
class Kind:
    """A flavour: how its servers are made for tests."""

    name: str
    make: Callable[..., Server]
    why_not: Callable[[], str]

    def __str__(self) -> str:
        return self.name

    @property
    def mariadb(self) -> bool:
        return self.name == "mariadb"


def _mysql(**options: Any) -> Server:
    return MySQLServer(mysqld_path=str(mysql.root_programs() / "mysqld"), **options)


def both() -> pytest.MarkDecorator:
    """Marks a test that runs for both flavours, as far as they are here."""
    return pytest.mark.parametrize(
        "kind",
        [
            pytest.param(kind, id=str(kind), marks=pytest.mark.skipif(bool(why := kind.why_not()), reason=why or "-"))
            for kind in (MARIADB, MYSQL)
        ],
    )


MARIADB = Kind("mariadb", PrivateServer, lambda: "")
MYSQL = Kind("mysql", _mysql, mysql.why_no_root)


@dataclass(frozen=True)
class Logs:
    """Logs of a source, copied as an archive would hold them, from ``start`` to ``stop``."""

    files: tuple[Path, ...]
    start: Position
    stop: Stop


def place(kind: Kind, source: Server) -> Position:
    """Where the source is now, GTIDs included."""
    row = source.query("SHOW MASTER STATUS" if kind.mariadb else "SHOW BINARY LOG STATUS")[0]
    executed = source.scalar("SELECT @@GLOBAL.gtid_binlog_pos" if kind.mariadb else "SELECT @@GLOBAL.gtid_executed")
    return Position(str(row[0]), int(row[1]), "".join(str(executed or "").split()))


def place_before(kind: Kind, source: Server, text: str) -> Stop:
    """The place just before the transaction whose statement has ``text`` in it, by the source's own list of events."""
    for name in _names(source):
        begin = 0
        for _file, pos, event, _server, _end, info in source.query(f"SHOW BINLOG EVENTS IN '{name}'"):
            if event in ("Gtid", "Anonymous_Gtid"):
                begin, gtid = pos, info
            if text in info and event not in ("Gtid", "Rotate"):
                if kind.mariadb:
                    executed = source.scalar(f"SELECT BINLOG_GTID_POS('{name}', {begin})")
                    following = re.findall(r"\d+-\d+-\d+", gtid)[0]
                else:
                    uuid, number = gtid.split("'")[1].split(":")
                    executed, following = f"{uuid}:1-{int(number) - 1}", f"{uuid}:{number}"
                return Stop("branch", name, begin, executed, next_gtid=following)
    raise AssertionError(f"no event of the source has {text!r} in it")


def here(kind: Kind, source: Server) -> Stop:
    at = place(kind, source)
    return Stop("branch", at.file, at.pos, at.gtid)


def logs(source: Server, folder: Path, start: Position, stop: Stop) -> Logs:
    """The files from ``start`` on, cut at ``stop``; in use as the source left them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = _names(source)
    files = []
    for name in names[names.index(start.file) : names.index(stop.file) + 1]:
        data = (source.datadir / name).read_bytes()
        (folder / name).write_bytes(data[: stop.pos] if name == stop.file else data)
        files.append(folder / name)
    return Logs(tuple(files), start, stop)


def with_hole(what: Logs, folder: Path) -> Logs:
    """The same logs, and of the first file only what is behind the start."""
    one, *more = what.files
    whole = one.read_bytes()
    gtids = scan(io.BytesIO(whole), stop=what.start.pos).gtids_after
    target = folder / one.name
    folder.mkdir()
    assert begin_behind_hole(target, whole[:4096], gtids, what.start.pos)
    with target.open("ab") as stream:
        stream.write(whole[what.start.pos :])
    return replace(what, files=(target, *more))


def _names(source: Server) -> list[str]:
    return [str(row[0]) for row in source.query("SHOW BINARY LOGS")]


def first(kind: Kind) -> Position:
    """The beginning of a source's history: a copy of an empty system stands here."""
    return Position("binlog.000001", 4, "")


def empty_copy(kind: Kind, folder: Path) -> Path:
    """The data of a source that has not written anything yet."""
    with_data = kind.make(datadir=folder / "copy")
    (folder / "copy").mkdir(parents=True)
    with_data.make_datadir()
    shutil.rmtree(with_data.base, ignore_errors=True)
    return folder / "copy"


def cold_copy(source: Server, folder: Path) -> Path:
    """A backup of the source, which is stopped for it."""
    folder.mkdir(parents=True, exist_ok=True)
    source.stop()
    subprocess.run(["cp", "-a", str(source.datadir), str(folder / "copy")], check=True)
    source.start()
    for log in (folder / "copy").glob("binlog.*"):
        log.unlink()
    return folder / "copy"


def info_of(source: Server) -> ServerInfo:
    return probe(Connection(socket=str(source.socket), user="root"))


class Oracle:
    """A replica of a source that can be moved on to a place, by the server's own UNTIL."""

    def __init__(self, kind: Kind, source: Server, replica: Server) -> None:
        self._kind, self._replica = kind, replica
        if kind.mariadb:
            replica.execute(
                f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={source.port}, MASTER_USER='repl',"
                " MASTER_PASSWORD='Repl-s3cret-77', MASTER_USE_GTID=slave_pos"
            )
        else:
            replica.execute(
                f"CHANGE REPLICATION SOURCE TO SOURCE_HOST='127.0.0.1', SOURCE_PORT={source.port},"
                " SOURCE_USER='repl', SOURCE_PASSWORD='Repl-s3cret-77', SOURCE_SSL=0,"
                " GET_SOURCE_PUBLIC_KEY=1, SOURCE_AUTO_POSITION=1"
            )

    def move(self, stop: Stop) -> None:
        """On to the place just before ``stop.next_gtid``."""
        if self._kind.mariadb:
            self._replica.execute(f"START SLAVE UNTIL master_gtid_pos='{stop.gtids}'")
        else:
            self._replica.execute(f"START REPLICA UNTIL SQL_BEFORE_GTIDS='{stop.next_gtid}'")
        deadline = time.monotonic() + 300
        while self._is_running():
            assert time.monotonic() < deadline, self._replica.log_text()[-2000:]
            time.sleep(0.02)
        if not self._kind.mariadb:
            self._replica.execute("STOP REPLICA")

    def query(self, sql: str) -> Sequence[Sequence[Any]]:
        return self._replica.query(sql)

    def _is_running(self) -> bool:
        with self._replica.connect() as connection, connection.cursor(DictCursor) as cursor:
            cursor.execute("SHOW SLAVE STATUS" if self._kind.mariadb else "SHOW REPLICA STATUS")
            (row,) = cursor.fetchall()
        name = "Slave_SQL_Running" if self._kind.mariadb else "Replica_SQL_Running"
        assert not int(row["Last_SQL_Errno"]), row["Last_SQL_Error"]
        assert not int(row["Last_IO_Errno"]), row["Last_IO_Error"]
        return bool(row[name] != "No")


@contextlib.contextmanager
def oracle(kind: Kind, source: Server) -> Iterator[Oracle]:
    """A replica that has nothing yet; the source needs ``tcp=True``. Its account is not in the binary log."""
    source.execute(
        "SET SESSION sql_log_bin = 0",
        "CREATE USER repl@'127.0.0.1' IDENTIFIED BY 'Repl-s3cret-77'",
        "GRANT REPLICATION SLAVE ON *.* TO repl@'127.0.0.1'",
        "SET SESSION sql_log_bin = 1",
    )
    with kind.make(options={"read_only": 1}) as replica:
        yield Oracle(kind, source, replica)


@contextlib.contextmanager
def running_copy(
    kind: Kind,
    source: Server,
    data: Path,
    *,
    server_ids: Sequence[int] = (),
    workers: int = 2,
    server_id: int = 0,
    memory: int = 64 << 20,
    **options: str,
) -> Iterator[tuple[LaunchedServer, ServerInfo]]:
    """A private server on ``data``, ready for a replay."""
    info = info_of(source)
    since = datetime.now(UTC)
    give_to_database(data.parent)
    config = replay_config(
        ServerConfig(source.program(), data, data.parent / "run", memory=memory, options=options),
        info,
        server_ids or (source.server_id,),
        workers,
        since=since,
        until=datetime.now(UTC),
    )
    config = replace(config, server_id=server_id or config.server_id)
    with LaunchedServer(config) as server:
        yield server, info


def roll(server: LaunchedServer, info: ServerInfo, what: Logs, **changes: Any) -> Replayed:
    given: dict[str, Any] = {name: changes.pop(name) for name in ("report", "cancel") if name in changes}
    if info.flavour != "mariadb":
        given["programs"] = {name: str(mysql.root_programs() / name) for name in ("mysql", "mysqlbinlog")}
    folder = server.config.directory.parent / "source"
    context = RunContext(templates=templates(), **given)
    leg = Leg(info, what.files, what.start, what.stop, ReplayMethod.APPLIER, folder, context)
    return replay(server, replace(leg, **changes))


@functools.cache
def templates() -> Path:
    """Empty systems of scratch sources, kept for the session."""
    folder = make_short_directory("bt-empty-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextlib.contextmanager
def asking(server: LaunchedServer) -> Iterator[Ask]:
    with server.connection.connect() as session:
        yield session.query


def content(kind: Kind, ask: Ask) -> dict[str, Any]:
    """What a server holds: the checksum of every table, and all that is no table."""
    tables = [
        (str(a), str(b))
        for a, b in ask(
            f"SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES WHERE TABLE_TYPE = 'BASE TABLE' "
            f"AND TABLE_SCHEMA NOT IN {OWN}"
        )
    ]
    found: dict[str, Any] = Sums(
        {f"{a}.{b}": ask(f"CHECKSUM TABLE {quote_name(a, b)}")[0][1] for a, b in sorted(tables)}
    )
    # How far AUTO_INCREMENT got is in no log: transactions that are tried again, or rolled back, move it, too.
    found["definitions"] = {
        name: re.sub(r" AUTO_INCREMENT=\d+", "", str(ask(f"SHOW CREATE TABLE {quote_name(*name)}")[0][1]))
        for name in sorted(tables)
    }
    found["triggers"] = sorted(
        tuple(row)
        for row in ask(
            f"SELECT TRIGGER_SCHEMA, TRIGGER_NAME, ACTION_STATEMENT FROM information_schema.TRIGGERS "
            f"WHERE TRIGGER_SCHEMA NOT IN {OWN}"
        )
    )
    found["routines"] = sorted(
        tuple(row)
        for row in ask(
            f"SELECT ROUTINE_SCHEMA, ROUTINE_NAME, DEFINER, SQL_MODE FROM information_schema.ROUTINES "
            f"WHERE ROUTINE_SCHEMA NOT IN {OWN}"
        )
    )
    found["events"] = sorted(
        tuple(row)
        for row in ask(
            "SELECT EVENT_SCHEMA, EVENT_NAME, STATUS, DEFINER, SQL_MODE, TIME_ZONE, EVENT_DEFINITION, INTERVAL_VALUE,"
            " ON_COMPLETION, EVENT_COMMENT, CHARACTER_SET_CLIENT, COLLATION_CONNECTION FROM information_schema.EVENTS"
        )
    )
    found["users"] = sorted(
        tuple(row) for row in ask("SELECT User, Host FROM mysql.user WHERE User NOT IN ('repl', 'backupd_private')")
    )
    return found


class Quiet:
    """A source with the sample that writes no more, and its logs in two files."""

    def __init__(self, kind: Kind, source: Server, folder: Path) -> None:
        self.kind, self.source = kind, source
        source.execute(
            "CREATE DATABASE early",
            "CREATE TABLE early.t (i INT PRIMARY KEY)",
            "INSERT INTO early.t VALUES (1), (2), (3)",
        )
        self.base = cold_copy(source, folder / "base")
        self.start = place_before(kind, source, "CREATE DATABASE").position
        self.after_base = here(kind, source).position
        sample.create(source)
        source.execute(
            "FLUSH BINARY LOGS",
            "CREATE TABLE early.u LIKE early.t",
            "INSERT INTO early.u VALUES (7)",
            "UPDATE early.t SET i = 30 WHERE i = 3",
            "INSERT INTO early.u VALUES (8)",
            "INSERT INTO early.u VALUES (9)",
        )
        if kind.mariadb:  # MySQL's server reads no files unless it is told from where
            loaded = folder / "loaded.txt"
            loaded.write_text("10\n11\n")
            loaded.chmod(0o644)
            source.execute("SET SESSION binlog_format = 'STATEMENT'", f"LOAD DATA INFILE '{loaded}' INTO TABLE early.u")
        self.stop = here(kind, source)
        self.logs = logs(source, folder / "logs", self.after_base, self.stop)
        self.content = content(kind, source.query)

    def copy(self, place: Path) -> Path:
        """A restored backup from before the sample."""
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", str(self.base), str(place / "copy")], check=True)
        return place / "copy"

    def running(self, place: Path, **options: Any) -> Any:
        return running_copy(self.kind, self.source, self.copy(place), **options)


def gtid_of(quiet: Quiet, text: str) -> str:
    """Of the transaction whose statement has ``text`` in it."""
    return place_before(quiet.kind, quiet.source, text).next_gtid

"""Private database servers, whatever their flavour: own folder, own socket, own id; none of them outlives the tests."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import pymysql
from pymysql.connections import Connection

from tests.support.oracle import Rows, Total, reads_rows
from tests.support.servers.datadir import Options, ServerDiedError, write_mysqld_group
from tests.support.stores.folders import DATABASE_USER, discard, give_to_database, make_short_directory, runs_as_root

Row = tuple[Any, ...]

BACKUP_USER = "backup"
BACKUP_PASSWORD = "Tool-s3cret-51c7"
SERVICE_USER = "backupd"
SERVICE_PASSWORD = "Service-s3cret-90ab"

_ids = itertools.count(1000 + os.getpid() % 1000 * 1000)
# PR_SET_PDEATHSIG fires when the *thread* that started the child ends, so one thread that lives as long as
# the interpreter starts them all.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="server-starter")


def connect(
    path: Path | str,
    *,
    user: str = "root",
    password: str = "",
    database: str | None = None,
    autocommit: bool = True,
) -> Connection[Any]:
    """A PyMySQL connection through the socket at ``path``."""
    return pymysql.connect(
        unix_socket=str(path),
        user=user,
        password=password,
        database=database,
        autocommit=autocommit,
        charset="utf8mb4",
        connect_timeout=60,
        ssl_disabled=True,  # else it reads the system's certificates first, each time
    )


def query(connection: Connection[Any], sql: str, args: Sequence[Any] = ()) -> list[Row]:
    with connection.cursor() as cursor:
        cursor.execute(sql, tuple(args) or None)
        rows = [tuple(row) for row in cursor.fetchall()]
        return Rows(rows) if reads_rows(sql) else rows


def quote_name(*names: str) -> str:
    """```shop`.`or``der` ``"""
    return ".".join("`" + name.replace("`", "``") + "`" for name in names)


def option_text(value: str) -> str:
    """A value as it must stand in an option file, inside double quotes."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True)
class Words:
    """Statements that got other words in MySQL 8.2 and before. ``source``: a prefix of CHANGE ... TO's options.
    ``executed``: what tells the transactions that it has."""

    log_status: str = "SHOW MASTER STATUS"
    reset: str = "RESET MASTER"
    replica: str = "SLAVE"
    change: str = "CHANGE MASTER TO"
    source: str = "MASTER"
    executed: str = "@@gtid_binlog_pos"


class Server:
    """One server for one test (or a session). A flavour says how it is made, started and spoken to.

    ``datadir``: any path; initialised when missing or empty, else started as it is (a restored copy).
    ``options``: more lines for the ``[mysqld]`` group, underscores as in the server's variables; a value of
    None makes a bare flag. ``tcp``: also listen on a free port of 127.0.0.1, as the source of a replica must.
    ``binlog``: write a row binary log (default). Use as a context manager, or ``start`` and ``remove``.
    """

    sequences = False
    """Does it have MariaDB's tables seq_1_to_N?"""
    roles = True
    engines: Mapping[str, str] = MappingProxyType({})
    """The engine to take instead of one that it does not have."""
    words = Words()

    def __init__(
        self,
        *,
        datadir: Path | None = None,
        options: Options | None = None,
        tcp: bool = False,
        binlog: bool = True,
        server_id: int | None = None,
    ) -> None:
        self.base = make_short_directory()
        self.datadir = datadir or self.base / "data"
        self.socket = self.base / "s.sock"
        self.error_log = self.base / "error.log"
        self.option_path = self.base / "my.cnf"
        self.server_id = server_id or next(_ids)
        self.port: int | None = None
        self.options: dict[str, str | int | None] = dict(options or {})
        self._tcp = tcp
        self._binlog = binlog
        self._process: subprocess.Popen[bytes] | None = None
        self._root: Connection[Any] | None = None

    # --- life

    def start(self, timeout: float = 300.0) -> Self:
        """Initialise if needed, start, and return when it answers. Raises ServerDiedError with its log."""
        if self.running:
            return self
        if not self.datadir.exists() or not any(self.datadir.iterdir()):
            self.make_datadir()
        for attempt in range(3):
            self._write_options()
            try:
                self._launch(timeout)
            except ServerDiedError as error:
                if attempt < 2 and self._tcp and "Address already in use" in str(error):
                    continue
                raise
            return self
        raise AssertionError("unreachable")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    def stop(self, timeout: float = 300.0) -> None:
        """A clean shutdown; killed when it takes longer than ``timeout`` seconds."""
        self._end(signal.SIGTERM, timeout)

    def kill(self) -> None:
        """SIGKILL, as when the machine's memory runs out."""
        self._end(signal.SIGKILL, 60.0)

    def restart(self, **options: str | int | None) -> None:
        """Stop cleanly and start again with these options changed."""
        self.stop()
        self.options.update(options)
        self.start()

    def restart_logging(self, *, binlog: bool) -> None:
        """Stop cleanly and start again with a binary log or without one."""
        self.stop()
        self._binlog = binlog
        self.start()

    def remove(self) -> None:
        """Kill the server and remove its folder (and its datadir, wherever that is)."""
        self.kill()
        discard(self.datadir)
        discard(self.base)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # --- talking to it

    def connect(
        self, *, user: str = "root", password: str = "", database: str | None = None, autocommit: bool = True
    ) -> Connection[Any]:
        """A new connection through the socket; the caller closes it."""
        return connect(self.socket, user=user, password=password, database=database, autocommit=autocommit)

    def query(self, sql: str, args: Sequence[Any] = ()) -> list[Row]:
        """Rows of ``sql`` asked as root on a connection that is kept."""
        if self._root is None:
            self._root = self.connect()
        return query(self._root, sql, args)

    def scalar(self, sql: str, args: Sequence[Any] = ()) -> Any:
        value = self.query(sql, args)[0][0]
        return Total(value) if isinstance(value, int) and reads_rows(sql) else value

    def execute(self, *statements: str) -> None:
        """Run statements one after the other as root, each committed."""
        for statement in statements:
            self.query(statement)

    def create_user(self, user: str, password: str, privileges: Sequence[str]) -> None:
        """``user``@localhost with exactly these privileges on *.*"""
        raise NotImplementedError

    def create_backup_users(self) -> None:
        """``backup`` (exactly what the physical tool needs) and ``backupd`` (what the service needs)."""
        raise NotImplementedError

    def settle(self, timeout: float = 300.0) -> None:
        """Wait until purge is done and every dirty page is in its file, so that idle files stop changing."""
        raise NotImplementedError

    def client_file(self, user: str = "root", password: str = "") -> Path:
        """A 0600 option file with a ``[client]`` group for ``user``, inside the server's folder."""
        path = self.base / f"client-{user}.cnf"
        path.touch(0o600)
        path.write_text(
            f"[client]\nuser={option_text(user)}\npassword={option_text(password)}\n"
            f"socket={option_text(str(self.socket))}\n"
        )
        return path

    def log_text(self) -> str:
        return self.error_log.read_text(errors="replace") if self.error_log.exists() else ""

    # --- what a flavour is

    def another(self, **options: Any) -> Self:
        """A new server of the same release that is not started yet."""
        return type(self)(**options)

    def program(self) -> str:
        """Path of the server program."""
        raise NotImplementedError

    def arguments(self) -> Sequence[str]:
        """Words on its command line besides its option file."""
        return ()

    def make_datadir(self) -> None:
        """Fill ``datadir`` with an empty system that fits ``options``."""
        raise NotImplementedError

    def flavour_settings(self, *, binlog: bool) -> dict[str, str | int | None]:
        """Options that this flavour needs or calls by another name."""
        raise NotImplementedError

    # --- how

    def _write_options(self) -> None:
        settings: dict[str, str | int | None] = {
            "datadir": str(self.datadir),
            "socket": str(self.socket),
            "pid_file": str(self.base / "pid"),
            "log_error": str(self.error_log),
            "tmpdir": str(self.base),
            "server_id": self.server_id,
            "character_set_server": "utf8mb4",
            "skip_name_resolve": None,
            "innodb_buffer_pool_size": "128M",
            "innodb_buffer_pool_dump_at_shutdown": 0,
            "innodb_buffer_pool_load_at_startup": 0,
            "max_connections": 60,
            "table_open_cache": 400,
        }
        if self._tcp:
            self.port = free_port()
            settings |= {"bind_address": "127.0.0.1", "port": self.port}
        else:
            settings |= {"skip_networking": None}
        settings |= self.flavour_settings(binlog=self._binlog)
        settings |= self.options
        write_mysqld_group(self.option_path, settings)
        if not self.error_log.exists():
            self.error_log.touch()
            give_to_database(self.error_log)

    def _launch(self, timeout: float) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        argv = [*drop_root(), self.program(), f"--defaults-file={self.option_path}", *self.arguments()]
        already = len(self.log_text())
        self._process = _starter.submit(_spawn, argv, self.error_log).result()
        deadline = time.monotonic() + timeout
        while True:
            try:
                # PyMySQL leaks its socket when nobody listens, so knock first.
                with socket.socket(socket.AF_UNIX) as knock:
                    knock.connect(str(self.socket))
                self.connect().close()
            except (OSError, pymysql.err.Error):
                if self._process.poll() is not None:
                    code, self._process = self._process.returncode, None
                    raise ServerDiedError(
                        f"{Path(self.program()).name} ended with {code}:\n{self.log_text()[already:][-4000:]}"
                    ) from None
                if time.monotonic() > deadline:
                    self.kill()
                    raise ServerDiedError(
                        f"no answer after {timeout} s:\n{self.log_text()[already:][-4000:]}"
                    ) from None
                time.sleep(0.02)
            else:
                return

    def _end(self, how: signal.Signals, timeout: float) -> None:
        if self._root is not None:
            with contextlib.suppress(pymysql.err.Error):
                self._root.close()
            self._root = None
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _spawn(argv: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as sink:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)


def drop_root() -> list[str]:
    """Words before a program of a server that is not to run as root, and ends with us."""
    if not runs_as_root():
        return ["setpriv", "--pdeathsig", "KILL", "--"]
    return [
        "setpriv",
        "--reuid",
        DATABASE_USER,
        "--regid",
        DATABASE_USER,
        "--init-groups",
        "--pdeathsig",
        "KILL",
        "--",
    ]


def free_port() -> int:
    """One of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

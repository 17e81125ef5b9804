"""Talking SQL to a server: where it is and who asks (``Connection``), an open conversation (``Session``), and the
option files of the client programs of both families, ``mariadb`` and ``mysql`` with their kin.
"""

from __future__ import annotations

import codecs
import functools
import socket
import stat
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pymysql
from pymysql.cursors import Cursor, DictCursor

from backupd.engine.sql import answers
from backupd.engine.sql.answers import Answering, Row
from backupd.engine.sql.option_files import (
    CLIENT_GROUPS,
    Tls,
    arguments,
    demanded,
    from_options,
    opportunistic,
    read_option_file,
    settled,
    unreadable,
    verifies,
)
from backupd.engine.sql.option_files import hint as tls_hint
from backupd.model.errors import ConfigurationError, Problem, ServerError
from backupd.process.command import Command
from backupd.process.pipeline import run

DEFAULT_SOCKET = "/run/mysqld/mysqld.sock"
DEFAULT_PORT = 3306

_EXACT = "backupd-utf8"
"""The codec of every session, see ``Session``."""

ACCESS_DENIED = frozenset({1044, 1045, 1142, 1143, 1227, 1370, 1698})
"""Error numbers that mean: this account may not."""

_NO_SOCKET = 2002

_HINTS: Mapping[int, str] = {
    1040: "the server has no free connection slot: raise max_connections or close idle clients",
    1044: "grant the account the missing privileges; `backupd check` lists them",
    1045: "wrong user or password: check defaults_file, user and password_file of this server",
    1129: "the server blocked this host after too many failures: run FLUSH HOSTS there",
    1130: "the server does not accept this account from this host",
    1142: "grant the account the missing privileges; `backupd check` lists them",
    1205: "another session holds the lock: SHOW PROCESSLIST lists it",
    1227: "grant the account the missing privileges; `backupd check` lists them",
    1698: "the account logs in as an operating system user only: run as that user, or give it a password",
    2002: "check that the server is running and that the socket path is right",
    2003: "check that the server is running and that host and port are right",
    2005: "the host name cannot be resolved",
    2006: "the server closed the connection: check its error log",
    2013: "the server closed the connection: check its error log",
}


@dataclass(frozen=True, slots=True)
class Connection:
    """Where a server is and as whom to ask. ``socket`` wins over ``host``; ``connect_timeout`` in seconds.
    ``answer_timeout``: how long one answer may take, None for ever.

    ``ssl`` holds the clients' own option names without their prefix: ``ca``, ``cert``, ``key``, ``capath``,
    ``cipher``, ``verify-server-cert`` (any value). ``tls``: what the configuration asks for, which ``ssl`` agrees
    with; None: ``ssl`` alone. ``tls_said``: the setting that asks for ``tls``, where it is the option file's. Passwords
    never appear in ``repr``.
    """

    socket: str = ""
    host: str = ""
    port: int = DEFAULT_PORT
    user: str = ""
    password: str = field(default="", repr=False)
    ssl: Mapping[str, str] = field(default_factory=dict)
    tls: Tls | None = None
    tls_said: str = ""
    connect_timeout: float = 10.0
    answer_timeout: float | None = None

    @classmethod
    def from_config(
        cls,
        *,
        socket: str | Path | None = None,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        password_file: Path | None = None,
        defaults_file: Path | None = None,
        tls: Tls | None = None,
        tls_ca: Path | None = None,
    ) -> Self:
        """Join what the configuration says with its option file; what is said directly wins.

        As with the clients, no host, or ``localhost`` without ``port``, means the socket. A relative socket
        is made absolute: the physical tools change their folder. Raises ConfigurationError with every
        problem.
        """
        problems: list[Problem] = []
        hints: list[str] = []
        options = None
        if defaults_file is not None:
            options = read_option_file(defaults_file, CLIENT_GROUPS)
            problems += options.problems
            hints += options.hints

        def from_file(*names: str) -> str:
            return options.value(*names) if options else ""

        password = from_file("password")
        if password_file is not None:
            try:
                password = _first_line(password_file)
                if password_file.stat().st_mode & stat.S_IROTH:
                    open_to_all = "every user of this host can read the password in it"
                    problems.append(Problem(str(password_file), None, "", open_to_all))
                    hints.append(f"chmod 600 {password_file}, and change the password")
            except OSError as error:
                words, hint = unreadable(password_file, error)
                problems.append(Problem(str(password_file), None, "", words))
                hints.append(hint)
            except ValueError as error:
                problems.append(Problem(str(password_file), None, "", f"it contains no password: {error}"))
        host = host or ("" if socket else from_file("host"))
        port_given = port if port is not None else _port(from_file("port"), defaults_file, problems)
        path = str(socket or "") or ("" if host not in ("", "localhost") else from_file("socket"))
        if host in ("", "localhost") and not path and (port is None or not host):
            path = DEFAULT_SOCKET
        said = ""
        if tls is None and options is not None:
            try:
                tls, said = demanded(options)
            except ValueError as error:
                problems.append(Problem(str(defaults_file), None, "ssl-mode", str(error)))
        if problems:
            raise ConfigurationError(problems, hint="; ".join(dict.fromkeys(filter(None, hints))))
        return cls(
            socket=str(Path(path).absolute()) if path else "",
            host="" if path else host,
            port=port_given or DEFAULT_PORT,
            user=user or from_file("user"),
            password=password,
            ssl={} if path else settled(tls, from_options(options.options if options else ()), str(tls_ca or "")),
            tls=None if path else tls,
            tls_said="" if path else said,
        )

    @property
    def address(self) -> str:
        """For people: ``/run/mysqld/mysqld.sock`` or ``db1:3306``."""
        return self.socket or f"{self.host}:{self.port}"

    def option_groups(self) -> dict[str, dict[str, str | None]]:
        """What an external program must find in its option file to reach the same server as the same account.

        One ``[client]`` group, which every client program and both physical tools read, with the password.
        """
        client: dict[str, str | None] = {}
        if self.user:
            client["user"] = self.user
        if self.password:
            client["password"] = self.password
        if self.socket:
            client["socket"] = self.socket
        else:
            client |= {"host": self.host, "port": str(self.port)}
            if self.host == "localhost":
                client["protocol"] = "tcp"  # a client takes this one name for "the socket"
        client |= {f"ssl-{name}": value or None for name, value in self.ssl.items()}
        if self.tls is Tls.OFF:
            client["ssl"] = "0"
        elif self.tls is not None:
            client["ssl"] = "1"
            client.setdefault("ssl-verify-server-cert", "0")  # newer ones look at the name by default
        return {"client": client}

    def connect(self) -> Session:
        """Open a session. Raises ServerError."""
        return Session(self)


class Session:
    """One open connection, autocommit on, texts in utf8mb4. A context manager; for one thread at a time.

    Servers send texts that are not UTF-8: statements cut in the middle of a character, bytes of other character sets
    under a wrong name. Answers keep such bytes exactly, as lone surrogates (``surrogateescape``), and a statement sends
    them back as they were: a text that is data stays what it is. What is only for people is asked for with ``shown``.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        where: dict[str, Any] = (
            {"unix_socket": connection.socket, "ssl_disabled": True}
            if connection.socket
            else {"host": connection.host, "port": connection.port, **_encryption(connection)}
        )
        raw: Any = Answering(
            user=connection.user or None,
            # bytes, because PyMySQL would encode text as Latin-1 and fail on every other letter of a password
            password=connection.password.encode(),
            charset="utf8mb4",
            autocommit=True,
            # Limits that a server has for its applications would cut the list of tables short, and every other answer,
            # refuse to look (max_join_size), or end it. Primary keys that the server made (from 8.0.30 on) are columns
            # like others: rows are not the same without.
            init_command="SET SESSION sql_select_limit = 18446744073709551615, sql_big_selects = 1 "
            "/*!80030 , show_gipk_in_create_table_and_information_schema = 1 */ "
            "/*!50708 , max_execution_time = 0 */ /*M!100101 , max_statement_time = 0 */",
            connect_timeout=max(1, round(connection.connect_timeout)),
            read_timeout=connection.answer_timeout,
            write_timeout=connection.answer_timeout,
            defer_connect=True,
            **where,
        )
        if not connection.ssl and connection.tls is None:
            # As it does itself, but for reading the system's certificates, to verify nothing with: 30 ms each time.
            raw.ssl, raw.ctx = True, opportunistic()
        try:
            if connection.socket:
                # Opened here, because PyMySQL loses the descriptor of a socket on which nobody listens.
                opened = _open_socket(connection.socket, connection.connect_timeout)
                raw._secure = True  # noqa: SLF001 - as it does itself: passwords may go over this one in clear
                raw.connect(opened)
            else:
                raw.connect()
        except (pymysql.err.Error, OSError, UnicodeError) as error:
            raise _server_error(
                f"cannot connect to the server at {connection.address}",
                error,
                hint=tls_hint(error, connection.tls, connection.tls_said),
            ) from error
        raw.encoding = _EXACT
        self._raw = raw

    @property
    def thread_id(self) -> int:
        """The connection id that the other end gave in its greeting."""
        return int(self._raw.thread_id())

    @property
    def greeting(self) -> str:
        """The version that the other end gave in its greeting."""
        return str(self._raw.get_server_info())

    @property
    def peer_pid(self) -> int:
        """Process id at the other end of the socket; 0 over TCP or when it lives in another pid namespace."""
        found: tuple[int, int] | None = self._raw.peer()
        return found[0] if found is not None else 0

    @property
    def server_uid(self) -> int | None:
        """Whose process is at the other end, by the kernel's word; None where it is not on this host's network."""
        found: int | None = self._raw.server_uid()
        return found

    def query(self, sql: str, *args: Any, shown: bool = False) -> list[tuple[Any, ...]]:
        """All rows. ``shown``: bytes that are no UTF-8 are replaced (U+FFFD), for people. Raises ServerError."""
        rows = self._run(Cursor, sql, args)
        return [tuple(map(readable, row)) for row in rows] if shown else list(rows)

    def permitted(self, sql: str, *args: Any, also: Collection[int] = ()) -> list[tuple[Any, ...]] | None:
        """All rows, or None where the account may not ask; so it is with the error numbers ``also``. Raises
        ServerError."""
        try:
            return self.query(sql, *args)
        except ServerError as error:
            if not is_denied(error) and error_code(error) not in also:
                raise
            return None

    def records(self, sql: str, *args: Any, shown: bool = False) -> list[dict[str, Any]]:
        """All rows with their column names. ``shown``: as with ``query``. Raises ServerError."""
        rows = self._run(DictCursor, sql, args)
        return [{name: readable(value) for name, value in row.items()} for row in rows] if shown else list(rows)

    def variables(self, *names: str) -> dict[str, str]:
        """Those of the server's global variables ``names`` that it has, by name in lower case. Raises ServerError."""
        rows = self.query("SHOW GLOBAL VARIABLES WHERE Variable_name IN %s", names)
        return {str(name).lower(): str(value) for name, value in rows}

    def scalar(self, sql: str, *args: Any) -> Any:
        """The first column of the first row, or None without a row. Raises ServerError."""
        rows = self.query(sql, *args)
        return rows[0][0] if rows else None

    def execute(self, sql: str, *args: Any) -> None:
        """Run a statement whose rows nobody wants. Raises ServerError."""
        self._run(Cursor, sql, args)

    def send(self, statement: bytes | memoryview) -> tuple[int, int]:
        """Run a statement that nobody copies or quotes, however large: rows it changed, warnings it left. Raises
        ServerError."""
        try:
            rows = int(self._raw.query(statement))
            return rows, int(self._raw._result.warning_count)  # noqa: SLF001 - PyMySQL has no other way to it
        except (pymysql.err.Error, OSError, UnicodeError) as error:
            raise self._refused(error) from error

    def packets(self, sql: str) -> Generator[Row, None, None]:
        """Each row of ``sql`` as the server sends it, undecoded, while it still reads (see ``answers.values``). Left
        before the end, the session is closed. Raises ServerError."""
        try:
            yield from answers.packets(self._raw, sql)
        except (pymysql.err.Error, OSError, UnicodeError) as error:
            raise self._refused(error, sql) from error

    def begin_dump(self, command: int, arguments: bytes) -> socket.socket:
        """Send a command of the replication protocol, after which this connection carries nothing but its answer: give
        its socket, to be read by others. Raises ServerError."""
        try:
            return answers.begin_dump(self._raw, command, arguments)
        except (pymysql.err.Error, OSError, UnicodeError) as error:
            raise self._refused(error) from error

    def break_off(self) -> None:
        """From any thread: end the conversation now; whoever waits for an answer gets ServerError."""
        answers.break_off(self._raw)

    def ping(self) -> None:
        """Is the server still there? Raises ServerError; never reconnects."""
        try:
            self._raw.ping(reconnect=False)
        except (pymysql.err.Error, OSError, UnicodeError) as error:
            raise _server_error(f"lost the server at {self.connection.address}", error) from error

    def close(self) -> None:
        """End the connection; harmless when it has ended."""
        if self._raw.open:
            self._raw.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _run(self, cursor_class: type[Any], sql: str, args: Sequence[Any]) -> Sequence[Any]:
        try:
            with self._raw.cursor(cursor_class) as cursor:
                # None keeps a literal % of statements without arguments from being read as a placeholder.
                cursor.execute(sql, tuple(args) or None)
                rows: Sequence[Any] = cursor.fetchall()
                return rows
        except (pymysql.err.Error, OSError, UnicodeError) as error:
            raise self._refused(error, sql) from error

    def _refused(self, error: pymysql.err.Error | OSError | UnicodeError, sql: str = "") -> ServerError:
        if isinstance(error, UnicodeDecodeError):
            # A name of a column, a number: no server sends these otherwise. The rest of the answer is still on its way.
            self.close()
            return _server_error(
                f"the server at {self.connection.address} sent an answer that cannot be read", error, statement=sql
            )
        return _server_error(f"the server at {self.connection.address} refused a statement", error, statement=sql)


def readable(value: Any) -> Any:
    """``value`` for people: a text without the bytes that are no UTF-8; anything else as it is."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if isinstance(value, str) else value


def error_code(error: ServerError) -> int:
    """The server's (or client library's) error number behind ``error``; 0 when there is none."""
    cause = error.__cause__
    if isinstance(cause, pymysql.err.Error) and cause.args and isinstance(cause.args[0], int):
        return cause.args[0]
    return 0


def is_denied(error: ServerError) -> bool:
    """Did the account lack a privilege?"""
    return error_code(error) in ACCESS_DENIED


def _server_error(
    message: str, error: pymysql.err.Error | OSError | UnicodeError, *, statement: str = "", hint: str = ""
) -> ServerError:
    arguments = error.args
    code = arguments[0] if arguments and isinstance(arguments[0], int) else 0
    if isinstance(error, OSError):
        code = _NO_SOCKET
    text = str(arguments[1]) if len(arguments) > 1 and not isinstance(error, UnicodeError) else str(error)
    detail = f"{text} (error {code})" if code else text
    if statement:
        detail += f" at: {readable(' '.join(statement.split())[:200])}"
    return ServerError(message, detail=detail, hint=hint or _HINTS.get(code, ""))


def _encryption(connection: Connection) -> dict[str, Any]:
    try:
        return arguments(connection.tls, connection.ssl)
    except OSError as error:
        raise ServerError(
            f"the connection to {connection.address} cannot be encrypted as the configuration says",
            detail=str(error),
            hint="check `tls_ca` of this server, and ssl-ca, ssl-cert and ssl-key of its option file: they must be "
            "readable, in PEM",
        ) from error


def _exact(name: str) -> codecs.CodecInfo | None:
    if name.replace("_", "-") != _EXACT:
        return None
    return codecs.CodecInfo(
        name=_EXACT,
        encode=lambda text, _errors="": codecs.utf_8_encode(text, "surrogateescape"),
        decode=lambda data, _errors="": codecs.utf_8_decode(data, "surrogateescape", True),
    )


codecs.register(_exact)


def _open_socket(path: str, timeout: float) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.settimeout(timeout)
        opened.connect(path)
        opened.settimeout(None)
    except BaseException:
        opened.close()
        raise
    return opened


def _first_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0]:
        raise ValueError("its first line is empty")
    return lines[0]


def _port(text: str, file: Path | None, problems: list[Problem]) -> int:
    if not text:
        return 0
    if text.isdecimal() and 0 < int(text) < 65536:
        return int(text)
    problems.append(Problem(str(file), None, "port", f"{text!r} is not a port number"))
    return 0


_MODES = {Tls.VERIFY_FULL: "VERIFY_IDENTITY", Tls.VERIFY_CA: "VERIFY_CA", Tls.REQUIRED: "REQUIRED", Tls.OFF: "DISABLED"}


def ssl_mode(connection: Connection) -> str:
    """What MySQL's programs call ``--ssl-mode``; "" where nothing was said."""
    if connection.tls is not None:
        return _MODES[connection.tls]
    if verifies(connection.ssl):
        return "VERIFY_IDENTITY"
    return "REQUIRED" if connection.ssl else ""


@functools.lru_cache(maxsize=8)
def help_of(path: str, _digest: str) -> str:
    """What the program says to ``--help``. Raises ToolError."""
    return run(Command((path, "--no-defaults", "--help")), timeout=30).stdout.decode("utf-8", "replace")

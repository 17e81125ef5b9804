"""Starting database servers that are ours: fresh ones, and copies of somebody's server.

A copy of a server remembers who it was. Started as it is, a copy of a replica connects to its source with the password
it finds in its own tables, events begin to run, tablespaces elsewhere are opened. A server started here is **deaf and
mute**: it reads one generated option file and no other, listens on a socket in its private folder and nowhere else,
starts no replication, no events, no init files, writes no binary log, has an id of its own; and where the host can do
it (see sandbox) it has no network, sees its own folders only, and cannot outlive us.

The time zone in which a source ran is needed where its logs are replayed (``zone_of``). What NOW() gives depends on it,
and a DDL that fills a column with NOW() is logged without its zone. A server reports its system zone by an abbreviation
only, the one of the season in which it was started. So the zone is searched: whatever fits the abbreviation will do as
long as all that fits has the same offsets in the time that is replayed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import threading
import time
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

from backupd.engine.server.backup_files import KEY_OPTIONS, handed, known_options
from backupd.engine.server.sandbox import DATABASE_USER, confine, is_available, owner_of, server_options
from backupd.engine.sql.client import Connection
from backupd.model.errors import CancelledError, ToolError
from backupd.process import folders
from backupd.process.command import Child, Command, family, spawn, stop
from backupd.process.folders import open_plain, open_to_append, write_anew
from backupd.process.output import redact
from backupd.process.pipeline import Completed, run
from backupd.process.runtime import render_options

_SYSTEM = "SYSTEM"
_UTC = frozenset({"UTC", "UCT"})
_MOST_MOMENTS = 2000
_NAMED = 6


@dataclass(frozen=True, slots=True)
class Zone:
    """``name``: for the environment (TZ) of the copy's server, "" for this host's own. ``doubt``: why times may be
    wrong, or ""."""

    name: str = ""
    doubt: str = ""


HERE = Zone()


def zone_of(variables: Mapping[str, str], since: datetime, until: datetime) -> Zone:
    """The system zone of the server whose ``variables`` (ServerInfo) these are, good from ``since`` to ``until``."""
    said = variables.get("system_time_zone", "")
    if said in _UTC:
        return Zone("UTC")
    if not said:
        return Zone("UTC", _doubt(variables, "the backup does not record the source's system time zone"))
    if said in _names(None, until):
        return HERE
    fitting: dict[tuple[timedelta, ...], list[str]] = {}
    moments = list(_moments(since, until))
    for name in sorted(zoneinfo.available_timezones()):
        zone = _zone(name)
        if zone is not None and said in _names(zone, until):
            fitting.setdefault(tuple(_offset(at, zone) for at in moments), []).append(name)
    if len(fitting) == 1:
        return Zone(next(iter(fitting.values()))[0])
    if not fitting:
        why = f"the source's system time zone is {said!r}, and this host has no zone of that name"
    else:
        some = [names[0] for names in fitting.values()]
        why = (
            f"the source's system time zone is {said!r}, which may be {', '.join(some[:_NAMED])}"
            f"{' or another' if len(some) > _NAMED else ''}"
        )
    return Zone("UTC", _doubt(variables, why))


def global_zone(variables: Mapping[str, str]) -> str:
    """What the source's sessions began with when that was not its system zone, else ""."""
    said = variables.get("time_zone", _SYSTEM)
    return "" if said.upper() == _SYSTEM else said


def _doubt(variables: Mapping[str, str], why: str) -> str:
    if global_zone(variables):
        return ""  # only a session that turned back to the system's zone would notice
    return (
        f"{why}: replayed in UTC, so the values of NOW() and the like in statements of the logs (an ALTER TABLE with "
        "DEFAULT NOW(), data changes in STATEMENT format) may be shifted; restore with TZ=<zone of the source> in "
        "backupd's environment to be certain"
    )


def _names(zone: tzinfo | None, until: datetime) -> set[str | None]:
    """What a zone, or this host's own, is called in winter and in summer."""
    return {datetime(until.year, month, 15, 12, tzinfo=UTC).astimezone(zone).tzname() for month in (1, 7)}


def _zone(name: str) -> tzinfo | None:
    """None for one that a server on this host could not read."""
    if not any((Path(folder) / name).is_file() for folder in zoneinfo.TZPATH):
        return None
    return zoneinfo.ZoneInfo(name)


def _offset(at: datetime, zone: tzinfo) -> timedelta:
    return at.astimezone(zone).utcoffset() or timedelta(0)


def _moments(since: datetime, until: datetime) -> Iterator[datetime]:
    """Every hour, or less often over a long time; both ends."""
    step = max(timedelta(hours=1), (until - since) / _MOST_MOMENTS)
    at = since
    while at < until:
        yield at
        at += step
    yield until


SOCKET_LIMIT = 107
"""Bytes of the longest socket path (unix(7), less the final NUL)."""
START_SECONDS = 600.0
STOP_SECONDS = 300.0
OWN_ACCOUNT = "backupd_private"
_LOCKED = "Unable to lock ./ibdata1"
"""What a server says of the system tablespace where another one has it open."""
DROP_OWN_ACCOUNT = f"DROP USER IF EXISTS {OWN_ACCOUNT}@localhost"

_LOG_LINES = 25
_LOST_AND_FOUND = "lost+found"
_MIB = 1024 * 1024

Options = Mapping[str, str | None]

FROM_BACKUP = ("innodb-page-size", "innodb-data-file-path", "innodb-undo-tablespaces", "innodb-checksum-algorithm")
"""Of backup-my.cnf: without these InnoDB does not find or read its files."""
_FROM_SERVER = """
lower_case_table_names sql_mode character_set_server collation_server max_allowed_packet
explicit_defaults_for_timestamp default_storage_engine innodb_default_row_format innodb_strict_mode
innodb_file_per_table innodb_ft_min_token_size innodb_ft_max_token_size ft_min_word_len ft_max_word_len
aria_block_size innodb_encrypt_log innodb_encrypt_tables aria_encrypt_tables innodb_compression_algorithm old_mode
thread_stack
"""
"""Of the source's variables: what the copy needs to read the data as the source did. Never its filters, audit, wsrep,
replication, log or network settings."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server to start.

    ``datadir``: its data, owned by ``user``. ``directory``: a private folder for socket, log and temporary files; made
    if needed, and the server's property. Nothing else is writable for it but ``writable`` (remapped tablespaces);
    ``options``: more lines for the option file (``options_for_copy``), but for what the rule above forbids; of key
    files that they name and ``key_files`` has it gets copies. ``skip_grants``: accept everybody who reaches the socket,
    needed for copies whose passwords are unknown; plugins of mysql.plugin are not loaded then. ``memory``: buffer pool
    in bytes. ``user``: OS user when we are root.

    ``own_account``: ask as an account of ours that exists from the start of the server to its clean stop, instead of
    as root; with ``skip_grants`` off everything works that has to do with accounts and events. ``server_id`` 0: any.
    ``zone``: its system time zone. ``cluster``: options that make it the only node of a Galera cluster of its own; none
    for a server without one, as all others are.
    """

    program: str
    datadir: Path
    directory: Path
    options: Options = field(default_factory=dict)
    skip_grants: bool = True
    memory: int = 128 * _MIB
    user: str = DATABASE_USER
    writable: Sequence[Path] = ()
    key_files: Sequence[Path] = ()
    own_account: bool = False
    server_id: int = 0
    zone: Zone = HERE
    cluster: Options = field(default_factory=dict)

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.directory / "s.sock"

    @property
    def error_log(self) -> Path:
        """Its log, which is also its stderr."""
        return self.directory / "error.log"

    @property
    def init_file(self) -> Path:
        """What it executes at its start; removed once it answers."""
        return self.directory / "init.sql"


def options_for_copy(base: Path, variables: Options) -> dict[str, str | None]:
    """What a copy of a server needs to read its files: from backup-my.cnf in ``base`` (when it is there) and from the
    source's ``variables`` (ServerInfo.variables). Includes the key plugin and the names of its files (``handed``)."""
    options: dict[str, str | None] = {}
    for name, value in known_options(base).items():
        if name == "plugin-load":
            options["plugin_load_add"] = value
        elif name in FROM_BACKUP or name.startswith(KEY_OPTIONS):
            options[name.replace("-", "_")] = value
    for name in _FROM_SERVER.split():
        if name in variables and name not in options:
            # "loose": an old copy may know a variable that a newer server of the series has dropped.
            options[name if name == "lower_case_table_names" else f"loose_{name}"] = variables[name]
    return options


def option_text(config: ServerConfig) -> str:
    """The option file of ``config``: the given options first, then the rule, so that the rule wins."""
    rule: dict[str, str | None] = {
        "datadir": str(config.datadir),
        "socket": str(config.socket),
        "pid_file": str(config.directory / "pid"),
        "log_error": str(config.error_log),
        "tmpdir": str(config.directory / "tmp"),
        "secure_file_priv": str(config.directory / "tmp"),
        "skip_name_resolve": None,
        "port": "0",
        "server_id": str(config.server_id or secrets.randbelow(2**31) + 2**30),
        # Each server knows one of the two words, and the older word too as long as it is not removed.
        "loose_skip_slave_start": None,
        "loose_skip_replica_start": None,
        "event_scheduler": "OFF",
        "general_log": "OFF",
        "slow_query_log": "OFF",
        "loose_feedback": "OFF",
        "loose_wsrep_on": "OFF",
        "loose_group_replication_start_on_boot": "OFF",
        "loose_mysqlx": "OFF",
        # MySQL would make keys and put them into the datadir.
        "loose_auto_generate_certs": "OFF",
        "loose_sha256_password_auto_generate_rsa_keys": "OFF",
        "loose_caching_sha2_password_auto_generate_rsa_keys": "OFF",
        "local_infile": "OFF",
        "innodb_data_home_dir": "",
        "innodb_undo_directory": "./",
        "innodb_log_group_home_dir": "./",
        "innodb_buffer_pool_size": str(config.memory),
        "innodb_buffer_pool_load_at_startup": "OFF",
        "innodb_buffer_pool_dump_at_shutdown": "OFF",
        "max_connections": "50",
    }
    if not config.datadir.is_dir() or (config.datadir / _LOST_AND_FOUND).is_dir():
        rule["loose_ignore_db_dirs"] = _LOST_AND_FOUND  # MySQL does not know it, and writes so into its log
    rule |= {"skip_networking": None, "skip_log_bin": None}
    if config.cluster:
        del rule["loose_wsrep_on"]
        rule |= config.cluster
    if config.skip_grants:
        rule["skip_grant_tables"] = None
    if config.own_account:
        rule["init_file"] = str(config.init_file)
    same = {_bare(name) for name in rule}
    given = {name: value for name, value in config.options.items() if _bare(name) not in same}
    usual = {**server_options(config.program), "loose_performance_schema": "OFF"}
    return render_options({"mysqld": {**usual, **given, **rule}})


def _bare(name: str) -> str:
    return name.replace("-", "_").removeprefix("loose_")


def own_password() -> str:
    """Long enough, and of all kinds of characters, for every plugin that judges passwords."""
    return f"{secrets.token_hex(16)}-Aa1"


def own_account_file(password: str) -> bytes:
    """What a server executes at its start that is asked as an account of ours."""
    statements = (
        DROP_OWN_ACCOUNT,
        f"CREATE USER {OWN_ACCOUNT}@localhost IDENTIFIED BY '{password}'",
        f"GRANT ALL PRIVILEGES ON *.* TO {OWN_ACCOUNT}@localhost WITH GRANT OPTION",
    )
    return "".join(f"{line};\n" for line in statements).encode()


class LaunchedServer:
    """A running server; a context manager that starts it, waits until it answers, and leaves nothing behind.

    Raises ToolError with the last lines of its log when it does not come up, CancelledError when ``cancel`` is set
    before that. ``sandboxed``: could it be confined?
    """

    def __init__(
        self, config: ServerConfig, *, start_seconds: float = START_SECONDS, cancel: threading.Event | None = None
    ) -> None:
        if len(os.fsencode(config.socket)) > SOCKET_LIMIT:
            raise ToolError(
                f"the socket path {config.socket} is longer than {SOCKET_LIMIT} bytes",
                hint="choose a shorter path for the scratch folder",
            )
        self.config = config
        self.sandboxed = is_available(config.user if os.geteuid() == 0 else None)
        self._start_seconds = start_seconds
        self._cancel = cancel
        self._child: Child | None = None
        self._password = own_password() if config.own_account else ""

    @property
    def connection(self) -> Connection:
        """Through the private socket, as root or as the account of ours."""
        user = OWN_ACCOUNT if self.config.own_account else "root"
        return Connection(socket=str(self.config.socket), user=user, password=self._password)

    @property
    def pid(self) -> int | None:
        """Process id of the server itself, None when it is not running."""
        if self._child is None or self._child.poll() is not None:
            return None
        return _server_pid(self._child.pid, Path(self.config.program).name)

    @property
    def running(self) -> bool:
        """Has the process, or its sandbox, not ended yet?"""
        return self._child is not None and self._child.poll() is None

    def has_ended(self, seconds: float) -> bool:
        """Has it ended, now or within ``seconds``? Its clients hear of that first."""
        return self._child is None or self._child.wait(seconds) is not None

    def log_tail(self, lines: int = _LOG_LINES) -> str:
        """The last lines of the server's error log, redacted."""
        return log_tail(self.config.error_log, lines)

    def start(self) -> Self:
        """Start and wait until it answers. Raises RefusedError, too: see ``backup_files.handed``."""
        config = self.config
        _prepare_directory(config)
        with handed(config.options, config.key_files, config.directory, _owner(config.user)) as options:
            self._start(replace(config, options=options))
        return self

    def once(self, *words: str, seconds: float = START_SECONDS) -> Completed:
        """Run the program with ``words`` with which it ends by itself. Raises ToolError when it does not within
        ``seconds``, CancelledError, and RefusedError as ``start`` does."""
        config = self.config
        _prepare_directory(config)
        with handed(config.options, config.key_files, config.directory, _owner(config.user)) as options:
            command = self._command(replace(config, options=options), *words)
            return run(command, check=False, timeout=seconds, cancel=self._cancel)

    def _command(self, config: ServerConfig, *words: str) -> Command:
        write_anew(config.directory / "my.cnf", option_text(config).encode(), owner=_owner(config.user))
        plain = Command(
            (config.program, f"--defaults-file={config.directory / 'my.cnf'}", *words),
            env={"TZ": config.zone.name} if config.zone.name else {},
            cwd=config.datadir,
            user=config.user if os.geteuid() == 0 else None,
        )
        writable = [config.datadir, config.directory, *config.writable]
        return confine(plain, writable=writable) if self.sandboxed else plain

    def _start(self, config: ServerConfig) -> None:
        command = self._command(config)
        if config.own_account:
            write_anew(
                config.init_file,
                own_account_file(self._password),
                owner=_owner(config.user),
            )
        log = open_to_append(config.error_log, owner=_owner(config.user))
        try:
            with Path(os.devnull).open("rb") as nothing:
                self._child = spawn(command, stdin=nothing.fileno(), stdout=log, stderr=log)
        finally:
            os.close(log)
        try:
            self._await_greeting()
        except BaseException:
            self.kill()
            raise
        finally:
            config.init_file.unlink(missing_ok=True)

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """A clean shutdown, so that the files are those of a server that was stopped. Raises ToolError when it did
        not end cleanly within ``seconds``; it is gone then, too."""
        child, pid = self._child, self.pid
        if child is None or pid is None:
            self.kill()
            return
        if self.config.own_account:
            with self.connection.connect() as session:
                session.execute(DROP_OWN_ACCOUNT)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        code = child.wait(seconds)
        self.kill()
        if code != 0:
            what = f"did not end within {seconds:g} s" if code is None else f"ended with {code}"
            raise ToolError(f"{self._name} {what} when it was asked to stop", detail=self.log_tail())

    def kill(self) -> None:
        """End it at once, whatever it does; when this returns, nobody writes into its folders any more."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.ExitStack() as stack:
            ends = [end for pid in family(child.pid) if (end := _open_process(pid)) is not None]
            for end in ends:
                stack.callback(os.close, end)
            stop([child], polite_seconds=0.0)
            # The sandbox's processes die with it, but not before it.
            for end in ends:
                poll = select.poll()
                poll.register(end, select.POLLIN)
                poll.poll(STOP_SECONDS * 1000)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    @property
    def _name(self) -> str:
        return Path(self.config.program).name

    def _await_greeting(self) -> None:
        child = self._child
        deadline = time.monotonic() + self._start_seconds
        pause = 0.01
        while not _greets(self.config.socket):
            code = child.poll() if child is not None else None
            if code is not None:
                raise not_started(
                    self.config,
                    f"{self._name} did not start on {self.config.datadir}: it ended with {code}",
                    "see its error log above",
                )
            if self._cancel is not None and self._cancel.is_set():
                raise CancelledError(f"the start of {self._name} was cancelled")
            if time.monotonic() > deadline:
                raise ToolError(
                    f"{self._name} did not answer within {self._start_seconds:g} s",
                    detail=self.log_tail(),
                    hint="crash recovery of a large redo log takes long; give the server more time or memory",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.2)


def not_started(config: ServerConfig, what: str, hint: str) -> ToolError:
    """A server did not start, and why; ``what`` and ``hint`` where its log shows nothing better."""
    tail = log_tail(config.error_log)
    if _LOCKED in tail:
        return ToolError(
            f"another server has the data directory {config.datadir} open",
            detail=tail,
            hint="stop that server: two on one data directory destroy it; then repeat the command",
        )
    return ToolError(what, detail=tail, hint=hint)


def log_tail(path: Path, lines: int = _LOG_LINES) -> str:
    """The last ``lines`` lines of a server's log, redacted; empty when there is none. No link is followed."""
    try:
        with os.fdopen(open_plain(path), "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 64 * 1024))
            text = log.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"its log {path} cannot be read: {error.strerror}"
    return "\n".join(redact(line) for line in text.splitlines()[-lines:])


def _prepare_directory(config: ServerConfig) -> None:
    config.directory.mkdir(parents=True, exist_ok=True)
    temporary = config.directory / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    config.socket.unlink(missing_ok=True)
    give(temporary, config.user, 0o700)
    give(config.directory, config.user, 0o700)


def give(path: Path, user: str, mode: int | None = None) -> None:
    """To the server's user, when we are root. Whatever user it is of, nothing is followed that is in its place."""
    folders.give(path, _owner(user) or (os.geteuid(), os.getegid()), mode)


def _owner(user: str) -> tuple[int, int] | None:
    """Whom files are given to, when we are root."""
    return owner_of(user if os.geteuid() == 0 else None)


def _greets(path: Path) -> bool:
    """Does somebody behind the socket speak the protocol? (Its first packet comes unasked.)"""
    with socket.socket(socket.AF_UNIX) as knock:
        knock.settimeout(2.0)
        try:
            knock.connect(str(path))
            return len(knock.recv(5)) == 5
        except OSError:
            return False


def _server_pid(child: int, program: str) -> int | None:
    """The process called ``program`` at or below ``child``: the sandbox is between the two."""
    for pid in family(child):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == program[:15]:
                return pid
    return None


def _open_process(pid: int) -> int | None:
    """A descriptor that becomes readable when the process has ended; None when it has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None

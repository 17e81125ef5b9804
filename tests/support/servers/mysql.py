"""Private MySQL servers: of the private root that scripts/mysql-root makes, or any other that is named.

``$BACKUPD_TEST_MYSQLD`` names another server program (a release from 5.6 on, unpacked in some folder).
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pymysql

from backupd.engine.server.accounts import needs
from backupd.engine.server.probe import flavour_of
from backupd.engine.server.sandbox import server_options
from backupd.engine.sql.dialect import dialect_of
from backupd.model.server_facts import Flavour, Version
from tests.support.servers.datadir import Options, ServerDiedError, write_mysqld_group
from tests.support.servers.server import (
    BACKUP_PASSWORD,
    BACKUP_USER,
    SERVICE_PASSWORD,
    SERVICE_USER,
    Server,
    Words,
    quote_name,
)
from tests.support.stores.folders import DATABASE_USER, give_to_database, make_short_directory, runs_as_root

_ROOT = Path(os.environ.get("BACKUPD_TEST_MYSQL_ROOT") or Path(__file__).parents[3] / ".cache/mysql")
_UNKNOWN_USER = 1396
_BOOTSTRAP = ("mysql_system_tables.sql", "mysql_system_tables_data.sql")
"""From 5.6 and before, whose servers cannot initialise themselves: what mysql_install_db feeds to the server."""
_ONLY_ROOT = "DELETE FROM mysql.user WHERE User <> 'root' OR Host <> 'localhost';\nDELETE FROM mysql.db;\n"
_EXECUTED = "@@GLOBAL.gtid_executed"
_OLD_WORDS = Words(executed=_EXECUTED)
_NEW_WORDS = Words(
    "SHOW BINARY LOG STATUS",
    "RESET BINARY LOGS AND GTIDS",
    "REPLICA",
    "CHANGE REPLICATION SOURCE TO",
    "SOURCE",
    _EXECUTED,
)
_INIT_OPTIONS = frozenset(
    {
        "innodb_page_size",
        "innodb_data_file_path",
        "lower_case_table_names",
        "innodb_undo_directory",
        "innodb_undo_tablespaces",
    }
)


def root_programs() -> Path:
    """The folder of the private root's programs, whether it is there or not."""
    return _ROOT / "bin"


def why_not() -> str:
    """Why there is no MySQL server for tests; empty when there is one."""
    named = os.environ.get("BACKUPD_TEST_MYSQLD")
    if named:
        return "" if os.access(named, os.X_OK) else f"BACKUPD_TEST_MYSQLD={named} is not a program"
    return why_no_root()


def why_no_root() -> str:
    """Why there is no private root; empty when there is one."""
    if os.access(root_programs() / "mysqld", os.X_OK):
        return ""
    told = _ROOT / "unavailable"
    why = told.read_text().strip() if told.is_file() else "scripts/setup --test was not run"
    return f"no private MySQL server in {_ROOT}: {why}"


def mysqld() -> str:
    """The server program of the tests."""
    return os.environ.get("BACKUPD_TEST_MYSQLD") or str(root_programs() / "mysqld")


@functools.cache
def release_of(program: str) -> tuple[Flavour, Version]:
    """Flavour and version that a server program tells."""
    done = subprocess.run([program, "--no-defaults", "--version"], capture_output=True, text=True, check=True)
    version = done.stdout.partition(" Ver ")[2]
    return flavour_of(version, done.stdout), Version.parse(version)


def beside(program: str, name: str) -> str:
    """The program ``name`` of the same release as ``program``."""
    for folder in (Path(program).parent, Path(program).parent.with_name("bin")):
        if (folder / name).is_file():
            return str(folder / name)
    raise FileNotFoundError(f"there is no {name} beside {program}")


class MySQLServer(Server):
    """One MySQL (or Percona) server."""

    def __init__(self, *, mysqld_path: str | None = None, **others: Any) -> None:
        super().__init__(**others)
        self._program = mysqld_path or mysqld()
        self.flavour, self.version = release_of(self._program)
        self.roles = self.version >= Version(8, 0)
        self.engines = {"Aria": "InnoDB"}
        self.words = _NEW_WORDS if self.version >= Version(8, 2) else _OLD_WORDS

    def program(self) -> str:
        return self._program

    def another(self, **options: Any) -> Self:
        made = type(self)(mysqld_path=self._program, **options)
        made.engines = self.engines
        return made

    def make_datadir(self) -> None:
        shaping = {name: value for name, value in self.options.items() if name in _INIT_OPTIONS}
        self.datadir.mkdir(parents=True, exist_ok=True)
        give_to_database(self.datadir)
        self.datadir.chmod(0o700)
        if shaping:
            _install(self._program, self.datadir, shaping)
        else:
            source = _template(self._program)
            subprocess.run(
                ["cp", "-a", "--reflink=auto", "--sparse=always", f"{source}/.", str(self.datadir)], check=True
            )

    def flavour_settings(self, *, binlog: bool) -> dict[str, str | int | None]:
        version = self.version
        settings: dict[str, str | int | None] = {
            **server_options(self._program),
            **_redo(version),
            "event_scheduler": "OFF",
            "secure_file_priv": "",
            "loose_mysqlx": "OFF",
        }
        if version < Version(8, 0):
            settings["performance_schema"] = "OFF"
        if binlog:
            settings |= {
                "log_bin": "binlog",
                "sync_binlog": 1,
                "relay_log": "relay",
                "gtid_mode": "ON",
                "enforce_gtid_consistency": "ON",
            }
            if version < Version(8, 0):
                settings |= {"binlog_format": "ROW", "log_slave_updates": 1}
        else:
            settings |= {"skip_log_bin": None}
        return settings

    def create_user(self, user: str, password: str, privileges: Sequence[str]) -> None:
        self.drop_user(user)
        self.query(f"CREATE USER {quote_name(user)}@localhost IDENTIFIED BY %s", (password,))
        self.execute(f"GRANT {', '.join(privileges) or 'USAGE'} ON *.* TO {quote_name(user)}@localhost")

    def drop_user(self, user: str) -> None:
        try:
            self.execute(f"DROP USER {quote_name(user)}@localhost")
        except pymysql.err.OperationalError as error:
            if error.args[0] != _UNKNOWN_USER:
                raise

    def create_backup_users(self) -> None:
        wanted = needs(dialect_of(self.flavour, self.version), binlog=True)
        self.create_user(BACKUP_USER, BACKUP_PASSWORD, [need.privilege for need in wanted if need.required])
        self.create_user(SERVICE_USER, SERVICE_PASSWORD, [need.privilege for need in wanted])
        if self.version >= Version(8, 0, 17):
            for user in (BACKUP_USER, SERVICE_USER):
                self.execute(f"GRANT INSERT, DELETE ON mysql.plugin TO {quote_name(user)}@localhost")


@functools.cache
def _template(program: str) -> Path:
    """An empty system of this release, made once in a session."""
    base = make_short_directory("bt-mysql-")
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    datadir = base / "data"
    datadir.mkdir(mode=0o700)
    give_to_database(datadir)
    _install(program, datadir, {})
    (datadir / "auto.cnf").unlink(missing_ok=True)
    return datadir


def _redo(version: Version) -> Mapping[str, str]:
    name = "innodb_redo_log_capacity" if version >= Version(8, 0, 30) else "innodb_log_file_size"
    return {name: "64M"}


def _install(program: str, datadir: Path, shaping: Options) -> None:
    _flavour, version = release_of(program)
    base = make_short_directory("bt-init-")
    try:
        conf = base / "init.cnf"
        write_mysqld_group(
            conf,
            {
                **server_options(program),
                **_redo(version),
                "character_set_server": "utf8mb4",
                "datadir": str(datadir),
                "tmpdir": str(base),
                "log_error": str(base / "init.err"),
                "secure_file_priv": "",
                "loose_mysqlx": "OFF",
                **shaping,
            },
        )
        how = "--initialize-insecure" if version >= Version(5, 7, 6) else "--bootstrap"
        user = [f"--user={DATABASE_USER}"] if runs_as_root() else []
        sql = "" if version >= Version(5, 7, 6) else "\n".join(_bootstrap_sql(program))
        if sql:
            (datadir / "mysql").mkdir(mode=0o700)
            give_to_database(datadir / "mysql")
        done = subprocess.run(
            [program, f"--defaults-file={conf}", how, *user],
            input=sql,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode != 0:
            log = base / "init.err"
            told = log.read_text(errors="replace") if log.exists() else ""
            raise ServerDiedError(f"{program} {how}:\n{(done.stdout + told)[-4000:]}")
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _bootstrap_sql(program: str) -> Iterable[str]:
    yield "use mysql;"
    base = Path(program).resolve().parent.parent
    for name in _BOOTSTRAP:
        found = next(
            (folder / name for folder in (base / "share", base / "share/mysql") if (folder / name).is_file()), None
        )
        if found is None:
            raise FileNotFoundError(f"there is no {name} in {base}/share")
        yield found.read_text(encoding="utf-8", errors="replace")
    yield _ONLY_ROOT

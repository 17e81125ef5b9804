"""The combinations of server and physical tool that the whole main job must work on.

``mariadb`` and ``mysql-clone`` run wherever `scripts/setup --test` found their programs. ``mysql-xtrabackup`` needs a
release of MySQL or Percona Server and the XtraBackup that fits it, both unpacked anywhere::

    BACKUPD_TEST_MYSQLD=/srv/mysql-5.7/bin/mysqld
    BACKUPD_TEST_XTRABACKUP=/srv/xtrabackup-2.4/bin/xtrabackup
    BACKUPD_TEST_XBSTREAM=/srv/xtrabackup-2.4/bin/xbstream
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import mysql
from tests.support.datadir import find_program
from tests.support.mariadb import PrivateServer
from tests.support.mysql import MySQLServer
from tests.support.server import Server


@dataclass(frozen=True)
class Stack:
    """``why_not``: why it cannot run here, empty when it can. ``make``: a server that is not started yet. ``programs``:
    what the configuration must name. ``replay``: the programs that print a binary log and execute that."""

    name: str
    tool: str
    why_not: Callable[[], str]
    make: Callable[..., Server]
    programs: Callable[[], Mapping[str, str]]
    replay: Callable[[], tuple[str, str]]
    skip_gtids: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def _root_server(**options: Any) -> Server:
    server = MySQLServer(mysqld_path=str(mysql.root_programs() / "mysqld"), **options)
    server.engines = {"Aria": "InnoDB", "MyISAM": "InnoDB"}  # the only one that CLONE copies
    return server


def _no_xtrabackup() -> str:
    for name in ("BACKUPD_TEST_MYSQLD", "BACKUPD_TEST_XTRABACKUP", "BACKUPD_TEST_XBSTREAM"):
        path = os.environ.get(name, "")
        if not path:
            return f"{name} is not set"
        if not os.access(path, os.X_OK):
            return f"{name}={path} is not a program"
    return ""


def _xtrabackup_programs() -> dict[str, str]:
    return {"mysqld": os.environ["BACKUPD_TEST_MYSQLD"], "xtrabackup": os.environ["BACKUPD_TEST_XTRABACKUP"],
            "xbstream": os.environ["BACKUPD_TEST_XBSTREAM"]}


def _beside_mysqld() -> tuple[str, str]:
    program = os.environ["BACKUPD_TEST_MYSQLD"]
    return mysql.beside(program, "mysqlbinlog"), mysql.beside(program, "mysql")


MARIADB = Stack(
    "mariadb", "mariadb-backup", lambda: "", PrivateServer, dict,
    lambda: (find_program("mariadb-binlog"), find_program("mariadb")))
MYSQL_CLONE = Stack(
    "mysql-clone", "clone", mysql.why_no_root, _root_server,
    lambda: {"mysqld": str(mysql.root_programs() / "mysqld")},
    lambda: (str(mysql.root_programs() / "mysqlbinlog"), str(mysql.root_programs() / "mysql")), ("--skip-gtids",))
MYSQL_XTRABACKUP = Stack(
    "mysql-xtrabackup", "xtrabackup", _no_xtrabackup, MySQLServer, _xtrabackup_programs, _beside_mysqld,
    ("--skip-gtids",))
STACKS = (MARIADB, MYSQL_CLONE, MYSQL_XTRABACKUP)


def binlogs(server: Server, first: str) -> list[Path]:
    """The binary log files of ``server`` from ``first`` on."""
    names = [str(row[0]) for row in server.query("SHOW BINARY LOGS")]
    return [server.datadir / name for name in names[names.index(first):]]

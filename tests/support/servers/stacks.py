"""The combinations of server and physical tool that the whole main job must work on, and what a test must know of each.

``mariadb`` and ``mysql-clone`` run wherever `scripts/setup --test` found their programs. ``mysql-xtrabackup`` is a
release of MySQL or Percona Server and the XtraBackup that fits it, unpacked anywhere and named in the environment::

    BACKUPD_TEST_MYSQLD=/srv/mysql-5.7/bin/mysqld
    BACKUPD_TEST_XTRABACKUP=/srv/xtrabackup-2.4/bin/xtrabackup
    BACKUPD_TEST_XBSTREAM=/srv/xtrabackup-2.4/bin/xbstream
    BACKUPD_TEST_MYSQLBINLOG=/srv/mysql-5.7/bin/mysqlbinlog    (beside mysqld when it is not given)
    BACKUPD_TEST_MYSQL=/srv/mysql-5.7/bin/mysql                (likewise)

`scripts/stack` runs every test of that stack.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backupd.model.server_facts import Version
from tests.support.dice import SOAK
from tests.support.servers import mysql
from tests.support.servers.datadir import find_program
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server

_FULLY_SUPPORTED = Version(5, 7, 6)
"""Older releases: physical backups, chains, and restores of a backup."""


@dataclass(frozen=True)
class Stack:
    """``why_not``: why it cannot run here, empty when it can. ``make``: a server that is not started yet. ``programs``:
    what the configuration must name. ``replay``: the programs that print a binary log and execute that. ``increments``:
    can its tool take them?"""

    name: str
    tool: str
    why_not: Callable[[], str]
    make: Callable[..., Server]
    programs: Callable[[], Mapping[str, str]]
    replay: Callable[[], tuple[str, str]]
    skip_gtids: tuple[str, ...] = ()
    increments: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def mariadb(self) -> bool:
        return self is MARIADB

    def all_programs(self) -> dict[str, str]:
        """What the configuration must name, those that copy and replay binary logs included."""
        if self.mariadb:
            return dict(self.programs())
        mysqlbinlog, client = self.replay()
        return {**self.programs(), "mysqlbinlog": mysqlbinlog, "mysql": client}

    def path(self) -> str:
        """PATH for who works by hand: the folders of its programs before the system's."""
        folders = [str(Path(path).parent) for path in (*self.programs().values(), *self.replay())]
        return ":".join([*dict.fromkeys(folders), "/usr/sbin:/usr/bin:/sbin:/bin"])

    def version(self) -> Version:
        """Of its server. MariaDB's counts as what it can do: as the newest."""
        return Version(99, 0) if self.mariadb else mysql.release_of(self.programs()["mysqld"])[1]

    def refused(self) -> str:
        """The first release that is supported in full, which a refusal of more than backups, chains and restores of a
        backup must name; "" where nothing is refused."""
        return "" if self.version() >= _FULLY_SUPPORTED else str(_FULLY_SUPPORTED)


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
    return {
        "mysqld": os.environ["BACKUPD_TEST_MYSQLD"],
        "xtrabackup": os.environ["BACKUPD_TEST_XTRABACKUP"],
        "xbstream": os.environ["BACKUPD_TEST_XBSTREAM"],
    }


def _beside_mysqld() -> tuple[str, str]:
    program = os.environ["BACKUPD_TEST_MYSQLD"]
    return (
        os.environ.get("BACKUPD_TEST_MYSQLBINLOG") or mysql.beside(program, "mysqlbinlog"),
        os.environ.get("BACKUPD_TEST_MYSQL") or mysql.beside(program, "mysql"),
    )


MARIADB = Stack(
    "mariadb",
    "mariadb-backup",
    lambda: "",
    PrivateServer,
    dict,
    lambda: (find_program("mariadb-binlog"), find_program("mariadb")),
)
MYSQL_CLONE = Stack(
    "mysql-clone",
    "clone",
    mysql.why_no_root,
    _root_server,
    lambda: {"mysqld": str(mysql.root_programs() / "mysqld")},
    lambda: (str(mysql.root_programs() / "mysqlbinlog"), str(mysql.root_programs() / "mysql")),
    ("--skip-gtids",),
    increments=False,
)
MYSQL_XTRABACKUP = Stack(
    "mysql-xtrabackup",
    "xtrabackup",
    _no_xtrabackup,
    MySQLServer,
    _xtrabackup_programs,
    _beside_mysqld,
    ("--skip-gtids",),
)
STACKS = (MARIADB, MYSQL_CLONE, MYSQL_XTRABACKUP)
MYSQL = (MYSQL_CLONE, MYSQL_XTRABACKUP)


def stacks(*chosen: Stack, soak: tuple[Stack, ...] = ()) -> list[Any]:
    """Parameters for a test or a fixture: ``chosen``, each skipped where it cannot run. Those in ``soak`` are left to a
    soak."""
    found = []
    for stack in chosen:
        why = stack.why_not()
        marks = [pytest.mark.skipif(bool(why), reason=f"stack {stack}: {why}")] + ([SOAK] if stack in soak else [])
        found.append(pytest.param(stack, id=str(stack), marks=marks))
    return found


def whole(*chosen: Stack) -> tuple[Stack, ...]:
    """Those of which nothing is refused. What is refused of the others, tests/e2e/service/test_stacks.py asserts."""
    return tuple(stack for stack in chosen if stack.why_not() or not stack.refused())


def binlogs(server: Server, first: str) -> list[Path]:
    """The binary log files of ``server`` from ``first`` on."""
    names = [str(row[0]) for row in server.query("SHOW BINARY LOGS")]
    return [server.datadir / name for name in names[names.index(first) :]]

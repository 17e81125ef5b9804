"""Servers whose commits wait for a semi-synchronous replica."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import pymysql

from backupd.engine.server.semi_sync import SemiSync, read_semi_sync
from backupd.model.server_facts import Version
from tests.support.logs.streaming import prepare, through_socket
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server


def switch_on(server: Server, *, timeout: float = 600.0) -> None:
    """Prepared, and its commits wait for a semi-synchronous replica from now on, each for ``timeout`` seconds."""
    prepare(server)
    if isinstance(server, MySQLServer):
        source = "master" if server.version < Version(8, 0, 26) else "source"
        server.execute(f"INSTALL PLUGIN rpl_semi_sync_{source} SONAME 'semisync_{source}.so'")
    wait(server, timeout=timeout)


def wait(server: Server, *, timeout: float = 600.0) -> None:
    """As after ``switch_on``, which a restart ends."""
    source = facts(server).source
    server.execute(
        f"SET GLOBAL rpl_semi_sync_{source}_wait_point = AFTER_SYNC",
        f"SET GLOBAL rpl_semi_sync_{source}_timeout = {round(timeout * 1000)}",
        f"SET GLOBAL rpl_semi_sync_{source}_enabled = ON",
    )


class Writer:
    """Inserts one row after the other until its connection breaks. ``told``: texts of those whose commit was answered;
    each begins with ``name``."""

    def __init__(self, server: Server, name: str) -> None:
        self._server, self._name = server, name
        self.told: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(pymysql.err.Error, OSError), self._server.connect() as connection:
            for count in itertools.count():
                text = f"{self._name}-{count}-of-all"
                with connection.cursor() as cursor:
                    cursor.execute("INSERT INTO shop.t (t) VALUES (%s)", (text,))
                self.told.append(text)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()


def facts(server: Server) -> SemiSync:
    with through_socket(server).connect() as session:
        return read_semi_sync(session)


class Commit:
    """One insert in a thread of its own."""

    def __init__(self, server: Server, text: str = "x") -> None:
        self._server, self._text = server, text
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        begun = time.monotonic()
        try:
            with self._server.connect() as connection, connection.cursor() as cursor:
                cursor.execute("INSERT INTO shop.t (t) VALUES (%s)", (self._text,))
        except BaseException as error:  # noqa: BLE001  the test looks at it
            self.error = error
        self.seconds = time.monotonic() - begun

    def is_over(self, seconds: float) -> bool:
        """Within so many seconds?"""
        self._thread.join(seconds)
        return not self._thread.is_alive()

"""A private PostgreSQL for the tests: Debian's programs, a throw-away folder, no part of any installed cluster."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

NEEDED = "the catalog is tested on a real PostgreSQL: apt-get install postgresql-15 (any version of 13 or later)"


def programs() -> Path:
    """The folder with initdb and postgres. Fails with what to install."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    if versions:
        return versions[-1].parent
    found = shutil.which("initdb")
    if found is None:
        raise AssertionError(NEEDED)
    return Path(found).resolve().parent


def as_postgres(*argv: str | Path) -> list[str]:
    """PostgreSQL refuses to run as root; anybody else runs it as himself."""
    words = [str(word) for word in argv]
    if os.geteuid() != 0:
        return words
    return ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *words]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class PostgreSQL:
    """A running server; ``url(name)`` addresses one of its databases through its socket."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        """``port``: part of the socket's name; by default any that is free."""
        self.folder = folder
        self.port = port or _free_port()
        self.bin = programs()

    def initialise(self) -> None:
        subprocess.run(
            as_postgres(
                self.bin / "initdb",
                "-D",
                self.folder / "data",
                "-U",
                "catalog",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--no-locale",
                "--no-sync",
            ),
            check=True,
            capture_output=True,
            cwd=self.folder,
        )

    def start(self) -> None:
        # A zone far from UTC, so that a forgotten conversion shows.
        options = (
            f"-k {self.folder} -p {self.port} -c listen_addresses= -c fsync=off "
            "-c timezone=Pacific/Chatham -c max_connections=60"
        )
        subprocess.run(
            as_postgres(
                self.bin / "pg_ctl",
                "start",
                "-w",
                "-s",
                "-t",
                "240",
                "-D",
                self.folder / "data",
                "-l",
                self.folder / "log",
                "-o",
                options,
            ),
            check=True,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
        )

    def stop(self, mode: str = "immediate") -> None:
        subprocess.run(
            as_postgres(self.bin / "pg_ctl", "stop", "-w", "-s", "-t", "240", "-m", mode, "-D", self.folder / "data"),
            check=True,
            cwd=self.folder,
        )

    def url(self, database: str) -> str:
        return f"postgresql://catalog@/{database}?host={self.folder}&port={self.port}"

    def create(self, database: str, template: str = "template1") -> str:
        """A copy of ``template``, to which nobody may be connected."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}" TEMPLATE "{template}"'.encode())
        return self.url(database)


def own_folder(folder: Path) -> None:
    """Make ``folder``, where it is missing, one that the server may write to."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() == 0:
        owner = pwd.getpwnam("postgres")
        os.chown(folder, owner.pw_uid, owner.pw_gid)


@contextmanager
def private_postgresql() -> Iterator[PostgreSQL]:
    folder = Path(tempfile.mkdtemp(prefix="bk-pg-", dir="/tmp"))
    try:
        own_folder(folder)
        server = PostgreSQL(folder)
        server.initialise()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)

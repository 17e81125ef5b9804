"""New replicas under test: a source with an account for them, the command that makes one, and whether both are
equal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.e2e.house import SERVER, House
from tests.support.sample import checksum_everything
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, Server, connect, query

PASSWORD = "Repl-s3cret-77"
SOURCE = "shop-src"
"""The name of a second server of the configuration."""


def filled(server: Server) -> None:
    server.create_backup_users()
    server.execute(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.orders (id INT PRIMARY KEY AUTO_INCREMENT, what VARCHAR(20))",
        "CREATE TABLE shop.ticks (at DATETIME)",
        "CREATE EVENT shop.tick ON SCHEDULE EVERY 1 SECOND DO INSERT INTO shop.ticks VALUES (NOW())",
        *(f"INSERT INTO shop.orders (what) VALUES ('order {number}')" for number in range(20)),
        f"CREATE USER repl@'127.0.0.1' IDENTIFIED BY '{PASSWORD}'",
        "GRANT REPLICATION SLAVE ON *.* TO repl@'127.0.0.1'",
    )


def with_account(house: House, password: str = PASSWORD) -> House:
    """``house`` with the account of new replicas."""
    file = house.base / "replication.cnf"
    file.write_text(f"[client]\nuser=repl\npassword={password}\n")
    file.chmod(0o600)
    house.write()
    written = house.config.read_text()
    house.config.write_text(written.replace("policy: gold}", f"policy: gold, replication_defaults_file: {file}}}"))
    return house


def with_source(house: House, source: Server) -> House:
    """``house`` with ``source`` as a server of its configuration, which no policy backs up otherwise."""
    written = house.config.read_text()
    client = source.client_file(SERVICE_USER, SERVICE_PASSWORD)
    line = next(line for line in written.splitlines() if line.startswith(f"  {SERVER}: "))
    account = line.partition("replication_defaults_file: ")[2].rstrip("}")
    entry = f"  {SOURCE}: {{socket: {source.socket}, defaults_file: {client}, policy: gold"
    house.config.write_text(written.replace(line, f"{line}\n{entry}, replication_defaults_file: {account}}}"))
    return house


@contextmanager
def load(server: Server) -> Iterator[None]:
    over = threading.Event()

    def write() -> None:
        with server.connect() as connection:
            while not over.is_set():
                query(connection, "INSERT INTO shop.orders (what) VALUES ('under load')")
                time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        over.set()
        writer.join()


def replicate(datadir: Path, source: str, *options: str, to: str = "latest") -> tuple[str, ...]:
    where = ("--datadir", str(datadir), "--mode", "replica", "--source", source)
    return ("restore", SERVER, "--to", to, *where, *options)


def equal(source: Server, socket: str) -> None:
    """Once the replica has what the source has now."""
    with source.connect() as there:
        wanted = checksum_everything(there)
    deadline = time.monotonic() + 300
    while True:
        with connect(socket) as replica:
            found = checksum_everything(replica)
        if found == wanted:
            return
        assert time.monotonic() < deadline, "the replica never had what its source has"
        time.sleep(0.1)

"""A house whose server is a node of a Galera cluster, clients that write there, and the node's ways to die and to come
back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymysql

from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.servers.galera import Cluster, Node, wipe
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER
from tests.support.stores.folders import short_directory


@dataclass
class Lab(House):
    """A house whose server is the first node of ``cluster``; the others are configured, too."""

    cluster: Cluster = field(default_factory=Cluster)

    @property
    def node(self) -> Node:
        """The one that is backed up, and dies."""
        return self.cluster.nodes[0]

    def write(
        self, *, encryption_home: Path | None = None, restore_home: Path | None = None, repository: Path | None = None
    ) -> None:
        super().write(encryption_home=encryption_home, restore_home=restore_home, repository=repository)
        text = self.config.read_text()
        mine, *others = self.cluster.nodes
        lines = [
            f"  {node.name}: {{socket: {node.socket}, defaults_file: "
            f"{node.client_file(SERVICE_USER, SERVICE_PASSWORD)}, policy: gold}}\n"
            for node in others
        ]
        own = f"policy: gold, server_defaults_file: {mine.option_path}}}\n"
        self.config.write_text(text.replace("policy: gold}\n", own + "".join(lines), 1))

    def rejoin(self, *more: str, code: int = 0) -> dict[str, Any]:
        """The node back out of a backup; its server is the test's again."""
        done = self.run(
            "restore", SERVER, "--datadir", str(self.node.datadir), "--mode", "galera", "--cluster", "lab", "--start",
            "--json", *more,
        )  # fmt: skip
        assert done.code == code, done.all
        outcome: dict[str, Any] = done.json
        self.node.adopted = outcome["join"]["pid"] or None
        return outcome


@contextmanager
def writing(*nodes: Node, pause: float = 0.02) -> Iterator[None]:
    """Clients of ``nodes``, each in rows of its own."""
    stop = threading.Event()
    errors: list[BaseException] = []

    def run(number: int, node: Node) -> None:
        try:
            with node.connect() as connection, connection.cursor() as cursor:
                while not stop.wait(pause):
                    cursor.execute("INSERT INTO shop.orders (client, note) VALUES (%s, REPEAT('x', 50))", (number,))
                    cursor.execute("UPDATE shop.stock SET count = count + 1 WHERE id = %s", (number,))
        except pymysql.err.Error as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(nodes * 2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors


def burst(node: Node, count: int) -> None:
    """So many transactions of rows: a joiner gets some hundred that are older than its own seqno, too."""
    with node.connect() as connection, connection.cursor() as cursor:
        for number in range(count):
            cursor.execute("UPDATE shop.stock SET count = count + 1 WHERE id = %s", (number % 10,))


def fill(node: Node) -> None:
    node.create_backup_users()
    node.execute(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.orders (id BIGINT AUTO_INCREMENT PRIMARY KEY, client INT, note VARCHAR(60))",
        "CREATE TABLE shop.stock (id INT PRIMARY KEY, count INT)",
        "INSERT INTO shop.stock SELECT seq, 0 FROM shop.seq_0_to_9",
        "INSERT INTO shop.orders (client, note) SELECT seq, 'early' FROM shop.seq_1_to_2000",
    )


@contextmanager
def laboratory(keys: Keys, *, gtid_mode: bool, gcache: str = "64M") -> Iterator[Lab]:
    cluster = Cluster(gtid_mode=gtid_mode, gcache=gcache)
    with short_directory() as base:
        try:
            cluster.start(fill)
            yield Lab(base, cluster.nodes[0], keys, cluster=cluster)
        finally:
            cluster.remove()


def die(node: Node) -> None:
    node.kill()
    wipe(node)


def forget_cache(node: Node) -> None:
    """It can send nothing that is older than its start."""
    node.stop()
    (node.datadir / "galera.cache").unlink()
    node.start()

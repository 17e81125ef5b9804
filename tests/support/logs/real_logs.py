"""A few small binary logs that a real MariaDB wrote, made once per session: whole ones, and one of a killed server."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass

from backupd.engine.binlog.events import clear_flag
from backupd.engine.binlog.scan import scan
from backupd.model.binlog import Ending, Transaction
from tests.support.servers.mariadb import PrivateServer


@dataclass(frozen=True)
class RealLog:
    """``data`` as the server left it; ``cuts``: where its complete transactions end."""

    name: str
    number: int
    data: bytes
    ending: Ending
    transactions: tuple[Transaction, ...]

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(transaction.end for transaction in self.transactions)

    @property
    def archived(self) -> bytes:
        return clear_flag(self.data)


@functools.cache
def real_logs() -> tuple[RealLog, ...]:
    """Three that were rotated, and one whose server was killed."""
    with PrivateServer() as server:
        server.execute("RESET MASTER")
        server.execute("CREATE DATABASE shop", "CREATE TABLE shop.orders (id INT PRIMARY KEY, note TEXT)")
        for file in range(4):
            for row in range(4):
                server.execute(f"INSERT INTO shop.orders VALUES ({file * 10 + row}, REPEAT('x', 300))")
            server.execute(f"UPDATE shop.orders SET note = '{file}' WHERE id >= {file * 10}")
            if file < 3:
                server.execute("FLUSH BINARY LOGS")
        server.kill()
        paths = sorted(path for path in server.datadir.glob("binlog.0*") if path.suffix[1:].isdigit())
        return tuple(_described(path.name, path.read_bytes(), killed=path == paths[-1]) for path in paths)


def _described(name: str, data: bytes, *, killed: bool) -> RealLog:
    transactions: list[Transaction] = []
    scan(io.BytesIO(data), on_transaction=transactions.append)
    return RealLog(
        name, int(name.rpartition(".")[2]), data, Ending.CUT if killed else Ending.ROTATED, tuple(transactions)
    )

"""Clients that write until they are told to stop."""

from __future__ import annotations

import random
import threading
from types import TracebackType
from typing import Any, Self

import pymysql
from pymysql.connections import Connection

from tests.support.oracle import Total
from tests.support.sample import ACCOUNTS
from tests.support.servers.server import Server

_TRY_AGAIN = (1205, 1213)
"""Lock wait timeout, deadlock."""


class Writers:
    """``count`` clients on the sample data: transfers between accounts (their sum never changes), new and
    deleted orders, changed documents. ``pause``: seconds that each waits after a transaction, so that something is
    left of the machine. Leaving the block stops them and raises the first error of theirs."""

    def __init__(self, server: Server, count: int = 4, *, seed: int = 1, pause: float = 0.0) -> None:
        self._server = server
        self._pause = pause
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._done = [0] * count
        self._threads = [
            threading.Thread(
                target=self._run, args=(number, seed * 1000 + number), daemon=True, name=f"writer-{number}"
            )
            for number in range(count)
        ]

    @property
    def transactions(self) -> int:
        """How many were committed so far, by all clients."""
        return sum(self._done)

    def start(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> int:
        """Stop and return the number of committed transactions."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        return self.transactions

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if error is None and self._errors:
            raise self._errors[0]

    def _run(self, number: int, seed: int) -> None:
        dice = random.Random(seed)
        try:
            with self._server.connect(autocommit=False) as connection:
                while not self._stop.is_set():
                    try:
                        with connection.cursor() as cursor:
                            _transaction(cursor, dice)
                        connection.commit()
                        self._done[number] += 1
                        self._stop.wait(self._pause)
                    except pymysql.err.OperationalError as error:
                        if error.args[0] not in _TRY_AGAIN:
                            raise
                        connection.rollback()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that stops the writers
            self._errors.append(error)


def _transaction(cursor: Any, dice: random.Random) -> None:
    kind = dice.random()
    if kind < 0.5:
        sender, receiver = dice.sample(range(1, ACCOUNTS + 1), 2)
        cursor.execute("CALL bank.move(%s, %s, %s)", (sender, receiver, dice.randint(1, 50)))
    elif kind < 0.8:
        cursor.execute(
            "INSERT INTO shop.orders (customer_id, created_at, note) VALUES (%s, NOW(6), %s)",
            (dice.randint(1, 1000), f"order {dice.random()}"),
        )
        cursor.execute("INSERT INTO shop.order_lines VALUES (LAST_INSERT_ID(), 1, %s, 2)", (dice.randint(1, 300),))
    elif kind < 0.9:
        cursor.execute("DELETE FROM shop.orders WHERE id > 5000 ORDER BY id LIMIT 3")
    else:
        cursor.execute("UPDATE shop.documents SET body = REVERSE(body) WHERE id = %s", (dice.randint(1, 500),))


def bank_total(connection: Connection[Any]) -> int:
    """The sum over all accounts: constant whatever the writers do."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT SUM(balance) FROM bank.accounts")
        row = cursor.fetchone()
    return Total(row[0] if row else 0)

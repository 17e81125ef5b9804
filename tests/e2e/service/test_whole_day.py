"""A chain of backups and the binary logs of a day, restored to any of its moments.

The writers' clocks run thousands of times faster than the real one (SET TIMESTAMP), from three days ago on; the times
of backups and branches in the catalog are moved to that clock afterwards. What was committed when is noted by the
writers themselves.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select, update

from backupd.catalog.database import Database
from backupd.catalog.tables.backups import backups
from backupd.catalog.tables.binlogs import binlog_branches
from backupd.model.text import format_time
from tests.e2e.restores.test_every_second import confirmed
from tests.support import sample
from tests.support.dice import SOAK, rounds, thrown
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.oracle import WITH_MARIADB, Mark, Oracle, oracle
from tests.support.e2e.service import ONCE_A_YEAR, catalog_of, serving
from tests.support.keys import Keys
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.folders import short_directory

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user"),
    pytest.mark.campaign,
]
SPEED = 4000
DAY = timedelta(hours=24)


@dataclass
class Day:
    """Clients on the sample data whose clock begins three days ago and runs ``SPEED`` times too fast. ``done``: the
    moment of each transaction by the sequence number of its GTID, which is the order of the log."""

    server: PrivateServer
    real: datetime = field(default_factory=lambda: datetime.now(UTC))
    done: dict[int, datetime] = field(default_factory=dict)
    domain: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)
    _errors: list[BaseException] = field(default_factory=list)

    def at(self, moment: datetime) -> datetime:
        """A real moment on the clock of the day."""
        return self.real - timedelta(days=3) + (moment - self.real) * SPEED

    @property
    def now(self) -> datetime:
        return self.at(datetime.now(UTC))

    @contextmanager
    def writing(self, clients: int) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, number: int) -> None:
        dice = random.Random(number)
        try:
            with self.server.connect() as connection, connection.cursor() as cursor:
                while not self._stop.wait(0.03):
                    second = self.now.replace(microsecond=0)
                    cursor.execute(f"SET timestamp = {second.timestamp():.0f}")
                    cursor.execute(
                        "INSERT INTO shop.orders (customer_id, created_at, note) VALUES (%s, NOW(6), %s)",
                        (dice.randint(1, 1000), "of the day"),
                    )
                    self._note(cursor, second)
                    cursor.execute("UPDATE shop.products SET stock = stock + 1 WHERE id = %s", (dice.randint(1, 300),))
                    self._note(cursor, second)
        except BaseException as error:  # noqa: BLE001  raised again in the thread that stops the writers
            self._errors.append(error)

    def _note(self, cursor: object, second: datetime) -> None:
        cursor.execute("SELECT @@last_gtid")  # type: ignore[attr-defined]  # pymysql's cursors have no common type
        self.domain, _, sequence = str(cursor.fetchone()[0]).rpartition("-")  # type: ignore[attr-defined]  # as above
        self.done[int(sequence)] = second

    def first_later(self, moment: datetime, *, after: int) -> Mark:
        """The first transaction in the log behind ``after`` that was committed later than ``moment``."""
        sequence = min(number for number, at in self.done.items() if number > after and at > moment)
        return Mark("", 0, f"{self.domain}-{sequence}")


@dataclass
class Story:
    house: House
    day: Day
    right: Oracle
    backups: list[str]
    first: int
    """Sequence number of the full backup's last transaction."""


def wait_until(day: Day, moment: datetime) -> None:
    while day.now < moment:
        time.sleep(0.01)


def move_clock(house: House, day: Day) -> None:
    """The catalog's backups and branches, to the clock of the day."""
    engine = Database(house.catalog).engine
    with engine.begin() as connection:
        for table, names in ((backups, ("started_at", "finished_at")), (binlog_branches, ("noticed_at",))):
            for row in connection.execute(select(table)).mappings().all():
                moved = {name: day.at(row[name]) for name in names}
                connection.execute(update(table).where(table.c.id == row["id"]).values(moved))
    engine.dispose()


@pytest.fixture(scope="module")
def story(keys: Keys) -> Iterator[Story]:
    with short_directory() as base, PrivateServer(tcp=True) as server:
        server.create_backup_users()
        sample.create(server)
        house = House(base, server, keys)
        (base / "policies" / "gold.yaml").write_text(ONCE_A_YEAR + "binlog: {stream: true, checkpoint: 1s}\n")
        with oracle(WITH_MARIADB, server) as right:
            server.execute("FLUSH BINARY LOGS")
            with serving(house) as service, catalog_of(house) as catalog:
                confirmed(catalog, datetime.now(UTC))
                day = Day(server)
                taken = [house.backup()]
                with day.writing(4):
                    begun = day.now
                    server.execute("FLUSH BINARY LOGS")
                    for _ in range(2):
                        taken.append(house.ok("backup", SERVER, "--kind", "incremental"))
                        server.execute("FLUSH BINARY LOGS")
                    wait_until(day, begun + DAY)
                    server.execute("FLUSH BINARY LOGS")
                    wait_until(day, day.now + timedelta(hours=1))
                confirmed(catalog, datetime.now(UTC))
                assert service.stop() == 0
            move_clock(house, day)
            last = int(str(taken[0]["position"]["gtid"]).rpartition("-")[2])
            yield Story(house, day, right, [one["id"] for one in taken], last)


@SOAK
def test_any_moment_of_a_day_is_what_a_replica_held_that_was_stopped_there(story: Story, short_tmp: Path) -> None:
    dice, day = thrown("whole day"), story.day
    times = [at for number, at in day.done.items() if number > story.first]
    span = max(times) - min(times)
    assert span >= DAY
    moments = sorted(min(times) + dice.random() * span for _ in range(rounds(2)))
    bases = set()
    for number, moment in enumerate(moments):
        expected = story.right.before(day.first_later(moment, after=story.first))
        datadir = short_tmp / f"d{number}"
        outcome = story.house.restore(datadir, to=format_time(moment))
        bases.add(outcome["backup"])
        with PrivateServer(datadir=datadir) as copy, copy.connect() as connection:
            assert checksum_everything(connection) == expected, (moment, outcome["position"])
        shutil.rmtree(datadir, ignore_errors=True)
    print(f"{moments}: from {bases}")

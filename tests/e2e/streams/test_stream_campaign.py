"""Everything that can happen to a stream, at random and while clients write: kills, a cut network, a full spool, a lost
destination, logs that the server removes or begins anew. The archive has what the server wrote, byte for byte, or names
what it lacks; it is never wrong in silence."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.app.context.settings import load_settings
from backupd.app.context.wiring import Wiring
from backupd.catalog.session import Catalog
from backupd.model.binlog import BranchReason
from tests.support.dice import size, thrown
from tests.support.e2e.disturbed import (
    MOVED,
    Clients,
    Longest,
    Stream,
    Witness,
    between_gaps,
    claimed_in_vain,
    confirmed_until,
    fetched,
    fork_is_true,
    is_told,
    life_of,
    missing_before,
    unnamed,
    wait_for_all,
)
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR, catalog_of, until
from tests.support.keys import Keys
from tests.support.logs.streaming import PASSWORD, USER, Proxy, prepare
from tests.support.servers import replica as replication
from tests.support.servers.server import Server, option_text
from tests.support.servers.stacks import MARIADB, MYSQL_CLONE, Stack, stacks

STREAMED = ONCE_A_YEAR + "binlog: {stream: true, checkpoint: 1s, max_spool: 64MiB}\n"
SPOOL_DISK = "200m"
EVERY = 25
"""Rounds between two looks at everything."""
ROUNDS = size(25, 500)
"""Disturbances of each family's server."""
FAILOVERS = size(25, 100)
"""Rounds, in whose middle a replica takes over."""
PAUSE = size(5, 20) / 10
OPTIONS: dict[str, str | int | None] = {
    "innodb_flush_log_at_trx_commit": 1,
    "max_allowed_packet": "64M",
    "max_binlog_size": "64M",
}
"""A log that is copied again as a whole needs room on the disk of the spool: clients that nothing holds back fill
200 MB of it in seconds."""
NOBODY = 1
"""A port where no one listens."""


@dataclass
class World:
    """``port``: the server's. ``later``: what lasts, with the round in which it is put right."""

    house: House
    server: Server
    port: int
    proxy: Proxy
    stream: Stream
    witness: Witness
    catalog: Catalog
    dice: random.Random
    can_fill_disk: bool
    servers: contextlib.ExitStack
    longest: Longest = field(default_factory=Longest)
    round: int = 0
    later: dict[str, tuple[int, Callable[[], None]]] = field(default_factory=dict)

    # -- one thing each; what lasts is put right some rounds later

    def stream_is_killed(self) -> None:
        self.stream.kill()
        self._lasts("stream", lambda: None)

    def dump_is_killed(self) -> None:
        for number, command in self.server.query("SELECT ID, COMMAND FROM information_schema.PROCESSLIST"):
            if str(command).startswith("Binlog Dump"):
                with contextlib.suppress(Exception):  # gone already
                    self.server.execute(f"KILL {number}")

    def server_restarts(self) -> None:
        self._server_is_away(self.server.stop)

    def server_is_killed(self) -> None:
        self._server_is_away(self.server.kill)

    def network_is_cut(self) -> None:
        self.proxy.target = NOBODY
        self.proxy.cut()
        self._lasts("network", self._network_is_back)

    def connections_break(self) -> None:
        self.proxy.cut()

    def connections_break_within_a_packet(self) -> None:
        self.proxy.left = self.dice.randint(1, 250_000)
        with self.longest.measured():
            self.server.execute("INSERT INTO shop.t (t) VALUES (REPEAT('p', 300000))")

    def transaction_is_big(self) -> None:
        """A row of more than a packet, in a transaction of more than a log file."""
        with self.longest.measured(), self.server.connect(autocommit=False) as connection:
            with connection.cursor() as cursor:
                for length in (17_000_000, self.dice.randint(1, 3_000_000)):
                    cursor.execute("INSERT INTO shop.t (t) VALUES (REPEAT('b', %s))", (length,))
            connection.commit()

    def clock_is_set(self) -> None:
        """For one client: its transactions come from the past or the future."""
        seconds = self.dice.choice((-86_400, -3_600, -1, 1, 3_600, 86_400))
        with self.longest.measured(), self.server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SET TIMESTAMP = %s", (int(time.time()) + seconds,))
            for _ in range(3):
                cursor.execute(f"INSERT INTO shop.{MOVED} (t) VALUES (NOW())")

    def replica_takes_over(self) -> None:
        """By GTIDs: with log files of its own, and without the last that the server before it committed."""
        self.put_right()
        server, replica = self.server, self.server.another(options=OPTIONS, tcp=True)
        self.servers.callback(replica.remove)
        self.witness.look()
        server.stop()
        subprocess.run(["cp", "-a", "--sparse=always", str(server.datadir), str(replica.datadir)], check=True)
        server.start()
        server.port = self.port  # which its options have, whatever was free
        self.witness.look()
        state = replica.datadir / "binlog.state"  # MariaDB's, by domain and server
        done = state.read_text().split() if state.exists() else []
        for path in (*replica.datadir.glob("binlog.*"), replica.datadir / "auto.cnf"):
            path.unlink(missing_ok=True)
        replica.start()
        if done:
            newest = max(done, key=lambda gtid: int(gtid.rpartition("-")[2]))
            replica.execute(f"SET GLOBAL gtid_slave_pos = '{newest}'")
        replication.follow(server, replica)
        wait_for_all(self.catalog, self.stream, datetime.now(UTC), 200)
        self.logs_rotate()  # so that all it lacks is in one file,
        with self.longest.measured():
            server.execute("INSERT INTO shop.t (t) VALUES ('both have this')")  # in which is something that it has, too
        replication.catch_up(server, replica)
        replication.part(replica)
        time.sleep(0.1)
        known = len(self.catalog.binlogs.branches(SERVER))
        self.witness.look()
        self.proxy.cut()
        server.kill()
        assert replica.port is not None
        self.port = replica.options["port"] = self.proxy.target = replica.port
        self.server = replica
        self.witness.new_life(replica)
        self.witness.look()
        until(lambda: len(self.catalog.binlogs.branches(SERVER)) > known, self.stream.log.read_text)

    def logs_rotate(self) -> None:
        self.server.execute("FLUSH BINARY LOGS")
        self.witness.look()

    def logs_begin_anew(self) -> None:
        """Clients may write into the new ones before they are looked at; none is removed meanwhile."""
        self.witness.look()
        self.server.execute(self.server.words.reset)
        self.witness.new_life()
        self.witness.look()

    def logs_are_purged(self) -> None:
        self.logs_rotate()
        self.server.execute(f"PURGE BINARY LOGS TO '{self.server.query(self.server.words.log_status)[0][0]}'")

    def logs_are_purged_behind_its_back(self) -> None:
        self.network_is_cut()
        time.sleep(0.2)
        self.logs_rotate()
        self.logs_are_purged()

    def destination_is_away(self) -> None:
        if "destination" not in self.later:
            self.house.repository.rename(self._away)
            self._lasts("destination", self._destination_is_back)

    def spool_is_filled(self) -> None:
        """Beyond its bound, because the destination takes nothing."""
        self.destination_is_away()
        for number in range(80):
            with self.longest.measured():
                self.server.execute("INSERT INTO shop.t (t) VALUES (REPEAT('z', 1000000))")
            if number % 16 == 0:
                self.logs_rotate()
        if not {"stream", "network", "disk"} & self.later.keys():
            with suppress(AssertionError):  # whether it came so far depends on what happened before
                until(lambda: self._state() == "paused", lambda: "a pause", 8)

    def disk_is_full(self) -> None:
        if self.can_fill_disk and "disk" not in self.later:
            with suppress(OSError), self._ballast.open("wb") as file:
                while True:
                    file.write(bytes(1 << 20))
                    file.flush()
            self._lasts("disk", lambda: self._ballast.unlink(missing_ok=True))

    # -- how

    def one_round(self) -> str:
        self.round += 1
        for name, (due, mend) in list(self.later.items()):
            if due <= self.round:
                del self.later[name]
                mend()
        if "stream" not in self.later:
            self.stream.ensure()
        action = self.dice.choices(list(ACTIONS), weights=list(ACTIONS.values()))[0]
        if self.round % FAILOVERS == FAILOVERS // 2:
            action = World.replica_takes_over
        action(self)
        time.sleep(self.dice.random() ** 2 * PAUSE)
        return action.__name__

    def put_right(self) -> None:
        for _due, mend in self.later.values():
            mend()
        self.later.clear()
        self.stream.ensure()

    def _lasts(self, what: str, mend: Callable[[], None]) -> None:
        self.later[what] = (self.round + self.dice.randint(1, 4), mend)

    def _server_is_away(self, end: Callable[[], None]) -> None:
        self.witness.look()
        end()
        time.sleep(self.dice.random() * 0.5)
        self.server.start()
        self.witness.look()
        if "network" not in self.later:
            self._network_is_back()

    def _network_is_back(self) -> None:
        self.proxy.target = self.port

    def _destination_is_back(self) -> None:
        # Nothing may have been begun anew at the bare mount point.
        assert not self.house.repository.exists(), sorted(self.house.repository.rglob("*"))
        self._away.rename(self.house.repository)

    @property
    def _away(self) -> Path:
        return self.house.base / "repository-is-away"

    @property
    def _ballast(self) -> Path:
        return self.house.base / "spool" / "ballast"

    def _state(self) -> str:
        found = self.catalog.binlogs.stream_state(SERVER)
        return str(found[0].get("state")) if found else ""


ACTIONS: dict[Callable[[World], None], int] = {
    World.stream_is_killed: 4,
    World.dump_is_killed: 4,
    World.server_restarts: 2,
    World.server_is_killed: 3,
    World.network_is_cut: 3,
    World.connections_break: 3,
    World.connections_break_within_a_packet: 3,
    World.transaction_is_big: 2,
    World.clock_is_set: 2,
    World.logs_rotate: 6,
    World.logs_begin_anew: 2,
    World.logs_are_purged: 3,
    World.logs_are_purged_behind_its_back: 2,
    World.destination_is_away: 3,
    World.spool_is_filled: 1,
    World.disk_is_full: 2,
}


@pytest.fixture
def spool_disk(short_tmp: Path) -> Iterator[bool]:
    """A small disk of its own for the spool, where one can be made."""
    folder = short_tmp / "spool"
    folder.mkdir(mode=0o700)
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SPOOL_DISK},mode=0700", "tmpfs", str(folder)],
            check=False,
            capture_output=True,
        ).returncode
    )
    yield mounted
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(params=stacks(MARIADB, MYSQL_CLONE))
def world(request: pytest.FixtureRequest, short_tmp: Path, keys: Keys, spool_disk: bool) -> Iterator[World]:
    dice = thrown(f"stream campaign {request.param}")
    chosen: Stack = request.param
    with contextlib.ExitStack() as servers:
        server = servers.enter_context(chosen.make(tcp=True, options=OPTIONS))
        server.create_backup_users()
        prepare(server)
        server.execute(f"CREATE TABLE shop.{MOVED} (t DATETIME)")
        house = House(short_tmp, server, keys)
        (house.base / "policies" / "gold.yaml").write_text(STREAMED)
        assert server.port is not None
        port = server.options["port"] = server.port  # MariaDB takes its own name from it
        with Proxy(port) as proxy, catalog_of(house) as catalog:
            client = house.base / "client.cnf"
            client.touch(0o600)
            client.write_text(f"[client]\nuser={USER}\npassword={option_text(PASSWORD)}\n")
            text = house.config.read_text()
            old = next(line for line in text.splitlines() if line.startswith(f"  {SERVER}:"))
            house.config.write_text(
                text.replace(
                    old, f"  {SERVER}: {{host: 127.0.0.1, port: {proxy.port}, defaults_file: {client}, policy: gold}}"
                )
            )
            stream = Stream(house)
            try:
                yield World(
                    house,
                    server,
                    port,
                    proxy,
                    stream,
                    Witness(server, server.base / "witness"),
                    catalog,
                    dice,
                    spool_disk,
                    servers,
                )
            finally:
                stream.kill()


def all_is_archived_or_named(world: World) -> Counter[str]:
    """The stream has ended. Compares every branch with what its server wrote; gives counts."""
    house, catalog, witness = world.house, world.catalog, world.witness
    folder = house.base / "fetched"
    folder.mkdir()
    wiring = Wiring(load_settings(house.config), catalog)
    destination, unsealer = wiring.destination("local"), wiring.unsealer()
    branches = catalog.binlogs.branches(SERVER)
    counts: Counter[str] = Counter({"lives": len(witness.lives), "branches": len(branches)})
    life, parent = 0, None
    for branch in branches:
        archived = fetched(destination, unsealer, branch, folder)
        counts[f"branches, {branch.reason}"] += 1
        if not archived.files:
            continue
        gaps = [gap for gap in catalog.binlogs.gaps(SERVER) if gap.branch == branch.id]
        parts = between_gaps(archived, gaps)
        assert min(archived.files) == branch.first_number
        assert all(is_told(*two, gaps) for two in itertools.pairwise(parts)), (gaps, parts)
        for part in parts:
            life = life_of(branch, part, witness, life)
            theirs = witness.files(life)
            is_last = part is parts[-1] and branch is branches[-1]
            assert unnamed(part, theirs, gaps, until_now=is_last) == []
            if part is parts[-1]:
                assert claimed_in_vain(part, theirs, confirmed_until(catalog, branch.id), world.longest) == []
            if parent is not None and part is parts[0]:
                if branch.reason is BranchReason.FAILOVER:
                    assert branch.fork is not None, branch.note
                    assert missing_before(branch, parent, theirs) == set(), branch
                else:
                    assert fork_is_true(branch, parent, theirs), branch
        counts.update(
            gaps=len(gaps), parts=len(parts), files=len(archived.files), bytes=sum(map(archived.size, archived.files))
        )
        parent = archived
    assert life == len(witness.lives) - 1
    shutil.rmtree(folder)
    return counts


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_whatever_happens_to_a_stream_its_archive_is_right_or_says_what_it_lacks(world: World) -> None:
    many = ROUNDS
    done: Counter[str] = Counter()
    world.stream.ensure()
    until(lambda: bool(world.catalog.binlogs.runs(SERVER)), world.stream.log.read_text)
    world.witness.look()
    counts: Counter[str] = Counter()
    while world.round < many:
        with Clients(lambda: world.server, world.dice, 3, world.longest):
            for _ in range(min(EVERY, many - world.round)):
                name = world.one_round()
                done[name] += 1
                print(f"round {world.round}: {name}")
            world.put_right()
        with world.longest.measured():
            world.server.execute("INSERT INTO shop.t (t) VALUES ('the last one')")
        wait_for_all(world.catalog, world.stream, datetime.now(UTC), 200)
        world.stream.stop()
        world.witness.look()
        counts = all_is_archived_or_named(world)
        print(dict(counts))
        # What was killed while it wrote has left that behind; nothing else is wrong, and one command removes it.
        assert [one for one in world.house.fsck() if one["invariant"] != "no-temporary-file"] == []
        world.house.ok("fsck", "--repair")
        assert world.house.fsck() == []
        text = world.stream.log.read_text()
        assert "Traceback" not in text, text
    print(dict(done), "ended by itself:", world.stream.ended)
    assert counts[f"branches, {BranchReason.FIRST}"] == 1
    assert counts[f"branches, {BranchReason.FAILOVER}"] == done[World.replica_takes_over.__name__] >= 1
    assert counts[f"branches, {BranchReason.RESTORE}"] == 0

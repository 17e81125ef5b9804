"""No acknowledged commit is lost: clients that keep their own record, a server that is killed at any moment and whose
disk is gone, and what the server's own tool reads of what was stored by then."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from backupd.app.context.settings import load_settings, spool_folder
from backupd.app.context.wiring import Wiring
from backupd.binlog.acknowledgement import Evidence
from backupd.binlog.spool_files import Spool
from backupd.catalog.session import Catalog
from tests.support.dice import size, thrown
from tests.support.e2e.disturbed import Stream, fetched
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR, catalog_of, until
from tests.support.ending import end
from tests.support.keys import Keys
from tests.support.logs.writers import SCHEMA, Answered, Key, Writers, committed, lost, none_lost
from tests.support.oracle import DataDiffersError
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server, connect, query
from tests.support.servers.stacks import MARIADB, MYSQL_CLONE, Stack, stacks
from tests.support.stores.s3_server import S3Server

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

ROUNDS = {"spool": size(10, 200), "destination": size(3, 100)}
RESTORED = 20
"""Every so many rounds what was archived is restored, and rows are compared: in soaks only."""
OPTIONS: dict[str, str | int | None] = {
    "innodb_flush_log_at_trx_commit": 1,
    "max_binlog_size": "1M",  # many rotations under load
}
TIMEOUT = size(2, 10)
"""Seconds after which a server goes on without an acknowledgement, where a test waits for that."""
STALL = size(6, 600)
LONG = 60
"""Seconds after which the destination lacks more than a server comes back with as long as clients write at full
speed."""
SLACK = 3.0
"""Seconds for which a machine under load may keep a commit waiting."""
FLOWING = 100
"""Commits that must be answered before the end of a round is thrown."""


@dataclass
class Site:
    """A server that can be begun anew from a template of its disk, and a stream of it. ``acknowledge``: as of the
    policy."""

    stack: Stack
    house: House
    catalog: Catalog
    dice: random.Random
    acknowledge: str
    template: Path
    stream: Stream
    program: str = ""
    known: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def server(self) -> Server:
        return self.house.server

    @property
    def spool(self) -> Path:
        return spool_folder(load_settings(self.house.config), SERVER)

    def new_disk(self) -> None:
        """The server as it was at the beginning, whatever happened to it since."""
        shutil.rmtree(self.server.datadir, ignore_errors=True)
        subprocess.run(
            ["cp", "-a", "--reflink=auto", "--sparse=always", str(self.template), str(self.server.datadir)], check=True
        )
        self.known = len(Spool(self.spool).branches()) if self.spool.exists() else 0

    def disk_is_lost(self) -> None:
        self.server.kill()
        shutil.rmtree(self.server.datadir)

    def attached(self) -> None:
        """Wait until the server has somebody who receives, and acknowledges where that is asked for."""
        if self.acknowledge == "off":
            until(lambda: self.spool.exists() and Spool(self.spool).newest() is not None, self.stream.log.read_text)
        else:
            until(lambda: self.status("clients") == "1", self.stream.log.read_text)

    def status(self, name: str) -> str:
        """One of the server's status variables of semi-synchronous replication."""
        side = "source" if isinstance(self.server, MySQLServer) else "master"
        return str(self.server.query(f"SHOW GLOBAL STATUS LIKE 'Rpl_semi_sync_{side}_{name}'")[0][1])

    def has_begun(self, token: str) -> bool:
        """Has something of that come? A server that waits for an acknowledgement answers nothing before."""
        if self.acknowledge != "off" or not self.spool.exists():
            return self.acknowledge != "off"
        newest = Spool(self.spool).newest()
        return newest is not None and token.encode() in newest.path.read_bytes()

    def evidence(self) -> Evidence | None:
        """What the stream claimed last."""
        found = self.catalog.binlogs.stream_state(SERVER)
        known = found[0].get("acknowledgement") if found else None
        return Evidence.from_json(known) if known else None

    def shown(self, moment: float) -> None:
        """Wait until RPO 0 is shown for a time that ends after ``moment``."""

        def reached() -> bool:
            found = self.evidence()
            return found is not None and found.until is not None and found.until.timestamp() > moment

        until(reached, self.stream.log.read_text)

    def claimed(self, answered: dict[Key, Answered]) -> dict[Key, Answered]:
        """What was answered while RPO 0 held, by what the stream showed."""
        found = self.evidence()
        return {
            key: one
            for key, one in answered.items()
            if found is not None
            and any(window.since.timestamp() <= one.at <= window.until.timestamp() for window in found.windows)
        }

    def stored(self, token: str, *, spooled: bool | None = None) -> dict[Key, int]:
        """What is stored in this moment of the transactions that are marked ``token``; ``spooled``: what only the spool
        has counts, too, by default as the mode says."""
        moment = self.house.base / f"moment-{token}"
        moment.mkdir()
        try:
            with self.stream.held():
                subprocess.run(["cp", "-a", str(self.spool), str(moment / "spool")], check=True)
                if self.house.repository.exists():  # else it is no folder here
                    subprocess.run(["cp", "-al", str(self.house.repository), str(moment / "repository")], check=True)
            counts = self.acknowledge != "destination" if spooled is None else spooled
            return committed(self.program, self._logs(moment, spooled=counts), token)
        finally:
            shutil.rmtree(moment)

    def is_restored(self, token: str, answered: dict[Key, Answered]) -> None:
        """A restore to the end of what is archived holds every row of the transactions that were answered OK, and none
        twice."""
        self.stream.ensure()
        until(lambda: not lost(answered, self.stored(token, spooled=False)), self.stream.log.read_text)
        datadir = self.house.base / "restored"
        outcome = self.house.ok("restore", SERVER, "--to", "latest", "--datadir", str(datadir), "--start")
        try:
            with connect(outcome["started"]["socket"]) as connection:
                rows = query(
                    connection,
                    "SELECT writer, number, COUNT(*), COUNT(DISTINCT part) FROM promise.kept WHERE token = %s"
                    " GROUP BY writer, number",
                    (token,),
                )
        finally:
            end(outcome["started"]["pid"])
            self.house.remove_datadir(datadir)
        held = {(int(writer), int(number)): int(count) for writer, number, count, _parts in rows}
        none_lost(answered, held, f"a restore of {self.stack}, {self.acknowledge}")
        if twice := [row for row in rows if row[2] != row[3]]:
            raise DataDiffersError(f"rows that are there twice: {twice[:20]}")
        print(f"restored: {len(held)} transactions, of {len(answered)} that were answered")

    def _logs(self, moment: Path, *, spooled: bool) -> list[Path]:
        """Every file of the branches of this round: of the spool where that counts, else of the destination."""
        config = moment / "backupd.yaml"
        config.write_text(
            self.house.config.read_text().replace(f"path: {self.house.repository}", f"path: {moment}/repository")
        )
        wiring = Wiring(load_settings(config if self.house.repository.exists() else self.house.config), self.catalog)
        found: dict[tuple[str, int], Path] = {}
        for branch in Spool(moment / "spool").branches()[max(self.known - 1, 0) :]:
            archived = fetched(wiring.destination("local"), wiring.unsealer(), branch, moment)
            found |= {(branch.id, number): path for number, path in archived.files.items()}
            if spooled:
                for path in (moment / "spool" / "branches" / branch.id).glob("binlog.*"):
                    found[branch.id, int(path.suffix[1:])] = path
        return [found[key] for key in sorted(found)]


@contextmanager
def site(stack: Stack, base: Path, keys: Keys, acknowledge: str, *, timeout: float = 600.0) -> Iterator[Site]:
    """``timeout``: seconds after which the server goes on without acknowledgement."""
    dice = thrown(f"promise {stack} {acknowledge}")
    with stack.make(options=OPTIONS) as server:
        server.create_backup_users()
        server.execute(*SCHEMA)
        if acknowledge != "off":
            semi_synchronous(server, timeout)
        server.stop()
        template = base / "template"
        shutil.move(server.datadir, template)
        setting = f", acknowledge: {acknowledge}" if acknowledge != "off" else ""
        house = House(base, server, keys, programs=stack.all_programs())
        (base / "policies" / "gold.yaml").write_text(
            ONCE_A_YEAR + f"binlog: {{stream: true, checkpoint: 1s{setting}}}\n"
        )
        with catalog_of(house) as catalog:
            stream = Stream(house)
            try:
                yield Site(stack, house, catalog, dice, acknowledge, template, stream, stack.replay()[0])
            finally:
                stream.kill()


def semi_synchronous(server: Server, timeout: float) -> None:
    """It waits for an acknowledgement from its next start on."""
    milliseconds = round(timeout * 1000)
    if isinstance(server, MySQLServer):
        server.execute("INSTALL PLUGIN rpl_semi_sync_source SONAME 'semisync_source.so'")
        server.options |= {"rpl_semi_sync_source_enabled": 1, "rpl_semi_sync_source_timeout": milliseconds}
    else:
        server.options |= {
            "rpl_semi_sync_master_enabled": 1,
            "rpl_semi_sync_master_wait_point": "AFTER_SYNC",
            "rpl_semi_sync_master_timeout": milliseconds,
        }


def one_round(site: Site, *, restored: bool = False) -> tuple[dict[Key, Answered], dict[Key, int]]:
    """What was answered, and what was stored when the server and its disk were gone; ``restored``: what a restore holds
    is compared with that, too."""
    token = f"t{site.dice.randrange(2**48):012x}"
    site.new_disk()
    site.server.start()
    site.stream.ensure()
    site.attached()
    if restored:
        site.house.backup()
    with Writers(site.server.socket, site.house.base / "answered", token, site.dice) as writers:
        until(lambda: len(writers.answered()) >= FLOWING and site.has_begun(token), site.stream.log.read_text)
        time.sleep(site.dice.random() * 0.6)
        ends = site.dice.choice(("server", "server", "server, then stream", "stream, then server"))
        site.counts[ends] += 1
        if ends == "stream, then server":
            site.stream.kill()
        site.disk_is_lost()
        if ends == "server, then stream":
            site.stream.kill()
        stored = site.stored(token)
        writers.stop()
        answered = writers.answered()
    if restored:
        site.is_restored(token, answered)
    return answered, stored


def promise(site: Site, rounds: int) -> None:
    """Every round, and what all of them come to."""
    total = 0
    for number in range(rounds):
        answered, stored = one_round(site, restored=number % RESTORED == RESTORED - 1)
        none_lost(answered, stored, f"round {number} of {site.stack}, {site.acknowledge}")
        total += len(answered)
    print(
        f"{site.stack}, acknowledge: {site.acknowledge}: {total} acknowledged, 0 lost in {rounds} rounds"
        f" ({dict(site.counts)}, streams that ended by themselves: {site.stream.ended})"
    )


def slowest(answered: dict[Key, Answered], since: float, until: float) -> tuple[float, float]:
    """p99 and the longest of the commits that were answered in between, in seconds."""
    taken = sorted(one.seconds for one in answered.values() if since <= one.at <= until)
    return (taken[len(taken) * 99 // 100], taken[-1]) if taken else (0.0, 0.0)


BOTH = pytest.mark.parametrize("stack", stacks(MARIADB, MYSQL_CLONE))


@BOTH
@pytest.mark.campaign
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("acknowledge", list(ROUNDS))
def test_no_commit_that_a_client_was_told_of_is_lost_with_its_server(
    stack: Stack, short_tmp: Path, keys: Keys, acknowledge: str
) -> None:
    with site(stack, short_tmp, keys, acknowledge) as there:
        promise(there, ROUNDS[acknowledge])


@BOTH
@pytest.mark.campaign
def test_with_a_stream_that_acknowledges_nothing_the_same_harness_finds_losses(
    stack: Stack, short_tmp: Path, keys: Keys
) -> None:
    with site(stack, short_tmp, keys, "off") as there:
        there.stream.ensure()
        token = "control"
        there.new_disk()
        there.server.start()
        with Writers(there.server.socket, short_tmp / "answered", token, there.dice) as writers:
            until(lambda: there.has_begun(token), there.stream.log.read_text)
            with there.stream.held():
                held = len(writers.answered())
                until(lambda: len(writers.answered()) > held + FLOWING, lambda: "commits")
                there.disk_is_lost()
                there.stream.kill()
            stored = there.stored(token)
            writers.stop()
            answered = writers.answered()
        missing = lost(answered, stored)
        print(f"{stack}: {len(answered)} acknowledged, {len(missing)} lost without acknowledgement")
        assert FLOWING <= len(missing) < len(answered)


@BOTH
def test_a_receiver_that_dies_first_costs_one_timeout_and_the_time_without_it_is_not_claimed(
    stack: Stack, short_tmp: Path, keys: Keys
) -> None:
    with site(stack, short_tmp, keys, "spool", timeout=TIMEOUT) as there:
        there.new_disk()
        there.server.start()
        there.stream.ensure()
        there.attached()
        with Writers(there.server.socket, short_tmp / "answered", "first", there.dice, again=True) as writers:
            there.shown(time.time() + 1)
            there.stream.kill()
            died = time.time()
            until(
                lambda: any(one.at > died + TIMEOUT + 1 for one in writers.answered().values()), lambda: "a commit", 60
            )
            alone = time.time()
            there.stream.ensure()
            there.shown(time.time() + 1)
            there.disk_is_lost()
            stored = there.stored("first")
            writers.stop()
            answered = writers.answered()
        claimed = there.claimed(answered)
        print(
            f"{stack}: {len(answered)} answered, {len(claimed)} of them claimed, {len(lost(answered, stored))} lost; "
            f"p99 and longest: {slowest(answered, 0, died)}, without a receiver {slowest(answered, died, alone)}"
        )
        none_lost(claimed, stored, "claimed")
        assert claimed
        assert not [key for key, one in claimed.items() if died < one.at < alone]
        assert slowest(answered, died, alone)[1] < TIMEOUT + SLACK


@BOTH
@pytest.mark.parametrize("acknowledge", ["off", "spool", "destination"])
def test_a_store_that_stops_answering(
    stack: Stack, short_tmp: Path, keys: Keys, s3_server: S3Server, acknowledge: str
) -> None:
    """What the server's clients feel of it, and that nothing is lost that was claimed."""
    with site(stack, short_tmp, keys, acknowledge, timeout=TIMEOUT) as there:
        bucket = {name: str(value) for name, value in s3_server.bucket(f"stall-{stack}-{acknowledge}").items()}
        config = there.house.config.read_text()
        local = f"{{type: filesystem, path: {there.house.repository}}}"
        assert local in config
        there.house.config.write_text(config.replace(local, json.dumps(bucket)))
        there.new_disk()
        there.server.start()
        there.stream.ensure()
        there.attached()
        with Writers(there.server.socket, short_tmp / "answered", "stall", there.dice, count=4, again=True) as writers:
            until(lambda: len(writers.answered()) > 10 and there.has_begun("stall"), there.stream.log.read_text)
            if acknowledge != "off":
                there.shown(time.time())
            began, back = time.time(), 0.0
            os.kill(s3_server.pid, signal.SIGSTOP)
            try:
                time.sleep(STALL)
            finally:
                os.kill(s3_server.pid, signal.SIGCONT)
            ended = time.time()
            comes_back = acknowledge == "spool" or (acknowledge == "destination" and STALL < LONG)
            if not comes_back:
                time.sleep(2)
            else:  # the server waits again, while clients write
                there.shown(ended + 1)
                back = time.time() - ended
                assert there.status("status") == "ON"
            if comes_back and acknowledge == "destination":  # which commits wait for again
                os.kill(s3_server.pid, signal.SIGSTOP)
                try:
                    time.sleep(0.3)
                    held = len(writers.answered())
                    time.sleep(TIMEOUT / 4)
                    assert len(writers.answered()) == held
                    there.disk_is_lost()
                finally:
                    os.kill(s3_server.pid, signal.SIGCONT)
            else:
                there.disk_is_lost()
            stored = there.stored("stall")
            writers.stop()
            answered = writers.answered()
        claimed = there.claimed(answered)
        felt = slowest(answered, began, ended)
        print(
            f"{stack}, acknowledge: {acknowledge}: {len(answered)} answered, {len(claimed)} of them claimed, "
            f"{len(lost(answered, stored))} lost; p99 and longest: {slowest(answered, 0, began)}, while the store hung "
            f"for {STALL} s {felt}, later {slowest(answered, ended, time.time())}, RPO 0 again after {back:.1f} s"
        )
        none_lost(claimed, stored, "claimed")
        assert bool(claimed) is (acknowledge != "off")
        if acknowledge == "destination":
            assert not [one for one in claimed.values() if began + TIMEOUT < one.at < ended]
        assert felt[1] < (TIMEOUT if acknowledge == "destination" else 0) + SLACK

"""No acknowledged commit is lost: clients that keep their own record, a server that is killed at any moment and whose
disk is gone, and what the server's own tool reads of what was stored by then."""

from __future__ import annotations

import os
import random
import shutil
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
from backupd.binlog.spool_files import Spool
from backupd.catalog.session import Catalog
from tests.support.dice import size, thrown
from tests.support.e2e.disturbed import Stream, fetched
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import ONCE_A_YEAR, catalog_of, until
from tests.support.keys import Keys
from tests.support.logs.writers import SCHEMA, Answered, Key, Writers, committed, lost, none_lost
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.server import Server
from tests.support.servers.stacks import MARIADB, MYSQL_CLONE, Stack, stacks

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a restored copy is given to the server's user")

ROUNDS = size(10, 200)
OPTIONS: dict[str, str | int | None] = {
    "innodb_flush_log_at_trx_commit": 1,
    "max_binlog_size": "1M",  # many rotations under load
}
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

    def has_begun(self, token: str) -> bool:
        """Has something of that come? A server that waits for an acknowledgement answers nothing before."""
        if self.acknowledge != "off" or not self.spool.exists():
            return self.acknowledge != "off"
        newest = Spool(self.spool).newest()
        return newest is not None and token.encode() in newest.path.read_bytes()

    def stored(self, token: str) -> dict[Key, int]:
        """What is stored in this moment of the transactions that are marked ``token``."""
        moment = self.house.base / f"moment-{token}"
        moment.mkdir()
        try:
            with self.stream.held():
                subprocess.run(["cp", "-a", str(self.spool), str(moment / "spool")], check=True)
                subprocess.run(["cp", "-al", str(self.house.repository), str(moment / "repository")], check=True)
            return committed(self.program, self._logs(moment), token)
        finally:
            shutil.rmtree(moment)

    def _logs(self, moment: Path) -> list[Path]:
        """Every file of the branches of this round: of the spool where the mode counts that, else of the
        destination."""
        config = moment / "backupd.yaml"
        config.write_text(
            self.house.config.read_text().replace(f"path: {self.house.repository}", f"path: {moment}/repository")
        )
        wiring = Wiring(load_settings(config), self.catalog)
        found: dict[tuple[str, int], Path] = {}
        for branch in Spool(moment / "spool").branches()[max(self.known - 1, 0) :]:
            archived = fetched(wiring.destination("local"), wiring.unsealer(), branch, moment)
            found |= {(branch.id, number): path for number, path in archived.files.items()}
            if self.acknowledge != "destination":
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


def one_round(site: Site) -> tuple[dict[Key, Answered], dict[Key, int]]:
    """What was answered, and what was stored when the server and its disk were gone."""
    token = f"t{site.dice.randrange(2**48):012x}"
    site.new_disk()
    site.server.start()
    with Writers(site.server.socket, site.house.base / "answered", token, site.dice) as writers:
        site.stream.ensure()
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
    return answered, stored


def promise(site: Site) -> None:
    """Every round, and what all of them come to."""
    total = 0
    for number in range(ROUNDS):
        answered, stored = one_round(site)
        none_lost(answered, stored, f"round {number} of {site.stack}, {site.acknowledge}")
        total += len(answered)
    print(
        f"{site.stack}, acknowledge: {site.acknowledge}: {total} acknowledged, 0 lost in {ROUNDS} rounds"
        f" ({dict(site.counts)}, streams that ended by themselves: {site.stream.ended})"
    )


BOTH = pytest.mark.parametrize("stack", stacks(MARIADB, MYSQL_CLONE))


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

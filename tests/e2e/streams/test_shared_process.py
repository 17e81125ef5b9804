"""Streams of several quiet servers in one process: one real server stands for three, each with a name, a stream and a
spool."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from backupd.app.binlogs.stream_holder import Holder
from backupd.app.context.settings import load_settings, spool_folder
from backupd.app.context.wiring import Wiring
from backupd.catalog.session import Catalog
from tests.e2e.streams.test_streaming import STREAMED
from tests.support.e2e.house import BACKUPD, House
from tests.support.e2e.service import catalog_of, serving, until
from tests.support.logs.streaming import Proxy
from tests.support.servers.server import SERVICE_PASSWORD, SERVICE_USER, Server
from tests.support.service.processes import end_streams_of

SERVERS = ("db1", "db2", "db3")


@dataclass
class Shared:
    house: House
    catalog: Catalog
    proxy: Proxy
    process: subprocess.Popen[bytes]

    def pid(self, name: str) -> int:
        """Of who streams a server."""
        found = Holder.of(Wiring(load_settings(self.house.config), self.catalog), name)
        return found.pid if found is not None else 0

    def write(self) -> datetime:
        self.house.server.execute("INSERT INTO logs.stream VALUES ('x')")
        return datetime.now(UTC)

    def has(self, name: str, moment: datetime) -> bool:
        return any(
            run.confirmed_at is not None and run.confirmed_at >= moment for run in self.catalog.binlogs.runs(name)
        )

    def archived(self, moment: datetime, *names: str) -> None:
        until(lambda: all(self.has(name, moment) for name in names or SERVERS), self.said)

    def said(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in (self.house.base / "streams").glob("*"))


@pytest.fixture
def shared(own_house: House) -> Iterator[Shared]:
    """One process that streams all of them; the third is reached through a proxy."""
    house = own_house
    server = house.server
    server.execute(
        "CREATE DATABASE logs",
        "CREATE TABLE logs.stream (v TEXT)",
        f"CREATE USER {SERVICE_USER}@'127.0.0.1' IDENTIFIED BY '{SERVICE_PASSWORD}'",
        f"GRANT ALL ON *.* TO {SERVICE_USER}@'127.0.0.1'",
        "RESET MASTER",  # a service gives a stream that has much to catch up with a process of its own
    )
    assert server.port is not None
    with Proxy(server.port) as proxy, catalog_of(house) as catalog:
        client = server.client_file(SERVICE_USER, SERVICE_PASSWORD)
        doors = dict.fromkeys(SERVERS, f"socket: {server.socket}") | {"db3": f"host: 127.0.0.1, port: {proxy.port}"}
        text = house.config.read_text()
        begin, end = text.index("servers:"), text.index("destinations:")
        names = "".join(
            f"  {name}: {{{door}, defaults_file: {client}, policy: gold}}\n" for name, door in doors.items()
        )
        house.config.write_text(f"{text[:begin]}servers:\n{names}{text[end:]}")
        (house.base / "policies" / "gold.yaml").write_text(STREAMED)
        with begun(house) as process:
            found = Shared(house, catalog, proxy, process)
            until(lambda: all(found.pid(name) == process.pid for name in SERVERS), found.said)
            with written(server):
                yield found
    end_streams_of(house.config)


@contextmanager
def written(server: Server) -> Iterator[None]:
    """None of them is still, however slow the machine is: a service would gather them."""
    over = threading.Event()

    def write() -> None:
        while not over.wait(2):
            server.execute("INSERT INTO logs.stream VALUES ('meanwhile')")

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def begun(house: House) -> Iterator[subprocess.Popen[bytes]]:
    (house.base / "run").mkdir(exist_ok=True, mode=0o700)
    held = load_settings(house.config).hold(house.base / "run")
    others = [word for name in SERVERS[1:] for word in ("--with", name)]
    words = ["run-stream", SERVERS[0], *others, "--config", str(house.config), "--settings", str(held)]
    with (
        (house.base / "shared.log").open("wb") as log,
        subprocess.Popen([BACKUPD, *words], env=house.environment(), stderr=log, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def test_one_that_stalls_or_fails_takes_no_other_with_it_and_the_service_begins_it_alone(shared: Shared) -> None:
    house, pid = shared.house, shared.process.pid
    shared.archived(shared.write())
    shared.proxy.hangs.set()
    moment = shared.write()
    shared.archived(moment, "db1", "db2")
    assert not shared.has("db3", moment)
    shared.proxy.hangs.clear()
    shared.proxy.cut()
    shared.archived(moment)
    with serving(house) as service:
        until(lambda: service.log.read_text().count("stream-adopted") == len(SERVERS), service.log.read_text)
        spool = spool_folder(load_settings(house.config), "db2")
        spool.rename(house.base / "aside")
        until(lambda: shared.pid("db2") not in (0, pid), service.log.read_text)
        shared.archived(shared.write())
        assert shared.pid("db1") == shared.pid("db3") == pid
        assert service.stop() == 0
        assert shared.process.wait(300) == 0, "nobody is left in it"
    logs = {path.stem: path.read_text() for path in (house.base / "streams").glob("*.log")}
    assert "was removed or moved away" in logs["db2"]
    assert {json.loads(line)["server"] for line in logs["db1"].splitlines()} == {"db1"}


def test_each_is_handed_over_to_another_process_alone(shared: Shared) -> None:
    house, first = shared.house, shared.process.pid
    shared.archived(shared.write())
    policies = house.base / "policies"
    text = house.config.read_text()
    house.config.write_text(text.replace("policy: gold", "policy: other", 1))  # of db1
    (policies / "other.yaml").write_text(STREAMED.replace("checkpoint: 1s", "checkpoint: 2s"))
    with serving(house) as service:
        until(lambda: shared.pid("db1") not in (0, first), service.log.read_text)
        shared.archived(shared.write())
        assert shared.pid("db2") == shared.pid("db3") == first, service.log.read_text() + shared.said()
        assert service.leave() == 0
        house.config.write_text(text)
        with begun(house) as second:  # as a service does where all of them are still
            until(lambda: all(shared.pid(name) == second.pid for name in SERVERS), shared.said)
            shared.archived(shared.write())
            assert shared.process.wait(300) == 0, "nobody is left in it"
            os.kill(second.pid, signal.SIGTERM)
            assert second.wait(60) in (0, 130), "130: the machine was too slow for what it has to end"
    for name in SERVERS:
        assert len(shared.catalog.binlogs.branches(name)) == 1
        assert shared.catalog.binlogs.gaps(name) == ()

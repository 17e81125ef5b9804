"""Streams outlive the service that has started them: real servers, real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import pytest

from backupd.catalog.session import Catalog
from tests.e2e.streams.test_streaming import STREAMED, archived, is_the_servers, state, stream_pid, wait_for, write
from tests.support.e2e.house import SERVER, House
from tests.support.e2e.service import alive, descendants, parent, serving, until
from tests.support.servers.server import query
from tests.support.service.processes import end_streams_of


@pytest.fixture
def house(own_house: House) -> Iterator[House]:
    (own_house.base / "policies" / "gold.yaml").write_text(STREAMED)
    yield own_house
    end_streams_of(own_house.config)


def is_there(pid: int) -> bool:
    """And has not ended: nobody may reap what outlived its parent."""
    return parent(pid) != 0 and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def said(log: Path, event: str) -> list[str]:
    lines = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [str(line["message"]) for line in lines if line["event"] == event]


def handover(house: House) -> str:
    (log,) = (house.base / "streams").glob("*.log")
    return log.read_text()


def test_a_stream_goes_on_when_its_service_is_killed_or_stops_and_the_next_one_adopts_it(
    house: House, catalog: Catalog
) -> None:
    with serving(house, outlived=True) as service:
        wait_for(catalog, write(house, "first"))
        stream = stream_pid(catalog)
        family = {one for one in descendants(service.process.pid) if one[0] != stream}
        service.kill()
        until(lambda: not alive(family), lambda: f"the end of {family}")
    wait_for(catalog, write(house, "while no service ran"))
    assert stream_pid(catalog) == stream
    with serving(house, outlived=True) as service:
        until(lambda: bool(said(service.log, "stream-adopted")), service.log.read_text)
        wait_for(catalog, write(house, "adopted"))
        assert service.leave() == 0
        (left,) = said(service.log, "streams-go-on")
        assert SERVER in left
    wait_for(catalog, write(house, "after a stop"))
    assert stream_pid(catalog) == stream
    with serving(house) as service:
        wait_for(catalog, write(house, "adopted again"))
        assert stream_pid(catalog) == stream
        assert "stream-process" not in service.log.read_text(), "no other one was started"
        assert service.stop() == 0
        assert not is_there(stream)
    assert state(catalog)["state"] == "stopped"
    (branch,) = catalog.binlogs.branches(SERVER)
    is_the_servers(house, archived(house, branch, house.base))
    assert catalog.binlogs.gaps(SERVER) == ()
    assert house.fsck() == []


def test_a_stream_whose_settings_changed_while_no_service_ran_is_replaced_and_one_that_is_unwanted_ends(
    house: House, catalog: Catalog
) -> None:
    policy = house.base / "policies" / "gold.yaml"
    with serving(house, outlived=True) as service:
        wait_for(catalog, write(house, "first"))
        first = stream_pid(catalog)
        service.kill()
    policy.write_text(STREAMED.replace("checkpoint: 1s", "checkpoint: 2s"))
    with serving(house, outlived=True) as service:
        second = stream_pid(catalog, besides=first)
        wait_for(catalog, write(house, "second"))
        until(lambda: not is_there(first), lambda: "the end of the first one")
        assert f"from process {first}" in handover(house)
        service.kill()
    policy.write_text(STREAMED.replace("stream: true", "stream: false"))
    with serving(house) as service:
        until(lambda: not is_there(second), service.log.read_text)
        assert service.stop() == 0
    assert catalog.events.list(kind="stream-failed") == ()


def test_with_settings_with_which_no_stream_can_begin_the_one_before_goes_on(house: House, catalog: Catalog) -> None:
    config = house.config
    with serving(house) as service:
        wait_for(catalog, write(house, "first"))
        first = stream_pid(catalog)
        right = config.read_text()
        gnupg = re.search(r"gnupg_home: *\"?([^\"},\s]+)", right)
        assert gnupg is not None
        empty = house.base / "empty"
        empty.mkdir(mode=0o700)
        config.write_text(right.replace(gnupg[1], str(empty), 1))
        service.reload()
        until(lambda: bool(catalog.events.list(kind="stream-failed")), service.log.read_text)
        wait_for(catalog, write(house, "with the settings of before"))
        assert is_there(first)
        config.write_text(right)
        service.reload()
        second = stream_pid(catalog, besides=first)
        wait_for(catalog, write(house, "with the right ones"))
        until(lambda: not is_there(first), lambda: "the end of the first one")
        assert service.stop() == 0
        assert not is_there(second)


def test_a_stream_whose_spool_was_moved_away_ends_and_the_next_one_begins_another(
    house: House, catalog: Catalog
) -> None:
    spool = house.base / "spool" / "binlogs" / SERVER
    with serving(house) as service:
        wait_for(catalog, write(house, "first"))
        first = stream_pid(catalog)
        spool.rename(house.base / "aside")
        until(lambda: not is_there(first), service.log.read_text)
        second = stream_pid(catalog, besides=first)
        wait_for(catalog, write(house, "second"))
        assert second != first
        assert service.stop() == 0
    assert "was removed or moved away while a stream wrote to it" in handover(house)
    assert len(catalog.binlogs.branches(SERVER)) == 2
    assert house.fsck() == []


@pytest.mark.parametrize("record", ["stale", "of another installation", "reused"])
def test_a_record_that_is_not_true_is_not_believed(house: House, catalog: Catalog, record: str) -> None:
    """The lock's file names a process, and the lock is not held, or by another one."""
    with serving(house) as service:
        wait_for(catalog, write(house, "first"))
        first = stream_pid(catalog)
        lock = house.base / "spool" / "binlogs" / SERVER / "lock"
        note = json.loads(lock.read_text())
        os.kill(first, signal.SIGKILL)
        service.kill()
    words = note["owner"].split(" ")
    stranger = os.getpid()  # it is asked to end where it is believed
    ticks = Path(f"/proc/{stranger}/stat").read_text().rpartition(")")[2].split()[19]
    words[-2:] = [str(stranger), ticks if record != "reused" else words[-1]]
    lock.write_text(
        json.dumps({**note, "owner": " ".join(words), **({"installation": "x"} if "inst" in record else {})})
    )
    with serving(house) as service:
        wait_for(catalog, write(house, "second"))
        assert stream_pid(catalog) not in (first, stranger)
        assert "stream-adopted" not in service.log.read_text()
        assert service.stop() == 0


def test_a_stream_by_hand_is_not_adopted_and_not_replaced(house: House, catalog: Catalog) -> None:
    with house.popen("run-stream", SERVER) as process:
        pid = stream_pid(catalog)
        with serving(house, outlived=True) as service:
            until(lambda: "another stream already writes" in service.log.read_text(), service.log.read_text)
            wait_for(catalog, write(house, "by hand"))
            assert stream_pid(catalog) == pid
            assert service.stop() == 0
        assert is_there(pid)
        process.send_signal(signal.SIGTERM)
        process.communicate()


def test_a_stream_that_is_alone_ends_when_a_service_with_another_spool_has_taken_over(
    house: House, catalog: Catalog
) -> None:
    with serving(house, outlived=True) as service:
        wait_for(catalog, write(house, "first"))
        first = stream_pid(catalog)
        service.kill()
    spool, other = house.base / "spool", house.base / "other"
    other.mkdir(mode=0o700)
    for name in ("identity.key", "signing.key"):
        if (spool / name).exists():
            shutil.copy2(spool / name, other)
    right = house.config.read_text()
    house.config.write_text(right.replace(str(spool), str(other)))
    with serving(house) as service:
        until(lambda: not is_there(first), service.log.read_text, seconds=300)
        wait_for(catalog, datetime.now(UTC))
        assert service.stop() == 0
    house.config.write_text(right)
    assert "another backupd service uses the catalog" in handover(house)


def receivers(house: House) -> set[int]:
    """Ids of the connections that receive the server's binary log."""
    rows = house.server.query("SELECT ID FROM information_schema.PROCESSLIST WHERE COMMAND LIKE 'Binlog Dump%%'")
    return {int(row[0]) for row in rows}


class Growth(threading.Thread):
    """Watches the spool while clients write. ``longest``: seconds in which nothing came; ``slowest``: of a commit;
    ``changes``: how often something came."""

    def __init__(self, house: House, writers: int = 2) -> None:
        super().__init__(daemon=True)
        self._folder = house.base / "spool" / "binlogs" / SERVER / "branches"
        self._house, self._over = house, threading.Event()
        self._writers = [threading.Thread(target=self._write, args=(number,), daemon=True) for number in range(writers)]
        self.longest = self.slowest = 0.0
        self.changes = 0

    def __enter__(self) -> Self:
        for thread in self._writers:
            thread.start()
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        for thread in self._writers:
            thread.join()
        self.join()

    def afresh(self) -> float:
        """What was the longest until now; begin anew."""
        found, self.longest = self.longest, 0.0
        return found

    def goes_on(self) -> None:
        """Wait until it has come again and again."""
        wanted = self.changes + 50
        until(lambda: self.changes > wanted, lambda: f"more of the binary log, after {self.changes}")

    def run(self) -> None:
        size, at = self._size(), time.monotonic()
        while not self._over.is_set():
            time.sleep(0.01)
            now = time.monotonic()
            self.longest = max(self.longest, now - at)
            if (found := self._size()) != size:
                size, at = found, now
                self.changes += 1

    def _write(self, number: int) -> None:
        with self._house.server.connect() as connection:
            while not self._over.is_set():
                begun = time.monotonic()
                query(connection, f"INSERT INTO logs.stream VALUES ('{number} {begun}')")
                self.slowest = max(self.slowest, time.monotonic() - begun)
                time.sleep(0.005)

    def _size(self) -> list[int]:
        return sorted(path.stat().st_size for path in self._folder.rglob("binlog.*"))


def test_under_load_a_killed_service_is_not_noticed_and_a_replacement_is_faster_than_a_timeout(
    house: House, catalog: Catalog
) -> None:
    """Of semi-synchronous replication: 10 s by default."""
    policy = house.base / "policies" / "gold.yaml"
    with serving(house, outlived=True) as service:
        wait_for(catalog, write(house, "first"))
        first = stream_pid(catalog)
        receiving = receivers(house)
        with Growth(house) as growth:
            growth.goes_on()
            service.kill()
            growth.goes_on()
            assert receivers(house) == receiving
            with serving(house, outlived=True) as second:
                assert stream_pid(catalog) == first
                growth.goes_on()
                assert receivers(house) == receiving, "by the connection of before"
                growth.afresh()
                policy.write_text(STREAMED.replace("checkpoint: 1s", "checkpoint: 2s"))
                second.reload()
                stream_pid(catalog, besides=first)
                growth.goes_on()
                replaced = growth.afresh()
                begun = time.monotonic()
                house.run("binlog", "status")
                command = time.monotonic() - begun
                assert second.leave() == 0
    assert replaced < 10 * max(1.0, command), f"a command takes {command:.2f} s on this machine just now"
    with serving(house) as service:
        wait_for(catalog, datetime.now(UTC))
        assert service.stop() == 0
    (branch,) = catalog.binlogs.branches(SERVER)
    is_the_servers(house, archived(house, branch, house.base))
    assert catalog.binlogs.gaps(SERVER) == ()


def test_a_server_that_waits_for_acknowledgements_waits_for_no_timeout_when_its_stream_is_adopted_or_replaced(
    house: House, catalog: Catalog
) -> None:
    def count(name: str) -> str:
        return str(house.server.query(f"SHOW GLOBAL STATUS LIKE 'Rpl_semi_sync_master_{name}'")[0][1])

    acknowledged = STREAMED.replace("checkpoint: 1s", "checkpoint: 1s, acknowledge: spool")
    policy = house.base / "policies" / "gold.yaml"
    policy.write_text(acknowledged)
    house.server.execute(
        "SET GLOBAL rpl_semi_sync_master_wait_point = AFTER_SYNC",
        "SET GLOBAL rpl_semi_sync_master_timeout = 600000",
        "SET GLOBAL rpl_semi_sync_master_enabled = ON",
    )
    with serving(house, outlived=True) as service:
        write(house, "first")
        until(lambda: count("clients") == "1", lambda: f"the attachment: {state(catalog)}")
        write(house, "second")
        until(lambda: count("status") == "ON", lambda: "synchronous commits")
        first = stream_pid(catalog)
        before = count("no_times"), count("no_tx")
        with Growth(house, writers=8) as growth:
            growth.goes_on()
            service.kill()
            growth.goes_on()
            with serving(house, outlived=True) as second:
                assert stream_pid(catalog) == first
                write(house, "adopted")
                adopted, growth.slowest = growth.slowest, 0.0
                policy.write_text(acknowledged.replace("checkpoint: 1s", "checkpoint: 2s"))
                second.reload()
                stream_pid(catalog, besides=first)
                write(house, "replaced")
                until(lambda: count("clients") == "1", lambda: f"the attachment: {state(catalog)}")
                growth.goes_on()
                after = count("no_times"), count("no_tx")
                assert second.leave() == 0
            replaced = growth.slowest
    assert after == before
    assert max(adopted, replaced) < 300, "of 600 s"
    house.server.execute("SET GLOBAL rpl_semi_sync_master_enabled = OFF")

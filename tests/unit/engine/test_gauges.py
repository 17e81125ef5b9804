"""Lag as real replicas tell it, disks as the kernel counts them, and what to make of numbers that lie."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from backupd.engine.server_load import (
    DiskGauge,
    Judge,
    LagGauge,
    PressureWatch,
    Reading,
    datadir_of,
    disk_counters,
    disk_gauges,
    lag_gauges,
    lag_of,
)
from backupd.engine.sql.client import Connection
from backupd.model.errors import ServerError
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER, PrivateServer
from tests.support.servers.replica import catch_up, replica_of
from tests.support.service.processes import until


@dataclass(frozen=True)
class Pair:
    source: PrivateServer
    replica: PrivateServer


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A source and a replica that tells its address. The replica replicates the accounts too."""
    with PrivateServer(tcp=True) as source:
        source.create_backup_users()
        source.execute(
            "GRANT REPLICATION MASTER ADMIN ON *.* TO backupd@localhost",
            "CREATE DATABASE shop",
            "CREATE TABLE shop.t (id INT PRIMARY KEY) ENGINE=InnoDB",
        )
        with replica_of(source, options={"report_host": "127.0.0.1"}) as replica:
            yield Pair(source, replica)


def service(server: PrivateServer) -> Connection:
    return Connection(socket=str(server.socket), user=SERVICE_USER, password=SERVICE_PASSWORD)


# -- what numbers mean


@pytest.mark.parametrize(
    ("rows", "value"),
    [
        ([{"Seconds_Behind_Master": 0}], 0),
        ([{"Seconds_Behind_Source": 93}], 93),
        ([{"Seconds_Behind_Master": 3}, {"Seconds_Behind_Master": 40}], 40),
        ([{"Seconds_Behind_Master": 3605, "SQL_Delay": 3600}], 5),
        ([{"Seconds_Behind_Master": 10, "SQL_Delay": 3600}], 0),
    ],
)
def test_the_worst_channel_counts_and_a_delay_on_purpose_does_not(rows: list[dict[str, Any]], value: float) -> None:
    assert lag_of("db2", rows).value == value


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"Seconds_Behind_Master": None, "Slave_IO_Running": "Yes", "Slave_SQL_Running": "No"},
            "replication is stopped (Slave_IO_Running Yes, Slave_SQL_Running No)",
        ),
        ({"Seconds_Behind_Master": "2E16"}, "it reports 2E16 s"),
        ({"Seconds_Behind_Master": 2e16}, "it reports 2e+16 s"),
        ({"Seconds_Behind_Master": -1}, "it reports -1 s"),
        ({"Seconds_Behind_Master": "soon"}, "it reports soon s"),
        ({"Seconds_Behind_Master": "nan"}, "it reports nan s"),
        ({}, "replication is stopped"),
    ],
)
def test_a_lag_that_nobody_can_believe_is_unknown(row: dict[str, Any], words: str) -> None:
    reading = lag_of("db2", [{"Seconds_Behind_Master": 0}, row])
    assert reading.value is None
    assert words in reading.text


def test_a_replica_that_is_none_any_more_is_unknown() -> None:
    assert lag_of("db2", []) == Reading(None, "the lag of db2 is unknown: it no longer replicates")


# -- real replicas


def test_a_replica_tells_its_own_lag_and_a_stopped_one_is_unknown(pair: Pair) -> None:
    gauges = lag_gauges("db2", service(pair.replica), {})
    assert len(gauges.found) == 1
    gauge = gauges.found[0]
    try:
        until(lambda: gauge.read() == Reading(0.0, "db2 is 0 s behind"))
        pair.replica.execute("STOP SLAVE SQL_THREAD")
        stopped = gauge.read()
        assert stopped.value is None
        assert "Slave_SQL_Running No" in stopped.text
    finally:
        pair.replica.execute("START SLAVE SQL_THREAD")
        gauge.close()


def test_a_replica_that_is_held_up_falls_behind(pair: Pair) -> None:
    gauge = LagGauge("db2", service(pair.replica))
    holder = pair.replica.connect()
    try:
        with holder.cursor() as cursor:
            cursor.execute("LOCK TABLES shop.t WRITE")
            pair.source.execute("INSERT INTO shop.t VALUES (1)")
            until(lambda: (gauge.read().value or 0) >= 1)
        assert gauge.read().text.startswith("db2 is ")
    finally:
        holder.close()
        gauge.close()
    catch_up(pair.source, pair.replica)
    until(lambda: gauge.read().value == 0)
    gauge.close()


def test_a_source_watches_the_replicas_that_are_configured(pair: Pair) -> None:
    port = pair.replica.port
    assert port is not None
    gauges = lag_gauges("db1", service(pair.source), {("127.0.0.1", port): lambda: service(pair.replica)})
    assert gauges.warnings == ()
    (gauge,) = gauges.found
    until(lambda: gauge.read() == Reading(0.0, f"127.0.0.1:{port} is 0 s behind"))
    for gauge in gauges.found:
        gauge.close()


def test_a_source_says_whose_lag_it_cannot_know(pair: Pair) -> None:
    gauges = lag_gauges("db1", service(pair.source), {})
    assert gauges.found == ()
    outside = f"127.0.0.1:{pair.replica.port} is not a server of the configuration"
    assert [outside in text for text in gauges.warnings] == [True]

    def unreachable() -> Connection:
        raise ServerError("no password")

    gauges = lag_gauges("db1", service(pair.source), {("127.0.0.1", pair.replica.port or 0): unreachable})
    assert [text.endswith("cannot be queried: no password") for text in gauges.warnings] == [True]


def test_without_privileges_the_warning_is_the_server_s_own_words(shared_server: PrivateServer) -> None:
    gauges = lag_gauges("db1", service(shared_server), {})
    assert gauges.found == ()
    assert [("for its replicas" in text, "Access denied" in text) for text in gauges.warnings] == [(True, True)]


def test_a_server_alone_has_no_lag_to_watch(shared_server: PrivateServer) -> None:
    root = Connection(socket=str(shared_server.socket), user="root")
    assert lag_gauges("db1", root, {}).warnings == (
        "limits.replica_lag: the server is not a replica and has no replicas: nothing is watched",
    )


def test_a_server_that_goes_away_is_unknown_and_is_asked_again(server: PrivateServer) -> None:
    gauge = LagGauge("db2", service(server))
    assert gauge.read().text.endswith("it no longer replicates")
    server.stop()
    assert gauge.read().value is None
    assert "is unknown" in gauge.read().text
    server.start()
    assert gauge.read().text.endswith("it no longer replicates")
    gauge.close()


# -- disks

STATS = """\
   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 254       0 vda {reads} 8 5 {read_ms} {writes} 3 5 {write_ms} {flying} 9 7 1 2 3 4 5 6
 259       1 nvme0n1p1 1 2 3
"""


def stats(path: Path, reads: int, read_ms: int, writes: int, write_ms: int, flying: int = 0) -> Path:
    path.write_text(STATS.format(reads=reads, read_ms=read_ms, writes=writes, write_ms=write_ms, flying=flying))
    return path


def test_latency_is_the_mean_of_the_requests_between_two_readings(tmp_path: Path) -> None:
    file = stats(tmp_path / "diskstats", 1000, 5000, 2000, 9000)
    gauge = DiskGauge((254, 0), stats=file)
    stats(file, 1010, 5100, 2030, 9900)
    assert gauge.read() == Reading(0.025, "the disk 254:0 takes 25 ms for a request")
    assert gauge.read() == Reading(0.0, "the disk 254:0 is idle")


def test_a_disk_that_finishes_nothing_is_slower_than_the_time_since(tmp_path: Path) -> None:
    moments = iter([100.0, 104.0])
    file = stats(tmp_path / "diskstats", 1, 1, 1, 1, flying=3)
    gauge = DiskGauge((254, 0), stats=file, clock=lambda: next(moments))
    assert gauge.read() == Reading(4.0, "the disk 254:0 has finished no request for 4000 ms")


@pytest.mark.parametrize(
    "text", ["", "254 0 vda 1 2", STATS.format(reads=1, read_ms=1, writes=1, write_ms=1, flying=0)]
)
def test_a_disk_that_is_gone_or_counts_backwards_is_unknown(tmp_path: Path, text: str) -> None:
    file = stats(tmp_path / "diskstats", 1000, 5000, 2000, 9000)
    gauge = DiskGauge((254, 0), stats=file)
    file.write_text(text)
    assert gauge.read().value is None


def test_the_device_under_a_datadir_is_found_or_the_reason_is_said(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    file = tmp_path / "diskstats"
    file.write_text(f"{os.major(device)} {os.minor(device)} disk 1 0 0 1 1 0 0 1 0 0 0\n")
    assert len(disk_gauges(tmp_path, stats=file).found) == 1
    file.write_text("")
    assert "not on a block device that the kernel counts" in disk_gauges(tmp_path, stats=file).warnings[0]
    assert "is not on this host" in disk_gauges(tmp_path / "nowhere", stats=file).warnings[0]
    assert disk_counters("1 2 x", (1, 2)) is None


def test_the_datadir_is_the_server_s_own_word(shared_server: PrivateServer) -> None:
    assert datadir_of(service(shared_server)) == shared_server.datadir


# -- from readings to a reason to wait


def test_work_stops_above_the_limit_and_goes_on_below_half_of_it() -> None:
    judge = Judge(60)
    lags = [10, 60, 93, 61, 45, 30.5, 30, 45, 60, 61]
    assert [judge.judge(Reading(lag, f"lag {lag}")) for lag in lags] == [
        "",
        "",
        "lag 93 > 60 s",
        "lag 61 > 60 s",
        "lag 45, more than half of 60 s",
        "lag 30.5, more than half of 60 s",
        "",
        "",
        "",
        "lag 61 > 60 s",
    ]
    assert Judge(0.05).judge(Reading(0.08, "disk")) == "disk > 50 ms"


def test_what_is_unknown_is_a_reason_and_must_get_well_below_the_limit() -> None:
    judge = Judge(60)
    readings = [Reading(None, "unknown"), Reading(50, "lag 50"), Reading(20, "lag 20")]
    assert [judge.judge(reading) for reading in readings] == ["unknown", "lag 50, more than half of 60 s", ""]


@dataclass
class Dial:
    """A gauge that shows what it was told."""

    value: float | None = 0.0
    closed: bool = False
    stuck: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.stuck.set()

    def read(self) -> Reading:
        self.stuck.wait(300)
        return Reading(self.value, f"dial {self.value}")

    def close(self) -> None:
        self.closed = True


def test_the_watch_tells_the_last_word_of_all_gauges_and_closes_them() -> None:
    first, second = Dial(), Dial(7)
    with PressureWatch([(first, Judge(5)), (second, Judge(5))], interval=0.005) as watch:
        assert watch.pressure == "dial 7 > 5 s"
        first.value = 9
        until(lambda: watch.pressure == "dial 9 > 5 s; dial 7 > 5 s")
        first.value = second.value = 1
        until(lambda: watch.pressure == "")
    assert first.closed
    assert second.closed


def test_a_gauge_that_does_not_answer_is_pressure_after_a_while() -> None:
    now = [0.0]
    dial = Dial()
    with PressureWatch([(dial, Judge(5))], interval=0.005, stale=60, clock=lambda: now[0]) as watch:
        dial.stuck.clear()
        now[0] = 59.0
        assert watch.pressure == ""

        def silent() -> bool:
            now[0] += 61.0  # whatever was on its way when the gauge stopped answering
            return "has not answered for" in watch.pressure

        until(silent)
        dial.stuck.set()
        until(lambda: watch.pressure == "")


def test_without_gauges_there_is_never_pressure() -> None:
    with PressureWatch([]) as watch:
        assert watch.pressure == ""

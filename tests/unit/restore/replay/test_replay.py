"""Replay of real logs onto real copies. The oracle: a replica of the source, or the source when it is quiet."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backupd.engine.server.launch import LaunchedServer
from backupd.model.binlog import ReplayMethod, Stop
from backupd.model.errors import DamagedError, RefusedError
from backupd.model.job import Progress
from backupd.model.server_facts import Position
from tests.support import sample
from tests.support.load import Writers
from tests.support.restores.rolling import (
    Kind,
    Logs,
    Quiet,
    asking,
    both,
    content,
    empty_copy,
    first,
    gtid_of,
    here,
    logs,
    oracle,
    place_before,
    roll,
    running_copy,
)
from tests.support.servers.server import Server

BOTH = both()
MONTH_AGO = time.time() - 40 * 86400
BIG = 20 * 1024 * 1024


def _make_everything(kind: Kind, source: Server) -> None:
    """What is hard to replay: events, triggers, accounts, temporary tables, large and compressed transactions."""
    source.execute(
        "CREATE TABLE shop.precious (id INT PRIMARY KEY, t VARCHAR(20))",
        "CREATE TABLE shop.doomed LIKE shop.precious",
        "CREATE TABLE shop.counted (id INT AUTO_INCREMENT PRIMARY KEY, n INT)",
        "CREATE TRIGGER shop.counts AFTER INSERT ON shop.precious FOR EACH ROW INSERT INTO shop.counted (n) VALUES (1)",
        "INSERT INTO shop.precious VALUES (1, 'a'), (2, 'b'), (3, 'c')",
        "INSERT INTO shop.doomed VALUES (1, 'x')",
        "CREATE EVENT shop.e_plain ON SCHEDULE EVERY 1 DAY DO INSERT INTO shop.counted (n) VALUES (7)",
        "CREATE EVENT shop.e_off ON SCHEDULE EVERY 1 DAY DISABLE COMMENT 'enable' DO SELECT 1",
        "CREATE EVENT shop.e_replica ON SCHEDULE EVERY 1 DAY DISABLE ON SLAVE DO SELECT 1",
        "CREATE EVENT shop.e_turned ON SCHEDULE EVERY 1 DAY DISABLE DO SELECT 1",
        "ALTER EVENT shop.e_turned ENABLE",
        "ALTER EVENT shop.e_plain RENAME TO shop.e_renamed",
        "ALTER EVENT shop.e_off COMMENT 'still off'",
        "CREATE USER carol@'10.0.0.%' IDENTIFIED BY 'Car0l-pass'",
        "GRANT SELECT ON shop.* TO carol@'10.0.0.%'",
        "ALTER TABLE shop.doomed ADD COLUMN more INT DEFAULT 5",
        "FLUSH BINARY LOGS",
    )
    with source.connect() as session, session.cursor() as cursor:
        cursor.execute("SET SESSION binlog_format = STATEMENT")
        cursor.execute("CREATE TEMPORARY TABLE shop.passing (id INT PRIMARY KEY, v INT)")
        cursor.execute("INSERT INTO shop.passing VALUES (1, 10), (2, 20)")
        cursor.execute("INSERT INTO shop.counted (n) SELECT v FROM shop.passing ORDER BY id")
        cursor.execute("DROP TEMPORARY TABLE shop.passing")
    with source.connect(autocommit=False) as session, session.cursor() as cursor:
        if kind.mariadb:
            cursor.execute("SET GLOBAL log_bin_compress = ON")
        else:
            cursor.execute("SET SESSION binlog_transaction_compression = ON")
        cursor.execute("CREATE TABLE shop.large (id INT AUTO_INCREMENT PRIMARY KEY, b LONGTEXT)")
        cursor.execute("INSERT INTO shop.large (b) VALUES (REPEAT('compressible ', 1000)), (REPEAT('z', 500000))")
        session.commit()
        if kind.mariadb:
            cursor.execute("SET GLOBAL log_bin_compress = OFF")
        else:
            cursor.execute("SET SESSION binlog_transaction_compression = OFF")
        for _number in range(BIG // (1 << 20)):
            cursor.execute("INSERT INTO shop.large (b) VALUES (%s)", (os.urandom(1 << 19).hex(),))
        session.commit()


@BOTH
def test_a_copy_stops_just_before_each_disaster_and_goes_on_from_there_to_the_end(kind: Kind, short_tmp: Path) -> None:
    options = {"max_allowed_packet": "64M"} | ({} if kind.mariadb else {"binlog_rows_query_log_events": "ON"})
    with kind.make(tcp=True, options=options) as source, oracle(kind, source) as replica:
        sample.create(source)
        _make_everything(kind, source)
        with Writers(source, 8) as writers:
            for statement in ("DELETE FROM shop.precious", "DROP TABLE shop.doomed"):
                already = writers.transactions
                while writers.transactions < already + 80:
                    time.sleep(0.01)
                source.execute(statement)
                source.execute("FLUSH BINARY LOGS")
        prepared = source.connect()
        with prepared.cursor() as cursor:
            for statement in (
                "XA START 'left','over',3",
                "INSERT INTO shop.counted (n) VALUES (99)",
                "XA END 'left','over',3",
                "XA PREPARE 'left','over',3",
            ):
                cursor.execute(statement)
        stops = [
            place_before(kind, source, "DELETE FROM shop.precious"),
            place_before(kind, source, "DROP TABLE `shop`.`doomed`"),
            here(kind, source),
        ]
        with running_copy(kind, source, empty_copy(kind, short_tmp / "c"), max_allowed_packet="64M") as (server, info):
            start = first(kind)
            for number, stop in enumerate(stops):
                what = logs(source, short_tmp / f"logs-{number}", start, stop)
                for path in what.files:
                    os.utime(path, (MONTH_AGO, MONTH_AGO))
                got = roll(server, info, what)
                assert got.transactions > 50 or stop is stops[-1]
                if stop is not stops[-1]:
                    replica.move(stop)
                with asking(server) as ask:
                    copied = content(kind, ask)
                    wanted = content(kind, source.query if stop is stops[-1] else replica.query)
                    if stop is not stops[-1]:
                        # A replica, too, disables what reaches it.
                        copied.pop("events"), wanted.pop("events")
                    assert copied == wanted
                assert got.prepared_xa == (
                    ()
                    if stop is not stops[-1]
                    else (("'left','over',3",) if kind.mariadb else ("X'6C656674',X'6F766572',3",))
                )
                start = stop.position
            assert ("shop.doomed" in copied) is False
            assert server.log_tail(400).count("ERROR") == 0
        prepared.close()


@BOTH
def test_a_restored_backup_goes_on_where_it_stands_and_one_transaction_is_left_out(
    kind: Kind, quiet: Quiet, short_tmp: Path
) -> None:
    told: list[Progress] = []
    with quiet.running(short_tmp) as (server, info):
        got = roll(server, info, quiet.logs, report=told.append, exclude=[gtid_of(quiet, "UPDATE early.t")])
        assert got.gtids == quiet.stop.gtids
        with asking(server) as ask:
            copied = content(kind, ask)
            assert [row[0] for row in ask("SELECT i FROM early.t ORDER BY i")] == [1, 2, 3]
    assert copied.pop("early.t") != quiet.content["early.t"]
    assert copied == {name: value for name, value in quiet.content.items() if name != "early.t"}
    assert told[0].bytes_done == 0
    assert not (short_tmp / "source").exists()
    left = [path.name for path in (short_tmp / "copy").iterdir() if "relay" in path.name or "backupd" in path.name]
    assert left == []


@BOTH
def test_the_pipe_does_the_same(
    kind: Kind, quiet: Quiet, short_tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where nobody else reads logs with LOAD DATA in them
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with quiet.running(short_tmp) as (server, info):
        got = roll(server, info, quiet.logs, method=ReplayMethod.PIPE)
        assert not list(tmp_path.rglob("SQL_LOAD*"))
        assert got.gtids == quiet.stop.gtids
        with asking(server) as ask:
            assert content(kind, ask) == quiet.content
        if kind.mariadb:
            with pytest.raises(RefusedError, match="cannot leave out"):
                roll(server, info, quiet.logs, method=ReplayMethod.PIPE, exclude=[gtid_of(quiet, "UPDATE early.t")])


@BOTH
@pytest.mark.parametrize("zone", ["SYSTEM", "+03:00"])
def test_statements_give_the_same_in_the_zone_of_the_source_and_one_after_the_other(
    kind: Kind, zone: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if zone != "SYSTEM" and not kind.mariadb:
        pytest.skip("the same for both")
    stack = contextlib.ExitStack()
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TZ", "America/New_York")
        source = stack.enter_context(kind.make(options={"default_time_zone": zone}))
    with stack:
        source.execute(
            "CREATE DATABASE d",
            "CREATE TABLE d.t (id INT PRIMARY KEY)",
            "INSERT INTO d.t VALUES (1)",
            "CREATE TABLE d.u (id INT AUTO_INCREMENT PRIMARY KEY, n INT)",
            "CREATE TABLE d.log (id INT AUTO_INCREMENT PRIMARY KEY, parent INT)",
            "CREATE TRIGGER d.g AFTER INSERT ON d.u FOR EACH ROW INSERT INTO d.log (parent) VALUES (NEW.id)",
            "ALTER TABLE d.t ADD COLUMN made DATETIME DEFAULT NOW()",
            "CREATE TABLE d.s (at DATETIME)",
            "SET SESSION binlog_format = STATEMENT",
            *["INSERT INTO d.u (n) VALUES (1)"] * 40,
            "INSERT INTO d.s VALUES (NOW())",
        )
        end, wanted = here(kind, source), content(kind, source.query)
        with running_copy(kind, source, empty_copy(kind, short_tmp / "c"), workers=4) as (server, info):
            got = roll(server, info, logs(source, short_tmp / "logs", first(kind), end))
            with asking(server) as ask:
                assert content(kind, ask) == wanted
            assert len([warning for warning in got.warnings if "STATEMENT" in warning]) == 1
            assert len(got.warnings) == 1


@BOTH
def test_nothing_to_replay_is_done_at_once(kind: Kind, quiet: Quiet, short_tmp: Path) -> None:
    with quiet.running(short_tmp) as (server, info):
        stop = Stop("branch", quiet.after_base.file, quiet.after_base.pos, quiet.after_base.gtid)
        what = logs(quiet.source, short_tmp / "logs", quiet.after_base, stop)
        assert roll(server, info, what, transactions=0).gtids == quiet.after_base.gtid
        assert roll(server, info, Logs((), quiet.after_base, stop)).transactions == 0
        _refuse_what_does_not_fit(quiet, server, info, short_tmp)


def _refuse_what_does_not_fit(quiet: Quiet, server: LaunchedServer, info: Any, folder: Path) -> None:
    """Nothing of all that touches the copy."""
    one, two, *more = quiet.logs.files
    assert not more
    renamed = folder / f"{two.stem}.000009"
    shutil.copy(two, renamed)
    torn = logs(quiet.source, folder / "torn", quiet.after_base, replace(quiet.stop, pos=quiet.stop.pos - 5))
    inside = logs(quiet.source, folder / "inside", quiet.after_base, replace(quiet.stop, pos=quiet.stop.pos - 31))
    for what, said in (
        (replace(quiet.logs, files=(two, one)), "out of order"),
        (replace(quiet.logs, files=(one, renamed)), "a file is missing"),
        (replace(quiet.logs, files=(one, Path("/tmp/other.000003"))), "different servers"),
        (replace(quiet.logs, files=(one,)), "not in the last"),
        (replace(quiet.logs, files=()), "no binary log was given"),
        (replace(quiet.logs, stop=replace(quiet.stop, pos=quiet.stop.pos - 1)), "bytes, and the stop"),
        (torn, "ends inside an event"),
        (inside, "ends inside a transaction"),
        (replace(quiet.logs, start=replace(quiet.after_base, pos=quiet.after_base.pos + 1)), "not a position between"),
    ):
        with pytest.raises((RefusedError, DamagedError), match=said):
            roll(server, info, what)
    with pytest.raises(DamagedError, match="match their index"):
        roll(server, info, quiet.logs, transactions=3)
    with pytest.raises(RefusedError, match="has the server id"):
        roll(server, info, quiet.logs, server_ids=[server.config.server_id])
    with pytest.raises(RefusedError, match="not in the logs"):
        roll(
            server,
            info,
            quiet.logs,
            exclude=["0-1-77" if quiet.kind.mariadb else "11111111-1111-1111-1111-111111111111:1"],
        )
    hole = Position("", 0, "" if quiet.kind.mariadb else quiet.after_base.gtid.replace("1-", "2-"))
    with pytest.raises(RefusedError, match=r"logs begin after"):
        roll(server, info, replace(quiet.logs, files=(two,), start=hole))

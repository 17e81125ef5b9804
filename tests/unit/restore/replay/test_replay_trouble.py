"""Replays that go wrong, and sources that are not like the others."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backupd.engine import replay_applier
from backupd.engine.relay_logs import CHANNEL, RELAY_LOGS, RelayLog, lay_relay_logs
from backupd.engine.server.sandbox import is_available
from backupd.model.binlog import ReplayMethod
from backupd.model.errors import BackupdError, CancelledError, RefusedError, ServerError
from backupd.model.job import Progress
from backupd.model.server_facts import Position
from restore.replay import replay as replaying
from tests.support import sample
from tests.support.restores.rolling import (
    MARIADB,
    MYSQL,
    Kind,
    Quiet,
    asking,
    both,
    content,
    empty_copy,
    first,
    here,
    logs,
    place_before,
    roll,
    running_copy,
)
from tests.support.servers.datadir import find_program

BOTH = both()


@BOTH
def test_events_with_the_copys_own_server_id_are_skipped_by_the_server_and_that_is_noticed(
    kind: Kind, quiet: Quiet, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "_refuse_own_id", lambda *_: None)
    monkeypatch.setattr(replay_applier, "QUIET_SECONDS", 0.3)
    with (
        quiet.running(short_tmp, server_id=quiet.source.server_id) as (server, info),
        pytest.raises(ServerError, match=r"did not reach the target|stopped before the end") as caught,
    ):
        roll(server, info, quiet.logs)
    if kind.mariadb:  # which reaches the GTID all the same
        assert "counted 0 transactions" in caught.value.detail
        assert "has executed" not in caught.value.detail


@BOTH
def test_a_row_that_the_copy_lacks_ends_the_replay_with_its_place(kind: Kind, quiet: Quiet, short_tmp: Path) -> None:
    with quiet.running(short_tmp) as (server, info):
        with server.connection.connect() as session:
            session.execute("DELETE FROM early.t WHERE i = 3")
        with pytest.raises(ServerError, match="error 1032") as caught:
            roll(server, info, quiet.logs)
        assert "early.t" in caught.value.detail
        assert quiet.logs.files[1].name in caught.value.detail
        assert "older backup" in caught.value.hint
        assert not (short_tmp / "source").exists()


@pytest.fixture
def changed_logs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the relay logs changed before the copy is told of them."""

    def use(change: Any) -> None:
        def wrapped(server: Any, leg: Any) -> tuple[RelayLog, ...]:
            laid = lay_relay_logs(server, leg)
            change([server.config.datadir / log.name for log in laid])
            return laid

        monkeypatch.setattr(replaying, "lay_relay_logs", wrapped)

    return use


def _without_checksum(logs: list[Path]) -> None:
    """One bit of the last event but one is another."""
    data = bytearray(logs[0].read_bytes())
    data[len(data) // 2] ^= 1
    logs[0].write_bytes(data)


@BOTH
def test_a_relay_log_that_is_gone_or_damaged_is_fatal_and_no_copy_is_taken_for_complete(
    kind: Kind, quiet: Quiet, short_tmp: Path, changed_logs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_applier, "QUIET_SECONDS", 0.5)
    for number, change in enumerate((lambda logs: logs[1].unlink(), _without_checksum)):
        with quiet.running(short_tmp / f"{number}") as (server, info):
            changed_logs(change)
            with pytest.raises(BackupdError, match=r"cannot apply|did not reach|before the end|refused a statement"):
                roll(server, info, quiet.logs)


@BOTH
def test_links_in_the_place_of_relay_logs_are_not_followed(kind: Kind, quiet: Quiet, short_tmp: Path) -> None:
    theirs = short_tmp / "theirs"
    theirs.write_text("of somebody else")
    mode = theirs.stat()
    with quiet.running(short_tmp) as (server, info):
        base = f"{RELAY_LOGS}-{CHANNEL}"
        for name in (*(f"{base}.{path.suffix[1:]}" for path in quiet.logs.files), f"{base}.index"):
            (server.config.datadir / name).symlink_to(theirs)
        assert roll(server, info, quiet.logs).gtids == quiet.stop.gtids
        with asking(server) as ask:
            assert content(kind, ask) == quiet.content
    assert theirs.read_text() == "of somebody else"
    assert (theirs.stat().st_mode, theirs.stat().st_uid) == (mode.st_mode, mode.st_uid)


@BOTH
def test_a_cancelled_replay_ends_at_once_and_may_begin_again_where_the_copy_stands(
    kind: Kind, quiet: Quiet, short_tmp: Path
) -> None:
    cancel = threading.Event()

    def stop_early(progress: Progress) -> None:
        if progress.note or progress.bytes_done:
            cancel.set()

    with quiet.running(short_tmp) as (server, info):
        with pytest.raises(CancelledError):
            roll(server, info, quiet.logs, report=stop_early, cancel=cancel)
        assert not (short_tmp / "source").exists()
        with server.connection.connect() as session:
            executed = _executed(kind, session)
        # Where that is in the files nobody knows, so it is told by GTID alone.
        roll(server, info, replace(quiet.logs, start=Position("", 0, executed) if executed else quiet.after_base))
        with asking(server) as ask:
            copied = content(kind, ask)
    # The state of events that the first attempt made is lost with it: such a copy is for looking at.
    assert {**copied, "events": None} == {**quiet.content, "events": None}


def _executed(kind: Kind, session: Any) -> str:
    """Where the copy really stands: its applier has to end for that."""
    if kind.mariadb:
        session.execute("STOP ALL SLAVES")
    else:
        session.execute("STOP REPLICA")
    found = session.scalar("SELECT @@GLOBAL.gtid_slave_pos" if kind.mariadb else "SELECT @@GLOBAL.gtid_executed")
    return "".join(str(found).split())


_CHILD = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tests.support.restores.rolling import MARIADB, Logs, roll, running_copy
from backupd.model.binlog import Stop
from backupd.model.server_facts import Position
place, socket, program, server_id, start_file, pos, gtid, stop_file, stop_pos, stop_gtid, *files = sys.argv[1:]
source = SimpleNamespace(socket=socket, program=lambda: program, server_id=int(server_id))
what = Logs(tuple(map(Path, files)), Position(start_file, int(pos), gtid),
            Stop("branch", stop_file, int(stop_pos), stop_gtid))
with running_copy(MARIADB, source, Path(place) / "copy") as (server, info):
    roll(server, info, what, report=lambda p: print(p.note, flush=True) if p.note else None)
"""


def test_what_a_killed_replay_left_is_no_obstacle(quiet_mariadb: Quiet, short_tmp: Path) -> None:
    quiet = quiet_mariadb
    quiet.copy(short_tmp)
    start, stop = quiet.after_base, quiet.stop
    words = [
        short_tmp,
        quiet.source.socket,
        quiet.source.program(),
        quiet.source.server_id,
        start.file,
        start.pos,
        start.gtid,
        stop.file,
        stop.pos,
        stop.gtids,
        *quiet.logs.files,
    ]
    with subprocess.Popen([sys.executable, "-c", _CHILD, *map(str, words)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    assert [path for path in (short_tmp / "copy").iterdir() if "relay" in path.name]
    with running_copy(MARIADB, quiet.source, short_tmp / "copy") as (server, info):
        with server.connection.connect() as session:
            stands = str(session.scalar("SELECT @@GLOBAL.gtid_slave_pos"))
        roll(server, info, replace(quiet.logs, start=Position("", 0, stands or start.gtid)))
        with asking(server) as ask:
            assert {**content(MARIADB, ask), "events": None} == {**quiet.content, "events": None}
    assert not [path for path in (short_tmp / "copy").iterdir() if "relay" in path.name]
    assert not (short_tmp / "source").exists()


def test_the_copy_connects_nowhere_and_keeps_nothing_of_the_replay(
    quiet_mariadb: Quiet, short_tmp: Path, changed_logs: Any
) -> None:
    owners: list[tuple[str, int]] = []
    changed_logs(lambda logs: owners.extend((path.owner(), path.stat().st_mode & 0o777) for path in logs))
    with quiet_mariadb.running(short_tmp) as (server, info):
        roll(server, info, quiet_mariadb.logs)
        if is_available():
            assert Path(f"/proc/{server.pid}/net/tcp").read_text().count("\n") == 1
        assert owners == [(server.config.datadir.owner(), 0o640)] * 2
        with server.connection.connect() as session:
            assert session.query("SHOW ALL SLAVES STATUS") == []
    with running_copy(MARIADB, quiet_mariadb.source, short_tmp / "copy") as (server, info), asking(server) as ask:
        assert [row[0] for row in ask("SELECT User FROM mysql.user WHERE User LIKE 'backupd%'")] == ["backupd_private"]


@pytest.mark.skipif(bool(MYSQL.why_not()), reason=MYSQL.why_not() or "-")
def test_mysql_without_gtids_and_with_gtids_switched_on_in_between(short_tmp: Path) -> None:
    with MYSQL.make(options={"gtid_mode": "OFF", "enforce_gtid_consistency": "OFF"}) as source:
        sample.create(source)
        source.execute(
            "XA START 'x'",
            "INSERT INTO bank.accounts (id, balance) VALUES (9000, 1)",
            "XA END 'x'",
            "XA PREPARE 'x'",
            "XA COMMIT 'x'",
        )
        before, held = here(MYSQL, source), content(MYSQL, source.query)
        source.execute(
            "CREATE TABLE shop.copied AS SELECT * FROM shop.orders LIMIT 50",
            "SET GLOBAL gtid_mode = OFF_PERMISSIVE",
            "INSERT INTO bank.accounts (id, balance) VALUES (9001, 1)",
            "SET GLOBAL enforce_gtid_consistency = ON",
            "SET GLOBAL gtid_mode = ON_PERMISSIVE",
            "INSERT INTO bank.accounts (id, balance) VALUES (9002, 2)",
            "SET GLOBAL gtid_mode = ON",
            "FLUSH BINARY LOGS",
            "INSERT INTO bank.accounts (id, balance) VALUES (9003, 3)",
        )
        end = here(MYSQL, source)
        one = logs(source, short_tmp / "one", first(MYSQL), before)
        two = logs(source, short_tmp / "two", before.position, end)
        with running_copy(MYSQL, source, empty_copy(MYSQL, short_tmp / "c")) as (server, info):
            got = roll(server, info, one)
            assert (got.gtids, got.transactions > 20) == ("", True)
            with asking(server) as ask:
                assert content(MYSQL, ask) == held
            assert roll(server, info, two).gtids == end.gtids
            with asking(server) as ask:
                assert content(MYSQL, ask) == content(MYSQL, source.query)


def test_gtids_that_come_twice_and_in_any_order_are_replayed_by_place_through_the_pipe_alone(short_tmp: Path) -> None:
    with MARIADB.make(options={"gtid_strict_mode": 0}) as source:
        source.execute(
            "CREATE DATABASE d",
            "CREATE TABLE d.t (i INT PRIMARY KEY) WITH SYSTEM VERSIONING",
            "SET SESSION gtid_seq_no = 100",
            "INSERT INTO d.t VALUES (1)",
            "INSERT INTO d.t VALUES (2)",
            "SET SESSION gtid_seq_no = 100",
            "INSERT INTO d.t VALUES (3)",
            "INSERT INTO d.t VALUES (4)",
            "SET SESSION system_versioning_alter_history = KEEP",
            "ALTER TABLE d.t ADD COLUMN j INT DEFAULT 3",
        )
        end = here(MARIADB, source)
        what = logs(source, short_tmp / "logs", first(MARIADB), end)
        copy = empty_copy(MARIADB, short_tmp / "c")
        with running_copy(MARIADB, source, copy) as (server, info), asking(server) as ask:
            with pytest.raises(RefusedError, match="a GTID twice") as caught:
                roll(server, info, what)
            assert "--replay-with pipe" in caught.value.hint
            assert not ask("SHOW DATABASES LIKE 'd'")
            assert roll(server, info, what, method=ReplayMethod.PIPE).gtids == end.gtids
            assert content(MARIADB, ask) == content(MARIADB, source.query)


def test_a_folder_of_a_tables_own_is_no_matter_of_the_way_of_replaying() -> None:
    failed = replay_applier.hint_of_statement(
        "Error on query. Query: 'CREATE TABLE t (a INT) data\ndirectory=\"/srv\"'"
    )
    assert "pipe" not in failed
    assert "DATA DIRECTORY" in failed
    assert replay_applier.hint_of_statement("Error on query. Query: 'CREATE TABLE data (directory INT)'") == ""
    # MySQL before 8.0 does not tell the statement.
    assert "DATA DIRECTORY" in replay_applier.hint_of_statement("ERROR 1030 (HY000): Got error 168 from storage engine")


def test_mariadb_with_domains_and_strict_mode_and_a_state_ahead_of_the_position(short_tmp: Path) -> None:
    options = {"gtid_strict_mode": 1, "binlog_checksum": "NONE"}
    with MARIADB.make(options=options) as source:
        source.execute("CREATE DATABASE d", "CREATE TABLE d.t0 (i INT PRIMARY KEY)")
        ahead = here(MARIADB, source)
        source.execute(*(f"CREATE TABLE d.t{n} (i INT PRIMARY KEY)" for n in (1, 2)))
        for number in range(40):
            source.execute(
                f"SET SESSION gtid_domain_id = {number % 3}", f"INSERT INTO d.t{number % 3} VALUES ({number})"
            )
            if number == 20:
                source.execute("SET GLOBAL binlog_checksum = CRC32")
        source.execute("SET SESSION gtid_domain_id = 0")
        end = here(MARIADB, source)
        unwanted = [place_before(MARIADB, source, f"INSERT INTO d.t{n % 3} VALUES ({n})").next_gtid for n in (7, 23)]
        copy = empty_copy(MARIADB, short_tmp / "c")
        with running_copy(MARIADB, source, copy, workers=4, gtid_strict_mode="ON") as (server, info):
            roll(server, info, logs(source, short_tmp / "a", first(MARIADB), ahead))
            start = replace(first(MARIADB), gtid=ahead.gtids)
            got = roll(server, info, logs(source, short_tmp / "b", start, end), exclude=unwanted)
            assert (got.gtids, got.transactions) == (end.gtids, 2 + 40 - 2)
            with asking(server) as ask:
                for n in range(3):
                    wanted = {row[0] for row in source.query(f"SELECT i FROM d.t{n}")} - {7, 23}
                    assert {row[0] for row in ask(f"SELECT i FROM d.t{n}")} == wanted


def test_logs_of_a_source_that_encrypts_them_come_in_clear_and_are_replayed(short_tmp: Path) -> None:
    keys = short_tmp / "keys"
    keys.write_text("1;" + "ab" * 32)
    keys.chmod(0o644)
    options = {"encrypt_binlog": 1, "plugin_load_add": "file_key_management", "file_key_management_filename": str(keys)}
    with MARIADB.make(options=options) as source:
        sample.create(source)
        end = here(MARIADB, source)
        assert (source.datadir / end.file).read_bytes()[300:].count(b"bank") == 0
        what = logs(source, short_tmp / "logs", first(MARIADB), end)
        subprocess.run(
            [
                find_program("mariadb-binlog"),
                f"--defaults-file={source.client_file()}",
                "--raw",
                "--read-from-remote-server",
                f"--result-file={short_tmp}/logs/",
                end.file,
            ],
            check=True,
        )
        (path,) = what.files
        path.write_bytes(path.read_bytes()[: end.pos])
        with running_copy(MARIADB, source, empty_copy(MARIADB, short_tmp / "c")) as (server, info):
            roll(server, info, what)
            with asking(server) as ask:
                assert content(MARIADB, ask) == content(MARIADB, source.query)

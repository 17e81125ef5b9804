"""What this project tells xtrabackup and makes of its answers. The real tool is absent from most machines: where the
trouble is the point, a stand-in plays it (tests/support/standin.py); test_traps is for the real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pymysql
import pytest

from backupd.engine.physical.capture import Capture, CaptureRequest, End, FileEvent
from backupd.engine.physical.mariabackup_xtrabackup import XtraBackup
from backupd.engine.server.backup_files import XTRABACKUP, parse_receipts
from backupd.engine.sql.client import Connection
from backupd.model.errors import (
    CancelledError,
    RefusedError,
    ServerError,
    StreamError,
    ToolError,
)
from backupd.model.server_facts import Position, Receipts, Tool, Version
from backupd.process.runtime import passable_directory
from tests.support.logs.stream import Folder, end, sparse, whole
from tests.support.servers.backups import children, connection_to
from tests.support.servers.mariadb import BACKUP_PASSWORD, BACKUP_USER, PrivateServer
from tests.support.standin import Knobs, StandIn, make
from tests.support.xtrabackup_files import (
    BACKUP_LOG,
    COMPLETED,
    DATA,
    FIRST,
    FULL,
    FULL_8,
    OTHER_UUID,
    SECOND,
    SLAVE_INFO_FILE,
    SLAVE_INFO_GTID,
    UUID,
    tool_at,
)

LAST_FILES = tuple(FULL)


def stream_of(files: Mapping[str, bytes]) -> bytes:
    return b"".join(whole(path, content) if content else end(path) for path, content in files.items())


@pytest.fixture
def place(short_tmp: Path) -> Path:
    return short_tmp


class Run:
    """One capture of a stand-in: what it delivered, and what was raised."""

    def __init__(
        self,
        place: Path,
        server: PrivateServer,
        files: Mapping[str, bytes] | None = None,
        *,
        stream: bytes = b"",
        version: str = "2.4.4",
        connection: Connection | None = None,
        replica: bool = False,
        lsn: int | None = None,
        cancel: threading.Event | None = None,
        **knobs: Any,
    ) -> None:
        content = stream or stream_of({**DATA, **FULL} if files is None else files)
        self.standin: StandIn = make(place / "standin", content, Knobs(version=version, **knobs))
        self.work = place / "work"
        self.work.mkdir()
        self.log = place / "log"
        self.runtime = passable_directory()
        tool = Tool("xtrabackup", str(self.standin.path), Version.parse(version), "")
        self.capture: Capture = XtraBackup(tool, XTRABACKUP).capture(
            CaptureRequest(
                connection or connection_to(server),
                self.work,
                parallel=3,
                incremental_lsn=lsn,
                replica=replica,
                log=self.log,
                cancel=cancel,
            )
        )
        self.folder = Folder()

    def __call__(self) -> Receipts:
        with self.capture as capture:
            for event in capture.events():
                self.folder.take(event)
            return capture.receipts()


class TestTheCommandLine:
    @pytest.mark.parametrize(
        ("version", "lacks", "expected"),
        [
            (
                "2.4.4",
                ["--backup-lock-timeout", "--lock-ddl", "--lock-ddl-timeout"],
                [
                    "--no-version-check",
                    "--ftwrl-wait-timeout=180",
                    "--ftwrl-wait-threshold=10",
                    "--ftwrl-wait-query-type=all",
                ],
            ),
            (
                "2.4.29",
                [],
                [
                    "--no-version-check",
                    "--ftwrl-wait-timeout=180",
                    "--ftwrl-wait-threshold=10",
                    "--ftwrl-wait-query-type=all",
                    "--backup-lock-timeout=25",
                ],
            ),
            (
                "8.0.6",
                ["--backup-lock-timeout"],
                [
                    "--no-version-check",
                    "--ftwrl-wait-timeout=180",
                    "--ftwrl-wait-threshold=10",
                    "--ftwrl-wait-query-type=all",
                    "--lock-ddl",
                    "--lock-ddl-timeout=300",
                ],
            ),
            (
                "8.0.35-31",
                [],
                [
                    "--no-version-check",
                    "--ftwrl-wait-timeout=180",
                    "--ftwrl-wait-threshold=10",
                    "--ftwrl-wait-query-type=all",
                    "--backup-lock-timeout=25",
                    "--lock-ddl-timeout=300",
                ],
            ),
            (
                "9.1.0-1",
                ["--no-version-check"],
                [
                    "--ftwrl-wait-timeout=180",
                    "--ftwrl-wait-threshold=10",
                    "--ftwrl-wait-query-type=all",
                    "--backup-lock-timeout=25",
                    "--lock-ddl-timeout=300",
                ],
            ),
        ],
    )
    def test_of_a_full_backup_has_the_options_that_this_build_knows(
        self, place: Path, shared_server: PrivateServer, version: str, lacks: list[str], expected: list[str]
    ) -> None:
        run = Run(place, shared_server, version=version, lacks=lacks)
        run()
        first, *rest = run.standin.arguments
        assert first.startswith(f"--defaults-file={run.runtime}/")
        assert rest == [
            f"--datadir={shared_server.scalar('SELECT @@datadir')}",
            *expected,
            "--backup",
            "--stream=xbstream",
            f"--target-dir={run.work}/target",
            f"--extra-lsndir={run.work}/lsn",
            "--parallel=3",
            "--open-files-limit=65536",
        ]

    def test_a_program_that_does_not_list_its_options_is_refused(
        self, place: Path, shared_server: PrivateServer
    ) -> None:
        run = Run(place, shared_server, lacks=["--backup"])
        with pytest.raises(ToolError, match="--help does not list its options"):
            run()

    def test_of_an_increment_on_a_replica_has_two_more(self, place: Path, shared_server: PrivateServer) -> None:
        run = Run(
            place,
            shared_server,
            {**DATA, "xtrabackup_slave_info": SLAVE_INFO_GTID, **FIRST},
            lsn=331411436,
            replica=True,
        )
        assert run().backup_type == "incremental"
        assert run.standin.arguments[-2:] == ["--incremental-lsn=331411436", "--slave-info"]
        assert run.capture.receipts().replica_of == SLAVE_INFO_GTID.decode().strip()

    def test_the_password_is_in_the_option_file_only_and_that_is_gone_afterwards(
        self, place: Path, shared_server: PrivateServer
    ) -> None:
        run = Run(place, shared_server)
        run()
        assert run.standin.option_file == "".join(
            f'[{group}]\nuser="backup"\npassword="{BACKUP_PASSWORD}"\nsocket="{shared_server.socket}"\n'
            for group in ("client", "xtrabackup")
        )
        assert BACKUP_PASSWORD not in " ".join(run.standin.arguments)
        assert not list(run.runtime.glob("c*"))
        assert run.standin.login_file.is_absolute()
        assert not run.standin.login_file.exists()

    def test_what_the_tool_does_not_know_is_said_in_its_own_words(self) -> None:
        over_tcp = Connection(host="localhost", port=3307, user="b", ssl={"ca": "/ca.pem", "verify-server-cert": ""})
        groups = tool_at("/x", "8.0.35").groups(over_tcp)
        assert groups["client"] == {
            "user": "b",
            "host": "127.0.0.1",
            "port": "3307",
            "ssl-ca": "/ca.pem",
            "ssl-mode": "VERIFY_IDENTITY",
        }
        with pytest.raises(RefusedError, match="cannot encrypt its connection to localhost:3307"):
            tool_at("/x", "2.4.4").groups(over_tcp)

    def test_a_server_that_does_not_answer_is_an_error_before_the_tool_runs(
        self, place: Path, shared_server: PrivateServer
    ) -> None:
        run = Run(place, shared_server, connection=Connection(socket=str(place / "nothing"), user="x"))
        with pytest.raises(ServerError, match="cannot connect"):
            run()
        assert not (run.standin.folder / "argv.json").exists()


class TestAStream:
    def test_with_everything_in_it_is_a_backup(self, place: Path, shared_server: PrivateServer) -> None:
        run = Run(place, shared_server, before=BACKUP_LOG[:9], after=BACKUP_LOG[9:])
        receipts = run()
        assert run.folder.files == {**DATA, **FULL}
        assert receipts.position == Position("mysql-bin.000001", 205557656, f"{UUID}:1-7823")
        assert (receipts.to_lsn, receipts.last_lsn) == (331411436, 335103835)
        assert run.capture.log_tail.splitlines()[-1] == COMPLETED
        assert run.capture.receipts() == receipts

    def test_may_have_holes(self, place: Path, shared_server: PrivateServer) -> None:
        stream = sparse("shop/holes.ibd", [(0, b"head"), (8192, b"tail")]) + end("shop/holes.ibd")
        run = Run(place, shared_server, stream=stream + stream_of({**DATA, **FULL}))
        run()
        assert run.folder.holes["shop/holes.ibd"] == [(4, 8192)]
        assert run.folder.files["shop/holes.ibd"] == b"head" + bytes(8192) + b"tail"

    def test_of_reduced_locking_has_ordinary_files_for_prepare(self, place: Path, shared_server: PrivateServer) -> None:
        special = {
            f"shop/t{suffix}": b"x"
            for suffix in (".ibd.new", ".ibd.del", ".ibd.ren", ".ibd.crpt", ".ibd.new.meta", ".ibd.new.delta")
        }
        run = Run(place, shared_server, {**special, **FULL}, version="8.4.0")
        run()
        assert special.items() <= run.folder.files.items()

    @pytest.mark.parametrize("suffix", [".qp", ".zst", ".lz4", ".xbcrypt"])
    def test_that_is_compressed_or_encrypted_is_refused(
        self, place: Path, shared_server: PrivateServer, suffix: str
    ) -> None:
        run = Run(place, shared_server, {f"shop/orders.ibd{suffix}": b"?", **FULL})
        with pytest.raises(StreamError, match=rf"shop/orders\.ibd\{suffix}") as caught:
            run()
        assert "option file" in caught.value.hint

    @pytest.mark.parametrize("kept", range(len(LAST_FILES)))
    def test_cut_between_any_two_of_its_last_files_is_noticed(
        self, place: Path, shared_server: PrivateServer, kept: int
    ) -> None:
        files = {**DATA, **{name: FULL[name] for name in LAST_FILES[:kept]}}
        with pytest.raises(StreamError, match=r"no checkpoints file|lacks"):
            Run(place, shared_server, files)()

    def test_cut_in_its_last_chunk_is_noticed(self, place: Path, shared_server: PrivateServer) -> None:
        size = len(stream_of({**DATA, **FULL}))
        with pytest.raises(StreamError):
            Run(place, shared_server, cut=size - 3)()

    @pytest.mark.parametrize(
        "name", ["xtrabackup_checkpoints", "xtrabackup_info", "xtrabackup_binlog_info", "backup-my.cnf"]
    )
    def test_without_one_receipt_is_noticed(self, place: Path, shared_server: PrivateServer, name: str) -> None:
        files = {path: content for path, content in {**DATA, **FULL}.items() if path != name}
        with pytest.raises(StreamError, match=name if "checkpoints" not in name else "no checkpoints file"):
            Run(place, shared_server, files)()

    def test_of_another_kind_or_start_than_asked_for_is_noticed(
        self, place: Path, shared_server: PrivateServer
    ) -> None:
        (place / "a").mkdir()
        with pytest.raises(StreamError, match="of type full-backuped, not incremental"):
            Run(place / "a", shared_server, lsn=331411436)()
        (place / "b").mkdir()
        with pytest.raises(StreamError, match="not since 7"):
            Run(place / "b", shared_server, {**DATA, **FIRST}, lsn=7)()


class TestTheToolFails:
    @pytest.mark.parametrize(
        ("line", "hint"),
        [
            (
                "Failed to connect to MySQL server: Access denied for user 'bkp'@'localhost' (using password: YES).",
                "wrong user or password",
            ),
            (
                (
                    "Error: failed to execute query FLUSH NO_WRITE_TO_BINLOG TABLES: Access denied; you need the "
                    "RELOAD privilege"
                ),
                "backupd check",
            ),
            (
                (
                    "xtrabackup: error: log block numbers mismatch: it looks like InnoDB log has wrapped around "
                    "before xtrabackup"
                ),
                "innodb_log_file_size",
            ),
            ("[01] xtrabackup: Database page corruption detected at page 1000, retrying...", "CHECK TABLE"),
            (
                "Error: failed to execute query SET SESSION lock_wait_timeout=31536000: MySQL server has gone away",
                "error log",
            ),
            ("Can't change dir to '/var/lib/mysql' (Errcode: 2 - No such file or directory)", "server's host"),
            ("InnoDB: Operating system error number 13 in a file operation.", "who may read"),
            (
                "2026-11-21T02:03:34.1+00:00 0 [ERROR] [MY-011825] [Xtrabackup] Unsupported server version 8.0.99",
                "newest",
            ),
        ],
    )
    def test_with_its_own_words_and_what_helps(
        self, place: Path, shared_server: PrivateServer, line: str, hint: str
    ) -> None:
        run = Run(place, shared_server, before=[line], cut=0, last="", exit_code=1)
        with pytest.raises(ToolError, match="exited with 1") as caught:
            run()
        assert line in caught.value.detail
        assert hint in caught.value.hint

    def test_when_it_waited_too_long_for_statements_that_are_not_shown(
        self, place: Path, shared_server: PrivateServer
    ) -> None:
        waiting = "261121 02:11:40 Waiting for query 17 (duration 5 sec): SELECT * FROM customers\nWHERE n='secretword'"
        run = Run(
            place,
            shared_server,
            before=[*BACKUP_LOG[:8], waiting],
            cut=300,
            exit_code=1,
            open_end=True,
            last="Unable to obtain lock. Please try again later.",
        )
        with pytest.raises(ToolError) as caught:
            run()
        assert "SHOW PROCESSLIST" in caught.value.hint
        assert caught.value.detail.splitlines()[-1] == "Unable to obtain lock. Please try again later."
        for text in (str(caught.value), run.log.read_text()):
            assert "secretword" not in text
            assert "customers" not in text

    @pytest.mark.parametrize("last", ["", "261121 02:03:35 completed", "xtrabackup: completed OK! (not)"])
    def test_with_exit_code_0_and_no_end_mark(self, place: Path, shared_server: PrivateServer, last: str) -> None:
        with pytest.raises(ToolError, match="did not print 'completed OK!'"):
            Run(place, shared_server, last=last)()

    def test_with_the_end_mark_and_another_exit_code(self, place: Path, shared_server: PrivateServer) -> None:
        with pytest.raises(ToolError, match="exited with 3"):
            Run(place, shared_server, exit_code=3)()

    def test_to_hear_when_asked_to_stop_and_is_killed(self, place: Path, shared_server: PrivateServer) -> None:
        cancel = threading.Event()
        run = Run(place, shared_server, cancel=cancel, wait_at=100, deaf=True)
        with pytest.raises(CancelledError), run.capture as capture:
            for _event in capture.events():
                cancel.set()
        assert not children(str(run.work))

    def test_to_end_after_the_reader_left_and_is_killed(self, place: Path, shared_server: PrivateServer) -> None:
        run = Run(place, shared_server, wait_at=100, deaf=True)
        with run.capture as capture:
            next(capture.events())
        assert not children(str(run.work))


class TestTheGlobalReadLock:
    @pytest.fixture
    def blocked(self, server: PrivateServer) -> Iterator[PrivateServer]:
        """A server where somebody holds a table, and the tool's account waits for the global read lock."""
        server.execute("CREATE DATABASE shop", "CREATE TABLE shop.t (i INT PRIMARY KEY)")
        holder = server.connect()
        waiter = server.connect(user=BACKUP_USER, password=BACKUP_PASSWORD)

        def wait() -> None:
            try:
                waiter.query("FLUSH TABLES WITH READ LOCK")
            except pymysql.err.Error as error:
                ended.append(error)

        ended: list[pymysql.err.Error] = []
        holder.query("LOCK TABLES shop.t WRITE")
        thread = threading.Thread(target=wait)
        thread.start()
        try:
            self.until(lambda: self.waiting(server) == 1)
            yield server
        finally:
            holder.close()
            thread.join(120)
            waiter.close()
        assert len(ended) == 1

    @staticmethod
    def waiting(server: PrivateServer) -> int:
        return int(server.scalar("SELECT COUNT(*) FROM information_schema.processlist WHERE info LIKE 'FLUSH TABLES%'"))

    @staticmethod
    def until(condition: Any) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_that_is_waited_for_too_long_is_given_up_with_tool_and_statement(
        self, place: Path, blocked: PrivateServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(XtraBackup, "lock_seconds", 0.2)
        lines = [*BACKUP_LOG[:9], "261121 02:03:35 >> log scanned up to (334470649)"]
        run = Run(place, blocked, before=lines, wait_at=100, deaf=True)
        with pytest.raises(ToolError, match=r"did not get its lock within 0\.2 s") as caught:
            run()
        assert "SHOW PROCESSLIST" in caught.value.hint
        assert "FLUSH TABLES WITH READ LOCK" in caught.value.detail
        self.until(lambda: self.waiting(blocked) == 0)
        assert not children(str(run.work))

    def test_that_is_got_in_time_ends_the_watch(
        self, place: Path, shared_server: PrivateServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(XtraBackup, "lock_seconds", 2.0)
        run = Run(place, shared_server, before=BACKUP_LOG[:10], wait_at=100)
        timer = threading.Timer(3.0, run.standin.go)
        timer.start()
        assert run().backup_type == "full-backuped"
        timer.join()


class TestReceipts:
    def test_of_version_8_with_several_sources_of_gtids(self) -> None:
        receipts = parse_receipts(FULL_8)
        assert receipts.position == Position("binlog.000003", 1577, f"{UUID}:1-5:7-9,{OTHER_UUID}:1-3")
        assert (receipts.to_lsn, receipts.last_lsn) == (29430847, 29430857)
        assert (receipts.tool_version, receipts.server_version) == ("8.0.35-31", "8.0.36")

    def test_of_increments_continue_each_other(self) -> None:
        chain = [parse_receipts(files) for files in (FULL, FIRST, SECOND)]
        assert [receipts.backup_type for receipts in chain] == ["full-backuped", "incremental", "incremental"]
        assert [receipts.from_lsn for receipts in chain[1:]] == [receipts.to_lsn for receipts in chain[:-1]]
        assert chain[2].position == Position("mysql-bin.000001", 218009002, f"{UUID}:1-15328")

    @pytest.mark.parametrize("text", [SLAVE_INFO_GTID, SLAVE_INFO_FILE])
    def test_of_a_replica_tell_what_makes_another_one(self, text: bytes) -> None:
        assert parse_receipts({**FULL, "xtrabackup_slave_info": text}).replica_of == text.decode().strip()

    def test_without_a_binary_log_have_no_position(self) -> None:
        info = b"".join(
            b"binlog_pos = \n" if line.startswith(b"binlog_pos") else line
            for line in FULL["xtrabackup_info"].splitlines(keepends=True)
        )
        files = {**FULL, "xtrabackup_info": info}
        del files["xtrabackup_binlog_info"]
        assert parse_receipts(files).position == Position()


def test_events_keep_the_order_of_the_stream(place: Path, shared_server: PrivateServer) -> None:
    run = Run(place, shared_server)
    with run.capture as capture:
        ended = [event.path for event in _ends(capture.events())]
    assert ended == [*DATA, *FULL]


def _ends(events: Iterator[FileEvent]) -> Iterator[End]:
    for event in events:
        if isinstance(event, End):
            yield event

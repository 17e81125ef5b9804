"""The real mariadb-backup against a real server: captures, kills, prepares. test_traps has more."""

from __future__ import annotations

import random
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backupd.engine.physical.capture import CaptureRequest, Data, End, FileEvent, verify_files
from backupd.engine.physical.mariabackup_xtrabackup import MariaBackup, reached_lsn
from backupd.engine.server.backup_files import XTRABACKUP, read_receipts
from backupd.engine.server.launch import LaunchedServer, ServerConfig, options_for_copy
from backupd.engine.server.sandbox import DATABASE_USER, worker
from backupd.engine.toolset import find_tool
from backupd.model.errors import BackupdError, DamagedError, ServerError, StreamError, ToolError, UnrestorableError
from backupd.process.pipeline import run
from backupd.process.run_context import RunContext
from restore.fetch.chain import prepare as prepare_to_restore
from tests.support.logs.stream import Folder
from tests.support.servers.backups import (
    MEMORY,
    Taken,
    children,
    connection_to,
    give_to_database,
    give_to_worker,
    prepare,
    signal_all,
    take,
    the_tool,
)
from tests.support.servers.mariadb import BACKUP_PASSWORD, PrivateServer
from tests.support.stores.folders import short_directory

ROWS = 80000
"""More than one chunk of the stream, so that the tool waits for us while it copies that table."""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture(scope="module")
def source() -> Iterator[PrivateServer]:
    with PrivateServer() as server:
        server.create_backup_users()
        server.execute(
            "CREATE DATABASE shop",
            "CREATE DATABASE `od d.näme`",
            "CREATE TABLE shop.orders (id INT PRIMARY KEY, v VARCHAR(200))",
            f"INSERT INTO shop.orders SELECT seq, REPEAT(CHAR(65 + seq % 26), 150) FROM mysql.seq_1_to_{ROWS}",
            "CREATE TABLE shop.notes (id INT, v VARCHAR(100)) ENGINE=MyISAM",
            "INSERT INTO shop.notes SELECT seq, 'note' FROM mysql.seq_1_to_500",
            "CREATE TABLE shop.empty (id INT) ENGINE=MyISAM",
            "CREATE TABLE shop.aria (id INT) ENGINE=Aria",
            "INSERT INTO shop.aria VALUES (1), (2)",
            "CREATE TABLE shop.parted (id INT PRIMARY KEY) PARTITION BY HASH (id) PARTITIONS 3",
            "INSERT INTO shop.parted SELECT seq FROM mysql.seq_1_to_300",
            "CREATE TABLE `od d.näme`.`t/../\"b'l` (id INT PRIMARY KEY)",
        )
        server.restart()  # after a checkpoint: until then the tool streams new tables as t.new
        yield server


@pytest.fixture(scope="module")
def taken(source: PrivateServer, place: Path) -> Taken:
    """Shared: copy it before changing anything."""
    return take(source, place / "taken")


@pytest.fixture
def copy(taken: Taken, place: Path) -> Iterator[Path]:
    path = taken.copy(place / "copy")
    yield path
    shutil.rmtree(path)


def wrapped(place: Path, script: str) -> MariaBackup:
    """The tool behind a shell script in which ``"$TOOL"`` is the real one."""
    tool = the_tool().tool
    path = place / f"wrapper-{random.randrange(1 << 30)}"
    path.write_text(f"#!/bin/sh\nTOOL={tool.path}\n{script}\n")
    path.chmod(0o755)
    return MariaBackup(replace(tool, path=str(path)), XTRABACKUP)


def capture_all(tool: MariaBackup, source: PrivateServer, work: Path, events: list[FileEvent] | None = None) -> None:
    work.mkdir()
    with tool.capture(CaptureRequest(connection_to(source), work)) as capture:
        for event in capture.events():
            if events is not None:
                events.append(event)


class TestCapture:
    def test_a_real_stream_gives_the_same_files_as_mbstream(self, source: PrivateServer, place: Path) -> None:
        stream = place / "raw.xbs"
        target = place / "raw-target"
        target.mkdir()
        with stream.open("wb") as sink:
            subprocess.run(
                [
                    "mariadb-backup",
                    f"--defaults-file={source.client_file()}",
                    "--backup",
                    "--parallel=3",
                    "--stream=xbstream",
                    f"--target-dir={target}",
                ],
                stdout=sink,
                stderr=subprocess.PIPE,
                check=True,
            )
        extracted = place / "mbstream"
        extracted.mkdir()
        with stream.open("rb") as raw:
            subprocess.run(["mbstream", "-x", "-C", str(extracted)], stdin=raw, check=True)
        expected = {
            path.relative_to(extracted).as_posix(): path.read_bytes() for path in extracted.rglob("*") if path.is_file()
        }
        assert Folder.of(stream.read_bytes(), size=64 * 1024).files == expected
        assert len(expected) > 100

    def test_its_receipts_tell_position_and_versions(self, source: PrivateServer, taken: Taken) -> None:
        file, position = source.query("SHOW MASTER STATUS")[0][:2]
        receipts = taken.receipts
        assert (receipts.position.file, receipts.position.pos) == (file, int(position))
        assert receipts.position.gtid == source.scalar("SELECT @@gtid_binlog_pos")
        assert receipts.backup_type == "full-backuped"
        assert receipts.last_lsn >= receipts.to_lsn > receipts.from_lsn == 0
        assert receipts.server_version.startswith("10.") or receipts.server_version.startswith("11.")
        assert receipts.tool_version.endswith("-MariaDB")
        assert receipts.replica_of == ""
        assert read_receipts(taken.base) == receipts
        verify_files(taken.base, taken.sizes)
        assert taken.log[-1].endswith("completed OK!")

    def test_no_password_is_visible_while_it_runs_and_no_file_stays(self, source: PrivateServer, place: Path) -> None:
        work = place / "argv"
        work.mkdir()
        seen: list[str] = []
        with the_tool().capture(CaptureRequest(connection_to(source), work)) as capture:
            for event in capture.events():
                if isinstance(event, End) and not seen:
                    for pid in children(str(work)):
                        text = (
                            Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
                        ).decode()
                        seen.append(text)
                        if "--defaults-file=" in text:
                            option = Path(text.split("--defaults-file=")[1].split("\0")[0])
                            assert stat.S_IMODE(option.stat().st_mode) == 0o600
                            assert BACKUP_PASSWORD in option.read_text()
        assert seen
        assert not any(BACKUP_PASSWORD in text for text in seen)
        assert not option.exists()

    def test_leaving_early_leaves_no_process(self, source: PrivateServer, place: Path) -> None:
        work = place / "early"
        work.mkdir()
        with the_tool().capture(CaptureRequest(connection_to(source), work)) as capture:
            next(capture.events())
            assert children(str(work))
        assert not children(str(work))

    def test_a_workdir_that_is_in_use_is_not_touched(self, source: PrivateServer, place: Path) -> None:
        work = place / "used"
        work.mkdir()
        (work / "x").touch()
        with (
            pytest.raises(ValueError, match="not empty"),
            the_tool().capture(CaptureRequest(connection_to(source), work)),
        ):
            pass

    def test_a_wrong_password_is_an_error_that_names_the_settings(self, source: PrivateServer, place: Path) -> None:
        work = place / "denied"
        work.mkdir()
        connection = replace(connection_to(source), password="wrong")
        with pytest.raises(ServerError) as caught, the_tool().capture(CaptureRequest(connection, work)):
            pass
        assert "Access denied" in caught.value.detail
        assert "defaults_file" in caught.value.hint

    def test_an_account_that_goes_by_the_os_user_is_ours_for_the_tool_too(
        self, source: PrivateServer, place: Path
    ) -> None:
        work = place / "by-user"
        work.mkdir()
        source.execute("ALTER USER root@localhost IDENTIFIED VIA unix_socket")
        try:
            connection = replace(connection_to(source), user="root", password="")
            with the_tool().capture(CaptureRequest(connection, work)) as capture:
                list(capture.events())
                assert capture.receipts().backup_type == "full-backuped"
        finally:
            source.execute("ALTER USER root@localhost IDENTIFIED BY ''")


class TestTheToolDies:
    @pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
    def test_killed_on_the_way(self, source: PrivateServer, taken: Taken, place: Path, share: float) -> None:
        total = sum(taken.sizes.values())
        work = place / f"killed{share}"
        work.mkdir()
        done, killed = 0, False
        with the_tool().capture(CaptureRequest(connection_to(source), work)) as capture:
            with pytest.raises(ToolError) as caught:
                for event in capture.events():
                    done += len(event.payload) if isinstance(event, Data) else 0
                    if done > total * share and not killed:
                        killed = True
                        signal_all(str(work), signal.SIGKILL)
            assert killed
            assert "SIGKILL" in caught.value.message
            assert "mariadb-backup" in caught.value.message
            assert "Streaming" in caught.value.detail or "copied" in caught.value.detail
            with pytest.raises(ValueError, match="not ended"):
                capture.receipts()

    def test_killed_after_its_last_byte(self, source: PrivateServer, place: Path) -> None:
        events: list[FileEvent] = []
        with pytest.raises(ToolError, match="SIGKILL") as caught:
            capture_all(wrapped(place, '"$TOOL" "$@"; kill -9 $$'), source, place / "last", events)
        assert events[-1] == End("xtrabackup_info")
        assert "completed OK!" in caught.value.detail

    def test_exit_code_0_without_the_end_mark(self, source: PrivateServer, place: Path) -> None:
        script = '{ "$TOOL" "$@" 2>&1 >&3 | grep -v "completed OK" >&2; } 3>&1; exit 0'
        with pytest.raises(ToolError, match=r"did not print 'completed OK!'") as caught:
            capture_all(wrapped(place, script), source, place / "nomark")
        assert "InnoDB" in caught.value.detail

    def test_the_stream_cut_in_the_middle_with_exit_code_0(self, source: PrivateServer, place: Path) -> None:
        with pytest.raises(StreamError, match="middle of a chunk"):
            capture_all(wrapped(place, '"$TOOL" "$@" | head -c 3000000'), source, place / "middle")


class TestTablesChangeWhileItRuns:
    def test_an_aria_table_renamed_meanwhile_is_there_or_noticed(self, place: Path) -> None:
        """The tool says "completed OK!" and, depending on the moment, leaves the table's data out."""
        names = ["one", "two"]
        noticed: StreamError | None = None
        with PrivateServer() as server:
            server.create_backup_users()
            server.execute(
                "CREATE DATABASE shop", "CREATE TABLE shop.one (i INT) ENGINE=Aria", "INSERT INTO shop.one VALUES (1)"
            )

            def rename(event: FileEvent) -> None:
                if isinstance(event, Data) and event.path == "ibdata1" and event.offset == 0:
                    server.execute(f"RENAME TABLE shop.{names[0]} TO shop.{names[1]}")
                    names.reverse()

            for attempt in range(12):
                try:
                    renamed = take(server, place / f"renamed{attempt}", on_event=rename)
                except StreamError as error:
                    noticed = error
                    break
                assert renamed.sizes[f"shop/{names[0]}.MAD"] > 0
        assert noticed is not None
        assert "left out their data" in noticed.message
        assert f"shop/{names[0]}.MAD" in noticed.detail

    def test_tables_created_dropped_and_rebuilt_meanwhile_are_right(self, place: Path) -> None:
        with PrivateServer() as server:
            server.create_backup_users()
            server.execute(
                "CREATE DATABASE shop",
                "CREATE DATABASE gone",
                "CREATE TABLE gone.a (i INT) ENGINE=Aria",
                "CREATE TABLE shop.dropped (i INT) ENGINE=Aria",
                "CREATE TABLE shop.kept (i INT) ENGINE=MyISAM",
                "CREATE TABLE shop.part (i INT) ENGINE=Aria PARTITION BY HASH (i) PARTITIONS 2",
                "INSERT INTO shop.kept VALUES (1)",
                "CREATE TABLE shop.inno (i INT PRIMARY KEY)",
            )
            fired: list[bool] = []

            def alter(event: FileEvent) -> None:
                if isinstance(event, Data) and event.path == "ibdata1" and not fired:
                    fired.append(True)
                    server.execute(
                        "DROP DATABASE gone",
                        "DROP TABLE shop.dropped",
                        "DROP TABLE shop.part",
                        "ALTER TABLE shop.kept ADD COLUMN z INT",
                        "CREATE TABLE shop.fresh (i INT) ENGINE=Aria",
                        "CREATE DATABASE new",
                        "CREATE TABLE new.fresh (i INT) ENGINE=MyISAM",
                        "ALTER TABLE shop.inno ADD COLUMN z INT",
                        "CREATE TABLE shop.inno2 (i INT PRIMARY KEY)",
                    )

            ddl = take(server, place / "ddl", on_event=alter)
            assert fired
            names = {name.rsplit(".", 1)[0] for name in ddl.sizes if name.startswith(("shop/", "gone/", "new/"))}
            assert names == {"shop/db", "shop/kept", "shop/fresh", "shop/inno", "shop/inno2", "new/db", "new/fresh"}
            assert ddl.sizes["shop/fresh.MAD"] > 0
            logs = prepare(ddl.base)
            the_tool().verify_prepared(ddl.base, ddl.receipts, logs)


class TestPrepare:
    def test_a_good_backup_reaches_its_end(self, taken: Taken, copy: Path) -> None:
        tool = the_tool()
        assert tool.redo_bytes(copy) == taken.sizes[MariaBackup.redo_file]
        give_to_worker(copy)
        steps = tool.prepare(copy, memory=MEMORY)
        assert [step.title for step in steps] == ["apply the redo log"]
        assert steps[0].plain.argv[1:] == (
            f"--defaults-file={copy}/backup-my.cnf",
            "--prepare",
            f"--target-dir={copy}",
            "--use-memory=96M",
        )
        logs = [run(steps[0].command).stderr]
        tool.verify_prepared(copy, taken.receipts, logs)
        assert reached_lsn(copy) == taken.receipts.last_lsn
        leftovers = {path.name for pattern in tool.leftovers for path in copy.glob(pattern)}
        assert leftovers == {
            "backup-my.cnf",
            "xtrabackup_binlog_info",
            "xtrabackup_binlog_pos_innodb",
            "xtrabackup_checkpoints",
            "xtrabackup_info",
        }

    def test_repeating_it_is_harmless(self, taken: Taken, copy: Path) -> None:
        prepare(copy)
        the_tool().verify_prepared(copy, taken.receipts, prepare(copy))

    def test_the_command_without_confinement_works_the_same(self, taken: Taken, copy: Path) -> None:
        give_to_worker(copy)
        (step,) = the_tool().prepare(copy, memory=MEMORY)
        the_tool().verify_prepared(copy, taken.receipts, [run(step.plain).stderr])

    def test_a_missing_table_is_noticed_before_and_after(self, source: PrivateServer, place: Path) -> None:
        lively = take(source, place / "missing", on_event=_writer(source))
        (lively.base / "shop/orders.ibd").unlink()
        (lively.base / "shop/notes.MYD").write_bytes(b"short")
        (lively.base / "extra").touch()
        with pytest.raises(DamagedError) as caught:
            verify_files(lively.base, lively.sizes)
        assert any(line.startswith("shop/orders.ibd is missing") for line in caught.value.damages)
        assert any(line.startswith("shop/notes.MYD has 5 bytes") for line in caught.value.damages)
        assert any(line.startswith("extra is not a file of the backup") for line in caught.value.damages)
        with pytest.raises(UnrestorableError, match="not completely"):
            the_tool().verify_prepared(lively.base, lively.receipts, prepare(lively.base))

    def test_redo_of_a_folder_without_redo_is_an_error(self, tmp_path: Path) -> None:
        for question in (the_tool().redo_bytes, reached_lsn):
            with pytest.raises(BackupdError, match="missing"):
                question(tmp_path)
        (tmp_path / MariaBackup.redo_file).write_bytes(b"x" * 20000)
        with pytest.raises(ToolError, match="not the redo log"):
            reached_lsn(tmp_path)

    def test_the_page_size_of_the_source_is_taken_over(self, place: Path) -> None:
        with PrivateServer(options={"innodb_page_size": "8k", "innodb_undo_tablespaces": 3}) as server:
            server.create_backup_users()
            server.execute("CREATE DATABASE shop", "CREATE TABLE shop.t (i INT PRIMARY KEY)")
            small = take(server, place / "small")
        logs = prepare(small.base)
        the_tool().verify_prepared(small.base, small.receipts, logs)


class TestEncryptedTablespaces:
    def test_prepare_and_a_started_copy_get_the_keys_they_need(self, place: Path) -> None:
        keys = place / "keys"
        keys.mkdir()
        (keys / "keys.txt").write_text("1;770A8A65DA156D24EE2A093277530142\n")
        give_to_database(keys)
        for path in (keys, keys / "keys.txt"):
            path.chmod(0o700)
        options: dict[str, str | int | None] = {
            "plugin_load_add": "file_key_management",
            "file_key_management_filename": str(keys / "keys.txt"),
            "innodb_encrypt_tables": "FORCE",
            "innodb_encrypt_log": 1,
        }
        with PrivateServer(options=options) as server:
            server.create_backup_users()
            server.execute(
                "CREATE DATABASE shop",
                "CREATE TABLE shop.t (v VARCHAR(100))",
                "INSERT INTO shop.t SELECT 'find-this-marker' FROM mysql.seq_1_to_2000",
            )
            encrypted = take(server, place / "encrypted")
        base = encrypted.base
        named = (keys / "keys.txt",)
        prepare_to_restore(
            the_tool(), base, [], encrypted.receipts, RunContext(key_files=named), memory=MEMORY, logs=place / "logs"
        )
        assert not list(base.glob("backupd-keys-*"))
        assert b"find-this-marker" not in (base / "shop/t.ibd").read_bytes()
        configuration = ServerConfig(
            find_tool(("mariadbd",)).path,
            base,
            place / "run-encrypted",
            memory=64 << 20,
            key_files=named,
            user=worker() or DATABASE_USER,
            options=options_for_copy(base, {}),
        )
        with LaunchedServer(configuration) as copy, copy.connection.connect() as session:
            assert not list(configuration.directory.glob("backupd-keys-*")), "it has read them"
            assert session.scalar("SELECT COUNT(*) FROM shop.t WHERE v = 'find-this-marker'") == 2000


def _writer(source: PrivateServer) -> Callable[[FileEvent], None]:
    """Writes to pages that the tool has just copied: what changes is in the redo log only."""

    def write(event: FileEvent) -> None:
        if isinstance(event, Data) and event.path == "shop/orders.ibd" and event.offset == 0:
            source.execute("UPDATE shop.orders SET v = CONCAT(LEFT(v, 140), LEFT(UUID(), 8)) WHERE id <= 4000")

    return write

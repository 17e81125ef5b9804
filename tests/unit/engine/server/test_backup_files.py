"""Receipts of the physical tools, and key files of encrypted tablespaces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backupd.engine.server.backup_files import (
    MARIADB_BACKUP,
    XTRABACKUP,
    ReceiptCollector,
    handed,
    named,
    parse_receipts,
    read_receipts,
    upstream_of,
)
from backupd.model.errors import RefusedError, StreamError
from backupd.model.server_facts import Position

CHECKPOINTS = b"""backup_type = full-backuped
from_lsn = 0
to_lsn = 331411436
last_lsn = 335103835
compact = 0
recover_binlog_info = 0
"""
INFO = b"""uuid = c2ae09a4-e54f-11f1-a4bb-02fc00000001
name =\x20
tool_name = xtrabackup
tool_command = --backup --user=bkp --password=... --socket=/srv/my.sock
tool_version = 2.4.4
server_version = 5.6.24-log
binlog_pos = filename 'mysql-bin.000001', position '205557656', GTID of the last change '42e2c883:1-7823'
incremental = N
"""
CNF = b"[mysqld]\ninnodb_page_size=16384\n"
BINLOG = b"mysql-bin.000001\t205557656\t42e2c883-e54c-11f1-a4bb-02fc00000001:1-7823\n"


def _files(prefix: str = "xtrabackup", **changes: bytes | None) -> dict[str, bytes]:
    files: dict[str, bytes | None] = {"checkpoints": CHECKPOINTS, "info": INFO, "binlog_info": BINLOG}
    named = {f"{prefix}_{name}": content for name, content in (files | changes).items()}
    return {name: content for name, content in (named | {"backup-my.cnf": CNF}).items() if content is not None}


@pytest.mark.parametrize("names", [XTRABACKUP, MARIADB_BACKUP])
def test_both_families_of_names_are_read(names: object, tmp_path: Path) -> None:
    prefix = "xtrabackup" if names is XTRABACKUP else "mariadb_backup"
    receipts = parse_receipts(_files(prefix, slave_info=b"SET GLOBAL gtid_slave_pos = '0-1-2';\nCHANGE MASTER TO x;\n"))
    assert receipts.backup_type == "full-backuped"
    assert (receipts.from_lsn, receipts.to_lsn, receipts.last_lsn) == (0, 331411436, 335103835)
    assert receipts.position == Position("mysql-bin.000001", 205557656, "42e2c883-e54c-11f1-a4bb-02fc00000001:1-7823")
    assert (receipts.tool_version, receipts.server_version) == ("2.4.4", "5.6.24-log")
    assert receipts.replica_of.startswith("SET GLOBAL")
    for name, content in _files(prefix).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "ibdata1").touch()
    assert read_receipts(tmp_path).position == receipts.position


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"bin.000002\t4\n", Position("bin.000002", 4)),
        (b"bin.000002\t4\t0-1-2,1-5-99\n", Position("bin.000002", 4, "0-1-2,1-5-99")),
        (b"bin.1\t400\tuuid1:1-5,\nuuid2:1-9:11\n", Position("bin.1", 400, "uuid1:1-5,uuid2:1-9:11")),
        (b"\n", Position()),
    ],
)
def test_binary_log_positions_with_and_without_gtid(text: bytes, expected: Position) -> None:
    assert parse_receipts(_files(binlog_info=text)).position == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("CHANGE MASTER TO MASTER_LOG_FILE='bin.000003', MASTER_LOG_POS=4711;", Position("bin.000003", 4711)),
        ("CHANGE REPLICATION SOURCE TO SOURCE_LOG_FILE='b.1', SOURCE_LOG_POS=9", Position("b.1", 9)),
        (
            "SET GLOBAL gtid_slave_pos = '0-1-2,1-5-9';\nCHANGE MASTER TO master_use_gtid = slave_pos",
            Position(gtid="0-1-2,1-5-9"),
        ),
        (
            "SET GLOBAL gtid_purged='u1:1-5,\nu2:1';\nCHANGE MASTER TO MASTER_AUTO_POSITION=1",
            Position(gtid="u1:1-5,u2:1"),
        ),
        (
            (
                "CHANGE MASTER 'a' TO MASTER_LOG_FILE='a.1', MASTER_LOG_POS=4;\n"
                "CHANGE MASTER 'b' TO MASTER_LOG_FILE='b.1', MASTER_LOG_POS=4;"
            ),
            None,
        ),
    ],
)
def test_the_position_of_a_replica_s_source_is_read(text: str, expected: Position | None) -> None:
    assert upstream_of(text) == expected
    assert parse_receipts(_files("xtrabackup", slave_info=text.encode())).upstream == expected


def test_a_server_without_binary_log_has_no_position() -> None:
    info = b"".join(line for line in INFO.splitlines(keepends=True) if not line.startswith(b"binlog_pos"))
    assert parse_receipts(_files(binlog_info=None, info=info)).position == Position()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoints": None}, "no checkpoints file"),
        ({"info": None}, "lacks xtrabackup_info"),
        ({"binlog_info": None}, "no xtrabackup_binlog_info"),
        ({"binlog_info": b"garbage"}, "xtrabackup_binlog_info is not readable"),
        ({"binlog_info": b"bin.1\tx\n"}, "xtrabackup_binlog_info is not readable"),
        ({"checkpoints": CHECKPOINTS.replace(b"335103835", b"-1")}, "last_lsn is '-1'"),
        ({"checkpoints": CHECKPOINTS.replace(b"to_lsn", b"too_lsn")}, "has no to_lsn"),
        ({"checkpoints": b""}, "has no backup_type"),
        ({"info": b"\xff\xfe"}, "has no tool_version"),
    ],
)
def test_what_is_missing_or_unreadable_is_named(changes: dict[str, bytes | None], message: str) -> None:
    with pytest.raises(StreamError, match=message):
        parse_receipts(_files("xtrabackup", **changes))


def test_an_empty_or_missing_backup_my_cnf_is_an_error() -> None:
    files = _files()
    for broken in ({**files, "backup-my.cnf": b" \n"}, {k: v for k, v in files.items() if k != "backup-my.cnf"}):
        with pytest.raises(StreamError, match=r"backup-my\.cnf"):
            parse_receipts(broken)


def test_the_collector_keeps_receipts_at_the_top_only_and_not_without_their_end() -> None:
    collector = ReceiptCollector()
    for path in ("xtrabackup_info", "shop/xtrabackup_info", "ibdata1"):
        collector.data(path, memoryview(b"ab"))
        collector.data(path, memoryview(b"cd"))
    collector.end("shop/xtrabackup_info")
    assert collector.files == {}
    collector.end("xtrabackup_info")
    collector.end("xtrabackup_slave_info")
    assert collector.files == {"xtrabackup_info": b"abcd", "xtrabackup_slave_info": b""}
    with pytest.raises(StreamError, match="larger than"):
        collector.data("backup-my.cnf", memoryview(bytes(2 << 20)))


PLUGIN = {"plugin_load_add": "file_key_management"}


def test_a_file_is_taken_by_its_path_or_as_the_only_one_of_its_name() -> None:
    options = {
        **PLUGIN,
        "file_key_management_filename": "/etc/mysql/keys.enc",
        "loose-file-key-management-filekey": "FILE:/etc/mysql/.key",
        "innodb_page_size": "8192",
    }
    here = (Path("/srv/keys/keys.enc"), Path("/etc/mysql/.key"), Path("/srv/keys/.key"))
    assert named(options, here) == {**options, "file_key_management_filename": "/srv/keys/keys.enc"}
    with pytest.raises(RefusedError, match=r"in /etc/mysql/keys\.enc, which"):
        named(options, (*here, Path("/srv/other/keys.enc")))
    assert named({"innodb_page_size": "8192"}, ()) == {"innodb_page_size": "8192"}
    with pytest.raises(RefusedError, match="no key files"):
        named(PLUGIN, ())
    clone = {"plugin_load_add": "mysql_clone.so"}  # with which a copy that CLONE made tells where it stands
    assert named(clone, ()) == clone


def test_the_copies_are_private_and_gone_at_the_end(tmp_path: Path) -> None:
    keys, key = tmp_path / "keys.enc", tmp_path / "key"
    keys.write_bytes(b"\0sealed")
    key.write_text("secret")
    options = {**PLUGIN, "file-key-management-filename": str(keys), "file-key-management-filekey": f"FILE:{key}"}
    folder = tmp_path / "run"
    folder.mkdir()
    owner = (os.geteuid() + 1, os.getegid() + 1) if os.geteuid() == 0 else None
    with handed(options, (keys, key), folder, owner) as given:
        first, second = sorted(folder.iterdir())
        assert given == {
            **PLUGIN,
            "file-key-management-filename": str(first),
            "file-key-management-filekey": f"FILE:{second}",
        }
        assert (first.read_bytes(), second.read_text()) == (b"\0sealed", "secret")
        for copy in (first, second):
            status = copy.stat()
            assert (status.st_mode & 0o777, (status.st_uid, status.st_gid)) == (
                0o600,
                owner or (os.geteuid(), os.getegid()),
            )
    assert list(folder.iterdir()) == []
    keys.unlink()
    with (
        pytest.raises(RefusedError, match=f"{keys} cannot be read: No such file"),
        handed(options, (keys, key), folder, None),
    ):
        pass
    assert list(folder.iterdir()) == []

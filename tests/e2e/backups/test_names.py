"""Names that trip programs, and many of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.dice import SOAK, size
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.sample import checksum_everything, create_hostile_names, create_many_tables
from tests.support.servers.mariadb import PrivateServer
from tests.support.servers.stacks import STACKS, Stack, stacks


@pytest.mark.parametrize("stack", stacks(*STACKS))
def test_hostile_names_survive_backup_restore_and_proof(stack: Stack, short_tmp: Path, keys: Keys) -> None:
    with stack.make() as server:
        server.create_backup_users()
        names = create_hostile_names(server)
        with server.connect() as connection:
            expected = checksum_everything(connection)
        assert len(expected) >= len(names)
        house = House(short_tmp, server, keys, programs=stack.all_programs())
        record = house.backup()
        assert house.ok("test-restore", SERVER)["outcome"] == "proved"
        house.restore(short_tmp / "restored")
        assert all(len(path.name.encode()) <= 255 for path in house.tree(record["id"]))
        assert house.fsck() == []
    assert sorted(path.name for path in short_tmp.iterdir() if path.name in ("etc", "up")) == []
    with stack.make(datadir=short_tmp / "restored") as restored, restored.connect() as connection:
        assert checksum_everything(connection) == expected


def test_names_that_the_tool_fails_over_are_refused_by_check_and_backup(own_house: House) -> None:
    own_house.server.execute("CREATE DATABASE xtrabackup_info")
    for command in ("check", "backup"):
        done = own_house.fails(command, SERVER)
        assert "xtrabackup_info" in done.all
        assert "another name" in done.all
    own_house.server.execute("DROP DATABASE xtrabackup_info", "CREATE DATABASE d", "CREATE TABLE d.`in``no` (i INT)")
    own_house.ok("check", SERVER)
    own_house.server.execute("ALTER TABLE d.`in``no` ENGINE=Aria")
    for command in ("check", "backup"):
        done = own_house.fails(command, SERVER)
        assert "`d`.`in``no`: a table of MyISAM, Aria, CSV with a backtick" in done.all
    assert own_house.backups() == []


@SOAK
@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_more_tables_in_one_schema_than_a_process_may_open_files(short_tmp: Path, keys: Keys) -> None:
    tables = size(1200, 5000)  # the usual limit of open files is 1024
    with PrivateServer(
        options={"innodb_flush_log_at_trx_commit": 0, "sync_binlog": 0, "table_definition_cache": 8000}
    ) as server:
        server.create_backup_users()
        create_many_tables(server, tables, rows=3)
        with server.connect() as connection:
            expected = checksum_everything(connection)
        assert len(expected) >= tables
        house = House(short_tmp, server, keys, policy_extra="witness: {enabled: false}\n")
        house.backup()
        second = house.backup()
        assert second["files_linked"] > 0.9 * second["files"]
        house.restore(short_tmp / "restored")
    with PrivateServer(datadir=short_tmp / "restored") as restored, restored.connect() as connection:
        assert checksum_everything(connection) == expected

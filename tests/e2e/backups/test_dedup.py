"""Unchanged files are stored once; each backup lives on without the others."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.e2e.house import SERVER, House
from tests.support.sample import checksum_everything, create_many_tables
from tests.support.servers.mariadb import PrivateServer


def disk_usage(path: Path) -> int:
    return int(subprocess.run(["du", "-s", "-B1", str(path)], check=True, capture_output=True).stdout.split()[0])


def table_inodes(house: House, backup_id: str) -> dict[str, int]:
    tree = house.manifest(backup_id).parent / "files"
    return {
        path.relative_to(tree).as_posix(): path.stat().st_ino
        for path in house.tree(backup_id)
        if path.name.startswith("t") and ".ibd" in path.name and path.parent.name == "many"
    }


def test_three_changed_tables_of_a_hundred_share_the_other_97_and_deleting_the_older_keeps_the_newer(
    short_tmp: Path, house: House
) -> None:
    with PrivateServer() as server:
        server.create_backup_users()
        create_many_tables(server, 100, rows=2000)
        house = House(short_tmp, server, house.keys)
        server.execute("SET GLOBAL innodb_max_dirty_pages_pct = 0", "SET GLOBAL innodb_max_dirty_pages_pct_lwm = 0")
        server.settle()  # what is purged later changes pages of tables that nobody writes to
        server.restart()
        first = house.backup()
        used = disk_usage(house.repository)
        for number in (5, 50, 95):
            server.execute(f"UPDATE many.t{number:05} SET t = REVERSE(t)")
        server.restart()  # flushes the changed pages into the three files
        second = house.backup()
        grown = disk_usage(house.repository) - used
        before, after = table_inodes(house, first["id"]), table_inodes(house, second["id"])
        assert before.keys() == after.keys()
        assert len(after) == 100
        shared = [name for name in after if before[name] == after[name]]
        assert len(shared) == 97
        assert second["files_linked"] >= 97
        one_table = max(path.stat().st_size for path in house.tree(second["id"]) if path.name.startswith("t00"))
        assert second["bytes_new"] < first["bytes_new"] / 5
        assert grown < used / 5, f"{grown} bytes for 3 tables of about {one_table}"
        with server.connect() as connection:
            expected = checksum_everything(connection)

        house.ok("backups", "delete", first["id"], "--now")
        assert not house.manifest(first["id"]).exists()
        assert [record["id"] for record in house.backups()] == [second["id"]]
        assert house.fsck() == []
        assert house.ok("verify", SERVER)["damages"] == []
        house.restore(house.base / "restored")
    with PrivateServer(datadir=house.base / "restored") as restored, restored.connect() as connection:
        assert checksum_everything(connection) == expected


def test_a_deleted_backup_comes_back_with_undelete_until_it_is_swept(house: House) -> None:
    older, newer = house.backup(), house.backup()
    house.ok("backups", "delete", newer["id"])
    assert house.ok("plan", SERVER, "--to", "latest")["backup"] == older["id"]
    assert "undelete" in house.fails("plan", SERVER, "--to", f"backup:{newer['id']}").err
    house.ok("backups", "undelete", newer["id"])
    assert house.ok("plan", SERVER, "--to", "latest")["backup"] == newer["id"]
    house.ok("backups", "delete", newer["id"], "--now")
    assert newer["id"] in house.fails("backups", "undelete", newer["id"], code=2).err
    assert house.fsck() == []


def test_a_kept_backup_cannot_be_deleted(house: House) -> None:
    record = house.backup()
    house.backup()
    house.ok("backups", "keep", record["id"])
    done = house.fails("backups", "delete", record["id"], "--now")
    assert "keep" in done.err
    assert house.manifest(record["id"]).exists()


def test_the_last_restorable_backup_of_a_server_is_never_deleted(house: House) -> None:
    record = house.backup()
    for options in ((), ("--now",)):
        assert "only restorable" in house.fails("backups", "delete", record["id"], *options).err
    assert house.manifest(record["id"]).exists()

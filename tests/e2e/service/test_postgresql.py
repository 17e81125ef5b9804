"""The same main job with the catalog in PostgreSQL."""

from __future__ import annotations

from pathlib import Path

from tests.support.catalog.postgresql import private_postgresql
from tests.support.e2e.house import SERVER, House
from tests.support.keys import Keys
from tests.support.sample import checksum_everything
from tests.support.servers.mariadb import PrivateServer


def test_backup_restore_and_proof_with_the_catalog_in_postgresql(
    short_tmp: Path, shared_server: PrivateServer, keys: Keys
) -> None:
    with private_postgresql() as postgresql:
        house = House(short_tmp, shared_server, keys, catalog=postgresql.create("backupd"))
        record = house.backup()
        assert [found["id"] for found in house.backups()] == [record["id"]]
        assert house.ok("test-restore", SERVER)["outcome"] == "proved"
        house.restore(short_tmp / "restored")
        assert house.fsck() == []
        assert not list(short_tmp.glob("*.db"))
    with PrivateServer(datadir=short_tmp / "restored") as restored, restored.connect() as connection:
        sums = checksum_everything(connection)
    with shared_server.connect() as connection:
        assert checksum_everything(connection) == sums

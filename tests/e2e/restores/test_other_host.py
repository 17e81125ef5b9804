"""An installation whose only destination is a folder of another host."""

from __future__ import annotations

import pytest

from tests.support import sample
from tests.support.e2e.house import SERVER, House
from tests.support.servers.mariadb import PrivateServer
from tests.support.stores.ssh_server import SshServer, ssh_server, why_not

__all__ = ["ssh_server"]
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


def test_a_backup_on_another_host_is_reused_verified_restored_and_deleted(house: House, ssh_server: SshServer) -> None:
    place = ssh_server.config(house.base / "there", max_upload="200MB").model_dump(mode="json", exclude_none=True)
    house.config.write_text(
        house.config.read_text().replace(f"{{type: filesystem, path: {house.repository}}}", str(place))
    )
    first, second = house.backup(), house.backup()
    assert [copy["destination"] for copy in first["copies"]] == ["local"]
    assert second["bytes_new"] < first["bytes_new"]
    assert house.ok("verify", SERVER)
    assert house.fsck() == []
    text = house.run("runbook", second["id"]).out
    assert f"port {ssh_server.port}" in text
    assert str(ssh_server.key_file) not in text
    house.restore(house.base / "copy")
    with PrivateServer(datadir=house.base / "copy", options={"skip_grant_tables": None}) as copy:
        with copy.connect() as restored, house.server.connect() as source:
            assert sample.checksum_everything(restored) == sample.checksum_everything(source)
    house.ok("backups", "delete", first["id"])
    assert house.run("check").code == 0
    ssh_server.stop()
    try:
        assert "cannot be reached" in house.fails("backup", SERVER, "--kind", "full").all
    finally:
        ssh_server.start()

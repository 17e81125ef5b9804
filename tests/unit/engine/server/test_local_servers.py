"""A server of this host is found by its process, at whatever socket; nothing else is."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from backupd.engine.server.local_servers import greeting, local_servers
from tests.support.servers.mariadb import PrivateServer


def test_a_server_is_found_with_its_socket_and_version(shared_server: PrivateServer) -> None:
    found = {os.path.realpath(one.socket): one.version for one in local_servers()}
    assert found[os.path.realpath(shared_server.socket)] == shared_server.scalar("SELECT @@version")


def test_what_is_no_server_does_not_greet(short_tmp: Path) -> None:
    assert greeting(str(short_tmp / "none")) == ""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(short_tmp / "door"))
        door.listen()
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(short_tmp / "door"))
            accepted, _ = door.accept()
            accepted.close()
        assert str(short_tmp / "door") not in {one.socket for one in local_servers()}

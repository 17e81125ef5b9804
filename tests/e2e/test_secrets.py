"""No plaintext leaves the house, no secret shows anywhere."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from backupd.model.ids import new_id
from tests.e2e.house import SERVER, House
from tests.support.mariadb import SERVICE_PASSWORD, SERVICE_USER
from tests.support.sample import MARKER


def test_no_stored_object_holds_plaintext_and_no_file_of_the_house_a_password(house: House) -> None:
    house.server.settle()
    assert MARKER.encode() in b"".join(
        path.read_bytes() for path in house.server.datadir.rglob("*.ibd")), "the marker is not in the source"
    house.backup()
    for path in house.repository.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert MARKER.encode() not in content, path
            assert SERVICE_PASSWORD.encode() not in content, path
    for path in (*house.base.glob("catalog.db*"), *(house.base / "spool").rglob("*")):
        if path.is_file():
            assert SERVICE_PASSWORD.encode() not in path.read_bytes(), path


def test_no_password_is_ever_in_a_command_line_or_a_foreign_environment(own_house: House) -> None:
    """Every process of the machine is looked at, so the password is one that no other test has."""
    house, password = own_house, f"Nobody-else-{new_id(datetime.now(UTC))}"
    house.server.query(f"SET PASSWORD FOR {SERVICE_USER}@localhost = PASSWORD(%s)", (password,))
    house.server.client_file(SERVICE_USER, password)
    seen: set[str] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    arguments = (process / "cmdline").read_bytes()
                    environment = (process / "environ").read_bytes()
                except OSError:
                    continue
                if password.encode() in arguments + environment:
                    seen.add(arguments.decode(errors="replace"))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        done = house.run("backup", SERVER, "--kind", "full")
        proved = house.run("test-restore", SERVER)
    finally:
        stop.set()
        watcher.join()
    assert seen == set()
    assert (done.code, proved.code) == (0, 0), done.all + proved.all
    assert password not in done.all + proved.all


@pytest.mark.parametrize("command", ["backup", "check"])
def test_a_refused_login_names_the_user_and_hides_the_password(house: House, command: str) -> None:
    client = house.server.base / "client-backupd.cnf"
    text = client.read_text()
    try:
        client.write_text(text.replace(SERVICE_PASSWORD, "Wrong-s3cret-5"))
        done = house.fails(command, SERVER)
        assert "Access denied" in done.all
        assert "Wrong-s3cret-5" not in done.all
    finally:
        client.write_text(text)

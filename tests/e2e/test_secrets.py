"""No plaintext leaves the house, no secret shows anywhere."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.e2e.house import SERVER, House
from tests.support.mariadb import SERVICE_PASSWORD
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


def test_no_password_is_ever_in_a_command_line_or_a_foreign_environment(house: House) -> None:
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
                if SERVICE_PASSWORD.encode() in arguments + environment:
                    seen.add(arguments.decode(errors="replace"))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        done = house.run("backup", SERVER, "--kind", "full")
        restored = house.run("test-restore", SERVER)
    finally:
        stop.set()
        watcher.join()
    assert seen == set()
    assert SERVICE_PASSWORD not in done.all + restored.all


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

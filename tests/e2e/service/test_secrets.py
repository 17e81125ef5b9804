"""No plaintext leaves the house, no secret shows anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.e2e.house import SERVER, House
from tests.support.keys import copy_public, gpg, make_home, stop_agent
from tests.support.sample import MARKER
from tests.support.servers.mariadb import SERVICE_PASSWORD, SERVICE_USER


def test_no_stored_object_holds_plaintext_and_no_file_of_the_house_a_password(house: House) -> None:
    house.server.settle()
    assert MARKER.encode() in b"".join(path.read_bytes() for path in house.server.datadir.rglob("*.ibd")), (
        "the marker is not in the source"
    )
    house.backup()
    for path in house.repository.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert MARKER.encode() not in content, path
            assert SERVICE_PASSWORD.encode() not in content, path
    for path in (*house.base.glob("catalog.db*"), *(house.base / "spool").rglob("*")):
        if path.is_file():
            assert SERVICE_PASSWORD.encode() not in path.read_bytes(), path


def _programs(log: Path) -> dict[str, str]:
    """Every program that was started, with its arguments and its environment, by its name: nothing is missed, however
    short it ran."""
    started = [line for line in log.read_text(errors="replace").splitlines() if line.endswith("= 0")]
    return {
        found[1].rpartition("/")[2]: line
        for line in started
        if (found := re.search(r'execve(?:at)?\((?:\w+, )?"([^"]+)"', line)) is not None
    }


def test_no_secret_is_in_the_arguments_or_the_environment_of_anything_that_a_days_work_starts(
    own_house: House, short_tmp: Path
) -> None:
    house, log = own_house, short_tmp / "started"
    password, passphrase = "Nobody-else-2b7c", "Nobody-else-91fd"
    house.server.query(f"GRANT ALL ON *.* TO {SERVICE_USER}@localhost")
    house.server.query(f"SET PASSWORD FOR {SERVICE_USER}@localhost = PASSWORD(%s)", (password,))
    secret = make_home(short_tmp / "secret")
    (short_tmp / "passphrase").write_text(f"{passphrase}\n")
    (short_tmp / "passphrase").chmod(0o600)
    try:
        gpg(
            secret,
            "--pinentry-mode",
            "loopback",
            "--passphrase",
            passphrase,
            "--quick-generate-key",
            "night@example.com",
            "future-default",
            "default",
            "never",
        )
        public = make_home(short_tmp / "public")
        copy_public(secret, public, "night@example.com")
        house.policy_extra = "logical: {schedule: every 24h}\nbinlog: {stream: true}\n"
        house.write(encryption_home=public, restore_home=secret)
        house.server.client_file(SERVICE_USER, password)
        house.config.write_text(
            house.config.read_text()
            .replace("ops@example.com", "night@example.com")
            .replace("restore: {", f"restore: {{passphrase_file: {short_tmp}/passphrase, ")
        )
        house.under = (
            "strace",
            "-f",
            "-qq",
            "--seccomp-bpf",
            "-e",
            "trace=execve,execveat",
            "-v",
            "-s",
            "100000",
            "-o",
            str(log),
        )
        done = [
            house.run(*words)
            for words in (
                ("check", SERVER),
                ("backup", SERVER, "--kind", "full"),
                ("run-stream", SERVER, "--once"),
                ("backup", SERVER, "--kind", "logical"),
                ("test-restore", SERVER),
                ("catalog", "copy"),
            )
        ]
        house.under = ()
    finally:
        stop_agent(secret)
    checked, *worked = done  # what `check` finds of this machine is not asked here
    assert "privileges" in checked.all
    assert [one.code for one in worked] == [0] * len(worked), [one.all for one in worked if one.code]
    told = log.read_text(errors="replace") + "".join(one.all for one in done)
    assert [line for line in told.splitlines() if password in line or passphrase in line] == []
    assert {"gpg", "mariadb-backup", "mydumper", "mariadb-binlog"} <= _programs(log).keys(), "they were looked at"


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

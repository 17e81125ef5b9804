from __future__ import annotations

import secrets
import stat
from pathlib import Path

import pytest

from backupd.process.command import Command
from backupd.process.pipeline import run
from backupd.process.runtime import option_file, render_options
from tests.support.dice import thrown
from tests.support.servers.mariadb import PrivateServer
from tests.support.service.processes import with_mark

NASTY = [
    "plain",
    "it's",
    'say "hi"',
    "'quoted'",
    '"quoted"',
    "with # hash",
    "#first",
    ";semicolon",
    "back\\slash",
    "trailing\\",
    "\\",
    "\\\\",
    '\\"',
    "\\s\\n\\t",
    " leading",
    "trailing ",
    "  ",
    "tab\tinside",
    "new\nline",
    "carriage\rreturn",
    "percent%20%s%%",
    "ümläut-пароль-密码-😀",
    "=equals=",
    "[group]",
    "!include /etc/passwd",
    "$HOME `id` $(id)",
    "\x01\x1f\x7f",
    "",
    "\b",
]


@pytest.mark.parametrize("value", NASTY)
def test_my_print_defaults_reads_every_value_back_unchanged(value: str, tmp_path: Path) -> None:
    groups: dict[str, dict[str, str | None]] = {"other": {"user": "wrong"}, "client": {"password": value, "user": "b"}}
    with option_file(groups, directory=tmp_path) as path:
        shown = run(Command(("my_print_defaults", f"--defaults-file={path}", "client"))).stdout.decode()
        assert shown == f"--password={value}\n--user=b\n"


@pytest.mark.campaign
def test_random_values_come_back_unchanged(tmp_path: Path) -> None:
    chance = thrown("option files")
    letters = "ab\\\\\\\"\"''##;; \t\n=[]!%nrtsb\u00e4\u5bc6"
    values = {f"o{n}": "".join(chance.choices(letters, k=chance.randrange(30))) for n in range(300)}
    with option_file({"client": dict(values)}, directory=tmp_path) as path:
        shown = run(Command(("my_print_defaults", f"--defaults-file={path}", "client"))).stdout.decode()
    assert shown == "".join(f"--{name}={value}\n" for name, value in values.items())


def test_a_real_client_logs_in_with_nasty_passwords(server: PrivateServer, tmp_path: Path) -> None:
    for value in (value for value in NASTY if value):
        server.query("CREATE OR REPLACE USER nasty@localhost IDENTIFIED BY %s", (value,))
        groups: dict[str, dict[str, str | None]] = {
            "client": {"user": "nasty", "password": value, "socket": str(server.socket)}
        }
        with option_file(groups, directory=tmp_path) as path:
            done = run(Command(("mariadb", f"--defaults-file={path}", "-N", "-e", "SELECT CURRENT_USER()")))
            assert done.stdout == b"nasty@localhost\n", value


def test_the_file_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    secret = f"geheim-{secrets.token_hex(8)}"  # a word that stands in no command line of others
    with option_file({"client": {"password": secret, "compress": None}}, directory=tmp_path) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text() == f'[client]\npassword="{secret}"\ncompress\n'
        assert with_mark(secret) == []
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_gone_after_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), option_file({"client": {}}, directory=tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ({"client": {"password": "a\0b"}}, "NUL"),
        ({"client": {"password": "x" * 5000}}, "too long"),
        ({"client]\n[x": {}}, "cannot be the name"),
        ({"client": {"user\npassword": "x"}}, "cannot be the name"),
    ],
)
def test_what_no_option_file_can_hold_is_refused(groups: dict[str, dict[str, str | None]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        render_options(groups)

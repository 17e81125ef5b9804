from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from backupd.model.errors import ConfigurationError
from backupd.process.command import Command


def test_rendering_is_what_a_shell_accepts() -> None:
    command = Command(("printf", "%s|", "a b", "it's", "$HOME", "", "ünï", "*"))
    shown = subprocess.run(["sh", "-c", command.render()], check=True, capture_output=True).stdout.decode()
    assert shown == "a b|it's|$HOME||ünï|*|"


def test_folder_user_and_environment_are_shown() -> None:
    command = Command(("mariadbd", "--no-defaults"), env={"TZ": "UTC"}, cwd=Path("/srv/my data"), user="mysql")
    assert command.render() == "cd '/srv/my data' && runuser -u mysql -- env TZ=UTC mariadbd --no-defaults"


@pytest.mark.parametrize(
    "argv",
    [
        ("mariadb", "--password=geheim"),
        ("mariadb", "-pgeheim"),
        ("tool", "--token", "geheim"),
        ("mydumper", "--password", "geheim"),
        ("xtrabackup", "--encrypt-key=geheim"),
        ("curl", "https://user:geheim@example.com/x"),
        ("tool", "--s3-secret-access-key=geheim"),
    ],
)
def test_secrets_are_never_rendered(argv: tuple[str, ...]) -> None:
    shown = Command(argv, env={"MYSQL_PWD": "geheim", "AWS_SECRET_ACCESS_KEY": "geheim"}).render()
    assert "geheim" not in shown
    assert "[hidden]" in shown


@pytest.mark.parametrize(
    "word",
    [
        "--defaults-file=/run/o.cnf",
        "--passphrase-file=/etc/p",
        "--parallel=4",
        "--port=3306",
        "-p",
        "--ssl-key=/etc/k",
        "--encrypt-key-file=/etc/k",
    ],
)
def test_what_is_no_secret_stays_readable(word: str) -> None:
    assert shlex.split(Command(("mariadb", word, "last")).render()) == ["mariadb", word, "last"]


def test_only_a_few_variables_are_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYSQL_HOME", "/elsewhere")
    monkeypatch.setenv("GNUPGHOME", "/elsewhere")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    environment = Command(("true",), env={"EXTRA": "1"}).environment()
    assert not {"MYSQL_HOME", "GNUPGHOME"} & set(environment)
    assert environment["LC_ALL"] == "C.UTF-8"
    assert environment["EXTRA"] == "1"
    assert "/usr/sbin" in environment["PATH"].split(":")


def test_an_unknown_user_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="no OS user 'nobody-like-this'"):
        Command(("true",), user="nobody-like-this").environment()


def test_a_command_needs_a_program_and_no_nul() -> None:
    with pytest.raises(ValueError, match="needs a program"):
        Command(())
    with pytest.raises(ValueError, match="NUL"):
        Command(("true", "a\0b"))

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from storage.config import FilesystemConfig, SftpConfig
from storage.registry import open_destination


def test_opening_touches_nothing(tmp_path: Path) -> None:
    config = FilesystemConfig.model_validate({"type": "filesystem", "path": tmp_path / "backups"})
    found = open_destination("local", config)
    assert found.name == "local"
    assert not found.is_initialised()
    assert list(tmp_path.iterdir()) == []
    assert open_destination("x", config).name == "x"


@pytest.mark.parametrize(
    "document",
    [
        {"type": "filesystem"},
        {"type": "filesystem", "path": "relative"},
        {"type": "filesystem", "path": "/"},
        {"type": "filesystem", "path": "/srv/../etc"},
        {"type": "floppy", "path": "/srv"},
        {"type": "filesystem", "path": "/srv", "pth": "/x"},
        {"path": "/srv"},
    ],
)
def test_a_wrong_configuration_is_refused(document: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        FilesystemConfig.model_validate(document)


def test_what_an_sftp_command_could_take_for_something_else_is_refused() -> None:
    good = {
        "type": "sftp",
        "host": "vault.example.com",
        "user": "backupd",
        "path": "/srv/b a'ckups",
        "key_file": "/k",
        "known_hosts": "/h",
    }
    assert SftpConfig.model_validate(good).is_off_site
    for field, value in (
        ("user", "-oProxyCommand=x"),
        ("host", "-x"),
        ("path", "/srv/../etc"),
        ("path", "/srv/a\nb"),
        ("path", "srv"),
        ("port", 0),
        ("password", "x"),
    ):
        with pytest.raises(ValidationError):
            SftpConfig.model_validate(good | {field: value})

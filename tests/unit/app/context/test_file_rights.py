"""Who can write the configuration is told by `check`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backupd.app.context.file_rights import findings
from tests.support.service.house import GOLD, Office


def told(office: Office) -> list[tuple[str, str]]:
    return [(one.message, one.hint) for one in findings(office.write(gold=GOLD))]


def test_files_that_others_can_write_are_named_with_their_folders(tmp_path: Path) -> None:
    office = Office(tmp_path)
    assert told(office) == []
    (policies,) = tmp_path.rglob("gold.yaml")
    servers = tmp_path / "servers.d"
    servers.mkdir(mode=0o755)
    more = servers / "more.yaml"
    more.write_text("more: {socket: /no.sock, policy: gold}\n")
    for path in (policies, servers, more, office.file):
        path.chmod(0o664 if path.is_file() else 0o777)
    ((message, hint),) = told(office)
    assert "can be written by others" in message
    assert f"{office.file} (mode 0664), {servers} (mode 0777), {more} (mode 0664) and 1 more" in message
    assert "chmod go-w FILE" in hint
    servers.chmod(0o1777)  # nobody can replace there what is another user's
    ((message, _hint),) = told(office)
    assert f"{servers} " not in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_other_users_are_named(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.write(gold=GOLD)
    os.chown(office.file, 65534, -1)
    ((message, hint),) = told(office)
    assert (
        f"belong to other users, who can change what is backed up and which programs backupd runs: {office.file}"
        in (message)
    )
    assert f"chown {os.geteuid()} FILE" in hint

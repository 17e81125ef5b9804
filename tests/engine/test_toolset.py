from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from backupd.engine.toolset import find_tool, physical_backup_tool, row_for, server_program
from backupd.model.errors import ToolError, ToolMissingError
from backupd.model.server import Flavour, Version


def _program(folder: Path, version: str, *, stream: int = 1, name: str = "tool") -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version}' >&{stream}\n")
    path.chmod(0o755)
    return str(path)


def _installed() -> Version:
    return find_tool(("mariadb-backup",)).version


def test_the_tool_of_the_servers_series_is_found_with_path_version_and_digest() -> None:
    tool = physical_backup_tool(Flavour.MARIADB, _installed())
    assert tool.name == "mariadb-backup"
    assert tool.version.series == _installed().series
    assert tool.sha256 == hashlib.sha256(Path(tool.path).read_bytes()).hexdigest()
    server = server_program(Flavour.MARIADB, _installed())
    assert server.name == "mariadbd"
    assert "MariaDB" in server.version_text


@pytest.mark.parametrize("version", [Version(10, 9, 3), Version(11, 4, 2)])
def test_a_tool_of_another_series_is_refused_and_the_right_one_named(version: Version) -> None:
    with pytest.raises(ToolError, match=f"cannot back up or prepare files of a mariadb {version} server") as caught:
        physical_backup_tool(Flavour.MARIADB, version)
    assert f"mariadb-backup {version.series}" in caught.value.hint
    with pytest.raises(ToolError, match="must not be started on files of") as caught:
        server_program(Flavour.MARIADB, version)
    assert f"mariadb server {version.series}" in caught.value.hint


@pytest.mark.parametrize(("flavour", "version", "needed"), [
    (Flavour.MYSQL, Version(8, 0, 36), "Percona XtraBackup of the series 8.0"),
    (Flavour.PERCONA, Version(8, 4, 1), "Percona XtraBackup of the series 8.4"),
    (Flavour.MARIADB, Version(10, 6, 2), "mariadb-backup of a server from 10.8 on"),
    (Flavour.MARIADB, Version(5, 5, 1), "mariadb-backup of a server from 10.8 on"),
])
def test_what_is_not_supported_is_said_with_what_it_would_need(flavour: Flavour, version: Version, needed: str) -> None:
    with pytest.raises(ToolError, match=f"physical backups of {flavour} {version} are not supported") as caught:
        physical_backup_tool(flavour, version)
    assert needed in caught.value.detail
    assert caught.value.hint


def test_receipts_are_called_after_the_series() -> None:
    assert row_for(Flavour.MARIADB, Version(10, 11, 1)).receipts.info == "xtrabackup_info"
    assert row_for(Flavour.MARIADB, Version(11, 0, 9)).receipts.info == "xtrabackup_info"
    assert row_for(Flavour.MARIADB, Version(11, 1, 0)).receipts.info == "mariadb_backup_info"
    assert row_for(Flavour.MARIADB, Version(12, 3, 0)).receipts.info == "mariadb_backup_info"


def test_a_configured_path_wins_over_the_search(tmp_path: Path) -> None:
    path = _program(tmp_path, "mariadb-backup based on MariaDB server 10.11.99-MariaDB Linux (x86_64)", stream=2)
    tool = physical_backup_tool(Flavour.MARIADB, Version(10, 11, 5), paths={"mariadb-backup": path})
    assert (tool.path, str(tool.version)) == (path, "10.11.99")


def test_a_replaced_program_is_looked_at_again(tmp_path: Path) -> None:
    path = _program(tmp_path, "x Ver 10.11.1")
    assert find_tool(("x",), paths={"x": path}).version == Version(10, 11, 1)
    _program(tmp_path, "x Ver 10.11.22-longer")
    assert find_tool(("x",), paths={"x": path}).version == Version(10, 11, 22)


def test_a_missing_program_and_a_program_that_is_something_else_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ToolMissingError) as missing:
        find_tool(("no-such-tool-1", "no-such-tool-2"), hint="install it")
    assert "no-such-tool-1" in missing.value.message
    assert missing.value.hint == "install it"
    path = _program(tmp_path, "hello")
    with pytest.raises(ToolError, match="does not tell its version"):
        find_tool(("x",), paths={"x": path})


def test_another_flavours_server_is_not_started(tmp_path: Path) -> None:
    path = _program(tmp_path, "mysqld  Ver 10.11.2 for Linux on x86_64 (MySQL Community Server - GPL)")
    with pytest.raises(ToolError, match="must not be started"):
        server_program(Flavour.MARIADB, Version(10, 11, 2), paths={"mariadbd": path})

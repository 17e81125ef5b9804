from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from backupd.engine.physical.clone import Clone
from backupd.engine.physical.mariabackup_xtrabackup import XtraBackup
from backupd.engine.sql.client import Session
from backupd.engine.toolset import (
    find_tool,
    physical_backup_tool,
    physical_tool,
    refuse_unfit,
    row_for,
    server_program,
    shortcomings,
)
from backupd.model.errors import RefusedError, ToolError, ToolMissingError
from backupd.model.server_facts import Flavour, Position, Tool, Version
from tests.support.catalog.samples import server_info

SERVER = server_info(
    flavour=Flavour.MYSQL,
    version=Version(9, 7, 4),
    version_text="",
    gtid_mode="on",
    position=Position(),
    engines={},
    variables={},
)


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


@pytest.mark.parametrize(
    ("flavour", "version", "supported"),
    [
        (Flavour.MYSQL, Version(5, 1, 73), "5.5 to before 8.0"),
        (Flavour.PERCONA, Version(10, 1, 1), "8.1 to before 10.0"),
        (Flavour.MARIADB, Version(10, 6, 2), "10.8 to before 11.1"),
        (Flavour.MARIADB, Version(5, 5, 1), "11.1 to before 14.0"),
    ],
)
def test_what_is_not_supported_is_said_with_what_is(flavour: Flavour, version: Version, supported: str) -> None:
    with pytest.raises(ToolError, match=f"physical backups of {flavour} {version} are not supported") as caught:
        physical_backup_tool(flavour, version)
    assert supported in caught.value.detail
    assert caught.value.hint


XTRABACKUP = "xtrabackup version {} based on MySQL server 5.7.13 Linux (x86_64) (revision id: a1)"
MYSQLD = "{}/mysqld  Ver {} for Linux on x86_64 (MySQL Community Server - GPL)"


@pytest.mark.parametrize(
    ("flavour", "server", "xtrabackup", "chosen"),
    [
        (Flavour.MYSQL, Version(5, 6, 24), "2.4.4", "xtrabackup"),
        (Flavour.PERCONA, Version(5, 7, 13), "2.4.29", "xtrabackup"),
        (Flavour.MYSQL, Version(5, 7, 44), "8.0.35", ""),
        (Flavour.MYSQL, Version(8, 0, 16), "8.0.35", "xtrabackup"),
        (Flavour.MYSQL, Version(8, 0, 16), "8.0.14", ""),
        (Flavour.MYSQL, Version(8, 0, 16), "", ""),
        (Flavour.MYSQL, Version(8, 0, 36), "8.0.36", "xtrabackup"),
        (Flavour.MYSQL, Version(8, 0, 36), "8.0.35-35", "xtrabackup"),
        (Flavour.PERCONA, Version(8, 0, 43), "8.0.35-30", "xtrabackup"),
        (Flavour.PERCONA, Version(8, 0, 45), "8.0.34-29", "xtrabackup"),
        (Flavour.MYSQL, Version(8, 0, 20), "8.0.34-29", "xtrabackup"),
        (Flavour.MYSQL, Version(8, 0, 34), "8.0.33-28", "clone"),
        (Flavour.MYSQL, Version(8, 0, 33), "8.0.33-28", "xtrabackup"),
        (Flavour.MYSQL, Version(8, 4, 7), "8.4.0-4", "xtrabackup"),
        (Flavour.MYSQL, Version(8, 4, 7), "8.3.0-1", "clone"),
        (Flavour.MYSQL, Version(9, 1, 0), "9.1.0-1", "xtrabackup"),
        (Flavour.MYSQL, Version(9, 2, 0), "9.1.0-1", "clone"),
        (Flavour.PERCONA, Version(8, 4, 1), "8.4.0", "xtrabackup"),
        (Flavour.MYSQL, Version(8, 4, 1), "8.0.36", "clone"),
        (Flavour.MYSQL, Version(9, 7, 4), "", "clone"),
    ],
)
def test_the_best_tool_that_is_installed_and_fits_is_taken(
    tmp_path: Path, flavour: Flavour, server: Version, xtrabackup: str, chosen: str
) -> None:
    paths = {
        "mysqld": _program(tmp_path, MYSQLD.format(tmp_path, server), name="mysqld"),
        "xtrabackup": "/nonexistent/xtrabackup",
    }
    if xtrabackup:
        paths["xtrabackup"] = _program(tmp_path, XTRABACKUP.format(xtrabackup), stream=2, name="xtrabackup")
    if chosen:
        assert physical_backup_tool(flavour, server, paths=paths).name == chosen
    else:
        with pytest.raises(ToolError) as caught:
            physical_backup_tool(flavour, server, paths=paths)
        assert "percona-xtrabackup" in caught.value.hint


@pytest.mark.parametrize(
    ("xtrabackup", "sentence"),
    [
        (
            "8.0.33-28",
            "files of a mysql 8.0.36 server, so clone is used instead; install percona-xtrabackup-80 (8.0.34",
        ),
        ("/nonexistent", "does not exist, so clone is used instead"),
    ],
)
def test_a_tool_that_is_passed_over_is_named_with_the_reason(tmp_path: Path, xtrabackup: str, sentence: str) -> None:
    info = replace(SERVER, version=Version(8, 0, 36), engines={"InnoDB": 1})
    paths = {"mysqld": _program(tmp_path, MYSQLD.format(tmp_path, "8.0.36"), name="mysqld")}
    paths["xtrabackup"] = (
        xtrabackup
        if xtrabackup.startswith("/")
        else _program(tmp_path, XTRABACKUP.format(xtrabackup), name="xtrabackup")
    )
    tool = physical_tool(info, paths=paths)
    assert tool.tool.name == "clone"
    (told,) = (line for line in shortcomings(tool, info, paths=paths) if "is used instead" in line)
    assert sentence in told


def test_a_server_without_any_tool_is_told_of_both(tmp_path: Path) -> None:
    paths = {"mysqld": "/nonexistent/mysqld", "xtrabackup": "/nonexistent/xtrabackup"}
    with pytest.raises(ToolMissingError) as caught:
        physical_backup_tool(Flavour.MYSQL, Version(8, 4, 3), paths=paths)
    assert "XtraBackup 8.4 (percona-xtrabackup-84) or the server's own program mysqld" in caught.value.hint
    paths["mysqld"] = _program(tmp_path, MYSQLD.format(tmp_path, "8.4.2"), name="mysqld")
    with pytest.raises(ToolError, match=r"clone 8\.4\.2 cannot back up") as other:
        physical_backup_tool(Flavour.MYSQL, Version(8, 4, 3), paths=paths)
    assert "does not exist" in other.value.detail


def test_a_restore_takes_the_kind_of_tool_that_made_the_backup(tmp_path: Path) -> None:
    info = replace(SERVER, flavour=Flavour.MYSQL, version=Version(8, 4, 1))
    paths = {"xtrabackup": _program(tmp_path, XTRABACKUP.format("8.4.0"), name="xtrabackup")}
    made = Tool("clone", "/usr/sbin/mysqld", Version(8, 4, 1), "", "")
    assert isinstance(physical_tool(info, paths=paths, made_by=made), Clone)
    assert isinstance(physical_tool(info, paths=paths, made_by=replace(made, name="xtrabackup")), XtraBackup)
    with pytest.raises(ToolMissingError):
        physical_tool(info, paths={"xtrabackup": "/nonexistent/x"}, made_by=replace(made, name="xtrabackup"))
    with pytest.raises(ToolError, match="by mysqldump cannot be restored"):
        physical_tool(info, paths=paths, made_by=replace(made, name="mysqldump"))


@pytest.mark.parametrize(
    ("tool", "encrypted", "refused"),
    [
        ("xtrabackup", ("shop/cards",), True),
        ("xtrabackup", ("encrypt_binlog",), False),
        ("xtrabackup", (), False),
        ("mariadb-backup", ("shop/cards",), False),
    ],
)
def test_xtrabackup_is_not_let_at_encrypted_tablespaces(tool: str, encrypted: tuple[str, ...], refused: bool) -> None:
    made = Tool(tool, f"/usr/bin/{tool}", Version(2, 4, 20), "", "")
    info, unasked = replace(SERVER, encrypted=encrypted), cast(Session, None)
    if not refused:
        refuse_unfit(unasked, info, made)
        return
    with pytest.raises(RefusedError, match="1 tablespaces of this server are encrypted, and backupd cannot") as no:
        refuse_unfit(unasked, info, made)
    assert no.value.detail == "shop/cards"


def test_what_a_clone_leaves_out_is_said() -> None:
    clone = Clone(Tool("clone", "/usr/sbin/mysqld", Version(9, 7, 4), "", ""))
    (sentence,) = shortcomings(clone, replace(SERVER, engines={"InnoDB": 7, "MyISAM": 2}))
    assert "2 tables of engine MyISAM come back empty" in sentence


def test_receipts_are_called_after_the_series() -> None:
    assert row_for(Flavour.MARIADB, Version(10, 11, 1)).families[0].names.info == "xtrabackup_info"
    assert row_for(Flavour.MARIADB, Version(11, 0, 9)).families[0].names.info == "xtrabackup_info"
    assert row_for(Flavour.MARIADB, Version(11, 1, 0)).families[0].names.info == "mariadb_backup_info"
    assert row_for(Flavour.MARIADB, Version(12, 3, 0)).families[0].names.info == "mariadb_backup_info"


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
    with pytest.raises(ToolError, match="cannot determine the version of"):
        find_tool(("x",), paths={"x": path})


def test_another_flavours_server_is_not_started(tmp_path: Path) -> None:
    path = _program(tmp_path, "mysqld  Ver 10.11.2 for Linux on x86_64 (MySQL Community Server - GPL)")
    with pytest.raises(ToolError, match="must not be started"):
        server_program(Flavour.MARIADB, Version(10, 11, 2), paths={"mariadbd": path})
    with pytest.raises(ToolError, match="must not be started") as caught:
        server_program(Flavour.MARIADB, Version(11, 0, 2), paths={"mysqld": path})
    assert "`programs: {mariadbd: /path/to/mariadbd}`" in caught.value.hint


def test_a_program_named_for_another_server_of_the_host_does_not_hide_the_one_that_fits(tmp_path: Path) -> None:
    path = _program(tmp_path, "mysqld  Ver 9.7.4 for Linux on x86_64 (MySQL Community Server - GPL)")
    found = server_program(Flavour.MARIADB, _installed(), paths={"mysqld": path})
    assert (found.name, found.version) == ("mariadbd", _installed())

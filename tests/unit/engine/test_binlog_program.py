"""mysqlbinlog: how it is found."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from backupd.engine.binlog_program import binlog_program
from backupd.model.errors import ToolError, ToolMissingError
from backupd.model.server_facts import Flavour
from tests.support.servers.mysql import beside, mysqld, why_not


def test_the_servers_own_family_is_found() -> None:
    assert binlog_program(Flavour.MARIADB).name in ("mariadb-binlog", "mysqlbinlog")


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_of_mysql_too_and_never_the_others() -> None:
    program = beside(mysqld(), "mysqlbinlog")
    assert binlog_program(Flavour.MYSQL, paths={"mysqlbinlog": program}).path == program
    with pytest.raises(ToolError, match="cannot read the binary logs of a mariadb server") as refused:
        binlog_program(Flavour.MARIADB, paths={"mariadb-binlog": program})
    assert "apt-get install mariadb-client" in refused.value.hint
    with pytest.raises(ToolError, match="cannot read the binary logs of a mysql server") as refused:
        binlog_program(Flavour.MYSQL, paths={"mysqlbinlog": binlog_program(Flavour.MARIADB).path})
    assert "programs: {mysqlbinlog:" in refused.value.hint


def test_a_missing_program_says_what_to_install() -> None:
    with pytest.raises(ToolMissingError):
        binlog_program(Flavour.MARIADB, paths={"mariadb-binlog": "/nowhere/mariadb-binlog"})


def test_a_program_that_tells_no_version_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "mysqlbinlog"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ToolError, match="cannot determine the version of"):
        binlog_program(Flavour.MYSQL, paths={"mysqlbinlog": str(program)})

"""The copying program: how it is found, called and understood."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from backupd.engine.log_client import BinlogTool, EndKind, binlog_tool, connection_id, end_kind, not_made
from backupd.engine.sql.client import Connection
from backupd.model.errors import ToolError, ToolMissingError
from backupd.model.server_facts import Flavour, Tool, Version
from tests.support.servers.mysql import beside, mysqld, why_not

TOOL = Tool("mysqlbinlog", "/opt/bin/mysqlbinlog", Version(9, 7, 4), "Ver 9.7.4")


def test_the_servers_own_family_is_found() -> None:
    found = binlog_tool(Flavour.MARIADB)
    assert found.tool.name in ("mariadb-binlog", "mysqlbinlog")
    assert found.id_option == "stop-never-slave-server-id"


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_of_mysql_too_and_never_the_others() -> None:
    program = beside(mysqld(), "mysqlbinlog")
    assert binlog_tool(Flavour.MYSQL, paths={"mysqlbinlog": program}).id_option == "connection-server-id"
    with pytest.raises(ToolError, match="cannot copy the binary logs of a mariadb server") as refused:
        binlog_tool(Flavour.MARIADB, paths={"mariadb-binlog": program})
    assert "apt-get install mariadb-client" in refused.value.hint


def test_a_missing_program_says_what_to_install() -> None:
    with pytest.raises(ToolMissingError):
        binlog_tool(Flavour.MARIADB, paths={"mariadb-binlog": "/nowhere/mariadb-binlog"})


def test_a_program_that_tells_no_version_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "mysqlbinlog"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(ToolError, match="cannot determine the version of"):
        binlog_tool(Flavour.MYSQL, paths={"mysqlbinlog": str(program)})


def test_the_call_holds_no_secret_and_a_folder_of_its_own() -> None:
    tool = BinlogTool(TOOL, "connection-server-id", modes=True)
    command = tool.stream(Path("/run/o1.cnf"), Path("/spool/incoming"), "binlog.000007", 4_000_000_000)
    assert command.argv == (
        "/opt/bin/mysqlbinlog",
        "--defaults-file=/run/o1.cnf",
        "--read-from-remote-server",
        "--raw",
        "--result-file=./",
        "--stop-never",
        "--connection-server-id=4000000000",
        "binlog.000007",
    )
    assert command.cwd == Path("/spool/incoming")
    once = tool.fetch(Path("/run/o1.cnf"), Path("/spool/incoming"), "binlog.000007", 4_000_000_000)
    assert "--stop-never" not in once.argv


def test_each_family_gets_the_options_that_it_knows() -> None:
    far = Connection(host="db1", user="u", password="p", ssl={"ca": "/ca.pem", "verify-server-cert": ""})
    mariadb = BinlogTool(TOOL, "x", modes=False).option_groups(far)["client"]
    assert (mariadb["ssl-ca"], mariadb["ssl-verify-server-cert"]) == ("/ca.pem", None)
    mysql = BinlogTool(TOOL, "x", modes=True)
    options = mysql.option_groups(far)["client"]
    assert (options["ssl-ca"], options["ssl-mode"]) == ("/ca.pem", "VERIFY_IDENTITY")
    assert "ssl-verify-server-cert" not in options

    def mode(**ssl: str) -> str | None:
        there = Connection(host="db1", ssl={name.replace("_", "-"): value for name, value in ssl.items()})
        return mysql.option_groups(there)["client"].get("ssl-mode")

    assert mode(ca="/ca.pem") == "VERIFY_CA"
    assert mode(cert="/c", key="/k") == "REQUIRED"
    assert mode(ca="/ca.pem", verify_server_cert="OFF") == "VERIFY_CA"
    assert mode() is None
    assert "loose-get-server-public-key" in mysql.option_groups(Connection(host="db1"))["client"]
    assert mysql.option_groups(Connection(socket="/s"))["client"] == {"socket": "/s"}


def test_the_connection_id_is_stable_high_and_nobody_elses() -> None:
    one = connection_id("db1", "here")
    assert one == connection_id("db1", "here")
    assert 2**31 <= one < 2**32 - 1
    assert len({one, connection_id("db2", "here"), connection_id("db1", "there")}) == 3
    assert connection_id("db1", "here", {one}) == one + 1


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("", EndKind.LOST),
        ("ERROR: Got error reading packet from server: Lost connection to server during query", EndKind.LOST),
        (
            "ERROR: Got error reading packet from server: Could not find first log file name in binary log index file",
            EndKind.NOT_THERE,
        ),
        (
            (
                "ERROR: Got error reading packet from server: File './binlog.000011' not found (Errcode: 2 \"No such "
                'file")'
            ),
            EndKind.NOT_THERE,
        ),
        ("ERROR: Got error reading packet from server: could not find next log; the first event", EndKind.NO_NEXT),
        (
            (
                "ERROR: Got error reading packet from server: A slave with the same server_uuid/server_id is already "
                "connected"
            ),
            EndKind.TWIN,
        ),
        (
            (
                "ERROR: Got error reading packet from server: binlog truncated in the middle of event; consider out "
                "of disk"
            ),
            EndKind.TORN,
        ),
        ("ERROR: Failed on connect: Can't connect to local server through socket", EndKind.UNREACHABLE),
        ("ERROR: Failed on connect: Access denied for user 'u'@'localhost'", EndKind.DENIED),
        ("mysqlbinlog: [ERROR] unknown option '--ssl'.", EndKind.DENIED),
        (
            (
                "mysqlbinlog: [Warning] unknown option '--loose-x'\nERROR: Got error reading packet from server: "
                "Lost connection"
            ),
            EndKind.LOST,
        ),
        ("Warning: mysqlbinlog: unknown option '--loose-get-server-public-key'", EndKind.LOST),
        ("ERROR: Could not write into log file '/spool/incoming/binlog.000002'", EndKind.DISK),
        ("ERROR: Could not create output log file: ./../../x", EndKind.MISNAMED),
        ("ERROR: Could not create log file './../../x'", EndKind.MISNAMED),
        ("something new", EndKind.OTHER),
    ],
)
def test_its_last_words_are_understood(said: str, kind: EndKind) -> None:
    assert end_kind(said) is kind
    assert not_made(said) == ("../../x" if kind is EndKind.MISNAMED else "")

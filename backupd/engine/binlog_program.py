"""mysqlbinlog, or mariadb-binlog: the program that turns binary logs into statements, for a replay by pipe."""

from __future__ import annotations

from collections.abc import Mapping

from backupd.engine.sql.client import help_of
from backupd.engine.toolset import NO_PATHS, find_tool
from backupd.model.errors import ToolError
from backupd.model.server_facts import Flavour, Tool

_ONLY_MARIADB = "print-row-count"


def binlog_program(flavour: Flavour, *, paths: Mapping[str, str] = NO_PATHS) -> Tool:
    """The program that reads the binary logs of such a server. ``paths``: as of toolset.

    Raises ToolMissingError, or ToolError where what is installed is the other family's.
    """
    if flavour is Flavour.MARIADB:
        tool = find_tool(("mariadb-binlog", "mysqlbinlog"), paths=paths)
    else:
        tool = find_tool(("mysqlbinlog",), paths=paths, hint=_to_install(flavour))
    is_mariadb = _ONLY_MARIADB in help_of(tool.path, tool.sha256)
    if is_mariadb is not (flavour is Flavour.MARIADB):
        raise ToolError(
            f"{tool.path} cannot read the binary logs of a {flavour} server",
            detail=f"it is {'MariaDB' if is_mariadb else 'MySQL'}'s: {tool.version_text}",
            hint=_to_install(flavour),
        )
    return tool


def _to_install(flavour: Flavour) -> str:
    if flavour is Flavour.MARIADB:
        return "apt-get install mariadb-client, or name the program: `programs: {mariadb-binlog: /path/to/it}`"
    return (
        "install the MySQL client programs of the server's series, or name the program:"
        " `programs: {mysqlbinlog: /path/to/mysqlbinlog}`"
    )

"""How client programs of both families, ``mariadb`` and ``mysql`` with their kin, are told of a server."""

from __future__ import annotations

import functools
from dataclasses import replace

from backupd.engine.sql.client import Connection
from backupd.engine.sql.tls import Tls, verifies
from backupd.model.server_facts import Tool
from backupd.process.command import Command
from backupd.process.pipeline import run

_MODES = {Tls.VERIFY_FULL: "VERIFY_IDENTITY", Tls.VERIFY_CA: "VERIFY_CA", Tls.REQUIRED: "REQUIRED", Tls.OFF: "DISABLED"}


def ssl_mode(connection: Connection, *, with_ca: str = "REQUIRED") -> str:
    """What MySQL's programs call ``--ssl-mode``; "" where nothing was said. ``with_ca``: where an option file names a
    CA and no more."""
    if connection.tls is not None:
        return _MODES[connection.tls]
    if verifies(connection.ssl):
        return "VERIFY_IDENTITY"
    if {"ca", "capath"} & set(connection.ssl):
        return with_ca
    return "REQUIRED" if connection.ssl else ""


def has_modes(tool: Tool) -> bool:
    """Does it know ``--ssl-mode``? MariaDB's do not, nor MySQL's before 5.7.11. Raises ToolError."""
    return "--ssl-mode" in help_of(tool.path, tool.sha256)


@functools.lru_cache(maxsize=8)
def help_of(path: str, _digest: str) -> str:
    """What the program says to ``--help``. Raises ToolError."""
    return run(Command((path, "--no-defaults", "--help")), timeout=30).stdout.decode("utf-8", "replace")


def client_options(connection: Connection, *, modes: bool) -> dict[str, dict[str, str | None]]:
    """What a client program's option file holds, in the words of its family: MySQL's know other names for TLS, and end
    at an option that they do not know. ``modes``: of ``has_modes``."""
    if not modes:
        return connection.option_groups()
    plain = {name: value for name, value in connection.ssl.items() if name != "verify-server-cert"}
    groups = replace(connection, ssl=plain, tls=None).option_groups()
    mode = ssl_mode(connection, with_ca="VERIFY_CA")
    if mode:
        groups["client"]["ssl-mode"] = mode
    if mode in ("", "DISABLED") and not connection.socket:
        groups["client"]["loose-get-server-public-key"] = None  # for accounts of caching_sha2_password without TLS
    return groups

"""The client program: ``mariadb`` or ``mysql``. It reads what only it understands, scripts with DELIMITER: triggers,
views, routines and events of a logical backup, and files of SQL that people load by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import BinaryIO

from backupd.engine.client import Connection
from backupd.engine.toolset import NO_PATHS, find_tool
from backupd.model.errors import ServerError, ToolError
from backupd.model.server import Flavour, Tool
from backupd.process.command import Command
from backupd.process.optionfile import option_file
from backupd.process.pipeline import Pipeline

_PACKET = "1G"
_PIECE = 1024 * 1024
_OFF = ("0", "off", "false", "disabled")


def client_options(connection: Connection, *, mariadb: bool) -> dict[str, dict[str, str | None]]:
    """What a client program's option file holds, in the words of its family: MySQL's know other names for TLS, and end
    at an option that they do not know."""
    if mariadb:
        return connection.option_groups()
    verified = connection.ssl.get("verify-server-cert")
    plain = {name: value for name, value in connection.ssl.items() if name != "verify-server-cert"}
    groups = replace(connection, ssl=plain).option_groups()
    if verified is not None and verified.lower() not in _OFF:
        groups["client"]["ssl-mode"] = "VERIFY_IDENTITY"
    elif {"ca", "capath"} & set(connection.ssl):
        groups["client"]["ssl-mode"] = "VERIFY_CA"
    elif connection.ssl:
        groups["client"]["ssl-mode"] = "REQUIRED"
    elif not connection.socket:
        groups["client"]["loose-get-server-public-key"] = None  # for accounts of caching_sha2_password without TLS
    return groups


@dataclass(frozen=True, slots=True)
class ClientTool:
    tool: Tool

    @property
    def mariadb(self) -> bool:
        """Is it MariaDB's, whatever its name is?"""
        return "mariadb" in self.tool.version_text.lower()

    def run(self, connection: Connection, script: bytes | Path, *, schema: str = "", log: Path | None = None,
            cancel: Event | None = None) -> None:
        """Execute a script in ``schema`` up to its first error. Raises ServerError with the server's words for one of
        those, ToolError when the client fails otherwise, CancelledError."""
        def feed(sink: BinaryIO) -> None:
            if isinstance(script, bytes):
                sink.write(script)
                return
            with script.open("rb") as source:
                while piece := source.read(_PIECE):
                    sink.write(piece)

        groups = client_options(connection, mariadb=self.mariadb)
        if schema:
            groups["client"]["database"] = schema
        with option_file(groups) as options:
            command = Command((self.tool.path, f"--defaults-file={options}", "--binary-mode", "--batch",
                               "--default-character-set=utf8mb4", f"--max-allowed-packet={_PACKET}"))
            try:
                with Pipeline([command], feed=feed, log=log, cancel=cancel) as pipeline:
                    pipeline.drain()
            except ToolError as error:
                said = [line for line in error.detail.splitlines() if "ERROR " in line]
                if not said:
                    raise
                raise ServerError(f"the server at {connection.address} refused a script", detail=said[-1]) from error


def client_tool(flavour: Flavour, *, paths: Mapping[str, str] = NO_PATHS) -> ClientTool:
    """The client for servers of this flavour; the other family's serves where it is all there is. ``paths``: as of
    toolset. Raises ToolMissingError, ToolError."""
    names = ("mariadb", "mysql") if flavour is Flavour.MARIADB else ("mysql", "mariadb")
    hint = ("install the client programs of the server on this host, or name one: "
            f"`programs: {{{names[0]}: /path/to/{names[0]}}}`")
    return ClientTool(find_tool(names, paths=paths, hint=hint))

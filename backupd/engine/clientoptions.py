"""How client programs of both families, ``mariadb`` and ``mysql`` with their kin, are told of a server."""

from __future__ import annotations

from dataclasses import replace

from backupd.engine.client import Connection

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

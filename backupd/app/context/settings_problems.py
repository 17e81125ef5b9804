"""Incidents about the settings in force: servers that are reached without `tls:`, and policies that cannot be used.

Servers whose policy is broken are left out by the service; the others go on.
"""

from __future__ import annotations

import logging

from backupd.alerts.conditions import Condition, Key
from backupd.alerts.rules import POLICY, TLS
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import ServerSettings, Settings
from backupd.app.context.wiring import Wiring
from backupd.backup.finding import Finding, error, fine, warning
from backupd.engine.sql.client import Connection
from backupd.engine.sql.option_files import Tls, is_this_host, verifies
from backupd.model.errors import ConfigurationError, Problem, RefusedError
from backupd.model.event import Severity
from backupd.model.text import few

SUBJECT = "tls"
_HINT = (
    "set `tls: verify-full` and `tls_ca` for it (docs/installing.md says where its CA is), or `tls: off` where "
    "the network is private; a later version will refuse such a server without it"
)
_KNOWN = {
    Tls.VERIFY_FULL: "the certificate must be signed by a known CA and carry the server's name",
    Tls.VERIFY_CA: "the certificate must be signed by a known CA; any other certificate of that CA is accepted as well",
    Tls.REQUIRED: "the connection is encrypted, but anybody can impersonate the server",
}


def is_open(connection: Connection) -> bool:
    """Can somebody between read and change what goes over this connection, without anybody having chosen that?"""
    return (
        not connection.socket
        and not is_this_host(connection.host)
        and connection.tls is None
        and not verifies(connection.ssl)
    )


def findings(connection: Connection) -> list[Finding]:
    """Of one server."""
    if connection.socket:
        return []
    if is_open(connection):
        return [
            error(
                SUBJECT,
                f"`tls:` is not set for {connection.address}: anybody on the network path can read and change what is "
                "backed up, and learn the password of the account",
                _HINT,
            )
        ]
    if connection.tls is None or (connection.tls is Tls.OFF and is_this_host(connection.host)):
        return []
    if connection.tls is Tls.OFF:
        return [
            warning(
                SUBJECT,
                f"tls: off: anybody on the network path to {connection.address} can read and change backups",
                "set verify-full if the server has a certificate",
            )
        ]
    return [fine(SUBJECT, f"{connection.tls}: {_KNOWN[connection.tls]}")]


def report_transport(wiring: Wiring) -> None:
    """One incident for each server, and each member of a group, that is reached without a word on TLS, until there is
    one. Raises CatalogError."""
    for server in wiring.settings.ways():
        name = server.way
        try:
            unprotected = is_open(server.connection())
        except ConfigurationError:
            continue  # of files that cannot be read, `check` and each job report; nobody knows whether `tls:` is there
        key = Key(TLS, server.name, name)
        if not unprotected:
            wiring.settle(looked={key: f"`tls:` is set for {name}"})
            continue
        message = (
            f"{name} is reached over the network and `tls:` is not set for it: anybody on the network path can read "
            "and change its backups"
        )
        hint = f"its backups continue. {_HINT}"
        if wiring.settle(Condition(key, Severity.ERROR, message, hint=hint)).opened:
            say(TLS.broken, message, level=logging.ERROR, server=server.name)


_REMEMBERED = 1000
_NAMED = 5
"""Servers that a message names."""
_BROKEN_HINT = "correct it, then reload: systemctl reload backupd. `backupd policy validate FILE` says when it is valid"


def left_out(settings: Settings) -> tuple[ServerSettings, ...]:
    """Servers whose policy cannot be used."""
    followed, usable = settings.followed(), settings.policies
    return tuple(settings.server(name) for name, policy in followed.items() if policy not in usable)


def refuse_newly_broken(old: Settings, new: Settings) -> None:
    """Raises ConfigurationError when a server of ``new`` loses its policy, or comes with a broken one. One that had no
    usable policy before keeps nothing from being changed."""
    before = {(server.name, server.policy_name) for server in left_out(old)}
    lost = [server for server in left_out(new) if (server.name, server.policy_name) not in before]
    problems: dict[Problem, None] = dict.fromkeys(problem for server in lost for problem in server.problems)
    if lost:
        raise ConfigurationError(sorted(problems, key=lambda one: (one.file, one.line or 0)))


def refuse_lost_files(old: Settings, new: Settings) -> None:
    """Raises RefusedError where no file of servers is left, and servers that were in such files are in ``new`` no more:
    the folder was probably moved, or is not mounted."""
    lost = sorted(set(old.files) - set(new.servers) - set(new.members))
    if lost and not new.files:
        folder = new.configuration.servers_folder
        raise RefusedError(
            f"there is no file of servers in {folder} any more: {few(lost, _NAMED)} would not be backed up",
            hint="check that the folder is mounted; to remove these servers on purpose, restart the service",
        )


def report_policies(wiring: Wiring) -> None:
    """Say which policies cannot be used; for servers that follow one record an event, and another when it is whole
    again. Raises CatalogError."""
    settings = wiring.settings
    for problem in settings.unused():
        say(POLICY.broken, f"{problem} (no server follows this policy)", level=logging.WARNING)
    broken = {(server.name, server.policy_name): server for server in left_out(settings)}
    for (name, policy), server in broken.items():
        detail = "\n".join(map(str, server.problems))
        message = f"policy {policy} cannot be used, so nothing of {name} is backed up by the service"
        say(POLICY.broken, f"{message}\n{detail}\nhint: {_BROKEN_HINT}", level=logging.ERROR, server=name)
        wiring.settle(Condition(Key(POLICY, name, policy), Severity.ERROR, message, detail, _BROKEN_HINT))
    events = wiring.catalog.events.list(kind=POLICY.broken, limit=_REMEMBERED)
    for name, policy in sorted({(event.server, event.subject) for event in events} - set(broken)):
        if name not in settings.servers:
            continue  # that is reported of all its incidents at once
        message = f"{name} does not follow policy {policy} any more"
        if settings.server(name).policy_name == policy:
            message = f"policy {policy} is valid again: {name} is backed up as it says"
        wiring.settle(looked={Key(POLICY, name, policy): message})

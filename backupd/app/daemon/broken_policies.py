"""Policies that cannot be used while the service runs: their servers are left out and told, the others go on."""

from __future__ import annotations

import logging

from backupd.app.context.incidents import POLICY, Incidents
from backupd.app.context.logging_setup import say
from backupd.app.context.settings import ServerSettings, Settings
from backupd.app.context.wiring import Wiring
from backupd.model.errors import ConfigurationError, Problem
from backupd.model.event import Event, Severity

_REMEMBERED = 1000
_HINT = "mend it, then reload: systemctl reload backupd. `backupd policy validate FILE` says when it is whole"


def left_out(settings: Settings) -> tuple[ServerSettings, ...]:
    """Servers whose policy cannot be used."""
    return tuple(server for name in settings.servers if not (server := settings.server(name)).usable)


def refuse_newly_broken(old: Settings, new: Settings) -> None:
    """Raises ConfigurationError when a server of ``new`` loses its policy, or comes with a broken one. One that had no
    usable policy before keeps nothing from being changed."""
    before = {(server.name, server.policy_name) for server in left_out(old)}
    lost = [server for server in left_out(new) if (server.name, server.policy_name) not in before]
    problems: dict[Problem, None] = dict.fromkeys(problem for server in lost for problem in server.problems)
    if lost:
        raise ConfigurationError(sorted(problems, key=lambda one: (one.file, one.line or 0)))


def tell_policies(wiring: Wiring) -> None:
    """Say which policies cannot be used; for servers that follow one record an event, and another when it is whole
    again. Raises CatalogError."""
    settings, now = wiring.settings, wiring.clock()
    for problem in settings.unused():
        say(POLICY.broken, f"{problem} (no server follows this policy)", level=logging.WARNING)
    incidents = Incidents(wiring.catalog)
    broken = {(server.name, server.policy_name): server for server in left_out(settings)}
    for (name, policy), server in broken.items():
        detail = "\n".join(map(str, server.problems))
        message = f"policy {policy} cannot be used, so nothing of {name} is backed up by the service"
        say(POLICY.broken, f"{message}\n{detail}\nhint: {_HINT}", level=logging.ERROR, server=name)
        incidents.broken(
            POLICY,
            Event(now, POLICY.broken, Severity.ERROR, message, server=name, subject=policy, detail=detail, hint=_HINT),
        )
    events = wiring.catalog.events.list(kind=POLICY.broken, limit=_REMEMBERED)
    for name, policy in sorted({(event.server, event.subject) for event in events} - set(broken)):
        if name not in settings.servers:
            continue  # that is told of all its incidents at once
        follows = settings.server(name).policy_name == policy
        message = (
            f"policy {policy} is whole again: {name} is backed up as it says"
            if follows
            else f"{name} does not follow policy {policy} any more"
        )
        incidents.mended(POLICY, Event(now, POLICY.mended, Severity.INFO, message, server=name, subject=policy))

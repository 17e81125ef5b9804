"""Recording who did what, by whatever door."""

from __future__ import annotations

import logging

from backupd.app.context.logging_setup import say
from backupd.app.context.wiring import Wiring, user
from backupd.model.access import Actor, AuditEntry, Role, Via
from backupd.model.errors import CatalogError

_LONGEST = 2000
"""Characters of a detail: a request's text is not kept whole."""


def command_line() -> Actor:
    """Whoever calls the program: who may do that is a matter of the operating system."""
    return Actor(user(), Role.ADMIN, Via.CLI)


def by_itself() -> Actor:
    """The rules and the service, when nobody asks for what they do."""
    return Actor("backupd", Role.ADMIN, Via.SERVICE)


def audit(
    wiring: Wiring,
    actor: Actor,
    action: str,
    *,
    server: str = "",
    subject: str = "",
    outcome: str = "done",
    detail: str = "",
) -> None:
    """Record that ``actor`` did ``action`` (or was refused it, or it failed: ``outcome``). What it tells of has
    happened, so a catalog that cannot be written does not raise here: then the service's log alone has the entry."""
    entry = AuditEntry(
        wiring.clock(),
        actor.name,
        str(actor.role),
        str(actor.via),
        action,
        server=server,
        subject=subject,
        outcome=outcome,
        detail=detail[:_LONGEST],
        address=actor.address,
    )
    try:
        entry = wiring.catalog.audit.add(entry)
    except CatalogError as error:
        say("audit-unwritten", f"the audit could not be written: {error.message}", level=logging.ERROR, server=server)
    say("audit", _line(entry), server=server)


def _line(entry: AuditEntry) -> str:
    """One line whatever somebody wrote into it. With number and digest: what is cut off the audit's end shows here."""
    words = {
        "actor": entry.actor,
        "role": entry.role,
        "via": entry.via,
        "address": entry.address,
        "subject": entry.subject,
        "outcome": entry.outcome,
        "detail": entry.detail,
    }
    told = ", ".join(f"{name} {value!r}" for name, value in words.items() if value)
    return f"{entry.action}: {told}; entry {entry.number} {entry.digest}"

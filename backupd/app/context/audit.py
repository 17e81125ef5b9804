"""The audit: who did what, from the command line, REST, the page or the service itself, and how it ended.

``audit`` records one entry; ``audited`` is the block around an action that records how it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from backupd.app.context.logging_setup import say
from backupd.app.context.wiring import Wiring, user
from backupd.model.access import Actor, AuditEntry, Role, Via
from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    CatalogError,
    ConfigurationError,
    ForbiddenError,
    LockedError,
    NotFoundError,
    RefusedError,
    UsageError,
)
from backupd.model.hold import EVERY_SERVER
from backupd.model.text import is_name

_LONGEST = 2000
"""Characters of a detail: a request's text is not kept whole."""


def command_line() -> Actor:
    """Whoever calls the program: who may do that is a matter of the operating system."""
    return Actor(user(), Role.ADMIN, Via.CLI)


def service_actor() -> Actor:
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


REFUSALS = (UsageError, ConfigurationError, RefusedError, NotFoundError, ForbiddenError, ArchivedError, LockedError)
"""Errors after which nothing was done."""


class AuditedAction:
    """One. ``subject`` and ``detail`` may be filled in while it is done."""

    def __init__(self, wiring: Wiring, actor: Actor, action: str, server: str) -> None:
        self.subject = ""
        self.detail = ""
        self._wiring, self._actor, self._action = wiring, actor, action
        self._told = False
        self._server = ""
        self.concerns(server)

    def concerns(self, server: str, detail: str = "") -> None:
        """Which server it was done to, where that was not known before."""
        self._server = server if is_name(server) or server == EVERY_SERVER else ""
        self.detail = detail or self.detail

    def begun(self, subject: str) -> None:
        """It is under way, and what becomes of it stands elsewhere under the id ``subject``."""
        self.subject = subject
        self.tell("done")

    def tell(self, outcome: str, why: str = "") -> None:
        """Once: what is said first stands."""

        if not self._told:
            self._told = True
            audit(
                self._wiring,
                self._actor,
                self._action,
                server=self._server,
                subject=self.subject,
                outcome=outcome,
                detail=": ".join(filter(None, (self.detail, why))),
            )


@contextmanager
def audited(
    wiring: Wiring, actor: Actor, action: str, *, server: str = "", subject: str = "", detail: str = ""
) -> Iterator[AuditedAction]:
    """Around what ``actor`` does: recorded as done when the block ends, as refused or failed when it raises."""
    told = AuditedAction(wiring, actor, action, server)
    told.subject, told.detail = subject, detail
    try:
        yield told
    except BaseException as error:
        why = error.message if isinstance(error, BackupdError) else type(error).__name__
        told.tell("refused" if isinstance(error, REFUSALS) else "failed", why)
        raise
    told.tell("done")

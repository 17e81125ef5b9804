"""What somebody does, told to the audit however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backupd.app.context.wiring import Wiring
from backupd.model.access import Actor
from backupd.model.errors import (
    ArchivedError,
    BackupdError,
    ConfigurationError,
    ForbiddenError,
    LockedError,
    NotFoundError,
    RefusedError,
    UsageError,
)
from backupd.model.hold import EVERY_SERVER
from backupd.model.text import is_name

REFUSALS = (UsageError, ConfigurationError, RefusedError, NotFoundError, ForbiddenError, ArchivedError, LockedError)
"""Errors after which nothing was done."""


class Deed:
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
        from backupd.app.context.audit import audit

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
def deed(
    wiring: Wiring, actor: Actor, action: str, *, server: str = "", subject: str = "", detail: str = ""
) -> Iterator[Deed]:
    """Around what ``actor`` does: recorded as done when the block ends, as refused or failed when it raises."""
    told = Deed(wiring, actor, action, server)
    told.subject, told.detail = subject, detail
    try:
        yield told
    except BaseException as error:
        why = error.message if isinstance(error, BackupdError) else type(error).__name__
        told.tell("refused" if isinstance(error, REFUSALS) else "failed", why)
        raise
    told.tell("done")

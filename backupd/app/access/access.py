"""Who may come in, and who did what: what administrators ask at the command line."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from backupd.app.access import tokens
from backupd.app.context.scope import require_known
from backupd.app.context.wiring import Wiring
from backupd.catalog.audit import Verified
from backupd.model.access import Actor, AuditEntry, Role, Token
from backupd.model.errors import UsageError
from backupd.model.text import parse_duration, parse_time


class Access:
    """By one actor, an administrator. Every method raises errors of backupd.model.errors."""

    def __init__(self, wiring: Wiring, actor: Actor) -> None:
        self._wiring, self._actor = wiring, actor

    def tokens(self) -> tuple[Token, ...]:
        """Newest first, those that count no more, too."""
        return self._wiring.catalog.tokens.list()

    def create(
        self,
        name: str,
        role: str,
        *,
        servers: Collection[str] | None = None,
        expires: str | None = None,
    ) -> tuple[Token, str]:
        """``expires``: a span of time or a moment. Gives the token and its secret, which is nowhere else."""
        try:
            wanted = Role(role)
        except ValueError:
            raise UsageError(f"there is no role {role!r}", hint=f"roles are {', '.join(Role)}") from None
        until = None if expires is None else _moment(expires, self._wiring.clock())
        return tokens.create_token(self._wiring, self._actor, name, wanted, servers=servers, expires_at=until)

    def revoke(self, token_id: str) -> Token:
        return tokens.revoke_token(self._wiring, self._actor, token_id)

    def audit(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        server: str | None = None,
        limit: int | None = None,
    ) -> tuple[AuditEntry, ...]:
        """Newest first. Raises UnknownNameError for a server that is neither known nor in the audit."""
        found = self._wiring.catalog.audit.list(actor=actor, action=action, server=server, limit=limit)
        if not found and server is not None:
            require_known(self._wiring, server)
        return found

    def verify_audit(self) -> Verified:
        return self._wiring.catalog.audit.verify()


def _moment(text: str, now: datetime) -> datetime:
    try:
        return now + parse_duration(text)
    except (ValueError, OverflowError):
        pass
    try:
        return parse_time(text)
    except ValueError as error:
        raise UsageError(
            f"{text!r} is neither a span of time nor a moment: {error}", hint="write 90d, 12h, or 2027-01-01T00:00:00Z"
        ) from None

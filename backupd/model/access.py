"""Who asks and what that person may do; and whether somebody can still open what is sealed for a key."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from backupd.model.text import format_time


class Role(StrEnum):
    """Each may do what those before it may. ``viewer``: look at everything but the audit and other people's access.
    ``operator``: take, prove, verify and copy backups, restore, cancel jobs. ``admin``: delete, apply retention, hold
    and pause, make and revoke tokens, reload, read the audit."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def rank(self) -> int:
        return list(Role).index(self)


class Via(StrEnum):
    """The door by which somebody came in."""

    CLI = "cli"
    API = "api"
    PAGE = "page"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Actor:
    """``name``: of the token, or of the operating system's user; ``servers``: the only ones that are there for it, None
    for all; ``address``: where the request came from; ``token_id``: empty without one."""

    name: str
    role: Role
    via: Via
    servers: frozenset[str] | None = None
    address: str = ""
    token_id: str = ""

    def has(self, role: Role) -> bool:
        return self.role.rank >= role.rank

    def sees(self, server: str) -> bool:
        """May it know of ``server``? Of "", which stands for no server or for all, only who sees all."""
        return self.servers is None or server in self.servers


@dataclass(frozen=True, slots=True)
class Token:
    """``digest``: SHA-256 of the secret, which nobody keeps; times None: never."""

    id: str
    name: str
    role: Role
    digest: str
    created_at: datetime
    created_by: str
    servers: frozenset[str] | None = None
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    revoked_by: str = ""
    last_used_at: datetime | None = None

    def is_valid(self, now: datetime) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def as_json(self) -> dict[str, Any]:
        """Without anything that would let anybody in."""
        return {
            "id": self.id,
            "name": self.name,
            "role": str(self.role),
            "servers": None if self.servers is None else sorted(self.servers),
            "created_at": format_time(self.created_at),
            "created_by": self.created_by,
            "expires_at": _time(self.expires_at),
            "revoked_at": _time(self.revoked_at),
            "revoked_by": self.revoked_by or None,
            "last_used_at": _time(self.last_used_at),
        }


@dataclass(frozen=True, slots=True)
class Session:
    """Somebody logged in to the web page with a token. ``digest``: SHA-256 of what the browser's cookie holds;
    ``csrf``: what each of its forms has to bring along."""

    digest: str
    token_id: str
    csrf: str
    created_at: datetime
    expires_at: datetime
    address: str


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who did what. ``action``: a stable word (``backup-deleted``, ``restore-started``); ``subject``: the id it was
    done to; ``outcome``: ``done``, ``refused`` or ``failed``; ``digest``: over this entry and the one before it, so
    that one that was altered or taken out shows. ``number``: its place, 0 before it has one."""

    at: datetime
    actor: str
    role: str
    via: str
    action: str
    server: str = ""
    subject: str = ""
    outcome: str = "done"
    detail: str = ""
    address: str = ""
    number: int = 0
    digest: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "at": format_time(self.at),
            "actor": self.actor,
            "role": self.role,
            "via": self.via,
            "address": self.address,
            "action": self.action,
            "server": self.server,
            "subject": self.subject,
            "outcome": self.outcome,
            "detail": self.detail,
            "digest": self.digest,
        }


def _time(moment: datetime | None) -> str | None:
    return format_time(moment) if moment else None


THIS_MACHINE = "this machine"
"""``answered_by`` where the restore keyring itself opened it: that proves the copy of the key that lies here only."""

VALID_FOR = timedelta(days=30)
"""How old a challenge may be when it is answered: an older phrase shows what somebody could do then."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """``fingerprint``: of the one key that its phrase was sealed for; ``name``: how the configuration calls that key.
    ``digest``: of the phrase, which itself is kept nowhere in the clear. ``answered_by``: a person, or THIS_MACHINE.
    """

    id: str
    fingerprint: str
    name: str
    issued_at: datetime
    digest: str
    answered_at: datetime | None = None
    answered_by: str = ""

    def has_lapsed(self, now: datetime) -> bool:
        """Whether no answer to it counts any more."""
        return self.issued_at + VALID_FOR < now

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "fingerprint": self.fingerprint,
            "name": self.name,
            "issued_at": format_time(self.issued_at),
            "answered_at": format_time(self.answered_at) if self.answered_at else None,
            "answered_by": self.answered_by,
        }

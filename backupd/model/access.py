"""Who asks and what that person may do; and whether somebody can still open what is sealed for a key."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from backupd.model.document import HIDDEN, Document, json_key


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
class Actor(Document):
    """Who asks, and what that person may do."""

    name: str
    """Of the token, or of the operating system's user."""
    role: Role
    via: Via
    servers: frozenset[str] | None = None
    """The only ones that are there for it; null for all."""
    token_id: str = field(default="", metadata=json_key("token"), kw_only=True)
    """Empty without one."""
    address: str = ""
    """Where the request came from."""

    def has(self, role: Role) -> bool:
        return self.role.rank >= role.rank

    def sees(self, server: str) -> bool:
        """May it know of ``server``? Of "", which means no server or all, only who sees all."""
        return self.servers is None or server in self.servers


@dataclass(frozen=True, slots=True)
class Token(Document):
    """Who may come in. Times None: never."""

    id: str
    name: str
    role: Role
    digest: str = field(metadata=HIDDEN)
    """SHA-256 of the secret, which nobody keeps."""
    servers: frozenset[str] | None = field(default=None, kw_only=True)
    """The only ones that are there for it; null for all."""
    created_at: datetime
    created_by: str
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    revoked_by: str = field(default="", metadata=json_key(or_null=True))
    last_used_at: datetime | None = None

    def is_valid(self, now: datetime) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


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
class AuditEntry(Document):
    """Who did what, from where."""

    number: int = field(default=0, kw_only=True)
    """Its place, 0 before it has one."""
    at: datetime
    actor: str
    role: str
    via: str
    address: str = field(default="", kw_only=True)
    action: str
    """A stable word: ``backup-deleted``, ``restore-started`` ..."""
    server: str = ""
    subject: str = ""
    """The id of what it was done to."""
    outcome: str = "done"
    """``done``, ``refused`` or ``failed``."""
    detail: str = ""
    digest: str = ""
    """Over this entry and the one before it, so that one that was altered or taken out shows."""


THIS_MACHINE = "this machine"
"""``answered_by`` where the restore keyring itself opened it: that proves the copy of the key that is here only."""

VALID_FOR = timedelta(days=30)
"""How old a challenge may be when it is answered: an older phrase shows what somebody could do then."""


@dataclass(frozen=True, slots=True)
class Challenge(Document):
    """``fingerprint``: of the one key that its phrase was sealed for; ``name``: how the configuration calls that key.
    ``digest``: of the phrase, which itself is kept nowhere in the clear. ``answered_by``: a person, or THIS_MACHINE.
    """

    id: str
    fingerprint: str
    name: str
    issued_at: datetime
    digest: str = field(metadata=HIDDEN)
    answered_at: datetime | None = None
    answered_by: str = ""

    def has_lapsed(self, now: datetime) -> bool:
        """Whether no answer to it counts any more."""
        return self.issued_at + VALID_FOR < now

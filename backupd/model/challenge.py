"""The question whether somebody can still open what is sealed for a key."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from backupd.model.clock import format_time

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
